"""Answers to the verdicts that may come on a round, prepared while it is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draft_service.outcomes import likely_outcomes
from draft_service.picking import Candidates, Context, Draft, Pick
from foredraft.engine.engine import Node, Row

if TYPE_CHECKING:
    from draft_service.model_session import ModelSession


@dataclass(eq=False, slots=True)
class Branch:
    """The continuation for one verdict, at most `limit` tokens, of which the first `emitted` have been pushed.

    `after` is what comes after the session's text with that verdict, up to its next token; `path` are the branch's
    nodes in the tree. A continuation that was looked up has no nodes.
    """

    accepted: int
    after: list[int]
    limit: int
    draft: Draft = field(default_factory=Draft)
    path: list[int] = field(default_factory=list)
    emitted: int = 0

    @property
    def next_token(self) -> int:
        """The verdict's next token."""
        return self.after[-1]

    @property
    def verdict(self) -> tuple[int, int]:
        """Accepted length and next token."""
        return self.accepted, self.next_token


class Preparation:
    """Answers to the likely verdicts on the round of `drafted` tokens after the session's text.

    What may follow a token is known from drafting it, or once the token has been read. The likeliest verdicts get a
    branch of the slot's tree each, and every pass draws one more token for all that are not finished. The first pass
    also reads the tokens of the round that have not been read, commonly the last one, after which the verdicts get
    theirs that can be known only then. After each pass all continuations are pushed that have at least `least` tokens.
    """

    def __init__(self, session: ModelSession, round_id: int, drafted: list[int], limit: int, least: int) -> None:
        self.round_id = round_id
        self.drafted = drafted
        self.branches: list[Branch] = []
        self.active: list[Branch] = []
        self._session = session
        self._limit = limit
        self._least = least
        self._begun = False
        self._agreed = 0
        self._candidates: list[Candidates] = []

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self._begun and self._unknown == 0 and not self.active

    def begin(self) -> None:
        """Choose verdicts by what drafting has told, and answer at once what can be looked up. No draft is to come."""
        self._begun = True
        session = self._session
        self._agreed = common_length(session.draft.tokens, self.drafted)
        self._candidates = session.draft.candidates[: self._agreed + 1]
        next_token = session.foreseen(self.drafted)
        ended = self.drafted != [] and session.opening.ends(self.drafted[-1])
        if next_token is not None and not ended and not session.opening.ends(next_token):
            self._add(len(self.drafted), next_token)
        self._choose()
        self._push()

    def branch(self, accepted: list[int], next_token: int) -> Branch | None:
        """What was prepared for this verdict: at least one token, or None."""
        if accepted != self.drafted[: len(accepted)]:
            return None
        verdict = (len(accepted), next_token)
        return next((branch for branch in self.branches if branch.draft.tokens and branch.verdict == verdict), None)

    def rows(self) -> tuple[list[Row], list[list[Context]]]:
        """The tokens for the next pass, and the contexts whose picks are for `take`; none if nothing is left to do."""
        if not self._begun:
            self.begin()
        rows: list[Row] = []
        contexts: list[list[Context]] = []
        session = self._session
        if self._unknown:
            rows.append(self._round_row())
            ends = range(len(self._candidates), len(self.drafted) + 1)
            contexts.append([Context(session.opening, session.text, self.drafted[:end], None) for end in ends])
        if self.active:
            rows.append(self._branches_row())
            contexts.append([self._context(branch) for branch in self.active])
        return rows, contexts

    def take(self, picks: Sequence[Pick]) -> None:
        """Use what was picked for the contexts of the last rows."""
        unknown = self._unknown
        for branch, pick in zip(self.active, picks[unknown:], strict=True):
            branch.draft.append(pick)
        self._candidates += [pick.candidates for pick in picks[:unknown]]
        if unknown:
            self._choose()
        self._push()

    @property
    def _unknown(self) -> int:
        """After how many of the round's tokens it is not known what may follow."""
        return len(self.drafted) + 1 - len(self._candidates)

    def _choose(self) -> None:
        """Give the likeliest verdicts a branch, and keep places for those that are not known yet."""
        session = self._session
        count = min(session.branches, session.engine.tree_size // self._limit)
        outcomes = likely_outcomes(session.opening, self.drafted, self._candidates, session.history, count)
        chosen = {branch.verdict for branch in self.branches}
        for outcome in outcomes:
            is_new = (outcome.accepted, outcome.next_token) not in chosen
            if outcome.next_token is not None and is_new and len(self.branches) < count:
                self._add(outcome.accepted, outcome.next_token)

    def _add(self, accepted: int, next_token: int) -> None:
        session, after = self._session, [*self.drafted[:accepted], next_token]
        limit = min(self._limit, session.room(len(session.text) + len(after)))
        if limit > 0:
            branch = Branch(accepted, after, limit, session.look_up(after, limit) or Draft())
            self.branches.append(branch)
            self.active.append(branch)

    def _push(self) -> None:
        """Push what has grown and is of use, and go on with what is not complete."""
        session = self._session
        useful, going = [], []
        for branch in self.active:
            count, is_done = len(branch.draft.tokens), session.is_done(branch.draft, branch.limit)
            if count > branch.emitted and (is_done or count >= self._least):
                useful.append(branch)
            if not is_done:
                going.append(branch)
        session.emit_branches(self.round_id, useful)
        self.active = going

    def _context(self, branch: Branch) -> Context:
        session = self._session
        base = len(session.text) + len(branch.after)
        return Context(session.opening, session.text, [*branch.after, *branch.draft.tokens], base)

    def _round_row(self) -> Row:
        """The tokens of the round after which it is not known what may follow, and all that the slot lacks before."""
        session, base = self._session, len(self._session.text)
        session.draft.truncate(self._agreed)  # the slot will hold the round's tokens instead
        slot = session.open_slot()
        first = base + len(self._candidates) - 1
        agreed = base + common_length(slot.tokens[base:], self.drafted)
        session.engine.rollback(slot, min(len(slot.tokens), agreed, first))
        token_ids = tail(session.text, self.drafted, len(slot.tokens))
        return Row(slot, token_ids, range(len(token_ids) - self._unknown, len(token_ids)))

    def _branches_row(self) -> Row:
        """The last token of every active branch."""
        slot, base = self._session.open_slot(), len(self._session.text)
        token_ids = [branch.draft.tokens[-1] if branch.draft.tokens else branch.next_token for branch in self.active]
        nodes = [Node(base + branch.accepted, branch.path[-1] if branch.path else -1) for branch in self.active]
        for node, branch in enumerate(self.active, start=len(slot.tree_tokens)):
            branch.path.append(node)
        return Row(slot, token_ids, range(len(token_ids)), nodes)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two texts have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def tail(text: list[int], drafted: list[int], start: int) -> list[int]:
    """The tokens of text and draft from index `start` on."""
    return [*text[start:], *drafted[max(0, start - len(text)) :]]
