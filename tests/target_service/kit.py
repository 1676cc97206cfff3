"""A target service in this process, and clients that speak to it over real sockets."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from foredraft.errors import ErrorDetails, error_details
from foredraft.serving.channel import channel
from foredraft.serving.server import Server
from foredraft.settings import TargetSettings
from foredraft.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.server import SERVICE_NAME, Target, start_target

CONTEXT = 128
CHUNK = 16
TIMEOUT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    """Returns once `condition` holds, of which nothing tells; fails if that does not come."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Service:
    """A running service."""

    server: Server
    target: Target
    connection: grpc.aio.Channel
    stub: "target_pb2_grpc.TargetServiceAsyncStub"

    @property
    def held(self) -> tuple[int, int, int]:
        """Sessions of the scheduler, slots of the engine and places in use."""
        scheduler = self.target.scheduler
        return scheduler.sessions, scheduler.slots_used, self.target.places.taken

    async def until_empty(self) -> None:
        """Returns once nothing is held any more."""
        await until(lambda: self.held == (0, 0, 0))

    @contextmanager
    def gate(self) -> Iterator[threading.Semaphore]:
        """Forwards wait until the semaphore is released, once for each."""
        engine = self.target.scheduler._engine
        semaphore, forward = threading.Semaphore(0), engine.forward

        def gated(rows: Sequence[Any]) -> Any:
            assert semaphore.acquire(timeout=TIMEOUT_S)
            return forward(rows)

        engine.forward = gated  # type: ignore[method-assign]
        try:
            yield semaphore
        finally:
            engine.forward = forward  # type: ignore[method-assign]
            semaphore.release(1000)


@asynccontextmanager
async def running(model: Path, **settings: Any) -> AsyncIterator[Service]:
    """Starts a service, and stops it."""
    defaults = {"max_model_len": CONTEXT, "max_sessions": 8, "prefill_chunk": CHUNK, "threads": 1}
    settings = {**defaults, "queue_timeout_s": TIMEOUT_S, **settings}
    server = Server("127.0.0.1:0", [SERVICE_NAME], grace_s=TIMEOUT_S)
    await server.start()
    try:
        target = await start_target(TargetSettings(model=str(model), dtype="float64", **settings), server)
        try:
            await server.set_serving()
            async with channel(server.address) as connection:
                yield Service(server, target, connection, target_pb2_grpc.TargetServiceStub(connection))
        finally:
            await target.stop()
    finally:
        await server.stop()


class Client:
    """One session. `text` is prompt and output, kept from the verdicts."""

    def __init__(self, stub: "target_pb2_grpc.TargetServiceAsyncStub") -> None:
        self.call = stub.Verify(timeout=TIMEOUT_S)
        self.text: list[int] = []
        self.prompt_length = 0
        self.logprobs: list[common_pb2.TokenLogprobs] = []
        self.finish_reason: int = common_pb2.FINISH_REASON_UNSPECIFIED
        self._round_id = 0
        self._draft: list[int] = []

    @property
    def output(self) -> list[int]:
        return self.text[self.prompt_length :]

    async def open(self, token_ids: Sequence[int], **fields: Any) -> target_pb2.Verdict:
        """Opens the session and returns the first verdict; `fields` as for `open_message`."""
        await self.send(open_message(token_ids, **fields))
        return await self.verdict()

    async def round(
        self, draft: Sequence[int] = (), q: common_pb2.SparseDistributions | None = None
    ) -> target_pb2.Verdict:
        """Has `draft` verified and returns the verdict."""
        await self.send(round_message(self._round_id + 1, len(self.text), draft, q))
        return await self.verdict()

    async def send(self, request: target_pb2.VerifyRequest) -> None:
        """Sends a message."""
        if request.HasField("open"):
            self.text, self.prompt_length = list(request.open.token_ids), request.open.prompt_length
        self._round_id, self._draft = request.round.round_id, list(request.round.token_ids)
        await self.call.write(request)

    async def verdict(self) -> target_pb2.Verdict:
        """The next verdict, which extends `text`."""
        while not (response := await self.read()).HasField("verdict"):
            pass
        verdict = response.verdict
        assert verdict.round_id == self._round_id
        self.text += self._draft[: verdict.accepted]
        if verdict.HasField("next_token"):
            self.text.append(verdict.next_token)
        self.logprobs += verdict.logprobs
        self.finish_reason = verdict.finish_reason
        return verdict

    async def read(self) -> target_pb2.VerifyResponse:
        """The next response."""
        response = await self.call.read()
        if not isinstance(response, target_pb2.VerifyResponse):
            pytest.fail(f"the stream ended: {await self.call.code()}, {await self.call.details()}")
        return response

    async def close(self) -> None:
        """Ends the session in order."""
        await self.call.write(target_pb2.VerifyRequest(close=target_pb2.CloseTarget()))
        assert await self.call.read() is grpc.aio.EOF
        assert await self.call.code() == grpc.StatusCode.OK

    async def error(self) -> tuple[grpc.StatusCode, str, ErrorDetails]:
        """What the stream ends with, instead of a verdict."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self._drain()
        return raised.value.code(), raised.value.details() or "", error_details(raised.value)

    async def _drain(self) -> None:
        while await self.call.read() is not grpc.aio.EOF:
            pass


def open_message(
    token_ids: Sequence[int],
    *,
    prompt_length: int | None = None,
    sample_index: int = 0,
    logprobs: int | None = None,
    **sampling: Any,
) -> target_pb2.VerifyRequest:
    """An open; greedy unless `sampling` says otherwise."""
    return target_pb2.VerifyRequest(
        open=target_pb2.OpenTarget(
            token_ids=token_ids,
            prompt_length=len(token_ids) if prompt_length is None else prompt_length,
            sample_index=sample_index,
            sampling=common_pb2.Sampling(**{"temperature": 0, "seed": 7, "max_new_tokens": 24} | sampling),
            logprobs=logprobs,
        )
    )


def round_message(
    round_id: int, base: int, draft: Sequence[int] = (), q: common_pb2.SparseDistributions | None = None
) -> target_pb2.VerifyRequest:
    """A round."""
    return target_pb2.VerifyRequest(round=target_pb2.Round(round_id=round_id, base=base, token_ids=draft, q=q))


async def generate(service: Service, token_ids: Sequence[int], **fields: Any) -> Client:
    """The whole sample by plain rounds; the session is closed."""
    client = Client(service.stub)
    await client.open(token_ids, **fields)
    while not client.finish_reason:
        await client.round()
    await client.close()
    return client
