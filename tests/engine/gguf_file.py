"""Writes a tiny Llama as a GGUF file, the way llama.cpp's converter does."""

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from tests import tiny

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(path: Path, model: PreTrainedModel) -> Path:
    """Saves a float32 Llama and the tiny tokenizer as `path`."""
    config, tokenizer = model.config, tiny.tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tiny.CHATML)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(*_renamed(name, tensor.numpy(), config.num_attention_heads, config.num_key_value_heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _renamed(
    name: str, values: npt.NDArray[np.float32], heads: int, key_heads: int
) -> tuple[str, npt.NDArray[np.float32]]:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name == "lm_head.weight":
        return "output.weight", values
    if name in whole:
        return whole[name], values
    _, _, layer, *middle, _ = name.split(".")
    short = NAMES[".".join(middle)]
    if short in ("attn_q", "attn_k"):
        # GGUF interleaves the two halves that rotary positions rotate into each other.
        count = heads if short == "attn_q" else key_heads
        values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return f"blk.{layer}.{short}.weight", np.ascontiguousarray(values)
