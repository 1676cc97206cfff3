import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from foredraft.sampling.params import SamplingParams
from foredraft.sampling.warpers import warp, warp_branches
from tests.sampling.reference import softmax, warp_row

VOCABULARY = 6
ROWS = VOCABULARY + 2  # two rows of padding in the embedding
TOKENS = st.integers(0, VOCABULARY - 1)
# Few values, so that ties are everywhere.
LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=ROWS, max_size=ROWS)


@st.composite
def cases(draw, **fixed):
    free = {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.0]),
        "top_k": st.integers(0, ROWS + 1),
        # No sum of few equal probabilities comes so close to one of these that rounding decides.
        "top_p": st.sampled_from([1.0, 0.1234, 0.3571, 0.6173, 0.8642, 0.9377]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1, 0.33, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -0.4]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -0.5, 1.0, 100.0]), max_size=3),
        "min_new_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(TOKENS, max_size=2).map(tuple),
        "ignore_eos": st.booleans(),
    }
    values = {name: fixed[name] if name in fixed else draw(strategy) for name, strategy in free.items()}
    draft = draw(st.lists(TOKENS, max_size=3))
    return (
        torch.tensor([draw(LOGITS) for _ in range(len(draft) + 1)], dtype=torch.float64),
        SamplingParams(**values),
        draw(st.lists(TOKENS, max_size=4)),
        draw(st.lists(TOKENS, max_size=4)),
        draft,
        draw(st.lists(TOKENS, max_size=2)),
    )


def check(case):
    logits, params, prompt, output, draft, eos = case
    if params.min_new_tokens:
        assume(len({*eos, *params.stop_token_ids}) < VOCABULARY)
    before = logits.clone()
    warped = warp(
        logits,
        params,
        text=prompt + output,
        prompt_length=len(prompt),
        draft=draft,
        eos_token_ids=eos,
        vocabulary_size=VOCABULARY,
    )
    assert torch.equal(logits, before), "the input was changed"
    for i, row in enumerate(warped.tolist()):
        expected = warp_row(before[i].tolist(), params, prompt, output + draft[:i], eos, VOCABULARY)
        if params.temperature == 0:
            assert row == pytest.approx(expected)
        else:
            assert softmax(row) == pytest.approx(softmax(expected), rel=1e-9)
            assert [score == -math.inf for score in row] == [score == -math.inf for score in expected]


OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "min_new_tokens": 0,
}


@pytest.mark.parametrize("name", OFF)
def test_each_warper_alone_equals_its_definition(name):
    others = {key: value for key, value in OFF.items() if key != name}
    given(cases(**others))(check)()


@given(cases())
def test_all_warpers_together_apply_in_the_documented_order(case):
    check(case)


def run(logits, **params):
    return warp(
        torch.tensor([logits]), SamplingParams(**params), text=[], prompt_length=0, vocabulary_size=len(logits)
    )[0].tolist()


def test_penalties_see_the_draft_tokens_before_a_position_and_only_those():
    warped = warp(
        torch.ones(4, 5),
        SamplingParams(frequency_penalty=1.0),
        text=[4],
        prompt_length=1,
        draft=[2, 3, 2],
        vocabulary_size=5,
    )
    assert warped.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 0, 0, 1], [1, 1, -1, 0, 1]]


def test_end_of_text_is_masked_up_to_the_minimum_length_inside_a_block():
    warped = warp(
        torch.zeros(4, 5),
        SamplingParams(min_new_tokens=3, stop_token_ids=(1,), ignore_eos=True),
        text=[2, 2, 3],
        prompt_length=2,
        draft=[2, 3, 2],
        eos_token_ids=[0],
        vocabulary_size=5,
    )
    masked = [[x for x, score in enumerate(row) if score == -math.inf] for row in warped.tolist()]
    assert masked == [[0, 1], [0, 1], [], []]


def test_ties_at_the_edge_of_top_k_and_top_p_go_to_the_lowest_ids():
    assert run([0.0, 1.0, 1.0, 1.0], top_k=2) == [-math.inf, 1.0, 1.0, -math.inf]
    assert run([0.0, 0.0, 0.0, 0.0], top_p=0.6) == [0.0, 0.0, 0.0, -math.inf]


def test_a_nucleus_larger_than_the_shortcut_is_exact():
    # 2000 equally probable tokens among 40,000, of which 0.9 is 1800.
    logits = torch.full((1, 40_000), -20.0, dtype=torch.float64)
    logits[0, ::20] = 0
    params = SamplingParams(top_p=0.9)
    kept = warp(logits, params, text=[], prompt_length=0, vocabulary_size=40_000)[0].isfinite().nonzero().squeeze(-1)
    assert kept.tolist() == list(range(0, 36_000 + 20, 20))


@pytest.mark.parametrize("top_k", [0, 1])
def test_a_row_without_tokens_stays_one_beside_others(top_k):
    logits = torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]])
    params = SamplingParams(top_k=top_k, top_p=0.5)
    warped = warp_branches(logits, params, text=[], prompt_length=0, branches=[[], []], vocabulary_size=2)
    assert warped[0].tolist() == [-math.inf, 1.0]
    assert not warped[1].isfinite().any()


def test_temperatures_close_to_zero_do_not_overflow():
    assert run([300.0, 299.0, -300.0], temperature=1e-40) == [0.0, -math.inf, -math.inf]


def test_half_precision_is_warped_in_float32_and_float64_stays():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        params = SamplingParams(temperature=0.7, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
        logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)
        assert warp(logits, params, text=[0], prompt_length=1, vocabulary_size=3).dtype == expected


def test_more_rows_than_the_draft_explains_are_refused():
    with pytest.raises(ValueError, match="3 rows of logits, but 1 draft tokens"):
        warp(torch.zeros(3, 4), SamplingParams(), text=[], prompt_length=0, draft=[1], vocabulary_size=4)


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("text_length", [0, 3, 5])
def test_rows_that_follow_different_branches_equal_each_alone(text_length, top_k):
    params = SamplingParams(
        temperature=0.7,
        top_k=top_k,
        top_p=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.4,
        min_new_tokens=3,
        stop_token_ids=(1,),
    )
    logits = torch.randn(4, 40_000, generator=torch.Generator().manual_seed(0))
    logits[1] *= 1e-3  # a nucleus larger than the shortcut
    text, prompt_length = [7, 7, 8, 9, 7][:text_length], min(text_length, 3)
    branches = [[], [7, 30], [30, 30, 31], [8]]
    together = warp_branches(
        logits, params, text=text, prompt_length=prompt_length, branches=branches, vocabulary_size=40_000
    )
    for i, branch in enumerate(branches):
        alone = warp(logits[i : i + 1], params, text=text + branch, prompt_length=prompt_length, vocabulary_size=40_000)
        assert torch.equal(together[i : i + 1], alone)
