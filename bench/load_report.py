"""Tables, lines, plot and JSON of `bench.load`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.report import percent, shown
from bench.summary import PLAIN, PLAIN_ALL_CORES, Ratio, part, rate, ratio

LEGEND = """In brackets: 95% interval of a paired bootstrap over bursts. Tokens/s: of all streams, reading their prompts
included, until the first of them has its text: those that are left then have the machine to themselves. To the last:
of whole bursts. First token: ms after the request. Token: ms between arrivals divided by the later one's tokens, once
for each. Median / 99th percentile. same: texts that are as plain decoding wrote them."""


@dataclass(slots=True)
class Text:
    """What one stream brought. `latencies`: between arrivals, divided by the later one's tokens, once for each.

    `arrivals`: seconds after the burst's begin, and how many tokens came then.
    """

    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    first_token_s: float = 0.0
    latencies: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    degraded: str = ""


@dataclass(frozen=True, slots=True)
class Burst:
    """The texts of streams that began together, and the seconds until all were complete."""

    texts: list[Text]
    seconds: float

    @property
    def full_s(self) -> float:
        """Seconds until the first text was complete."""
        return min(text.arrivals[-1][0] for text in self.texts)

    @property
    def full_tokens(self) -> int:
        """The tokens of all streams until then."""
        return sum(count for text in self.texts for at, count in text.arrivals if at <= self.full_s)


# By number of streams and contestant.
Measured = Mapping[int, Mapping[str, Sequence[Burst]]]


@dataclass(frozen=True, slots=True)
class Summary:
    """One contestant at one number of streams; times in milliseconds, median and 99th percentile.

    `times_plain_to_the_last` is of whole bursts, all else of the time until the first stream ends. `times_fewest` is
    the throughput over this contestant's own at the least number of streams, which is `fewest_streams`. `same_texts`
    is the part of texts that are as those of plain decoding.
    """

    name: str
    streams: int
    tokens_per_second: float
    times_plain: Ratio
    times_plain_to_the_last: Ratio
    times_plain_all_cores: Ratio
    fewest_streams: int
    times_fewest: Ratio
    first_token_ms: tuple[float, float]
    inter_token_ms: tuple[float, float]
    acceptance: float | None
    same_texts: float


def summarise(measured: Measured) -> list[Summary]:
    """All contestants at all numbers of streams."""
    fewest = min(measured)
    summaries = []
    for streams, bursts in measured.items():
        plain, all_cores = speeds(bursts[PLAIN]), speeds(bursts[PLAIN_ALL_CORES])
        for name, own in bursts.items():
            texts = [text for burst in own for text in burst.texts]
            others = [text for burst in bursts[PLAIN] for text in burst.texts]
            same = sum(text.token_ids == other.token_ids for text, other in zip(texts, others, strict=True))
            summaries.append(
                Summary(
                    name=name,
                    streams=streams,
                    tokens_per_second=rate(speeds(own).sum(0)),
                    times_plain=ratio(speeds(own), plain),
                    times_plain_to_the_last=ratio(whole_speeds(own), whole_speeds(bursts[PLAIN])),
                    times_plain_all_cores=ratio(speeds(own), all_cores),
                    fewest_streams=fewest,
                    times_fewest=ratio(speeds(own), speeds(measured[fewest][name])),
                    first_token_ms=quantiles([text.first_token_s for text in texts]),
                    inter_token_ms=quantiles([latency for text in texts for latency in text.latencies]),
                    acceptance=part(sum(text.accepted for text in texts), sum(text.drafted for text in texts)),
                    same_texts=same / len(texts),
                )
            )
    return summaries


def speeds(bursts: Sequence[Burst]) -> NDArray[np.float64]:
    """[bursts, 2]: tokens and seconds until the first stream ends."""
    return np.array([(burst.full_tokens, burst.full_s) for burst in bursts], float)


def whole_speeds(bursts: Sequence[Burst]) -> NDArray[np.float64]:
    """[bursts, 2]: tokens and seconds."""
    return np.array([(sum(len(text.token_ids) for text in burst.texts), burst.seconds) for burst in bursts], float)


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    median, high = 1e3 * np.percentile(seconds, [50, 99])
    return float(median), float(high)


def show(summaries: Sequence[Summary], measured: Measured, console: Console) -> None:
    """Print everything."""
    for streams in measured:
        console.print("", table([one for one in summaries if one.streams == streams]), sep="\n")
    console.print(f"\n{LEGEND}\n")
    most = max(measured)
    for one in summaries:
        if one.streams > one.fewest_streams and one.streams in (8, most):
            console.print(
                f"{one.name}: {one.streams} streams have {shown(one.times_fewest)} times the throughput of "
                f"{one.fewest_streams}."
            )
    if worst := slowest(summaries):
        low, one = worst
        console.print(f"Lowest end of an interval against plain: {low:.2f} ({one.name}, {one.streams} streams).")
    for reason in sorted({text.degraded for text in all_texts(measured) if text.degraded}):
        console.print(f"Some texts were decoded plainly at least in part: {escape(reason)}")


def all_texts(measured: Measured) -> list[Any]:
    """The texts of all bursts."""
    return [text for bursts in measured.values() for own in bursts.values() for burst in own for text in burst.texts]


def slowest(summaries: Sequence[Summary]) -> tuple[float, Summary] | None:
    """Where a contestant that speculates may lose most against plain decoding with the target's cores."""
    drafting = [one for one in summaries if one.name not in (PLAIN, PLAIN_ALL_CORES)]
    ends = [(one.times_plain.interval[0], one) for one in drafting if one.times_plain.interval]
    return min(ends, key=lambda end: end[0], default=None)


def table(summaries: Sequence[Summary]) -> Table:
    """One number of streams."""
    columns = (
        "tokens/s",
        "against plain",
        "to the last",
        "plain, all cores",
        "first token",
        "token",
        "accepted",
        "same",
    )
    count = summaries[0].streams
    made = Table(f"{count} stream{'s' if count > 1 else ''}", *columns, box=None)
    for one in summaries:
        made.add_row(
            one.name,
            f"{one.tokens_per_second:.1f}",
            shown(one.times_plain),
            shown(one.times_plain_to_the_last),
            shown(one.times_plain_all_cores),
            *(f"{median:.0f} / {high:.0f}" for median, high in (one.first_token_ms, one.inter_token_ms)),
            percent(one.acceptance),
            percent(one.same_texts),
        )
    return made


def content(summaries: Sequence[Summary], measured: Measured) -> dict[str, Any]:
    """Everything measured, for the JSON file. Texts are left out."""

    def brief(bursts: Mapping[str, Sequence[Burst]]) -> dict[str, Any]:
        return {
            name: [
                {
                    "seconds": burst.seconds,
                    "full_seconds": burst.full_s,
                    "full_tokens": burst.full_tokens,
                    "tokens": sum(len(text.token_ids) for text in burst.texts),
                    "first_token_s": [text.first_token_s for text in burst.texts],
                }
                for burst in own
            ]
            for name, own in bursts.items()
        }

    runs = {str(streams): brief(bursts) for streams, bursts in measured.items()}
    return {"summaries": [asdict(one) for one in summaries], "bursts": runs}


def plot(summaries: Sequence[Summary], file: Path) -> None:
    """Throughput, speed against plain, and token latency over streams. Raises ImportError: no matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.5), layout="constrained")
    throughput, against, latency = figure.subplots(1, 3)
    for name in dict.fromkeys(one.name for one in summaries):
        own = [one for one in summaries if one.name == name]
        streams = [one.streams for one in own]
        throughput.plot(streams, [one.tokens_per_second for one in own], "o-", label=name)
        [line] = against.plot(streams, [one.times_plain.value for one in own], "o-", label=name)
        ends = [one.times_plain.interval or (one.times_plain.value,) * 2 for one in own]
        against.fill_between(streams, [low for low, _ in ends], [high for _, high in ends], alpha=0.15)
        latency.plot(streams, [one.inter_token_ms[0] for one in own], "o-", color=line.get_color())
        latency.plot(streams, [one.inter_token_ms[1] for one in own], ":", color=line.get_color())
    against.axhline(1, color="black", linewidth=0.8)
    ticks = sorted({one.streams for one in summaries})
    labels = {throughput: "tokens/s", against: "speed against plain", latency: "ms a token; dots: 99th percentile"}
    for panel, label in labels.items():
        panel.set(xlabel="streams", ylabel=label, xscale="log")
        panel.set_xticks(ticks, labels=ticks)
        panel.minorticks_off()
    throughput.legend()
    figure.savefig(file, dpi=150)
