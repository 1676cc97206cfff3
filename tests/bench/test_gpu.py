"""The measurement for GPUs as a command, on tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bench import gpu

ROOT = Path(__file__).parents[2]


def test_the_script_measures_batches_against_the_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--tiny", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens/s" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["skipped"] == []
    assert result["copy_gb_per_s"] > 0
    for name in ("target", "draft"):
        assert [one["batch"] for one in result[name]["decoding"]] == [1, 2]
        for one in result[name]["decoding"]:
            assert one["tokens_per_s"] == pytest.approx(one["batch"] / one["plain_ms"] * 1e3)
            assert one["fraction_of_limit"] == pytest.approx(one["limit_ms"] / one["plain_ms"])
            assert one["verify_to_plain"] > 0
        assert set(result[name]["sampling_ms"]) == {"temperature 0", "temperature 0.7"}
    # Head and layers of the target are read, its embedding is not; the draft's is its head.
    target, draft = gpu.TINY.target, gpu.TINY.draft
    embedding = target.vocab_size * target.hidden_size
    assert result["target"]["weight_bytes"] == 4 * (result["target"]["parameters"] - embedding)
    assert draft.tie_word_embeddings
    assert result["draft"]["weight_bytes"] == 4 * result["draft"]["parameters"]


def test_without_a_gpu_the_script_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(typer.Exit):
        gpu.main()
    assert "no CUDA device" in capsys.readouterr().out
