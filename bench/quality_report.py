"""What the texts of `bench.quality` say, and how it is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.report import percent
from bench.samples import Distance, bleu, bleu_counts, bleu_difference, distance
from bench.summary import part
from bench.ties import Tie, parting, ties

PLAIN, ANOTHER_SEED, COUPLED = "plain", "plain, another seed", "coupled"
REJECTION, BLOCK = "rejection", "block"

LEGEND = """All rows are compared with the plain texts of another seed; the row of plain decoding is the floor. Over
floor: 95% interval of BLEU less the floor's, a paired bootstrap over prompts. TV 1, TV 2: total variation between the
frequencies of tokens and of pairs; p: permutation test of it that exchanges the two texts of a prompt; where nothing
differs, one in twenty is below 0.05. Gap: between the two tokens, in nats of log p + noise (greedy: of the logits), by
the same weights in a higher type; rounding: root mean square of what the services' type changes between the two in
one pass; beyond: gaps that are more than four times what two passes differ by, sqrt(2) times that."""


@dataclass(frozen=True, slots=True)
class Text:
    """What was written, and how many of the drafted tokens were accepted."""

    text: str
    token_ids: list[int]
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Row:
    """A way to decode against the plain texts of another seed. `over_floor`: the interval of BLEU less the floor's."""

    name: str
    acceptance: float | None
    bleu: float
    over_floor: tuple[float, float] | None
    unigrams: Distance
    bigrams: Distance


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything about one type at one temperature; greedy texts have no `rows`.

    `same` of `count` coupled texts are the plain ones of the same seed, `same_bleu` is the BLEU of all against these.
    `ties` are where the others part, `ended` those that only end elsewhere, and `beyond` counts those, and gaps that
    rounding does not explain.
    """

    dtype: str
    temperature: float
    count: int
    same: int
    same_bleu: float
    ties: list[Tie]
    ended: int
    beyond: int
    rows: list[Row]
    texts: Mapping[str, Sequence[Text]]


def outcome(
    target: str,
    dtype: str,
    temperature: float,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    texts: Mapping[str, Sequence[Text]],
) -> Outcome:
    """Compare the texts of all ways; the target is loaded where some of one seed are not the same."""
    different = [
        (prompt, plain.token_ids, own.token_ids, seed)
        for prompt, seed, plain, own in zip(prompts, seeds, texts[PLAIN], texts[COUPLED], strict=True)
        if plain.token_ids != own.token_ids
    ]
    partings = [
        parting(prompt, plain, own, temperature, seed)
        for prompt, plain, own, seed in different
        if plain[: len(own)] != own[: len(plain)]
    ]
    found, ended = ties(target, dtype, partings), len(different) - len(partings)
    return Outcome(
        dtype=dtype,
        temperature=temperature,
        count=len(prompts),
        same=len(prompts) - len(different),
        same_bleu=float(bleu(counts(texts[COUPLED], texts[PLAIN]).sum(0))),
        ties=found,
        ended=ended,
        beyond=ended + sum(not tie.explained for tie in found),
        rows=rows(texts) if ANOTHER_SEED in texts else [],
        texts=texts,
    )


def rows(texts: Mapping[str, Sequence[Text]]) -> list[Row]:
    """All ways against the plain texts of another seed."""
    reference = texts[ANOTHER_SEED]
    floor, tokens = counts(texts[PLAIN], reference), [text.token_ids for text in reference]
    made = []
    for name, own in texts.items():
        if name == ANOTHER_SEED:
            continue
        own_counts, own_tokens = counts(own, reference), [text.token_ids for text in own]
        made.append(
            Row(
                name=name,
                acceptance=part(sum(text.accepted for text in own), sum(text.drafted for text in own)),
                bleu=float(bleu(own_counts.sum(0))),
                over_floor=None if name == PLAIN else bleu_difference(own_counts, floor),
                unigrams=distance(own_tokens, tokens, 1),
                bigrams=distance(own_tokens, tokens, 2),
            )
        )
    return made


def counts(own: Sequence[Text], reference: Sequence[Text]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """See bleu_counts."""
    return bleu_counts([text.text for text in own], [text.text for text in reference])


def show(one: Outcome, console: Console) -> None:
    """Print one type at one temperature."""
    console.print(f"\n{one.dtype}, temperature {one.temperature:g}", style="bold")
    console.print(
        f"Same seed: {one.same} of {one.count} coupled texts are those of plain decoding; BLEU {one.same_bleu:.1f}."
    )
    if one.ties:
        gaps, roundings = [tie.gap for tie in one.ties], [tie.rounding for tie in one.ties]
        console.print(
            f"Where the others part: gap {np.median(gaps):.2g} in the median, at most {max(gaps):.2g}; rounding "
            f"{np.median(roundings):.2g} and {max(roundings):.2g}; beyond: {one.beyond - one.ended}."
        )
    if one.ended:
        console.print(f"{one.ended} only end elsewhere, which no tie explains.")
    if one.rows:
        console.print(table(one.rows))


def table(rows: Sequence[Row]) -> Table:
    """The ways to decode."""
    made = Table("", "accepted", "BLEU", "over floor", "TV 1", "p", "TV 2", "p", box=None)
    for row in rows:
        over = "floor" if row.over_floor is None else f"[{row.over_floor[0]:+.1f}, {row.over_floor[1]:+.1f}]"
        distances = (
            text for one in (row.unigrams, row.bigrams) for text in (f"{one.total_variation:.3f}", f"{one.p:.3f}")
        )
        made.add_row(row.name, percent(row.acceptance), f"{row.bleu:.1f}", over, *distances)
    return made


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    """Distances from plain texts of another seed, with the floor as a line. Raises ImportError: no matplotlib."""
    from matplotlib.figure import Figure

    sampled = [one for one in outcomes if one.rows]
    figure = Figure(figsize=(4 * len(sampled) + 2, 3), layout="constrained")
    panels = figure.subplots(1, len(sampled), sharey=True, squeeze=False)[0]
    for panel, one in zip(panels, sampled, strict=True):
        places = np.arange(len(one.rows))
        for offset, color, label, values in (
            (-0.2, "#7aa6c2", "tokens", [row.unigrams for row in one.rows]),
            (0.2, "#c2967a", "pairs", [row.bigrams for row in one.rows]),
        ):
            panel.barh(places + offset, [value.total_variation for value in values], 0.4, color=color, label=label)
            panel.axvline(values[0].total_variation, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=f"{one.dtype}, T={one.temperature:g}", xlabel="total variation; dots: floor")
        panel.set_yticks(places, labels=[row.name for row in one.rows])
    panels[0].invert_yaxis()
    panels[0].legend()
    figure.savefig(file, dpi=150)
