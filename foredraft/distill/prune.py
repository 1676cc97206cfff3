"""The draft that training starts from: some layers of the target, its embeddings and a head for frequent tokens."""

import copy
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from foredraft.engine.errors import ModelError


def layer_list(model: PreTrainedModel) -> str:
    """The name of the list of layers, such as "model.layers". Raises ModelError if there is no such list."""
    count: int = model.config.num_hidden_layers
    found: list[str] = [
        n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count and count > 0
    ]
    # A list inside a layer, of as many experts as there are layers, is not meant.
    found = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(found) != 1:
        raise ModelError(
            f"{type(model).__name__} does not keep its {count} layers in one list, so it cannot be pruned; use a "
            "target such as Llama, Qwen or Mistral"
        )
    return found[0]


def pick_layers(count: int, kept: int) -> tuple[int, ...]:
    """Which `kept` of `count` layers a draft gets by default: the first ones and the last, which know the head."""
    if not 1 <= kept < count:
        raise ModelError(f"a draft of {kept} layers cannot be made of a target that has {count}; it must have fewer")
    return (*range(kept - 1), count - 1)


def pruned_config(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """The configuration of a copy with these layers alone. Raises ModelError if the target does not have them."""
    count = config.num_hidden_layers
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= count:
        raise ModelError(f"layers must be rising numbers from 0 to {count - 1}, not {', '.join(map(str, layers))}")
    pruned = copy.deepcopy(config)
    pruned.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        pruned.layer_types = [config.layer_types[layer] for layer in layers]
    return pruned


def prune(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A copy of the target with these of its layers, in float32. What `shared` names is frozen."""
    name = layer_list(target)
    config = pruned_config(target.config, layers)
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    numbers = {old: new for new, old in enumerate(layers)}
    state: dict[str, Tensor] = {}
    for key, value in target.state_dict().items():
        match = re.match(rf"{re.escape(name)}\.(\d+)\.(.*)", key)
        if match is None:
            state[key] = value
        elif int(match[1]) in numbers:
            state[f"{name}.{numbers[int(match[1])]}.{match[2]}"] = value
    draft.load_state_dict(state)
    draft.tie_weights()
    for key in shared(draft):
        draft.get_parameter(key).requires_grad_(False)
    nn.Module.to(draft, target.device)
    return draft


def shared(model: PreTrainedModel) -> list[str]:
    """The names of what a draft has in common with its target: the embeddings and the head."""
    name = layer_list(model)
    head = head_weight(model)
    outside = (n for n, m in model.named_modules() if not n.startswith(f"{name}.") and isinstance(m, nn.Embedding))
    embeddings = {f"{n}.weight" for n in outside}
    # A tied head is an embedding already.
    heads = {key for key, value in model.named_parameters() if value is head}
    return sorted(embeddings | heads)


def head_weight(model: PreTrainedModel) -> Tensor:
    """The head's weight [V, H]. Raises ModelError if it is more than a matrix."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"{type(model).__name__} has no plain linear head, which a draft shares with its target")
    return head.weight


def frequent_tokens(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The `size` ids with the greatest `counts` [V], `always` among them, in rising order: int64 [size]."""
    counts = counts.double().clone()
    counts[list(always)] = torch.inf
    # Of tokens that never occur the lowest ids: tokenizers learn frequent tokens first.
    counts -= 1e-6 * torch.arange(len(counts)) / len(counts)
    return counts.topk(min(size, len(counts))).indices.sort().values
