"""The measurement under load as a command, on tiny models and a few tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.load import GOOD, USELESS, app
from bench.load_report import Burst, Text, summarise
from bench.pair import useless
from bench.summary import PLAIN, PLAIN_ALL_CORES
from foredraft.cli.up import Stack
from foredraft.engine.loading import load


def test_load_measures_everybody_at_every_number_of_streams(
    models: tuple[Path, Path], reused: type[Stack], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.load.Stack", reused)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    (tmp_path / "prompts.txt").write_text("Hello!\n\nOnce upon a time\n")
    flags = ["--target", str(models[0]), "--draft", str(models[1]), "--prompts", str(tmp_path / "prompts.txt")]
    flags += ["--streams", "1", "--streams", "3", "--max-new-tokens", "8", "--bursts", "2", "--dtype", "float64"]
    flags += ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    assert "times the throughput of 1" in done.output
    result = json.loads((tmp_path / "out.json").read_text())
    everybody = [PLAIN_ALL_CORES, PLAIN, GOOD, USELESS]
    assert [(one["streams"], one["name"]) for one in result["summaries"]] == [(n, x) for n in (1, 3) for x in everybody]
    for one in result["summaries"]:
        assert one["tokens_per_second"] > 0
        assert one["same_texts"] == 1
        assert 0 < one["first_token_ms"][0] <= one["first_token_ms"][1]
        assert 0 <= one["inter_token_ms"][0] <= one["inter_token_ms"][1]
        assert [burst["tokens"] for burst in result["bursts"][str(one["streams"])][one["name"]]] == [
            8 * one["streams"]
        ] * 2
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_useless_draft_has_the_shape_of_the_good_one_and_other_weights(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    good = load(str(models[1]), dtype="float64", device="cpu")
    other = load(str(useless(models[1], tmp_path / "useless")), dtype="float64", device="cpu")
    assert other.vocabulary_hash == good.vocabulary_hash
    values = dict(other.model.named_parameters())
    for name, value in good.model.named_parameters():
        assert values[name].shape == value.shape
        assert np.allclose(values[name].std().item(), value.std().item(), rtol=0.1, atol=1e-6)
        assert value.ndim < 2 or not np.allclose(values[name].detach(), value.detach(), atol=0.1)


def test_throughput_is_of_all_streams_and_latency_of_each() -> None:
    def burst(streams: int, seconds: float) -> Burst:
        arrivals = [(0.1, 1), (seconds / 2, 1), (seconds, 1)]
        return Burst([Text([1, 2, 3], arrivals, 0.1, [seconds / 2] * 2) for _ in range(streams)], seconds)

    measured = {
        streams: {PLAIN: [burst(streams, 2)] * 2, PLAIN_ALL_CORES: [burst(streams, 1)] * 2} for streams in (1, 4)
    }
    plain, all_cores = (one for one in summarise(measured) if one.streams == 4)
    assert plain.tokens_per_second == 6
    assert plain.times_plain_all_cores.value == pytest.approx(0.5)
    assert plain.times_fewest.value == pytest.approx(4)
    assert plain.first_token_ms[0] == pytest.approx(100)
    assert (plain.inter_token_ms[0], all_cores.inter_token_ms[0]) == (pytest.approx(1000), pytest.approx(500))


def test_throughput_is_counted_until_the_first_stream_ends() -> None:
    quick = Text([1, 2, 3, 4], [(0.5, 2), (1.0, 2)])
    slow = Text([5, 6, 7, 8], [(0.9, 1), (1.5, 1), (4.0, 2)])
    burst = Burst([quick, slow], 4.0)
    assert (burst.full_s, burst.full_tokens) == (1.0, 5)
