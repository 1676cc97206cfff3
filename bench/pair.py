"""What the measurements share: the pair of models, its cores, prompts and the bar that shows progress."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from foredraft.cli.demo import draft_options
from foredraft.cli.supervisor import ChildError
from foredraft.cli.up import available_cores
from foredraft.config import ConfigError
from foredraft.default_model import DefaultModelError, cache_directory
from foredraft.distill.prompts import HELD_OUT, built_in
from foredraft.distill.stored import DESCRIPTION, assembled
from foredraft.engine.errors import ModelError
from orchestrator.client import AsyncClient, GenerationError

DRAFTS = Path(__file__).parents[1] / "drafts"
DRAFT_HELP = (
    "ngram, self-prune:N (the target's first N layers), a stored draft, or a model's directory or hub id; the target's "
    "stored draft if there is one, else ngram."
)
BUSY = (
    "\nThe machine is busy with other work, so these numbers will mean little: threads that wait for one another, as "
    "those of one model do, suffer most."
)
# Options that several measurements have.
Target = Annotated[str | None, typer.Option(help="Directory or hub id; the demo's model unless given.")]
Draft = Annotated[str | None, typer.Option(help=DRAFT_HELP)]
PromptFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="One prompt a line.")]
TargetCores = Annotated[int | None, typer.Option(min=1, help="Cores of the target.")]
DraftCores = Annotated[int | None, typer.Option(min=1, help="Cores of draft and orchestrator.")]
Dtype = Annotated[str, typer.Option(help="Type of all weights.")]
NO_MATPLOTLIB = "There is no plot: it needs matplotlib, which pip install -e '.[bench]' brings."


@contextmanager
def errors_told() -> Iterator[None]:
    """Ends with a sentence, and exit code 1, what cannot be measured."""
    try:
        yield
    except (ChildError, ConfigError, DefaultModelError, GenerationError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def progress_bar(console: Console) -> Progress:
    """What is done, how much of it, and how long the rest will take; gone at the end."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)


def draw(plot: Callable[[], None]) -> None:
    """Plot, if that can be done here."""
    try:
        plot()
    except ImportError:
        print(NO_MATPLOTLIB, file=sys.stderr)


def prompts(count: int) -> list[str]:
    """The held-out prompts, and, if more are asked for, built-in ones."""
    conversations = [*HELD_OUT, *islice(built_in(0), max(0, count - len(HELD_OUT)))]
    return [str(conversation[0]["content"]) for conversation in conversations[:count]]


def prompts_of(file: Path | None, count: int) -> list[str]:
    """The lines of a file, else `count` of our own. Raises ConfigError if the file has none."""
    if file is None:
        return prompts(count)
    if not (lines := [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]):
        raise ConfigError(f"{file} holds no prompts")
    return lines


def stored_draft(target: str) -> str:
    """The draft that is stored for this target, else "ngram"."""
    directory = DRAFTS / Path(target).name.lower()
    return str(directory) if (directory / DESCRIPTION).is_file() else "ngram"


def share_cores(target: int | None, draft: int | None, drafter: str) -> tuple[int, int]:
    """Cores of target and draft, which gets a quarter unless n-grams draft. Raises ConfigError for too many."""
    available = len(available_cores())
    draft = draft or (1 if drafter == "ngram" or target == available - 1 else max(1, available // 4))
    target = target or max(1, available - draft)
    if target + draft > available:
        raise ConfigError(f"target and draft are to have {target} and {draft} CPU cores, but there are {available}")
    return target, draft


def drafting_options(target: str, draft: str, dtype: str) -> dict[str, Any]:
    """The draft server's options; a stored draft is made a model in the cache."""
    if (Path(draft) / DESCRIPTION).is_file():
        draft = str(assembled(Path(target), Path(draft), cache_directory() / "models"))
    drafting = draft_options(draft, Path(target))
    return {**drafting, "draft_dtype": dtype} if drafting else {}


def useless(draft: Path, directory: Path) -> Path:
    """A copy of a model's directory at `directory`, with random matrices of the same shapes and deviations."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    directory.mkdir()
    for file in draft.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, directory)
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            # Vectors are norms and biases, without which the rest would mean nothing.
            if tensor.ndim > 1:
                deviation = float(tensor.float().std())
                tensors[name] = (torch.randn(tensor.shape, generator=generator) * deviation).to(tensor.dtype)
        save_file(tensors, directory / file.name, {"format": "pt"})
    return directory


def write_json(file: Path, content: dict[str, Any], default: Callable[[Any], Any] | None = None) -> None:
    """Write what was measured."""
    file.write_text(json.dumps(content, indent=2, default=default, ensure_ascii=False) + "\n", encoding="utf-8")


async def tokenized(client: AsyncClient, texts: Sequence[str]) -> list[list[int]]:
    """Prompts as a chat model reads them, if it is one."""
    try:
        return [(await client.tokenize(messages=[{"role": "user", "content": text}])).token_ids for text in texts]
    except GenerationError as error:
        if error.status is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return [(await client.tokenize(text)).token_ids for text in texts]
