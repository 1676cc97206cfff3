"""Drafting with a small language model: one forward a step, over all sessions that want the same kind of work.

Proposals come first, since a target waits for them; then new texts are read; then answers to verdicts that have not
come yet are prepared.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.drafter import Counters, Emit, Opening
from draft_service.model_session import ModelSession
from draft_service.ngram import NgramIndex
from draft_service.picking import Context, Pick, Picker
from foredraft.engine.engine import Engine, Row

logger = logging.getLogger(__name__)

# What a pass costs beside the model grows with its rows: sessions share so many branches, but each has at least FEWEST.
BRANCHES, FEWEST = 128, 2
# After this many passes over proposals while a new text waits, a part of that is read: load must not starve it.
PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Job:
    """A session's rows of the next forward, and for each the contexts whose picks go to `take`, if any are wanted."""

    session: ModelSession
    rows: Sequence[Row]
    contexts: Sequence[Sequence[Context]]
    take: Callable[[Sequence[Pick]], None]


class ModelDrafter:
    """Owns the engine. Each session prepares up to `branches` verdicts, and fewer while there are many sessions.
    `prefill_chunk` tokens are read in a pass.
    """

    def __init__(self, engine: Engine, *, vocabulary_size: int, branches: int, prefill_chunk: int) -> None:
        self.counters = Counters()
        self._engine = engine
        # A refused draft token is no answer to its own refusal.
        self._picker = Picker(vocabulary_size, branches + 1)
        self._branches = branches
        self._prefill_chunk = prefill_chunk
        self._sessions: list[ModelSession] = []
        self._waited = 0

    def open(
        self, opening: Opening, emit: Emit, index: NgramIndex | None = None, counters: Counters | None = None
    ) -> ModelSession:
        """See Drafter. With `index`, which is empty, the session looks up what it can; it is counted in `counters`."""
        counters = counters or self.counters
        session = ModelSession(opening, emit, self._engine, self._branches, counters, index)
        self._sessions.append(session)
        counters.sessions += 1
        return session

    def step(self) -> bool:
        """See Drafter."""
        self._sessions = [session for session in self._sessions if not session.closed]
        for session in self._sessions:
            session.branches = min(self._branches, max(FEWEST, BRANCHES // len(self._sessions)))
        reading = [session for session in self._sessions if self._must_read(session)]
        proposing = [session for session in self._sessions if session.request is not None and session not in reading]
        if reading and (not proposing or self._waited >= PATIENCE):
            self._waited = 0
            self._run(self._reading(reading))
        elif proposing:
            self._waited += bool(reading)
            self._run([self._proposing(session) for session in proposing])
        else:
            return self._run(self._preparing())
        return True

    def _must_read(self, session: ModelSession) -> bool:
        """Whether text is to be read before anything is drafted: what came at first, or more than fits in a pass."""
        if session.room(len(session.text)) <= 0 or session.unread == 0:
            return False
        return session.opening_unread or session.unread >= self._prefill_chunk

    def _reading(self, sessions: list[ModelSession]) -> list[Job]:
        """Parts of unread texts; there may be none if all were found in other slots."""
        jobs = []
        budget = self._prefill_chunk
        for session in sessions:
            if budget == 0 or self._is_being_read(session, sessions):
                continue
            session.open_slot()
            count = min(budget, session.unread)
            if count > 0:
                jobs.append(Job(session, [session.reading_row(count)], [[]], lambda picks: None))
                budget -= count
        return jobs

    def _is_being_read(self, session: ModelSession, sessions: list[ModelSession]) -> bool:
        """Whether another session reads the same text: this one copies the keys and values when that is done."""
        return session.slot is None and any(
            other is not session and other.slot is not None and other.text == session.text for other in sessions
        )

    def _proposing(self, session: ModelSession) -> Job:
        return Job(session, [session.proposal_row()], [[session.proposal_context()]], session.extend_draft)

    def _preparing(self) -> list[Job]:
        jobs = []
        for session in self._sessions:
            preparation = session.preparation
            if preparation is None or preparation.is_finished:
                continue
            rows, contexts = preparation.rows()
            if rows:
                jobs.append(Job(session, rows, contexts, preparation.take))
        return jobs

    def _run(self, jobs: list[Job]) -> bool:
        if not jobs:
            return False
        started = time.perf_counter()
        rows = [row for job in jobs for row in job.rows]
        logits = self._engine.forward(rows)
        self.counters.forwards += 1
        self.counters.forward_rows += len(rows)
        self.counters.forward_tokens += sum(len(row.token_ids) for row in rows)
        picks = iter(self._picker.pick(logits, [contexts for job in jobs for contexts in job.contexts]))
        for job in jobs:
            self._take(job, [pick for _ in job.rows for pick in next(picks)])
        elapsed = time.perf_counter() - started
        for job in jobs:
            job.session.add_compute(elapsed)
        return True

    def _take(self, job: Job, picks: Sequence[Pick | None]) -> None:
        drawn = [pick for pick in picks if pick is not None]
        if len(drawn) == len(picks):
            job.take(drawn)
            return
        # Parameters can leave no token to draw; that ends drafting for one session and not the server.
        logger.warning("drafting for a session ends: no token is left to draw, or the logits are not numbers")
        job.session.give_up()
