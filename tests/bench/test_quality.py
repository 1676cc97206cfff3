"""The measurement of quality: its statistics, and the command on tiny models."""

import json
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from typer.testing import CliRunner

from bench.quality import app
from bench.quality_report import Text, outcome
from bench.samples import bleu, bleu_counts, bleu_difference, distance
from bench.ties import Parting, ties
from foredraft.cli.up import Stack
from foredraft.engine.loading import load
from foredraft.sampling.coupled import rank
from foredraft.sampling.params import SamplingParams


def test_quality_compares_every_method_with_plain_decoding(
    models: tuple[Path, Path], reused: type[Stack], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.quality.Stack", reused)
    (tmp_path / "prompts.txt").write_text("Hello!\nOnce upon a time\nTo be, or not to be\n")
    flags = ["--target", str(models[0]), "--draft", str(models[1]), "--prompts", str(tmp_path / "prompts.txt")]
    flags += ["--dtype", "float64", "--max-new-tokens", "8", "--streams", "2"]
    flags += ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    assert done.output.count("Same seed: 3 of 3 coupled texts") == 2
    greedy, sampled = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert (greedy["temperature"], greedy["rows"], sampled["temperature"]) == (0, [], 0.7)
    plain, coupled, rejection, block = sampled["rows"]
    assert [row["name"] for row in (plain, coupled, rejection, block)] == ["plain", "coupled", "rejection", "block"]
    assert coupled["over_floor"] == [0, 0]
    assert coupled["bigrams"] == plain["bigrams"]
    for row in (plain, coupled, rejection, block):
        assert 0 <= row["unigrams"]["total_variation"] <= row["bigrams"]["total_variation"] <= 1
        assert (row["acceptance"] is None) == (row["name"] == "plain")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_distance_is_total_variation_and_tells_distributions_apart() -> None:
    assert distance([[1, 1, 2, 2]], [[1, 3]], 1).total_variation == pytest.approx(0.5)
    assert distance([[1, 2, 1]], [[1, 2]], 2).total_variation == pytest.approx(0.5)
    rng = np.random.default_rng(1)
    one, same = (rng.choice(50, size=(40, 30)).tolist() for _ in range(2))
    # Half of the tokens are drawn from the lower half.
    other = [[token // 2 if rng.random() < 0.5 else token for token in text] for text in rng.choice(50, (40, 30))]
    assert distance(one, one, 1).p == 1
    assert distance(one, same, 1).p > 0.05
    assert distance(one, other, 1).p < 0.01


def test_p_values_of_equal_distributions_are_spread_evenly() -> None:
    rng = np.random.default_rng(0)
    values = [distance(*rng.choice(8, size=(2, 10, 6)).tolist(), 2).p for _ in range(100)]
    assert np.mean(values) == pytest.approx(0.5, abs=0.12)
    assert np.mean(np.array(values) < 0.2) == pytest.approx(0.2, abs=0.12)


def test_bleu_is_that_of_sacrebleu() -> None:
    own = ["The cat sat on the mat, and the dog watched it.", "A river runs through the old town."]
    references = ["The cat sat on a mat, and the dog watched it.", "A river runs slowly through the town of old."]
    counts = bleu_counts(own, references)
    assert float(bleu(counts.sum(0))) == pytest.approx(sacrebleu.corpus_bleu(own, [references]).score)
    same = bleu_counts(references, references)
    assert float(bleu(same.sum(0))) == pytest.approx(100)
    low, high = bleu_difference(same, counts)
    assert 0 < low <= high
    assert bleu_difference(counts, counts) == (0, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_gap_at_a_difference_is_the_one_that_the_service_draws_by(
    models: tuple[Path, Path], temperature: float
) -> None:
    model = load(str(models[0]), dtype="float64", device="cpu").model
    context = [5, 6, 7, 8, 9]
    logits = model(torch.tensor([context])).logits[0, -1:].detach()
    params = SamplingParams(temperature=temperature, seed=3)
    warped = logits / temperature if temperature else logits
    first, second, third = rank(warped, params, sample_index=0, positions=[len(context)], count=3)[0].tolist()
    near, far = ties(
        str(models[0]),
        "bfloat16",
        [Parting(context, first, other, temperature, 3) for other in (second, third)],
    )
    assert 0 < near.gap < far.gap
    assert near.rounding < 0.5


def test_a_text_that_no_tie_explains_is_counted(models: tuple[Path, Path]) -> None:
    plain, other = Text("a", [5, 6], 0, 0), Text("b", [5, 7], 0, 0)
    texts = {"plain": [plain, plain], "coupled": [other, Text("c", [5], 0, 0)]}
    one = outcome(str(models[0]), "float64", 0.0, [[1, 2], [1, 2]], [0, 1], texts)
    assert (one.same, one.ended, one.beyond) == (0, 1, 2)
