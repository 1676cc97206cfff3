"""From raw logits to draft tokens: the same warpers and the same noise as the target's, along every continuation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draft_service.drafter import Opening
from foredraft.sampling.coupled import rank
from foredraft.sampling.proposal import SparseQ, one_hot, propose
from foredraft.sampling.warpers import warp_branches


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens at one position, likeliest first, with their warped logits; the first may come twice."""

    token_ids: list[int]
    logits: list[float]


@dataclass(frozen=True, slots=True)
class Context:
    """What a token follows: `text`, which is the same in all contexts of a call, and what comes after it.

    The first `base` tokens of all are final when the round of the token begins.
    """

    text: Sequence[int]
    after: Sequence[int]
    base: int

    def __len__(self) -> int:
        return len(self.text) + len(self.after)


@dataclass(slots=True)
class Draft:
    """Draft tokens; for each the candidates it was drawn among and, if verification needs it, its row of q.

    Tokens that were looked up have no candidates.
    """

    tokens: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    q_rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def looked_up(cls, tokens: list[int], *, needs_q: bool) -> "Draft":
        """A draft of tokens that no model drew."""
        q = one_hot(tokens)
        return cls(tokens, q_rows=list(zip(q.token_ids, q.probabilities, strict=True)) if needs_q else [])

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens."""
        for items in (self.tokens, self.candidates, self.q_rows):
            del items[count:]

    def q(self, count: int) -> SparseQ | None:
        """What the first `count` tokens were drawn from; None if that is of no use."""
        if not self.q_rows or count == 0:
            return None
        return SparseQ.stack(self.q_rows[:count])


class Picker:
    """Picks draft tokens and likely alternatives from logits."""

    def __init__(self, vocabulary_size: int, count: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._count = min(count, vocabulary_size)

    def candidates(self, logits: Tensor, opening: Opening, contexts: Sequence[Context]) -> list[Candidates]:
        """The candidates of each of the rows of `logits` [R, V], which follow `contexts`."""
        return self._candidates(self._warp(logits, opening, contexts), opening, contexts)

    def extend(self, logits: Tensor, opening: Opening, contexts: Sequence[Context], drafts: Sequence[Draft]) -> None:
        """Append the next token to each of `drafts`, drawn from the row of `logits` [R, V] that follows its context."""
        warped = self._warp(logits, opening, contexts)
        rows = self._candidates(warped, opening, contexts)
        for row, context, draft, candidates in zip(warped, contexts, drafts, rows, strict=True):
            draft.candidates.append(candidates)
            if not opening.needs_q:
                draft.tokens.append(candidates.token_ids[0])
                continue
            token, token_ids, probabilities = propose(
                row,
                opening.params,
                sample_index=opening.sample_index,
                base=context.base,
                position=len(context),
            )
            draft.tokens.append(token)
            draft.q_rows.append((token_ids, probabilities))

    def _candidates(self, warped: Tensor, opening: Opening, contexts: Sequence[Context]) -> list[Candidates]:
        if opening.needs_q:
            token_ids = warped.topk(self._count).indices
        else:
            positions = [len(context) for context in contexts]
            token_ids = rank(
                warped, opening.params, sample_index=opening.sample_index, positions=positions, count=self._count
            )
        logits = warped.gather(1, token_ids)
        return [Candidates(*row) for row in zip(token_ids.tolist(), logits.tolist(), strict=True)]

    def _warp(self, logits: Tensor, opening: Opening, contexts: Sequence[Context]) -> Tensor:
        return warp_branches(
            logits,
            opening.params,
            text=contexts[0].text,
            prompt_length=opening.prompt_length,
            branches=[context.after for context in contexts],
            eos_token_ids=opening.eos_token_ids,
            vocabulary_size=self._vocabulary_size,
        )
