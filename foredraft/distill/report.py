"""What a draft is worth: how its proposals fare on replies that it was not trained on, and what they cost."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.distill.generate import Text, coupled_draws
from foredraft.distill.prune import head_weight
from foredraft.distill.train import states
from foredraft.engine.batch import Row
from foredraft.engine.engine import Engine
from foredraft.engine.head import RestrictedHead
from foredraft.sampling.params import SamplingParams

LONGEST = 8


@torch.inference_mode()
def matches(
    draft: PreTrainedModel, head: Tensor, head_ids: Tensor, text: Text, vocabulary_size: int
) -> list[list[bool]]:
    """For every reply and each of its tokens: does the draft draw the token that the target drew?

    The draft reads the target's own reply. Under coupled sampling that is what it reads in service, too, up to the
    first token that is not accepted. `text` is from `Writer.held_out`; `head` [N, H] are the rows of `head_ids` [N].
    """
    found: list[list[bool]] = []
    lengths = zip(text.prompt_lengths.tolist(), text.lengths.tolist(), text.temperatures.tolist(), strict=True)
    for sample, (start, end, temperature) in enumerate(lengths):
        tokens = text.tokens[sample, :end].long()
        hidden = states(draft, tokens[None, :-1].to(draft.device))[0, start - 1 :]
        logits = (hidden @ head.T).float().cpu()
        if temperature == 0:
            drawn = head_ids[logits.argmax(-1)]
        else:
            whole = torch.full((len(logits), vocabulary_size), -torch.inf)
            whole[:, head_ids] = logits
            positions = torch.arange(start, end)
            params = SamplingParams(temperature=temperature)
            drawn = coupled_draws(whole, params, torch.full((end - start,), sample), positions, vocabulary_size)
        found.append((drawn == tokens[start:]).tolist())
    return found


def rounds(matched: Sequence[Sequence[bool]], k: int) -> list[tuple[int, int]]:
    """How many tokens are drafted, at most k, and accepted in every round of decoding these replies."""
    found = []
    for reply in matched:
        base = 1  # The first token comes with the opening.
        while base < len(reply):
            # No token is drafted for the last place: the target's own goes there.
            drafted = min(k, len(reply) - base - 1)
            accepted = next((i for i in range(drafted) if not reply[base + i]), drafted)
            found.append((drafted, accepted))
            base += accepted + 1
    return found


def acceptance(matched: Sequence[Sequence[bool]]) -> float:
    """The fraction of first draft tokens, at any place of a reply, that are accepted."""
    return sum(map(sum, matched)) / max(1, sum(map(len, matched)))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of a draft step, and of a target's forward over 1, 2, ... `LONGEST` + 1 tokens, with one session."""

    draft: float
    target: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Draft step over plain target step."""
        return self.draft / self.target[0]


def measure_costs(
    draft: PreTrainedModel, head_ids: Tensor, target: PreTrainedModel, repeats: int = 15, context: int = 200
) -> Costs:
    """Median times after `context` tokens, here and now. The draft is left with its restricted head.

    Both models take turns, so that what else the machine does slows both down alike.
    """
    head = head_weight(draft).detach()
    ids = head_ids.to(draft.device)
    draft.set_output_embeddings(RestrictedHead(head[ids], ids, len(head)))  # type: ignore[no-untyped-call]
    engines = [Engine(model, max_model_len=context + LONGEST + 1, max_sessions=1) for model in (draft, target)]
    slots = [engine.open([1] * (context + 1)) for engine in engines]
    for engine, slot in zip(engines, slots, strict=True):
        engine.forward([Row(slot, [1] * (context - len(slot.tokens)), [])])

    def step(which: int, count: int) -> float:
        started = time.perf_counter()
        engines[which].forward([Row(slots[which], [1] * count, range(count))])
        seconds = time.perf_counter() - started
        engines[which].rollback(slots[which], context)
        return seconds

    steps = [(0, 1), *((1, count) for count in range(1, LONGEST + 2))]
    times = [[step(*what) for what in steps] for _ in range(repeats + 2)]
    drafted, *verified = (statistics.median(column) for column in zip(*times[2:], strict=True))
    return Costs(drafted, tuple(verified))


@dataclass(frozen=True, slots=True)
class Line:
    """What k draft tokens a round bring. `by_position`: accepted of those that were reached by position."""

    k: int
    mean_accepted_length: float
    by_position: tuple[float, ...]
    turn_taking: float
    overlapped: float


def table(matched: Sequence[Sequence[bool]], costs: Costs) -> list[Line]:
    """For k = 1..8: emitted tokens per round, and the speed against plain decoding.

    `overlapped` assumes that every verdict is foreseen and that draft and target have processors of their own.
    """
    lines = []
    for k in range(1, LONGEST + 1):
        played = rounds(matched, k)
        emitted = statistics.mean(accepted + 1 for _, accepted in played) if played else 1.0
        reached = [sum(drafted > i and accepted >= i for drafted, accepted in played) for i in range(k)]
        passed = [sum(accepted > i for _, accepted in played) for i in range(k)]
        by_position = tuple(a / b if b else 0.0 for a, b in zip(passed, reached, strict=True))
        plain, drafting, verifying = costs.target[0], k * costs.draft, costs.target[k]
        turn_taking = emitted * plain / (drafting + verifying)
        lines.append(Line(k, emitted, by_position, turn_taking, emitted * plain / max(drafting, verifying)))
    return lines
