"""Whether two texts of one seed part at a tie: the target's own scores there, in the type of the services and above."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.engine.loading import load
from foredraft.sampling.noise import gumbel

HIGHER: Mapping[str, torch.dtype] = {
    "bfloat16": torch.float32,
    "float16": torch.float32,
    "float32": torch.float64,
    "float64": torch.float64,
}
POSITIONS = 32


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a text departs from the plain one of the same prompt and seed: after `context`, which both have."""

    context: list[int]
    plain_token: int
    token: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Tie:
    """How far apart the two tokens were, in nats of log p + G, and how much rounding moves that: root mean square of
    what the type of the weights changes between the two at the last positions of the context."""

    gap: float
    rounding: float

    @property
    def explained(self) -> bool:
        """Whether rounding can part the texts: two passes differ by sqrt(2) times it, and by four times that hardly."""
        return self.gap <= 4 * 2**0.5 * self.rounding


def parting(prompt: Sequence[int], plain: Sequence[int], own: Sequence[int], temperature: float, seed: int) -> Parting:
    """Where two texts that are not the same part. Raises ValueError if one is the beginning of the other."""
    for i, (plain_token, token) in enumerate(zip(plain, own, strict=False)):
        if plain_token != token:
            return Parting([*prompt, *plain[:i]], plain_token, token, temperature, seed)
    raise ValueError("one text ends where the other goes on")


def ties(name: str, dtype: str, partings: Sequence[Parting]) -> list[Tie]:
    """Score both tokens of each parting by one pass of the model over the context, with these weights in this type and
    in a higher one. Raises ModelError."""
    if not partings:
        return []
    target: Any = load(name, dtype=dtype).model
    low = [differences(target, one) for one in partings]
    target.to(HIGHER[dtype])
    found = []
    for one, rounded in zip(partings, low, strict=True):
        exact, noise = differences(target, one), torch.zeros(2)
        if one.temperature > 0:
            # The next token of a text stands at the length of what comes before it.
            noise = gumbel(one.seed, 0, len(one.context), torch.tensor([one.plain_token, one.token]))
        gap = abs(float(exact[-1] + noise[0] - noise[1]))
        found.append(Tie(gap, float((rounded - exact).square().mean().sqrt())))
    return found


@torch.inference_mode()
def differences(target: Any, one: Parting) -> Tensor:
    """The plain token's log p less the other one's at the last positions of the context; greedy: of the logits."""
    logits: Tensor = target(torch.tensor([one.context], device=target.device)).logits[0, -POSITIONS:].double().cpu()
    return (logits[:, one.plain_token] - logits[:, one.token]) / (one.temperature or 1.0)
