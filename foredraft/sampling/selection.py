"""Picking the largest of many scores and drawing from a distribution, deterministically and without a full sort."""

import torch
from torch import Tensor

_BLOCK = 16


def leading(scores: Tensor, count: int) -> Tensor:
    """Indices, ascending, of a set of entries of `scores` [V] that contains the `count` largest finite ones.

    Usually little longer than `count`; all finite entries if they are fewer, or if V is less than 16 times `count`.
    The set is a function of the scores alone: everything that reaches a certain bound, so ties cannot matter.
    """
    kept = scores > -torch.inf
    blocks = scores.numel() // _BLOCK
    if count <= blocks:
        # The count-th largest of the maxima of disjoint blocks is at most the count-th largest score.
        maxima = scores[: blocks * _BLOCK].view(blocks, _BLOCK).amax(-1)
        kept &= scores >= maxima.topk(count, sorted=False).values.amin()
    return kept.nonzero().squeeze(-1)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest finite entries of `scores` [V] and their int64 indices, falling, ties by lowest index.

    Both are shorter than `count` if fewer entries are finite.
    """
    ids = leading(scores, count)
    values, order = scores[ids].sort(descending=True, stable=True)
    return values[:count], ids[order[:count]]


def pick(weights: Tensor, u: float) -> int:
    """The index at which the cumulative sum of `weights` [N] (at least 0, any sum) passes the fraction `u` of it.

    Never an index of weight 0. Raises ValueError if there is no other.
    """
    ids = weights.nonzero().squeeze(-1)
    cumulative = weights[ids].double().cumsum(-1)
    if not ids.numel() or not 0 < float(cumulative[-1]) < torch.inf:
        raise ValueError("no token is left to draw: the distribution is empty or not finite")
    # Rounding can lift u times the sum to the sum itself.
    index = min(int(torch.searchsorted(cumulative, u * cumulative[-1], right=True)), ids.numel() - 1)
    return int(ids[index])
