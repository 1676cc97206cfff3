"""`foredraft demo`: the same answer with and without speculation, from a small model that is fetched once."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foredraft.cli.supervisor import ChildError
from foredraft.cli.up import Stack, available_cores
from foredraft.config import ConfigError, Mode

# Looking up n-grams pays where an answer takes up the words of its prompt.
PROMPT = """Repeat the following text word for word.

The sun rises in the east and sets in the west. The moon follows the sun across the sky, and the stars follow \
the moon. When the sun sets in the west, the moon rises in the east, and the stars come out one by one."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured answer: the client's `completion` from a target with so many CPU threads."""

    title: str
    threads: int
    completion: Any


def tokens_per_second(completion: Any) -> float:
    """Speed after the first token, which includes reading the prompt."""
    seconds = completion.statistics.total_time - completion.statistics.time_to_first_token
    return float((completion.completion_token_count - 1) / seconds) if seconds > 0 else 0.0


def demo(
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask the model.")] = PROMPT,
    draft: Annotated[
        str,
        typer.Option("--draft", help="ngram, self-prune:N (the target's first N layers), or a model's directory."),
    ] = "ngram",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Length of the answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy decoding.")] = 0.7,
    seed: Annotated[int, typer.Option("--seed", help="Decides all random draws.")] = 0,
) -> None:
    """Fetch a small model, answer a prompt with and without speculation, and compare."""
    from foredraft.default_model import DefaultModelError, ensure

    console = Console(highlight=False, soft_wrap=True)
    try:
        model = ensure()
        options = {"model": str(model), "dtype": "float32", "listen": "127.0.0.1:0", **draft_options(draft, model)}
        request = {
            "messages": [{"role": "user", "content": prompt}],
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        runs = asyncio.run(compare(options, request, draft, console))
    except (DefaultModelError, ChildError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(report(runs, prompt, console))


def draft_options(draft: str, model: Path) -> dict[str, Any]:
    """The options that make the draft: "ngram", "self-prune:N" or a model."""
    if draft == "ngram":
        return {}
    kind, _, layers = draft.partition(":")
    if kind != "self-prune":
        return {"draft_model": draft, "draft_dtype": "float32"}
    if not layers.isdecimal() or int(layers) == 0:
        raise ConfigError(f"draft: self-prune needs a number of layers, such as self-prune:8, not {draft}")
    return {"draft_model": str(model), "draft_layers": int(layers), "draft_dtype": "float32"}


async def compare(options: dict[str, Any], request: dict[str, Any], draft: str, console: Console) -> list[Run]:
    """Answer on one stack without and with speculation, then without on one whose target has all cores."""
    every = len(available_cores())
    async with started(options, console) as stack:
        plain, speculative = await answers(stack, request, ("plain", "overlapped"), console)
        name = f"draft {draft.rpartition('/')[2]}"
        runs = [Run("plain", stack.threads, plain), Run(name, stack.threads, speculative)]
    if every > stack.threads:
        async with started({**options, "threads": every, "speculation_enabled": False}, console) as stack:
            runs.append(Run("plain", every, *await answers(stack, request, ("plain",), console)))
    return runs


@asynccontextmanager
async def started(options: dict[str, Any], console: Console) -> AsyncIterator[Stack]:
    """A stack, shown while it starts."""
    stack = Stack(options)
    with console.status(f"starting the services, the target with {stack.threads} threads") as status:
        async with stack:
            status.stop()
            yield stack


async def answers(stack: Stack, request: dict[str, Any], modes: Sequence[Mode], console: Console) -> list[Any]:
    """The answer in each mode: of three, taken in turns after one to warm up, the one of median speed."""
    from orchestrator.client import AsyncClient

    completions: dict[Mode, list[Any]] = {mode: [] for mode in modes}
    async with AsyncClient(stack.address) as client:
        for attempt in range(4):
            for mode in modes:
                with console.status(f"answering, {mode}, {stack.threads} threads ({attempt or 'warming up'})"):
                    completions[mode].append((await client.generate(**request, mode=mode)).completions[0])
    return [sorted(answers[1:], key=tokens_per_second)[1] for answers in completions.values()]


def report(runs: list[Run], prompt: str, console: Console) -> int:
    """Print text and table; returns the exit code: 0 if both texts are the same."""
    plain, speculative = runs[0], runs[1]
    console.print(f"\n[bold]Prompt[/]  {escape(prompt)}\n\n[bold]Answer[/]  {escape(speculative.completion.text)}\n")
    table = Table("", "threads", "tokens/s", "times", "accepted", "per round", "foreseen", box=None)
    for run in runs:
        statistics, speed = run.completion.statistics, tokens_per_second(run.completion)
        table.add_row(
            run.title,
            str(run.threads),
            f"{speed:.1f}",
            f"{speed / tokens_per_second(plain.completion):.2f}",
            fraction(statistics.accepted, statistics.drafted),
            f"{statistics.mean_accepted_length:.2f}",
            fraction(statistics.hits, statistics.hits + statistics.misses),
        )
    console.print(table)
    console.print(
        "\nthreads: of the target; times: speed against the first row; accepted: of the drafted tokens;\n"
        "per round: tokens for each pass of the target; foreseen: verdicts whose continuation was ready"
    )
    if speculative.completion.statistics.degraded_reason:
        console.print(f"There was no speculation: {speculative.completion.statistics.degraded_reason}")
    same = plain.completion.token_ids == speculative.completion.token_ids
    console.print(
        f"Both texts of {len(plain.completion.token_ids)} tokens are {'the same' if same else 'NOT the same'}."
    )
    return 0 if same else 1


def fraction(part: int, whole: int) -> str:
    """ "3 of 4", or a dash for nothing of nothing."""
    return f"{part} of {whole}" if whole else "-"
