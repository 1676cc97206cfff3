"""Table, lines, plot and JSON of `bench.compare`."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import pair
from bench.contestants import Run
from bench.summary import OVERLAPPED, PLAIN, SEQUENTIAL, ClosedForm, Outcome, Ratio, Summary

LEGEND = """In brackets: 95% interval of a paired bootstrap over prompts. per round: tokens for each pass of the target;
hits: verdicts whose continuation was ready; used: of what was prepared. Shares of the whole time: target: it computed;
waiting: no round was at the target, since the draft was not ready; wire: rounds on their way."""


def show(outcome: Outcome, console: Console) -> None:
    """Print one temperature."""
    console.print("", speeds(outcome), "", speculation(outcome), "", sep="\n")
    against = (f"{name} {shown(ratio)}" for name, ratio in outcome.overlapped_against.items())
    console.print(f"{OVERLAPPED} against {', '.join(against)}")
    if outcome.closed_form:
        console.print(closed_form_line(outcome.closed_form, outcome.contestants))
    console.print(texts_line(outcome))
    for reason in outcome.degraded:
        console.print(f"Some texts were decoded plainly at least in part: {escape(reason)}")


def speeds(outcome: Outcome) -> Table:
    """How fast the contestants were."""
    columns = ("cores", "tokens/s", "against plain", "plain, all cores")
    table = Table(f"temperature {outcome.temperature:g}", *columns, box=None)
    for one in outcome.contestants:
        ratios = (shown(one.times_plain), shown(one.times_plain_all_cores))
        table.add_row(one.name, one.cores, f"{one.tokens_per_second:.1f}", *ratios)
    return table


def speculation(outcome: Outcome) -> Table:
    """What the contestants tell of their rounds."""
    table = Table("", "per round", "accepted", "hits", "used", "target", "waiting", "wire", box=None)
    for one in outcome.contestants:
        shares = (one.acceptance, one.hit_rate, one.prepared_used, one.target_busy, one.draft_wait, one.wire)
        per_round = "-" if one.tokens_per_round is None else f"{one.tokens_per_round:.2f}"
        table.add_row(one.name, per_round, *(percent(share) for share in shares))
    return table


def closed_form_line(form: ClosedForm, summaries: Sequence[Summary]) -> str:
    """Prediction beside measurement."""
    measured = {one.name: one.times_plain.value for one in summaries}
    return (
        f"Closed form: alpha {form.alpha:.2f}, k {form.k:.1f}, hits h {form.h:.2f}, draft step c {form.c:.3f} and "
        f"verifying v {form.v:.2f} plain rounds:\n"
        f"sequential {form.sequential:.2f} (measured {measured[SEQUENTIAL]:.2f}), overlapped {form.overlapped:.2f} "
        f"(measured {measured[OVERLAPPED]:.2f}); if v were 1: {form.sequential_with_v_1:.2f} and "
        f"{form.overlapped_with_v_1:.2f}."
    )


def texts_line(outcome: Outcome) -> str:
    """Whether texts that should be the same are."""
    difference, count = outcome.first_difference, len(outcome.runs[PLAIN])
    if difference is None:
        return f"Texts: {', '.join(outcome.compared)} wrote the same {count}."
    return escape(
        f"Texts: NOT the same. {difference.name} wrote {difference.count} of {count} in another way than {PLAIN}; the "
        f"first, of prompt {difference.prompt + 1}, has {difference.token!r} for {difference.plain_token!r} at token "
        f"{difference.position + 1}."
    )


def write_json(file: Path, settings: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write everything measured. Texts are left out, as they may be long."""
    names = [field.name for field in fields(Outcome) if field.name != "runs"]
    temperatures = []
    for outcome in outcomes:
        values = {name: getattr(outcome, name) for name in names}
        runs = {name: [_brief(run) for run in runs] for name, runs in outcome.runs.items()}
        temperatures.append({**values, "runs": runs})
    pair.write_json(file, {**settings, "temperatures": temperatures}, asdict)


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    """Bars of speed against plain with their intervals, a panel per temperature. Raises ImportError: no matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(outcomes) + 2, 3), layout="constrained")
    panels = figure.subplots(1, len(outcomes), sharey=True, squeeze=False)[0]
    for panel, outcome in zip(panels, outcomes, strict=True):
        names = [one.name for one in outcome.contestants]
        whiskered(panel, names, [one.times_plain for one in outcome.contestants])
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set(title=f"temperature {outcome.temperature:g}", xlabel="speed against plain")
    panels[0].invert_yaxis()
    figure.savefig(file, dpi=150)


def whiskered(panel: Any, names: Sequence[str], ratios: Sequence[Ratio]) -> None:
    """Draw bars with their intervals in a panel of Matplotlib's."""
    values = np.array([one.value for one in ratios])
    ends = np.array([one.interval or (one.value, one.value) for one in ratios])
    # The interval of a bootstrap need not hold the value, but a whisker has no negative length.
    whiskers = np.clip([values - ends[:, 0], ends[:, 1] - values], 0, None)
    panel.barh(names, values, xerr=whiskers, color="#7aa6c2", capsize=3)


def _brief(run: Run) -> dict[str, Any]:
    """A run without its texts."""
    return {
        "prompt": run.work.number,
        "seed": run.work.seed,
        "tokens": len(run.token_ids),
        "timed_tokens": run.timed_tokens,
        "seconds": run.seconds,
        "total_seconds": run.total_seconds,
        "rounds": run.rounds,
        "statistics": run.statistics,
    }


def shown(value: Ratio) -> str:
    """A ratio and its interval."""
    interval = f" [{value.interval[0]:.2f}, {value.interval[1]:.2f}]" if value.interval else ""
    return f"{value.value:.2f}{interval}"


def percent(value: float | None) -> str:
    """A fraction as a percentage, a dash for none."""
    return "-" if value is None else f"{100 * value:.0f}%"
