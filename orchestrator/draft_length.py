"""How many tokens to draft next: as many as give the most output per second, judging by the rounds so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

# What is believed of each position's acceptance rate before anything was seen: 8 of 10 accepted. Drafting starts, and a
# few rounds of misses are enough to change it.
PRIOR_ACCEPTED, PRIOR_DRAFTED = 8.0, 10.0
# Of the history, what a new sample starts with counts as this many rounds: texts differ more than rounds of one text.
CARRIED = 10.0
# Older rounds count less, so that estimates follow text and load; about the last 50 rounds matter.
DECAY = 0.98
# How much of a k's time one round of any k makes obsolete: what was measured long ago gives way to one new measurement.
OBSOLESCENCE = 0.1
# After this many rounds one round is of the other kind, plain or drafting; ever more rarely while that changes nothing.
PROBE_AFTER, PROBE_AFTER_MOST = 16, 256
# Drafting rounds of the first sample before the plain round that they are compared with.
FIRST_DRAFTS = 4


def predicted_acceptance(rates: Sequence[float], k: int) -> float:
    """Expected accepted / drafted of a round of k tokens; rates[i]: position i, once all before it are accepted."""
    return _accepted(rates, k) / k


def goodput(rates: Sequence[float], times: Sequence[float], k: int) -> float:
    """Expected tokens per second of rounds that draft k tokens and take times[k] seconds."""
    return (1 + _accepted(rates, k)) / times[k]


def _accepted(rates: Sequence[float], k: int) -> float:
    return float(sum(accumulate(rates[:k], mul)))


@dataclass(slots=True)
class History:
    """What was seen of one way to draft: seconds of rounds by k, and acceptance by position."""

    times: dict[int, float] = field(default_factory=dict)
    measured: dict[int, int] = field(default_factory=dict)
    rounds: int = 0
    accepted: dict[int, float] = field(default_factory=dict)
    drafted: dict[int, float] = field(default_factory=dict)

    def add_time(self, k: int, seconds: float) -> None:
        """Learn how long a round of k draft tokens took."""
        self.rounds += 1
        kept = (1 - OBSOLESCENCE) ** (self.rounds - self.measured.get(k, 0))
        self.times[k] = kept * self.times.get(k, seconds) + (1 - kept) * seconds
        self.measured[k] = self.rounds

    def add_round(self, drafted: int, accepted: int) -> None:
        """Learn from a verdict that accepted this many of this many draft tokens."""
        for position in range(min(drafted, accepted + 1)):
            self.accepted[position] = self.accepted.get(position, PRIOR_ACCEPTED) * DECAY + (position < accepted)
            self.drafted[position] = self.drafted.get(position, PRIOR_DRAFTED) * DECAY + 1

    def rate(self, position: int) -> float:
        """The acceptance rate at a position."""
        return self.accepted.get(position, PRIOR_ACCEPTED) / self.drafted.get(position, PRIOR_DRAFTED)

    def time(self, k: int) -> float:
        """Seconds of a round of k draft tokens; between those k that were measured, on a straight line.

        Raises ValueError before any was measured.
        """
        if k in self.times:
            return self.times[k]
        below = max((n for n in self.times if n < k), default=None)
        above = min((n for n in self.times if n > k), default=None)
        if below is None or above is None:
            return self.times[min(self.times, key=lambda n: abs(n - k))]
        share = (k - below) / (above - below)
        return self.times[below] + share * (self.times[above] - self.times[below])


class DraftLength:
    """Chooses k for one sample.

    It learns from verdicts and time, never from draft tokens that were not verified: the choice cannot bias the output.
    With `fixed` it is always `limit`. `target_accept_rate` allows only k whose predicted accepted / drafted reaches it.
    """

    def __init__(
        self, *, limit: int, history: History, fixed: bool = False, target_accept_rate: float | None = None
    ) -> None:
        self._limit = limit
        self._fixed = fixed
        self._target_accept_rate = target_accept_rate
        self._shared = history
        self._own = History()
        for position in range(limit):
            self._own.drafted[position] = CARRIED
            self._own.accepted[position] = CARRIED * history.rate(position)
        self._rounds = self._since_probe = 0
        self._patience = PROBE_AFTER
        self._preferred = self._k = limit if fixed else self._best()

    def choose(self, wanted: int) -> int:
        """How many tokens to draft when `wanted` more may be emitted: a round emits one more than it accepts."""
        return max(0, min(self._k, wanted - 1))

    def observe(self, drafted: int, accepted: int, seconds: float | None) -> None:
        """Learn from a verdict, and from the time since the one before it if there was one."""
        for history in (self._own, self._shared):
            history.add_round(drafted, accepted)
        if seconds is not None:
            self._shared.add_time(drafted, seconds)
        if self._fixed or self._limit == 0:
            return
        self._rounds += 1
        self._since_probe += 1
        best = self._best()
        if (best > 0) != (self._preferred > 0):
            self._patience = PROBE_AFTER
        self._preferred = self._k = best
        if self._since_probe >= self._patience:
            self._since_probe = 0
            self._patience = min(2 * self._patience, PROBE_AFTER_MOST)
            self._k = 0 if best > 0 else max(self._candidates(), default=1)

    def _candidates(self) -> list[int]:
        """The k above 0 that keep the target accept rate."""
        rates, least = self._rates(), self._target_accept_rate or 0
        return [k for k in range(1, self._limit + 1) if predicted_acceptance(rates, k) >= least]

    def _best(self) -> int:
        candidates, times = self._candidates(), self._shared.times
        if not candidates:
            return 0
        if 0 not in times or len(times) < 2:  # Nothing to compare yet: a few drafts, then a plain round.
            return 0 if self._rounds >= FIRST_DRAFTS and 0 not in times else max(candidates)
        seconds = [self._shared.time(k) for k in range(self._limit + 1)]
        return max([0, *candidates], key=lambda k: goodput(self._rates(), seconds, k))

    def _rates(self) -> list[float]:
        return [self._own.rate(position) for position in range(self._limit)]
