"""Key/value memory: a fixed number of slots, one per session, allocated once and addressed by row.

Each head's rows lie together, which is how attention reads them.
A slot has `stride` rows: first `tree_size` rows for tree nodes, then the rows of the text. With the tree in front, a
view of the text alone and a view of tree and text are both contiguous, and text can grow while a tree is there. One
more row after the last slot takes what padding tokens write.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from foredraft.engine.attention import on_device


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The slots of one layer: keys [heads, rows, key size] and values [heads, rows, value size]."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for tensors [1, heads, tokens, size]; a tensor-parallel rank sees its own heads only."""
        slots, stride = self.cache.slot_count, self.cache.stride
        # Zeros, not empty: 0 * NaN would leak through a mask.
        self.keys, self.values = (
            x.new_zeros(x.shape[1], slots * stride + 1, x.shape[3]) for x in (key_states, value_states)
        )
        self.slot_keys, self.slot_values = (
            x[:, :-1].view(-1, slots, stride, x.shape[2]).transpose(0, 1) for x in (self.keys, self.values)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes new rows and returns views [slots, heads, stride, size] of everything."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(1, self.cache.destinations, key_states[0])
        self.values.index_copy_(1, self.cache.destinations, value_states[0])
        return self.slot_keys, self.slot_values

    # Positions and masks are explicit, so models have no use for these; the base class asks for them.
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.stride, 0

    def get_max_length(self) -> int:
        return self.cache.stride


class SlotCache(Cache):
    """The cache handed to the model. `destinations` [tokens] int64 says which row each token of a forward goes to."""

    def __init__(self, layer_count: int, slot_count: int, stride: int) -> None:
        self.slot_count, self.stride = slot_count, stride
        self.scrap_row = slot_count * stride
        self.destinations = torch.empty(0, dtype=torch.int64)
        self.slot_layers = [SlotLayer(self) for _ in range(layer_count)]
        super().__init__(layers=[*self.slot_layers])

    @property
    def bytes_per_row(self) -> int:
        """What one token takes in all layers, in bytes, once a forward has shown the shapes."""
        return sum(buffer[:, 0].numel() * buffer.element_size() for buffer in self._buffers())

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copies `count` rows from row `source` on to row `target` on; the two ranges must not overlap."""
        for buffer in self._buffers():
            buffer[:, target : target + count].copy_(buffer[:, source : source + count])

    def gather_rows(self, sources: Sequence[int], target: int) -> None:
        """Copies the rows `sources` to row `target` on."""
        index = None
        for buffer in self._buffers():
            index = on_device(sources, buffer.device) if index is None else index
            buffer[:, target : target + len(sources)].copy_(buffer[:, index])

    def clear_rows(self, first: int, count: int) -> None:
        """Zeroes `count` rows from row `first` on."""
        for buffer in self._buffers():
            buffer[:, first : first + count].zero_()

    def _buffers(self) -> Iterator[Tensor]:
        for layer in self.slot_layers:
            yield layer.keys
            yield layer.values
