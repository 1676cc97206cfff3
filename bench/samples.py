"""Whether two sets of texts are samples of one distribution: BLEU, total variation, and a permutation test."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
# Memory of a part of the permutations, in numbers.
PART = 4_000_000

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Distance:
    """Total variation between the n-grams of two sets of texts, and the p-value of a permutation test."""

    total_variation: float
    p: float


def distance(own: Sequence[Tokens], other: Sequence[Tokens], n: int) -> Distance:
    """The distance of two sets of texts, the i-th of both written for the i-th prompt.

    Total variation is half the sum over all n-grams of the differences of their relative frequencies. If both sets come
    from one distribution, the two texts of a prompt might as well be exchanged: p is the part of random exchanges, the
    identity counted too, that make the distance at least as large. It is exact at any size.
    """
    counts, other_counts = (np.stack(rows) for rows in ngram_counts(own, other, n))
    both, difference = (counts + other_counts).sum(0), counts - other_counts
    value = total_variation(both, difference.sum(0))
    rng, reached = np.random.default_rng(0), 0
    part = max(1, PART // max(1, difference.shape[1]))
    for start in range(0, RESAMPLES, part):
        signs = rng.choice((-1.0, 1.0), size=(min(part, RESAMPLES - start), len(counts)))
        # What is equal but for rounding counts as reached.
        reached += int((total_variation(both, signs @ difference) >= value - 1e-12).sum())
    return Distance(float(value), (1 + reached) / (1 + RESAMPLES))


def total_variation(both: NDArray[np.float64], difference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the sum [F] and the difference [..., F] of two sets of counts; 0 if one is empty."""
    own, other = (both + difference) / 2, (both - difference) / 2
    sizes = own.sum(-1, keepdims=True), other.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        distances: NDArray[np.float64] = abs(own / sizes[0] - other / sizes[1]).sum(-1) / 2
    return np.nan_to_num(distances)


def ngram_counts(
    own: Sequence[Tokens], other: Sequence[Tokens], n: int
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """[F] counts of every n-gram for each text of both sets."""

    def count(text: Tokens) -> Counter[tuple[int, ...]]:
        return Counter(zip(*(text[i:] for i in range(n)), strict=False))

    counters = [[count(text) for text in texts] for texts in (own, other)]
    index = {ngram: i for i, ngram in enumerate(sorted(set().union(*counters[0], *counters[1])))}

    def row(counter: Counter[tuple[int, ...]]) -> NDArray[np.float64]:
        values = np.zeros(len(index))
        for ngram, count in counter.items():
            values[index[ngram]] = count
        return values

    return [row(one) for one in counters[0]], [row(one) for one in counters[1]]


def bleu_counts(own: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """[texts, 10]: matching and all n-grams for n = 1..4, and both lengths, as sacrebleu counts them."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(effective_order=True)
    scores = [metric.sentence_score(text, [reference]) for text, reference in zip(own, references, strict=True)]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores], float)


def bleu(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Corpus BLEU (Papineni et al. 2002), 0 to 100, of counts [..., 10] that are summed over texts."""
    matching, every, own, reference = counts[..., :4], counts[..., 4:8], counts[..., 8], counts[..., 9]
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(matching / every).mean(-1))
        brevity = np.minimum(1.0, np.exp(1 - reference / own))
    result: NDArray[np.float64] = 100 * np.nan_to_num(precision * brevity)
    return result


def bleu_difference(counts: NDArray[np.float64], floor: NDArray[np.float64]) -> tuple[float, float]:
    """The 95% interval of the difference of two BLEUs, from [texts, 10] each: a paired bootstrap over texts."""
    picks = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    low, high = np.percentile(bleu(counts[picks].sum(1)) - bleu(floor[picks].sum(1)), [2.5, 97.5])
    return float(low), float(high)
