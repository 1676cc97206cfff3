"""Continuous batching: each step gathers what all sessions wait for into one forward, samples and answers.

`step` and all private methods run in the model thread. The event loop only posts to the inbox, in order: a session that
was closed before another was opened has freed its slot by then. A round waits for nothing but the forward in flight.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
import torch
from torch import Tensor

from foredraft.engine.engine import Engine, Row, Slot
from foredraft.errors import RequestError
from foredraft.sampling.coupled import Place, greedy, rank_rows
from foredraft.sampling.logprobs import token_logprobs
from foredraft.sampling.params import Method
from foredraft.sampling.proposal import SparseQ
from foredraft.sampling.verification import coupled_verification, verify
from foredraft.sampling.warpers import warp
from target_service.session import Limits, Session, Timing, Verdict, finish

# Rounds wait for sessions that were answered by the last forward and commonly come back within this part of it, for at
# most so many seconds, looking every POLL_S.
GATHER, GATHER_MOST_S, POLL_S = 0.15, 0.02, 0.0002

Reply = Callable[[Verdict | RequestError], object]


@dataclass(slots=True)
class Counters:
    """Totals since the start, and the last forward; written by the model thread, read by anybody.

    `rows` are sessions and `tokens` their tokens, summed over forwards. Draft tokens after the end of a text do not
    count as drafted. Of the `span_s` seconds from the start of the first forward to the end of the last,
    `compute_s` were in forwards.
    """

    forwards: int = 0
    rows: int = 0
    tokens: int = 0
    last_batch_rows: int = 0
    last_batch_tokens: int = 0
    verdicts: int = 0
    drafted: int = 0
    accepted: int = 0
    compute_s: float = 0.0
    span_s: float = 0.0
    first_started: float = math.inf

    def add_forward(self, rows: int, tokens: int, *, started: float) -> None:
        """Counts one forward, which began at `started` (perf_counter) and ends now."""
        now = time.perf_counter()
        self.first_started = min(self.first_started, started)
        self.compute_s += now - started
        self.span_s = now - self.first_started
        self.forwards += 1
        self.rows += rows
        self.tokens += tokens
        self.last_batch_rows, self.last_batch_tokens = rows, tokens

    def add_verdict(self, drafted: int, accepted: int) -> None:
        """Counts one verdict."""
        self.verdicts += 1
        self.drafted += drafted
        self.accepted += accepted


@dataclass(eq=False, slots=True)
class _Job:
    """A round that waits for its verdict."""

    session: Session
    draft: Sequence[int]
    q: SparseQ | None
    reply: Reply
    received: float
    started: float | None = None
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one job contributes to a forward: a part of its prompt, or the rest of its text and its draft tokens."""

    job: _Job
    row: Row
    completes: bool


@dataclass(slots=True)
class _Round:
    """A round whose forward is done: raw logits [k + 1, V], warped ones, and the draws of the latter if they are known.

    Sampling looks at all rounds of a forward together where it can: small operations would take longer than the forward
    of a small model, and the device would have to be waited for after each.
    """

    job: _Job
    logits: Tensor
    warped: Tensor
    draws: list[int] | None = None


class Scheduler:
    """Owns the engine's slots and the rounds in work.

    A step takes every decoding session's round whole, and of texts that are not computed yet at most `prefill_chunk`
    tokens in all, sessions taking turns: a long prompt delays neither the rounds of others nor their prompts by more.
    A round waits for the forward in flight, and a moment for sessions that the last forward answered.
    """

    def __init__(self, engine: Engine, limits: Limits, *, prefill_chunk: int, wake: Callable[[], None]) -> None:
        self.counters = Counters()
        self._engine = engine
        self._limits = limits
        self._prefill_chunk = prefill_chunk
        self._wake = wake
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: dict[Session, _Job] = {}
        self._answered: list[Session] = []
        self._answered_at = 0.0
        self._forward_s = 0.0
        self._slots: dict[Session, Slot] = {}

    @property
    def sessions(self) -> int:
        """Sessions that hold a slot or wait for their first forward."""
        return len(self._slots.keys() | self._jobs.keys())

    @property
    def slots_used(self) -> int:
        """Slots of the engine that belong to a session."""
        return self._engine.slots_used

    def submit(
        self, session: Session, draft: Sequence[int], q: SparseQ | None, reply: Reply, *, received: float
    ) -> None:
        """Starts a round, which came at `received` (perf_counter); a session's first round opens it.

        `draft` has at most `useful_draft_length` tokens, and q, if any, a row for each. `reply` is called once, in the
        model thread, unless the session is closed before. The caller keeps to one round at a time for each session,
        and to as many sessions as there are slots.
        """
        self._post(partial(self._begin, _Job(session, draft, q, reply, received)))

    def close(self, session: Session) -> None:
        """Drops a session and its round, if any; its slot is free at the next step. Harmless if it is not open."""
        self._post(partial(self._drop, session))

    @torch.inference_mode()
    def step(self) -> bool:
        """Takes the inbox and runs one forward; False if there was nothing to run."""
        self._take_inbox()
        self._gather()
        pieces = self._plan()
        if not pieces:
            return False
        started = time.perf_counter()
        for piece in pieces:
            if piece.job.started is None:
                piece.job.started = started
        logits = self._engine.forward([piece.row for piece in pieces])
        self.counters.add_forward(len(pieces), sum(len(piece.row.token_ids) for piece in pieces), started=started)
        rounds = []
        for piece, rows in zip(pieces, logits, strict=True):
            if piece.completes:
                del self._jobs[piece.job.session]
                rounds.append(_Round(piece.job, rows, self._warped(piece.job, rows)))
            else:
                piece.job.compute_s += time.perf_counter() - started
        _draw_together(rounds)
        for one in rounds:
            one.job.reply(self._answer(one, started))
        self._answered = [one.job.session for one in rounds if not one.job.session.finish_reason]
        self._answered_at = time.perf_counter()
        for session in self._answered:
            session.answered_at = self._answered_at
        self._forward_s = self._answered_at - started
        return True

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _gather(self) -> None:
        """Wait a little for the sessions that were answered together to come back together.

        Else they fall into groups whose forwards alternate, and every round waits for those of the others.
        """
        most = min(GATHER * self._forward_s, GATHER_MOST_S)
        while self._jobs and self._is_any_due(most) and time.perf_counter() < self._answered_at + most:
            time.sleep(POLL_S)
            self._take_inbox()

    def _is_any_due(self, most: float) -> bool:
        """Whether a session that was answered last has not come back, but commonly does within `most` seconds."""
        return any(
            session in self._slots and session not in self._jobs and session.away_s <= most
            for session in self._answered
        )

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake()

    def _begin(self, job: _Job) -> None:
        self._jobs[job.session] = job
        job.session.came(job.received)

    def _drop(self, session: Session) -> None:
        self._jobs.pop(session, None)
        slot = self._slots.pop(session, None)
        if slot is not None:
            self._engine.close(slot)

    def _plan(self) -> list[_Piece]:
        pieces = []
        budget = self._prefill_chunk
        for session, job in list(self._jobs.items()):
            slot = self._slots.get(session)
            if slot is None:
                if budget == 0 or self._prompt_is_being_read(session):
                    continue
                slot = self._slots[session] = self._engine.open(session.text)
            rest = session.text[len(slot.tokens) :]
            if len(rest) > 1:
                if budget == 0:
                    continue
                count = min(len(rest), budget)
                budget -= count
                if count < len(rest):
                    pieces.append(_Piece(job, Row(slot, rest[:count], []), completes=False))
                    self._jobs[session] = self._jobs.pop(session)  # to the end: the others' turn
                    continue
            row = Row(slot, [*rest, *job.draft], range(len(rest) - 1, len(rest) + len(job.draft)))
            pieces.append(_Piece(job, row, completes=True))
        return pieces

    def _prompt_is_being_read(self, session: Session) -> bool:
        # Samples of one prompt come together: the first reads it, the others then copy its keys and values.
        length = session.prompt_length
        return any(
            len(other.text) - len(slot.tokens) > 1
            and other.prompt_length == length
            and other.text[:length] == session.text[:length]
            for other, slot in self._slots.items()
        )

    def _warped(self, job: _Job, logits: Tensor) -> Tensor:
        session = job.session
        return warp(
            logits,
            session.params,
            text=session.text,
            prompt_length=session.prompt_length,
            draft=job.draft,
            eos_token_ids=self._limits.eos_token_ids,
            vocabulary_size=self._limits.vocabulary_size,
        )

    def _answer(self, one: _Round, started: float) -> Verdict | RequestError:
        """Verifies a round, and brings text and slot to what is final now."""
        job, session, base = one.job, one.job.session, len(one.job.session.text)
        try:
            if one.draws is None:
                verified = verify(
                    one.warped, job.draft, job.q, session.params, sample_index=session.sample_index, base=base
                )
            else:
                verified = coupled_verification(one.draws, job.draft)
        except ValueError as error:
            return self._cannot_draw(one, error)
        tokens = [*job.draft[: verified.accepted], verified.next_token]
        count, reason = finish(
            tokens, length=base, prompt_length=session.prompt_length, params=session.params, limits=self._limits
        )
        tokens, accepted = tokens[:count], min(verified.accepted, count)
        logprobs = []
        if session.logprobs is not None:
            logprobs = token_logprobs(one.logits[:count], tokens, session.logprobs, self._limits.vocabulary_size)
        self._engine.rollback(self._slots[session], base + accepted)
        session.text += tokens
        session.finish_reason = reason
        self.counters.add_verdict(drafted=len(job.draft) if count > accepted else accepted, accepted=accepted)
        return Verdict(tokens, accepted, reason, logprobs, self._timing(job, started))

    def _cannot_draw(self, one: _Round, error: ValueError) -> RequestError:
        """What ends a session that has no token to draw: parameters may leave none, or the model gave no numbers."""
        session, base = one.job.session, len(one.job.session.text)
        slot = self._slots[session]
        if bool((one.logits < torch.inf).all()):  # False for NaN, too; -inf is what a restricted head leaves out
            self._engine.rollback(slot, base - 1)
            return RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"cannot draw the token at position {base}: {error}")
        self._engine.clear(slot)
        message = f"the model's logits after {base} tokens are not numbers; the request is not at fault"
        return RequestError(grpc.StatusCode.INTERNAL, message)

    def _timing(self, job: _Job, started: float) -> Timing:
        return Timing(
            queue_s=(started if job.started is None else job.started) - job.received,
            compute_s=job.compute_s + time.perf_counter() - started,
            batch_rows=self.counters.last_batch_rows,
            batch_tokens=self.counters.last_batch_tokens,
        )


def _draw_together(rounds: Sequence[_Round]) -> None:
    """Draw for all coupled rounds at once; others, and those that leave nothing to draw, stay as they are."""
    by_argmax = [one for one in rounds if one.job.session.params.temperature == 0]
    for one, draws in zip(by_argmax, greedy([one.warped for one in by_argmax]), strict=True):
        one.draws = draws
    coupled = [
        one
        for one in rounds
        if one.job.session.params.temperature > 0 and one.job.session.params.method is Method.COUPLED
    ]
    if len(coupled) < 2:
        return
    places = [
        Place(one.job.session.params.seed, one.job.session.sample_index, len(one.job.session.text) + i)
        for one in coupled
        for i in range(len(one.warped))
    ]
    ids, scores = rank_rows(torch.cat([one.warped for one in coupled]), places, count=1)
    tokens = torch.where(scores[:, 0] > -torch.inf, ids[:, 0], -1)
    for one, draw in zip(coupled, tokens.cpu().split_with_sizes([len(o.warped) for o in coupled]), strict=True):
        drawn = draw.tolist()
        one.draws = None if -1 in drawn else drawn
