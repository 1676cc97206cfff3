"""Which slot a new text gets, how much of it is there already, and that no other text pays for it."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.emulation import Cost
from foredraft.engine import Engine, Row, Slot
from foredraft.engine.batch import Slot as BatchSlot
from foredraft.engine.emulated import load_emulated
from foredraft.engine.engine import WORTHWHILE_PREFIX
from foredraft.engine.prefix import PrefixSearch
from tests import tiny

SLOTS = 16


def emulated(max_sessions: int = SLOTS) -> Engine:
    """The engine's books without a model: keys and values are not there, but who has which is."""
    return load_emulated(Cost(0, 0), max_model_len=4096, max_sessions=max_sessions)[1]


def compute(engine: Engine, slot: Slot, text: Sequence[int]) -> int:
    """Computes what the slot does not hold of `text`; returns how much it did hold."""
    reused = len(slot.tokens)
    engine.forward([Row(slot, text[reused:])])
    return reused


def converse(engine: Engine, text: Sequence[int]) -> int:
    """A session from open to close; returns how many tokens were reused."""
    slot = engine.open(text)
    reused = compute(engine, slot, text)
    engine.close(slot)
    return reused


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def test_a_conversation_survives_others_with_the_same_system_prompt_while_slots_are_empty() -> None:
    engine, system = emulated(), words(0, 30)
    first = system + words(1, 2000)
    converse(engine, first)
    for other in range(2, SLOTS + 1):
        assert converse(engine, system + words(other, 50)) == len(system)
    assert converse(engine, first + words(99, 20)) == len(first)


def test_conversations_that_go_on_in_turn_keep_a_slot_each() -> None:
    engine, system = emulated(), words(0, 30)
    texts = [system + words(1 + i, 200) for i in range(SLOTS)]
    for text in texts:
        converse(engine, text)
    for turn in range(3):
        for i, text in enumerate(texts):
            # The answer's last token was replaced by the template's: what is cut off is too short to be kept for it.
            texts[i] = text[:-1] + words(100 * turn + i, 40)
            assert converse(engine, texts[i]) >= len(text) - 2


def test_without_an_empty_slot_the_least_recently_used_one_is_given_up() -> None:
    engine, system = emulated(3), words(0, 30)
    texts = [system + words(1 + i, 100) for i in range(4)]
    for text in texts:
        converse(engine, text)
    assert [converse(engine, text) for text in (texts[3], texts[2], texts[1])] == [129, 129, 129]
    assert converse(engine, texts[0]) == 30


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 80), st.integers(0, 40), st.booleans()), min_size=1, max_size=30
    )
)
def test_no_text_shrinks_while_a_slot_is_empty_and_what_is_reused_is_the_longest_there_is(
    openings: list[tuple[int, int, int, bool]],
) -> None:
    engine, shared = emulated(5), [words(seed, 80) for seed in range(4)]
    live: list[Slot] = []
    for number, (family, common, own, stays) in enumerate(openings):
        if len(live) == 5:
            engine.close(live.pop(0))
        text = [*shared[family][:common], *words(1000 + number, own), 7]
        before = {index: list(slot.tokens) for index, slot in engine._free.items()}
        held = [*before.values(), *(slot.tokens for slot in live)]
        longest = max(common_length(tokens, text[:-1]) for tokens in held)
        slot = engine.open(text)
        assert slot.tokens == text[: len(slot.tokens)]
        assert longest - WORTHWHILE_PREFIX < len(slot.tokens) <= longest
        taken = before.pop(slot.index)
        assert {index: list(other.tokens) for index, other in engine._free.items()} == before
        lost = len(taken) - common_length(taken, text[:-1])
        assert lost < WORTHWHILE_PREFIX or all(len(tokens) >= WORTHWHILE_PREFIX for tokens in before.values())
        compute(engine, slot, text)
        if stays:
            live.append(slot)
        else:
            engine.close(slot)


@given(st.lists(st.lists(st.integers(0, 2), max_size=600), min_size=1, max_size=4), st.lists(st.integers(0, 2)))
def test_the_search_finds_what_a_comparison_token_by_token_finds(texts: list[list[int]], wanted: list[int]) -> None:
    search = PrefixSearch(len(texts), 1000)
    slots = [BatchSlot(index, tokens=list(text)) for index, text in enumerate(texts)]
    for slot in slots:
        found = search.shared(slots, wanted).tolist()
        assert found == [common_length(other.tokens, wanted) for other in slots]
        slot.truncate(len(slot.tokens) // 2, 0)
        slot.tokens += wanted[len(slot.tokens) :]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_copy_that_fails_leaves_no_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny.model(), max_model_len=100, max_sessions=2, tree_size=2)
    text = [10 + i for i in range(40)]
    slot = engine.open(text)
    engine.forward([Row(slot, text)])

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._cache, "copy_rows", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.open(text)
    assert engine.slots_used == 1
    other = engine.open(text)
    assert other.tokens == text[:-1]
    (a, b) = engine.forward([Row(slot, [1], [0]), Row(other, [text[-1], 1], [1])])
    assert torch.allclose(a, b, atol=1e-5)


def test_what_is_not_a_number_does_not_reach_the_next_session_of_a_slot() -> None:
    engine = Engine(tiny.model(), max_model_len=100, max_sessions=1)
    text = [10 + i for i in range(60)]
    slot = engine.open(text)
    (right,) = engine.forward([Row(slot, text, [5])])
    embedding = engine.model.get_input_embeddings().weight
    spoilt = embedding[300].clone()
    with torch.no_grad():
        embedding[300] = torch.inf
    (logits,) = engine.forward([Row(slot, [300], [0])])
    assert not logits.isfinite().all()
    with torch.no_grad():
        embedding[300] = spoilt
    engine.clear(slot)
    engine.close(slot)
    slot = engine.open(text)
    assert slot.tokens == []
    (logits,) = engine.forward([Row(slot, text[:6], [5])])
    assert torch.allclose(logits, right, atol=1e-5)
