"""Coupled sampling: every draw is an argmax over shared noise (Daliri et al., arXiv 2408.07978).

token = argmax_x( log p(x) + G(seed, sample, position, x) ) is distributed as p (the Gumbel-max trick), and two models
that use the same noise tend to pick the same token. Noise is computed for the most probable tokens only; all others
compete as one pooled candidate with their summed probability and noise of its own. Only if it wins is their noise
computed, to pick one of them in the same way. Which tokens are pooled depends on p alone, so the draw is still exactly
from p.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from foredraft.sampling.noise import gumbel, pool_gumbels
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.selection import argmax, largest, leading

INDIVIDUAL = 1024
"""How many tokens of a row, at least, have noise of their own."""

_ROUNDING = 1e-3
"""More than rounding can add to the logarithm of a sum of probabilities."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a draw is for, which decides over its noise: the seed, the sample, and the token's index in the sequence."""

    seed: int
    sample_index: int
    position: int


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
    places = [Place(params.seed, sample_index, position) for position in positions]
    ids, scores = rank_rows(warped, places if params.temperature > 0 else None, count=count, individual=individual)
    if bool((scores[:, 0] == -torch.inf).any()):
        raise ValueError("no token is left to draw: all are masked, or the logits are not numbers")
    return ids


def rank_rows(
    warped: Tensor, places: Sequence[Place] | None, *, count: int, individual: int = INDIVIDUAL
) -> tuple[Tensor, Tensor]:
    """As `rank`, for rows of any requests.

    Args:
        warped: [R, V].
        places: what each row draws for; None: without noise, as at temperature 0.

    Returns:
        Ids [R, count] int64, and what they were ranked by, up to a constant per row: [R, count]. A row that leaves no
        token to draw has a first score of -inf, and its ids mean nothing.
    """
    if places is None:
        scores, ids = largest(warped, count)
    else:
        noisy, candidates = _noisy(warped, places, individual)
        scores, order = largest(noisy, count)
        ids = candidates.gather(1, order)
    missing = scores == -torch.inf
    scores, ids = torch.where(missing, scores[:, :1], scores), torch.where(missing, ids[:, :1], ids)
    rest = count - ids.shape[1]
    return torch.cat((ids, ids[:, :1].expand(-1, rest)), 1), torch.cat((scores, scores[:, :1].expand(-1, rest)), 1)


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


def greedy(warped: Sequence[Tensor]) -> list[list[int] | None]:
    """What `draw` gives at temperature 0, for several tensors [R, V], with one wait for the device in all.

    None where the largest score of a row is not finite: `draw` tells what that means.
    """
    if not warped:
        return []
    best = [argmax(rows) for rows in warped]
    values = joined([rows.gather(1, ids.unsqueeze(-1)) for rows, ids in zip(warped, best, strict=True)])
    ids = joined(best)
    drawn = iter(torch.where(values.squeeze(-1).isfinite(), ids, -1).tolist())
    draws = [list(islice(drawn, len(rows))) for rows in warped]
    return [None if -1 in draw else draw for draw in draws]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after another, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _noisy(warped: Tensor, places: Sequence[Place], individual: int) -> tuple[Tensor, Tensor]:
    """The candidates of each row, [R, N]: their scores log p + G (up to a constant per row) in float64, and their ids.

    The last is the pool: if it wins, one of its tokens with its score, else -inf, which also fills up shorter rows.
    """
    values, ids = leading(warped, individual)
    peaks = values.amax(-1, keepdim=True)
    seeds, samples = [place.seed for place in places], [place.sample_index for place in places]
    positions = [place.position for place in places]
    where = torch.tensor(positions, dtype=torch.int64, device=warped.device).unsqueeze(-1)
    scores = (values - peaks).double() + gumbel(_common(seeds), _common(samples), where, ids)
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    sizes = (values > -torch.inf).sum(-1, keepdim=True)
    least = torch.where(values > -torch.inf, values, torch.inf).amin(-1, keepdim=True) - peaks
    summary = torch.cat((scores.amax(-1, keepdim=True), least, sizes), 1)
    pools = [[-math.inf, 0.0] for _ in places]
    pool_noise = pool_gumbels(seeds, samples, positions)
    for i, ((best, bound, size), noise) in enumerate(zip(summary.tolist(), pool_noise, strict=True)):
        # Nothing is pooled if fewer tokens than asked for are individual, and nothing above the least of these.
        if size < individual or math.log(warped.shape[1]) + bound + _ROUNDING + noise <= best:
            continue
        weights = (warped[i] - peaks[i]).exp().index_fill_(0, ids[i, : int(size)], 0)
        total = float(weights.sum(dtype=torch.float64))
        if total > 0 and math.log(total) + noise > best:
            tokens = weights.nonzero().squeeze(-1)
            winner = (warped[i, tokens].double() + gumbel(seeds[i], samples[i], positions[i], tokens)).argmax()
            pools[i] = [math.log(total) + noise, float(tokens[winner])]
    pool = scores.new_tensor(pools)
    return torch.cat((scores, pool[:, :1]), 1), torch.cat((ids, pool[:, 1:].long()), 1)


def _common(numbers: Sequence[int]) -> int | Sequence[int]:
    """The number if all are the same, which is less work to compute with."""
    return numbers[0] if len(set(numbers)) == 1 else numbers
