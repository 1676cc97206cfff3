"""Packed copies of linear layers' weights: on CPUs oneDNN computes a few rows from them much faster than PyTorch does.

A matrix times a vector is as fast as memory either way, and many rows as fast as the processor. Between them, where
draft tokens are verified and sessions batched, the time for five rows falls from about twice to 1.3 times that for one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# Beyond these PyTorch is as fast; measured with AVX2 and layers of 576 to 49152 features.
MOST_ROWS = 32
# Smaller weights stay in the processor's cache, and oneDNN's call costs more than it saves.
LEAST_WEIGHTS = 200_000
# A hint for the layout, which makes little difference.
USUAL_ROWS = 8


class PackedForward:
    """Stands in for the `forward` of a linear layer, whose weights must not change any more.

    Packed weights compute from 2 to `MOST_ROWS` rows, or with `any_rows` all, which makes a row's bits independent of
    how many others there are. What may need gradients, everything outside of inference mode, takes the plain path.
    """

    def __init__(self, layer: nn.Linear | Conv1D, *, any_rows: bool) -> None:
        weight = layer.weight.detach()
        weight = weight.t().contiguous() if isinstance(layer, Conv1D) else weight
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, USUAL_ROWS)
        self.bias, self.features = layer.bias, weight.shape[1]
        self.least, self.most = (1, 2**62) if any_rows else (2, MOST_ROWS)
        self.plain = layer.forward
        self.linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, hidden: Tensor) -> Tensor:
        """Features [..., out] of `hidden` [..., in]."""
        if self.least <= hidden.numel() // self.features <= self.most and torch.is_inference_mode_enabled():
            packed: Tensor = self.linear(hidden, self.packed, self.bias, "none", [], "")
            return packed
        return self.plain(hidden)


def packed_bytes(model: PreTrainedModel) -> int:
    """What packed copies take at most, in bytes; 0 if the model gets none: they are for float32 on CPUs."""
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in _layers(model))


def pack(model: PreTrainedModel, *, any_rows: bool) -> None:
    """Gives large linear layers packed copies of their weights for few rows, or with `any_rows` all layers for all."""
    unpack(model)
    for layer in _layers(model):
        if not any_rows and layer.weight.numel() < LEAST_WEIGHTS:
            continue
        layer.forward = PackedForward(layer, any_rows=any_rows)  # type: ignore[method-assign]


def unpack(model: PreTrainedModel) -> None:
    """Takes the packed copies away."""
    for layer in _layers(model):
        vars(layer).pop("forward", None)


def _layers(model: PreTrainedModel) -> Iterator[nn.Linear | Conv1D]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        # Not quantised layers, adapters and the like, which inherit from these, nor layers split over several devices.
        changed = type(module).forward not in (nn.Linear.forward, Conv1D.forward)
        replaced = not isinstance(vars(module).get("forward"), PackedForward | None)
        if isinstance(module, nn.Linear | Conv1D) and not changed and not replaced:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                yield module
