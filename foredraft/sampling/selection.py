"""Picking the largest of many scores and drawing from a distribution, deterministically and without a full sort."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Rows on a CPU are searched by NumPy, which is several times faster at it than PyTorch.
_BLOCK = 16


def leading(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row of `scores` [R, V] a set of entries that contains the `count` largest finite ones.

    Usually little larger than `count`; all finite entries if they are fewer, or if V is less than 16 times `count`.
    The set is a function of the row alone: everything that reaches a certain bound, so ties cannot matter.

    Returns:
        Values [R, N] and int64 indices [R, N], by ascending index. N is at least 1 and as large as the largest set;
        smaller ones are filled up with -inf at index 0.
    """
    whole = scores.shape[1] // _BLOCK
    if scores.shape[1] % _BLOCK:
        scores = torch.nn.functional.pad(scores, (0, _BLOCK - scores.shape[1] % _BLOCK), value=-torch.inf)
    rows, columns = scores.shape
    bound = scores.new_full((rows, 1), torch.finfo(scores.dtype).min)
    if count <= whole:
        # The count-th largest of the maxima of disjoint blocks is at most the count-th largest score.
        maxima = scores.reshape(rows, _BLOCK, -1).amax(1)[:, :whole]
        bound = torch.maximum(bound, _nth_largest(maxima, count))
    places = _reaching(scores, bound)
    values = scores.flatten()[places]
    if not len(values):
        return scores.new_full((rows, 1), -torch.inf), places.new_zeros(rows, 1)
    if rows == 1:
        return values.unsqueeze(0), places.unsqueeze(0)
    lengths = (places // columns).bincount(minlength=rows).tolist()
    return (
        pad_sequence(list(torch.split(values, lengths)), batch_first=True, padding_value=-torch.inf),
        pad_sequence(list(torch.split(places % columns, lengths)), batch_first=True),
    )


def _nth_largest(values: Tensor, n: int) -> Tensor:
    """[R, 1] of values [R, N]; NaN is the largest."""
    if not values.is_cpu:
        return values.topk(n, sorted=False).values.amin(-1, keepdim=True)
    at = values.shape[1] - n
    return torch.from_numpy(np.partition(values.numpy(), at, axis=1)[:, at : at + 1])


def _reaching(scores: Tensor, bound: Tensor) -> Tensor:
    """The flat indices of the entries of `scores` [R, V] that are at least their row's `bound` [R, 1]; ascending."""
    if not scores.is_cpu:
        return (scores >= bound).flatten().nonzero().squeeze(-1)
    return torch.from_numpy(np.flatnonzero(scores.numpy() >= bound.numpy()))


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest finite entries of each row of `scores` [R, V], falling, ties by lowest index.

    Returns:
        Values [R, N] and int64 indices [R, N]. N is `count`, or less if no row has as many finite entries; rows that
        have fewer than N are filled up with -inf at index 0.
    """
    values, ids = leading(scores, count)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order[:, :count])


def argmax(scores: Tensor) -> Tensor:
    """The lowest index [R] of the largest entry of each row of `scores` [R, V]; that of NaN if there is one."""
    return torch.from_numpy(scores.numpy().argmax(-1)) if scores.is_cpu else scores.argmax(-1)


def pick(weights: Tensor, u: float) -> int:
    """The index at which the cumulative sum of `weights` [N] (at least 0, any sum) passes the fraction `u` of it.

    Never an index of weight 0. Raises ValueError if there is no other.
    """
    cumulative = weights.double().cumsum(-1)
    total = float(cumulative[-1]) if cumulative.numel() else 0.0
    if not 0 < total < torch.inf:
        raise ValueError("no token is left to draw: the distribution is empty or not finite")
    # Rounding can lift u times the sum to the sum itself.
    return int(torch.searchsorted(cumulative, min(u * total, math.nextafter(total, 0)), right=True))
