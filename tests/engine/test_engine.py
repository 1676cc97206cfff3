"""The engine computes what the plain model computes, whatever sessions, rollbacks and trees come together."""

import gc
import os
import random
from collections.abc import Iterator, Sequence

import psutil
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.engine import Engine, ModelError, Node, NoFreeSlot, Row, Slot
from foredraft.engine.attention import Plan
from foredraft.engine.batch import Batch
from foredraft.engine.runner import Runner
from foredraft.engine.static import Shape, StaticPasses, shape_of
from tests import tiny

KINDS = ["llama", "llama-tied", "qwen2", "gpt2", "mistral"]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
VOCABULARY = tiny.VOCABULARY_SIZE


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def plain(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """Logits [len(text), V] of the model alone."""
    return model(torch.tensor([list(text)], device=model.device)).logits[0]


def text_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


class Schedule:
    """Random sessions on one engine; every logit that comes out is compared with the plain model's."""

    def __init__(self, kind: str, dtype: torch.dtype, seed: int, *, device: str = "cpu") -> None:
        self.rng = random.Random(seed)
        self.model = tiny.model(kind, dtype)
        self.engine = Engine(tiny.model(kind, dtype).to(device), max_model_len=150, max_sessions=8, tree_size=12)
        self.tolerance = TOLERANCE[dtype]
        self.sessions: list[tuple[Slot, list[int]]] = []  # with the prompt tokens that are still to be computed
        self.prompts = [text_of(self.rng, 60)]
        self.compared = 0

    def step(self) -> None:
        action = self.rng.choice(["open", "close", "rollback", "adopt", "drop", *["forward"] * 8])
        getattr(self, action)()

    def open(self) -> None:
        if len(self.sessions) == 8:
            return
        shared = self.rng.choice(self.prompts)
        prompt = shared[: self.rng.randrange(len(shared) + 1)] + text_of(self.rng, self.rng.randrange(1, 9))
        self.prompts = [*self.prompts[-5:], prompt]
        slot = self.engine.open(prompt)
        assert slot.tokens == prompt[: len(slot.tokens)]
        assert len(slot.tokens) < len(prompt)
        self.sessions.append((slot, prompt[len(slot.tokens) :]))

    def close(self) -> None:
        if self.sessions:
            slot, _ = self.sessions.pop(self.rng.randrange(len(self.sessions)))
            self.engine.close(slot)

    def rollback(self) -> None:
        if self.sessions:
            slot, pending = self.rng.choice(self.sessions)
            self.engine.rollback(slot, self.rng.randrange(len(slot.tokens) + 1))
            pending.clear()

    def drop(self) -> None:
        if self.sessions:
            self.engine.drop_tree(self.rng.choice(self.sessions)[0])

    def adopt(self) -> None:
        grown = [slot for slot, _ in self.sessions if slot.nodes]
        if grown:
            slot = self.rng.choice(grown)
            path = slot.paths[self.rng.randrange(len(slot.paths))]
            expected = slot.tokens[: slot.nodes[path[0]].prefix] + [slot.tree_tokens[node] for node in path]
            self.engine.adopt(slot, path)
            assert slot.tokens == expected
            assert slot.nodes == []

    def forward(self) -> None:
        chosen = [session for session in self.sessions if self.rng.random() < 0.6]
        rows, texts = [], []
        for slot, pending in chosen:
            tokens = pending or text_of(self.rng, self.rng.randrange(1, 8))
            tokens = tokens[: 150 - len(slot.tokens)]
            final = list(slot.tokens)
            if tokens:
                want = [i for i in range(len(tokens)) if self.rng.random() < 0.5]
                rows.append(Row(slot, list(tokens), want))
                texts.append([final + tokens[: i + 1] for i in want])
                final += tokens
            pending.clear()
            if self.rng.random() < 0.5:
                row, paths = self.tree_row(slot, final)
                rows.append(row)
                texts.append(paths)
        if not rows:
            return
        for logits, wanted in zip(self.engine.forward(rows), texts, strict=True):
            assert logits.shape == (len(wanted), VOCABULARY)
            for row, text in zip(logits, wanted, strict=True):
                error = (row.cpu() - plain(self.model, text)[-1]).abs().max().item()
                assert error < self.tolerance
                self.compared += 1

    def tree_row(self, slot: Slot, text: list[int]) -> tuple[Row, list[list[int]]]:
        """New nodes below nothing or below any node that is there or new."""
        nodes, tokens = list(slot.nodes), list(slot.tree_tokens)
        paths = [list(path) for path in slot.paths]
        first = len(nodes)
        for i in range(first, min(12, first + self.rng.randrange(1, 6))):
            parent = self.rng.randrange(-1, i)
            prefix = nodes[parent].prefix if parent >= 0 else self.rng.randrange(min(len(text), 130) + 1)
            nodes.append(Node(prefix, parent))
            tokens.append(self.rng.randrange(VOCABULARY))
            paths.append([*paths[parent], i] if parent >= 0 else [i])
        if len(nodes) == first:
            self.engine.drop_tree(slot)
            return self.tree_row(slot, text)
        seen = [text[: nodes[i].prefix] + [tokens[node] for node in paths[i]] for i in range(first, len(nodes))]
        return Row(slot, tokens[first:], range(len(seen)), nodes[first:]), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_plain_models_under_any_schedule(kind: str, dtype: torch.dtype) -> None:
    schedule = Schedule(kind, dtype, seed=KINDS.index(kind))
    for _ in range(250):
        schedule.step()
    assert schedule.compared > 200


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_logits_are_the_plain_models_in_passes_of_fixed_shape(kind: str) -> None:
    schedule = Schedule(kind, torch.float64, seed=10)
    passes = fixed_shapes(schedule.engine)
    for _ in range(120):
        schedule.step()
    assert schedule.compared > 100
    assert passes.runs > 20
    assert 1 < len(passes._passes) < passes.runs


def test_only_decoding_and_verifying_has_a_fixed_shape() -> None:
    engine = Engine(tiny.model(), max_model_len=600, max_sessions=4, tree_size=4)
    a, b = engine.open([1]), engine.open([2])

    def shape(*rows: Row) -> Shape | None:
        batch = Batch(engine.tree_size, engine._stride)
        marks = [(row.slot, len(row.slot.tokens)) for row in rows]
        for row in rows:
            batch.add(row)
        for slot, length in marks:
            slot.truncate(length, 0)
        return shape_of(batch, 640)

    assert shape(Row(a, [1], [0])) == Shape(tokens=1, queries=1, length=256, tree=False)
    assert shape(Row(a, [1] * 5, range(5)), Row(b, [1], [0])) == Shape(tokens=8, queries=8, length=256, tree=False)
    assert shape(Row(a, [1, 2], [0, 1], [Node(0), Node(0)])) == Shape(tokens=2, queries=8, length=256, tree=True)
    assert shape(Row(a, [1] * 17, range(17))) is None  # more queries of a slot than are laid out
    assert shape(Row(a, [1] * 16, [15])) is None  # a prompt: most logits would be computed for nobody
    engine.forward([Row(a, [1] * 520)])
    assert shape(Row(a, [1], [0])) == Shape(tokens=1, queries=1, length=640, tree=False)


def fixed_shapes(engine: Engine) -> StaticPasses:
    """Has an engine on the CPU run passes of fixed shape, as on a GPU but without graphs."""
    runner = engine.runner
    assert isinstance(runner, Runner)
    runner.use_static_passes()
    assert runner.static_passes is not None
    return runner.static_passes


def test_a_prompt_that_was_computed_is_not_computed_again() -> None:
    engine = Engine(tiny.model(), max_model_len=100, max_sessions=2)
    rng = random.Random(0)
    prompt = text_of(rng, 40)
    slot = engine.open(prompt)
    engine.forward([Row(slot, prompt)])
    engine.close(slot)
    longer = prompt + text_of(rng, 5)
    slot = engine.open(longer)
    before = engine.computed_tokens
    (logits,) = engine.forward([Row(slot, longer[len(slot.tokens) :], [4])])
    assert engine.computed_tokens - before == 5
    assert (logits[0] - plain(tiny.model(), longer)[-1]).abs().max() < 1e-4
    engine.close(slot)
    # The very same text: all but its last token, whose logits are wanted.
    assert engine.open(longer).tokens == longer[:-1]


def test_samples_of_one_prompt_share_its_computation_while_the_first_is_live() -> None:
    engine = Engine(tiny.model(), max_model_len=100, max_sessions=3)
    rng = random.Random(1)
    prompt = text_of(rng, 40)
    first = engine.open(prompt)
    engine.forward([Row(first, prompt)])
    second = engine.open(prompt)
    assert second.tokens == prompt[:-1]
    # They go different ways, and neither disturbs the other.
    (a, b) = engine.forward([Row(first, [3], [0]), Row(second, [prompt[-1], 5], [1])])
    model = tiny.model()
    assert (a[0] - plain(model, [*prompt, 3])[-1]).abs().max() < 1e-4
    assert (b[0] - plain(model, [*prompt, 5])[-1]).abs().max() < 1e-4


def test_a_new_prompt_takes_the_slot_that_was_used_least_recently() -> None:
    engine = Engine(tiny.model(), max_model_len=100, max_sessions=3)
    rng = random.Random(2)
    prompts = [text_of(rng, 30) for _ in range(4)]
    slots = [engine.open(prompt) for prompt in prompts[:3]]
    engine.forward([Row(slot, prompt) for slot, prompt in zip(slots, prompts, strict=False)])
    for index in (1, 0, 2):
        engine.close(slots[index])
    engine.close(engine.open(prompts[3]))
    kept = {index: len(engine.open(prompts[index]).tokens) for index in (0, 2)}
    assert kept == {0: 29, 2: 29}


def test_memory_does_not_grow_with_the_number_of_sessions() -> None:
    engine = Engine(tiny.model(layers=1, hidden=16), max_model_len=64, max_sessions=4, tree_size=4)
    process, rng = psutil.Process(os.getpid()), random.Random(3)

    def serve(count: int) -> None:
        for _ in range(count):
            prompt = text_of(rng, rng.randrange(1, 40))
            slot = engine.open(prompt)
            engine.forward([Row(slot, prompt[len(slot.tokens) :], [0])])
            engine.forward([Row(slot, [1, 2], [0, 1], [Node(len(prompt)), Node(len(prompt), 0)])])
            engine.adopt(slot, [0, 1])
            engine.close(slot)

    serve(200)
    gc.collect()
    objects, resident = len(gc.get_objects()), process.memory_info().rss
    serve(2000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 500
    assert process.memory_info().rss - resident < 8 * 2**20


def test_all_slots_in_use_is_said_and_ends_when_one_is_closed() -> None:
    engine = Engine(tiny.model(), max_model_len=32, max_sessions=2)
    slots = [engine.open([1]), engine.open([2])]
    assert engine.slots_used == 2
    with pytest.raises(NoFreeSlot, match="all 2 sessions are in use"):
        engine.open([3])
    engine.close(slots[0])
    engine.open([3])


def test_an_ended_session_cannot_touch_its_successor() -> None:
    engine = Engine(tiny.model(), max_model_len=32, max_sessions=1)
    ended = engine.open([1, 2])
    engine.close(ended)
    engine.open([1, 2])
    for use in (
        lambda: engine.close(ended),
        lambda: engine.rollback(ended, 0),
        lambda: engine.forward([Row(ended, [1])]),
    ):
        with pytest.raises(ValueError, match="has ended"):
            use()


@pytest.mark.parametrize("max_sessions", [1, 2, 3])
def test_the_smallest_engine_serves_and_smaller_ones_are_refused(max_sessions: int) -> None:
    engine = Engine(tiny.model(), max_model_len=8, max_sessions=max_sessions, tree_size=3)
    text = list(range(8))
    (logits,) = engine.forward([Row(engine.open(text), text, [7])])
    assert (logits[0] - plain(tiny.model(), text)[-1]).abs().max() < 1e-4
    with pytest.raises(ValueError, match="max_model_len is 7; it must be at least 8"):
        Engine(tiny.model(), max_model_len=7, max_sessions=1)
    with pytest.raises(ValueError, match="max_sessions is 0"):
        Engine(tiny.model(), max_model_len=8, max_sessions=0)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    engine = Engine(tiny.model(), max_model_len=32, max_sessions=2, tree_size=4)
    slot, other = engine.open([1, 2, 3]), engine.open([4])
    engine.forward([Row(slot, [1, 2, 3]), Row(slot, [9], [], [Node(3)])])
    bad = [
        (Row(slot, []), "no tokens"),
        (Row(slot, [VOCABULARY]), "token ids must lie in 0..319"),
        (Row(slot, [1], [1]), "want must lie in 0..0"),
        (Row(slot, [1] * 30), "max_model_len is 32"),
        (Row(slot, [1], [], [Node(4)]), "the slot holds 3 tokens"),
        (Row(slot, [1], [], [Node(3, 2)]), "an earlier node"),
        (Row(slot, [1], [], [Node(2, 0)]), "its parent 3"),
        (Row(slot, [1], [], []), "each needs one"),
        (Row(slot, [1] * 4, [], [Node(3)] * 4), "tree_size is 4"),
    ]
    for row, sentence in bad:
        with pytest.raises(ValueError, match=sentence):
            engine.forward([Row(other, [4, 5]), Row(slot, [7], [], [Node(3)]), row])
        assert (slot.tokens, slot.tree_tokens, other.tokens) == ([1, 2, 3], [9], [])
    for use in (
        lambda: engine.forward([]),
        lambda: engine.rollback(slot, 4),
        lambda: engine.adopt(slot, []),
        lambda: engine.adopt(slot, [1]),
        lambda: engine.open([]),
        lambda: engine.open([1] * 33),
    ):
        with pytest.raises(ValueError):
            use()


def test_a_failed_forward_leaves_sessions_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny.model(), max_model_len=32, max_sessions=1)
    slot = engine.open([1, 2, 3])
    engine.forward([Row(slot, [1, 2])])
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.lm_head, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.forward([Row(slot, [3], [0])])
    (logits,) = engine.forward([Row(slot, [3], [0])])
    assert (logits[0] - plain(tiny.model(), [1, 2, 3])[-1]).abs().max() < 1e-4


def test_slots_that_do_not_fit_into_memory_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ModelError, match=r"10000000 sessions of 512 tokens need .* GiB .* lower max_sessions"):
        Engine(tiny.model(), max_model_len=512, max_sessions=10_000_000)


def test_a_model_that_computes_otherwise_on_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    see_all = Plan._hidden
    monkeypatch.setattr(Plan, "_hidden", lambda *args: torch.zeros_like(see_all(*args)))
    with pytest.raises(ModelError, match="computes other logits on slots"):
        Engine(tiny.model(), max_model_len=64, max_sessions=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_batch_where_the_engine_says_so(dtype: torch.dtype) -> None:
    engine = Engine(tiny.model(dtype=dtype), max_model_len=200, max_sessions=6, batch_invariant=True)
    if not engine.batch_invariant:
        pytest.skip("not batch invariant on this machine")
    rng = random.Random(4)
    text = text_of(rng, 150)
    slot = engine.open(text)
    engine.forward([Row(slot, text[:50])])
    alone = torch.cat([engine.forward([Row(slot, [token], [0])])[0] for token in text[50:]])
    company = [engine.open(text_of(rng, 10)) for _ in range(5)]
    engine.rollback(slot, 50)
    computed = []
    while len(slot.tokens) < 150:
        base = len(slot.tokens)
        tokens = text[base : base + rng.randrange(1, 9)]
        rows = [Row(other, text_of(rng, rng.randrange(1, 12)), [0]) for other in company if rng.random() < 0.5]
        for row in rows:
            engine.rollback(row.slot, rng.randrange(len(row.slot.tokens) + 1) if len(row.slot.tokens) < 150 else 0)
        computed.append(engine.forward([Row(slot, tokens, range(len(tokens))), *rows])[0])
    assert torch.equal(torch.cat(computed), alone)


def test_dependence_on_the_batch_is_noticed() -> None:
    model = tiny.model()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + 1e-5 * inputs[0].shape[1])
    assert not Engine(model, max_model_len=64, max_sessions=2, batch_invariant=True).batch_invariant


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_plain_models_on_a_gpu(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rng = random.Random(5)
    text = text_of(rng, 100)
    engine = Engine(tiny.model(kind).cuda(), max_model_len=200, max_sessions=4, tree_size=8)
    slot = engine.open(text)
    (head,) = engine.forward([Row(slot, text[:70], range(70))])
    (tail, tree) = engine.forward([Row(slot, text[70:], range(30)), Row(slot, [7, 8], [0, 1], [Node(90), Node(90, 0)])])
    model = tiny.model(kind).cuda()
    assert (torch.cat((head, tail)) - plain(model, text)).abs().max() < 1e-2
    assert (tree - plain(model, [*text[:90], 7, 8])[-2:]).abs().max() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graphs_compute_what_the_plain_model_computes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setitem(TOLERANCE, torch.float32, 1e-2)
    schedule = Schedule(kind, torch.float32, seed=11, device="cuda")
    runner = schedule.engine.runner
    assert isinstance(runner, Runner)
    assert runner.static_passes is not None, "the engine found that graphs compute something else"
    for _ in range(120):
        schedule.step()
    assert runner.static_passes.runs > 20
    assert all(one.graph is not None for one in runner.static_passes._passes.values())


@pytest.mark.gpu
def test_greedy_text_on_a_gpu_is_that_of_transformers() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    prompt = text_of(random.Random(12), 40)
    model = tiny.model().cuda()
    expected = model.generate(
        torch.tensor([prompt], device="cuda"), max_new_tokens=60, do_sample=False, eos_token_id=None
    )[0].tolist()
    engine = Engine(tiny.model().cuda(), max_model_len=128, max_sessions=2)
    slot, text = engine.open(prompt), list(prompt)
    while len(text) < len(expected):
        (logits,) = engine.forward([Row(slot, text[len(slot.tokens) :], [len(text) - len(slot.tokens) - 1])])
        text.append(int(logits[0].argmax()))
    assert text == expected
