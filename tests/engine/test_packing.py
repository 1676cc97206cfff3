"""Packed weights make few rows faster and change nothing else."""

import logging

import pytest
import torch
from torch import nn

from foredraft.engine import Engine, memory, packing
from foredraft.engine.head import RestrictedHead
from foredraft.engine.packing import MOST_ROWS, PackedForward, packed_bytes
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


@pytest.fixture(autouse=True)
def _small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAST_WEIGHTS", 0)


def packed_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(vars(module).get("forward"), PackedForward)]


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "gpt2"])
def test_packed_layers_compute_what_plain_ones_do(kind: str) -> None:
    model = tiny.model(kind)
    Engine(model, max_model_len=64, max_sessions=2)
    layers = packed_layers(model)
    assert model.get_output_embeddings() in layers
    assert len(layers) == 2 * (4 if kind == "gpt2" else 7) + 1
    for layer in layers:
        for rows in (1, 2, 3, 5, 16, MOST_ROWS, MOST_ROWS + 1):
            hidden = torch.randn(1, rows, vars(layer)["forward"].features)
            with torch.inference_mode():
                computed, expected = layer(hidden), type(layer).forward(layer, hidden)
            assert (computed - expected).norm() < 1e-4 * expected.norm()
            assert computed.shape == expected.shape


def test_a_restricted_head_is_packed() -> None:
    model = tiny.model()
    ids = torch.arange(0, tiny.VOCABULARY_SIZE, 3)
    model.set_output_embeddings(RestrictedHead(model.lm_head.weight.detach()[ids], ids, tiny.VOCABULARY_SIZE))
    Engine(model, max_model_len=64, max_sessions=2)
    assert model.lm_head.listed in packed_layers(model)


def test_a_packed_model_can_still_be_saved_tied_and_trained() -> None:
    model, plain = tiny.model("llama-tied"), tiny.model("llama-tied")
    Engine(model, max_model_len=64, max_sessions=2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.state_dict().keys() == plain.state_dict().keys()
    ids = torch.arange(20)[None]
    for each in (model, plain):
        each.set_attn_implementation("sdpa")
        each(input_ids=ids, labels=ids).loss.backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


def test_weights_stay_unpacked_and_the_log_says_so_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.model()
    slots = 2 * 64 * 2 * 2 * 64 * 4
    monkeypatch.setattr(memory, "free_bytes", lambda device: slots + packed_bytes(model))
    with caplog.at_level(logging.INFO):
        Engine(model, max_model_len=64, max_sessions=2)
    assert packed_layers(model) == []
    assert "packed weights would take" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_are_not_packed(dtype: torch.dtype) -> None:
    model = tiny.model(dtype=dtype)
    Engine(model, max_model_len=64, max_sessions=2)
    assert packed_layers(model) == []
