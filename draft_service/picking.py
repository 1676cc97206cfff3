"""From raw logits to draft tokens: the same warpers and the same noise as the target's, along every continuation.

Rows of a pass are looked at together where their parameters allow it: at many sessions, small operations would take
longer than the pass, and each would have to be waited for on a GPU.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor

from draft_service.drafter import Opening
from foredraft.sampling.coupled import Place, joined, rank_rows
from foredraft.sampling.proposal import SparseQ, one_hot, propose
from foredraft.sampling.warpers import warp_branches

# More rows than this at once leave a processor's cache between one operation and the next, and are slower so.
ROWS_ON_CPU = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens at one position, likeliest first; the first may come twice.

    Their scores are log q, under coupled sampling log q + G, since the target draws with the same noise; both up to a
    constant.
    """

    token_ids: list[int]
    scores: list[float]


@dataclass(frozen=True, slots=True)
class Context:
    """What a token follows in a session: `text`, which is the same in all its contexts of a pass, and what comes then.

    The first `base` tokens of all are final when the round of the token begins; None: only candidates are wanted.
    """

    opening: Opening
    text: Sequence[int]
    after: Sequence[int]
    base: int | None

    @property
    def place(self) -> Place:
        """What the token is drawn for."""
        return Place(self.opening.params.seed, self.opening.sample_index, len(self.text) + len(self.after))


@dataclass(frozen=True, slots=True)
class Pick:
    """A token drawn, the candidates it was drawn among and, if verification needs it, its row of q."""

    token: int
    candidates: Candidates
    q_row: tuple[Tensor, Tensor] | None = None


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

    def append(self, pick: Pick) -> None:
        """Go on with this token."""
        self.tokens.append(pick.token)
        self.candidates.append(pick.candidates)
        if pick.q_row is not None:
            self.q_rows.append(pick.q_row)

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
    """Picks draft tokens and likely alternatives, `count` in all, from logits."""

    def __init__(self, vocabulary_size: int, count: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._count = min(count, vocabulary_size)

    @torch.inference_mode()
    def pick(self, logits: Sequence[Tensor], contexts: Sequence[Sequence[Context]]) -> list[list[Pick | None]]:
        """The next token after each of `contexts`.

        Args:
            logits: tensors [R_i, V], each with the rows of one session.
            contexts: for each tensor its R_i contexts.

        Returns:
            As many picks; None where parameters or logits leave no token to draw.
        """
        picks: list[list[Pick | None]] = []
        start, rows = 0, 0
        for stop in range(1, len(contexts) + 1):
            rows += len(contexts[stop - 1])
            if stop == len(contexts) or (logits[stop].is_cpu and rows + len(contexts[stop]) > ROWS_ON_CPU):
                picks += self._pick_together(logits[start:stop], contexts[start:stop])
                start, rows = stop, 0
        return picks

    def _pick_together(
        self, logits: Sequence[Tensor], contexts: Sequence[Sequence[Context]]
    ) -> list[list[Pick | None]]:
        groups: dict[Hashable, list[int]] = {}
        for i, rows in enumerate(contexts):
            if rows:
                groups.setdefault(_group(rows[0]), []).append(i)
        picks: list[list[Pick | None]] = [[] for _ in contexts]
        for noisy in (False, True):
            alike = [members for members in groups.values() if _is_noisy(contexts[members[0]][0].opening) == noisy]
            if not alike:
                continue
            warped = joined([self._warp(logits, contexts, members) for members in alike])
            order = list(chain.from_iterable(alike))
            drawn = iter(self._draw(warped, _of(contexts, order), noisy=noisy))
            for i in order:
                picks[i] = list(islice(drawn, len(contexts[i])))
        return picks

    def _draw(self, warped: Tensor, contexts: Sequence[Context], *, noisy: bool) -> list[Pick | None]:
        """A token for each row of `warped` [R, V], all with the noise of coupled sampling or all without."""
        places = [context.place for context in contexts] if noisy else None
        token_ids, scores = rank_rows(warped, places, count=self._count)
        candidates = [Candidates(*row) for row in zip(token_ids.tolist(), scores.tolist(), strict=True)]
        return [
            self._pick(warped[i], context, candidates[i]) if candidates[i].scores[0] > -math.inf else None
            for i, context in enumerate(contexts)
        ]

    def _pick(self, row: Tensor, context: Context, candidates: Candidates) -> Pick:
        opening = context.opening
        if not opening.needs_q or context.base is None:
            return Pick(candidates.token_ids[0], candidates)
        token, token_ids, probabilities = propose(
            row,
            opening.params,
            sample_index=opening.sample_index,
            base=context.base,
            position=context.place.position,
        )
        return Pick(token, candidates, (token_ids.cpu(), probabilities.cpu()))

    def _warp(self, logits: Sequence[Tensor], contexts: Sequence[Sequence[Context]], members: Sequence[int]) -> Tensor:
        """The warped rows of all `members` of a group."""
        opening, text = contexts[members[0]][0].opening, contexts[members[0]][0].text
        return warp_branches(
            joined([logits[i] for i in members]),
            opening.params,
            text=text,
            prompt_length=opening.prompt_length,
            branches=[context.after for context in _of(contexts, members)],
            eos_token_ids=opening.eos_token_ids,
            vocabulary_size=self._vocabulary_size,
        )


def _group(context: Context) -> Hashable:
    """The same for sessions whose logits are warped alike, whatever their texts are."""
    opening, params = context.opening, context.opening.params
    by_text = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    too_short = len(context.text) - opening.prompt_length < params.min_new_tokens
    if by_text or too_short or params.logit_bias:
        return id(opening)
    if params.temperature == 0:
        return 0.0
    return _is_noisy(opening), params.temperature, params.top_k, params.top_p, params.min_p


def _is_noisy(opening: Opening) -> bool:
    """Whether the draft draws with the target's noise."""
    return opening.params.temperature > 0 and not opening.needs_q


def _of(contexts: Sequence[Sequence[Context]], members: Sequence[int]) -> list[Context]:
    return [context for i in members for context in contexts[i]]
