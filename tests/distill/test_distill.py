"""What the distilling tool promises, on tiny models; one run of it serves several tests."""

import errno
import io
import itertools
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.distill import files, report
from foredraft.distill.generate import Text, Writer
from foredraft.distill.pipeline import Options, distill
from foredraft.distill.prompts import HELD_OUT, built_in, follow_up
from foredraft.distill.prune import frequent_tokens, head_weight, prune
from foredraft.distill.stored import DESCRIPTION, WEIGHTS, Stored, assemble, assembled
from foredraft.distill.train import CHECKPOINT, Examples, Recipe, Trainer
from foredraft.engine.engine import Engine
from foredraft.engine.errors import ModelError
from foredraft.engine.head import FILE, RestrictedHead
from foredraft.engine.loading import LoadedModel, load
from tests import tiny

OPTIONS = Options(
    layers=(0, 2),
    head_size=200,
    tokens=1500,
    rows=12,
    max_new_tokens=16,
    recipe=Recipe(steps=40, batch_tokens=512, learning_rate=5e-3),
    save_every=20,
)


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("target"), kind="llama-tied", layers=3)


@pytest.fixture(scope="module")
def loaded(target: Path) -> LoadedModel:
    return load(str(target), dtype="float32")


@pytest.fixture(scope="module")
def output(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    directory = tmp_path_factory.mktemp("run")
    distill(str(target), directory, OPTIONS, quiet())
    return directory


@pytest.fixture
def copy(output: Path, tmp_path: Path) -> Path:
    """A copy of the finished run's stored draft."""
    return Path(shutil.copytree(output / "draft", tmp_path / "draft"))


def text(output: Path) -> Text:
    return Text.load(output / "text" / "held-out-0.0.safetensors")


def accepted(draft: torch.nn.Module, head_ids: torch.Tensor, output: Path, target: LoadedModel) -> float:
    head = head_weight(draft)[head_ids]
    return report.acceptance(report.matches(draft, head, head_ids, text(output), target.vocabulary_size))


def test_training_improves_on_the_pruned_target(output: Path, loaded: LoadedModel) -> None:
    stored = Stored.read(output / "draft")
    head_ids = stored.head_ids.long()
    before = accepted(prune(loaded.model, stored.layers), head_ids, output, loaded)
    after = accepted(stored.apply(loaded), head_ids, output, loaded)
    assert 1 - after < 0.75 * (1 - before)
    written = json.loads((output / "report.json").read_text())
    assert written["temperature 0.0"]["acceptance"] == pytest.approx(after)
    assert [line["k"] for line in written["temperature 0.7"]["lines"]] == list(range(1, 9))


def test_the_assembled_model_has_the_trained_logits_for_its_tokens_and_no_others(
    output: Path, loaded: LoadedModel
) -> None:
    draft = load(str(output / "model"), dtype="float32")
    stored = Stored.read(output / "draft")
    expected = stored.apply(loaded)(input_ids=torch.arange(40)[None]).logits[0]
    logits = draft.model(input_ids=torch.arange(40)[None]).logits[0]
    ids = stored.head_ids.long()
    torch.testing.assert_close(logits[:, ids], expected[:, ids])
    others = torch.ones(logits.shape[1], dtype=torch.bool)
    others[ids] = False
    assert torch.isneginf(logits[:, others]).all()
    assert draft.vocabulary_hash == loaded.vocabulary_hash
    Engine(draft.model, max_model_len=64, max_sessions=2, tree_size=4)


def test_a_restricted_head_computes_what_the_whole_head_computes() -> None:
    weight, hidden = torch.randn(50, 8, dtype=torch.float64), torch.randn(3, 2, 8, dtype=torch.float64)
    ids = torch.tensor([0, 7, 31, 49])
    logits = RestrictedHead(weight[ids], ids, 50)(hidden)
    torch.testing.assert_close(logits[..., ids], (hidden @ weight.T)[..., ids])
    assert logits.isfinite().sum() == 6 * len(ids)


def test_assembling_gives_the_model_that_the_run_left(output: Path, target: Path, tmp_path: Path) -> None:
    made = assemble(target, output / "draft", tmp_path / "made")
    assert load(str(made)).weights_hash == load(str(output / "model")).weights_hash
    with pytest.raises(FileExistsError):
        assemble(target, output / "draft", made)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_draft_is_assembled_in_the_cache_once(output: Path, target: Path, copy: Path, tmp_path: Path) -> None:
    first = assembled(target, output / "draft", tmp_path / "cache")
    made = (first / "config.json").stat()
    assert assembled(target, output / "draft", tmp_path / "cache") == first
    assert (first / "config.json").stat() == made
    (copy / DESCRIPTION).write_text((copy / DESCRIPTION).read_text() + "\n")
    assert assembled(target, copy, tmp_path / "cache") != first


def test_a_stored_draft_can_be_trained_on(output: Path, target: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    recipe = Recipe(steps=2, batch_tokens=512, learning_rate=0.0, seed=1)
    more = replace(OPTIONS, start=output / "draft", recipe=recipe, tokens=100, seed=1)
    distill(str(target), tmp_path / "more", more, quiet())
    before, after = Stored.read(output / "draft"), Stored.read(tmp_path / "more" / "draft")
    assert all(torch.equal(after.weights[name], value) for name, value in before.weights.items())
    assert torch.equal(before.head_ids, after.head_ids)


def trainer(loaded: LoadedModel, output: Path, directory: Path, recipe: Recipe = OPTIONS.recipe) -> Trainer:
    head_ids = Stored.read(output / "draft").head_ids.long()
    return Trainer(prune(loaded.model, (0, 2)), head_ids, directory, recipe, lambda _: 0.0, save_every=5)


def test_killed_training_goes_on_as_if_nothing_had_happened(output: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    recipe = replace(OPTIONS.recipe, steps=12)
    shards = sorted((output / "text").glob("shard-*"))
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = trainer(loaded, output, tmp_path / "whole", recipe)
    losses = list(whole.run(lambda: shards))
    killed = trainer(loaded, output, tmp_path / "killed", recipe)
    assert list(itertools.islice(killed.run(lambda: shards), 8)) == losses[:8]
    resumed = trainer(loaded, output, tmp_path / "killed", recipe)
    assert resumed.step == 5
    assert list(resumed.run(lambda: shards)) == losses[5:]


def test_other_options_do_not_resume_a_run(output: Path, loaded: LoadedModel) -> None:
    with pytest.raises(ModelError, match="other options"):
        trainer(loaded, output, output, replace(OPTIONS.recipe, loss="tv"))


def test_only_missing_shards_are_written_and_they_come_out_the_same(
    output: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    shutil.copytree(output / "text", tmp_path / "text")
    names = sorted(path.name for path in (tmp_path / "text").glob("shard-*"))
    missing = tmp_path / "text" / names[2]
    content = missing.read_bytes()
    missing.unlink()
    kept = (tmp_path / "text" / names[0]).stat()
    writer = Writer(loaded, tmp_path / "text", rows=OPTIONS.rows, max_new_tokens=OPTIONS.max_new_tokens)
    assert [path.name for path in itertools.islice(writer.write(built_in(0)), 3)] == names[:3]
    assert missing.read_bytes() == content
    assert (tmp_path / "text" / names[0]).stat() == kept


def test_stored_states_give_the_logits_that_the_target_has_alone(output: Path, loaded: LoadedModel) -> None:
    """However long the prompts beside it, whoever ended before."""
    shard = Text.load(output / "text" / "shard-00000.safetensors")
    model, at = tiny.model("llama-tied", layers=3), 0
    for i, reply in enumerate(shard.replies()):
        start, end = int(shard.prompt_lengths[i]), int(shard.lengths[i])
        logits = model(input_ids=shard.tokens[i, None, :end].long()).logits[0, start - 1 : end - 1]
        stored = shard.hidden[at : at + len(reply)].float() @ head_weight(loaded.model).T
        torch.testing.assert_close(stored, logits, rtol=0.01, atol=0.02)
        if shard.temperatures[i] == 0:
            assert torch.equal(stored.argmax(-1), reply.long())
        at += len(reply)
    assert at == len(shard.hidden)


def test_every_reply_is_in_one_batch_of_an_epoch(output: Path) -> None:
    texts = [Text.load(path) for path in sorted((output / "text").glob("shard-*"))]
    batches = list(Examples(texts).batches(512, seed=3))
    assert sum(len(batch.tokens) for batch in batches) == sum(len(shard.lengths) for shard in texts)
    assert sum(len(batch.hidden) for batch in batches) == sum(len(shard.hidden) for shard in texts)
    assert all(len(batch.where) == len(batch.hidden) for batch in batches)
    assert max(batch.tokens.numel() for batch in batches) <= 512


def test_a_full_disk_is_reported_and_the_run_goes_on_later(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def fsync(_: int) -> None:
        nonlocal written
        written += 1
        if written > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    small = replace(OPTIONS, tokens=300, recipe=replace(OPTIONS.recipe, steps=4), save_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fsync)
        with pytest.raises(ModelError, match=r"No space left on device.*same command"):
            distill(str(target), tmp_path, small, quiet())
    left = {path: path.stat() for path in (tmp_path / "text").iterdir()}
    assert len(left) > 2
    assert not list(tmp_path.rglob("*.partial"))
    distill(str(target), tmp_path, small, quiet())
    assert all(path.stat() == before for path, before in left.items())
    assert (tmp_path / CHECKPOINT).exists()


def test_drafts_that_do_not_fit_are_refused(
    output: Path, copy: Path, target: Path, tmp_path: Path, loaded: LoadedModel
) -> None:
    other = tiny.save_model(tmp_path / "other", kind="llama-tied", layers=3, seed=1)
    with pytest.raises(ModelError, match="other embeddings"):
        assemble(other, output / "draft", tmp_path / "x")
    description = (copy / DESCRIPTION).read_text()
    (copy / DESCRIPTION).write_text(description.replace(loaded.vocabulary_hash, "0" * 64))
    with pytest.raises(ModelError, match="another vocabulary"):
        assemble(target, copy, tmp_path / "x")
    (copy / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(ModelError, match="no stored draft"):
        assemble(target, copy, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_models_whose_head_list_is_missing_or_foreign_are_refused(output: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(output / "model", tmp_path / "model"))
    content = json.loads((model / FILE).read_text())
    (model / FILE).write_text(json.dumps({**content, "vocabulary_hash": "0" * 64}))
    with pytest.raises(ModelError, match="another vocabulary"):
        load(str(model))
    (model / FILE).write_text(json.dumps({**content, "token_ids": content["token_ids"][1:]}))
    with pytest.raises(ModelError, match="must list 200 different ids"):
        load(str(model))
    (model / FILE).unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load(str(model))


@pytest.mark.parametrize("layers", [(0, 3), (1, 0), (0, 0), (), 3])
def test_layers_that_the_target_does_not_have_are_refused(
    target: Path, tmp_path: Path, layers: tuple[int, ...] | int
) -> None:
    with pytest.raises(ModelError, match=r"layers"):
        distill(str(target), tmp_path, replace(OPTIONS, layers=layers), quiet())


def test_targets_that_cannot_be_distilled_are_refused(tmp_path: Path) -> None:
    sliding = tiny.save_model(tmp_path / "sliding", kind="mistral", layers=3)
    with pytest.raises(ModelError, match="sliding"):
        distill(str(sliding), tmp_path / "x", OPTIONS, quiet())
    silent = tiny.save_model(tmp_path / "silent", layers=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (silent / name).unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        distill(str(silent), tmp_path / "x", OPTIONS, quiet())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layers", "first"], 2, "layers"),
        (["--loss", "l2"], 2, "kl or tv"),
        (["--layers", "7"], 1, "it must have fewer"),
    ],
)
def test_the_command_explains_what_it_cannot_do(
    target: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    result = CliRunner().invoke(app, ["distill", "--target", str(target), "--out", str(tmp_path / "x"), *arguments])
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_stored_draft_becomes_a_model_by_command(output: Path, target: Path, tmp_path: Path) -> None:
    arguments = ["assemble", "--target", str(target), "--draft", str(output / "draft"), "--out", str(tmp_path / "made")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert load(str(tmp_path / "made")).model.config.num_hidden_layers == 2
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "exists already" in again.output


def test_held_out_prompts_are_never_among_those_for_training() -> None:
    held_out = {conversation[0]["content"] for conversation in HELD_OUT}
    drawn = [conversation[0]["content"] for conversation in itertools.islice(built_in(0), 5000)]
    assert len(held_out) == 60
    assert len(set(drawn)) == 5000
    assert held_out.isdisjoint(drawn)


def test_follow_ups_contain_the_reply() -> None:
    asked = [{"role": "user", "content": "Why?"}]
    found = [follow_up(asked, "Because.", random.Random(seed)) for seed in range(20)]
    assert {len(conversation) for conversation in found} == {1, 3}
    assert all("Because." in "".join(turn["content"] for turn in conversation) for conversation in found)


def test_frequent_tokens_hold_what_must_be_held() -> None:
    counts = torch.tensor([0, 0, 0, 0, 0, 3, 0, 2, 0, 1])
    assert frequent_tokens(counts, 3, always=[2]).tolist() == [2, 5, 7]
    assert frequent_tokens(counts, 6, always=[2]).tolist() == [0, 1, 2, 5, 7, 9]


def test_rounds_replay_a_reply_as_decoding_would() -> None:
    # The opening's token; three accepted and one corrected; none and one corrected; one accepted, and the last.
    reply = [True, True, True, True, False, False, True, True]
    assert report.rounds([reply], 4) == [(4, 3), (2, 0), (1, 1)]
    assert report.rounds([reply], 2) == [(2, 2), (2, 0), (2, 0), (1, 1)]
    assert report.rounds([[True]], 4) == []
