"""The engine: sessions of one causal language model in slots, and one ragged forward over any mixture of them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.engine.batch import Batch, Node, Row, Slot
from foredraft.engine.compatibility import embedding_rows
from foredraft.engine.errors import ModelError, NoFreeSlot
from foredraft.engine.parallel import Group, Leader
from foredraft.engine.prefix import PrefixSearch
from foredraft.engine.runner import Runner
from foredraft.engine.selftest import check_logits, measure_batch_invariance

logger = logging.getLogger(__name__)

__all__ = ["Engine", "Node", "Row", "Slot"]

# Fewer tokens than this are computed again rather than copied, and lost rather than kept.
WORTHWHILE_PREFIX = 16


class Rows(Protocol):
    """Who moves keys and values between rows of the slots' memory."""

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """Copies `count` rows from row `source` on to row `target` on; the two ranges must not overlap."""
        ...

    def gather_rows(self, sources: Sequence[int], target: int) -> None:
        """Copies the rows `sources` to row `target` on."""
        ...

    def clear_rows(self, first: int, count: int) -> None:
        """Zeroes `count` rows from row `first` on."""
        ...


class Engine:
    """A model and its slots. Not thread-safe: one thread calls it. The logits returned are inference tensors.

    `max_model_len` tokens of text fit in each of `max_sessions` slots, and `tree_size` tree nodes beside them.
    With `batch_invariant` the engine tries to compute a text's logits with the same bits whatever shares a pass with
    it, which makes a pass over one token slower; the attribute of this name says whether it succeeds. In float32 on
    CPUs the model's weights are packed, if there is memory for it, and must not change any more. With `group` the model
    is this rank's part of one that several share, and the other ranks `parallel.follow` the `leader`. Raises ModelError
    if the model does not work on slots or the memory does not suffice.
    """

    leader: Leader | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int,
        max_sessions: int,
        tree_size: int = 0,
        batch_invariant: bool = False,
        group: Group | None = None,
    ) -> None:
        for name, value, least in (
            ("max_model_len", max_model_len, 8),
            ("max_sessions", max_sessions, 1),
            ("tree_size", tree_size, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        self.model = model
        self.max_model_len, self.max_sessions, self.tree_size = max_model_len, max_sessions, tree_size
        self.device = model.device
        self.vocabulary_rows = embedding_rows(model)
        arguments: dict[str, Any] = {
            "max_model_len": max_model_len,
            "max_sessions": max_sessions,
            "tree_size": tree_size,
            "batch_invariant": batch_invariant,
        }
        if group is not None:
            self.leader = Leader(model, group, **arguments)
        self.runner = self.leader or Runner(model, **arguments)
        self._cache: Rows = self.runner
        self._stride = self.runner.stride
        self._forget()
        check_logits(self, self.runner)
        if self.device.type == "cuda" and isinstance(self.runner, Runner) and not batch_invariant:
            self._try_static_passes(self.runner)
        self._forget()
        self.batch_invariant = batch_invariant and measure_batch_invariance(self)
        self._forget()

    def _try_static_passes(self, runner: Runner) -> None:
        """Uses CUDA graphs if they compute what the passes without them compute."""
        self._forget()
        try:
            runner.use_static_passes()
            check_logits(self, runner)
        except (ModelError, RuntimeError) as error:
            runner.static_passes = None
            logger.warning("small passes run without CUDA graphs, which is slower: %s", error)

    def _forget(self) -> None:
        """Makes all slots free and empty."""
        self._open: dict[int, Slot] = {}
        self._free = {index: Slot(index) for index in range(self.max_sessions)}
        self._prefixes = PrefixSearch(self.max_sessions, self.max_model_len)
        self._closed = 0
        self._closed_at = [0] * self.max_sessions
        self.forwards = 0
        self.computed_tokens = 0

    @property
    def slots_used(self) -> int:
        """How many sessions are open."""
        return len(self._open)

    @torch.inference_mode()
    def open(self, token_ids: Sequence[int]) -> Slot:
        """Gives a slot that already holds as much of `token_ids` as possible, at most all but the last.

        Raises NoFreeSlot; ValueError for ids that are no tokens or too many of them.
        """
        self._check_tokens(token_ids)
        if not token_ids:
            raise ValueError("token_ids is empty; a session starts with at least one token")
        if len(token_ids) > self.max_model_len:
            raise ValueError(f"{len(token_ids)} tokens do not fit; max_model_len is {self.max_model_len}")
        if not self._free:
            raise NoFreeSlot(f"all {self.max_sessions} sessions are in use; try again when one has ended")
        text = list(token_ids[:-1])
        slots = [*self._free.values(), *self._open.values()]
        shared = {slot.index: int(n) for slot, n in zip(slots, self._prefixes.shared(slots, text), strict=True)}
        index = self._slot_to_take(shared)
        source = max(shared, key=lambda index: shared[index])
        reused = shared[index]
        self._free[index].truncate(reused, 0)
        if shared[source] >= reused + WORTHWHILE_PREFIX:
            self._free[index].truncate(0, 0)  # so that a failure to copy leaves no wrong tokens
            reused = shared[source]
            self._cache.copy_rows(self._text_row(source), self._text_row(index), reused)
        del self._free[index]
        slot = Slot(index, tokens=text[:reused])
        self._open[index] = slot
        return slot

    def _slot_to_take(self, shared: Mapping[int, int]) -> int:
        """The free slot for a new text, of which each slot has `shared` tokens.

        One that loses next to nothing by it, as when a conversation goes on; else one as good as empty, else the
        least recently used: a prefix that many texts share is copied, and the other texts stay.
        """

        def worth(index: int) -> int:
            return len(self._free[index].tokens) - shared[index]

        continued = max(self._free, key=lambda index: (worth(index) < WORTHWHILE_PREFIX, shared[index]))
        if worth(continued) < WORTHWHILE_PREFIX <= shared[continued]:
            return continued
        return min(
            self._free,
            key=lambda index: (len(self._free[index].tokens) >= WORTHWHILE_PREFIX, self._closed_at[index]),
        )

    def close(self, slot: Slot) -> None:
        """Ends a session; its tokens stay for reuse. Raises ValueError if it has ended already."""
        self._check_open(slot)
        del self._open[slot.index]
        self._free[slot.index] = Slot(slot.index, tokens=slot.tokens, indexed=slot.indexed)
        self._closed += 1
        self._closed_at[slot.index] = self._closed

    def rollback(self, slot: Slot, length: int) -> None:
        """Cuts the text to its first `length` tokens and drops the tree."""
        self._check_open(slot)
        if not 0 <= length <= len(slot.tokens):
            raise ValueError(f"cannot roll back to {length} tokens; the slot holds {len(slot.tokens)}")
        slot.truncate(length, 0)

    @torch.inference_mode()
    def clear(self, slot: Slot) -> None:
        """Drops all tokens of a session and zeroes their keys and values, which are not numbers.

        Attention reads beyond the end of a text and hides that with a mask, which hides no NaN: 0 * NaN is NaN.
        """
        self._check_open(slot)
        slot.truncate(0, 0)
        self._cache.clear_rows(slot.index * self._stride, self._stride)

    def drop_tree(self, slot: Slot) -> None:
        """Drops all tree nodes."""
        self._check_open(slot)
        slot.truncate(len(slot.tokens), 0)

    @torch.inference_mode()
    def adopt(self, slot: Slot, nodes: Sequence[int]) -> None:
        """Makes tree nodes text: cuts the text to their prefix, appends them and drops the tree.

        `nodes` is a path from a root downwards, which need not end at a leaf.
        """
        self._check_open(slot)
        if not nodes or not 0 <= nodes[-1] < len(slot.nodes) or slot.paths[nodes[-1]] != list(nodes):
            raise ValueError(f"{list(nodes)} is no path from a root of the slot's {len(slot.nodes)} tree nodes")
        prefix = slot.nodes[nodes[0]].prefix
        tokens = [slot.tree_tokens[node] for node in nodes]
        first = slot.index * self._stride
        slot.truncate(prefix, 0)  # first, so that a failure to copy leaves no wrong tokens
        self._cache.gather_rows([first + node for node in nodes], self._text_row(slot.index) + prefix)
        slot.tokens += tokens

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Computes all tokens of all rows in one pass and adds them to their slots.

        Returns for each row raw logits [len(want), vocabulary_rows], float32, or float64 if the model is. A slot may
        have several rows; each sees the tokens of those before it. If it raises, no slot has changed.
        """
        if not rows:
            raise ValueError("rows is empty; a forward needs at least one")
        with self._restored_on_error(rows):
            batch = Batch(self.tree_size, self._stride)
            for row in rows:
                self._check_row(row)
                batch.add(row)
            logits = self.runner.run(batch)
        self.forwards += 1
        self.computed_tokens += len(batch.token_ids)
        counts = [len(row.want) for row in rows]
        return list(logits[: sum(counts)].split_with_sizes(counts))

    def _text_row(self, index: int) -> int:
        return index * self._stride + self.tree_size

    def _check_open(self, slot: Slot) -> None:
        if self._open.get(slot.index) is not slot:
            raise ValueError(f"the session in slot {slot.index} has ended; open a new one")

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocabulary_rows):
            raise ValueError(f"token ids must lie in 0..{self.vocabulary_rows - 1}")

    def _check_row(self, row: Row) -> None:
        self._check_open(row.slot)
        self._check_tokens(row.token_ids)
        count = len(row.token_ids)
        if not count:
            raise ValueError("a row has no tokens; it needs at least one")
        if row.want and not (min(row.want) >= 0 and max(row.want) < count):
            raise ValueError(f"want must lie in 0..{count - 1}")
        if row.nodes is None:
            if len(row.slot.tokens) + count > self.max_model_len:
                raise ValueError(
                    f"{len(row.slot.tokens)} + {count} tokens do not fit; max_model_len is {self.max_model_len}"
                )
            return
        if len(row.nodes) != count:
            raise ValueError(f"{count} tree tokens have {len(row.nodes)} nodes; each needs one")
        if len(row.slot.nodes) + count > self.tree_size:
            raise ValueError(f"{len(row.slot.nodes)} + {count} nodes do not fit; tree_size is {self.tree_size}")
        self._check_nodes(row.slot, row.nodes)

    def _check_nodes(self, slot: Slot, new: Sequence[Node]) -> None:
        nodes = [*slot.nodes, *new]
        depths = [len(path) - 1 for path in slot.paths]
        for i, node in enumerate(new, start=len(slot.nodes)):
            if not -1 <= node.parent < i:
                raise ValueError(f"node {i} has parent {node.parent}; it must be -1 or an earlier node")
            if not 0 <= node.prefix <= len(slot.tokens):
                raise ValueError(f"node {i} has prefix {node.prefix}; the slot holds {len(slot.tokens)} tokens")
            if node.parent >= 0 and nodes[node.parent].prefix != node.prefix:
                raise ValueError(f"node {i} has prefix {node.prefix}, its parent {nodes[node.parent].prefix}")
            depths.append(depths[node.parent] + 1 if node.parent >= 0 else 0)
            if node.prefix + depths[i] >= self.max_model_len:
                raise ValueError(f"node {i} lies beyond max_model_len, which is {self.max_model_len}")

    @contextmanager
    def _restored_on_error(self, rows: Sequence[Row]) -> Iterator[None]:
        marks = {row.slot.index: (row.slot, len(row.slot.tokens), len(row.slot.nodes)) for row in rows}
        try:
            yield
        except BaseException:
            for slot, tokens, nodes in marks.values():
                slot.truncate(tokens, nodes)
            raise
