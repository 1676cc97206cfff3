"""The comparison as a command, on tiny models and a few tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.compare import app
from bench.contestants import Work, transformers_plain, transformers_prompt_lookup
from bench.summary import PLAIN, ratio, speedup
from foredraft.cli.up import Stack
from foredraft.engine.loading import load
from tests import tiny

SERVICES = {"plain", "plain, all cores", "sequential", "overlapped"}
TEMPERATURES, TOKENS, PROMPTS, REPEATS = [0.0, 0.7], 12, 2, 1


def check(result: dict[str, Any], contestants: set[str]) -> None:
    """Everybody is there, at every temperature, with numbers that can be, and the texts are the same."""
    assert [one["temperature"] for one in result["temperatures"]] == TEMPERATURES
    for one in result["temperatures"]:
        assert {summary["name"] for summary in one["contestants"]} == contestants
        assert set(one["compared"]) == (contestants if one["temperature"] == 0 else SERVICES)
        assert one["first_difference"] is None
        for summary in one["contestants"]:
            check_summary(summary)
            runs = one["runs"][summary["name"]]
            assert [run["prompt"] for run in runs] == list(range(PROMPTS)) * REPEATS
            assert all(run["timed_tokens"] < run["tokens"] <= TOKENS for run in runs)
            assert all(run["seconds"] > 0 for run in runs if run["timed_tokens"] > 0)


def check_summary(summary: dict[str, Any]) -> None:
    """One contestant's numbers."""
    assert summary["tokens_per_second"] > 0
    low, high = summary["times_plain"]["interval"]
    assert 0 < low <= high
    assert summary["tokens_per_round"] >= 1
    shares = ("acceptance", "hit_rate", "prepared_used", "target_busy", "draft_wait", "wire", "queue")
    assert all(summary[name] is None or 0 <= summary[name] <= 1 for name in shares)
    assert (summary["target_busy"] is None) == (summary["name"] not in SERVICES)
    if summary["name"] == PLAIN:
        assert summary["times_plain"] == {"value": 1, "interval": [1, 1]}


def test_compare_measures_everybody(
    models: tuple[Path, Path], reused: type[Stack], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.compare.Stack", reused)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    (tmp_path / "prompts.txt").write_text("Hello!\n\nOnce upon a time\n")
    flags = [part for temperature in TEMPERATURES for part in ("--temperature", str(temperature))]
    flags += ["--target", str(models[0]), "--draft", str(models[1]), "--draft-tokens", "3", "--dtype", "float64"]
    flags += ["--max-new-tokens", str(TOKENS), "--repeats", str(REPEATS), "--prompts", str(tmp_path / "prompts.txt")]
    flags += ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    check(result, {"Transformers", "Transformers assisted", *SERVICES})
    greedy = result["temperatures"][0]
    assert set(greedy["overlapped_against"]) == {"Transformers assisted", "sequential"}
    form, drafted = greedy["closed_form"], greedy["runs"]["sequential"][0]["statistics"]["drafted_per_position"]
    assert 1 <= len(drafted) <= 3
    assert 0 <= form["alpha"] <= 1
    assert 0 < form["k"] <= 3
    assert form["sequential"] > 0


def test_prompt_lookup_of_transformers_writes_what_plain_decoding_does(tmp_path: Path) -> None:
    target = load(str(tiny.save_model(tmp_path, dtype="float64")), dtype="float64", device="cpu")
    work = Work(0, [5, 6, 7, 5, 6, 7, 5, 6], temperature=0.0, seed=0, max_new_tokens=TOKENS)
    plain, lookup = transformers_plain(target)(work), transformers_prompt_lookup(target, 3)(work)
    assert lookup.token_ids == plain.token_ids
    assert lookup.rounds <= plain.rounds == len(plain.token_ids) <= TOKENS


@pytest.mark.parametrize(
    ("alpha", "c", "k", "h", "expected"),
    # Best draft lengths for turn-taking and for a hit rate of 0.9, worked out by hand.
    [(0.7, 0.1, 4, 0.0, 1.98), (0.8, 0.1, 6, 0.0, 2.47), (1.0, 0.0, 4, 0.0, 5.0), (0.0, 0.5, 2, 1.0, 1.0)],
)
def test_closed_form_is_what_the_papers_say(alpha: float, c: float, k: float, h: float, expected: float) -> None:
    assert speedup(alpha, k, c, h) == pytest.approx(expected, abs=0.005)


def test_interval_of_a_ratio_ignores_what_both_contestants_find_hard() -> None:
    seconds = np.array([1.0, 10.0, 100.0, 3.0])
    other = np.stack([np.full(4, 100.0), seconds], axis=1)
    own = np.stack([np.full(4, 100.0), seconds / 2], axis=1)
    result = ratio(own, other)
    assert result.value == pytest.approx(2)
    assert result.interval == pytest.approx((2, 2))
    own[0, 1] = 5.0
    low, high = ratio(own, other).interval or (0.0, 0.0)
    assert low < ratio(own, other).value <= high
