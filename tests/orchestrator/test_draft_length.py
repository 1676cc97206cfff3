"""What the choice of k promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.draft_length import PROBE_AFTER, DraftLength, predicted_acceptance


@given(wanted=st.integers(0, 100), limit=st.integers(0, 16))
def test_a_round_never_emits_more_than_wanted(wanted: int, limit: int) -> None:
    assert 0 <= DraftLength(limit=limit).choose(wanted) <= min(limit, max(0, wanted - 1))


def test_predicted_acceptance_is_the_expected_share_of_accepted_tokens() -> None:
    # One token at .8; two at .8 and .8 * .5.
    assert predicted_acceptance([0.8, 0.5], 1) == pytest.approx(0.8)
    assert predicted_acceptance([0.8, 0.5], 2) == pytest.approx((0.8 + 0.4) / 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_predicted_acceptance_falls_with_k(rates: list[float]) -> None:
    predicted = [predicted_acceptance(rates, k) for k in range(1, len(rates) + 1)]
    assert all(a >= b - 1e-12 for a, b in zip(predicted, predicted[1:], strict=False))


def test_target_accept_rate_chooses_the_largest_k_that_keeps_it() -> None:
    length = DraftLength(limit=8, target_accept_rate=0.6)
    for _ in range(500):  # the first two positions are always accepted, the third never
        length.observe(8, 2)
    assert length.choose(100) == 3  # 2/3 >= .6 > 2/4


def test_hopeless_draft_is_left_and_probed_again() -> None:
    length = DraftLength(limit=4, target_accept_rate=0.5)
    for _ in range(50):
        length.observe(4, 0)
    assert length.choose(100) == 0
    for _ in range(PROBE_AFTER):
        length.observe(0, 0)
    assert length.choose(100) == 1
    for _ in range(500):
        length.observe(1, 1)
    assert length.choose(100) > 1


def test_fixed_length_stays_whatever_is_accepted() -> None:
    length = DraftLength(limit=5, fixed=True, target_accept_rate=0.99)
    for _ in range(50):
        length.observe(5, 0)
    assert length.choose(100) == 5
