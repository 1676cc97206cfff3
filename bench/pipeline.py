"""What the services cost beside the models: emulated models against the closed forms, in one run.

    python -m bench.pipeline [--ratio 0.1 --ratio 0.2] [--accept 0.8] [--draft-tokens K] [--json FILE] [--plot FILE]

All is real but the forward passes, which are waits; see foredraft.engine.emulated. One stream decodes plain, sequential
and overlapped in turn, with fixed k and with the controller's; then many streams at once show how busy the target is.
The closed forms: a round of k draft tokens emits E = (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al., arXiv
2211.17192); it takes k t_d + t_t(k+1) in turns, and h max(k t_d, t_t(k+1)) + (1-h) (k t_d + t_t(k+1)) overlapped.
"""

import asyncio
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from bench import pipeline_report
from bench.contestants import Run, Work, service
from bench.pair import draw, progress_bar
from bench.pipeline_report import Busy, Measured, measured
from foredraft.cli.supervisor import ChildError
from foredraft.cli.up import Stack
from foredraft.config import ConfigError
from foredraft.emulation import parse
from foredraft.engine.emulated import tokenizer
from orchestrator.client import AsyncClient, Client, GenerationError

# Mode, and whether k is fixed.
Way = tuple[Literal["plain", "sequential", "overlapped"], bool]
WAYS: tuple[Way, ...] = (
    ("plain", True),
    ("sequential", True),
    ("overlapped", True),
    ("sequential", False),
    ("overlapped", False),
)

# A prompt's last tokens decide how the emulated text goes on.
PROMPTS = ("tell me", "say more", "and why", "how so", "go on", "what else", "who knows", "so what")
# Draft lengths that the controller may choose.
MOST_DRAFT_TOKENS = 16
BUSY_LINE = re.compile(r"the model computed ([\d.]+) s of the ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured; see the command line. `branches` are verdicts that the draft prepares for."""

    ratios: Sequence[float]
    target: str
    accept: float
    draft_tokens: int | None
    branches: int
    max_new_tokens: int
    repeats: int
    streams: int

    def emulate(self, ratio: float) -> str:
        """The emulated pair whose draft's pass takes this part of the target's over no tokens."""
        target = parse(f"target={self.target}").target
        if target is None:
            raise RuntimeError("parse returned no target")
        return f"target={self.target},draft={1e3 * ratio * target.base_s:g}ms,accept={self.accept:g}"

    def fixed(self, ratio: float) -> int:
        """The draft length that is not the controller's: what the draft can do while the target verifies."""
        return self.draft_tokens or max(1, min(MOST_DRAFT_TOKENS, round(1 / ratio) - 1))


app = typer.Typer(add_completion=False)


@app.command()
def main(
    ratio: Annotated[list[float] | None, typer.Option(min=0.001, help="Draft pass / target pass; 0.1 and 0.2.")] = None,
    target: Annotated[str, typer.Option(help="What a pass of the target takes.")] = "20ms+0.2ms/token",
    accept: Annotated[float, typer.Option(min=0, max=1, help="Acceptance rate of draft tokens.")] = 0.8,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, max=64, help="Fixed k; what the draft can do in a pass of the target.")
    ] = None,
    branches: Annotated[int, typer.Option(min=1, max=64, help="Verdicts that the draft prepares for.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of every text.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="Texts of each contestant.")] = 4,
    streams: Annotated[int, typer.Option(min=0, help="Streams at once; 0: leave that out.")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the speeds there.")] = None,
) -> None:
    """Measure the services on emulated models against the closed forms."""
    console = Console(highlight=False, soft_wrap=True)
    load_average = os.getloadavg()[0]
    try:
        ratios = tuple(dict.fromkeys(ratio or (0.1, 0.2)))
        options = Options(ratios, target, accept, draft_tokens, branches, max_new_tokens, repeats, streams)
        console.print(heading(options, load_average))
        rows, busy = asyncio.run(measure(options, console))
    except (ChildError, ConfigError, GenerationError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    pipeline_report.show(rows, busy, console)
    if json_file:
        setting = {**asdict(options), "python": platform.python_version(), "cores": os.cpu_count()}
        pipeline_report.write_json(json_file, {**setting, "load_average_before": load_average}, rows, busy)
    if plot_file:
        draw(partial(pipeline_report.plot, rows, plot_file))
    raise typer.Exit(0 if pipeline_report.same_texts(rows) else 1)


def heading(options: Options, load_average: float) -> str:
    """What is measured."""
    return (
        f"Emulated target of {options.target}, acceptance {options.accept:g}, {options.branches} branches; "
        f"{options.repeats} texts of {options.max_new_tokens} tokens; load average before: {load_average:.1f}."
    )


async def measure(options: Options, console: Console) -> tuple[list[Measured], list[Busy]]:
    """One stream in all ways, then many, for each ratio."""
    rows: list[Measured] = []
    busy: list[Busy] = []
    with progress_bar(console) as progress:
        texts = len(WAYS) * (options.repeats + 1) + options.streams
        task = progress.add_task("", total=len(options.ratios) * texts)

        def advance(description: str, count: int = 1) -> None:
            progress.update(task, description=description, advance=count)

        for ratio in options.ratios:
            advance(f"c={ratio:g}, starting the services", 0)
            async with Stack(stack_options(options, ratio)) as stack:
                # The event loop watches over the services meanwhile.
                rows += await asyncio.to_thread(one_stream, options, ratio, stack.address, advance)
            if options.streams:
                busy.append(await many_streams(options, ratio, advance))
    return rows, busy


def stack_options(options: Options, ratio: float) -> dict[str, Any]:
    """The services' options."""
    places = max(16, options.streams)
    return {
        "emulate": options.emulate(ratio),
        "drafter": "model",
        "listen": "127.0.0.1:0",
        "max_draft_tokens": MOST_DRAFT_TOKENS,
        "branches": options.branches,
        "max_sessions": places,
        "draft_max_sessions": places,
        "max_concurrent_requests": places,
        # A machine that has other work to do must not turn rounds into plain ones.
        "draft_timeout_s": 10.0,
    }


def one_stream(options: Options, ratio: float, address: str, advance: Callable[..., None]) -> list[Measured]:
    """All ways in turn, after one text of each to warm up; who begins changes from text to text."""
    fixed, runs = options.fixed(ratio), {way: list[Run]() for way in WAYS}
    with Client(address) as client:
        decode = {way: service(client, way[0], fixed if way[1] else None) for way in WAYS}
        for repeat in range(-1, options.repeats):
            first = repeat % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                advance(f"c={ratio:g}, {name(way, fixed)}", 0)
                run = decode[way](work(max(repeat, 0), options))
                advance(f"c={ratio:g}, {name(way, fixed)}")
                if repeat >= 0:
                    runs[way].append(run)
    emulation = parse(options.emulate(ratio))
    return [measured(name(way, fixed), way[0], ratio, emulation, runs[way], runs[WAYS[0]]) for way in WAYS]


def name(way: Way, fixed: int) -> str:
    """A way to decode, for people."""
    mode, is_fixed = way
    return mode if mode == "plain" else f"{mode}, k={fixed}" if is_fixed else f"{mode}, own k"


def work(number: int, options: Options) -> Work:
    """One of the prompts."""
    prompt = f"{number}: {PROMPTS[number % len(PROMPTS)]}"
    return Work(number, tokenizer()(prompt)["input_ids"], 0.0, 0, options.max_new_tokens)


async def many_streams(options: Options, ratio: float, advance: Callable[..., None]) -> Busy:
    """Many streams at once, and what the target says on stopping of the time it computed."""
    lines: list[str] = []
    async with (
        Stack(stack_options(options, ratio), on_line=lambda name, line: lines.append(line)) as stack,
        AsyncClient(stack.address) as client,
    ):

        async def decode(number: int) -> None:
            one, k = work(number, options), options.fixed(ratio)
            await client.generate(
                one.prompt, temperature=0, max_new_tokens=one.max_new_tokens, mode="overlapped", draft_tokens=k
            )
            advance(f"c={ratio:g}, {options.streams} streams")

        started = time.perf_counter()
        await asyncio.gather(*(decode(number) for number in range(options.streams)))
        elapsed = time.perf_counter() - started
    match = next((match for line in lines if (match := BUSY_LINE.search(line))), None)
    if match is None:
        raise ChildError("the target did not say how long it computed; its log level must be info")
    tokens = options.streams * options.max_new_tokens
    return Busy(ratio, options.streams, tokens / elapsed, float(match[1]) / float(match[2]))


if __name__ == "__main__":
    app()
