"""What one client's Verify stream holds: a session, its place among the others, and the round in flight."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from foredraft.sampling.proposal import SparseQ
from foredraft.serving.errors import RequestError, Violation, failed_precondition, invalid
from foredraft.v1 import common_pb2, target_pb2
from target_service.places import Places
from target_service.requests import open_session, read_round
from target_service.scheduler import Scheduler
from target_service.session import Limits, Session, TokenLogprobs, Verdict


class Stream:
    """Turns requests into rounds at the scheduler, one at a time. Whoever creates one calls `release` in the end.

    `verifying` is the round in flight: a task that returns the answer, or raises RequestError.
    """

    def __init__(self, limits: Limits, scheduler: Scheduler, places: Places) -> None:
        self.session: Session | None = None
        self.verifying: asyncio.Task[target_pb2.VerifyResponse] | None = None
        self._limits = limits
        self._scheduler = scheduler
        self._places = places
        self._round_id = 0
        self._has_place = False

    def begin(self, request: target_pb2.VerifyRequest) -> None:
        """Starts the round that `request`, an open or a round, asks for. Raises RequestError if it does not fit."""
        kind = request.WhichOneof("message")
        if kind is None:
            raise invalid([Violation("message", "must be open, round or close")])
        if self.verifying is not None:
            raise failed_precondition(f"{kind} came before the verdict on round {self._round_id}; wait for it")
        if (kind == "open") != (self.session is None):
            raise failed_precondition(f"{kind} came out of order; a session is one open and then rounds")
        draft: list[int] = []
        q = None
        if self.session is None:
            self.session = open_session(request.open, self._limits)
        else:
            draft, q = read_round(request.round, self.session, self._limits, last_round_id=self._round_id)
            self._round_id = request.round.round_id
        self.verifying = asyncio.create_task(self._verify(self.session, draft, q))

    def take(self) -> target_pb2.VerifyResponse:
        """The answer of `verifying`, which is done. The last verdict of a sample frees its place."""
        verifying, self.verifying = self.verifying, None
        if verifying is None:
            raise RuntimeError("no round is in flight")
        response = verifying.result()
        if self.ended:
            self.release()
        return response

    @property
    def ended(self) -> bool:
        """Whether the sample has ended and the client has its last verdict."""
        return self.session is not None and self.session.finish_reason != 0 and self.verifying is None

    def release(self) -> None:
        """Ends the session and its round; the slot is free before a later session needs it. May be called again."""
        if self.verifying is not None:
            discard(self.verifying)
            self.verifying = None
        if self._has_place and self.session is not None:
            self._has_place = False
            self._scheduler.close(self.session)
            self._places.release()

    async def _verify(self, session: Session, draft: Sequence[int], q: SparseQ | None) -> target_pb2.VerifyResponse:
        received = time.perf_counter()
        if not self._has_place:
            await self._places.acquire()
            self._has_place = True
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Verdict] = loop.create_future()

        def settle(result: Verdict | RequestError) -> None:
            if answer.done():
                return
            if isinstance(result, RequestError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self._scheduler.submit(
            session, draft, q, lambda result: loop.call_soon_threadsafe(settle, result), received=received
        )
        return target_pb2.VerifyResponse(verdict=_verdict(self._round_id, await answer))


def discard(task: asyncio.Task[Any]) -> None:
    """Cancels a task whose outcome nobody waits for any more, a failure included."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


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
