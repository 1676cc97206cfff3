"""What the choice of k promises."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.draft_length import PROBE_AFTER_MOST, DraftLength, History, goodput, predicted_acceptance


@given(wanted=st.integers(0, 100), limit=st.integers(0, 16))
def test_a_round_never_emits_more_than_wanted(wanted: int, limit: int) -> None:
    assert 0 <= DraftLength(limit=limit, history=History()).choose(wanted) <= min(limit, max(0, wanted - 1))


def test_predicted_acceptance_is_the_expected_share_of_accepted_tokens() -> None:
    # One token at .8; two at .8 and .8 * .5.
    assert predicted_acceptance([0.8, 0.5], 1) == pytest.approx(0.8)
    assert predicted_acceptance([0.8, 0.5], 2) == pytest.approx((0.8 + 0.4) / 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_predicted_acceptance_falls_with_k(rates: list[float]) -> None:
    predicted = [predicted_acceptance(rates, k) for k in range(1, len(rates) + 1)]
    assert all(a >= b - 1e-12 for a, b in pairwise(predicted))


def run(
    length: DraftLength, *, rounds: int, seconds: Callable[[int], float], accepted: Callable[[int], int]
) -> list[int]:
    """Rounds that take seconds(k) and accept accepted(k) of k tokens; returns the k chosen."""
    chosen = []
    for _ in range(rounds):
        k = length.choose(1000)
        length.observe(k, accepted(k), seconds(k))
        chosen.append(k)
    return chosen


def test_goodput_is_expected_tokens_over_time() -> None:
    assert goodput([0.8, 0.5], [1.0, 1.1, 1.2], 2) == pytest.approx((1 + 0.8 + 0.4) / 1.2)


def test_good_draft_is_used_to_the_full_where_its_rounds_are_cheap() -> None:
    length = DraftLength(limit=6, history=History())
    chosen = run(length, rounds=300, seconds=lambda k: 1 + 0.02 * k, accepted=lambda k: k)
    assert chosen[-100:].count(6) >= 98


def test_useless_draft_costs_few_rounds() -> None:
    history = History()
    first = run(DraftLength(limit=4, history=history), rounds=300, seconds=lambda k: 1 + 0.5 * k, accepted=lambda k: 0)
    assert sum(k > 0 for k in first) < 25
    # A later sample knows from the start.
    later = run(DraftLength(limit=4, history=history), rounds=300, seconds=lambda k: 1 + 0.5 * k, accepted=lambda k: 0)
    assert sum(k > 0 for k in later) <= 6


def test_slow_draft_is_left_however_good_it_is() -> None:
    length = DraftLength(limit=4, history=History())
    chosen = run(length, rounds=300, seconds=lambda k: 1 + 2.0 * k, accepted=lambda k: k)
    assert sum(k > 0 for k in chosen[100:]) < 10


def test_draft_length_stops_where_tokens_stop_being_accepted() -> None:
    length = DraftLength(limit=8, history=History())
    chosen = run(length, rounds=400, seconds=lambda k: 1 + 0.1 * k, accepted=lambda k: min(k, 2))
    assert sorted(chosen[-100:])[50] == 2


def test_drafting_comes_back_when_it_pays_again() -> None:
    length = DraftLength(limit=4, history=History())
    run(length, rounds=200, seconds=lambda k: 1 + 2.0 * k, accepted=lambda k: k)
    chosen = run(length, rounds=1000, seconds=lambda k: 1 + 0.01 * k, accepted=lambda k: k)
    assert chosen[-PROBE_AFTER_MOST // 2 :].count(4) > PROBE_AFTER_MOST // 4


def test_target_accept_rate_chooses_the_largest_k_that_keeps_it() -> None:
    length = DraftLength(limit=8, history=History(), target_accept_rate=0.6)
    # The first two positions are always accepted, the third never; time alone would call for all 8.
    chosen = run(length, rounds=600, seconds=lambda k: 1.0, accepted=lambda k: min(k, 2))
    assert set(chosen[-100:]) <= {0, 2, 3}  # 2/3 >= .6 > 2/4
    assert max(chosen[-100:]) == 3


def test_target_accept_rate_that_nothing_keeps_is_plain_decoding_with_probes() -> None:
    length = DraftLength(limit=4, history=History(), target_accept_rate=0.9)
    chosen = run(length, rounds=400, seconds=lambda k: 1.0, accepted=lambda k: 0)
    assert 1 <= sum(k > 0 for k in chosen[100:]) < 10


def test_fixed_length_stays_whatever_happens() -> None:
    length = DraftLength(limit=5, history=History(), fixed=True, target_accept_rate=0.99)
    assert set(run(length, rounds=100, seconds=lambda k: 1 + k, accepted=lambda k: 0)) == {5}
