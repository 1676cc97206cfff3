"""Sampling messages: every bad field is named, with what was wrong and what would be right."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import MAX_VIOLATIONS, RequestError
from foredraft.sampling.params import Method, SamplingParams
from foredraft.v1 import common_pb2
from foredraft.validation import (
    sampling_params,
    sampling_proto,
)
from tests.validation.common import V, resolved, succeeds, violations

NAN, INF = math.nan, math.inf

Sampling = common_pb2.Sampling


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": -0.5}, "temperature: is -0.5; must be in [0, 100]"),
        ({"temperature": 100.001}, "temperature: is 100.001; must be in [0, 100]"),
        ({"temperature": NAN}, "temperature: is nan; must be in [0, 100]"),
        ({"temperature": INF}, "temperature: is inf; must be in [0, 100]"),
        ({"top_p": 0}, "top_p: is 0.0; must be in (0, 1]"),
        ({"top_p": 1.5}, "top_p: is 1.5; must be in (0, 1]"),
        ({"min_p": -0.1}, "min_p: is -0.1; must be in [0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty: is 0.0; must be in (0, 10]"),
        ({"presence_penalty": 101}, "presence_penalty: is 101.0; must be in [-100, 100]"),
        ({"frequency_penalty": -INF}, "frequency_penalty: is -inf; must be in [-100, 100]"),
        ({"q_support": 0}, "q_support: is 0; must be in [1, 1024]"),
        ({"q_support": 1025}, "q_support: is 1025; must be in [1, 1024]"),
        ({"method": 9}, "method: is 9; must be one of METHOD_COUPLED, METHOD_REJECTION, METHOD_BLOCK"),
        ({"max_new_tokens": 0}, "max_new_tokens: is 0; must be at least 1"),
        ({"min_new_tokens": 11}, "min_new_tokens: is 11; must be at most max_new_tokens, which is 10"),
        ({"logit_bias": {3: 1001}}, "logit_bias[3]: is 1001.0; must be in [-1000, 1000]"),
        ({"logit_bias": {3: NAN}}, "logit_bias[3]: is nan; must be in [-1000, 1000]"),
        ({"logit_bias": {V: 1}}, "logit_bias[100]: has key 100; must be in [0, 100), the vocabulary"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "logit_bias: has 1025 entries; must have at most 1024"),
        ({"stop_token_ids": [1, V]}, "stop_token_ids[1]: is 100; must be in [0, 100), the vocabulary"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids: has 65 entries; must have at most 64"),
    ],
)
def test_a_bad_sampling_field_is_named_with_what_would_be_right(fields: dict[str, Any], expected: str) -> None:
    assert violations(sampling_params, resolved(**fields), vocabulary_size=V) == [f"sampling.{expected}"]


@pytest.mark.parametrize("name", ["seed", "max_new_tokens"])
def test_a_session_needs_what_only_the_orchestrator_can_choose(name: str) -> None:
    sampling = resolved()
    sampling.ClearField(name)
    assert violations(sampling_params, sampling, vocabulary_size=V) == [
        f"sampling.{name}: is not set; a session has no default for it"
    ]


def test_all_violations_are_told_at_once_under_the_prefix() -> None:
    sampling = resolved(temperature=-1, top_p=2, stop_token_ids=[V, V + 1])
    fields = [
        violation.partition(":")[0]
        for violation in violations(sampling_params, sampling, vocabulary_size=V, field_prefix="a.b")
    ]
    assert fields == ["a.b.temperature", "a.b.top_p", "a.b.stop_token_ids[0]", "a.b.stop_token_ids[1]"]


def test_the_number_of_violations_told_is_limited_and_the_rest_counted() -> None:
    sampling = resolved(logit_bias=dict.fromkeys(range(1000), NAN))
    with pytest.raises(RequestError, match=r"^sampling.logit_bias\[0\]: .* \(and 999 more\)$") as raised:
        sampling_params(sampling, vocabulary_size=V * V)
    assert len(raised.value.details[0].field_violations) == MAX_VIOLATIONS


def test_unset_sampling_fields_get_the_defaults_of_the_contract() -> None:
    assert sampling_params(resolved(), vocabulary_size=V) == SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={},
        seed=1,
        method=Method.COUPLED,
        q_support=64,
        max_new_tokens=10,
        min_new_tokens=0,
        stop_token_ids=(),
        ignore_eos=False,
    )


def test_explicit_zeros_are_not_unset() -> None:
    params = sampling_params(resolved(temperature=0, seed=0, top_k=0), vocabulary_size=V)
    assert params.temperature == 0
    assert params.seed == 0


def test_without_a_vocabulary_every_token_id_passes() -> None:
    sampling = resolved(stop_token_ids=[2**32 - 1], logit_bias={2**32 - 1: 1})
    assert sampling_params(sampling, vocabulary_size=None).stop_token_ids == (2**32 - 1,)


UINT32 = st.integers(0, 2**32 - 1)
INTERESTING = st.sampled_from([0.0, -0.0, 0.5, 1.0, 10.0, 100.0, 1000.0])
OPTIONAL_DOUBLE = st.none() | INTERESTING | st.floats()
OPTIONAL_UINT32 = st.none() | st.integers(0, 70) | UINT32
TOKENS = st.integers(0, V + 1) | UINT32
SAMPLINGS = st.builds(
    Sampling,
    temperature=OPTIONAL_DOUBLE,
    top_k=OPTIONAL_UINT32,
    top_p=OPTIONAL_DOUBLE,
    min_p=OPTIONAL_DOUBLE,
    repetition_penalty=OPTIONAL_DOUBLE,
    presence_penalty=OPTIONAL_DOUBLE,
    frequency_penalty=OPTIONAL_DOUBLE,
    logit_bias=st.dictionaries(TOKENS, INTERESTING | st.floats(), max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    method=st.integers(0, 4) | st.integers(-(2**31), 2**31 - 1),
    q_support=OPTIONAL_UINT32,
    max_new_tokens=OPTIONAL_UINT32,
    min_new_tokens=OPTIONAL_UINT32,
    stop_token_ids=st.lists(TOKENS, max_size=3),
    ignore_eos=st.booleans(),
)
VALID_PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=UINT32,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-1000, 1000), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    method=st.sampled_from(Method),
    q_support=st.integers(1, 1024),
    max_new_tokens=st.integers(100, 2**32 - 1),
    min_new_tokens=st.integers(0, 100),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


@given(SAMPLINGS)
def test_any_sampling_message_gives_params_in_range_or_violations(sampling: Sampling) -> None:
    if not succeeds(sampling_params, sampling, vocabulary_size=V):
        return
    params = sampling_params(sampling, vocabulary_size=V)
    assert 0 <= params.temperature <= 100
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert 0 < params.repetition_penalty <= 10
    assert -100 <= params.presence_penalty <= 100
    assert -100 <= params.frequency_penalty <= 100
    assert all(0 <= token < V and -1000 <= bias <= 1000 for token, bias in params.logit_bias.items())
    assert 1 <= params.q_support <= 1024
    assert params.max_new_tokens >= 1
    assert params.min_new_tokens <= params.max_new_tokens
    assert all(0 <= token < V for token in params.stop_token_ids)


@given(VALID_PARAMS)
def test_params_survive_the_wire(params: SamplingParams) -> None:
    data = sampling_proto(params).SerializeToString()
    assert sampling_params(Sampling.FromString(data), vocabulary_size=V) == params
