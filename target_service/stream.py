"""What one client's Verify stream holds: a session, its place among the others, and the round in flight."""

import asyncio
import time
from collections.abc import AsyncIterable, Sequence

import grpc

from foredraft.errors import RequestError, Violation, failed_precondition, invalid
from foredraft.sampling.proposal import SparseQ
from foredraft.v1 import common_pb2, target_pb2
from target_service.places import Places
from target_service.requests import open_session, read_round
from target_service.scheduler import Scheduler
from target_service.session import Limits, Session, TokenLogprobs, Verdict


class Stream:
    """Turns requests into rounds at the scheduler, one at a time. Whoever creates one calls `release` in the end.

    `events` gets the verdicts, what ends the session with an error, and None when the client has closed it.
    """

    def __init__(self, limits: Limits, scheduler: Scheduler, places: Places) -> None:
        self.events: asyncio.Queue[Verdict | Exception | None] = asyncio.Queue()
        self.verifying = False
        self._session: Session | None = None
        self._limits = limits
        self._scheduler = scheduler
        self._places = places
        self._round_id = 0
        self._has_place = False
        self._opening: asyncio.Task[None] | None = None

    async def read(self, requests: AsyncIterable[target_pb2.VerifyRequest]) -> None:
        """Begins a round for each request. It reads on meanwhile: a client that leaves frees its slot at once."""
        try:
            async for request in requests:
                if request.HasField("close"):
                    self.events.put_nowait(None)
                    return
                self._begin(request)
            if not self._ended:
                message = "the stream ended without a close message; its session was dropped"
                raise RequestError(grpc.StatusCode.CANCELLED, message)
            self.events.put_nowait(None)
        except Exception as error:
            self.events.put_nowait(error)

    def take(self, verdict: Verdict) -> target_pb2.VerifyResponse:
        """The response to the round in flight. The last verdict of a sample frees its place."""
        self.verifying = False
        if self._ended:
            self.release()
        return target_pb2.VerifyResponse(verdict=_verdict(self._round_id, verdict))

    def release(self) -> None:
        """Ends the session and its round; the slot is free before a later session needs it. May be called again."""
        if self._opening is not None:
            self._opening.cancel()
        if self._has_place and self._session is not None:
            self._has_place = False
            self._scheduler.close(self._session)
            self._places.release()

    @property
    def _ended(self) -> bool:
        """Whether the sample has ended and its last verdict was taken."""
        return self._session is not None and self._session.finish_reason != 0 and not self.verifying

    def _begin(self, request: target_pb2.VerifyRequest) -> None:
        """Starts the round that `request`, an open or a round, asks for. Raises RequestError if it does not fit."""
        received = time.perf_counter()
        kind = request.WhichOneof("message")
        if kind is None:
            raise invalid([Violation("message", "must be open, round or close")])
        if self.verifying:
            raise failed_precondition(f"{kind} came before the verdict on round {self._round_id}; wait for it")
        if (kind == "open") != (self._session is None):
            raise failed_precondition(f"{kind} came out of order; a session is one open and then rounds")
        if self._session is None:
            self._session = open_session(request.open, self._limits)
            self._opening = asyncio.create_task(self._open(self._session, received))
        else:
            draft, q = read_round(request.round, self._session, self._limits, last_round_id=self._round_id)
            self._round_id = request.round.round_id
            self._submit(self._session, draft, q, received)
        self.verifying = True

    async def _open(self, session: Session, received: float) -> None:
        try:
            await self._places.acquire()
        except RequestError as error:
            self.events.put_nowait(error)
            return
        self._has_place = True
        self._submit(session, [], None, received)

    def _submit(self, session: Session, draft: Sequence[int], q: SparseQ | None, received: float) -> None:
        loop = asyncio.get_running_loop()

        def reply(result: Verdict | RequestError) -> None:
            loop.call_soon_threadsafe(self.events.put_nowait, result)

        self._scheduler.submit(session, draft, q, reply, received=received)


def _verdict(round_id: int, verdict: Verdict) -> target_pb2.Verdict:
    timing = verdict.timing
    return target_pb2.Verdict(
        round_id=round_id,
        accepted=verdict.accepted,
        next_token=verdict.tokens[-1] if len(verdict.tokens) > verdict.accepted else None,
        logprobs=[_logprobs(*pair) for pair in zip(verdict.tokens, verdict.logprobs, strict=False)],
        finish_reason=verdict.finish_reason,
        timing=target_pb2.TargetTiming(
            queue_us=round(timing.queue_s * 1e6),
            compute_us=round(timing.compute_s * 1e6),
            batch_rows=timing.batch_rows,
            batch_tokens=timing.batch_tokens,
        ),
    )


def _logprobs(token: int, logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    chosen, top = logprobs
    return common_pb2.TokenLogprobs(
        chosen=common_pb2.Logprob(token_id=token, logprob=chosen),
        top=[common_pb2.Logprob(token_id=other, logprob=logprob) for other, logprob in top],
    )
