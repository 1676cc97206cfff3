"""Slow and obvious restatements of what foredraft.sampling computes, in plain Python."""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import product

import scipy.stats

from foredraft.sampling.params import SamplingParams

History = tuple[int, ...]
Distribution = Callable[[History], Sequence[Fraction]]
"""A language model: the distribution of the next token after a history."""


def warp_row(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: Iterable[int],
    vocabulary_size: int,
) -> list[float]:
    """What `warp` does to the row that follows `prompt + output`."""
    scores = [score if x < vocabulary_size else -math.inf for x, score in enumerate(logits)]
    for x, bias in params.logit_bias.items():
        scores[x] += bias
    for x in {*prompt, *output}:
        r = params.repetition_penalty
        scores[x] = scores[x] / r if scores[x] > 0 else scores[x] * r
    for x in set(output):
        scores[x] -= params.presence_penalty + params.frequency_penalty * list(output).count(x)
    if len(output) < params.min_new_tokens:
        for x in (*eos_token_ids, *params.stop_token_ids):
            scores[x] = -math.inf
    if params.temperature == 0:
        return scores
    scores = [score / params.temperature for score in scores]
    if params.top_k:
        scores = _keep(scores, _falling(scores)[: params.top_k])
    if params.top_p < 1:
        nucleus: list[int] = []
        for x in _falling(scores):
            if sum(softmax(scores)[y] for y in nucleus) < params.top_p:
                nucleus.append(x)
        scores = _keep(scores, nucleus)
    if params.min_p > 0:
        p = softmax(scores)
        scores = _keep(scores, [x for x in range(len(p)) if p[x] >= params.min_p * max(p)])
    return scores


def softmax(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def sequences(model: Distribution, length: int, vocabulary: int) -> dict[History, Fraction]:
    """The probability of every sequence of a length that starts with the empty history."""
    return {
        tokens: math.prod((model(tokens[:i])[token] for i, token in enumerate(tokens)), start=Fraction(1))
        for tokens in product(range(vocabulary), repeat=length)
    }


def chi_square_p_value(counts: dict[History, int], probabilities: dict[History, Fraction]) -> float:
    """Pearson's test of counts against probabilities; cells that expect fewer than 5 are merged. Impossible ones: 0."""
    total = sum(counts.values())
    if any(probabilities.get(cell, 0) == 0 for cell in counts):
        return 0.0
    observed, expected, rest_observed, rest_expected = [], [], 0, 0.0
    for cell, probability in probabilities.items():
        if total * probability >= 5:
            observed.append(counts.get(cell, 0))
            expected.append(float(total * probability))
        else:
            rest_observed += counts.get(cell, 0)
            rest_expected += float(total * probability)
    if rest_expected > 0:
        observed.append(rest_observed)
        expected.append(rest_expected)
    return float(scipy.stats.chisquare(observed, expected, sum_check=False).pvalue)


def _falling(scores: Sequence[float]) -> list[int]:
    finite = [x for x, score in enumerate(scores) if score > -math.inf]
    return sorted(finite, key=lambda x: (-scores[x], x))


def _keep(scores: Sequence[float], kept: Sequence[int]) -> list[float]:
    return [score if x in kept else -math.inf for x, score in enumerate(scores)]
