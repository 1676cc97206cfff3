"""Emulated models: real engine bookkeeping, and text and guesses that are distributed as stated."""

import math
import time

import pytest
import torch

from foredraft.emulation import Cost
from foredraft.engine.batch import Node, Row
from foredraft.engine.emulated import ALPHABET, LETTERS, load_emulated
from foredraft.engine.engine import Engine

FREE = Cost(0, 0)
CONTEXTS = 4000


def engine(accept: float | None = None, tree_size: int = 0) -> Engine:
    return load_emulated(FREE, accept, max_model_len=CONTEXTS + 1, max_sessions=2, tree_size=tree_size)[1]


def logits(model: Engine, text: list[int]) -> torch.Tensor:
    """[T, V]: what follows each prefix."""
    slot = model.open(text[:1])
    (rows,) = model.forward([Row(slot, text, range(len(text)))])
    model.close(slot)
    return rows


def text(count: int) -> list[int]:
    return torch.randint(len(ALPHABET), (count,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.8, 1.0])
def test_draft_guesses_right_as_often_as_stated_and_else_ranks_the_truth_as_it_believes(accept: float) -> None:
    contexts = text(CONTEXTS)
    truth = logits(engine(), contexts).argmax(1)
    ranked = logits(engine(accept), contexts).sort(descending=True, stable=True)
    ranks = (ranked.indices == truth[:, None]).nonzero()[:, 1]
    for rank in range(4):
        expected = accept if rank == 0 else (1 - accept) * 0.5**rank
        # Five standard deviations of a binomial.
        bound = 5 * math.sqrt(expected * (1 - expected) / CONTEXTS)
        assert float((ranks == rank).double().mean()) == pytest.approx(expected, abs=bound)
        if rank > 0 or accept > 1 / 3:
            believed = ranked.values[:, rank].double().exp()
            assert torch.allclose(believed, torch.tensor(expected, dtype=torch.float64), atol=1e-6)


def test_text_is_letters_and_varies() -> None:
    follow = logits(engine(), text(CONTEXTS)).argmax(1)
    counts = follow.bincount(minlength=len(ALPHABET))[LETTERS]
    assert int(counts.sum()) == CONTEXTS
    assert int(counts.min()) > CONTEXTS / len(LETTERS) / 2


def test_guesses_are_wrong_independently_of_one_another() -> None:
    contexts = text(CONTEXTS)
    right = (logits(engine(), contexts).argmax(1) == logits(engine(0.5), contexts).argmax(1)).double()
    correlation = float(torch.corrcoef(torch.stack([right[1:], right[:-1]]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(CONTEXTS)


def test_tree_nodes_get_what_their_path_as_text_gets() -> None:
    model, prompt = engine(0.8, tree_size=8), text(9)
    slot = model.open(prompt)
    model.forward([Row(slot, prompt)])
    nodes = [Node(6), Node(6, 0), Node(9), Node(6, 1)]
    (rows,) = model.forward([Row(slot, [1, 2, 3, 4], range(4), nodes)])
    for row, path in zip(rows, ([1], [1, 2], None, [1, 2, 4]), strict=True):
        whole = [*prompt, 3] if path is None else [*prompt[:6], *path]
        assert torch.equal(row, logits(model, whole)[-1])
    model.adopt(slot, [0, 1])
    assert slot.tokens == [*prompt[:6], 1, 2]


def test_rows_of_any_session_get_the_same_whatever_else_is_in_the_pass() -> None:
    model, prompt = engine(0.8), text(20)
    first, second = model.open(prompt[:1]), model.open(prompt[5:6])
    rows = [Row(first, prompt[:10], [9]), Row(second, prompt[5:], [2]), Row(first, prompt[10:], [4, 9])]
    together = model.forward(rows)
    assert torch.equal(together[0], logits_of(prompt[:10], -1))
    assert torch.equal(together[1], logits_of(prompt[5:], 2))
    assert torch.equal(together[2][1:], logits_of(prompt, -1))


def logits_of(prompt: list[int], index: int) -> torch.Tensor:
    return logits(engine(0.8), prompt)[index][None]


def test_a_refused_row_changes_nothing() -> None:
    model = engine()
    slot = model.open([1])
    with pytest.raises(ValueError, match="token ids must lie in"):
        model.forward([Row(slot, [1, 2], [1]), Row(slot, [300])])
    assert slot.tokens == []


def test_a_pass_takes_what_is_stated_at_least() -> None:
    model = load_emulated(Cost(0.01, 0.001), max_model_len=64, max_sessions=1)[1]
    cost = Cost(0.01, 0.001).seconds(10)
    assert cost == pytest.approx(0.02)
    slot = model.open([1])
    started = time.perf_counter()
    model.forward([Row(slot, list(range(10)), [9])])
    assert time.perf_counter() - started >= cost


def test_name_says_that_it_is_emulated() -> None:
    model, _ = load_emulated(Cost(0.002, 0), 0.75, max_model_len=64, max_sessions=1)
    assert model.name == "emulated draft (2ms, accept 0.75)"
    assert model.parameter_count == 0
    assert model.vocabulary == tuple(ALPHABET)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer("Hé, 世界!")["input_ids"]) == "Hé, 世界!"
