"""Random numbers as a pure function of what they are for: Philox 4x32-10 (Salmon et al., SC 2011).

There is no generator state, so discarded work, batching, retries and restarts cannot change a draw, and draft and
target compute the same noise without talking. The integers are equal on every device.
"""

import enum
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Word = int | Tensor | np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""A 32-bit word: an int, or an int64 tensor or array of values in [0, 2^32)."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Purpose(enum.IntEnum):
    """What a number is for: the last word of the counter, so that no two uses share one."""

    TOKEN = 0
    POOL = 1
    PROPOSE = 2
    ACCEPT = 3
    NEXT = 4


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox 4x32-10: four random words for each counter; tensors or arrays in it and in the key are broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product of two words needs 64 bits. In a signed tensor it wraps around, but its bits are the right ones,
        # and the mask removes the copies of the sign that >> brings in. Odd words stay unmasked till they are mixed in.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((high >> 32) ^ c1 ^ k0) & _MASK, high, ((low >> 32) ^ c3 ^ k1) & _MASK, low
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel(
    seed: int | Sequence[int], sample_index: int | Sequence[int], position: int | Tensor, token_ids: Tensor
) -> Tensor:
    """Standard Gumbel noise of tokens.

    Args:
        seed: unsigned 64-bit integer, or one for each row of `token_ids` [R, N].
        sample_index: which of the samples of one request, or one for each row.
        position: absolute index in the sequence of the token drawn; a tensor broadcasts against `token_ids`.
        token_ids: int64, any shape.

    Returns:
        float64, of the broadcast shape. It lies between -3.2 and 22.9; the upper end, which decides draws, has the
        full resolution of 2^-32 in probability.
    """
    words = [
        torch.as_tensor(word) for word in philox(_counter(token_ids, position, sample_index), _key(seed, token_ids))
    ]
    lane = token_ids & 3
    upper = torch.where(lane == 3, words[3], words[2])
    lower = torch.where(lane == 1, words[1], words[0])
    h = torch.where(lane >= 2, upper, lower)
    # u = 0 is the winning end: there -log1p(-u) equals u to all digits.
    minus_u = (h.double() + 0.5) * -(2.0**-32)
    return minus_u.log1p_().neg_().log_().neg_()


def uniform(seed: int, sample_index: int, position: int, purpose: Purpose, base: int = 0) -> float:
    """A uniform number in (0, 1) with 52 random bits.

    `position` is the absolute index of the token it decides over, `base` that of the first token of the round:
    a token that one round discards must be decided by fresh numbers in the next.
    """
    words = philox((base, position, sample_index, int(purpose)), (seed & _MASK, seed >> 32 & _MASK))
    return (((int(words[0]) >> 6) << 26) + (int(words[1]) >> 6) + 0.5) * 2.0**-52


def pool_gumbel(seed: int, sample_index: int, position: int) -> float:
    """Standard Gumbel noise of the pooled candidate at a position; see `foredraft.sampling.coupled`."""
    return pool_gumbels([seed], [sample_index], [position])[0]


def pool_gumbels(seeds: Sequence[int], sample_indexes: Sequence[int], positions: Sequence[int]) -> list[float]:
    """`pool_gumbel` of several draws at once."""
    position, sample = np.array(positions, dtype=np.int64), np.array(sample_indexes, dtype=np.int64)
    key = np.array([(seed & _MASK, seed >> 32 & _MASK) for seed in seeds], dtype=np.int64).reshape(-1, 2).T
    words = philox((0, position, sample, int(Purpose.POOL)), (key[0], key[1]))
    u = np.asarray((((words[0] >> 6) << 26) + (words[1] >> 6) + 0.5) * 2.0**-52)
    return [-math.log(-math.log(one)) for one in u.tolist()]


def _counter(
    token_ids: Tensor, position: int | Tensor, sample_index: int | Sequence[int]
) -> tuple[Word, Word, Word, Word]:
    sample = _column(sample_index, token_ids)
    if token_ids.device.type != "cpu":
        return token_ids >> 2, position, sample, int(Purpose.TOKEN)
    # On a few thousand integers the operations of NumPy take a third of the time of PyTorch's.
    return token_ids.numpy() >> 2, np.atleast_1d(position), np.atleast_1d(sample), int(Purpose.TOKEN)


def _key(seed: int | Sequence[int], token_ids: Tensor) -> tuple[Word, Word]:
    if isinstance(seed, int):
        return seed & _MASK, seed >> 32 & _MASK
    low, high = [one & _MASK for one in seed], [one >> 32 for one in seed]
    return _column(low, token_ids), _column(high, token_ids)


def _column(words: int | Sequence[int], token_ids: Tensor) -> Word:
    """One word for all, or [R, 1]: one for each row of `token_ids`, where these are."""
    if isinstance(words, int):
        return words
    column = np.array(words, dtype=np.int64)[:, None]
    return column if token_ids.device.type == "cpu" else torch.from_numpy(column).to(token_ids.device)
