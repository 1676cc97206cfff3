"""What loading a model promises: the right weights, an identity that travels, and sentences for what it refuses."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedConfig

from foredraft.engine import Engine, ModelError, Row, load
from tests import tiny
from tests.engine import gguf_file

PROMPT = "Once upon a time there was a small model"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("models") / "llama", padding_rows=8)


def test_a_directory_is_loaded_with_what_identifies_it(directory: Path) -> None:
    loaded = load(str(directory), dtype="float64", device="cpu")
    assert loaded.model.dtype == torch.float64
    assert (loaded.name, loaded.dtype, loaded.device) == (str(directory), "float64", "cpu")
    assert loaded.context_length == 512
    assert loaded.parameter_count == sum(p.numel() for p in tiny.model(padding_rows=8).parameters())
    # Padding rows of the embedding are no tokens.
    assert loaded.vocabulary_size == len(tiny.tokenizer())
    assert list(loaded.vocabulary) == tiny.tokenizer().convert_ids_to_tokens(list(range(loaded.vocabulary_size)))
    assert loaded.eos_token_ids == (tiny.tokenizer().eos_token_id,)


def test_end_of_sequence_tokens_come_from_both_configurations(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert load(str(copy)).eos_token_ids == (0, 2, 7)


def test_equal_content_has_equal_identity_wherever_it_lies(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "elsewhere")
    one, two = load(str(directory)), load(str(copy), dtype="float64")
    assert (one.weights_hash, one.vocabulary_hash) == (two.weights_hash, two.vocabulary_hash)


def test_other_weights_and_a_part_of_the_layers_are_other_models(directory: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path / "other", seed=1, padding_rows=8)
    sharded = tmp_path / "sharded"
    tiny.model(padding_rows=8).save_pretrained(sharded, max_shard_size="100KB")
    hashes = {load(str(path)).weights_hash for path in (directory, other, sharded)}
    assert len(hashes | {load(str(directory), layers=1).weights_hash}) == 4


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_the_first_layers_alone_make_a_model(kind: str, tmp_path: Path) -> None:
    path = tiny.save_model(tmp_path / kind, kind, "float64", layers=3)
    ids = torch.tensor([tiny.tokenizer().encode(PROMPT)])
    pruned, expected = load(str(path), dtype="float64", layers=2), tiny.model(kind, "float64", layers=2)
    with torch.no_grad():
        assert torch.allclose(pruned.model(ids).logits, expected(ids).logits, atol=1e-9, rtol=0)
    Engine(pruned.model, max_model_len=64, max_sessions=2)


def test_the_tokenizers_files_make_the_same_tokenizer_elsewhere(directory: Path, tmp_path: Path) -> None:
    for name, content in load(str(directory)).tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    copy = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": PROMPT + " 你好"}]
    assert copy.apply_chat_template(chat) == tiny.tokenizer().apply_chat_template(chat)
    assert copy.eos_token == tiny.EOS


def test_a_model_without_tokenizer_is_loaded(tmp_path: Path) -> None:
    tiny.model(padding_rows=8).save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert loaded.tokenizer is None
    assert loaded.tokenizer_files() == {}
    assert loaded.vocabulary_size == tiny.VOCABULARY_SIZE + 8


def test_a_gguf_file_gives_the_model_it_was_made_from(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers reads GGUF files only if accelerate is there")
    model = tiny.model()
    path = gguf_file.write(tmp_path / "tiny.gguf", model)
    loaded = load(str(path), dtype="float32")
    ids = tiny.tokenizer().encode(PROMPT)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode(PROMPT) == ids
    assert loaded.eos_token_ids == (tiny.tokenizer().eos_token_id,)
    assert "chat_template.jinja" in loaded.tokenizer_files()
    (logits,) = _logits(Engine(loaded.model, max_model_len=64, max_sessions=1), ids)
    with torch.no_grad():
        assert torch.allclose(logits, model(torch.tensor([ids])).logits[0], atol=1e-4)
    assert load(str(path), layers=1).model.config.num_hidden_layers == 1
    moved = shutil.move(path, tmp_path / "moved.gguf")
    assert load(str(moved)).weights_hash == loaded.weights_hash


@pytest.mark.skipif("FOREDRAFT_TEST_GGUF" not in os.environ, reason="FOREDRAFT_TEST_GGUF names no file")
def test_a_real_gguf_file_continues_text_sensibly() -> None:
    loaded = load(os.environ["FOREDRAFT_TEST_GGUF"])
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode("The capital of France is")
    (logits,) = _logits(Engine(loaded.model, max_model_len=64, max_sessions=1), ids)
    assert loaded.tokenizer.decode(logits[-1].argmax()).strip() == "Paris"


def _logits(engine: Engine, ids: list[int]) -> list[torch.Tensor]:
    return engine.forward([Row(engine.open(ids), ids, range(len(ids)))])


TINY = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**TINY, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}
UNSUPPORTED: dict[str, tuple[str, dict[str, object]]] = {
    "recurrent state": ("Mamba", {**TINY, "state_size": 4}),
    "forward of BloomForCausalLM has no": ("Bloom", {**TINY, "n_layer": 2, "n_head": 4}),
    "encoder-decoder": ("T5", {"vocab_size": 320, "d_model": 32, "d_ff": 32, "num_layers": 1, "d_kv": 8}),
    "dynamic rotary positions": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "GPTNeoForCausalLM": (
        "GPTNeo",
        {**TINY, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "softcap": ("Gemma2", {**LLAMA, "head_dim": 8}),
    "s_aux": ("GptOss", {**LLAMA, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("sentence", UNSUPPORTED)
def test_models_that_do_not_work_on_slots_are_refused(sentence: str, tmp_path: Path) -> None:
    family, options = UNSUPPORTED[sentence]
    config: PreTrainedConfig = getattr(transformers, f"{family}Config")(**options)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=sentence):
        Engine(load(str(tmp_path)).model, max_model_len=64, max_sessions=2)


def test_what_cannot_be_loaded_is_said_in_a_sentence(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(directory, tmp_path / "broken")
    tiny.model(layers=1, padding_rows=8).save_pretrained(tmp_path / "small")
    shutil.copy(tmp_path / "small" / "model.safetensors", broken)
    truncated = shutil.copytree(directory, tmp_path / "truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for name, options, sentence in (
        (str(truncated), {}, "the weights of .* cannot be loaded"),
        (str(tmp_path / "nowhere"), {}, "is no directory, no .gguf file and no hub model"),
        (str(tmp_path / "empty"), {}, "convert the weights to safetensors"),
        (str(directory / "config.json"), {}, "give the directory"),
        (str(broken), {}, "lack 9 tensors"),
        (str(directory), {"dtype": "int8"}, 'no dtype "int8"; use "auto"'),
        (str(directory), {"device": "abacus"}, 'no device "abacus"'),
        (str(directory), {"layers": 3}, r"must lie in 1\.\.2"),
    ):
        with pytest.raises(ModelError, match=sentence):
            load(name, **options)


def test_weights_that_are_not_numbers_are_called_damaged() -> None:
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="not numbers; they are damaged"):
        Engine(model, max_model_len=64, max_sessions=2)
