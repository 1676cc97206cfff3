"""Which verdicts on a round are likely: how far it is accepted, and which token comes next."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafter import Opening
from draft_service.picking import Candidates
from foredraft.sampling.noise import gumbel

# What is believed before a session has shown anything: three of four draft tokens are accepted.
PRIOR_ACCEPTED = 3.0
PRIOR_SEEN = 4.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A possible verdict, and the estimated probability that it comes."""

    accepted: int
    next_token: int
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
    opening: Opening,
    base: int,
    drafted: Sequence[int],
    candidates: Sequence[Candidates],
    history: History,
    count: int,
) -> list[Outcome]:
    """The `count` likeliest verdicts after which the text goes on, likeliest first.

    `candidates` has a row for each of the `drafted` tokens, whose alternatives replace it if it is refused, and one
    for the token after all of them. The shares of the candidates of a position are a softmax of their scores: under
    coupled sampling log q + G, since the target draws with the same noise, else log q.
    """
    scores = _scores(opening, base, candidates)
    outcomes = []
    for accepted, (row, odds) in enumerate(zip(candidates, history.odds(len(drafted)), strict=True)):
        refused = drafted[accepted] if accepted < len(drafted) else None
        shares = _shares({t: s for t, s in zip(row.token_ids, scores[accepted], strict=True) if t != refused})
        outcomes += [Outcome(accepted, t, odds * share) for t, share in shares.items() if not opening.ends(t)]
        if refused is not None and opening.ends(refused):
            break
    return sorted(outcomes, key=lambda outcome: -outcome.probability)[:count]


def _scores(opening: Opening, base: int, candidates: Sequence[Candidates]) -> list[list[float]]:
    params = opening.params
    if opening.needs_q or params.temperature == 0:
        return [row.logits for row in candidates]
    token_ids = torch.tensor([row.token_ids for row in candidates])
    positions = torch.arange(base, base + len(candidates))[:, None]
    noise = gumbel(params.seed, opening.sample_index, positions, token_ids)
    scores: list[list[float]] = (torch.tensor([row.logits for row in candidates]) + noise).tolist()
    return scores


def _shares(scores: dict[int, float]) -> dict[int, float]:
    """The softmax of the finite scores."""
    finite = {token: score for token, score in scores.items() if score > -math.inf}
    highest = max(finite.values(), default=0.0)
    weights = {token: math.exp(score - highest) for token, score in finite.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}
