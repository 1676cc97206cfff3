"""Which models work on slots: attention over a text, with explicit positions, and no other state."""

import inspect
import math

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from foredraft.engine.errors import ModelError

LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their frequencies depend on the length of the text, so a cached key would change its meaning as the text grows.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise ModelError(f"{type(model).__name__} has no plain token embedding, so it cannot be served")
    return embedding.num_embeddings


def check_config(config: PreTrainedConfig) -> None:
    """Raises ModelError for what a configuration alone tells."""
    if config.is_encoder_decoder:
        raise ModelError(f"{config.model_type} is an encoder-decoder; only decoder-only language models are served")
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "alibi", False):
        raise ModelError(f"{config.model_type} uses ALiBi; only rotary or learned positions are served")
    unsupported = _rope_types(text_config) & LENGTH_DEPENDENT_ROPE
    if unsupported:
        raise ModelError(
            f"{config.model_type} uses {unsupported.pop()} rotary positions, which change as the text grows; "
            f"only fixed ones are served"
        )


def check_parallel(config: PreTrainedConfig, size: int) -> None:
    """Raises ModelError if Transformers cannot split such a model evenly over `size` devices."""
    text_config = config.get_text_config(decoder=True)
    if not getattr(text_config, "base_model_tp_plan", None):
        raise ModelError(
            f"Transformers has no plan for splitting {config.model_type} over several devices; "
            f"set tensor_parallel_size to 1"
        )
    heads = text_config.num_attention_heads
    key_heads = getattr(text_config, "num_key_value_heads", None) or heads
    common = math.gcd(heads, key_heads)
    if common % size:
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ModelError(
            f"{heads} attention heads with {key_heads} key/value heads cannot be split evenly over {size} devices; "
            f"set tensor_parallel_size to one of {fits}"
        )


def check_model(model: PreTrainedModel) -> None:
    """Raises ModelError for what the class of a model tells."""
    name = type(model).__name__
    if model._is_stateful:
        raise ModelError(f"{name} carries a recurrent state, which cannot be rolled back; use an attention-only model")
    unsupported = set(_layer_types(model)) - LAYER_TYPES
    if unsupported:
        raise ModelError(
            f"{name} has layers of type {', '.join(sorted(unsupported))}; only full and sliding attention are served"
        )
    parameters = inspect.signature(model.forward).parameters
    missing = {"position_ids", "logits_to_keep"} - parameters.keys()
    if not parameters.keys() & {"cache", "past_key_values"}:
        missing.add("cache")
    if missing:
        raise ModelError(f"the forward of {name} has no {', '.join(sorted(missing))}, which slots need")
    if getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) is None:
        raise ModelError(f"{name} states no max_position_embeddings, so its context length is not known")


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """The sliding window of each layer in tokens, None for full attention."""
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    return [window if layer_type == "sliding_attention" else None for layer_type in _layer_types(model)]


def _layer_types(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config(decoder=True)
    stated: list[str] | None = getattr(config, "layer_types", None)
    if stated is not None:
        return stated
    if getattr(config, "attention_chunk_size", None) is not None:
        same = "chunked_attention"
    else:
        same = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    return [same] * config.num_hidden_layers


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The rotary types in use; a configuration has one set of parameters, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters, *(group for group in parameters.values() if isinstance(group, dict))]
    return {group["rope_type"] for group in groups if "rope_type" in group}
