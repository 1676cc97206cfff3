"""The rules that end a text."""

from dataclasses import replace

import pytest

from foredraft.sampling.params import SamplingParams
from foredraft.v1.common_pb2 import (
    FINISH_REASON_CONTEXT_LENGTH,
    FINISH_REASON_EOS,
    FINISH_REASON_MAX_TOKENS,
    FINISH_REASON_STOP_TOKEN,
    FINISH_REASON_UNSPECIFIED,
)
from target_service.session import Limits, Session, finish, useful_draft_length

EOS, OTHER_EOS, STOP, OTHER_STOP = 1, 2, 10, 11
LIMITS = Limits(vocabulary_size=100, context_length=50, eos_token_ids=frozenset({EOS, OTHER_EOS}))
PARAMS = SamplingParams(max_new_tokens=20, stop_token_ids=(STOP, OTHER_STOP))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([20, 21, 22], (3, FINISH_REASON_UNSPECIFIED)),
        ([20, EOS], (2, FINISH_REASON_EOS)),
        ([20, OTHER_EOS, 21, 22], (2, FINISH_REASON_EOS)),
        ([EOS], (1, FINISH_REASON_EOS)),
        ([20, STOP, EOS], (2, FINISH_REASON_STOP_TOKEN)),
        ([20, 21, OTHER_STOP], (3, FINISH_REASON_STOP_TOKEN)),
        ([20, EOS, STOP], (2, FINISH_REASON_EOS)),
        ([], (0, FINISH_REASON_UNSPECIFIED)),
    ],
)
def test_the_first_token_that_ends_the_text_is_its_last(tokens: list[int], expected: tuple[int, int]) -> None:
    assert finish(tokens, length=8, prompt_length=5, params=PARAMS, limits=LIMITS) == expected


def test_max_new_tokens_counts_what_was_emitted_before() -> None:
    params = replace(PARAMS, max_new_tokens=5)
    ended = (2, FINISH_REASON_MAX_TOKENS)
    assert finish([20, 21, 22, 23], length=13, prompt_length=10, params=params, limits=LIMITS) == ended
    assert finish([20], length=13, prompt_length=10, params=params, limits=LIMITS)[1] == FINISH_REASON_UNSPECIFIED


def test_a_text_that_fills_the_context_ends() -> None:
    ended = (2, FINISH_REASON_CONTEXT_LENGTH)
    assert finish([20, 21, 22], length=48, prompt_length=40, params=PARAMS, limits=LIMITS) == ended


def test_an_eos_that_is_also_the_last_allowed_token_counts_as_eos() -> None:
    params = replace(PARAMS, max_new_tokens=2)
    assert finish([20, EOS], length=5, prompt_length=5, params=params, limits=LIMITS) == (2, FINISH_REASON_EOS)


def test_ignore_eos_goes_on_unless_the_eos_is_a_stop_token() -> None:
    params = replace(PARAMS, ignore_eos=True, stop_token_ids=(OTHER_EOS,))
    ended = (3, FINISH_REASON_STOP_TOKEN)
    assert finish([EOS, 20, OTHER_EOS, 21], length=5, prompt_length=5, params=params, limits=LIMITS) == ended


@pytest.mark.parametrize(("length", "useful"), [(10, 4), (13, 1), (14, 0)])
def test_of_the_tokens_still_wanted_one_is_the_targets_own(length: int, useful: int) -> None:
    session = Session([20] * length, 10, 0, replace(PARAMS, max_new_tokens=5))
    assert useful_draft_length(session, LIMITS) == useful


def test_a_draft_does_not_reach_beyond_the_context() -> None:
    session = Session([20] * 47, 40, 0, PARAMS)
    assert useful_draft_length(session, LIMITS) == 2
