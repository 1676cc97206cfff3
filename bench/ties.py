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
    """How far apart the two tokens were, and how much the type of the weights moves that, in nats of log p + G."""

    gap: float
    rounding: float


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
    low = [difference(target, one) for one in partings]
    target.to(HIGHER[dtype])
    high = [difference(target, one) for one in partings]
    return [Tie(abs(exact), abs(own - exact)) for own, exact in zip(low, high, strict=True)]


@torch.inference_mode()
def difference(target: Any, one: Parting) -> float:
    """The plain token's log p + G less the other one's; at temperature 0, of the logits."""
    ids = torch.tensor([one.plain_token, one.token])
    logits: Tensor = target(torch.tensor([one.context], device=target.device)).logits[0, -1].double().cpu()
    scores = logits[ids]
    if one.temperature > 0:
        # The first new token of a text stands at the length of what comes before it.
        scores = scores / one.temperature + gumbel(one.seed, 0, len(one.context), ids)
    return float(scores[0] - scores[1])
