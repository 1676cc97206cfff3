"""Exactness of rejection sampling and block verification, by enumerating every draft and every outcome of the coins.

Probabilities are multiples of 1/64, so float32 holds those of the draft exactly. Sums are compared to 1e-12.
"""

import math
import random
from collections import defaultdict
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch

from foredraft.sampling.params import Method, SamplingParams
from foredraft.sampling.proposal import SparseQ, one_hot, propose
from foredraft.sampling.verification import (
    Verification,
    block_acceptance,
    block_rule,
    dense_q,
    rejection_acceptance,
    rejection_rule,
    verify,
)
from foredraft.sampling.warpers import warp
from tests.sampling.reference import sequences, softmax, warp_row


def table(seed, vocabulary, zeros=0):
    """A language model: random distributions that depend on the whole history, `zeros` tokens impossible in each."""

    @cache
    def distribution(history):
        numbers = random.Random(f"{seed} {history}")
        weights = [0] * vocabulary
        possible = numbers.sample(range(vocabulary), vocabulary - zeros)
        for x in possible:
            weights[x] = 1
        for _ in range(64 - len(possible)):
            weights[numbers.choice(possible)] += 1
        return tuple(Fraction(w, 64) for w in weights)

    return distribution


def certain(seed, vocabulary):
    return table(seed, vocabulary, zeros=vocabulary - 1)


def constant(*weights):
    total = sum(weights)
    return lambda history: tuple(Fraction(w, total) for w in weights)


def tied(seed, vocabulary, **params):
    """What the warpers make of logits that take three values only, so that they tie at every edge."""

    @cache
    def distribution(history):
        numbers = random.Random(f"{seed} {history}")
        logits = [numbers.choice((0.0, 0.5, 1.0)) for _ in range(vocabulary)]
        expected = softmax(warp_row(logits, SamplingParams(**params), [], [], (), vocabulary))
        warped = warp(
            torch.tensor([logits], dtype=torch.float64),
            SamplingParams(**params),
            text=[],
            prompt_length=0,
            vocabulary_size=vocabulary,
        )
        assert warped.softmax(-1)[0].tolist() == pytest.approx(expected, abs=1e-15)
        return tuple(Fraction(p) for p in expected)

    return distribution


def claim(q):
    """Says of a draft that its tokens were drawn from `q`."""

    def sparse(draft):
        weights = torch.tensor([[float(x) for x in q(draft[:i])] for i in range(len(draft))])
        return SparseQ(torch.arange(weights.shape[1]).expand(len(draft), -1), weights)

    return sparse


def arithmetic(method, p, draft, claimed):
    """For each outcome of the coins: its probability, the accepted length, the distribution of the next token."""
    k = len(draft)
    rows = torch.tensor([[float(x) for x in p(draft[:i])] for i in range(k + 1)], dtype=torch.float64)
    dense = dense_q(claimed(draft), draft, rows)
    if method is Method.REJECTION:
        rule, passes = rejection_rule, rejection_acceptance(rows, dense, draft)
    else:
        rule, passes = block_rule, block_acceptance(rows, dense, draft)[0]
    for outcome in product((True, False), repeat=k):
        probability = math.prod(h if passed else 1 - h for h, passed in zip(passes, outcome, strict=True))
        if probability > 0:
            accepted, following = rule(rows, dense, draft, [0.0 if passed else 1.0 for passed in outcome])
            yield probability, accepted, (following / following.sum()).tolist()


def drafts(q, k, vocabulary):
    return [(draft, float(p)) for draft, p in sequences(q, k, vocabulary).items() if p > 0]


def emitted(method, p, q, k, vocabulary, claimed):
    """The probability of every text of k + 1 tokens: those of a round, completed by the target where it emits fewer."""
    rounds = defaultdict(float)
    for draft, drafted in drafts(q, k, vocabulary):
        for probability, accepted, following in arithmetic(method, p, draft, claimed or one_hot):
            for token, chance in enumerate(following):
                rounds[*draft[:accepted], token] += drafted * probability * chance
    result = {}
    for text in product(range(vocabulary), repeat=k + 1):
        result[text], tail = 0.0, 1.0
        for length in range(k + 1, 0, -1):
            result[text] += rounds[text[:length]] * tail
            tail *= float(p(text[: length - 1])[text[length - 1]])
    return result


def mean_accepted(method, p, q, k, vocabulary):
    return sum(
        drafted * probability * accepted
        for draft, drafted in drafts(q, k, vocabulary)
        for probability, accepted, _ in arithmetic(method, p, draft, claim(q))
    )


MODELS = {
    "random tables": (table(1, 3), table(2, 3), 3),
    "random tables, four tokens": (table(3, 4), table(4, 4), 4),
    "random tables, five tokens": (table(20, 5), table(21, 5, zeros=2), 5),
    "p = q": (table(5, 3), table(5, 3), 3),
    "p = q on some histories only": (
        table(6, 3),
        lambda history: table(6, 3)(history) if sum(history) % 2 else table(7, 3)(history),
        3,
    ),
    "p and q have no token in common": (constant(0, 0, 1, 3), constant(1, 1, 0, 0), 4),
    "p and q leave out different tokens": (table(8, 4, zeros=1), table(9, 4, zeros=2), 4),
    "q is certain": (table(10, 3), certain(11, 3), 3),
    "p is certain": (certain(12, 3), table(13, 3), 3),
    "both are certain": (certain(14, 3), certain(15, 3), 3),
    "block verification keeps what token-wise rejects": (constant(1, 2), constant(2, 1), 2),
    "ties at the edge of top-k": (tied(16, 4, top_k=2), table(17, 4), 4),
    "ties at the edge of top-p": (tied(18, 4, top_p=0.6), table(19, 4), 4),
}
BOTH = [Method.REJECTION, Method.BLOCK]


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_text_has_the_probability_the_target_gives_it(method, name, k):
    p, q, vocabulary = MODELS[name]
    assert_exact(method, p, q, k, vocabulary)


def assert_exact(method, p, q, k, vocabulary):
    expected = sequences(p, k + 1, vocabulary)
    for text, probability in emitted(method, p, q, k, vocabulary, claim(q)).items():
        assert probability == pytest.approx(float(expected[text]), abs=1e-12), text


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("claimed", [constant(0, 1, 3), None])
def test_every_text_stays_exact_when_tokens_come_that_q_excludes_or_without_q(method, claimed):
    p = table(22, 3)
    # Every other token is token 0, which q excludes; the others are drawn as claimed. None: not drawn at all.
    sent = constant(4, 1, 3)
    expected = sequences(p, 4, 3)
    for text, probability in emitted(method, p, sent, 3, 3, claimed and claim(claimed)).items():
        assert probability == pytest.approx(float(expected[text]), abs=1e-12), text


@pytest.mark.parametrize("name", MODELS)
def test_block_verification_accepts_at_least_as_much_as_rejection_sampling(name):
    p, q, vocabulary = MODELS[name]
    for k in (1, 2, 3):
        block, rejection = (mean_accepted(method, p, q, k, vocabulary) for method in (Method.BLOCK, Method.REJECTION))
        assert block >= rejection - 1e-12


def test_block_verification_accepts_the_known_amount_in_the_papers_example():
    # Section 1 of arXiv 2403.10444: 11/9 tokens against 10/9.
    p, q = constant(1, 2), constant(2, 1)
    assert mean_accepted(Method.REJECTION, p, q, 2, 2) == pytest.approx(10 / 9)
    assert mean_accepted(Method.BLOCK, p, q, 2, 2) == pytest.approx(11 / 9)


@pytest.mark.parametrize("rule", [rejection_rule, block_rule])
def test_a_refusal_that_only_rounding_can_cause_falls_back_to_the_target(rule):
    p = torch.tensor([[0.1, 0.9], [0.7, 0.3], [0.5, 0.5]], dtype=torch.float64)
    accepted, weights = rule(p, p[:2], [1, 0], [1.0, 1.0])
    assert torch.equal(weights, p[accepted])


SCORES = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 0.0, 3.0], [0.0, 1.0, 0.0, 0.0]])


@pytest.mark.parametrize("method", Method)
def test_temperature_0_is_greedy_with_ties_to_the_lowest_id_under_every_method(method):
    params = SamplingParams(temperature=0, method=method)
    for draft, expected in (([1, 0], (2, 1)), ([1, 3], (1, 0)), ([2, 0], (0, 1))):
        verified = verify(SCORES, draft, one_hot(draft), params, sample_index=0, base=5)
        assert verified == Verification(*expected)
    token, ids, probabilities = propose(SCORES[0], params, sample_index=0, base=5, position=5)
    assert (token, ids.tolist(), probabilities.tolist()) == (1, [1], [1.0])


@pytest.mark.parametrize("method", Method)
def test_an_empty_draft_draws_one_token(method):
    verified = verify(SCORES[:1], [], None, SamplingParams(method=method), sample_index=0, base=5)
    assert verified.accepted == 0
    assert 0 <= verified.next_token < 4


@pytest.mark.parametrize("method", Method)
def test_tokens_the_warpers_removed_are_neither_accepted_nor_drawn(method):
    warped = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]]).expand(3, -1)
    for seed in range(50):
        params = SamplingParams(method=method, seed=seed)
        verified = verify(warped, [2, 0], one_hot([2, 0]), params, sample_index=0, base=5)
        assert verified.accepted == 0
        assert verified.next_token in (0, 1)


def test_a_proposal_is_drawn_from_the_distribution_that_is_sent():
    row = torch.randn(200, generator=torch.Generator().manual_seed(0))
    proposed = [
        propose(row, SamplingParams(seed=seed, q_support=5), sample_index=0, base=9, position=9) for seed in range(2000)
    ]
    _, ids, probabilities = proposed[0]
    assert ids.tolist() == row.topk(5).indices.tolist()
    assert probabilities.dtype == torch.float32
    assert probabilities.sum() == pytest.approx(1)
    counts = torch.tensor([sum(token == x for token, _, _ in proposed) for x in ids.tolist()])
    assert (counts - 2000 * probabilities).abs().max() < 4 * (2000 / 4) ** 0.5


def test_rows_of_q_of_different_lengths_are_filled_up_with_zeros():
    rows = [(torch.tensor([7]), torch.tensor([1.0])), (torch.tensor([3, 4]), torch.tensor([0.75, 0.25]))]
    q = SparseQ.stack(rows)
    assert q.probabilities.tolist() == [[1.0, 0.0], [0.75, 0.25]]
    dense = dense_q(q, [7, 4], torch.zeros(3, 8))
    assert dense.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0.75, 0.25, 0, 0, 0]]


def test_repeated_ids_in_q_add_up_and_rows_are_normalised():
    q = SparseQ(torch.tensor([[1, 1, 2]]), torch.tensor([[0.5, 0.5, 1.0]]))
    assert dense_q(q, [2], torch.zeros(2, 3)).tolist() == [[0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("ids", "probabilities", "message"),
    [
        ([[0, 1]], [[0.5, 0.5]], "one row per draft token"),
        ([[0, 1], [0, 1]], [[1.0], [1.0]], "as many ids as probabilities"),
        ([[0, 4], [0, 1]], [[0.5, 0.5], [0.5, 0.5]], "must lie in"),
        ([[0, -1], [0, 1]], [[0.5, 0.5], [0.5, 0.5]], "must lie in"),
        ([[0, 1], [0, 1]], [[0.5, 0.5], [1.5, -0.5]], "not negative"),
        ([[0, 1], [0, 1]], [[0.5, 0.5], [math.nan, 0.5]], "finite"),
    ],
)
def test_a_q_that_makes_no_sense_is_refused(ids, probabilities, message):
    q = SparseQ(torch.tensor(ids), torch.tensor(probabilities))
    with pytest.raises(ValueError, match=message):
        verify(SCORES, [0, 1], q, SamplingParams(method=Method.BLOCK), sample_index=0, base=5)


@pytest.mark.parametrize("method", Method)
def test_scores_that_are_not_numbers_are_refused(method):
    with pytest.raises(ValueError, match="no token is left to draw"):
        verify(torch.full((2, 4), math.nan), [0], one_hot([0]), SamplingParams(method=method), sample_index=0, base=5)


def test_a_draft_that_does_not_match_the_scores_is_refused():
    with pytest.raises(ValueError, match="2 draft tokens need 3 rows of scores, not 2"):
        verify(SCORES[:2], [0, 1], None, SamplingParams(), sample_index=0, base=5)
