"""One session of the model drafter: its final text, what was drafted after it, and what is prepared for verdicts.

`draft` follows `text`, token for token what a fresh proposal would be: what came after the same tokens before, if the
session looks that up and the text repeats itself, else what the model draws. The slot holds keys and values of text and
draft short of the last token: there is always one to run. It holds fewer where tokens came without a forward, which are
read as soon as the model has to draft, and may hold more while a round is verified.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafter import Continuation, Counters, Emit, Opening, Prepared, Proposal
from draft_service.ngram import NgramIndex
from draft_service.outcomes import History
from draft_service.picking import Context, Draft, Pick
from draft_service.preparation import Branch, Preparation, common_length, tail
from foredraft.engine.engine import Engine, Row, Slot


@dataclass(slots=True)
class Request:
    """A proposal that is asked for: at most `limit` tokens, of which `prepared` were there when it came."""

    limit: int
    received: float
    prepared: int
    compute_s: float = 0.0


class ModelSession:
    """See DraftSession. The drafter asks it for rows of the next forward and hands it their logits."""

    def __init__(
        self,
        opening: Opening,
        emit: Emit,
        engine: Engine,
        branches: int,
        counters: Counters,
        index: NgramIndex | None = None,
    ) -> None:
        self.opening = opening
        self.text = list(opening.text)
        self.draft = Draft()
        self.slot: Slot | None = None
        self.request: Request | None = None
        self.preparation: Preparation | None = None
        self.history = History()
        self.engine = engine
        self.branches = branches
        self.closed = False
        self._gave_up = False
        self._emit = emit
        self._counters = counters
        self._index = index
        self._opened_with = len(opening.text)
        if index is not None:
            index.extend(opening.text)

    def commit(self, base: int, token_ids: list[int], max_tokens: int, received: float) -> None:
        """See DraftSession. What was prepared for just this verdict becomes the draft, with its keys and values."""
        if self.request is not None:
            self._answer(self.request)
        unchanged = self.text[base:] == token_ids
        branch = self._end_preparation(base, token_ids)
        self.text[base:] = token_ids
        if not unchanged:
            self.draft = Draft() if branch is None else branch.draft
            self._follow(base, token_ids, [] if branch is None else branch.path)
        if max_tokens > 0:
            limit = min(max_tokens, self.room(len(self.text)))
            self.draft = self.look_up([], limit) or self.draft
            self.request = Request(limit, received, 0 if branch is None else len(branch.draft.tokens))
            self._answer_if_done()

    def verifying(self, round_id: int, base: int, token_ids: list[int], max_tokens: int, min_tokens: int) -> None:
        """See DraftSession. A round is ignored that leaves no room for a draft token after it."""
        if base != len(self.text):
            return
        self._drop_tree()
        limit = min(max_tokens, self.room(base + 1), self.engine.tree_size)
        fits = base + len(token_ids) <= self.engine.max_model_len
        self.preparation = None
        if limit > 0 and fits:
            self.preparation = Preparation(self, round_id, token_ids, limit, min_tokens or limit)
            if self.request is None:
                self.preparation.begin()

    def close(self) -> None:
        """See DraftSession."""
        self.closed = True
        self._counters.sessions -= 1
        if self.slot is not None:
            self.engine.close(self.slot)

    def give_up(self) -> None:
        """Draft no more: the proposal asked for and all later ones are empty, and nothing is prepared."""
        self._gave_up = True
        self.draft, self.preparation = Draft(), None
        self._drop_tree()
        if self.request is not None:
            self._answer(self.request)

    @property
    def unread(self) -> int:
        """How many tokens of the text have no keys and values yet, not counting the last one: drafting runs that."""
        return max(0, len(self.text) - 1 - self.cached)

    @property
    def opening_unread(self) -> bool:
        """Whether text that came with the opening is among the unread."""
        return self.cached < min(self._opened_with, len(self.text)) - 1

    @property
    def cached(self) -> int:
        """How many tokens the slot holds."""
        return 0 if self.slot is None else len(self.slot.tokens)

    def room(self, base: int) -> int:
        """How many draft tokens after `base` tokens of text are of use and fit into the model's context."""
        if self._gave_up:
            return 0
        return min(self.opening.room(base), self.engine.max_model_len - base)

    def open_slot(self) -> Slot:
        """The session's slot, taken on first use: until then what others read may become worth copying."""
        if self.slot is None:
            self.slot = self.engine.open(self.text)
        return self.slot

    def reading_row(self, count: int) -> Row:
        """The next `count` unread tokens; no logits."""
        slot = self.open_slot()
        return Row(slot, self.text[len(slot.tokens) :][:count], [])

    def proposal_row(self) -> Row:
        """What text and draft have beyond the slot; the token after the last is for `extend_draft`."""
        slot = self.open_slot()
        known = len(self.text) + len(self.draft.tokens)
        if len(slot.tokens) >= known:
            self.engine.rollback(slot, known - 1)
        token_ids = tail(self.text, self.draft.tokens, len(slot.tokens))
        return Row(slot, token_ids, [len(token_ids) - 1])

    def look_up(self, after: list[int], limit: int) -> Draft | None:
        """The draft of at most `limit` tokens after text and `after`, if their last tokens have come before."""
        tokens = self.opening.until_end(self._repeated(after, limit))
        return Draft.looked_up(tokens, needs_q=self.opening.needs_q) if tokens else None

    def foreseen(self, after: list[int]) -> int | None:
        """The token after text and `after` if the text goes on repeating itself."""
        return next(iter(self._repeated(after, 1)), None)

    def _repeated(self, after: list[int], limit: int) -> list[int]:
        if self._index is None or limit <= 0:
            return []
        self._index.extend(after)
        tokens = self._index.continuation(limit)
        self._index.truncate(len(self.text))
        return tokens

    def proposal_context(self) -> Context:
        """What the draft's next token follows."""
        return Context(self.opening, self.text, self.draft.tokens, len(self.text))

    def extend_draft(self, picks: Sequence[Pick]) -> None:
        """Append the one token of `picks` to the draft."""
        self.draft.append(picks[0])

    def add_compute(self, seconds: float) -> None:
        """Count a pass that worked for the request, and answer it if it is done."""
        if self.request is not None:
            self.request.compute_s += seconds
            self._answer_if_done()

    def is_done(self, draft: Draft, limit: int) -> bool:
        """Whether a draft has all tokens that are wanted, or the text ends with it.

        Drafts whose tokens were drawn for rejection or block verification go on to the limit: were those that drew an
        end sent sooner, a verdict in between would find ends more often than they are drawn, and bias the output.
        """
        drawn = self.opening.needs_q and draft.candidates  # What was looked up instead follows from the text alone.
        ended = draft.tokens != [] and not drawn and self.opening.ends(draft.tokens[-1])
        return ended or len(draft.tokens) >= limit

    def emit_branches(self, round_id: int, branches: Sequence[Branch]) -> None:
        """Push what is prepared for some verdicts, as far as it has come."""
        continuations = []
        for branch in branches:
            count = len(branch.draft.tokens)
            self._counters.prepared += branch.emitted == 0
            self._counters.prepared_tokens += count - branch.emitted
            branch.emitted = count
            tokens, q = list(branch.draft.tokens), branch.draft.q(count)
            continuations.append(Continuation(branch.accepted, branch.next_token, tokens, q))
        if continuations:
            self._emit(Prepared(round_id, continuations))

    def _follow(self, base: int, token_ids: list[int], path: list[int]) -> None:
        """Keep index and slot in step with the text, which goes on with `token_ids` from `base`; `path` has read them.

        Without a path the slot keeps what it has in common with the text.
        """
        if self._index is not None:
            self._index.truncate(base)
            self._index.extend(token_ids)
        if path:
            self.engine.adopt(self.open_slot(), path)
        elif self.slot is not None:
            agreed = base + common_length(self.slot.tokens[base:], token_ids)
            self.engine.rollback(self.slot, min(len(self.slot.tokens), agreed, len(self.text) - 1))

    def _answer_if_done(self) -> None:
        if self.request is not None and self.is_done(self.draft, self.request.limit):
            self._answer(self.request)

    def _answer(self, request: Request) -> None:
        self.request = None
        tokens = self.draft.tokens[: max(0, request.limit)]
        self._counters.proposals += 1
        self._counters.proposed_tokens += len(tokens)
        queued = max(0.0, time.perf_counter() - request.received - request.compute_s)
        prepared = min(request.prepared, len(tokens))
        q = self.draft.q(len(tokens))
        self._emit(Proposal(len(self.text), tokens, q, request.compute_s, queued, prepared))

    def _end_preparation(self, base: int, token_ids: list[int]) -> Branch | None:
        """Learn from the verdict, and return what was prepared for it, if any was."""
        preparation, self.preparation = self.preparation, None
        if preparation is None or base != len(self.text) or not token_ids:
            self._drop_tree()
            return None
        *accepted, next_token = token_ids
        if accepted == preparation.drafted[: len(accepted)]:
            self.history.observe(len(preparation.drafted), len(accepted))
        branch = preparation.branch(accepted, next_token)
        self._counters.hits += branch is not None
        self._counters.misses += branch is None
        if branch is None:
            self._drop_tree()
            return None
        self._counters.used_tokens += len(branch.draft.tokens)
        return branch

    def _drop_tree(self) -> None:
        if self.slot is not None:
            self.engine.drop_tree(self.slot)
