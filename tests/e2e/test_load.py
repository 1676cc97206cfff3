"""More work than fits, readers slower than the servers, and deadlines: nothing grows, and nobody starves."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_service.server import SERVICE_NAME as DRAFT
from draft_service.server import Draft, start_draft
from foredraft.serving.server import Server
from foredraft.settings import DraftSettings, OrchestratorSettings, TargetSettings
from foredraft.v1 import draft_pb2_grpc, generation_pb2, generation_pb2_grpc, target_pb2_grpc
from orchestrator.backends import Backends
from orchestrator.client import AsyncClient, GenerationError
from orchestrator.decode import Decoder
from target_service.server import SERVICE_NAME as TARGET
from target_service.server import Target, start_target
from tests import tiny
from tests.e2e import processes
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget
from tests.orchestrator.test_decode import expected, request
from tests.target_service.kit import CHUNK, Client, open_message, round_message, running, until

SESSIONS = 3
QUEUE_TIMEOUT_S = 2.0
CONTEXT = 20_000
TOKENS = 15_000
# gRPC's clients take megabytes ahead on a fast connection; these have a small window that stays.
WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16)]
EMULATE = "target=0ms,draft=0ms"

Hold = Callable[[int], Awaitable[list[Any]]]


@dataclass
class Stack:
    """Target and draft in this process, on emulated models as fast as can be, and an orchestrator of its own."""

    target: Target
    draft: Draft
    orchestrator: processes.Server

    @property
    def held(self) -> tuple[int, ...]:
        """Sessions and slots in use of both services."""
        target, draft = self.target, self.draft
        slots = draft.engine.slots_used if draft.engine is not None else 0
        return target.places.taken, target.scheduler.slots_used, draft.places.taken, slots

    async def value(self, name: str) -> float:
        """A metric of the orchestrator."""
        return (await asyncio.to_thread(self.orchestrator.metrics))[name]

    async def until_at_rest(self) -> None:
        """Return once there is no session, no slot in use and no request."""
        await until(lambda: not any(self.held))
        async with asyncio.timeout(30):
            while await self.value("foredraft_requests_in_flight"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def standstill(self) -> float:
        """Tokens generated when no more come."""
        before, name = -1.0, "foredraft_generated_tokens_total"
        while (now := await self.value(name)) != before:
            before = now
            await asyncio.sleep(0.5)
        return now


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    directory = tmp_path_factory.mktemp("load")
    servers = [Server(f"unix:{directory}/{name}", [name]) for name in (TARGET, DRAFT)]
    for server in servers:
        await server.start()
    limits = {"max_model_len": CONTEXT, "max_sessions": SESSIONS}
    target = await start_target(TargetSettings(emulate=EMULATE, queue_timeout_s=QUEUE_TIMEOUT_S, **limits), servers[0])
    draft = await start_draft(DraftSettings(emulate=EMULATE, **limits), servers[1])
    for server in servers:
        await server.set_serving()
    orchestrator = processes.Server(
        "orchestrator",
        directory / "orchestrator.log",
        "listen",
        target=servers[0].address,
        draft=servers[1].address,
        metrics_listen=f"127.0.0.1:{processes.free_port()}",
    )
    try:
        await asyncio.to_thread(orchestrator.wait_ready)
        yield Stack(target, draft, orchestrator)
    finally:
        orchestrator.process.kill()
        orchestrator.process.wait(10)
        for server in servers:
            await server.stop()
        await draft.stop()
        await target.stop()


@pytest.fixture
async def hold(stack: Stack) -> AsyncIterator[Hold]:
    """Starts streams that are not read and could go on for long: their sessions stay."""
    async with grpc.aio.insecure_channel(stack.orchestrator.address, WINDOW) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        message = generation_pb2.GenerateRequest(text="Once", logprobs=20)
        message.sampling.max_new_tokens, message.sampling.ignore_eos = TOKENS, True

        async def start(count: int) -> list[Any]:
            calls = [stub.GenerateStream(message) for _ in range(count)]
            for call in calls:
                await call.read()
                await call.read()
            return calls

        yield start
    await stack.until_at_rest()


async def test_a_session_too_many_waits_for_a_place_and_then_is_told_when_to_come_back(
    stack: Stack, hold: Hold
) -> None:
    holders = await hold(SESSIONS)
    async with AsyncClient(stack.orchestrator.address) as client:
        with pytest.raises(GenerationError, match=f"{QUEUE_TIMEOUT_S:g} s") as caught:
            await client.generate("Once", max_new_tokens=3)
        assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after
        waiting = asyncio.create_task(client.generate("Once", max_new_tokens=3, ignore_eos=True))
        await until(lambda: stack.target.places.waiting == 1)
        holders[0].cancel()
        assert len((await waiting).completions[0].token_ids) == 3


async def test_readers_that_do_not_read_are_held_back_and_hold_up_nobody(stack: Stack, hold: Hold) -> None:
    before = await stack.value("foredraft_generated_tokens_total")
    resident = await stack.value("process_resident_memory_bytes")
    readers = await hold(SESSIONS - 1)
    held = await stack.standstill() - before
    grown = await stack.value("process_resident_memory_bytes") - resident
    assert held < 0.5 * len(readers) * TOKENS
    assert grown < 32 * 2**20
    async with AsyncClient(stack.orchestrator.address) as client:
        result = await client.generate("Once", max_new_tokens=100, ignore_eos=True, timeout=30)
    assert len(result.completions[0].token_ids) == 100


async def test_when_a_deadline_passes_both_services_are_free_again(stack: Stack) -> None:
    async with AsyncClient(stack.orchestrator.address) as client:
        stream = client.stream("Once", timeout=2, max_new_tokens=TOKENS, ignore_eos=True)
        await anext(stream)
        await until(lambda: bool(stack.target.places.taken and stack.draft.places.taken))
        # Nobody but the deadline ends it: the client neither reads nor leaves.
        await stack.until_at_rest()
        with pytest.raises(GenerationError) as caught:
            async for _ in stream:
                pass
        assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_deadline_is_known_to_target_and_draft(tmp_path: Path) -> None:
    remaining: dict[str, float] = {}

    class KeepsTarget(ScriptedTarget):
        async def Verify(self, requests: Any, context: Any) -> Any:
            remaining["target"] = context.time_remaining()
            async for response in super().Verify(requests, context):
                yield response

    class KeepsDraft(ScriptedDraft):
        async def Draft(self, requests: Any, context: Any) -> Any:
            remaining["draft"] = context.time_remaining()
            async for response in super().Draft(requests, context):
                yield response

    server = grpc.aio.server()
    server.add_insecure_port(address := f"unix:{tmp_path}/services")
    target_pb2_grpc.add_TargetServiceServicer_to_server(KeepsTarget(), server)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(KeepsDraft(), server)
    await server.start()
    settings = OrchestratorSettings(target=address, draft=address)
    backends = Backends(settings)
    await backends.connect()
    limited = replace(request(generation_pb2.MODE_OVERLAPPED, 40), deadline=time.perf_counter() + 50)
    output: list[int] = []
    async for emission in Decoder(backends, settings).decode(limited, generation_pb2.SpeculationStatistics()):
        output += emission.token_ids
    assert output == expected()
    assert all(45 < seconds < 51 for seconds in remaining.values())
    assert remaining.keys() == {"target", "draft"}
    await backends.close()
    await server.stop(None)


async def test_a_long_prompt_costs_a_decoding_stream_one_forward_a_round_at_most(tmp_path: Path) -> None:
    """One that runs already when the round comes, and its own: counted, not timed."""
    model = tiny.save_model(tmp_path / "model", dtype="float64")
    async with running(model, max_model_len=256) as service:
        decoding, long = Client(service.stub), Client(service.stub)
        await decoding.open([5, 6, 7])
        with service.gate() as forwards:
            scheduler = service.target.scheduler
            await long.send(open_message([10 + i % 200 for i in range(200)]))
            await until(lambda: scheduler.slots_used == 2)
            for round_id in range(1, 6):
                await decoding.send(round_message(round_id, len(decoding.text)))
                await until(lambda: len(scheduler._inbox) + len(scheduler._jobs) == 2)
                forwards.release(2)
                await decoding.verdict()
            assert scheduler.counters.verdicts == 1 + 5
            assert scheduler.counters.forwards <= 1 + 2 * 5 < 200 / CHUNK, "the prompt is read in the meantime"
            forwards.release(100)
            await long.verdict()
        await decoding.close()
        await long.close()
        await service.until_empty()
