"""`foredraft distill`: make a draft for a target."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foredraft.config import ConfigError

Target = Annotated[str, typer.Option("--target", help="The target: a directory, a hub id or a .gguf file.")]
Output = Annotated[Path, typer.Option("--out", help="Where the draft and everything on the way to it goes.")]
Layers = Annotated[str, typer.Option("--layers", help="How many layers the draft has, or which: 0,1,2,29.")]
HeadSize = Annotated[int, typer.Option("--head-size", min=1, help="How many token ids the draft can propose.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="How much text the target writes to train on.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps.")]
BatchTokens = Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens of a training step.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", min=0.0, help="The highest learning rate.")]
Loss = Annotated[str, typer.Option("--loss", help="kl, or tv: half the sum of the differences of probabilities.")]
Prompts = Annotated[Path | None, typer.Option("--prompts", help="Prompts, one a line, in place of those built in.")]
Start = Annotated[Path | None, typer.Option("--start", help="A stored draft to train on, in place of a pruned target.")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Replies written side by side.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; all cores if not given.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Decides prompts, replies and the order of training.")]


def distill(
    target: Target,
    out: Output,
    layers: Layers = "4",
    head_size: HeadSize = 8192,
    tokens: Tokens = 500_000,
    steps: Steps = 2000,
    batch_tokens: BatchTokens = 2048,
    learning_rate: LearningRate = 1e-3,
    loss: Loss = "kl",
    prompts: Prompts = None,
    start: Start = None,
    rows: Rows = 192,
    device: Device = "auto",
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Make a small draft for a target from what the target itself writes. Run again, it goes on where it stopped."""
    if loss not in ("kl", "tv"):
        raise ConfigError(f"loss: must be kl or tv, not {loss}")
    import torch

    from foredraft.distill.pipeline import Options
    from foredraft.distill.pipeline import distill as run
    from foredraft.distill.train import Recipe
    from foredraft.engine.errors import ModelError

    if threads is not None:
        torch.set_num_threads(threads)
    recipe = Recipe(steps, batch_tokens, learning_rate, loss=loss, seed=seed)
    options = Options(
        layers=which(layers),
        head_size=head_size,
        tokens=tokens,
        rows=rows,
        prompts=prompts,
        start=start,
        recipe=recipe,
        device=device,
        seed=seed,
    )
    console = Console(highlight=False)
    try:
        model = run(target, out, options, console)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    console.print(f"The draft is in {model}; use it with: foredraft up --model {target} --draft-model {model}")


def which(layers: str) -> int | tuple[int, ...]:
    """How many layers, or which; raises ConfigError."""
    numbers = layers.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise ConfigError(f"layers: must be a number of layers such as 4, or a list such as 0,1,2,29, not {layers}")
    return int(layers) if len(numbers) == 1 else tuple(map(int, numbers))


def assemble(
    target: Target,
    draft: Annotated[Path, typer.Option("--draft", help="A stored draft: draft.safetensors and draft.json.")],
    out: Annotated[Path, typer.Option("--out", help="The directory to make.")],
) -> None:
    """Make a model for --draft-model of a stored draft, such as those in drafts/, and its target."""
    from foredraft.distill.stored import assemble as run
    from foredraft.engine.errors import ModelError

    try:
        run(target, draft, out)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
