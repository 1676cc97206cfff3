"""A session on the draft service. Nothing here ever holds up the decode loop: sending queues, receiving is a task."""

# The stubs' asyncio classes exist for type checkers only.
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from foredraft.errors import RequestError
from foredraft.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2
from foredraft.validation import check_round, sampling_params
from orchestrator.target import Metadata

# Far more than a draft that reads its stream leaves waiting: two messages a round.
MAX_UNSENT = 64


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens and, for rejection and block verification, the distributions they were drawn from.

    `prepared` of the tokens were drafted before they were asked for; `compute_s` seconds the drafter worked since.
    """

    token_ids: list[int]
    q: common_pb2.SparseDistributions | None = None
    prepared: int = 0
    compute_s: float = 0.0

    def first(self, count: int) -> Proposal:
        """The first `count` tokens, with their distributions."""
        if count >= len(self.token_ids):
            return self
        if self.q is None:
            return Proposal(self.token_ids[:count])
        size = 4 * self.q.support * count  # uint32 ids and float32 probabilities: 4 bytes each
        q = common_pb2.SparseDistributions(
            support=self.q.support, token_ids=self.q.token_ids[:size], probabilities=self.q.probabilities[:size]
        )
        return Proposal(self.token_ids[:count], q)


class DraftSession:
    """One Draft stream. Answers that the target would refuse end it.

    `failure` is the error that ended the stream, if one did; every method is safe then and does nothing.
    `prepared_tokens` counts draft tokens that came for verdicts on the rounds announced with `verifying`.
    """

    def __init__(
        self,
        stub: draft_pb2_grpc.DraftServiceAsyncStub,
        request: draft_pb2.OpenDraft,
        *,
        vocabulary_size: int,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> None:
        self.failure: grpc.aio.AioRpcError | None = None
        self.prepared_tokens = 0
        self._vocabulary_size = vocabulary_size
        self._params = sampling_params(request.sampling, vocabulary_size=vocabulary_size, field_prefix="sampling")
        self._committed = len(request.token_ids)
        self._round_id = -1
        self._prepared: dict[tuple[int, int], draft_pb2.Continuation] = {}
        self._max_prepared = 0
        self._unanswered = 0
        self._asked = 0.0
        self._waiting: asyncio.Future[draft_pb2.Proposal] | None = None
        self._unsent: asyncio.Queue[draft_pb2.DraftRequest] = asyncio.Queue(MAX_UNSENT)
        self._unsent.put_nowait(draft_pb2.DraftRequest(open=request))
        self._call = stub.Draft(timeout=timeout, metadata=metadata)
        self._reader = asyncio.create_task(self._read())
        # Not an iterator of requests for gRPC to read: if the server ends the call, gRPC never ends its task for that.
        self._writer = asyncio.create_task(self._write())

    @property
    def usable(self) -> bool:
        """Whether the stream is up and no proposal is overdue."""
        return self.failure is None and self._unanswered == 0

    @property
    def overdue_s(self) -> float:
        """For how many seconds an overdue proposal has been waited for."""
        return time.perf_counter() - self._asked if self._unanswered else 0.0

    def verifying(
        self, round_id: int, text: Sequence[int], token_ids: Sequence[int], max_tokens: int, min_tokens: int
    ) -> None:
        """Make all of `text` final, and tell what the target verifies after it now.

        Continuations of at most `max_tokens` for its likely verdicts will come as soon as they have `min_tokens`.
        """
        self._prepared.clear()
        self._round_id, self._max_prepared = round_id, max_tokens
        message = draft_pb2.Verifying(
            round_id=round_id,
            base=len(text),
            token_ids=token_ids,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            commit=self._uncommitted(text, 0) if len(text) > self._committed else None,
        )
        self._send(draft_pb2.DraftRequest(verifying=message))

    def take_prepared(self, accepted: int, next_token: int) -> Proposal | None:
        """The continuation for this verdict on the last announced round, as far as it has come, if there is one."""
        prepared = self._prepared.get((accepted, next_token))
        if prepared is None or not self._check(prepared, self._max_prepared):
            return None
        return Proposal(list(prepared.token_ids), prepared.q if prepared.HasField("q") else None)

    async def propose(self, text: Sequence[int], max_tokens: int, timeout: float) -> Proposal | None:
        """Make all of `text` final and wait for draft tokens; None if none came within `timeout` seconds.

        The answer to an overdue proposal is dropped when it comes; until then the session is not `usable`.
        """
        self._waiting = asyncio.get_running_loop().create_future()
        self._unanswered += 1
        self._asked = time.perf_counter()
        self._round_id = -1
        self._prepared.clear()
        self._send(draft_pb2.DraftRequest(commit=self._uncommitted(text, max_tokens)))
        ends: set[asyncio.Future[Any]] = {self._waiting, self._reader}
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        waiting, self._waiting = self._waiting, None
        if not waiting.done():
            return None
        proposal = waiting.result()
        if not self._check(proposal, max_tokens):
            return None
        return Proposal(
            list(proposal.token_ids),
            proposal.q if proposal.HasField("q") else None,
            prepared=proposal.prepared_token_count,
            compute_s=1e-6 * proposal.compute_us,
        )

    def _check(self, answer: draft_pb2.Proposal | draft_pb2.Continuation, asked: int) -> bool:
        """Whether the target would take this answer; else the session fails, which costs the text nothing but speed."""
        if len(answer.token_ids) > asked:
            self._reject(f"{len(answer.token_ids)} tokens where at most {asked} were asked for")
            return False
        round_ = target_pb2.Round(token_ids=answer.token_ids, q=answer.q if answer.HasField("q") else None)
        try:
            check_round(round_, self._params, vocabulary_size=self._vocabulary_size, field_prefix="answer")
        except RequestError as error:
            self._reject(error.message)
            return False
        return True

    def _reject(self, fault: str) -> None:
        self._fail(grpc.StatusCode.INTERNAL, f"it gave an answer that cannot be used: {fault}")

    def _uncommitted(self, text: Sequence[int], max_tokens: int) -> draft_pb2.Commit:
        """The commit of what the draft does not know of `text` to be final."""
        commit = draft_pb2.Commit(base=self._committed, token_ids=text[self._committed :], max_tokens=max_tokens)
        self._committed = len(text)
        return commit

    def _send(self, request: draft_pb2.DraftRequest) -> None:
        if self.failure is not None:
            return
        try:
            self._unsent.put_nowait(request)
        except asyncio.QueueFull:
            self._fail(grpc.StatusCode.UNAVAILABLE, "the draft service does not read its stream")

    async def _write(self) -> None:
        # How the call ended is told by the reader.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._call.write(await self._unsent.get())

    async def _read(self) -> None:
        try:
            async for response in self._call:
                if response.HasField("proposal"):
                    self._receive_proposal(response.proposal)
                elif response.HasField("prepared"):
                    self._receive_prepared(response.prepared)
                if self.failure is not None:
                    return
            self._fail(grpc.StatusCode.UNAVAILABLE, "the draft service ended the session")
        except grpc.aio.AioRpcError as error:
            self.failure = self.failure or error

    def _receive_proposal(self, proposal: draft_pb2.Proposal) -> None:
        if self._unanswered == 0:
            self._reject("a proposal that nobody asked for")
            return
        self._unanswered -= 1
        if self._waiting is None:
            return
        if proposal.base == self._committed:
            self._waiting.set_result(proposal)
        else:
            self._reject(f"a proposal for {proposal.base} tokens of text, not for the {self._committed} that there are")

    def _receive_prepared(self, prepared: draft_pb2.Prepared) -> None:
        if prepared.round_id != self._round_id:
            return
        for continuation in prepared.continuations:
            verdict = (continuation.accepted, continuation.next_token)
            shorter = self._prepared.get(verdict)
            self.prepared_tokens += len(continuation.token_ids) - (len(shorter.token_ids) if shorter else 0)
            self._prepared[verdict] = continuation

    def _fail(self, code: grpc.StatusCode, details: str) -> None:
        if self.failure is None:
            self.failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
        self._call.cancel()

    async def close(self) -> None:
        """End the session; the server frees it at once."""
        self._call.cancel()
        for task in (self._reader, self._writer):
            task.cancel()
        await asyncio.wait([self._reader, self._writer])
