"""Transformers, plain and assisted, against the three services, plain, sequential and overlapped, in one run.

    python -m bench.compare [--target DIR] [--draft DIR] [--json FILE] [--plot FILE]

All have the same weights, dtype and cores, and take turns at every prompt, so that a machine that slows down slows all
of them. Speeds leave the reading of the prompt out. Needs memory for the target three times: in this process, in the
target service, and in one that has all cores.
"""

import asyncio
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import report
from bench.contestants import (
    Contestant,
    Run,
    Work,
    service,
    transformers_assisted,
    transformers_plain,
    transformers_prompt_lookup,
)
from bench.summary import OVERLAPPED, PLAIN, PLAIN_ALL_CORES, SEQUENTIAL, Outcome, outcome
from draft_service.distill.prompts import HELD_OUT
from draft_service.distill.stored import DESCRIPTION, assembled
from foredraft.cli.demo import draft_options
from foredraft.cli.supervisor import ChildError
from foredraft.cli.up import Stack, available_cores
from foredraft.config import ConfigError
from foredraft.default_model import DefaultModelError, cache_directory, ensure
from foredraft.engine.errors import ModelError
from foredraft.engine.loading import LoadedModel, load
from orchestrator.client import Client, GenerationError

DRAFTS = Path(__file__).parents[1] / "drafts"
PROMPTS = [str(conversation[0]["content"]) for conversation in HELD_OUT[:12]]
# Texts that are not the same are an error there; with fewer bits, likely tokens tie often.
EXACT = ("float32", "float64")

BUSY = (
    "\nThe machine is busy with other work, so these numbers will mean little: threads that wait for one another, as "
    "those of one model do, suffer most."
)


@dataclass(frozen=True, slots=True)
class Options:
    """What is compared, and how; see the command line."""

    target: str
    draft: str
    draft_tokens: int | None
    temperatures: Sequence[float]
    max_new_tokens: int
    prompts: Sequence[str]
    repeats: int
    target_cores: int
    draft_cores: int
    dtype: str

    @property
    def all_cores(self) -> int:
        """The cores of target and draft."""
        return self.target_cores + self.draft_cores


def main(
    target: Annotated[str | None, typer.Option(help="Directory or hub id; the demo's model unless given.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="ngram, self-prune:N (the target's first N layers), a stored draft, or a model's directory or hub id; "
            "the target's stored draft if there is one, else ngram."
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, max=64, help="Of every round; unless given, services and Transformers choose.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be repeated; 0, 0.7 and 1.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of every text.")] = 128,
    prompts: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="One prompt a line.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Texts of a contestant for every prompt.")] = 3,
    target_cores: Annotated[int | None, typer.Option(min=1, help="Cores of the target.")] = None,
    draft_cores: Annotated[int | None, typer.Option(min=1, help="Cores of draft and orchestrator.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of all weights.")] = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the speeds there.")] = None,
) -> None:
    """Compare Transformers, plain and assisted, with the services, plain, sequential and overlapped."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        name = target or str(ensure())
        draft = draft or stored_draft(name)
        texts = PROMPTS if prompts is None else [line for line in prompts.read_text().splitlines() if line.strip()]
        cores = share_cores(target_cores, draft_cores, draft)
        temperatures = tuple(dict.fromkeys(temperature or (0.0, 0.7, 1.0)))
        options = Options(name, draft, draft_tokens, temperatures, max_new_tokens, texts, repeats, *cores, dtype)
        if not texts:
            raise ConfigError(f"{prompts} holds no prompts")
        settings = setting(options)
        console.print(heading(options, settings["load_average_before"]))
        outcomes = asyncio.run(compare(options, console))
    except (ChildError, ConfigError, DefaultModelError, GenerationError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for one in outcomes:
        report.show(one, console)
    console.print(f"\n{report.LEGEND}")
    if json_file:
        report.write_json(json_file, settings, outcomes)
    if plot_file:
        draw(plot_file, outcomes)
    same = all(one.first_difference is None for one in outcomes)
    raise typer.Exit(0 if same or dtype not in EXACT else 1)


def heading(options: Options, load_average: float) -> str:
    """What is compared, and who has which cores."""
    drafting = f"{options.draft_tokens or 'their own choice of'} draft tokens, draft {Path(options.draft).name}"
    return (
        f"{Path(options.target).name} in {options.dtype}, {drafting}; {len(options.prompts)} prompts x "
        f"{options.repeats} of up to {options.max_new_tokens} tokens; load average before: {load_average:.1f}.\n"
        f"Transformers and {PLAIN_ALL_CORES} have all {options.all_cores} cores. Of those, the target has "
        f"{options.target_cores} and draft and orchestrator {options.draft_cores} in {SEQUENTIAL} and {OVERLAPPED}; "
        f"{PLAIN} leaves the draft's idle." + (BUSY if load_average > options.all_cores / 2 else "")
    )


def draw(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Plot, if that can be done here."""
    try:
        report.plot(outcomes, file)
    except ImportError:
        print("There is no plot: it needs matplotlib, which pip install -e '.[bench]' brings.", file=sys.stderr)


def stored_draft(target: str) -> str:
    """The draft that is stored for this target, else "ngram"."""
    directory = DRAFTS / Path(target).name
    return str(directory) if (directory / DESCRIPTION).is_file() else "ngram"


def share_cores(target: int | None, draft: int | None, drafter: str) -> tuple[int, int]:
    """Cores of target and draft, which gets a quarter unless n-grams draft. Raises ConfigError for too many."""
    available = len(available_cores())
    draft = draft or (1 if drafter == "ngram" or target == available - 1 else max(1, available // 4))
    target = target or max(1, available - draft)
    if target + draft > available:
        raise ConfigError(f"target and draft are to have {target} and {draft} CPU cores, but there are {available}")
    return target, draft


async def compare(options: Options, console: Console) -> list[Outcome]:
    """Start the services, once with cores for the draft and once plain with all cores, and measure."""
    pin = sys.platform == "linux"
    if pin:
        # What is started from here on has these cores at most.
        os.sched_setaffinity(0, available_cores()[: options.all_cores])
    drafting = drafting_options(options)
    common = {"model": options.target, "dtype": options.dtype, "listen": "127.0.0.1:0"}
    shared = {**common, **drafting, "threads": options.target_cores, "draft_threads": options.draft_cores}
    alone = {**common, "threads": options.all_cores, "speculation_enabled": False}
    console.print("Starting the services ...")
    async with Stack(shared, pin=pin) as stack, Stack(alone) as whole:
        with Client(stack.address) as client, Client(whole.address) as client_whole:
            # The event loop watches over the services meanwhile.
            return await asyncio.to_thread(in_turn, options, drafting, client, client_whole, console)


def drafting_options(options: Options) -> dict[str, Any]:
    """The draft server's options; a stored draft is made a model in the cache."""
    draft = options.draft
    if (Path(draft) / DESCRIPTION).is_file():
        draft = str(assembled(Path(options.target), Path(draft), cache_directory() / "drafts"))
    drafting = draft_options(draft, Path(options.target))
    return {**drafting, "draft_dtype": options.dtype} if drafting else {}


def in_turn(
    options: Options, drafting: dict[str, Any], client: Client, client_whole: Client, console: Console
) -> list[Outcome]:
    """Load the models for Transformers, and let the contestants take turns."""
    torch.set_num_threads(options.all_cores)
    # Assisted generation warns of its own way to call generate.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    target, draft = load(options.target, dtype=options.dtype), None
    if drafting:
        draft = load(drafting["draft_model"], dtype=options.dtype, layers=drafting.get("draft_layers"))
    if target.tokenizer is None:
        raise ConfigError(f"{options.target} has no tokenizer")
    contestants = line_up(options, target, draft, client, client_whole)
    prompts = [tokenize(target.tokenizer, prompt) for prompt in options.prompts]
    measured = measure(options, contestants, prompts, console)
    return [outcome(temperature, contestants, runs, target.tokenizer) for temperature, runs in measured.items()]


def line_up(
    options: Options, target: LoadedModel, draft: LoadedModel | None, client: Client, client_whole: Client
) -> list[Contestant]:
    """All contestants, in the order of the report."""
    k, every = options.draft_tokens, str(options.all_cores)
    both = f"{options.target_cores} + {options.draft_cores}"
    if draft is None:
        assisted = Contestant("Transformers lookup", every, transformers_prompt_lookup(target, k))
    else:
        assisted = Contestant("Transformers assisted", every, transformers_assisted(target, draft, k))
    return [
        Contestant("Transformers", every, transformers_plain(target)),
        assisted,
        Contestant(PLAIN_ALL_CORES, every, service(client_whole, "plain", k)),
        Contestant(PLAIN, str(options.target_cores), service(client, "plain", k)),
        Contestant(SEQUENTIAL, both, service(client, "sequential", k)),
        Contestant(OVERLAPPED, both, service(client, "overlapped", k)),
    ]


def tokenize(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt as a chat model reads it, if it is one."""
    if not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def measure(
    options: Options, contestants: Sequence[Contestant], prompts: Sequence[list[int]], console: Console
) -> dict[float, dict[str, list[Run]]]:
    """Every contestant's texts, after one of each to warm up; who begins changes from prompt to prompt."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    measured = {}
    with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as progress:
        texts = len(options.temperatures) * (options.repeats * len(prompts) + 1) * len(contestants)
        task = progress.add_task("", total=texts)

        def run(contestant: Contestant, number: int, temperature: float, seed: int) -> Run:
            progress.update(task, description=f"T={temperature:g}, {contestant.name}")
            work = Work(number, prompts[number], temperature, seed, options.max_new_tokens)
            result = contestant.decode(work)
            progress.advance(task)
            return result

        for temperature in options.temperatures:
            for contestant in contestants:
                run(contestant, 0, temperature, 0)
            runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
            for seed in range(options.repeats * len(prompts)):
                first = seed % len(contestants)
                for contestant in [*contestants[first:], *contestants[:first]]:
                    runs[contestant.name].append(run(contestant, seed % len(prompts), temperature, seed))
            measured[temperature] = runs
    return measured


def setting(options: Options) -> dict[str, Any]:
    """What was compared and on what, for the JSON file."""
    return {
        **asdict(options),
        "target": Path(options.target).name,
        "draft": Path(options.draft).name,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": platform.machine(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "load_average_before": os.getloadavg()[0],
    }


if __name__ == "__main__":
    typer.run(main)
