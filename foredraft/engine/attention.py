"""Attention of one ragged forward: every session's tokens attend to a view of that session's slot, nothing is copied.

All new tokens of all sessions lie in one row [1, T]; a `Segment` is one session's range of it. The query heads that
share a key head are packed into the query axis. Visible lengths are multiples of `LENGTH_STEP` and row counts multiples
of `row_step`: matrix products take other kernels for what is left over, and a token's result would not have the same
bits whatever else is in the pass. On GPUs small passes have a plan of fixed shape instead: see `static`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from foredraft.engine.errors import ModelError

IMPLEMENTATION = "foredraft_slots"
LENGTH_STEP = 64

# What a model may ask of its attention that this one does not do.
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "alibi", "head_mask")


def round_length(length: int) -> int:
    """The next multiple of LENGTH_STEP."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The values as int64 on a device, without waiting for what it computes."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def row_step(dtype: torch.dtype) -> int:
    """What row counts must be a multiple of; measured on x86 processors, with several threads too."""
    return 2 if dtype in (torch.bfloat16, torch.float16) else 4


@dataclass(slots=True)
class Segment:
    """The tokens `start:stop` of a forward, all of one slot, and the rows `first : first + length` that they may see.

    Text sees the text up to itself. Tree nodes see the first `prefixes[i]` text tokens and the nodes `paths[i]`, their
    ancestors and themselves; `node_positions` are the positions of all nodes of the slot's tree.
    """

    start: int
    stop: int
    slot: int
    first: int
    length: int
    prefixes: Sequence[int] = ()
    paths: Sequence[Sequence[int]] = ()
    node_positions: Sequence[int] = ()


class Attention(Protocol):
    """How the tokens of a forward attend. `windows` collects the sliding window of each layer as the layers come by."""

    windows: list[int | None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Query [1, H, T, D], key and value [slots, Hkv, stride, D or Dv] -> [1, T, H, Dv]."""
        ...


@dataclass(slots=True)
class Plan:
    """The segments of a forward, each attended to by itself. Masks are built once and shared by the layers.

    `positions` [T] int64 are the tokens' positions, `columns` [max length] int64 counts 0, 1, 2, ...
    """

    segments: Sequence[Segment]
    positions: Tensor
    columns: Tensor
    tree_size: int
    row_step: int
    windows: list[int | None] = field(default_factory=list)
    masks: dict[tuple[int | None, int], list[Tensor]] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Query [1, H, T, D], key and value [slots, Hkv, stride, D or Dv] -> [1, T, H, Dv]."""
        _, heads, tokens, _ = query.shape
        key_heads = key.shape[1]
        groups = heads // key_heads
        outputs = []
        for segment, mask in zip(self.segments, self.segment_masks(window, groups, query.dtype), strict=True):
            start, stop, slot = segment.start, segment.stop, segment.slot
            rows = groups * (stop - start)
            seen = slice(segment.first, segment.first + segment.length)
            packed = query[:, :, start:stop].reshape(1, key_heads, rows, -1)
            if missing := -rows % self.row_step:
                packed = functional.pad(packed, (0, 0, 0, missing))
            attended = functional.scaled_dot_product_attention(
                packed,
                key[slot : slot + 1, :, seen],
                value[slot : slot + 1, :, seen],
                attn_mask=mask,
                scale=scale,
            )
            outputs.append(attended[:, :, :rows].reshape(1, heads, stop - start, -1).transpose(1, 2))
        if padding := tokens - self.segments[-1].stop:
            outputs.append(query.new_zeros(1, padding, heads, value.shape[-1]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def segment_masks(self, window: int | None, groups: int, dtype: torch.dtype) -> list[Tensor]:
        """Additive masks [1, 1, groups * n, length], rows rounded up, one per segment of n tokens."""
        masks = self.masks.get((window, groups))
        if masks is None:
            masks = [self._mask(segment, window, groups, dtype) for segment in self.segments]
            self.masks[window, groups] = masks
        return masks

    def _mask(self, segment: Segment, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        hidden = self._hidden(segment, window)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        bias = bias.repeat(groups, 1) if groups > 1 else bias
        missing = -bias.shape[0] % self.row_step
        return (functional.pad(bias, (0, 0, 0, missing)) if missing else bias)[None, None]

    def _hidden(self, segment: Segment, window: int | None) -> Tensor:
        """Bool [n, length]: what each token of the segment must not see."""
        positions = self.positions[segment.start : segment.stop, None]
        if not segment.paths:
            columns = self.columns[: segment.length]
            hidden = columns > positions
            return hidden if window is None else hidden | (columns <= positions - window)
        device, tree_size = positions.device, self.tree_size
        columns = self.columns[: segment.length - tree_size]
        on_path = [i * tree_size + node for i, path in enumerate(segment.paths) for node in path]
        tree = torch.ones(len(segment.paths) * tree_size, dtype=torch.bool, device=device)
        tree[on_device(on_path, device)] = False
        text = columns >= on_device(segment.prefixes, device)[:, None]
        hidden = torch.cat((tree.view(-1, tree_size), text), dim=1)
        if window is None:
            return hidden
        unused = [0] * (tree_size - len(segment.node_positions))
        nodes = on_device([*segment.node_positions, *unused], device)
        return hidden | (torch.cat((nodes, columns)) <= positions - window)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: Attention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Runs in every layer: query [1, H, T, D], key and value [slots, Hkv, stride, D or Dv] -> [1, T, H, Dv]."""
    if plan is None:
        raise ModelError(f"{type(module).__name__} does not hand extra arguments on to its attention")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} brings an attention mask of its own")
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name} in its attention")
    plan.windows.append(sliding_window)
    return plan.attend(query, key, value, scaling, sliding_window), None


AttentionInterface.register(IMPLEMENTATION, slot_attention)
