"""A session on the target service."""

# The stubs' asyncio classes exist for type checkers only.
from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NoReturn

import grpc

from foredraft.v1 import common_pb2, target_pb2, target_pb2_grpc

Metadata = tuple[tuple[str, str], ...]


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether the stream ended because the service went away, so that another stream may go on where it ended.

    A write that meets the end of its stream loses the server's status to an INTERNAL of grpc's own (grpc/grpc#36066);
    that counts as lost too: if the cause was another, the next stream tells it.
    """
    masked = error.code() is grpc.StatusCode.INTERNAL and "Internal error from Core" in (error.details() or "")
    return masked or error.code() is grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class TimedVerdict:
    """A verdict and how long it took, in seconds, from sending the round to receiving it."""

    verdict: target_pb2.Verdict
    elapsed: float


class TargetSession:
    """One Verify stream. Every call may raise grpc.aio.AioRpcError; after that the session is over.

    A target from which nothing is heard for `silence_s` seconds, neither a verdict nor progress, counts as lost.
    """

    def __init__(
        self,
        stub: target_pb2_grpc.TargetServiceAsyncStub,
        *,
        silence_s: float,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> None:
        self._call = stub.Verify(timeout=timeout, metadata=metadata)
        self._silence_s = silence_s

    async def open(self, request: target_pb2.OpenTarget) -> TimedVerdict:
        """Start the session; the verdict is the first output token."""
        return await self._ask(target_pb2.VerifyRequest(open=request), round_id=0)

    async def verify(
        self, round_id: int, base: int, token_ids: list[int], q: common_pb2.SparseDistributions | None
    ) -> TimedVerdict:
        """Verify draft tokens that follow `base` tokens of text; without any this is a plain decode step."""
        message = target_pb2.Round(round_id=round_id, base=base, token_ids=token_ids, q=q)
        return await self._ask(target_pb2.VerifyRequest(round=message), round_id)

    async def _ask(self, request: target_pb2.VerifyRequest, round_id: int) -> TimedVerdict:
        started = time.perf_counter()
        try:
            await self._call.write(request)
        except asyncio.InvalidStateError:  # The server ended the stream before this round was sent.
            await self._raise_end()
        while True:
            response = await self._read()
            if not isinstance(response, target_pb2.VerifyResponse):
                await self._raise_end()
            if response.HasField("verdict") and response.verdict.round_id == round_id:
                return TimedVerdict(response.verdict, time.perf_counter() - started)

    async def _read(self) -> object:
        try:
            async with asyncio.timeout(self._silence_s):
                return await self._call.read()
        except TimeoutError:
            details = f"the target gave no sign of life for {self._silence_s:g} s"
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details) from None

    async def _raise_end(self) -> NoReturn:
        """Raise the status with which the server ended the stream, which it never does with OK by itself."""
        code = await self._call.code()
        raise grpc.aio.AioRpcError(
            code if code is not grpc.StatusCode.OK else grpc.StatusCode.UNAVAILABLE,
            await self._call.initial_metadata(),
            await self._call.trailing_metadata(),
            details=await self._call.details() or "the target ended the session",
        )

    def close(self) -> None:
        """End the session; the server frees it at once. Does nothing if it is over."""
        self._call.cancel()
