import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.sampling import coupled
from foredraft.sampling.coupled import Place, draw, greedy, rank, rank_rows
from foredraft.sampling.noise import gumbel
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.verification import verify
from foredraft.sampling.warpers import warp
from tests.sampling.reference import chi_square_p_value

VOCABULARY = 5
LENGTH = 8
NUMBERS = st.floats(-4, 4, width=32)


def decode(logits, params, drafts):
    """Decodes LENGTH tokens after a prompt of one; each round takes the next of `drafts`, whatever the text."""
    text, drafts = [0], iter(drafts)
    while len(text) <= LENGTH:
        draft = next(drafts, [])[: LENGTH - len(text)]
        contexts = [(text + draft[:i])[-2:] for i in range(len(draft) + 1)]
        rows = torch.stack([logits[sum(context) % len(logits)] for context in contexts])
        warped = warp(rows, params, text=text, prompt_length=1, draft=draft, vocabulary_size=VOCABULARY)
        verified = verify(warped, draft, None, params, sample_index=0, base=len(text))
        text += [*draft[: verified.accepted], verified.next_token]
    return text


DRAFTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=4), max_size=LENGTH)
LOGITS = st.lists(st.lists(NUMBERS, min_size=VOCABULARY, max_size=VOCABULARY), min_size=7, max_size=7).map(torch.tensor)
PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 3]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
)


@given(LOGITS, PARAMS, DRAFTS)
def test_the_text_is_the_same_whatever_is_drafted(logits, params, drafts):
    assert decode(logits, params, drafts) == decode(logits, params, [])


@given(
    LOGITS,
    DRAFTS,
    st.lists(
        st.lists(NUMBERS | st.just(math.inf), min_size=VOCABULARY, max_size=VOCABULARY), min_size=20, max_size=20
    ).map(torch.tensor),
)
def test_the_text_is_the_same_whatever_is_drafted_for_every_table_of_noise(logits, drafts, noise):
    with patch.object(coupled, "gumbel", lambda seed, sample, position, ids: noise[position, ids].double()):
        assert decode(logits, SamplingParams(), drafts) == decode(logits, SamplingParams(), [])


@settings(max_examples=30)
@given(LOGITS, PARAMS)
def test_a_draft_that_draws_with_the_same_noise_is_always_accepted(logits, params):
    plain = decode(logits, params, [])
    with patch(f"{__name__}.verify", side_effect=verify) as rounds:
        assert decode(logits, params, [plain[1:5], plain[6:10]]) == plain
    assert rounds.call_count == 2


def draws(row, individual, number=5000, seed=0):
    rows = row.expand(number, -1)
    return draw(rows, SamplingParams(seed=seed), sample_index=0, positions=range(number), individual=individual)


@pytest.mark.parametrize("individual", [1, 2, 1024])
def test_draws_are_distributed_as_p_with_and_without_a_pool(individual):
    # A tail of 64 tokens of which the pool holds between a third and a half, and four that are masked.
    row = -torch.linspace(0, 2, 64, dtype=torch.float64)
    row[::16] = -math.inf
    tokens = draws(row, individual)
    probabilities = {(x,): p for x, p in enumerate(row.softmax(-1).tolist())}
    counts = {(x,): tokens.count(x) for x in set(tokens)}
    assert chi_square_p_value(counts, probabilities) > 1e-3


def test_the_pool_is_in_play_in_these_tests():
    row = -torch.linspace(0, 2, 64, dtype=torch.float64)
    assert draws(row, 1, 200) != draws(row, 1024, 200)
    outside = [x for x in draws(row, 1, 200) if x not in coupled.leading(row[None], 1)[1]]
    assert len(outside) > 50


def test_draws_at_different_positions_samples_and_seeds_are_independent():
    row = torch.zeros(1, 4, dtype=torch.float64)
    cells: dict[tuple[int, ...], int] = {}
    for seed in range(1500):
        params = SamplingParams(seed=seed)
        cell = tuple(
            draw(row, params, sample_index=sample, positions=[position])[0]
            for sample, position in ((0, 0), (0, 1), (1, 0))
        )
        cells[cell] = cells.get(cell, 0) + 1
    everything = {(a, b, c): 1 / 64 for a in range(4) for b in range(4) for c in range(4)}
    assert chi_square_p_value(cells, everything) > 1e-3


@settings(max_examples=50)
@given(st.lists(NUMBERS, min_size=40, max_size=40), st.integers(0, 2**64 - 1), st.integers(1, 40))
def test_ranking_orders_candidates_by_noisy_score_and_begins_with_the_draw(row, seed, count):
    scores = torch.tensor([row])
    params = SamplingParams(seed=seed)
    ranked = rank(scores, params, sample_index=2, positions=[7], count=count)[0].tolist()
    noisy = scores[0].double() + gumbel(seed, 2, 7, torch.arange(40))
    assert ranked == noisy.argsort(descending=True, stable=True)[:count].tolist()
    assert ranked[:1] == draw(scores, params, sample_index=2, positions=[7])


def test_ranking_with_a_pool_begins_with_the_draw_and_goes_on_with_the_others():
    row = -torch.linspace(0, 2, 256, dtype=torch.float64).unsqueeze(0)
    params = SamplingParams()
    pooled = 0
    for position in range(200):
        ranked = rank(row, params, sample_index=0, positions=[position], count=4, individual=8)[0].tolist()
        assert ranked[:1] == draw(row, params, sample_index=0, positions=[position], individual=8)
        assert len(set(ranked)) == 4
        others = ranked[1:]
        noisy = row[0].double() + gumbel(0, 0, position, torch.arange(256))
        assert others == sorted(others, key=lambda x: -noisy[x])
        pooled += ranked[0] not in coupled.leading(row, 8)[1]
    assert pooled > 50


def test_ranking_of_rows_together_equals_ranking_of_each():
    rows = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    rows[2, 10:] = -math.inf
    together = rank(rows, SamplingParams(), sample_index=0, positions=range(6), count=5, individual=8)
    for i in range(6):
        alone = rank(rows[i : i + 1], SamplingParams(), sample_index=0, positions=[i], count=5, individual=8)
        assert torch.equal(together[i : i + 1], alone)


@settings(max_examples=20)
@given(st.lists(st.builds(Place, st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 99)), min_size=1))
def test_rows_of_several_requests_are_ranked_with_the_noise_of_each(places):
    rows = torch.randn(len(places), 500, generator=torch.Generator().manual_seed(0))
    rows[0] = -math.inf
    together, scores = rank_rows(rows, places, count=5, individual=8)
    assert scores[0, 0] == -math.inf
    for i, place in list(enumerate(places))[1:]:
        params = SamplingParams(seed=place.seed)
        options = {"sample_index": place.sample_index, "positions": [place.position], "individual": 8}
        assert torch.equal(together[i : i + 1], rank(rows[i : i + 1], params, count=5, **options))


def test_at_temperature_0_the_ranking_is_by_score_with_ties_to_the_lowest_id():
    row = torch.tensor([[1.0, 3.0, 3.0, -math.inf, 2.0]])
    ranked = rank(row, SamplingParams(temperature=0), sample_index=0, positions=[0], count=3)
    assert ranked.tolist() == [[1, 2, 4]]


def test_a_row_with_fewer_candidates_repeats_its_draw():
    row = torch.tensor([[-math.inf, 3.0, -math.inf, 2.0]])
    for temperature in (0.0, 1.0):
        ranked = rank(row, SamplingParams(temperature=temperature), sample_index=0, positions=[0], count=4).tolist()[0]
        assert sorted(ranked[:2]) == [1, 3]
        assert ranked[2:] == [ranked[0]] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_row_without_candidates_is_refused(temperature, value):
    with pytest.raises(ValueError, match="no token is left to draw"):
        draw(torch.full((1, 40), value), SamplingParams(temperature=temperature), sample_index=0, positions=[0])


def test_a_similar_draft_draws_the_same_token_more_often_than_independent_draws_would():
    # Total variation d: independent draws agree with probability sum p q, shared noise with at least (1 - d) / (1 + d).
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(500, 200, generator=generator, dtype=torch.float64)
    q = p + 0.3 * torch.randn(500, 200, generator=generator, dtype=torch.float64)
    for individual in (2, 1024):
        same = [
            draw(rows, SamplingParams(), sample_index=0, positions=range(500), individual=individual) for rows in (p, q)
        ]
        agreement = sum(a == b for a, b in zip(*same, strict=True)) / 500
        d = (p.softmax(-1) - q.softmax(-1)).abs().sum(-1).mean() / 2
        assert agreement > (1 - d) / (1 + d) - 0.1


def test_greedy_draws_of_several_sessions_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(1)
    # Whole numbers, so that there are ties.
    sessions = [torch.randint(0, 9, (rows, 40), generator=generator).float() for rows in (1, 4, 2)]
    sessions[1][2, 5:] = -torch.inf
    params = SamplingParams(temperature=0)
    expected = [draw(rows, params, sample_index=0, positions=range(len(rows))) for rows in sessions]
    assert greedy(sessions) == expected
    assert greedy([]) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_greedy_leaves_rows_that_are_not_finite_to_draw(value: float) -> None:
    rows = torch.zeros(3, 8)
    bad = rows.clone()
    bad[1] = value
    assert greedy([rows, bad, rows]) == [[0, 0, 0], None, [0, 0, 0]]
