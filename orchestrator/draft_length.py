"""How many tokens to draft next."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

# A Beta(8, 2) belief about each position's acceptance rate before anything was seen: drafting starts, and a few rounds
# of misses are enough to change it.
PRIOR_ACCEPTED, PRIOR_DRAFTED = 8.0, 10.0
# Older rounds count less, so that the estimate follows the text; about the last 50 rounds matter.
DECAY = 0.98
# Rounds of plain decoding before one draft token is tried again.
PROBE_AFTER = 32


def predicted_acceptance(rates: Sequence[float], k: int) -> float:
    """Expected accepted / drafted of a round of k tokens; rates[i] holds for position i once all before are accepted."""
    return float(sum(accumulate(rates[:k], mul))) / k


class DraftLength:
    """Chooses k for one sample. It learns from verdicts, never from draft tokens: the choice cannot bias the output."""

    def __init__(self, *, limit: int, fixed: bool = False, target_accept_rate: float | None = None) -> None:
        self._limit = limit
        self._rate = None if fixed else target_accept_rate
        self._accepted = [PRIOR_ACCEPTED] * limit
        self._drafted = [PRIOR_DRAFTED] * limit
        self._plain_rounds = 0

    def choose(self, wanted: int) -> int:
        """How many tokens to draft when `wanted` more may be emitted: a round emits one more than it accepts."""
        k = self._limit
        if self._rate is not None:
            rates = [a / d for a, d in zip(self._accepted, self._drafted, strict=True)]
            fitting = [n for n in range(1, self._limit + 1) if predicted_acceptance(rates, n) >= self._rate]
            k = max(fitting, default=1 if self._plain_rounds >= PROBE_AFTER else 0)
        return max(0, min(k, wanted - 1))

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verdict that accepted this many of this many draft tokens."""
        self._plain_rounds = 0 if drafted else self._plain_rounds + 1
        for position in range(min(drafted, accepted + 1)):
            self._accepted[position] = self._accepted[position] * DECAY + (position < accepted)
            self._drafted[position] = self._drafted[position] * DECAY + 1
