"""The measurement of the services on emulated models: its closed forms, and one short run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from typer.testing import CliRunner

from bench.contestants import Run, Work
from bench.pipeline import app
from bench.pipeline_report import draft_lengths, emitted, measured, round_seconds
from foredraft.cli.supervisor import Report, ignore
from foredraft.cli.up import Stack
from foredraft.emulation import parse
from orchestrator.results import Statistics


def run(rounds: int, seconds: float, **statistics: object) -> Run:
    """A run whose statistics are all nought but for these; `rounds` with the pass over the prompt."""
    fields = {name: [] if "per_position" in name else 0 for name in Statistics.__dataclass_fields__}
    values = {**fields, "mode": "", "reproducibility": "", "degraded_reason": "", "rounds": rounds, **statistics}
    work = Work(0, [1], 0.0, 0, 20)
    return Run(work, list(range(20)), 19, seconds, seconds, rounds, Statistics(**values))


def test_closed_forms_are_those_of_the_papers() -> None:
    assert emitted(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert emitted(1.0, 3) == 4
    assert emitted(0.0, 3) == 1
    assert round_seconds(8, 20, 0) == 28
    assert round_seconds(8, 20, 1) == 20
    assert round_seconds(30, 20, 0.5) == 40


def test_draft_lengths_are_counted_from_the_positions() -> None:
    first = run(11, 1.0, drafted_per_position=[8, 8, 5])
    second = run(5, 1.0, drafted_per_position=[4])
    assert draft_lengths([first, second]) == {0: 2, 1: 4, 2: 3, 3: 5}


def test_a_run_as_fast_as_the_closed_form_reaches_all_of_it() -> None:
    # Ten rounds of two draft tokens, of which one of three is missed: 8 + 2 of them reached, 9 accepted.
    emulation = parse("target=10ms+1ms/token,draft=2ms")
    target, drafting = 0.013, 0.004
    counts = {"drafted": 20, "drafted_per_position": [10, 10], "accepted": 9, "accepted_per_position": [5, 4]}
    plain = run(20, 19 * 0.011)
    alpha = 9 / 15
    sequential = run(11, 10 * (target + drafting), draft_wait_time=10 * drafting, **counts)
    one = measured("", "sequential", 0.2, emulation, [sequential], [plain])
    assert (one.k, one.acceptance, one.hit_rate) == (2, pytest.approx(alpha), None)
    assert one.bound == pytest.approx(emitted(alpha, 2) / (target + drafting))
    assert one.round_over_ms == pytest.approx(0)
    assert one.miss_over_ms == pytest.approx(0)
    late = run(
        11, 10 * (target + 0.001) + 4 * (drafting + 0.002), draft_wait_time=4 * 0.006, hits=6, misses=4, **counts
    )
    two = measured("", "overlapped", 0.2, emulation, [late], [plain])
    assert two.hit_rate == pytest.approx(0.6)
    assert two.bound == pytest.approx(emitted(alpha, 2) / (0.6 * target + 0.4 * (target + drafting)))
    assert two.round_over_ms == pytest.approx(1)
    assert two.miss_over_ms == pytest.approx(2)
    assert measured("", "plain", 0.2, emulation, [plain], [plain]).of_bound == pytest.approx(1)


class Kept(Stack):
    """In place of Stack: the first is started, and stopped by the next one, which takes it over."""

    first: ClassVar["Kept | None"] = None

    def __init__(self, options: Mapping[str, Any], on_line: Report = ignore) -> None:
        super().__init__(options, on_line=lambda name, line: self.report(name, line))
        self.report = on_line

    async def __aenter__(self) -> Self:
        if Kept.first is None:
            Kept.first = self
            return await super().__aenter__()
        Kept.first.report, self.address = self.report, Kept.first.address
        return self

    async def __aexit__(self, *_: object) -> None:
        if self is not Kept.first and Kept.first is not None:
            await super().__aexit__()
            await Stack.__aexit__(Kept.first)


def test_one_short_run_measures_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.pipeline.Stack", Kept)
    flags = ["--ratio", "0.25", "--target", "4ms+0.1ms/token", "--repeats", "1", "--max-new-tokens", "24"]
    flags += ["--streams", "3", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert [one["mode"] for one in result["one_stream"]] == ["plain", *["sequential", "overlapped"] * 2]
    for one in result["one_stream"]:
        assert one["same_text"]
        assert one["of_bound"] > 0
        assert one["degraded"] == []
    (busy,) = result["many_streams"]
    assert busy["streams"] == 3
    assert 0 < busy["busy"] <= 1
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_bad_cost_is_told() -> None:
    done = CliRunner().invoke(app, ["--target", "fast"])
    assert done.exit_code == 1
    assert done.stderr == "error: target must be a time such as 2ms or 20ms+0.2ms/token, which 'fast' is not\n"
