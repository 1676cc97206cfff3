"""`foredraft distill`: from a target to a draft in a few steps, each of which can be interrupted and goes on later."""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.distill import report
from foredraft.distill.files import write_whole
from foredraft.distill.generate import Text, Writer, token_counts
from foredraft.distill.prompts import HELD_OUT, Conversation, built_in, from_file
from foredraft.distill.prune import frequent_tokens, head_weight, layer_list, pick_layers, prune
from foredraft.distill.stored import HEAD_IDS, Stored, stored, write_model
from foredraft.distill.train import Recipe, Trainer, states
from foredraft.engine.errors import ModelError
from foredraft.engine.loading import LoadedModel, load

HELD_OUT_TEMPERATURES = (0.0, 0.7)
# What a smaller or larger head would know is reported.
HEAD_SIZES = (2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Options:
    """What `foredraft distill` is told. `layers` are kept, or so many; `tokens` is the length of the training text."""

    layers: int | tuple[int, ...] = 4
    head_size: int = 8192
    tokens: int = 500_000
    rows: int = 192
    max_new_tokens: int = 224
    prompts: Path | None = None
    start: Path | None = None
    recipe: Recipe = Recipe()  # noqa: RUF009
    save_every: int = 200
    device: str = "auto"
    seed: int = 0


def distill(target: str, output: Path, options: Options, console: Console) -> Path:
    """Make a draft for `target` in the directory `output`, and return the directory of the assembled model.

    `output` gets `text/` (what the target wrote), `checkpoint.pt`, `draft/` (the stored draft), `model/` (a
    Transformers directory for the draft server) and `report.json`. Run again with the same options, it goes on where
    it stopped. Raises ModelError if the target cannot be pruned or the disk is full.
    """
    try:
        return _distill(target, output, options, console)
    except OSError as error:
        raise ModelError(
            f"cannot write to {output}: {error.strerror or error}; all that is finished is kept, so free some space "
            "and give the same command again"
        ) from error


def _distill(target: str, output: Path, options: Options, console: Console) -> Path:
    loaded = load(target, dtype="float32", device=options.device)
    check_target(loaded)
    count = loaded.model.config.num_hidden_layers
    layers = pick_layers(count, options.layers) if isinstance(options.layers, int) else options.layers
    draft = _start(loaded, layers, options.start)
    prompts, held_out = _prompts(options)
    writer = Writer(
        loaded, output / "text", rows=options.rows, max_new_tokens=options.max_new_tokens, seed=options.seed
    )
    with _progress(console) as progress:
        measured = [_held_out(writer, loaded, held_out, temperature, progress) for temperature in HELD_OUT_TEMPERATURES]
        shards = list(_text(writer, prompts, options.tokens, progress))
        head_ids = _head(output, shards, measured, options, loaded, console)
        trainer = _train(draft, head_ids, measured, loaded, output, options, progress)
    stored(draft, head_ids, layers, loaded).save(output / "draft")
    # What is measured is what was stored: weights rounded to bfloat16.
    result = Stored.read(output / "draft")
    _report(result.apply(loaded), head_ids, measured, trainer, loaded, output, console)
    if not (output / "model").exists():
        write_model(result, loaded, output / "model")
    return output / "model"


@torch.inference_mode()
def check_target(target: LoadedModel) -> None:
    """Raises ModelError for a target that no draft can be made for in this way."""
    model, name = target.model, type(target.model).__name__
    layer_list(model)
    if target.tokenizer is None:
        raise ModelError(f"{target.name} has no tokenizer, so it cannot be asked anything")
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.config, "sliding_window", None) is not None:
        raise ModelError(f"{name} has layers with a sliding window; only targets with full attention can be distilled")
    ids = torch.arange(8, device=model.device)[None]
    logits = model(input_ids=ids).logits
    if not torch.allclose(logits, states(model, ids) @ head_weight(model).T, rtol=1e-3, atol=1e-3):
        raise ModelError(f"{name} does more to its logits than multiply with its head, which training would miss")


def _start(target: LoadedModel, layers: tuple[int, ...], start: Path | None) -> PreTrainedModel:
    if start is None:
        return prune(target.model, layers)
    read = Stored.read(start)
    draft = read.apply(target)
    if read.layers != layers:
        raise ModelError(f"the draft in {start} has layers {read.layers}, not {layers}")
    return draft


def _prompts(options: Options) -> tuple[Iterator[Conversation], list[Conversation]]:
    """Prompts to train on, and others to measure with."""
    if options.prompts is None:
        return built_in(options.seed), HELD_OUT
    own = from_file(options.prompts)
    held_out = own[:: max(2, len(own) // len(HELD_OUT))][: len(HELD_OUT)]
    train = [conversation for conversation in own if conversation not in held_out]
    if not train:
        raise ModelError(f"{options.prompts} must hold at least two different prompts, one a line")
    return itertools.cycle(train), held_out


def _held_out(
    writer: Writer, target: LoadedModel, prompts: list[Conversation], temperature: float, progress: Progress
) -> Text:
    task = progress.add_task(f"held-out replies, T={temperature}", total=len(prompts))
    text = writer.held_out(prompts, temperature, f"held-out-{temperature}")
    progress.update(task, completed=len(prompts))
    return text


def _text(writer: Writer, prompts: Iterator[Conversation], tokens: int, progress: Progress) -> Iterator[Path]:
    task = progress.add_task("training text, tokens", total=tokens)
    done = 0
    for path in writer.write(prompts):
        done += len(Text.load(path).hidden)
        progress.update(task, completed=min(done, tokens))
        yield path
        if done >= tokens:
            return


def _head(
    output: Path,
    shards: Iterable[Path],
    measured: list[Text],
    options: Options,
    target: LoadedModel,
    console: Console,
) -> Tensor:
    """The head's token ids, chosen once: a resumed run must not change them."""
    path = output / "head.safetensors"
    if options.start is not None:
        return Stored.read(options.start).head_ids.long()
    if not path.exists():
        counts = token_counts(map(Text.load, shards), head_weight(target.model).detach())
        tokens = torch.cat([reply for text in measured for reply in text.replies()])
        for size in sorted({options.head_size, *HEAD_SIZES}):
            listed = frequent_tokens(counts, size, target.eos_token_ids)
            part = torch.isin(tokens, listed).double().mean()
            console.print(f"a head of {len(listed)} tokens knows {part:.2%} of the held-out replies")
        write_whole(path, save({HEAD_IDS: frequent_tokens(counts, options.head_size, target.eos_token_ids)}))
    return load_file(path)[HEAD_IDS]


def _train(
    draft: PreTrainedModel,
    head_ids: Tensor,
    measured: list[Text],
    target: LoadedModel,
    output: Path,
    options: Options,
    progress: Progress,
) -> Trainer:
    head = head_weight(draft).detach()[head_ids.to(draft.device)]

    def score(model: PreTrainedModel) -> float:
        texts = measured[:1]
        return sum(report.acceptance(report.matches(model, head, head_ids, t, target.vocabulary_size)) for t in texts)

    trainer = Trainer(draft, head_ids, output, options.recipe, score, save_every=options.save_every)
    task = progress.add_task("training, steps", total=options.recipe.steps, completed=trainer.step)
    known = len(trainer.scores)
    for loss in trainer.run(lambda: sorted((output / "text").glob("shard-*.safetensors"))):
        progress.update(task, completed=trainer.step, description=f"training, steps (loss {loss:.3f})")
        # Lines as well as a bar: a run in the background has no terminal.
        for step, accepted in trainer.scores[known:]:
            progress.console.print(f"step {step}: loss {loss:.3f}, {accepted:.3f} of held-out tokens accepted")
        known = len(trainer.scores)
    return trainer


def _report(
    draft: PreTrainedModel,
    head_ids: Tensor,
    measured: list[Text],
    trainer: Trainer,
    target: LoadedModel,
    output: Path,
    console: Console,
) -> None:
    head = head_weight(draft).detach()[head_ids.to(draft.device)]
    matched = [report.matches(draft, head, head_ids, text, target.vocabulary_size) for text in measured]
    costs = report.measure_costs(draft, head_ids, target.model)
    content: dict[str, object] = {"costs": asdict(costs), "cost_ratio": costs.ratio, "scores": trainer.scores}
    console.print(f"draft step / target step: {costs.ratio:.3f}")
    for temperature, found in zip(HELD_OUT_TEMPERATURES, matched, strict=True):
        accepted, lines = report.acceptance(found), report.table(found, costs)
        content[f"temperature {temperature}"] = {"acceptance": accepted, "lines": [asdict(line) for line in lines]}
        console.print(_table(f"T={temperature}: {accepted:.3f} of draft tokens that follow final text", lines))
    write_whole(output / "report.json", json.dumps(content, indent=2).encode())


def _table(title: str, lines: list[report.Line]) -> Table:
    table = Table("k", "tokens/round", "accepted by position", "taking turns", "overlapped", title=title)
    for line in lines:
        positions = " ".join(f"{part:.2f}" for part in line.by_position)
        table.add_row(
            str(line.k),
            f"{line.mean_accepted_length:.2f}",
            positions,
            f"{line.turn_taking:.2f}x",
            f"{line.overlapped:.2f}x",
        )
    return table


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )
