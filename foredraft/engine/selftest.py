"""What an engine finds out about its model before it serves: are logits on slots right, and are they always the same?

Both checks run on a fresh engine and leave tokens in its slots; the second one only if it is asked for.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from foredraft.engine.attention import LENGTH_STEP
from foredraft.engine.batch import Node, Row
from foredraft.engine.errors import ModelError

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine
    from foredraft.engine.parallel import Leader
    from foredraft.engine.runner import Runner

# The greatest relative error of a row of logits. A wrong mask or position makes errors of about 1.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def check_logits(engine: "Engine", runner: "Runner | Leader") -> None:
    """Raises ModelError if passes of the engine and its runner, a tree among them, differ from the plain forward."""
    text = _text(engine, min(12, engine.max_model_len))
    expected = runner.plain_logits(text)
    half = len(text) // 2
    slot = engine.open(text)
    company = [Row(engine.open(text), text[1:4])] if engine.max_sessions > 1 else []
    head, *_ = engine.forward([Row(slot, text[:half], range(half)), *company])
    *_, tail = engine.forward([*company, Row(slot, text[half:], range(len(text) - half))])
    computed = [head, tail]
    if engine.tree_size >= 3:
        # The text's next two tokens once more, as a path with a sibling.
        nodes = [Node(half), Node(half), Node(half, parent=0)]
        (tree,) = engine.forward([Row(slot, [text[half], text[0], text[half + 1]], [0, 2], nodes)])
        computed.append(tree)
        expected = torch.cat((expected, expected[half : half + 2]))
    for session in (slot, *(row.slot for row in company)):
        engine.close(session)
    if expected.isnan().any():
        raise ModelError(
            f"the weights of {type(engine.model).__name__} give logits that are not numbers; they are damaged, or "
            f"{engine.model.dtype} is too small for them"
        )
    # A restricted head leaves tokens out: their logits are -inf.
    listed = expected.isfinite()
    errors = (torch.cat(computed) - expected).where(listed, 0).norm(dim=-1) / expected.where(listed, 0).norm(dim=-1)
    # In low precision a mixture of experts may route a few rows another way; a mistake spoils a quarter or more.
    error = errors.nan_to_num(nan=torch.inf).sort().values[len(errors) * 3 // 4].item()
    if error > TOLERANCE[engine.model.dtype]:
        raise ModelError(
            f"{type(engine.model).__name__} computes other logits on slots than alone (relative error {error:.2g}), "
            f"so it cannot be served; use a model with plain attention"
        )


def measure_batch_invariance(engine: "Engine") -> bool:
    """Whether the bits of a text's logits stay the same on this machine, whatever shares a pass with it.

    Compares one token a pass, alone, with several tokens a pass, with other sessions beside them, and with another
    division of the prompt.
    """
    steps = 5
    text = _text(engine, min(LENGTH_STEP - 2 + steps, engine.max_model_len))
    prompt, rest = text[:-steps], text[-steps:]
    half = len(prompt) // 2
    slot = engine.open(text)
    engine.forward([Row(slot, prompt)])
    alone = torch.cat([engine.forward([Row(slot, [token], [0])])[0] for token in rest])
    company = [engine.open(text) for _ in range(min(2, engine.max_sessions - 1))]

    def again(count: int, prompt_ends: Sequence[int] = (len(prompt),)) -> bool:
        """Computes `count` tokens of `rest` in one pass with company, then the others in a second one alone.

        Before that, the prompt beyond the first of `prompt_ends`, part by part.
        """
        for other in company:
            engine.rollback(other, 0)
        engine.rollback(slot, prompt_ends[0])
        for start, stop in pairwise(prompt_ends):
            engine.forward([Row(slot, prompt[start:stop]), *(Row(other, text[2:4]) for other in company[:1])])
        beside = [Row(other, text[i : i + 1 + 2 * i], [0]) for i, other in enumerate(company, start=1)]
        first, *_ = engine.forward([Row(slot, rest[:count], range(count)), *beside])
        second = engine.forward([Row(slot, rest[count:], range(steps - count))]) if count < steps else []
        return torch.equal(torch.cat((first, *second)), alone)

    same = again(1) and again(steps) and again(2, prompt_ends=(half, half + 1, len(prompt)))
    for session in (slot, *company):
        engine.close(session)
    return same


def _text(engine: "Engine", length: int) -> list[int]:
    """Some text without repetitions, as far as the vocabulary goes."""
    return [(7919 * i + 11) % engine.vocabulary_rows for i in range(length)]
