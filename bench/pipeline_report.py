"""The closed forms beside what `bench.pipeline` measured, and how it is shown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import pair
from bench.contestants import Run
from bench.report import shown, whiskered
from bench.summary import Ratio, Total, part, per_prompt
from bench.summary import ratio as speed_ratio
from foredraft.emulation import Emulation

LEGEND = """accepted: of the draft tokens that follow accepted ones; of bound: of the speed of the closed form for this
acceptance, hit rate and k; over: what a round takes more than the target's pass, waiting for the draft left out; miss
over: what waiting for the draft takes more than its k passes. In milliseconds. In brackets: 95% interval of a paired
bootstrap over texts."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to decode one stream. Speeds in tokens per second, overheads in milliseconds a round and a miss.

    `k` is the mean draft length, `acceptance` alpha and `hit_rate` h of the closed form, whose speed is `bound`.
    `times_plain` has the interval of a bootstrap over texts.
    `same_text` says whether all texts are those of plain decoding.
    """

    name: str
    mode: str
    ratio: float
    k: float
    acceptance: float | None
    hit_rate: float | None
    tokens_per_second: float
    bound: float
    times_plain: Ratio
    round_over_ms: float
    miss_over_ms: float | None
    same_text: bool
    degraded: list[str]

    @property
    def of_bound(self) -> float:
        """What was reached of the closed form."""
        return self.tokens_per_second / self.bound


@dataclass(frozen=True, slots=True)
class Busy:
    """Many streams at once: the part of the time from its first to its last pass that the target spent in passes."""

    ratio: float
    streams: int
    tokens_per_second: float
    busy: float


def measured(
    name: str, mode: str, ratio: float, emulation: Emulation, runs: Sequence[Run], plain: Sequence[Run]
) -> Measured:
    """Sum up the runs. What came before the first token is left out."""
    if emulation.target is None or emulation.draft is None:
        raise ValueError("the closed forms need the costs of target and draft")
    total, seconds = Total.of(runs), sum(run.seconds for run in runs)
    rounds, tokens = total.rounds - len(runs), sum(run.timed_tokens for run in runs)
    alpha, hit_rate = part(total.accepted, total.reached), part(total.hits, total.verdicts)
    lengths = draft_lengths(runs)
    draft_s = emulation.draft.seconds(1)
    target_s = sum(count * emulation.target.seconds(1 + k) for k, count in lengths.items())
    bound_s = sum(
        count * round_seconds(k * draft_s, emulation.target.seconds(1 + k), (hit_rate or 0.0) if k else 1.0)
        for k, count in lengths.items()
    )
    misses = total.verdicts - total.hits if mode == "overlapped" else sum(n for k, n in lengths.items() if k)
    mean_k = total.drafted / rounds
    miss_over = total.draft_wait / misses - mean_k * draft_s if misses else None
    speed = tokens / seconds
    return Measured(
        name=name,
        mode=mode,
        ratio=ratio,
        k=mean_k,
        acceptance=alpha,
        hit_rate=hit_rate,
        tokens_per_second=speed,
        bound=sum(count * emitted(alpha or 0.0, k) for k, count in lengths.items()) / bound_s,
        times_plain=speed_ratio(per_prompt(runs), per_prompt(plain)),
        round_over_ms=1e3 * (seconds - total.draft_wait - target_s) / rounds,
        miss_over_ms=None if miss_over is None else 1e3 * miss_over,
        same_text=all(run.token_ids == other.token_ids for run, other in zip(runs, plain, strict=True)),
        degraded=sorted({s.degraded_reason for run in runs if (s := run.statistics) and s.degraded_reason}),
    )


def emitted(alpha: float, k: int) -> float:
    """Tokens of a round: sum of alpha^i for i = 0..k."""
    return float(sum(alpha**i for i in range(k + 1)))


def round_seconds(drafting: float, verifying: float, hit_rate: float) -> float:
    """A hit's draft tokens were made while the target verified, a miss's are made after that."""
    return hit_rate * max(drafting, verifying) + (1 - hit_rate) * (drafting + verifying)


def draft_lengths(runs: Sequence[Run]) -> dict[int, int]:
    """How many rounds had 0, 1, 2, ... draft tokens; the passes over prompts are left out."""
    drafted: list[int] = []
    rounds = -len(runs)
    for run in runs:
        if run.statistics is None:
            raise ValueError("a run of a service has statistics")
        rounds += run.statistics.rounds
        drafted += [0] * (len(run.statistics.drafted_per_position) - len(drafted))
        for position, count in enumerate(run.statistics.drafted_per_position):
            drafted[position] += count
    at_least = [rounds, *drafted, 0]
    return {k: at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)}


def same_texts(rows: Sequence[Measured]) -> bool:
    """Whether all ways wrote what plain decoding did."""
    return all(row.same_text for row in rows)


def show(rows: Sequence[Measured], busy: Sequence[Busy], console: Console) -> None:
    """Print everything."""
    for ratio in dict.fromkeys(row.ratio for row in rows):
        console.print("", table(ratio, [row for row in rows if row.ratio == ratio]), sep="\n")
        for one in busy:
            if one.ratio == ratio:
                console.print(
                    f"{one.streams} streams: the target computed {100 * one.busy:.1f}% of the time, "
                    f"{one.tokens_per_second:.0f} tokens/s in all."
                )
    console.print(f"\n{LEGEND}")
    different = [f"{row.name} (c={row.ratio:g})" for row in rows if not row.same_text]
    console.print(f"Texts: NOT the same: {', '.join(different)}." if different else "Texts: all the same.")
    for reason in sorted({reason for row in rows for reason in row.degraded}):
        console.print(f"Some rounds were plain: {reason}", markup=False)


def table(ratio: float, rows: Sequence[Measured]) -> Table:
    """One ratio of draft and target."""
    columns = ("k", "accepted", "hits", "tokens/s", "of bound", "over plain", "over", "miss over")
    result = Table(f"c = {ratio:g}", *columns, box=None)
    for row in rows:
        result.add_row(
            row.name,
            f"{row.k:.1f}",
            percent(row.acceptance),
            percent(row.hit_rate),
            f"{row.tokens_per_second:.1f}",
            percent(row.of_bound),
            shown(row.times_plain),
            f"{row.round_over_ms:.2f}",
            "-" if row.miss_over_ms is None else f"{row.miss_over_ms:.2f}",
        )
    return result


def percent(value: float | None) -> str:
    """A fraction as a percentage, a dash for none."""
    return "-" if value is None else f"{100 * value:.1f}%"


def write_json(file: Path, setting: dict[str, Any], rows: Sequence[Measured], busy: Sequence[Busy]) -> None:
    """Write everything measured."""
    content = {
        **setting,
        "one_stream": [{**asdict(row), "of_bound": row.of_bound} for row in rows],
        "many_streams": [asdict(one) for one in busy],
    }
    pair.write_json(file, content)


def plot(rows: Sequence[Measured], file: Path) -> None:
    """Bars of speed against plain, with the bound as a mark, a panel per ratio. Raises ImportError: no matplotlib."""
    from matplotlib.figure import Figure

    ratios = list(dict.fromkeys(row.ratio for row in rows))
    figure = Figure(figsize=(4 * len(ratios) + 2, 3), layout="constrained")
    panels = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
    for panel, ratio in zip(panels, ratios, strict=True):
        own = [row for row in rows if row.ratio == ratio]
        names = [row.name for row in own]
        whiskered(panel, names, [row.times_plain for row in own])
        bounds = [row.times_plain.value / row.of_bound for row in own]
        panel.plot(bounds, names, "k|", markersize=14, label="closed form")
        panel.set(title=f"c = {ratio:g}", xlabel="speed against plain")
    panels[0].invert_yaxis()
    panels[0].legend()
    figure.savefig(file, dpi=150)
