"""Small passes with fixed shapes, which on CUDA become graphs: one launch for a whole forward, no Python in between.

A pass of `tokens` tokens lays its queries out as [slots, queries] and attends to the slots' memory where it lies, up to
`length` text rows, under one mask that the pass computes from a few integers for each token. What is left over of a
shape is padding: tokens that write to the scrap row, and queries that nobody reads. Every slot's rows are read, whether
it takes part or not: memory bandwidth is paid for `max_sessions`, which is what a busy server needs anyway.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from foredraft.engine.attention import Attention
from foredraft.engine.batch import Batch
from foredraft.engine.compatibility import layer_windows
from foredraft.engine.slots import SlotCache

# Sizes that a pass is rounded up to: tokens in all, most tokens of one slot, and text rows that are visible.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
QUERIES = (1, 8, 16)
LENGTHS = tuple(length << i for i in range(12) for length in (256, 384))
# Graphs that are kept; their memory is shared, so each takes only the size of its launches.
MOST_GRAPHS = 64
# Masks with rows of other sizes are copied in every layer.
ALIGNMENT = 16

Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Attention, SlotCache], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pass is rounded up to; `tree` says whether it sees the slots' trees, too."""

    tokens: int
    queries: int
    length: int
    tree: bool


def shape_of(batch: Batch, longest: int) -> Shape | None:
    """The shape of a decode or verify pass; None for one that is too large, or that wants few logits (a prompt)."""
    counts: Counter[int] = Counter()
    for segment in batch.segments:
        counts[segment.slot] += segment.stop - segment.start
    tokens, queries = len(batch.token_ids), max(counts.values())
    if tokens > TOKENS[-1] or queries > QUERIES[-1] or 2 * len(batch.keep) < tokens:
        return None
    tree = any(segment.paths for segment in batch.segments)
    needed = max(segment.length - (batch.tree_size if segment.paths else 0) for segment in batch.segments)
    length = min(_round_up(needed, (*LENGTHS, longest)), longest)
    return Shape(_round_up(tokens, TOKENS), _round_up(queries, QUERIES), length, tree)


@dataclass(slots=True)
class StaticPlan:
    """Attention of a pass of fixed shape.

    For each token: `places` [T] int64 is its query among slots * queries, one more for padding, and `reads` [T] the
    query whose result it takes; `limits` [T] int64 how many text rows it sees, `visible` [T, tree_size] bool which tree
    rows, and `positions` [T] int64 are as in the text.
    """

    shape: Shape
    slots: int
    tree_size: int
    columns: Tensor
    positions: Tensor
    places: Tensor
    reads: Tensor
    limits: Tensor
    visible: Tensor
    windows: list[int | None] = field(default_factory=list)
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Query [1, H, T, D], key and value [slots, Hkv, stride, D or Dv] -> [1, T, H, Dv]."""
        _, heads, _, size = query.shape
        slots, queries, key_heads = self.slots, self.shape.queries, key.shape[1]
        groups = heads // key_heads
        first = 0 if self.shape.tree else self.tree_size
        seen = slice(first, self.tree_size + self.shape.length)
        laid_out = query.new_zeros(slots * queries + 1, heads, size)
        laid_out.index_copy_(0, self.places, query[0].transpose(0, 1))
        packed = laid_out[:-1].view(slots, queries, key_heads, groups, size).permute(0, 2, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            packed.reshape(slots, key_heads, groups * queries, size),
            key[:, :, seen],
            value[:, :, seen],
            attn_mask=self.mask(window, groups, query.dtype),
            scale=scale,
        )
        size = attended.shape[-1]
        attended = attended.view(slots, key_heads, groups, queries, size).permute(0, 3, 1, 2, 4)
        return attended.reshape(slots * queries, heads, size).index_select(0, self.reads)[None]

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [slots, 1, groups * queries, rows], computed by the first layer that asks."""
        mask = self.masks.get((window, groups))
        if mask is None:
            mask = self.masks[window, groups] = self._mask(window, groups, dtype)
        return mask

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        columns = self.columns[: self.shape.length]
        hidden = columns >= self.limits[:, None]
        if window is not None:
            hidden = hidden | (columns <= self.positions[:, None] - window)
        if self.shape.tree:
            hidden = torch.cat((~self.visible, hidden), dim=1)
        rows, slots, queries = hidden.shape[1], self.slots, self.shape.queries
        # What no token writes to stays visible everywhere: a row of -inf alone would give NaN.
        bias = torch.zeros(slots * queries + 1, -(-rows // ALIGNMENT) * ALIGNMENT, dtype=dtype, device=hidden.device)
        shown = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        bias[:, :rows].index_copy_(0, self.places, shown)
        mask = bias[:-1].view(slots, 1, queries, -1).expand(-1, groups, -1, -1)
        return mask.reshape(slots, 1, groups * queries, -1)[..., :rows]


class StaticPass:
    """The inputs of one shape, preallocated, and on CUDA the graph that runs on them."""

    def __init__(self, shape: Shape, cache: SlotCache, columns: Tensor, tree_size: int) -> None:
        device, tokens, slots = columns.device, shape.tokens, cache.slot_count
        cuda = device.type == "cuda"
        self.shape, self.slots, self.tree_size, self.scrap_row = shape, slots, tree_size, cache.scrap_row
        # Rows: token ids, positions, destinations, wanted rows, places, limits. Staged in memory that copies by itself.
        self.staged = torch.zeros(6, tokens, dtype=torch.int64, pin_memory=cuda)
        self.staged_visible = torch.zeros(tokens, tree_size, dtype=torch.bool, pin_memory=cuda)
        self.integers = torch.zeros(6, tokens, dtype=torch.int64, device=device)
        self.visible = torch.zeros(tokens, tree_size, dtype=torch.bool, device=device)
        self.copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self.columns = columns
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, batch: Batch) -> None:
        """Brings a batch onto the device; waits for nothing but the copy before, which is over by then."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens, scrap_place = self.shape.tokens, self.slots * self.shape.queries
        missing = tokens - len(batch.token_ids)
        places, limits = self._places(batch)
        self.staged.copy_(
            torch.tensor(
                [
                    batch.token_ids + [0] * missing,
                    batch.positions + [0] * missing,
                    batch.destinations + [self.scrap_row] * missing,
                    batch.keep + [0] * (tokens - len(batch.keep)),
                    places + [scrap_place] * missing,
                    limits + [1] * missing,
                ]
            )
        )
        self.integers.copy_(self.staged, non_blocking=True)
        if self.shape.tree:
            self._stage_trees(batch)
            self.visible.copy_(self.staged_visible, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def plan(self) -> StaticPlan:
        """A plan on these inputs, without masks yet."""
        _, positions, _, _, places, limits = self.integers
        return StaticPlan(
            shape=self.shape,
            slots=self.slots,
            tree_size=self.tree_size,
            columns=self.columns,
            positions=positions,
            places=places,
            reads=places.clamp(max=self.slots * self.shape.queries - 1),
            limits=limits,
            visible=self.visible,
        )

    def _places(self, batch: Batch) -> tuple[list[int], list[int]]:
        used: Counter[int] = Counter()
        places: list[int] = []
        limits: list[int] = []
        for segment in batch.segments:
            count = segment.stop - segment.start
            place = segment.slot * self.shape.queries + used[segment.slot]
            used[segment.slot] += count
            places += range(place, place + count)
            if segment.paths:
                limits += segment.prefixes
            else:
                base = batch.positions[segment.start]
                limits += range(base + 1, base + 1 + count)
        return places, limits

    def _stage_trees(self, batch: Batch) -> None:
        self.staged_visible.zero_()
        on_path = [
            (segment.start + i, node)
            for segment in batch.segments
            for i, path in enumerate(segment.paths)
            for node in path
        ]
        rows, nodes = zip(*on_path, strict=True)
        self.staged_visible[list(rows), list(nodes)] = True


class StaticPasses:
    """The passes of fixed shape that a model has run, the most recently used last."""

    def __init__(
        self, forward: Forward, cache: SlotCache, columns: Tensor, tree_size: int, model: PreTrainedModel
    ) -> None:
        self.runs = 0
        self._forward, self._cache, self._columns, self._tree_size = forward, cache, columns, tree_size
        # An ancestor is at most tree_size back, so that no wider window hides it.
        self._trees_fit = all(window is None or window >= tree_size for window in layer_windows(model))
        self._passes: OrderedDict[Shape, StaticPass] = OrderedDict()
        # Where all graphs leave their logits, so that they can share the rest of their memory.
        self._logits = torch.empty(0)
        self._pool = torch.cuda.graph_pool_handle() if columns.device.type == "cuda" else None

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [wanted rows, V] in the model's type, overwritten by the next run; None if no shape holds the batch.

        On CUDA a shape that is new is captured first, which takes about as long as ten passes.
        """
        shape = shape_of(batch, len(self._columns))
        if shape is None or (shape.tree and not self._trees_fit):
            return None
        one = self._passes.pop(shape, None) or StaticPass(shape, self._cache, self._columns, self._tree_size)
        self._passes[shape] = one
        if len(self._passes) > MOST_GRAPHS:
            self._passes.popitem(last=False)
        one.fill(batch)
        self.runs += 1
        if self._pool is None:
            return self._compute(one)[: len(batch.keep)]
        if one.graph is None:
            one.graph = self._capture(one)
        one.graph.replay()
        return self._logits[: len(batch.keep)]

    def _compute(self, one: StaticPass) -> Tensor:
        token_ids, positions, destinations, keep, _, _ = one.integers
        return self._forward(token_ids, positions, destinations, keep, one.plan(), self._cache)

    def _capture(self, one: StaticPass) -> torch.cuda.CUDAGraph:
        """Records the pass. Running it before writes the same keys and values as running it later: no harm is done."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                logits = self._compute(one)
        torch.cuda.current_stream().wait_stream(side)
        if not len(self._logits):
            self._logits = logits.new_empty(TOKENS[-1], logits.shape[1])
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._logits[: one.shape.tokens].copy_(self._compute(one))
        return graph


def _round_up(value: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= value)
