"""Which verdicts on a round are likely: how far it is accepted, and which token comes next."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from draft_service.drafter import Opening
from draft_service.picking import Candidates

# What is believed before a session has shown anything: three of four draft tokens are accepted.
PRIOR_ACCEPTED = 3.0
PRIOR_SEEN = 4.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A possible verdict, and the estimated probability that it comes. No next token: it is not known yet."""

    accepted: int
    next_token: int | None
    probability: float


class History:
    """How often draft tokens were accepted in one session, by their position in the round."""

    def __init__(self) -> None:
        self._accepted: list[float] = []
        self._seen: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn that of a round of `drafted` tokens the first `accepted` were accepted."""
        missing = drafted - len(self._seen)
        self._accepted += [PRIOR_ACCEPTED] * missing
        self._seen += [PRIOR_SEEN] * missing
        for position in range(min(accepted + 1, drafted)):
            self._seen[position] += 1
            self._accepted[position] += position < accepted

    def odds(self, drafted: int) -> list[float]:
        """The probabilities of accepting exactly 0, 1, ... `drafted` tokens of a round."""
        odds, reached = [], 1.0
        for position in range(drafted):
            known = position < len(self._seen)
            rate = self._accepted[position] / self._seen[position] if known else PRIOR_ACCEPTED / PRIOR_SEEN
            odds.append(reached * (1 - rate))
            reached *= rate
        return [*odds, reached]


def likely_outcomes(
    opening: Opening, drafted: Sequence[int], candidates: Sequence[Candidates], history: History, count: int
) -> list[Outcome]:
    """The `count` likeliest verdicts after which the text goes on, likeliest first.

    `candidates` has a row for each of the `drafted` tokens, whose alternatives replace it if it is refused, and one
    for the token after all of them; the last rows may be missing: then the positions known tell how likely outcomes
    there are. The shares of the candidates of a position are a softmax of their scores.
    """
    guess = _mean_by_rank([_shares(row) for row in candidates]) if len(candidates) <= len(drafted) else []
    outcomes = []
    for accepted, odds in enumerate(history.odds(len(drafted))):
        refused = drafted[accepted] if accepted < len(drafted) else None
        if accepted < len(candidates):
            shares = _shares(candidates[accepted], without=refused).items()
            outcomes += [Outcome(accepted, t, odds * share) for t, share in shares if not opening.ends(t)]
        else:
            # The one that is refused was the first.
            left = guess if refused is None else guess[1:]
            outcomes += [Outcome(accepted, None, odds * share / sum(left)) for share in left if share > 0]
        if refused is not None and opening.ends(refused):
            break
    return sorted(outcomes, key=lambda outcome: -outcome.probability)[:count]


def _shares(candidates: Candidates, *, without: int | None = None) -> dict[int, float]:
    """The softmax of the finite scores, by token, highest first."""
    scores = zip(candidates.token_ids, candidates.scores, strict=True)
    finite = {token: score for token, score in scores if token != without and score > -math.inf}
    highest = max(finite.values(), default=0.0)
    weights = {token: math.exp(score - highest) for token, score in finite.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _mean_by_rank(rows: Sequence[dict[int, float]]) -> list[float]:
    """The mean share of the first, second, ... candidate."""
    return [sum(shares) / len(rows) for shares in zip_longest(*(row.values() for row in rows), fillvalue=0.0)]
