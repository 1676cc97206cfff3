"""What one client's Draft stream holds: a session, and the answers that the client has not taken yet."""

import asyncio
import time
from collections.abc import AsyncIterable, Collection
from dataclasses import dataclass

import grpc

from draft_service.drafter import Emit, Opening, Prepared, Proposal
from draft_service.messages import check_fits, opening
from draft_service.scheduler import Scheduler, Session
from foredraft.errors import RequestError, Violation, exhausted, failed_precondition, invalid
from foredraft.v1 import common_pb2, draft_pb2
from foredraft.validation import check_commit, check_open_draft, check_verifying

# Far more than waits for a client that reads its answers, or for the model thread during a forward.
MAX_WAITING = 1024
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What sessions may choose. `vocabulary_size` is None if there is no model to limit token ids."""

    vocabulary_size: int | None
    drafters: Collection[common_pb2.Drafter]
    default_drafter: common_pb2.Drafter


class Places:
    """How many sessions there may be, and how many there are."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def take(self) -> None:
        """Raises RequestError RESOURCE_EXHAUSTED if all are taken."""
        if self.taken >= self.count:
            raise exhausted(f"all {self.count} sessions are in use; try again when one has ended", RETRY_AFTER_S)
        self.taken += 1

    def release(self) -> None:
        """Give one back."""
        self.taken -= 1


class Stream:
    """Turns requests into calls of the scheduler. Whoever creates one calls `release` in the end.

    `events` gets the answers, what ends the session with an error, and None when the client has closed it. `heard` is
    when the last request came, on time.perf_counter.
    """

    def __init__(self, offer: Offer, scheduler: Scheduler, places: Places) -> None:
        self.events: asyncio.Queue[Proposal | Prepared | Exception | None] = asyncio.Queue()
        self.heard = time.perf_counter()
        self._offer = offer
        self._scheduler = scheduler
        self._places = places
        self._session: Session | None = None
        self._opening: Opening | None = None
        self._length = 0

    async def read(self, requests: AsyncIterable[draft_pb2.DraftRequest]) -> None:
        """Do what the requests ask for, as they come."""
        try:
            async for request in requests:
                self.heard = time.perf_counter()
                if request.HasField("close"):
                    self.events.put_nowait(None)
                    return
                self._handle(request)
            message = "the stream ended without a close message; its session was dropped"
            raise RequestError(grpc.StatusCode.CANCELLED, message)
        except Exception as error:
            self.events.put_nowait(error)

    def release(self) -> None:
        """End the session; what it holds is free before a later session needs it. May be called again."""
        if self._session is not None:
            self._session.close()
            self._session = None
            self._places.release()

    def _handle(self, request: draft_pb2.DraftRequest) -> None:
        """Raises RequestError if the request does not fit."""
        kind = request.WhichOneof("message")
        if kind is None:
            raise invalid([Violation("message", "is not set; must be open, commit, verifying or close")])
        if (kind == "open") != (self._session is None):
            raise failed_precondition(f"{kind} came out of order; a session is one open and then commits and rounds")
        if self._session is None or self._opening is None:
            self._open(request.open)
            return
        if max(self.events.qsize(), self._session.waiting) >= MAX_WAITING:
            raise exhausted(f"{MAX_WAITING} messages wait; take the answers before sending more", RETRY_AFTER_S)
        if kind == "commit":
            check_commit(request.commit, vocabulary_size=self._offer.vocabulary_size)
            self._commit(request.commit, self._session, self._opening)
        else:
            self._verifying(request.verifying, self._session, self._opening)

    def _open(self, message: draft_pb2.OpenDraft) -> None:
        offer = self._offer
        params = check_open_draft(
            message, vocabulary_size=offer.vocabulary_size, context_length=None, drafters=offer.drafters
        )
        self._places.take()
        self._opening = opening(message, params)
        self._length = len(message.token_ids)
        self._session = self._scheduler.open(message.drafter or offer.default_drafter, self._opening, self._emitter())

    def _commit(self, message: draft_pb2.Commit, session: Session, opened: Opening) -> None:
        check_fits(message.base, len(message.token_ids), length=self._length, opening=opened)
        self._length = message.base + len(message.token_ids)
        session.commit(message.base, list(message.token_ids), message.max_tokens, self.heard)

    def _verifying(self, message: draft_pb2.Verifying, session: Session, opened: Opening) -> None:
        check_verifying(message, vocabulary_size=self._offer.vocabulary_size)
        if message.HasField("commit"):
            self._commit(message.commit, session, opened)
        check_fits(message.base, 0, length=self._length, opening=opened)
        tokens, most, least = list(message.token_ids), message.max_tokens, message.min_tokens
        session.verifying(message.round_id, message.base, tokens, most, least)

    def _emitter(self) -> Emit:
        loop = asyncio.get_running_loop()

        def emit(answer: Proposal | Prepared) -> None:
            loop.call_soon_threadsafe(self.events.put_nowait, answer)

        return emit
