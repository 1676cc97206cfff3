"""The rows of a forward, and how they are laid out as one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.engine.attention import Plan, Segment, on_device, round_length


@dataclass(frozen=True, slots=True)
class Node:
    """A tree node: sees the slot's first `prefix` tokens, its ancestors and itself; its position is prefix + depth.

    `parent` is an index among the slot's tree nodes, -1 for a root; a child has its parent's prefix.
    """

    prefix: int
    parent: int = -1


@dataclass(eq=False, slots=True)
class Slot:
    """One session's cache. Read-only for callers.

    `tokens` are those whose keys and values are valid, in order; `tree_tokens`, `nodes` and `paths` (each node's
    ancestors, root first, and itself) describe the tree. `indexed` tokens are known to the prefix search.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    tree_tokens: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    indexed: int = 0

    def truncate(self, tokens: int, nodes: int) -> None:
        """Keeps only the first `tokens` tokens and `nodes` nodes. For the engine."""
        del self.tokens[tokens:]
        self.indexed = min(self.indexed, tokens)
        for items in (self.nodes, self.tree_tokens, self.paths):
            del items[nodes:]


@dataclass(slots=True)
class Row:
    """New tokens of one slot in a forward.

    `want` are indexes into `token_ids` whose logits are returned. Without `nodes` the tokens extend the slot's text;
    with them, one for each token, they become tree nodes, numbered on from the slot's last one.
    """

    slot: Slot
    token_ids: Sequence[int]
    want: Sequence[int] = ()
    nodes: Sequence[Node] | None = None


@dataclass(slots=True)
class Inputs:
    """What a forward takes: all int64; `token_ids`, `positions` and `destinations` [T], `keep` [logits wanted]."""

    token_ids: Tensor
    positions: Tensor
    destinations: Tensor
    keep: Tensor
    plan: Plan


class Batch:
    """Collects checked rows into one row of tokens, with a segment for each, and adds the tokens to their slots."""

    def __init__(self, tree_size: int, stride: int) -> None:
        self.tree_size, self.stride = tree_size, stride
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.destinations: list[int] = []
        self.keep: list[int] = []
        self.segments: list[Segment] = []

    def add(self, row: Row) -> None:
        """Adds a row; later rows of the same slot see its tokens."""
        start = len(self.token_ids)
        self.token_ids += row.token_ids
        self.keep += [start + index for index in row.want]
        if row.nodes is None:
            self._add_text(row.slot, start, row.token_ids)
        else:
            self._add_nodes(row.slot, start, row.token_ids, row.nodes)

    def _add_text(self, slot: Slot, start: int, token_ids: Sequence[int]) -> None:
        base, stop = len(slot.tokens), len(slot.tokens) + len(token_ids)
        text_row = slot.index * self.stride + self.tree_size
        self.positions += range(base, stop)
        self.destinations += range(text_row + base, text_row + stop)
        slot.tokens += token_ids
        self.segments.append(Segment(start, len(self.token_ids), slot.index, self.tree_size, round_length(stop)))

    def _add_nodes(self, slot: Slot, start: int, token_ids: Sequence[int], nodes: Sequence[Node]) -> None:
        base, stop = len(slot.nodes), len(slot.nodes) + len(nodes)
        for i, node in enumerate(nodes, start=base):
            slot.paths.append([*slot.paths[node.parent], i] if node.parent >= 0 else [i])
        slot.nodes += nodes
        slot.tree_tokens += token_ids
        positions = [node.prefix + len(path) - 1 for node, path in zip(slot.nodes, slot.paths, strict=True)]
        self.positions += positions[base:]
        self.destinations += range(slot.index * self.stride + base, slot.index * self.stride + stop)
        prefixes = [node.prefix for node in nodes]
        length = self.tree_size + round_length(max(prefixes))
        self.segments.append(
            Segment(start, len(self.token_ids), slot.index, 0, length, prefixes, slot.paths[base:], positions)
        )

    def inputs(self, columns: Tensor, scrap_row: int, row_step: int) -> Inputs:
        """The tensors, on the device of `columns`, with tokens and wanted rows padded to multiples of `row_step`."""
        missing = [0] * (-len(self.token_ids) % row_step)
        destinations = self.destinations + [scrap_row] * len(missing)
        tokens = on_device([self.token_ids + missing, self.positions + missing, destinations], columns.device)
        keep = self.keep + self.keep[-1:] * (-len(self.keep) % row_step)
        return Inputs(
            token_ids=tokens[0],
            positions=tokens[1],
            destinations=tokens[2],
            keep=on_device(keep, columns.device),
            plan=Plan(self.segments, tokens[1], columns, self.tree_size, row_step),
        )
