"""What the choice of k promises."""

import random
from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.costs import Curve, TargetCosts
from orchestrator.draft_length import (
    PLAIN,
    PROBE_AFTER_MOST,
    Choice,
    DraftLength,
    Estimates,
    Shared,
    between,
    choices,
    expected,
    goodput,
)


def shared(*, turns: bool = False) -> Shared:
    return Shared(TargetCosts(), turns)


def run(
    length: DraftLength,
    common: Shared,
    *,
    rounds: int,
    forward: Callable[[int], float],
    takes: Callable[[int], int],
    wait: Callable[[int], float] = lambda k: 0.0,
    foreseen: Callable[[int], bool] = lambda k: False,
    rows: int = 1,
) -> list[int]:
    """Rounds whose forward over n tokens takes forward(n) seconds and accepts takes(k) of k tokens; returns every k."""
    chosen, hit, drafted = [], False, 0
    for _ in range(rounds):
        k = length.choose(1000) if hit else length.after_miss(1000)
        if not hit and k:
            length.waited(k, wait(k))
        tokens = rows * (1 + k)
        seconds = forward(tokens)
        common.target.add(rows=rows, tokens=tokens, compute=seconds, queue=0.0, elapsed=seconds, alone=common.turns)
        drafted = k
        length.observe(drafted, takes(drafted))
        hit = not common.turns and length.prepare(1000) > 0 and foreseen(drafted)
        if not common.turns:
            length.foreseen(drafted, hit)
        chosen.append(k)
    return chosen


def cheap(n: int) -> float:
    """A forward that costs little more for more tokens, as on a GPU."""
    return 1 + 0.02 * n


@given(wanted=st.integers(0, 100), limit=st.integers(0, 16))
def test_a_round_never_emits_more_than_wanted(wanted: int, limit: int) -> None:
    length = DraftLength(limit=limit, shared=shared())
    for chosen in (length.choose(wanted), length.prepare(wanted), length.after_miss(wanted)):
        assert 0 <= chosen <= min(limit, max(0, wanted - 1))


def test_accepted_is_the_expected_number_of_accepted_tokens() -> None:
    assert expected([0.8, 0.5]) == pytest.approx([0.0, 0.8, 0.8 + 0.8 * 0.5])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_predicted_acceptance_falls_with_k(rates: list[float]) -> None:
    predicted = [tokens / k for k, tokens in enumerate(expected(rates)) if k > 0]
    assert all(a >= b - 1e-12 for a, b in pairwise(predicted))


def test_goodput_of_turns_is_the_closed_form() -> None:
    never = Estimates(round=lambda k: 1 + 0.1 * k, wait=[0.0, 0.1, 0.2], hit=[0.0] * 3, ready=[0, 1, 2], plain=0.5)
    assert goodput(expected([0.8, 0.5]), never, Choice(2, 2)) == pytest.approx((1 + 0.8 + 0.4) / (1.2 + 0.2))
    assert goodput(expected([0.8, 0.5]), never, PLAIN) == pytest.approx(1 / 0.5)


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 3), st.booleans())
def test_goodput_of_overlap_is_what_a_simulation_gives(seed: int, k: int, m: int, in_time: bool) -> None:
    rng = random.Random(seed)
    accepted = expected([rng.uniform(0.2, 0.9) for _ in range(3)])
    hit = [rng.uniform(0.2, 0.8) for _ in range(4)]
    # Else half of the prepared answers of k tokens lack the last one when the verdict comes.
    ready = range(4) if in_time else [max(0.0, k - 0.5) for k in range(4)]
    rounds = [1.0, 1.3, 1.4, 1.6]
    estimates = Estimates(partial(between, rounds), [0.0, 0.2, 0.5, 0.6], hit, ready, plain=0.9)
    r = [k, k] if in_time else [k - 1, k]
    # The expectation over many rounds, followed exactly: the probability that a round comes after a hit.
    after_hit, tokens, seconds = 0.0, 0.0, 0.0
    for _ in range(3000):
        tokens += 1 + after_hit * sum(accepted[n] for n in r) / 2 + (1 - after_hit) * accepted[m]
        seconds += after_hit * sum(rounds[n] for n in r) / 2
        seconds += (1 - after_hit) * (estimates.wait[m] + rounds[m])
        after_hit = after_hit * sum(hit[n] for n in r) / 2 + (1 - after_hit) * hit[m]
    assert goodput(accepted, estimates, Choice(k, m)) == pytest.approx(tokens / seconds, rel=2e-3)


def test_choices_include_every_short_length_and_the_limit() -> None:
    assert {c.k for c in choices(13, turns=True)} == {*range(1, 9), 10, 12, 13}
    assert all(c.k == c.after_miss for c in choices(13, turns=True))
    assert Choice(4, 0) in set(choices(4, turns=False))


def test_good_draft_is_used_to_the_full_where_its_rounds_are_cheap() -> None:
    common = shared(turns=True)
    chosen = run(DraftLength(limit=6, shared=common), common, rounds=300, forward=cheap, takes=lambda k: k)
    assert chosen[-100:].count(6) >= 98


def test_useless_draft_costs_few_rounds() -> None:
    common = shared(turns=True)
    slow = {"rounds": 300, "forward": lambda n: 1 + 0.5 * n, "takes": lambda k: 0}
    first = run(DraftLength(limit=4, shared=common), common, **slow)
    assert sum(k > 0 for k in first) < 25
    # A later sample knows from the start.
    later = run(DraftLength(limit=4, shared=common), common, **slow)
    assert sum(k > 0 for k in later) <= 2


def test_slow_draft_is_left_however_good_it_is() -> None:
    common = shared(turns=True)
    length = DraftLength(limit=4, shared=common)
    chosen = run(length, common, rounds=300, forward=cheap, takes=lambda k: k, wait=lambda k: 2.0 * k)
    assert sum(k > 0 for k in chosen[100:]) < 10


def test_draft_length_stops_where_tokens_stop_being_accepted() -> None:
    common = shared(turns=True)
    length = DraftLength(limit=8, shared=common)
    chosen = run(length, common, rounds=400, forward=lambda n: 1 + 0.1 * n, takes=lambda k: min(k, 2))
    assert sorted(chosen[-100:])[50] == 2


def test_drafting_comes_back_when_it_pays_again() -> None:
    common = shared(turns=True)
    length = DraftLength(limit=4, shared=common)
    run(length, common, rounds=200, forward=cheap, takes=lambda k: k, wait=lambda k: 2.0 * k)
    chosen = run(length, common, rounds=1000, forward=cheap, takes=lambda k: k)
    assert chosen[-PROBE_AFTER_MOST // 2 :].count(4) > PROBE_AFTER_MOST // 4


def test_after_a_miss_a_plain_round_goes_at_once_where_the_draft_is_slow_and_foresees_well() -> None:
    common = shared()
    length = DraftLength(limit=4, shared=common)
    often = cycle([True, True, True, False])
    run(
        length, common, rounds=400, forward=cheap, takes=lambda k: k, wait=lambda k: 2.0, foreseen=lambda k: next(often)
    )
    assert (length.choose(1000), length.after_miss(1000)) == (4, 0)


def test_after_a_miss_the_target_waits_where_a_draft_comes_soon() -> None:
    common = shared()
    length = DraftLength(limit=4, shared=common)
    run(length, common, rounds=400, forward=cheap, takes=lambda k: k, wait=lambda k: 0.02 * k)
    assert length.after_miss(1000) == 4


def test_drafts_shrink_where_the_batch_makes_their_tokens_dear() -> None:
    # Memory bound up to 8 tokens, then every token costs its computation.
    def forward(n: int) -> float:
        return max(1.0, n / 8)

    last = {}
    for rows in (1, 8):
        common = shared(turns=True)
        length = DraftLength(limit=4, shared=common)
        last[rows] = run(length, common, rounds=400, forward=forward, takes=lambda k: k // 2, rows=rows)[-50:]
    assert max(last[1]) == 4
    assert sum(last[8]) <= 4


def test_target_accept_rate_chooses_the_largest_k_that_keeps_it() -> None:
    common = shared(turns=True)
    length = DraftLength(limit=8, shared=common, target_accept_rate=0.6)
    # The first two positions are always accepted, the third never; time alone would call for all 8.
    chosen = run(length, common, rounds=600, forward=lambda n: 1.0, takes=lambda k: min(k, 2))
    assert set(chosen[-100:]) <= {0, 2, 3}  # 2/3 >= .6 > 2/4


def test_target_accept_rate_that_nothing_keeps_is_plain_decoding_with_probes() -> None:
    common = shared(turns=True)
    length = DraftLength(limit=4, shared=common, target_accept_rate=0.9)
    chosen = run(length, common, rounds=400, forward=lambda n: 1.0, takes=lambda k: 0)
    assert 1 <= sum(k > 0 for k in chosen[100:]) < 10


def test_fixed_length_stays_whatever_happens() -> None:
    common = shared(turns=True)
    length = DraftLength(limit=5, shared=common, fixed=True, target_accept_rate=0.99)
    assert set(run(length, common, rounds=100, forward=lambda n: float(n), takes=lambda k: 0)) == {5}


def test_a_curve_is_a_straight_line_between_what_was_measured() -> None:
    curve = Curve()
    assert curve.at(3, default=7.0) == 7.0
    curve.add(2, 10.0)
    curve.add(4, 20.0)
    assert [curve.at(n) for n in (1, 2, 3, 4, 9)] == [10.0, 10.0, 15.0, 20.0, 20.0]


def test_a_curve_stays_small_and_true_whatever_is_measured() -> None:
    curve = Curve()
    for n in range(1, 20_000):
        curve.add(n, 1e-3 * n)
    assert len(curve.values) < 120
    assert all(curve.at(n) == pytest.approx(1e-3 * n, rel=0.2) for n in (1, 7, 16, 100, 1000, 19_000))


def test_a_target_that_tells_no_times_breaks_nothing() -> None:
    common = shared()
    common.target.add(rows=1, tokens=1, compute=0.0, queue=0.0, elapsed=0.0)
    length = DraftLength(limit=4, shared=common)
    length.observe(4, 4)
    assert 0 <= length.choose(100) <= 4


def test_a_draft_that_slows_the_target_down_must_make_up_for_that() -> None:
    # Alone a plain round takes 1; beside the draft, with which it shares a machine, as long as two tokens are worth.
    common = shared()
    for _ in range(20):
        common.target.add(rows=1, tokens=1, compute=1.0, queue=0.0, elapsed=1.0, alone=True)
        common.target.add(rows=1, tokens=1, compute=2.0, queue=0.0, elapsed=2.0)
        common.target.add(rows=1, tokens=2, compute=2.0, queue=0.0, elapsed=2.0)
    length = DraftLength(limit=1, shared=common)
    length.observe(1, 1)
    assert length.choose(100) == 0


def test_plain_rounds_are_tried_without_the_draft_now_and_then() -> None:
    common = shared()
    length = DraftLength(limit=4, shared=common)
    quiet = 0
    for _ in range(3000):
        k = length.choose(100)
        common.target.add(rows=1, tokens=1 + k, compute=1.0, queue=0.0, elapsed=1.0, alone=length.prepare(100) == 0)
        length.observe(k, k)
        length.foreseen(k, True)
        quiet += length.prepare(100) == 0
    assert 4 <= quiet < 60


@pytest.mark.parametrize(("rate", "wait", "best"), [(0.6, 0.0005, {1}), (0.9, 0.004, {2, 3, 4})])
def test_in_turns_the_length_is_chosen_by_what_each_costs(rate: float, wait: float, best: set[int]) -> None:
    rng = random.Random(1)
    common = shared(turns=True)
    # What overlapped samples saw of the same target must not matter.
    common.target.add(rows=1, tokens=9, compute=0.5, queue=0.0, elapsed=0.5)

    def takes(k: int) -> int:
        return next((i for i in range(k) if rng.random() > rate), k)

    length = DraftLength(limit=8, shared=common)
    chosen = run(length, common, rounds=3000, forward=lambda n: 0.02 + 0.01 * n, takes=takes, wait=lambda k: wait * k)[
        1000:
    ]
    assert sum(k in best for k in chosen) > 0.8 * len(chosen)


def test_tries_in_a_batch_keep_to_the_target_accept_rate() -> None:
    common = shared()
    chosen: list[int] = []
    for _ in range(60):
        length = DraftLength(limit=8, shared=common, target_accept_rate=0.6)
        chosen += run(length, common, rounds=30, forward=cheap, takes=lambda k: 0, foreseen=lambda k: True, rows=4)
    assert set(chosen[600:]) == {0, 1}
