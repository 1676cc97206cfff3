"""What rounds cost and give, as measured; the draft length is chosen from it."""

import math
import time
from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

# How much of a measured value one later measurement of any kind makes obsolete: what was measured long ago gives way.
OBSOLESCENCE = 0.1
# A running mean of what every round tells moves by this share.
SMOOTHING = 0.1
# What is believed of the first position's acceptance rate before anything was seen: 8 of 10 accepted. Drafting starts,
# and a few rounds of misses are enough to change it.
PRIOR_ACCEPTED, PRIOR_DRAFTED = 8.0, 10.0
# Of the verdicts half are foreseen, until something was seen.
PRIOR_HITS, PRIOR_VERDICTS = 2.0, 4.0
# A position's acceptance rate is drawn to that of the one before by so many rounds: what is seldom reached is known by
# what is reached more often.
DRAWN = 2.0
# Rounds that are sent within this part of one are sent together.
TOGETHER = 0.25
# Older rounds count less, so that estimates follow text and load; about the last 50 rounds matter.
DECAY = 0.98


# Beyond so many, numbers that differ by less than an eighth share a mean.
EXACT = 16


def binned(n: int) -> int:
    """The number that stands for n and those near it."""
    if n <= EXACT:
        return n
    step = 1 << (n.bit_length() - 4)  # 8 steps an octave
    return n // step * step


class Curve:
    """A running mean for each whole number, such as seconds by tokens; between numbers on a straight line."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self._known: list[int] = []
        self._measured: dict[int, int] = {}
        self._count = 0

    def add(self, n: int, value: float) -> None:
        """Learn a value at n."""
        n = binned(n)
        self.age()
        if n not in self.values:
            insort(self._known, n)
        kept = (1 - OBSOLESCENCE) ** (self._count - self._measured.get(n, 0))
        self.values[n] = kept * self.values.get(n, value) + (1 - kept) * value
        self._measured[n] = self._count

    @property
    def least(self) -> float:
        """The smallest number that was measured; infinite if none was."""
        return self._known[0] if self._known else math.inf

    def age(self) -> None:
        """Let what was measured so far count less."""
        self._count += 1

    def at(self, n: float, default: float = 0.0) -> float:
        """The value at n; beyond what was measured that of the nearest number, and `default` if nothing was."""
        if n in self.values:
            return self.values[int(n)]
        if not self.values:
            return default
        i = bisect(self._known, n)
        if i in (0, len(self._known)):
            return self.values[self._known[0 if i == 0 else -1]]
        below, above = self._known[i - 1], self._known[i]
        share = (n - below) / (above - below)
        return self.values[below] + share * (self.values[above] - self.values[below])


@dataclass(slots=True)
class Mean:
    """A running mean; 0 before anything was seen."""

    value: float = 0.0
    seen: bool = False

    def add(self, value: float) -> None:
        """Learn a value."""
        self.value += (value - self.value) * (SMOOTHING if self.seen else 1.0)
        self.seen = True


@dataclass(slots=True)
class Rate:
    """A share of events, of which the older ones count less."""

    yes: float
    all: float

    def add(self, yes: bool) -> None:
        """Learn an event."""
        self.age()
        self.yes += yes
        self.all += 1

    def age(self) -> None:
        """Let what was seen count less."""
        self.yes *= DECAY
        self.all *= DECAY

    @property
    def value(self) -> float:
        """The share."""
        return self.yes / self.all


@dataclass(slots=True)
class TargetCosts:
    """Seconds of the target's rounds, of all samples: a forward's by its tokens, and what comes on top.

    While the draft works, forwards may be slower, as on the cores of one machine, and sessions come back one by one, so
    that they fall into several forwards; rounds `alone`, without the draft, are kept apart. `queue` is the wait for the
    forward in flight, as a part of a forward, of the others; `sessions` is how many there are in all. `drafting_at` is
    when last the draft was given work, on time.perf_counter.
    """

    forward: Curve = field(default_factory=Curve)
    alone: Curve = field(default_factory=Curve)
    drafting_at: float = -math.inf
    queue: Mean = field(default_factory=Mean)
    wire: Mean = field(default_factory=Mean)
    sessions: Mean = field(default_factory=lambda: Mean(1.0))

    def drafting(self) -> None:
        """Note that the draft is given work now."""
        self.drafting_at = time.perf_counter()

    def was_alone(self, elapsed: float) -> bool:
        """Whether the draft had nothing to do in a round of so many seconds that ends now."""
        # Rounds of a batch are sent together, and one with a draft may have been sent just before.
        return self.drafting_at < time.perf_counter() - (1 + TOGETHER) * elapsed

    def add(self, *, rows: int, tokens: int, compute: float, queue: float, elapsed: float, alone: bool = False) -> None:
        """Learn from a round that shared its forward of so many tokens with so many rows; times in seconds."""
        (self.alone if alone else self.forward).add(tokens, compute)
        waited = min(1.0, queue / compute) if compute > 0 else 0.0
        if not alone:
            self.queue.add(waited)
        self.wire.add(max(0.0, elapsed - compute - queue))
        # Those whose round waits for another forward are in none now (Little's law).
        self.sessions.add(rows * (1 + waited))

    def round(self, k: float, *, alone: bool = False) -> float:
        """Expected seconds of a round of k draft tokens, if all sessions in the batch draft as many on average.

        What one of many adds looks cheap beside the batch; if all of them draft for that, all of them wait. `alone`:
        while the draft does not work.
        """
        waits = 1.0 if alone else 1 + self.queue.value
        tokens = self.sessions.value / waits * (1 + k)
        first, second = (self.alone, self.forward) if alone else (self.forward, self.alone)
        seconds = self.wire.value + waits * first.at(tokens, second.at(tokens))
        return max(seconds, 1e-9)  # A target may tell no times.

    @property
    def is_shared(self) -> bool:
        """Whether forwards are over several sessions."""
        return self.sessions.value > 1.5

    def knows(self, k: int) -> bool:
        """Whether a forward as small as that of a round of k draft tokens was measured."""
        return min(self.forward.least, self.alone.least) < self.sessions.value * (1.5 + k)


class DraftCosts:
    """What was seen of one way to draft: acceptance by position, and by k verdicts foreseen, the share of k tokens that
    was prepared for them, and seconds waited."""

    def __init__(self) -> None:
        self.wait = Curve()
        self.wait.add(0, 0.0)
        self._ready = Curve()
        self._hits: dict[int, Rate] = {}
        self._acceptance: dict[int, Rate] = {}

    def add_round(self, drafted: int, accepted: int) -> None:
        """Learn from a verdict that accepted this many of this many draft tokens."""
        self.wait.age()
        reached = min(drafted, accepted + 1)
        for position in range(reached):
            self._rate(position).add(position < accepted)
        for position, rate in self._acceptance.items():
            if drafted > 0 and position >= reached:
                rate.age()

    def add_hit(self, drafted: int, hit: bool) -> None:
        """Learn whether the verdict on a round of so many draft tokens was foreseen in time."""
        self._hits.setdefault(drafted, Rate(PRIOR_HITS, PRIOR_VERDICTS)).add(hit)

    def add_ready(self, asked: int, count: int) -> None:
        """Learn that of `asked` tokens for a verdict that was foreseen so many were there."""
        self._ready.add(asked, count / asked)

    def ready(self, k: int) -> float:
        """How many tokens are there of k that were asked for, when a verdict is foreseen."""
        return k * min(1.0, self._ready.at(k, 1.0))

    def believe(self, rates: Sequence[float], rounds: float) -> None:
        """Start from acceptance rates of others, as if so many rounds had been seen."""
        for position, rate in enumerate(rates):
            self._acceptance[position] = Rate(rounds * rate, rounds)

    def acceptance(self, count: int) -> list[float]:
        """The acceptance rates of the first positions, each once all before it are accepted."""
        rates, value = [], PRIOR_ACCEPTED / PRIOR_DRAFTED
        for position in range(count):
            if (rate := self._acceptance.get(position)) is not None:
                value = (rate.yes + DRAWN * value) / (rate.all + DRAWN)
            rates.append(value)
        return rates

    def hit_rate(self, drafted: int) -> float:
        """How often a verdict on so many draft tokens is foreseen; of the nearest number if that is not known."""
        if not self._hits:
            return PRIOR_HITS / PRIOR_VERDICTS
        return self._hits[min(self._hits, key=lambda n: abs(n - drafted))].value

    def _rate(self, position: int) -> Rate:
        prior = Rate(PRIOR_ACCEPTED, PRIOR_DRAFTED) if position == 0 else Rate(0.0, 0.0)
        return self._acceptance.setdefault(position, prior)
