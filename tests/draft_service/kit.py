"""A draft service in this process, and clients that speak to it over real sockets."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from draft_service.drafter import Counters
from draft_service.server import SERVICE_NAME, Draft, start_draft
from foredraft.errors import ErrorDetails, error_details
from foredraft.sampling.params import SamplingParams
from foredraft.serving.channel import channel
from foredraft.serving.server import Server
from foredraft.settings import DraftSettings
from foredraft.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from foredraft.validation import sampling_proto
from tests.draft_service.reference import EOS, MAX_MODEL_LEN, PROMPT

MAX_SESSIONS = 4
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Service:
    """A running service."""

    server: Server
    draft: Draft
    connection: grpc.aio.Channel
    stub: "draft_pb2_grpc.DraftServiceAsyncStub"

    @property
    def model_counters(self) -> Counters:
        return self.draft.scheduler.counters[common_pb2.DRAFTER_MODEL]

    @property
    def held(self) -> tuple[int, int, int]:
        """Places in use, sessions of the drafters and slots of the engine."""
        engine = self.draft.engine
        sessions = sum(counters.sessions for counters in self.draft.scheduler.counters.values())
        return self.draft.places.taken, sessions, engine.slots_used if engine is not None else 0

    async def until(self, held: tuple[int, int, int]) -> None:
        """Return once exactly this is held, and fail if that does not come."""
        async with asyncio.timeout(TIMEOUT_S):
            # The model thread tells nobody that it has freed a slot.
            while self.held != held:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def until_posted(self) -> None:
        """Return once a message waits for the model thread."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.draft.scheduler._inbox:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    @contextmanager
    def gate(self) -> Iterator["Gate"]:
        """Holds up forwards until it is released, once for each."""
        engine = self.draft.engine
        assert engine is not None
        gate, forward = Gate(), engine.forward

        def gated(rows: Sequence[Any]) -> Any:
            gate.entered.release()
            assert gate.released.acquire(timeout=TIMEOUT_S)
            return forward(rows)

        engine.forward = gated  # type: ignore[method-assign]
        try:
            yield gate
        finally:
            engine.forward = forward  # type: ignore[method-assign]
            gate.release(1000)


class Gate:
    """What forwards wait at."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.released = threading.Semaphore(0)

    def release(self, count: int = 1) -> None:
        """Let this many forwards pass."""
        self.released.release(count)

    async def wait_entered(self) -> None:
        """Return when one more forward has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=TIMEOUT_S)


@asynccontextmanager
async def running(model: Path | None, **settings: Any) -> AsyncIterator[Service]:
    """Start a service, and stop it."""
    if model is not None:
        defaults = {"draft_model": str(model), "drafter": "model", "dtype": "float64", "max_model_len": MAX_MODEL_LEN}
        settings = defaults | settings
    settings = {"max_sessions": MAX_SESSIONS, "prefill_chunk": 16, "branches": 4, "threads": 1} | settings
    server = Server("127.0.0.1:0", [SERVICE_NAME], grace_s=TIMEOUT_S)
    await server.start()
    draft = await start_draft(DraftSettings(**settings), server)
    await server.set_serving()
    async with channel(server.address) as connection:
        yield Service(server, draft, connection, draft_pb2_grpc.DraftServiceStub(connection))
    await server.stop()
    await draft.stop()


def open_request(
    params: SamplingParams, text: Sequence[int] = PROMPT, drafter: int = common_pb2.DRAFTER_UNSPECIFIED
) -> draft_pb2.DraftRequest:
    """Opens what `reference.opening` describes."""
    return draft_pb2.DraftRequest(
        open=draft_pb2.OpenDraft(
            token_ids=text,
            prompt_length=len(text),
            sample_index=3,
            sampling=sampling_proto(params),
            drafter=drafter,  # type: ignore[arg-type]
            eos_token_ids=[EOS],
        )
    )


@dataclass
class Client:
    """One session. `text` is what has been committed, `prepared` what has come for the round announced last."""

    service: Service
    text: list[int] = field(default_factory=list)
    prepared: list[draft_pb2.Continuation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call = self.service.stub.Draft(timeout=TIMEOUT_S)
        self._round_id = 0

    async def open(
        self, params: SamplingParams, text: Sequence[int] = PROMPT, drafter: int = common_pb2.DRAFTER_UNSPECIFIED
    ) -> None:
        self.text = list(text)
        await self.call.write(open_request(params, text, drafter))

    async def commit(self, tokens: Sequence[int], k: int, base: int | None = None) -> None:
        base = len(self.text) if base is None else base
        self.text = [*self.text[:base], *tokens]
        commit = draft_pb2.Commit(base=base, token_ids=tokens, max_tokens=k)
        await self.call.write(draft_pb2.DraftRequest(commit=commit))

    async def verifying(
        self, tokens: Sequence[int], k: int, base: int | None = None, commit: draft_pb2.Commit | None = None
    ) -> None:
        self._round_id += 1
        self.prepared.clear()
        if commit is not None:
            self.text = [*self.text[: commit.base], *commit.token_ids]
        base = len(self.text) if base is None else base
        round_ = draft_pb2.Verifying(round_id=self._round_id, base=base, token_ids=tokens, max_tokens=k, commit=commit)
        await self.call.write(draft_pb2.DraftRequest(verifying=round_))

    async def receive(self) -> draft_pb2.DraftResponse:
        response: Any = await self.call.read()
        if response is grpc.aio.EOF:
            raise EOFError(f"the stream ended with {await self.call.code()}: {await self.call.details()}")
        if response.HasField("prepared") and response.prepared.round_id == self._round_id:
            self.prepared += response.prepared.continuations
        return response  # type: ignore[no-any-return]

    async def proposal(self) -> draft_pb2.Proposal:
        """The next one; what is prepared meanwhile is kept."""
        while True:
            response = await self.receive()
            if response.HasField("proposal"):
                return response.proposal

    async def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        await self.commit(tokens, k)
        proposal = await self.proposal()
        assert proposal.base == len(self.text)
        return list(proposal.token_ids)

    async def wait_prepared(self, count: int) -> list[draft_pb2.Continuation]:
        while len(self.prepared) < count:
            await self.receive()
        return list(self.prepared)

    async def close(self) -> None:
        await self.call.write(draft_pb2.DraftRequest(close=draft_pb2.CloseDraft()))
        while await self.call.read() is not grpc.aio.EOF:
            pass
        assert await self.call.code() is grpc.StatusCode.OK

    async def error(self) -> tuple[grpc.StatusCode, str, ErrorDetails]:
        """What the stream ends with."""
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), str(error.details()), error_details(error)
        raise AssertionError(f"the stream ended with {await self.call.code()}")
