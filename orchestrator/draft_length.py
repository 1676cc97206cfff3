"""How many tokens to draft next, and what to do after a miss: what gives the most output per second, judging by the
rounds so far."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import mul

from orchestrator.costs import DraftCosts, Mean, TargetCosts

# Of what is known of others, what a new sample starts with counts as this many rounds: texts differ more than rounds.
CARRIED = 10.0
# After this many forwards one round is of another kind than seems best; ever more rarely while that changes nothing.
PROBE_AFTER, PROBE_AFTER_MOST = 16, 256
# Drafting rounds of the first sample before the plain round that they are compared with.
FIRST_DRAFTS = 4
# Rounds that a try of drafting may take: the draft may have to read the text first, and if it does well goes on.
# A verdict that was not foreseen counts as several, since the draft costs the others something even if it is not used.
TRY_ROUNDS, MISS_ROUNDS = 24, 6
# Drafting must promise so much more than plain decoding: a guess that is a little wrong must not make it slower.
MARGIN = 1.05
# Misses are never thought to be rarer than this, so that what follows them matters.
RARELY = 0.01
# A try of plain rounds while drafting is preferred: so many in a row, of all sessions.
QUIET = 2
# Which of both is preferred has changed when this share of rounds, or as small a part, says so.
CLEAR = 0.75
# Lengths that are compared: beyond 8 one token more or less matters little.
LENGTHS = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64)


@dataclass(frozen=True, slots=True)
class Choice:
    """Draft `k` tokens a round; after a miss wait for `after_miss` tokens, or for none: a plain round at once."""

    k: int
    after_miss: int


PLAIN = Choice(0, 0)


@dataclass(frozen=True, slots=True)
class Estimates:
    """By number of draft tokens, 0 included: seconds of a round and of the wait for a draft after a miss, how often the
    verdict is foreseen, and how many tokens are prepared then, on average, of that many asked for.

    `plain` is the seconds of a round without draft tokens while the draft does not work. If rounds are `shared`, all
    sessions wait for the draft tokens of all: a round takes as long as one of the mean number.
    """

    round: Callable[[float], float]
    wait: Sequence[float]
    hit: Sequence[float]
    ready: Sequence[float]
    plain: float
    shared: bool = False


def expected(rates: Sequence[float]) -> list[float]:
    """Expected accepted tokens of rounds of 0, 1, ... draft tokens; rates[i]: position i, once all before it are."""
    return [0.0, *accumulate(accumulate(rates, mul))]


def goodput(accepted: Sequence[float], estimates: Estimates, choice: Choice) -> float:
    """Expected tokens per second, given what is `expected` to be accepted.

    Rounds follow hits or misses. One after a hit has r = ready[k] draft tokens and its verdict is foreseen with
    probability hit[r]; one after a miss drafts m = after_miss tokens, waits for them and is foreseen with hit[m]. The
    share of rounds after a hit is that of the chain's stationary distribution.
    """
    if choice == PLAIN:
        return 1 / estimates.plain
    r, m = estimates.ready[choice.k], choice.after_miss
    hits, misses = estimates.hit[m], max(RARELY, 1 - between(estimates.hit, r))
    share = hits / (hits + misses)
    tokens = 1 + share * between(accepted, r) + (1 - share) * accepted[m]
    if estimates.shared:
        seconds = estimates.round(share * r + (1 - share) * m)
    else:
        seconds = share * estimates.round(r) + (1 - share) * estimates.round(m)
    return tokens / (seconds + (1 - share) * estimates.wait[m])


def between(values: Sequence[float], x: float) -> float:
    """The value at x, from those at whole numbers."""
    i = min(int(x), len(values) - 1)
    return values[i] if i == x else values[i] + (x - i) * (values[i + 1] - values[i])


def choices(limit: int, *, turns: bool) -> Iterator[Choice]:
    """What may be chosen besides plain decoding; if draft and target take turns there are only misses."""
    lengths = [k for k in LENGTHS if k < limit] + [limit] * (limit > 0)
    for k in lengths:
        shorter = [] if turns else [m for m in (0, 1, 2, 4, 8) if m < k]
        yield from (Choice(k, m) for m in (*shorter, k))


@dataclass(slots=True)
class Probing:
    """When to try another kind of round than seems best: of all samples with one way to draft."""

    patience: int = PROBE_AFTER
    rounds: int = 0
    since: float = 0.0
    tries: int = 0
    drafting: bool = True
    share: Mean = field(default_factory=Mean)
    quiet: int = 0

    def due(self, best: Choice, sessions: float) -> bool:
        """Count a round of one of so many sessions; whether the next one is to be of another kind."""
        self.share.add(best.k > 0)
        if self.share.value >= CLEAR if not self.drafting else self.share.value <= 1 - CLEAR:
            self.drafting, self.patience = not self.drafting, PROBE_AFTER
        self.rounds += 1
        self.quiet = max(0, self.quiet - 1)
        self.since += 1 / max(1.0, sessions)
        if self.since < self.patience:
            return False
        self.since = 0.0
        self.tries += 1
        self.patience = min(4 * self.patience, PROBE_AFTER_MOST)
        return True


@dataclass(slots=True)
class Shared:
    """What all samples with one way to draft have in common; `turns`: the draft does not work while the target does."""

    target: TargetCosts
    turns: bool = False
    draft: DraftCosts = field(default_factory=DraftCosts)
    probing: Probing = field(default_factory=Probing)


class DraftLength:
    """Chooses k for one sample.

    It learns from verdicts and time, never from draft tokens that were not verified: the choice cannot bias the output.
    (What is prepared in time must not depend on what was drawn either: see the draft's `ModelSession.is_done`.)
    With `fixed` it is always `limit`. `target_accept_rate` allows only k whose predicted accepted / drafted reaches it.
    """

    def __init__(
        self, *, limit: int, shared: Shared, fixed: bool = False, target_accept_rate: float | None = None
    ) -> None:
        self._limit = limit
        self._fixed = fixed
        self._target_accept_rate = target_accept_rate
        self._shared = shared
        self._own = DraftCosts()
        self._own.believe(shared.draft.acceptance(limit), CARRIED)
        self._promising = Choice(limit, limit)
        self._best = self._promising if fixed else self._choose()
        self._next = self._best
        self._trying = 0

    def choose(self, wanted: int) -> int:
        """How many tokens to draft when `wanted` more may be emitted: a round emits one more than it accepts."""
        return max(0, min(self._next.k, wanted - 1))

    def prepare(self, wanted: int) -> int:
        """How many tokens to prepare for the round after the one in work, when `wanted` may be emitted after that.

        While plain rounds are only tried the draft stays at work, unless they are to be without it.
        """
        best = 0 if self._shared.probing.quiet > 0 else self._best.k
        return max(0, min(max(self._next.k, best), wanted - 1))

    @property
    def least(self) -> int:
        """The fewest prepared tokens to go on with: for fewer it would wait, as after a miss."""
        return max(1, self._next.after_miss)

    def after_miss(self, wanted: int) -> int:
        """How many tokens to wait for when nothing is prepared; 0: a plain round at once."""
        return max(0, min(self._next.after_miss, wanted - 1))

    def waited(self, k: int, seconds: float) -> None:
        """Learn how long a draft of k tokens took to come."""
        self._shared.draft.wait.add(k, seconds)

    def prepared(self, asked: int, count: int) -> None:
        """Learn how many tokens were there, of those asked for, when a verdict was foreseen."""
        self._shared.draft.add_ready(asked, count)

    def foreseen(self, drafted: int, hit: bool) -> None:
        """Learn whether the verdict on a round that was announced to the draft was foreseen in time."""
        self._shared.draft.add_hit(drafted, hit)
        if not hit:
            self._trying = max(0, self._trying - MISS_ROUNDS)

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verdict, and choose anew."""
        for costs in (self._own, self._shared.draft):
            costs.add_round(drafted, accepted)
        if self._fixed or self._limit == 0:
            return
        self._best = self._choose()
        self._trying = max(0, self._trying - 1) if drafted == 0 or self._paid(drafted, accepted) else 0
        due = self._shared.probing.due(self._best, self._shared.target.sessions.value)
        if self._best.k > 0:
            # What other lengths cost is not seen in any other way, nor how fast the target is without the draft.
            probing = self._shared.probing
            if due and probing.tries % 2:
                probing.quiet = round(QUIET * self._shared.target.sessions.value)
            quiet = probing.quiet > 0
            self._next = PLAIN if quiet else self._longest() if due else self._best
            return
        if due:
            self._trying = TRY_ROUNDS
        if self._trying == 0:
            self._next = PLAIN
        else:
            # All sessions of a batch wait for the draft tokens of one.
            self._next = self._promising if self._shared.target.is_shared else self._longest()

    def _paid(self, drafted: int, accepted: int) -> bool:
        """Whether a round that accepted so many tokens was faster than plain rounds."""
        target, draft = self._shared.target, self._shared.draft
        missed = 1.0 if self._shared.turns else 1 - draft.hit_rate(drafted)
        took = target.round(drafted, alone=self._shared.turns) + missed * draft.wait.at(drafted)
        return (1 + accepted) * target.round(0, alone=True) > took

    def _allowed(self, accepted: Sequence[float]) -> list[int]:
        """The k above 0 that keep the target accept rate, given what is `expected` to be accepted."""
        least = self._target_accept_rate or 0
        return [k for k in range(1, self._limit + 1) if accepted[k] / k >= least]

    def _choose(self) -> Choice:
        accepted = self._expected()
        allowed = self._allowed(accepted)
        if not allowed or not self._shared.target.knows(0):
            # While there is nothing to compare with: a few drafts, then a plain round.
            self._promising = self._longest()
            return self._promising if allowed and self._shared.probing.rounds < FIRST_DRAFTS else PLAIN
        estimates = self._estimates()
        possible = [c for c in choices(max(allowed), turns=self._shared.turns) if c.k in allowed]
        self._promising = max(possible, key=lambda choice: goodput(accepted, estimates, choice))
        gain = goodput(accepted, estimates, self._promising) / goodput(accepted, estimates, PLAIN)
        return self._promising if gain >= MARGIN else PLAIN

    def _longest(self) -> Choice:
        k = max(self._allowed(self._expected()), default=min(1, self._limit))
        return Choice(k, k)

    def _estimates(self) -> Estimates:
        numbers, target, draft = range(self._limit + 1), self._shared.target, self._shared.draft
        plain, shared = target.round(0, alone=True), target.is_shared
        if self._shared.turns:
            waits = [draft.wait.at(k) for k in numbers]
            return Estimates(partial(target.round, alone=True), waits, [0.0] * len(numbers), numbers, plain, shared)
        # Others do not wait along: their forward has begun when the draft comes.
        least = target.round(0) if shared else 0.0
        return Estimates(
            target.round,
            [max(draft.wait.at(k), least if k > 0 else 0.0) for k in numbers],
            [draft.hit_rate(k) for k in numbers],
            [draft.ready(k) for k in numbers],
            plain,
            shared,
        )

    def _expected(self) -> list[float]:
        return expected(self._own.acceptance(self._limit))
