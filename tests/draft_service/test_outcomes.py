"""Which verdicts are expected."""

import math

import pytest

from draft_service.outcomes import History, likely_outcomes
from draft_service.picking import Candidates
from foredraft.sampling.params import SamplingParams
from tests.draft_service.reference import EOS, PARAMETERS, opening

GREEDY = PARAMETERS["greedy"]


def candidates(*rows: dict[int, float]) -> list[Candidates]:
    return [Candidates(list(row), [math.log(share) if share else -math.inf for share in row.values()]) for row in rows]


def verdicts(
    params: SamplingParams, drafted: list[int], rows: list[Candidates], count: int
) -> list[tuple[int, int | None]]:
    outcomes = likely_outcomes(opening(params), drafted, rows, History(), count)
    assert sorted((outcome.probability for outcome in outcomes), reverse=True) == [o.probability for o in outcomes]
    return [(outcome.accepted, outcome.next_token) for outcome in outcomes]


def test_the_odds_of_accepted_lengths_are_learnt_by_position() -> None:
    history = History()
    for _ in range(1000):
        history.observe(3, 1)
    assert history.odds(3) == pytest.approx([0.0, 1.0, 0.0, 0.0], abs=0.01)
    for _ in range(9000):
        history.observe(3, 3)
    assert history.odds(3) == pytest.approx([0.0, 0.1, 0.0, 0.9], abs=0.01)
    assert sum(history.odds(5)) == pytest.approx(1)


def test_unlikely_tokens_at_a_likely_length_come_after_likely_tokens_at_a_less_likely_one() -> None:
    rows = candidates({7: 0.9, 8: 0.06, 9: 0.04}, {7: 0.9, 8: 0.07, 9: 0.03})
    # Three of four draft tokens are expected to be accepted.
    assert verdicts(GREEDY, [7], rows, 4) == [(1, 7), (0, 8), (0, 9), (1, 8)]


def test_a_refused_token_never_replaces_itself_and_impossible_ones_are_left_out() -> None:
    rows = candidates({7: 0.5, 8: 0.5, 9: 0.0}, {7: 1.0, 8: 0.0})
    assert verdicts(GREEDY, [7], rows, 9) == [(1, 7), (0, 8)]


def test_nothing_is_expected_after_the_end_of_the_text() -> None:
    rows = candidates({EOS: 0.6, 8: 0.4}, {7: 1.0})
    assert verdicts(GREEDY, [EOS], rows, 9) == [(0, 8)]
    assert verdicts(GREEDY, [8], rows, 9) == [(1, 7)]


def test_places_are_kept_for_likely_verdicts_whose_token_is_not_known_yet() -> None:
    rows = candidates({7: 0.9, 8: 0.06, 9: 0.04})
    assert verdicts(GREEDY, [7], rows, 3) == [(1, None), (0, 8), (0, 9)]
    assert verdicts(GREEDY, [7], [], 3) == []
