"""Several targets and drafts: who gets a session, and what becomes of it when its server goes."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from foredraft.errors import RequestError
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import draft_pb2_grpc, generation_pb2, target_pb2, target_pb2_grpc
from orchestrator import replicas as module
from orchestrator.backends import Backends
from orchestrator.decode import Decoder
from orchestrator.replicas import BLOCK, Replica, Replicas
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget
from tests.orchestrator.test_decode import expected, request, settled

TARGET, DRAFT = "foredraft.v1.TargetService", "foredraft.v1.DraftService"


class Servers:
    """Scripted services on sockets of their own, with health."""

    def __init__(self, stack: AsyncExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self.health: dict[str, health.aio.HealthServicer] = {}
        self.running: dict[str, grpc.aio.Server] = {}

    async def target(self, servicer: ScriptedTarget, address: str | None = None) -> str:
        return await self._start(
            target_pb2_grpc.add_TargetServiceServicer_to_server, servicer, TARGET, address or self._address()
        )

    async def draft(self, servicer: ScriptedDraft) -> str:
        return await self._start(draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer, DRAFT, self._address())

    def _address(self) -> str:
        return f"unix:{self._directory}/{len(self.running)}"

    async def _start(self, add: Callable[[Any, Any], None], servicer: object, name: str, address: str) -> str:
        server = grpc.aio.server()
        add(servicer, server)
        self.health[address] = health.aio.HealthServicer()
        await self.health[address].set(name, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self.health[address], server)
        server.add_insecure_port(address)
        await server.start()
        self.running[address] = server
        self._stack.push_async_callback(server.stop, None)
        return address


@pytest.fixture
async def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    monkeypatch.setattr(module, "RETRY_INTERVAL", 0.02)
    async with AsyncExitStack() as stack:
        yield Servers(stack, tmp_path)


class Decoding:
    """Decodes on some services."""

    def __init__(self, **options: Any) -> None:
        self.settings = OrchestratorSettings(**{"draft_timeout_s": 0.1, "target_wait_s": 5} | options)
        self.backends = Backends(self.settings)
        self.decoder = Decoder(self.backends, self.settings)
        self.statistics = generation_pb2.SpeculationStatistics()

    async def __aenter__(self) -> "Decoding":
        await self.backends.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.backends.close()

    async def decode(
        self,
        count: int = 40,
        each: Callable[[list[int]], None] = lambda output: None,
        mode: generation_pb2.Mode = generation_pb2.MODE_OVERLAPPED,
    ) -> list[int]:
        output: list[int] = []
        async for emission in self.decoder.decode(request(mode, count), self.statistics):
            output += emission.token_ids
            each(output)
        return output


async def test_a_target_that_dies_in_mid_stream_is_replaced_by_another_and_no_token_is_lost(servers: Servers) -> None:
    dying, other = ScriptedTarget(), ScriptedTarget()
    addresses = [await servers.target(dying), await servers.target(other)]
    async with Decoding(target=addresses, draft=None) as decoding:
        await settled(lambda: len(decoding.backends.targets.usable) == 2)
        dying.die_at = other.die_at = 20  # Whichever was picked; the other one goes on.
        assert await decoding.decode(mode=generation_pb2.MODE_PLAIN) == expected()
        assert decoding.backends.targets.failovers >= 1
    assert dying.opened
    assert other.opened


async def test_a_target_that_falls_silent_is_replaced_by_another(servers: Servers) -> None:
    hung, other = ScriptedTarget(), ScriptedTarget()
    hung.delay = 60.0
    addresses = [await servers.target(hung), await servers.target(other)]
    async with Decoding(target=addresses, draft=None, target_silence_s=0.3) as decoding:
        await settled(lambda: len(decoding.backends.targets.usable) == 2)
        assert await decoding.decode(mode=generation_pb2.MODE_PLAIN) == expected()
        assert not decoding.backends.targets.all[addresses[0]].sessions
        assert decoding.backends.targets.failovers == 1


async def test_targets_that_all_hang_end_the_request_after_a_bounded_wait(servers: Servers) -> None:
    hung = [ScriptedTarget(), ScriptedTarget()]
    for target in hung:
        target.delay = 60.0
    addresses = [await servers.target(target) for target in hung]
    async with Decoding(target=addresses, draft=None, target_silence_s=0.2) as decoding:
        decoding.settings = decoding.settings.model_copy(update={"target_wait_s": 0.5})
        with pytest.raises(RequestError, match="no sign of life") as caught:
            async with asyncio.timeout(20):
                await decoding.decode(mode=generation_pb2.MODE_PLAIN)
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE


async def test_a_session_moves_when_its_target_drains(servers: Servers) -> None:
    draining, other = ScriptedTarget(), ScriptedTarget()
    draining.delay = other.delay = 0.005
    addresses = [await servers.target(draining), await servers.target(other)]
    async with Decoding(target=addresses, draft=None) as decoding:
        await settled(lambda: len(decoding.backends.targets.usable) == 2)
        drains: list[asyncio.Task[None]] = []

        def drain(output: list[int]) -> None:
            if len(output) == 10:
                drains.append(asyncio.create_task(servers.health[addresses[0]].enter_graceful_shutdown()))

        assert await decoding.decode(200, each=drain, mode=generation_pb2.MODE_PLAIN) == expected(200)
        assert decoding.backends.targets.failovers == 0, "a target that drains did not fail"
    assert len(other.rounds) > 100


async def test_no_more_sessions_leave_a_target_that_drains_than_the_other_has_room_for(servers: Servers) -> None:
    draining, other = ScriptedTarget(), ScriptedTarget()
    draining.delay = other.delay = 0.005
    addresses = [await servers.target(draining), await servers.target(other)]
    async with Decoding(target=addresses, draft=await servers.draft(ScriptedDraft())) as decoding:
        targets = decoding.backends.targets
        await settled(lambda: len(targets.usable) == 2)
        full = targets.all[addresses[1]]
        assert full.admitted is not None
        full.sessions = full.admitted.max_sessions = 16
        decodes = [asyncio.create_task(decoding.decode(400)) for _ in range(4)]
        await settled(lambda: draining.sessions == 4)
        await servers.health[addresses[0]].enter_graceful_shutdown()
        await settled(lambda: targets.all[addresses[0]].draining)
        seen = len(draining.rounds)
        await settled(lambda: len(draining.rounds) > seen + 20)
        assert not other.opened, "they go on where they are"
        full.sessions -= 1
        most = 0
        while not all(decode.done() for decode in decodes):
            most = max(most, other.sessions)
            await asyncio.sleep(0.001)
        assert most == 1
        assert [decode.result() for decode in decodes] == [expected(400)] * 4


async def test_a_replica_with_other_weights_gets_no_session(servers: Servers) -> None:
    right, wrong = ScriptedTarget(), ScriptedTarget()
    addresses = [await servers.target(right)]
    async with Decoding(target=[*addresses, f"unix:{servers._directory}/1"], draft=None) as decoding:
        wrong.weights_hash = "b" * 64
        other = await servers.target(wrong)
        await settled(lambda: decoding.backends.targets.all[other].unfit)
        assert "other weights" in decoding.backends.targets.all[other].reason
        for _ in range(4):
            assert await decoding.decode() == expected()
    assert not wrong.opened


async def test_a_draft_that_stays_silent_is_left_for_another(servers: Servers) -> None:
    silent, other = ScriptedDraft(), ScriptedDraft()
    silent.silent.clear()
    target = ScriptedTarget()
    target.delay = 0.01
    drafts = [await servers.draft(silent), await servers.draft(other)]
    async with Decoding(target=[await servers.target(target)], draft=drafts) as decoding:
        await settled(lambda: len(decoding.backends.drafts.usable) == 2)
        assert await decoding.decode(200) == expected(200)
        assert decoding.statistics.plain_rounds > 0
        assert decoding.statistics.accepted > 50
        silent.silent.set()


async def test_a_session_moves_when_its_draft_drains(servers: Servers) -> None:
    draining, other, target = ScriptedDraft(), ScriptedDraft(), ScriptedTarget()
    target.delay = 0.005
    drafts = [await servers.draft(draining), await servers.draft(other)]
    async with Decoding(target=[await servers.target(target)], draft=drafts) as decoding:
        await settled(lambda: len(decoding.backends.drafts.usable) == 2)
        drains: list[asyncio.Task[None]] = []

        def drain(output: list[int]) -> None:
            if output and not drains:
                drains.append(asyncio.create_task(servers.health[drafts[0]].enter_graceful_shutdown()))

        assert await decoding.decode(400, each=drain) == expected(400)
        assert decoding.backends.drafts.failovers == 0
        assert not decoding.statistics.degraded_reason
    assert other.commits


async def test_all_addresses_of_a_name_are_replicas_and_follow_it(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESOLVE_INTERVAL", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hosts = ["127.0.0.1"]

    async def getaddrinfo(host: str, asked: int, **_: Any) -> list[Any]:
        assert (host, asked) == ("targets.example", port)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    first, second = ScriptedTarget(), ScriptedTarget()
    await servers.target(first, f"127.0.0.1:{port}")
    async with Decoding(target=f"dns:///targets.example:{port}", draft=None) as decoding:
        targets = decoding.backends.targets
        assert list(targets.all) == [f"127.0.0.1:{port}"]
        await servers.target(second, f"127.0.0.2:{port}")
        hosts.append("127.0.0.2")
        await settled(lambda: len(targets.usable) == 2)
        hosts.remove("127.0.0.1")
        await settled(lambda: list(targets.all) == [f"127.0.0.2:{port}"])
        assert await decoding.decode() == expected()
    assert second.opened
    assert not first.opened


def three(capacity: int = 0) -> tuple[Replicas[None, str], list[Replica[None, str]]]:
    async def admit(stub: None) -> str:
        return ""

    made: Replicas[None, str] = Replicas([], "service", lambda channel: None, admit, lambda admitted: capacity)
    for address in "abc":
        made.all[address] = Replica(address, None, None, None, admitted="")  # type: ignore[arg-type]
    return made, list(made.all.values())


def test_a_new_text_goes_to_the_least_busy_replica() -> None:
    replicas, (a, b, c) = three()
    a.sessions, b.sessions, c.sessions = 2, 1, 3
    assert replicas.pick(range(100)) is b
    b.admitted = None
    assert replicas.pick(range(100)) is a
    assert replicas.pick(range(100), without=[a, c]) is None


def test_the_next_turn_goes_where_the_last_one_was_unless_that_is_far_busier() -> None:
    replicas, (a, b, c) = three()
    first = list(range(3 * BLOCK))
    replicas.remember(first, c)
    replicas.remember(first[:BLOCK], a)  # Another conversation with the same beginning.
    a.sessions, b.sessions, c.sessions = 1, 0, 1
    assert replicas.pick([*first, 7, 8, 9]) is c
    c.sessions = 50
    assert replicas.pick([*first, 7, 8, 9]) is b
    c.admitted = None
    assert replicas.pick([*first, 7, 8, 9]) is a


def test_a_replica_that_is_full_gets_a_text_only_if_all_are() -> None:
    replicas, (a, b, c) = three(capacity=4)
    text = list(range(3 * BLOCK))
    replicas.remember(text, c)
    a.sessions, b.sessions, c.sessions = 3, 2, 4
    assert replicas.pick(text) is b
    a.sessions = b.sessions = 4
    assert replicas.pick(text) is c


def test_what_is_remembered_of_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    replicas, (a, *_) = three()
    for start in range(100):
        replicas.remember(range(start, start + 3 * BLOCK), a)
    assert len(replicas._served) == 10


async def test_a_lone_target_that_hangs_longer_than_a_request_would_wait_is_waited_for(servers: Servers) -> None:
    target = ScriptedTarget()
    async with Decoding(target=await servers.target(target), draft=None, target_silence_s=0.5, target_wait_s=0.4) as (
        decoding
    ):
        target.delay = 60.0
        decode = asyncio.create_task(decoding.decode(mode=generation_pb2.MODE_PLAIN))
        await settled(lambda: target.sessions == 1)
        target.delay = 0.0
        assert await decode == expected()
    assert len(target.opened) == 1


async def test_a_session_moves_when_its_target_drains_even_if_another_was_refused_there_before(
    servers: Servers,
) -> None:
    draining, other = ScriptedTarget(), ScriptedTarget()
    draining.delay = other.delay = 0.005
    addresses = [await servers.target(draining), await servers.target(other)]
    async with Decoding(target=addresses, draft=None) as decoding:
        targets = decoding.backends.targets
        await settled(lambda: len(targets.usable) == 2)
        drains: list[asyncio.Task[None]] = []

        def drain(output: list[int]) -> None:
            if len(output) == 10:
                drains.append(asyncio.create_task(servers.health[addresses[0]].enter_graceful_shutdown()))
                targets.failed(targets.all[addresses[0]], "refused a session")

        assert await decoding.decode(200, each=drain, mode=generation_pb2.MODE_PLAIN) == expected(200)
    assert len(other.rounds) > 100


async def test_a_draft_that_does_not_fit_is_told_apart_while_no_target_can_be_asked_and_may_be_replaced(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNFIT_INTERVAL", 0.02)
    draft = ScriptedDraft()
    address = f"unix:{servers._directory}/1"
    async with Decoding(target=await servers.target(ScriptedTarget()), draft=address) as decoding:
        backends = decoding.backends
        (target,) = backends.targets.usable
        draft.model.vocabulary_hash = "another"
        target.admitted = None
        assert await servers.draft(draft) == address
        await settled(lambda: backends.drafts.all[address].unfit)
        assert "does not fit" in backends.drafts.reason
        draft.model.vocabulary_hash = "v"
        await settled(lambda: bool(backends.drafts.usable))


async def test_the_tokenizer_is_waited_for_if_the_target_goes_before_it_gave_it(servers: Servers) -> None:
    class WithTokenizer(ScriptedTarget):
        async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
            yield target_pb2.GetTokenizerResponse(file_name="tokenizer.json", data=b"{}")

    async with Decoding(target=await servers.target(WithTokenizer()), draft=None) as decoding:
        targets = decoding.backends.targets
        targets.failed(targets.usable[0], "went away")
        assert await decoding.backends.fetch_tokenizer() == {"tokenizer.json": b"{}"}
