"""Whether speculation loses anything: texts against those of plain decoding by the same services.

    python -m bench.quality [--target DIR] [--draft DIR] [--dtype float32 --dtype bfloat16] [--json FILE] [--plot FILE]

For every prompt: plain decoding with two seeds, overlapped coupled decoding with the first of these, which should write
the same text, and overlapped rejection and block decoding with seeds of their own, which should write texts of the same
distribution; greedy too, plain and overlapped. Where texts of one seed part, the target scores both tokens again, in
the type of the weights and in a higher one: it should be a tie to the precision of the type. All others are compared
with the plain texts of the second seed, by BLEU and by a permutation test on their n-grams; what the first seed's plain
texts get there is the floor that no method can be expected to undercut.
"""

import asyncio
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from bench import quality_report
from bench.pair import (
    Draft,
    PromptFile,
    Target,
    drafting_options,
    draw,
    errors_told,
    progress_bar,
    prompts_of,
    share_cores,
    stored_draft,
    tokenized,
    write_json,
)
from bench.quality_report import ANOTHER_SEED, BLOCK, COUPLED, PLAIN, REJECTION, Outcome, Text, outcome
from foredraft.cli.up import Stack
from foredraft.default_model import ensure
from orchestrator.client import AsyncClient
from orchestrator.client import Options as Request

PROMPTS = 100
# Left to themselves, the services might find that drafting does not pay here, and there would be nothing to compare.
DRAFT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured; see the command line."""

    target: str
    draft: str
    dtypes: Sequence[str]
    temperature: float
    max_new_tokens: int
    streams: int


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode; ways with one `seed` share the seed of each prompt."""

    name: str
    mode: Literal["plain", "overlapped"]
    method: Literal["coupled", "rejection", "block"]
    seed: int

    def seed_of(self, prompt: int) -> int:
        """The seed of a prompt's text."""
        return 1_000_000 * self.seed + prompt


GREEDY = (Way(PLAIN, "plain", "coupled", 0), Way(COUPLED, "overlapped", "coupled", 0))
SAMPLING = (
    *GREEDY,
    Way(ANOTHER_SEED, "plain", "coupled", 1),
    Way(REJECTION, "overlapped", "rejection", 2),
    Way(BLOCK, "overlapped", "block", 3),
)
app = typer.Typer(add_completion=False)


@app.command()
def main(
    target: Target = None,
    draft: Draft = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Of all weights; may be repeated; float32, bfloat16.")] = None,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of sampling; greedy texts are compared too.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of a text.")] = 64,
    prompts: PromptFile = None,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Texts that are written at a time.")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all texts and numbers there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the distances there.")] = None,
) -> None:
    """Compare what speculation writes with what plain decoding writes."""
    console = Console(highlight=False, soft_wrap=True)
    with errors_told():
        name = target or str(ensure())
        draft, texts = draft or stored_draft(name), prompts_of(prompts, PROMPTS)
        dtypes = tuple(dict.fromkeys(dtype or ("float32", "bfloat16")))
        options = Options(name, draft, dtypes, temperature, max_new_tokens, streams)
        console.print(
            f"{Path(name).name}, draft {Path(draft).name}: {len(texts)} prompts, texts of up to {max_new_tokens} "
            f"tokens, {streams} at a time."
        )
        outcomes = asyncio.run(run(options, texts, console))
    for one in outcomes:
        quality_report.show(one, console)
    console.print(f"\n{quality_report.LEGEND}")
    if json_file:
        setting = {**asdict(options), "target": Path(name).name, "draft": Path(draft).name}
        setting |= {"prompts": texts, "python": platform.python_version(), "cores": os.cpu_count()}
        write_json(json_file, {**setting, "outcomes": [asdict(one) for one in outcomes]})
    if plot_file:
        draw(partial(quality_report.plot, outcomes, plot_file))
    raise typer.Exit(1 if any(one.beyond for one in outcomes) else 0)


async def run(options: Options, texts: Sequence[str], console: Console) -> list[Outcome]:
    """Everything, with the services in one type after the other."""
    outcomes = []
    threads, draft_threads = share_cores(None, None, options.draft)
    with progress_bar(console) as progress:
        total = len(options.dtypes) * len(texts) * (len(GREEDY) + len(SAMPLING))
        task = progress.add_task("", total=total)
        for dtype in options.dtypes:
            progress.update(task, description=f"{dtype}, starting the services")
            services = {
                "model": options.target,
                "dtype": dtype,
                "listen": "127.0.0.1:0",
                "threads": threads,
                "draft_threads": draft_threads,
                # As many again may be closing.
                "max_sessions": 2 * options.streams,
                "draft_max_sessions": 2 * options.streams,
                **drafting_options(options.target, options.draft, dtype),
            }
            written = {}
            async with Stack(services) as stack, AsyncClient(stack.address) as client:
                prompts = await tokenized(client, texts)
                for temperature, ways in ((0.0, GREEDY), (options.temperature, SAMPLING)):
                    progress.update(task, description=f"{dtype}, T={temperature:g}")
                    written[temperature] = await write(options, client, prompts, temperature, ways, progress, task)
            for temperature, ways_texts in written.items():
                progress.update(task, description=f"{dtype}, T={temperature:g}, comparing")
                seeds = [SAMPLING[0].seed_of(prompt) for prompt in range(len(prompts))]
                compare = partial(outcome, options.target, dtype, temperature, prompts, seeds, ways_texts)
                outcomes.append(await asyncio.to_thread(compare))
    return outcomes


async def write(
    options: Options,
    client: AsyncClient,
    prompts: Sequence[list[int]],
    temperature: float,
    ways: Sequence[Way],
    progress: Progress,
    task: TaskID,
) -> Mapping[str, list[Text]]:
    """The texts of all ways, in the order of the prompts; so many prompts at a time, each in all ways in turn."""
    free = asyncio.Semaphore(options.streams)

    async def of_prompt(number: int) -> list[Text]:
        texts = []
        async with free:
            for way in ways:
                request: Request = {"temperature": temperature, "seed": way.seed_of(number)}
                request |= {"max_new_tokens": options.max_new_tokens, "mode": way.mode, "method": way.method}
                if way.mode == "overlapped":
                    request["draft_tokens"] = DRAFT_TOKENS
                result = await client.generate(prompts[number], **request)
                completion = result.completions[0]
                statistics: Any = completion.statistics
                texts.append(Text(completion.text, completion.token_ids, statistics.drafted, statistics.accepted))
                progress.advance(task)
        return texts

    every = await asyncio.gather(*(of_prompt(number) for number in range(len(prompts))))
    return {way.name: [texts[i] for texts in every] for i, way in enumerate(ways)}


if __name__ == "__main__":
    app()
