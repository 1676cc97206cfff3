"""Rounds and the distributions in them."""

import math
import struct
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.sampling.params import Method, SamplingParams
from foredraft.v1 import common_pb2, target_pb2
from foredraft.validation import check_round
from tests.validation.common import V, succeeds, violations

NAN = math.nan
REJECTION = SamplingParams(method=Method.REJECTION)


def distributions(ids: list[list[int]], probabilities: list[list[float]]) -> common_pb2.SparseDistributions:
    flat_ids, flat_probabilities = [*chain(*ids)], [*chain(*probabilities)]
    return common_pb2.SparseDistributions(
        support=len(ids[0]),
        token_ids=struct.pack(f"<{len(flat_ids)}I", *flat_ids),
        probabilities=struct.pack(f"<{len(flat_probabilities)}f", *flat_probabilities),
    )


def round_(token_ids: list[int], **q: list[list[Any]]) -> target_pb2.Round:
    return target_pb2.Round(token_ids=token_ids, q=distributions(**q) if q else None)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (round_([V]), "token_ids[0]: is 100; must be in [0, 100), the vocabulary"),
        (round_([1] * 65), "token_ids: has 65 tokens; must have at most 64"),
        (
            round_([1]),
            "q: is not set; must be set: rejection verification needs what each draft token was drawn from",
        ),
        (
            target_pb2.Round(token_ids=[1], q=common_pb2.SparseDistributions()),
            "q.support: is 0; must be in [1, 1024]",
        ),
        (
            target_pb2.Round(token_ids=[1], q=common_pb2.SparseDistributions(support=1025)),
            "q.support: is 1025; must be in [1, 1024]",
        ),
        (
            round_([1, 2], ids=[[1, 2, 3]], probabilities=[[0.5, 0.25, 0.25]] * 2),
            "q.token_ids: has 12 bytes; must have 2 rows of 3 numbers, 24 bytes",
        ),
        (
            round_([1], ids=[[1, 2]], probabilities=[[0.5, 0.25]]),
            "q.probabilities[0]: adds up to 0.75; must add up to 1",
        ),
        (
            round_([1], ids=[[1, 2]], probabilities=[[1.5, -0.5]]),
            "q.probabilities[0]: has a number that is negative or not finite; must be probabilities",
        ),
        (
            round_([1], ids=[[1, 2]], probabilities=[[NAN, 1]]),
            "q.probabilities[0]: has a number that is negative or not finite; must be probabilities",
        ),
        (
            round_([1, 2], ids=[[1, 2], [2, V]], probabilities=[[0.5, 0.5]] * 2),
            "q.token_ids[1]: must lie in [0, 100), the vocabulary",
        ),
        (
            round_([1], ids=[[1, 1]], probabilities=[[0.5, 0.5]]),
            "q.token_ids[0]: has a token twice; must have distinct tokens",
        ),
        (
            round_([3], ids=[[1, 2]], probabilities=[[0.5, 0.5]]),
            "q.probabilities[0]: gives draft token 3 no chance; must be what the token was drawn from",
        ),
        (
            round_([3], ids=[[1, 3]], probabilities=[[1, 0]]),
            "q.probabilities[0]: gives draft token 3 no chance; must be what the token was drawn from",
        ),
    ],
)
def test_a_bad_round_is_refused(message: target_pb2.Round, expected: str) -> None:
    assert violations(check_round, message, REJECTION, vocabulary_size=V) == [f"round.{expected}"]


@pytest.mark.parametrize(
    ("params", "tokens"),
    [(SamplingParams(), [1]), (SamplingParams(method=Method.BLOCK, temperature=0), [1]), (REJECTION, [])],
)
def test_distributions_are_refused_where_they_mean_nothing(params: SamplingParams, tokens: list[int]) -> None:
    message = round_(tokens, ids=[[1]], probabilities=[[1]])
    reason = "only draft tokens of rejection or block verification at a temperature above 0 have it"
    assert violations(check_round, message, params, vocabulary_size=V) == [
        f"round.q: is set; must not be set: {reason}"
    ]
    assert check_round(round_(tokens), params, vocabulary_size=V) is None


def test_distributions_are_decoded_and_fillers_lose_their_ids() -> None:
    message = round_([7, 9], ids=[[7, 8, 9], [9, 9, 2**32 - 1]], probabilities=[[0.5, 0.25, 0.25], [1, 0, 0]])
    decoded = check_round(message, REJECTION, vocabulary_size=V)
    assert decoded is not None
    ids, probabilities = decoded
    assert (ids.dtype, probabilities.dtype) == ("int64", "float32")
    assert ids.tolist() == [[7, 8, 9], [9, 0, 0]]
    assert probabilities.tolist() == [[0.5, 0.25, 0.25], [1, 0, 0]]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(0, 3),
    st.binary(max_size=36),
    st.binary(max_size=36),
)
def test_any_distributions_are_decoded_or_refused(tokens: list[int], support: int, ids: bytes, numbers: bytes) -> None:
    size = 4 * len(tokens) * support
    q = common_pb2.SparseDistributions(support=support, token_ids=ids[:size], probabilities=numbers[:size])
    succeeds(check_round, target_pb2.Round(token_ids=tokens, q=q), REJECTION, vocabulary_size=V)
