"""`foredraft demo`: the same answers with and without speculation, from a small model that is fetched once."""

import asyncio
import shlex
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
from foredraft.config import ConfigError
from foredraft.settings import Mode

# A draft has to guess a free answer; what an answer takes up of its prompt can be looked up.
PROMPTS = (
    "Why do leaves change their color in autumn?",
    """Correct the spelling mistakes in this text, and change nothing else:

The sun rises in the east and sets in the west. The moon folows the sun across the sky, and the stars folow the moon. \
When the sun sets in the west, the moon rises in the east, and the stars come out one by one.""",
)
# Answers in each mode that are measured, after one to warm up.
REPEATS = 2


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
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="What to ask the model, in place of two prompts.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="trained (the draft in drafts/), ngram, self-prune:N (the target's first N layers), or a model's "
            "directory. Default: trained where drafts/ is at hand, else ngram.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Length of an answer.")] = 96,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy decoding.")] = 0.7,
    seed: Annotated[int, typer.Option("--seed", help="Decides all random draws.")] = 0,
) -> None:
    """Fetch a small model, answer prompts with and without speculation, and compare."""
    from foredraft.default_model import DRAFT, DefaultModelError, ensure

    draft = draft or ("trained" if DRAFT.is_dir() else "ngram")
    console = Console(highlight=False, soft_wrap=True)
    try:
        model = ensure()
        options = {"model": str(model), "dtype": "float32", "listen": "127.0.0.1:0", **draft_options(draft, model)}
        requests = [
            {
                "messages": [{"role": "user", "content": text}],
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": seed,
            }
            for text in ([prompt] if prompt is not None else PROMPTS)
        ]
        runs = asyncio.run(compare(options, requests, draft, console))
    except (DefaultModelError, ChildError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    same = report(requests, runs, console)
    models = {"--model": options["model"], "--draft-model": options.get("draft_model", "")}
    flags = " ".join(f"{flag} {shlex.quote(path)}" for flag, path in models.items() if path)
    console.print(f"\nTo serve what this ran: foredraft up {flags}")
    raise typer.Exit(same)


def draft_options(draft: str, model: Path) -> dict[str, Any]:
    """The options that make the draft: "trained", "ngram", "self-prune:N" or a model."""
    if draft == "ngram":
        return {}
    if draft == "trained":
        from foredraft.default_model import ensure_draft

        return {"draft_model": str(ensure_draft(model)), "draft_dtype": "float32"}
    kind, _, layers = draft.partition(":")
    if kind != "self-prune":
        return {"draft_model": draft, "draft_dtype": "float32"}
    if not layers.isdecimal() or int(layers) == 0:
        raise ConfigError(f"draft: self-prune needs a number of layers, such as self-prune:8, not {draft}")
    return {"draft_model": str(model), "draft_layers": int(layers), "draft_dtype": "float32"}


async def compare(
    options: dict[str, Any], requests: Sequence[dict[str, Any]], draft: str, console: Console
) -> list[list[Run]]:
    """For each request: answers of one stack without and with speculation, then without by a target with all cores."""
    every = len(available_cores())
    async with started(options, console, pin=sys.platform == "linux" and every > 1) as stack:
        name = f"draft {draft.rpartition('/')[2]}"
        runs = []
        for request in requests:
            plain, speculative = await answers(stack, request, ("plain", "overlapped"), console)
            runs.append([Run("plain", stack.threads, plain), Run(name, stack.threads, speculative)])
    if every > stack.threads:
        async with started({**options, "threads": every, "speculation_enabled": False}, console) as stack:
            for request, measured in zip(requests, runs, strict=True):
                measured.append(Run("plain", every, *await answers(stack, request, ("plain",), console)))
    return runs


@asynccontextmanager
async def started(options: dict[str, Any], console: Console, *, pin: bool = False) -> AsyncIterator[Stack]:
    """A stack, shown while it starts; with `pin`, target and draft keep to cores of their own."""
    stack = Stack(options, pin=pin)
    with console.status(f"starting the services, the target with {stack.threads} threads") as status:
        async with stack:
            status.stop()
            yield stack


async def answers(stack: Stack, request: dict[str, Any], modes: Sequence[Mode], console: Console) -> list[Any]:
    """The answer in each mode: the fastest of some, taken in turns after one to warm up."""
    from orchestrator.client import AsyncClient

    completions: dict[Mode, list[Any]] = {mode: [] for mode in modes}
    async with AsyncClient(stack.address) as client:
        for attempt in range(1 + REPEATS):
            for mode in modes:
                with console.status(f"answering, {mode}, {stack.threads} threads ({attempt or 'warming up'})"):
                    completions[mode].append((await client.generate(**request, mode=mode)).completions[0])
    return [max(answers[1:], key=tokens_per_second) for answers in completions.values()]


def report(requests: Sequence[dict[str, Any]], runs: Sequence[list[Run]], console: Console) -> int:
    """Print texts and tables; returns the exit code: 0 if all texts are the same."""
    same = True
    for request, (plain, speculative, *more) in zip(requests, runs, strict=True):
        prompt, answer = request["messages"][-1]["content"], speculative.completion
        console.print(f"\n[bold]Prompt[/]  {escape(prompt)}\n\n[bold]Answer[/]  {escape(answer.text)}\n")
        console.print(table([plain, speculative, *more]))
        if answer.statistics.degraded_reason:
            console.print(f"There was no speculation: {answer.statistics.degraded_reason}")
        equal = plain.completion.token_ids == answer.token_ids
        console.print(f"Both texts of {len(answer.token_ids)} tokens are {'the same' if equal else 'NOT the same'}.")
        same = same and equal
    console.print(
        "\nthreads: of the target; times: speed against the first row; accepted: of the drafted tokens;\n"
        "per round: tokens for each pass of the target; foreseen: verdicts whose continuation was ready"
    )
    return 0 if same else 1


def table(runs: Sequence[Run]) -> Table:
    """The runs of one prompt, compared with the first."""
    made = Table("", "threads", "tokens/s", "times", "accepted", "per round", "foreseen", box=None)
    for run in runs:
        statistics, speed = run.completion.statistics, tokens_per_second(run.completion)
        made.add_row(
            run.title,
            str(run.threads),
            f"{speed:.1f}",
            f"{speed / tokens_per_second(runs[0].completion):.2f}",
            fraction(statistics.accepted, statistics.drafted),
            f"{statistics.mean_accepted_length:.2f}",
            fraction(statistics.hits, statistics.hits + statistics.misses),
        )
    return made


def fraction(part: int, whole: int) -> str:
    """ "3 of 4", or a dash for nothing of nothing."""
    return f"{part} of {whole}" if whole else "-"
