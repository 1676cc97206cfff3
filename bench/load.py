"""Many streams at once, with a good draft, a useless one and none: throughput, time to first token, token latency.

    python -m bench.load [--target DIR] [--draft DIR] [--streams 1 --streams 8] [--json FILE] [--plot FILE]

For every number of streams the contestants take turns at bursts: so many streams begin together and each writes a text
of the same length, end of sequence ignored. All contestants get the same prompts and seeds, each has services of its
own, and so finds no keys and values that another one left. The useless draft has the good one's shape and random
weights, and drafts alone, without n-grams. Needs memory for the target four times.
"""

import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from bench import load_report
from bench.load_report import Burst, Measured, Text
from bench.pair import (
    BUSY,
    Draft,
    DraftCores,
    Dtype,
    PromptFile,
    Target,
    TargetCores,
    drafting_options,
    draw,
    errors_told,
    progress_bar,
    prompts_of,
    share_cores,
    stored_draft,
    tokenized,
    useless,
    write_json,
)
from bench.summary import PLAIN, PLAIN_ALL_CORES
from foredraft.cli.up import Stack, available_cores
from foredraft.default_model import ensure
from orchestrator.client import AsyncClient

GOOD, USELESS = "good draft", "useless draft"
PROMPTS = 60


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured; see the command line."""

    target: str
    draft: str
    streams: Sequence[int]
    temperature: float
    max_new_tokens: int
    bursts: int
    max_model_len: int
    target_cores: int
    draft_cores: int
    dtype: str

    @property
    def all_cores(self) -> int:
        """The cores of target and draft."""
        return self.target_cores + self.draft_cores


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and the seed of its text."""

    prompt: list[int]
    seed: int


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to decode. `cores` says what it may use."""

    name: str
    cores: str
    client: AsyncClient
    mode: Literal["plain", "overlapped"]


app = typer.Typer(add_completion=False)


@app.command()
def main(
    target: Target = None,
    draft: Draft = None,
    streams: Annotated[list[int] | None, typer.Option(min=1, max=64, help="May be repeated; 1, 2, 4, 8, 16.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of every text.")] = 64,
    prompts: PromptFile = None,
    bursts: Annotated[int, typer.Option(min=1, help="Of each contestant at each number of streams.")] = 12,
    max_model_len: Annotated[int, typer.Option(min=3, help="Most tokens of prompt and text.")] = 512,
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    dtype: Dtype = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw throughput and latency there.")] = None,
) -> None:
    """Measure the services under load, with a good draft, a useless one and none."""
    console = Console(highlight=False, soft_wrap=True)
    load_average = os.getloadavg()[0]
    with errors_told():
        name = target or str(ensure())
        draft = draft or stored_draft(name)
        texts = prompts_of(prompts, PROMPTS)
        numbers = tuple(sorted(set(streams or (1, 2, 4, 8, 16))))
        cores = share_cores(target_cores, draft_cores, draft)
        options = Options(name, draft, numbers, temperature, max_new_tokens, bursts, max_model_len, *cores, dtype)
        console.print(heading(options, load_average))
        measured = asyncio.run(run(options, texts, console))
    summaries = load_report.summarise(measured)
    load_report.show(summaries, measured, console)
    if json_file:
        setting = {**asdict(options), "python": platform.python_version(), "load_average_before": load_average}
        setting |= {"target": Path(name).name, "draft": Path(draft).name}
        write_json(json_file, {**setting, **load_report.content(summaries, measured)})
    if plot_file:
        draw(partial(load_report.plot, summaries, plot_file))


def heading(options: Options, load_average: float) -> str:
    """What is measured, and who has which cores."""
    return (
        f"{Path(options.target).name} in {options.dtype}, draft {Path(options.draft).name}, temperature "
        f"{options.temperature:g}; {options.bursts} bursts of texts of {options.max_new_tokens} tokens; load average "
        f"before: {load_average:.1f}.\n"
        f"The target has {options.target_cores} cores, draft and orchestrator {options.draft_cores}; "
        f"{PLAIN_ALL_CORES}: the target has all {options.all_cores}."
        + (BUSY if load_average > options.all_cores / 2 else "")
    )


async def run(options: Options, texts: Sequence[str], console: Console) -> Measured:
    """Start the services of every contestant, and measure."""
    pin = sys.platform == "linux"
    if pin:
        # What is started from here on has these cores at most.
        os.sched_setaffinity(0, available_cores()[: options.all_cores])
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foredraft-")))
        contestants = []
        for name, services in services_of(options, directory).items():
            console.print(f"Starting the services: {name} ...")
            started = await stack.enter_async_context(Stack(services, pin=pin and name != PLAIN_ALL_CORES))
            client = await stack.enter_async_context(AsyncClient(started.address))
            cores = {PLAIN_ALL_CORES: f"{options.all_cores}", PLAIN: f"{options.target_cores}"}
            both = f"{options.target_cores} + {options.draft_cores}"
            mode: Literal["plain", "overlapped"] = "plain" if name in cores else "overlapped"
            contestants.append(Contestant(name, cores.get(name, both), client, mode))
        prompts = await tokenized(contestants[0].client, texts)
        return await measure(options, contestants, prompts, console)


def services_of(options: Options, directory: Path) -> dict[str, dict[str, Any]]:
    """The services' options by contestant. Without a draft model's directory there is no useless draft."""
    places = max(options.streams)
    common = {
        "model": options.target,
        "dtype": options.dtype,
        "listen": "127.0.0.1:0",
        "max_model_len": options.max_model_len,
        "draft_max_model_len": options.max_model_len,
        "max_sessions": places,
        "draft_max_sessions": places,
        "max_concurrent_requests": places,
    }
    alone = {**common, "speculation_enabled": False}
    shared = {**common, "threads": options.target_cores, "draft_threads": options.draft_cores}
    drafting = drafting_options(options.target, options.draft, options.dtype)
    services = {
        PLAIN_ALL_CORES: {**alone, "threads": options.all_cores},
        PLAIN: {**alone, "threads": options.target_cores},
        GOOD: {**shared, **drafting},
    }
    if drafting and (model := Path(drafting["draft_model"])).is_dir():
        random = {"draft_model": str(useless(model, directory / "useless")), "drafter": "model"}
        services[USELESS] = {**shared, **drafting, **random}
    return services


async def measure(
    options: Options, contestants: Sequence[Contestant], prompts: Sequence[list[int]], console: Console
) -> Measured:
    """All bursts, after one of each contestant to warm up; who begins changes from burst to burst."""
    measured: dict[int, dict[str, list[Burst]]] = {}
    seed = 0
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(options.streams) * (options.bursts + 1) * len(contestants))
        for streams in options.streams:
            measured[streams] = {contestant.name: [] for contestant in contestants}
            for number in range(-1, options.bursts):
                works = [Work(prompts[i % len(prompts)], i) for i in range(seed, seed + streams)]
                seed += streams
                first = number % len(contestants)
                for contestant in (*contestants[first:], *contestants[:first]):
                    progress.update(task, description=f"{streams} streams, {contestant.name}")
                    result = await burst(contestant, works, options)
                    progress.advance(task)
                    if number >= 0:
                        measured[streams][contestant.name].append(result)
    return measured


async def burst(contestant: Contestant, works: Sequence[Work], options: Options) -> Burst:
    """Decode all works at once."""
    started = time.perf_counter()
    texts = await asyncio.gather(*(decode(contestant, work, options, started) for work in works))
    return Burst(list(texts), time.perf_counter() - started)


async def decode(contestant: Contestant, work: Work, options: Options, started: float) -> Text:
    """One stream of a burst that began at `started`, from the request to its end."""
    text, last = Text(), time.perf_counter()
    async with contestant.client.stream(
        work.prompt,
        temperature=options.temperature,
        seed=work.seed,
        max_new_tokens=options.max_new_tokens,
        ignore_eos=True,
        mode=contestant.mode,
    ) as stream:
        async for chunk in stream:
            if not (count := len(chunk.token_ids)):
                continue
            now = time.perf_counter()
            if text.token_ids:
                text.latencies += [(now - last) / count] * count
            else:
                text.first_token_s = now - last
            text.token_ids += chunk.token_ids
            text.arrivals.append((now - started, count))
            last = now
    if statistics := stream.result.completions[0].statistics:
        text.drafted, text.accepted = statistics.drafted, statistics.accepted
        text.degraded = statistics.degraded_reason
    return text


if __name__ == "__main__":
    app()
