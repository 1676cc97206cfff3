"""Training: the draft learns the target's distribution at every token of the replies, in the part its head can name."""

import io
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.distill.files import write_whole
from foredraft.distill.generate import Text
from foredraft.distill.prune import head_weight
from foredraft.engine.errors import ModelError

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a draft is trained. `batch_tokens` counts prompts and padding too."""

    steps: int = 2000
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    warmup: float = 0.03
    weight_decay: float = 0.01
    loss: str = "kl"
    seed: int = 0


class Examples:
    """All replies of some shards, to be drawn in batches of like length."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts
        self._starts = [_starts(text) for text in texts]
        self._where = [(t, i) for t, text in enumerate(texts) for i in range(len(text.lengths))]

    def batches(self, batch_tokens: int, seed: int) -> Iterator["Batch"]:
        """Every reply once."""
        rng = random.Random(seed)
        order = self._where[:]
        rng.shuffle(order)
        groups: list[list[tuple[int, int]]] = []
        for start in range(0, len(order), 512):
            window = sorted(order[start : start + 512], key=self._length)
            group: list[tuple[int, int]] = []
            for where in window:
                if group and (len(group) + 1) * self._length(where) > batch_tokens:
                    groups.append(group)
                    group = []
                group.append(where)
            groups.append(group)
        rng.shuffle(groups)
        return (self._batch(group) for group in groups)

    def _length(self, where: tuple[int, int]) -> int:
        text, i = where
        return int(self._texts[text].lengths[i])

    def _batch(self, group: list[tuple[int, int]]) -> "Batch":
        width = max(map(self._length, group)) - 1
        tokens = torch.zeros(len(group), width, dtype=torch.int64)
        where, rows = [], []
        for row, (t, i) in enumerate(group):
            text = self._texts[t]
            start, end = int(text.prompt_lengths[i]), int(text.lengths[i])
            tokens[row, : end - 1] = text.tokens[i, : end - 1]
            where.append(torch.arange(start - 1, end - 1) + row * width)
            rows.append((t, self._starts[t][i], self._starts[t][i + 1]))
        hidden = torch.cat([self._texts[t].hidden[first:last] for t, first, last in rows])
        return Batch(tokens, torch.cat(where), hidden)


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` int64 [B, T]; the target's `hidden` states [R, H] are those at the flat positions `where` [R]."""

    tokens: Tensor
    where: Tensor
    hidden: Tensor


def _starts(text: Text) -> list[int]:
    counts = text.lengths - text.prompt_lengths
    return [0, *counts.cumsum(0).tolist()]


def states(draft: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The draft's last hidden states [B, T, H] of `tokens` [B, T], padded on the right."""
    output: Tensor = draft.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return output


def loss(hidden: Tensor, batch: Batch, head: Tensor, recipe: Recipe) -> Tensor:
    """Mean distance over R tokens between target and draft, both limited to the tokens of the draft's head.

    `hidden` [R, H] are the draft's last hidden states, `head` [N, H] the rows that target and draft share.
    """
    logits = hidden @ head.T
    with torch.no_grad():
        p = (batch.hidden.to(hidden) @ head.T).softmax(-1)
    if recipe.loss == "tv":
        return 0.5 * (p - logits.softmax(-1)).abs().sum(-1).mean()
    # The Kullback-Leibler divergence but for the target's entropy, which does not depend on the draft.
    return (logits.logsumexp(-1) - (p * logits).sum(-1)).mean()


def rate(step: int, recipe: Recipe) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down to a hundredth."""
    warmup = max(1, round(recipe.warmup * recipe.steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, recipe.steps - warmup))
    return recipe.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """Trains a draft on the shards of a directory, to be stopped and resumed at any step.

    `score` measures a draft on what it is not trained on; the best is kept, and is what `draft` is after `run`.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        head_ids: Tensor,
        directory: Path,
        recipe: Recipe,
        score: Callable[[PreTrainedModel], float],
        *,
        save_every: int = 100,
    ) -> None:
        self.draft = draft
        self.step = 0
        self.best = -math.inf
        self.scores: list[tuple[int, float]] = []
        self._head = head_weight(draft).detach()[head_ids.to(draft.device)]
        self._directory = directory
        self._recipe = recipe
        self._score = score
        self._save_every = save_every
        self._parameters = {name: value for name, value in draft.named_parameters() if value.requires_grad}
        self._best_weights = {name: value.detach().clone() for name, value in self._parameters.items()}
        # Norms and biases are not pulled towards zero.
        groups = [
            [v for v in self._parameters.values() if v.ndim >= 2],
            [v for v in self._parameters.values() if v.ndim < 2],
        ]
        decay = [{"params": groups[0], "weight_decay": recipe.weight_decay}, {"params": groups[1], "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(decay, betas=(0.9, 0.95))
        self._epoch, self._position = 0, 0
        self._restore()

    def run(self, shards: Callable[[], list[Path]]) -> Iterator[float]:
        """Yields the loss of every step. Each epoch reads the shards there are when it begins."""
        self.draft.train()
        while self.step < self._recipe.steps:
            examples = Examples([Text.load(path) for path in shards()])
            batches = examples.batches(self._recipe.batch_tokens, seed=self._recipe.seed * 1009 + self._epoch)
            for batch in itertools.islice(batches, self._position, None):
                self._position += 1
                yield self._learn(batch)
                if self.step % self._save_every == 0 or self.step == self._recipe.steps:
                    self._assess()
                if self.step == self._recipe.steps:
                    break
            else:
                self._epoch, self._position = self._epoch + 1, 0
        with torch.no_grad():
            for name, value in self._best_weights.items():
                self._parameters[name].copy_(value)
        self.draft.train(False)

    def _learn(self, batch: Batch) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate(self.step, self._recipe)
        hidden = states(self.draft, batch.tokens.to(self.draft.device))
        value = loss(hidden.flatten(0, 1)[batch.where.to(hidden.device)], batch, self._head, self._recipe)
        self._optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
        self._optimizer.step()
        self.step += 1
        return float(value.detach())

    def _assess(self) -> None:
        self.draft.train(False)
        score = self._score(self.draft)
        self.draft.train()
        self.scores.append((self.step, score))
        if score > self.best:
            self.best = score
            self._best_weights = {name: value.detach().clone() for name, value in self._parameters.items()}
        self._save()

    def _save(self) -> None:
        content = io.BytesIO()
        state = {
            "recipe": asdict(self._recipe),
            "weights": {name: value.detach() for name, value in self._parameters.items()},
            "best_weights": self._best_weights,
            "optimizer": self._optimizer.state_dict(),
            **{name: getattr(self, name) for name in ("step", "best", "scores", "_epoch", "_position")},
        }
        torch.save(state, content)
        write_whole(self._directory / CHECKPOINT, content.getbuffer())

    def _restore(self) -> None:
        path = self._directory / CHECKPOINT
        if not path.exists():
            return
        content: dict[str, Any] = torch.load(path, map_location=self.draft.device, weights_only=True)
        names = {name: value.shape for name, value in content["weights"].items()}
        # More or fewer steps are all right: the rest of the schedule is stretched.
        recipe = {**content["recipe"], "steps": self._recipe.steps}
        if recipe != asdict(self._recipe) or names != {n: v.shape for n, v in self._parameters.items()}:
            raise ModelError(
                f"{path} was made with other options; give the same ones to resume, or another output directory"
            )
        with torch.no_grad():
            for name, value in content["weights"].items():
                self._parameters[name].copy_(value)
        self._best_weights = content["best_weights"]
        self._optimizer.load_state_dict(content["optimizer"])
        for name in ("step", "best", "scores", "_epoch", "_position"):
            setattr(self, name, content[name])
