"""Coupled sampling: every draw is an argmax over shared noise (Daliri et al., arXiv 2408.07978).

token = argmax_x( log p(x) + G(seed, sample, position, x) ) is distributed as p (the Gumbel-max trick), and two models
that use the same noise tend to pick the same token. Noise is computed for the most probable tokens only; all others
compete as one pooled candidate with their summed probability and noise of its own. Only if it wins is their noise
computed, to pick one of them in the same way. Which tokens are pooled depends on p alone, so the draw is still exactly
from p.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.sampling.noise import gumbel, pool_gumbel
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.selection import largest, leading

INDIVIDUAL = 1024
"""How many tokens of a row, at least, have noise of their own."""


def rank(
    warped: Tensor,
    params: SamplingParams,
    *,
    sample_index: int,
    positions: Sequence[int],
    count: int,
    individual: int = INDIVIDUAL,
) -> Tensor:
    """The draw of each row and its runners-up.

    Args:
        warped: [R, V] from `foredraft.sampling.warpers.warp`.
        positions: R absolute indices in the sequence of the tokens drawn.
        count: how many tokens per row.
        individual: how many tokens of a row, at least, compete on their own.

    Returns:
        [R, count] int64. Column 0 is the draw; the others follow in falling order of log p + G, at temperature 0 in
        falling order of the score, ties by lowest id. A row with fewer candidates repeats its draw.

    Raises:
        ValueError: a row leaves no token to draw.
    """
    if params.temperature == 0:
        ranked = [largest(row, count)[1] for row in warped]
    else:
        candidates = [leading(row, individual) for row in warped]
        lengths = [ids.numel() for ids in candidates]
        repeats = torch.tensor(lengths, device=warped.device)
        where = torch.tensor(positions, dtype=torch.int64, device=warped.device).repeat_interleave(repeats)
        noise = torch.split(gumbel(params.seed, sample_index, where, torch.cat(candidates)), lengths)
        ranked = [
            _rank_row(row, ids, g, params.seed, sample_index, position, count)
            for row, ids, g, position in zip(warped, candidates, noise, positions, strict=True)
        ]
    if any(ids.numel() == 0 for ids in ranked):
        raise ValueError("no token is left to draw: all are masked, or the logits are not numbers")
    return torch.stack([torch.cat((ids, ids[:1].expand(count - ids.numel()))) for ids in ranked])


def draw(
    warped: Tensor,
    params: SamplingParams,
    *,
    sample_index: int,
    positions: Sequence[int],
    individual: int = INDIVIDUAL,
) -> list[int]:
    """The draw of each row of `warped` [R, V]: the first column of `rank`."""
    ranked = rank(warped, params, sample_index=sample_index, positions=positions, count=1, individual=individual)
    draws: list[int] = ranked[:, 0].tolist()
    return draws


def _rank_row(
    row: Tensor, ids: Tensor, noise: Tensor, seed: int, sample_index: int, position: int, count: int
) -> Tensor:
    if not ids.numel():
        return ids
    peak = row[ids].amax()
    scores, order = largest((row[ids] - peak).double() + noise, count)
    ranked = ids[order]
    if ids.numel() == row.numel():
        return ranked
    pooled = (row - peak).exp().index_fill_(0, ids, 0)
    total = float(pooled.sum(dtype=torch.float64))
    if total > 0 and math.log(total) + pool_gumbel(seed, sample_index, position) > float(scores[0]):
        ids = pooled.nonzero().squeeze(-1)
        winner = ids[(row[ids].double() + gumbel(seed, sample_index, position, ids)).argmax()]
        return torch.cat((winner.unsqueeze(0), ranked[: count - 1]))
    return ranked
