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
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console

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
)
from bench.summary import ASSISTED, LOOKUP, OVERLAPPED, PLAIN, PLAIN_ALL_CORES, SEQUENTIAL, Outcome, outcome
from foredraft.cli.up import Stack, available_cores
from foredraft.config import ConfigError
from foredraft.default_model import ensure
from foredraft.engine.loading import LoadedModel, load
from orchestrator.client import Client

# Texts that are not the same are an error there; with fewer bits, likely tokens tie often.
EXACT = ("float32", "float64")


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


app = typer.Typer(add_completion=False)


@app.command()
def main(
    target: Target = None,
    draft: Draft = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, max=64, help="Of every round; unless given, services and Transformers choose.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be repeated; 0, 0.7 and 1.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of every text.")] = 128,
    prompts: PromptFile = None,
    repeats: Annotated[int, typer.Option(min=1, help="Texts of a contestant for every prompt.")] = 3,
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    dtype: Dtype = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the speeds there.")] = None,
) -> None:
    """Compare Transformers, plain and assisted, with the services, plain, sequential and overlapped."""
    console = Console(highlight=False, soft_wrap=True)
    with errors_told():
        name = target or str(ensure())
        draft = draft or stored_draft(name)
        texts = prompts_of(prompts, 12)
        cores = share_cores(target_cores, draft_cores, draft)
        temperatures = tuple(dict.fromkeys(temperature or (0.0, 0.7, 1.0)))
        options = Options(name, draft, draft_tokens, temperatures, max_new_tokens, texts, repeats, *cores, dtype)
        settings = setting(options)
        console.print(heading(options, settings["load_average_before"]))
        outcomes = asyncio.run(compare(options, console))
    for one in outcomes:
        report.show(one, console)
    console.print(f"\n{report.LEGEND}")
    if json_file:
        report.write_json(json_file, settings, outcomes)
    if plot_file:
        draw(partial(report.plot, outcomes, plot_file))
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
        f"{PLAIN} leaves the draft's idle. Where a text repeats itself, the services draft with its n-grams."
        + (BUSY if load_average > options.all_cores / 2 else "")
    )


async def compare(options: Options, console: Console) -> list[Outcome]:
    """Start the services, once with cores for the draft and once plain with all cores, and measure."""
    pin = sys.platform == "linux"
    if pin:
        # What is started from here on has these cores at most.
        os.sched_setaffinity(0, available_cores()[: options.all_cores])
    drafting = drafting_options(options.target, options.draft, options.dtype)
    common = {"model": options.target, "dtype": options.dtype, "listen": "127.0.0.1:0"}
    shared = {**common, **drafting, "threads": options.target_cores, "draft_threads": options.draft_cores}
    alone = {**common, "threads": options.all_cores, "speculation_enabled": False}
    console.print("Starting the services ...")
    async with Stack(shared, pin=pin) as stack, Stack(alone) as whole:
        with Client(stack.address) as client, Client(whole.address) as client_whole:
            # The event loop watches over the services meanwhile.
            return await asyncio.to_thread(in_turn, options, drafting, client, client_whole, console)


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
        assisted = Contestant(LOOKUP, every, transformers_prompt_lookup(target, k))
    else:
        assisted = Contestant(ASSISTED, every, transformers_assisted(target, draft, k))
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
    measured = {}
    with progress_bar(console) as progress:
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
    app()
