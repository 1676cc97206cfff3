"""What the runs of `bench.compare` say: speeds with intervals, how speculation went, and whether texts are the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.contestants import Contestant, Run

RESAMPLES = 10_000
# The services' contestants: with one seed, all write the same text.
PLAIN, PLAIN_ALL_CORES, SEQUENTIAL, OVERLAPPED = "plain", "plain, all cores", "sequential", "overlapped"
ASSISTED, LOOKUP = "Transformers assisted", "Transformers lookup"
SPECULATING = (ASSISTED, LOOKUP, SEQUENTIAL)
SERVICES = (PLAIN, PLAIN_ALL_CORES, SEQUENTIAL, OVERLAPPED)

# By contestant, in the same order of works.
Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed divided by another one, with the 95% interval of a bootstrap; None for less than two prompts."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One contestant at one temperature; None where it does not tell. The last four are fractions of the whole time.

    `tokens_per_round` leaves the pass over the prompt out, as the speeds do; `draft_wait` is the time without a round
    at the target.
    """

    name: str
    cores: str
    tokens: int
    tokens_per_second: float
    times_plain: Ratio
    times_plain_all_cores: Ratio
    tokens_per_round: float | None
    acceptance: float | None = None
    hit_rate: float | None = None
    prepared_used: float | None = None
    target_busy: float | None = None
    draft_wait: float | None = None
    wire: float | None = None
    queue: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first of `count` texts that are not as PLAIN wrote them, and the tokens where it departs ("" at its end)."""

    name: str
    count: int
    prompt: int
    position: int
    token: str
    plain_token: str


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """What the formula says of the speed against plain decoding, from what was measured.

    alpha: probability that a draft token is accepted if those before it were; k: draft tokens a round, on average; c:
    time of a draft step, and v: of verifying a round, both in plain rounds; h: hit rate.
    """

    alpha: float
    k: float
    c: float
    v: float
    h: float
    sequential: float
    overlapped: float
    sequential_with_v_1: float
    overlapped_with_v_1: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything about one temperature.

    `overlapped_against` has the speed of OVERLAPPED over those of others that speculate. `first_difference` is among
    the texts of `compared`, which should be equal.
    """

    temperature: float
    contestants: list[Summary]
    overlapped_against: dict[str, Ratio]
    closed_form: ClosedForm | None
    compared: list[str]
    first_difference: Difference | None
    degraded: list[str]
    runs: Runs


def outcome(temperature: float, contestants: Sequence[Contestant], runs: Runs, tokenizer: Any) -> Outcome:
    """Sum up the runs of one temperature; Transformers draws random numbers of its own, so its samples differ."""
    compared = [contestant.name for contestant in contestants if temperature == 0 or contestant.name in SERVICES]
    statistics = [run.statistics for name in SERVICES for run in runs[name] if run.statistics]
    return Outcome(
        temperature=temperature,
        contestants=[summarise(contestant, runs) for contestant in contestants],
        overlapped_against={
            contestant.name: ratio(per_prompt(runs[OVERLAPPED]), per_prompt(runs[contestant.name]))
            for contestant in contestants
            if contestant.name in SPECULATING
        },
        closed_form=closed_form(runs),
        compared=compared,
        first_difference=first_difference(runs, compared, tokenizer),
        degraded=sorted({one.degraded_reason for one in statistics if one.degraded_reason}),
        runs=runs,
    )


def speedup(alpha: float, k: float, c: float, h: float = 0.0, v: float = 1.0) -> float:
    """Tokens of a round by Leviathan et al. (arXiv 2211.17192, equation 1) over its time in plain rounds.

    A hit (h) was drafted while the target verified, a miss is drafted after that; sequential decoding has only misses.
    """
    tokens = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    return tokens / (h * max(v, k * c) + (1 - h) * (v + k * c))


def closed_form(runs: Runs) -> ClosedForm | None:
    """The closed form with the measured numbers; None if nothing was drafted."""
    sequential, overlapped = Total.of(runs[SEQUENTIAL]), Total.of(runs[OVERLAPPED])
    plain_speed = rate(per_prompt(runs[PLAIN]).sum(0))
    if sequential.drafted == 0 or overlapped.drafted == 0 or plain_speed == 0:
        return None
    rounds = sequential.rounds - len(runs[SEQUENTIAL])  # Those over the prompt are not timed.
    k, c = sequential.drafted / rounds, sequential.draft_wait / sequential.drafted * plain_speed
    v = max(0.0, float(per_prompt(runs[SEQUENTIAL])[:, 1].sum()) / rounds * plain_speed - k * c)
    h = overlapped.hits / overlapped.verdicts if overlapped.verdicts else 0.0
    alpha = sequential.accepted / sequential.reached
    return ClosedForm(
        *(alpha, k, c, v, h),
        *(speedup(alpha, k, c, 0, v), speedup(alpha, k, c, h, v)),
        *(speedup(alpha, k, c, 0, 1), speedup(alpha, k, c, h, 1)),
    )


@dataclass(slots=True)
class Total:
    """Sums over the statistics of the services. `reached` counts draft tokens whose predecessors were accepted."""

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: int = 0
    hits: int = 0
    verdicts: int = 0
    prepared: int = 0
    used: int = 0
    time: float = 0.0
    target: float = 0.0
    draft_wait: float = 0.0
    wire: float = 0.0
    queue: float = 0.0

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Total":
        """The sums over these runs."""
        total = cls()
        for run in runs:
            if (statistics := run.statistics) is None:
                continue
            drafted, accepted = statistics.drafted_per_position, statistics.accepted_per_position
            total.rounds += statistics.rounds
            total.plain_rounds += statistics.plain_rounds
            total.drafted += statistics.drafted
            total.accepted += statistics.accepted
            total.reached += sum(map(min, drafted, [*drafted[:1], *accepted]))
            total.hits += statistics.hits
            total.verdicts += statistics.hits + statistics.misses
            total.prepared += statistics.prepared_tokens
            total.used += statistics.used_tokens
            total.time += run.total_seconds
            total.target += statistics.target_time
            total.draft_wait += statistics.draft_wait_time
            total.wire += statistics.wire_time
            total.queue += statistics.queue_time
        return total


def summarise(contestant: Contestant, all_runs: Runs) -> Summary:
    """What one contestant did, against both plain ones."""
    runs = all_runs[contestant.name]
    own, total = per_prompt(runs), Total.of(runs)
    return Summary(
        name=contestant.name,
        cores=contestant.cores,
        tokens=sum(len(run.token_ids) for run in runs),
        tokens_per_second=rate(own.sum(0)),
        times_plain=ratio(own, per_prompt(all_runs[PLAIN])),
        times_plain_all_cores=ratio(own, per_prompt(all_runs[PLAIN_ALL_CORES])),
        tokens_per_round=part(own[:, 0].sum(), sum(run.rounds - 1 for run in runs)),
        acceptance=part(total.accepted, total.drafted),
        hit_rate=part(total.hits, total.verdicts),
        prepared_used=part(total.used, total.prepared),
        target_busy=part(total.target, total.time),
        draft_wait=part(total.draft_wait, total.time),
        wire=part(total.wire, total.time),
        queue=part(total.queue, total.time),
    )


def per_prompt(runs: Sequence[Run]) -> NDArray[np.float64]:
    """[prompts, 2]: timed tokens and seconds, summed over repeats."""
    sums = np.zeros((max(run.work.number for run in runs) + 1, 2))
    for run in runs:
        sums[run.work.number] += run.timed_tokens, run.seconds
    return sums


def rate(sums: NDArray[np.float64]) -> float:
    """Tokens per second of (tokens, seconds); 0 for no time, which is no tokens."""
    return float(sums[0] / sums[1]) if sums[1] > 0 else 0.0


def ratio(own: NDArray[np.float64], other: NDArray[np.float64]) -> Ratio:
    """Own speed over the other's; both contestants get the same prompts in every resample."""
    base = rate(other.sum(0))
    value = rate(own.sum(0)) / base if base > 0 else 0.0
    if len(own) < 2:
        return Ratio(value, None)
    picks = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    own_sums, other_sums = own[picks].sum(1), other[picks].sum(1)
    usable = (own_sums[:, 1] > 0) & (other_sums > 0).all(1)
    if not usable.any():
        return Ratio(value, None)
    (own_tokens, own_seconds), (tokens, seconds) = own_sums[usable].T, other_sums[usable].T
    low, high = np.percentile(own_tokens / own_seconds / (tokens / seconds), [2.5, 97.5])
    return Ratio(value, (float(low), float(high)))


def part(amount: float, whole: float) -> float | None:
    """The fraction, None of nothing."""
    return float(amount / whole) if whole else None


def first_difference(runs: Runs, names: Sequence[str], tokenizer: Any) -> Difference | None:
    """Where the first of these contestants that wrote another text than PLAIN did so."""
    for name in names:
        pairs = zip(runs[name], runs[PLAIN], strict=True)
        different = [(own, plain) for own, plain in pairs if own.token_ids != plain.token_ids]
        if different:
            own, plain = different[0]
            length = min(len(own.token_ids), len(plain.token_ids))
            position = next((i for i in range(length) if own.token_ids[i] != plain.token_ids[i]), length)
            tokens = (tokenizer.decode(run.token_ids[position : position + 1]) for run in (own, plain))
            return Difference(name, len(different), own.work.number, position, *tokens)
    return None
