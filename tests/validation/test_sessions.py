"""Messages of sessions: every bad field is named, with what was wrong and what would be right."""

from collections.abc import Callable
from typing import Any

import pytest

from foredraft.sampling.params import SamplingParams
from foredraft.v1 import common_pb2, draft_pb2, target_pb2
from foredraft.validation import (
    check_commit,
    check_open_draft,
    check_open_target,
    check_verifying,
)
from tests.validation.common import CONTEXT, V, resolved, violations

Sampling = common_pb2.Sampling


OPEN_TARGET = {"token_ids": [1, 2, 3], "prompt_length": 2, "sampling": resolved()}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"token_ids": []}, "token_ids: is empty; must have at least one token"),
        ({"token_ids": [1, V, 3]}, "token_ids[1]: is 100; must be in [0, 100), the vocabulary"),
        ({"token_ids": [1] * 9}, "token_ids: has 9 tokens; must fit the context of 8"),
        ({"prompt_length": 0}, "prompt_length: is 0; must be in [1, 3], the length of token_ids"),
        ({"prompt_length": 4}, "prompt_length: is 4; must be in [1, 3], the length of token_ids"),
        ({"sampling": resolved(top_p=2)}, "sampling.top_p: is 2.0; must be in (0, 1]"),
        ({"sampling": Sampling(seed=1)}, "sampling.max_new_tokens: is not set; a session has no default for it"),
    ],
)
def test_a_bad_opening_is_refused_by_both_services(fields: dict[str, Any], expected: str) -> None:
    target = target_pb2.OpenTarget(**{**OPEN_TARGET, **fields})
    assert violations(check_open_target, target, vocabulary_size=V, context_length=CONTEXT) == [f"open.{expected}"]
    draft = draft_pb2.OpenDraft(**{**OPEN_TARGET, **fields})
    assert violations(check_open_draft, draft, vocabulary_size=V, context_length=CONTEXT, drafters=()) == [
        f"open.{expected}"
    ]


def test_a_prompt_that_fills_the_target_leaves_no_room_for_output() -> None:
    request = target_pb2.OpenTarget(token_ids=[1] * CONTEXT, prompt_length=CONTEXT, sampling=resolved())
    description = "is 8, the context's length; must be less, so that there is room for output"
    assert violations(check_open_target, request, vocabulary_size=V, context_length=CONTEXT) == [
        f"open.prompt_length: {description}"
    ]


def test_logprobs_are_limited() -> None:
    request = target_pb2.OpenTarget(**OPEN_TARGET, logprobs=21)
    assert violations(check_open_target, request, vocabulary_size=V, context_length=CONTEXT) == [
        "open.logprobs: is 21; must be in [0, 20]"
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"drafter": 7}, "drafter: is 7; must be one of DRAFTER_MODEL, DRAFTER_NGRAM, DRAFTER_COMBINED"),
        ({"drafter": 1}, "drafter: is DRAFTER_MODEL; must be one that this server offers: DRAFTER_NGRAM"),
        ({"eos_token_ids": [V]}, "eos_token_ids[0]: is 100; must be in [0, 100), the vocabulary"),
    ],
)
def test_a_bad_draft_opening_is_refused(fields: dict[str, Any], expected: str) -> None:
    request = draft_pb2.OpenDraft(**OPEN_TARGET, **fields)
    offered = [common_pb2.DRAFTER_NGRAM]
    assert violations(check_open_draft, request, vocabulary_size=V, context_length=CONTEXT, drafters=offered) == [
        f"open.{expected}"
    ]


def test_good_openings_give_the_params() -> None:
    target, draft = target_pb2.OpenTarget(**OPEN_TARGET), draft_pb2.OpenDraft(**OPEN_TARGET)
    params = SamplingParams(seed=1, max_new_tokens=10)
    assert check_open_target(target, vocabulary_size=V, context_length=CONTEXT) == params
    assert check_open_draft(draft, vocabulary_size=None, context_length=None, drafters=()) == params


@pytest.mark.parametrize(
    ("check", "message", "expected"),
    [
        (
            check_commit,
            draft_pb2.Commit(base=0),
            "commit.base: is 0; must be at least 1, for a text has at least one token",
        ),
        (
            check_commit,
            draft_pb2.Commit(base=1, token_ids=[V]),
            "commit.token_ids[0]: is 100; must be in [0, 100), the vocabulary",
        ),
        (check_commit, draft_pb2.Commit(base=1, max_tokens=65), "commit.max_tokens: is 65; must be in [0, 64]"),
        (
            check_verifying,
            draft_pb2.Verifying(base=0),
            "verifying.base: is 0; must be at least 1, for a text has at least one token",
        ),
        (
            check_verifying,
            draft_pb2.Verifying(base=1, token_ids=[1] * 65),
            "verifying.token_ids: has 65 tokens; must have at most 64",
        ),
        (
            check_verifying,
            draft_pb2.Verifying(base=1, max_tokens=65),
            "verifying.max_tokens: is 65; must be in [0, 64]",
        ),
    ],
)
def test_a_bad_draft_message_is_refused(check: Callable[..., None], message: Any, expected: str) -> None:
    assert violations(check, message, vocabulary_size=V) == [expected]


def test_good_draft_messages_pass() -> None:
    check_commit(draft_pb2.Commit(base=1, token_ids=[1] * 100, max_tokens=64), vocabulary_size=V)
    check_verifying(draft_pb2.Verifying(base=1, token_ids=[1] * 64, max_tokens=0), vocabulary_size=V)
