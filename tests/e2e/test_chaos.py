"""Servers that die, hang, drain and lose connections, and clients that leave, at random moments: no token is wrong and
nothing is left behind.

Two targets and two drafts, each behind a TCP proxy, and an orchestrator: real processes with tiny models in float64, so
that texts are equal to the last token. `make soak` runs the same at full size.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

import pytest

from orchestrator.client import AsyncClient
from tests import tiny
from tests.e2e import processes
from tests.e2e.processes import Server, free_port
from tests.e2e.proxy import Proxy

Fault = Literal["kill", "stop", "term", "drop"]
Mode = Literal["plain", "sequential", "overlapped"]
FAULTS: tuple[Fault, ...] = ("kill", "stop", "term", "drop")

MODES: tuple[Mode, ...] = ("overlapped", "overlapped", "sequential", "plain")

SESSIONS = 32
SILENCE_S = 1.5
GRACE_S = 1.0
TOKENS = 120
# Memory that a server may take beyond what it had once warm: allocators keep some, a leak goes on growing.
GROWTH_MIB = 24
HELD = tuple(f"foredraft_{name}" for name in ("sessions", "slots_used", "queue_depth", "requests_in_flight"))
PROMPTS = ["Once upon a time", "def fibonacci(n):", "To be, or not to be, " * 8, "The quick brown fox " * 5]


@dataclass(frozen=True)
class Size:
    """How much. `faults` are for each target, then for each draft; their order is left to chance."""

    streams: int
    at_a_time: int
    faults: Sequence[Sequence[Fault]]
    cancelled: int


# Three restarts at the same time: they are what takes time.
SHORT = Size(24, 8, [["kill", "stop"], ["term", "drop"], ["kill", "drop"], ["stop"]], cancelled=300)
FULL = Size(200, 24, [FAULTS * 2] * 4, cancelled=10_000)
SIZES = [
    pytest.param(SHORT, id="short"),
    pytest.param(FULL, id="full", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


@dataclass
class Fleet:
    """The servers, and the proxies between the orchestrator and each of the others."""

    targets: list[Server]
    drafts: list[Server]
    proxies: dict[Server, Proxy]
    orchestrator: Server

    async def at_rest(self) -> dict[str, float]:
        """Resident MiB by server, once none has a session, a slot in use or a request any more; that comes soon."""
        resident: dict[str, float] = {}
        async with asyncio.timeout(30):
            for server in [*self.targets, *self.drafts, self.orchestrator]:
                values = await asyncio.to_thread(server.metrics)
                while any(values.get(name, 0) for name in HELD):
                    await asyncio.sleep(0.1)
                    values = await asyncio.to_thread(server.metrics)
                resident[server.log.stem] = round(values["process_resident_memory_bytes"] / 2**20, 1)
        return resident

    def check_logs(self) -> None:
        """No server, of those that died too, has met an error that it did not expect."""
        for server in [*self.targets, *self.drafts, self.orchestrator]:
            assert "Traceback" not in server.log.read_text(), server.log.read_text()


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("chaos")
    target_model = tiny.save_model(directory / "target-model", dtype="float64", idle_layers=6)
    draft_model = tiny.save_model(directory / "draft-model", dtype="float64", noise=0.1)
    targets = [
        processes.target(
            directory / f"target-{i}.log",
            model=target_model,
            dtype="float64",
            max_sessions=SESSIONS,
            prefill_chunk=32,
            grace_s=GRACE_S,
            target_metrics_listen=f"127.0.0.1:{free_port()}",
        )
        for i in range(2)
    ]
    drafts = [
        processes.draft(
            directory / f"draft-{i}.log",
            draft_model=draft_model,
            draft_dtype="float64",
            draft_max_sessions=SESSIONS,
            grace_s=GRACE_S,
            draft_metrics_listen=f"127.0.0.1:{free_port()}",
        )
        for i in range(2)
    ]
    servers = [*targets, *drafts]
    try:
        async with AsyncExitStack() as stack:
            proxies = {server: await stack.enter_async_context(Proxy(server.address)) for server in servers}
            for server in servers:
                await asyncio.to_thread(server.wait_ready)
            orchestrator = processes.Server(
                "orchestrator",
                directory / "orchestrator.log",
                "listen",
                target=",".join(proxies[server].address for server in targets),
                draft=",".join(proxies[server].address for server in drafts),
                target_silence_s=SILENCE_S,
                target_wait_s=120,
                draft_timeout_s=0.5,
                metrics_listen=f"127.0.0.1:{free_port()}",
            )
            servers.append(orchestrator)
            await asyncio.to_thread(orchestrator.wait_ready)
            yield Fleet(targets, drafts, proxies, orchestrator)
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGCONT)
            server.process.kill()
            server.process.wait(10)


async def suffer(server: Server, proxy: Proxy, fault: Fault, duration: float) -> None:
    """Return when the server works again."""
    match fault:
        case "drop":
            proxy.drop()
        case "stop":
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(duration)
            server.process.send_signal(signal.SIGCONT)
        case "kill" | "term":
            server.process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
            code = await asyncio.to_thread(server.process.wait, 60)
            assert code == (-signal.SIGKILL if fault == "kill" else 0), server.log.read_text()
            server.start()
            await asyncio.to_thread(server.wait_ready)


@dataclass(frozen=True)
class Case:
    """A request, and the tokens that an undisturbed target says."""

    prompt: str
    seed: int
    temperature: float
    expected: Sequence[int]


async def undisturbed(client: AsyncClient, count: int) -> list[Case]:
    async def case(seed: int) -> Case:
        prompt, temperature = PROMPTS[seed % len(PROMPTS)], 0.0 if seed % 3 == 0 else 0.8
        options = {"seed": seed, "temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}
        result = await client.generate(prompt, mode="plain", **options)
        return Case(prompt, seed, temperature, result.completions[0].token_ids)

    return list(await asyncio.gather(*map(case, range(count))))


async def check(client: AsyncClient, case: Case, mode: Mode) -> None:
    """Stream the case and compare."""
    stream = client.stream(
        case.prompt,
        seed=case.seed,
        temperature=case.temperature,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        mode=mode,
    )
    async for _ in stream:
        pass
    assert stream.result.completions[0].token_ids == case.expected


@pytest.mark.parametrize("size", SIZES)
async def test_whatever_happens_to_servers_every_stream_ends_with_the_right_tokens(fleet: Fleet, size: Size) -> None:
    done, faults, tormented = 0, 0, False

    async def torment(server: Server, fate: Sequence[Fault], chance: random.Random) -> None:
        nonlocal faults
        for fault in chance.sample(fate, len(fate)):
            await asyncio.sleep(chance.uniform(0.1, 1.5))
            await suffer(server, fleet.proxies[server], fault, duration=chance.uniform(0.2, 2 * SILENCE_S))
            faults += 1

    async def stream(client: AsyncClient, chance: random.Random) -> None:
        nonlocal done
        while done < size.streams or not tormented:
            await check(client, chance.choice(cases), chance.choice(MODES))
            done += 1

    async with AsyncClient(fleet.orchestrator.address) as client:
        cases = await undisturbed(client, 12)
        before = await fleet.at_rest()
        async with asyncio.TaskGroup() as group:
            for number in range(size.at_a_time):
                group.create_task(stream(client, random.Random(number)))
            async with asyncio.TaskGroup() as torments:
                for number, server in enumerate([*fleet.targets, *fleet.drafts]):
                    torments.create_task(torment(server, size.faults[number], random.Random(number)))
            tormented = True
    after = await fleet.at_rest()
    moved = fleet.orchestrator.metrics()["foredraft_failovers_total"]
    print(f"\n{done} streams, {faults} faults, {moved:g} sessions lost and moved; MiB {before} -> {after}")
    assert moved > 0, "no session was hit"
    assert after["orchestrator"] - before["orchestrator"] < GROWTH_MIB
    fleet.check_logs()


@pytest.mark.parametrize("size", SIZES)
async def test_clients_that_leave_at_random_points_leave_nothing_behind(fleet: Fleet, size: Size) -> None:
    async def leave(client: AsyncClient, seed: int, chance: random.Random) -> None:
        stream = client.stream(chance.choice(PROMPTS), seed=seed, max_new_tokens=TOKENS, ignore_eos=True)
        for _ in range(chance.choice([0, 0, 1, 2, 5])):
            await anext(stream)
        # Also before the request has reached the target, or while it reads the prompt.
        await asyncio.sleep(chance.choice([0, chance.uniform(0, 0.02)]))
        await stream.aclose()

    async def several(numbers: range) -> None:
        chance = random.Random(numbers.start)
        for part in range(0, len(numbers), 20):
            # Every connection is closed with a stream still running.
            async with AsyncClient(fleet.orchestrator.address) as client:
                for seed in numbers[part : part + 20]:
                    await leave(client, seed, chance)
                await anext(client.stream(PROMPTS[0], max_new_tokens=TOKENS, ignore_eos=True))

    async def all_of(numbers: range) -> None:
        share = len(numbers) // 16
        await asyncio.gather(*(several(numbers[i * share : (i + 1) * share]) for i in range(16)))

    warm = max(200, size.cancelled // 10)
    await all_of(range(warm))
    before = await fleet.at_rest()
    await all_of(range(size.cancelled))
    after = await fleet.at_rest()
    print(f"\n{size.cancelled} sessions cancelled; MiB {before} -> {after}")
    for name, resident in after.items():
        assert resident - before[name] < GROWTH_MIB, name
    fleet.check_logs()
