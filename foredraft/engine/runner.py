"""What of an engine lies on the device: the model, the slots' memory, and the forward over both."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.engine.attention import IMPLEMENTATION, Attention, round_length, row_step
from foredraft.engine.batch import Batch, Row, Slot
from foredraft.engine.compatibility import layer_windows
from foredraft.engine.errors import ModelError
from foredraft.engine.memory import check_memory, may_pack
from foredraft.engine.packing import pack, packed_bytes, unpack
from foredraft.engine.slots import SlotCache
from foredraft.engine.static import StaticPasses


class Runner:
    """A model and the memory of its slots. Not thread-safe. It keeps no books: the engine says which rows are whose.

    Parameters as for the engine. Raises ModelError if the model does not run on slots or the memory does not suffice.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_model_len: int, max_sessions: int, tree_size: int, batch_invariant: bool
    ) -> None:
        self.model = model
        self.tree_size, self.stride = tree_size, tree_size + round_length(max_model_len)
        self.static_passes: StaticPasses | None = None
        self._logits_dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._row_step = row_step(model.dtype) if batch_invariant else 1
        self._columns = torch.arange(round_length(max_model_len), device=model.device)
        model.train(False)
        model.set_attn_implementation(IMPLEMENTATION)
        unpack(model)
        self._cache, left = self._allocate(max_model_len, max_sessions)
        if may_pack(packed_bytes(model), left):
            pack(model, any_rows=batch_invariant)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Logits [at least the wanted rows, V], float32, or float64 if the model is, in the batch's order."""
        if self.static_passes is not None:
            logits = self.static_passes.run(batch)
            if logits is not None:
                return logits.to(self._logits_dtype, copy=True)
        return self._run(batch, self._cache)[0]

    @torch.inference_mode()
    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copies the keys and values of `count` rows from row `source` on to row `target` on, without overlap."""
        self._cache.copy_rows(source, target, count)

    @torch.inference_mode()
    def gather_rows(self, sources: Sequence[int], target: int) -> None:
        """Copies the keys and values of the rows `sources` to row `target` on."""
        self._cache.gather_rows(sources, target)

    @torch.inference_mode()
    def clear_rows(self, first: int, count: int) -> None:
        """Zeroes the keys and values of `count` rows from row `first` on."""
        self._cache.clear_rows(first, count)

    @torch.no_grad()
    def plain_logits(self, text: Sequence[int]) -> Tensor:
        """Logits [len(text), V] as the model computes them without slots, and, outside of inference mode, unpacked."""
        try:
            self.model.set_attn_implementation("sdpa")
            logits: Tensor = self.model(
                input_ids=torch.tensor([text], device=self.model.device), use_cache=False
            ).logits[0]
        finally:
            self.model.set_attn_implementation(IMPLEMENTATION)
        return logits.to(self._logits_dtype)

    def use_static_passes(self) -> None:
        """From now on runs small passes with fixed shapes; on CUDA as graphs, which take the Python out of them."""
        self.static_passes = StaticPasses(self._forward, self._cache, self._columns, self.tree_size, self.model)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        destinations: Tensor,
        keep: Tensor,
        plan: Attention,
        cache: SlotCache,
    ) -> Tensor:
        cache.destinations = destinations
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=keep,
            plan=plan,
            **{self._cache_argument: cache},
        )
        logits: Tensor = output.logits[0]
        return logits

    def _run(self, batch: Batch, cache: SlotCache) -> tuple[Tensor, list[int | None]]:
        inputs = batch.inputs(self._columns, cache.scrap_row, self._row_step)
        logits = self._forward(inputs.token_ids, inputs.positions, inputs.destinations, inputs.keep, inputs.plan, cache)
        return logits.to(self._logits_dtype), inputs.plan.windows

    @torch.inference_mode()
    def _allocate(self, max_model_len: int, max_sessions: int) -> tuple[SlotCache, int]:
        """Learns the shapes from a forward on a single slot, checks the arithmetic, and takes the memory.

        Returns how many bytes are left, too.
        """
        windows = layer_windows(self.model)
        trial = SlotCache(len(windows), 1, self.stride)
        batch = Batch(self.tree_size, self.stride)
        batch.add(Row(Slot(0), [0], want=[0]))
        name = type(self.model).__name__
        try:
            _, seen = self._run(batch, trial)
        except Exception as error:  # whatever a model that was not made for this may raise
            raise ModelError(f"{name} does not run on slots: {error}") from error
        if seen != windows:
            raise ModelError(f"{name} does not tell its attention about its sliding windows, so it cannot be served")
        left = check_memory(
            max_sessions=max_sessions,
            max_model_len=max_model_len,
            rows_per_session=self.stride,
            bytes_per_row=trial.bytes_per_row,
            device=self.model.device,
        )
        cache = SlotCache(len(windows), max_sessions, self.stride)
        for layer, shape in zip(cache.slot_layers, trial.slot_layers, strict=True):
            layer.lazy_initialization(shape.slot_keys, shape.slot_values)
        return cache, left
