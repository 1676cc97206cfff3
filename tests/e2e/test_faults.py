"""What users see when a service or a client goes away in the middle of a text, with real processes."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from orchestrator.client import AsyncClient, AsyncStream, GenerationError
from orchestrator.results import Generated
from tests import tiny
from tests.e2e import processes
from tests.e2e.conftest import CONTEXT, Tiny
from tests.e2e.processes import Server

LONG = {"max_new_tokens": 200, "temperature": 0.7, "seed": 5, "ignore_eos": True}
SHORT = {"max_new_tokens": 20, "seed": 1, "ignore_eos": True, "draft_tokens": 2}


class Own:
    """Servers of this module's own, to be harmed. One session fits in target and draft."""

    def __init__(self, stacks: Tiny) -> None:
        self.stacks = stacks
        self.servers: list[Server] = []

    def target(self) -> Server:
        log = self.stacks.log(f"own-{len(self.servers)}")
        options = {"model": self.stacks.target_model, "dtype": "float64", "max_sessions": 1}
        return self._started(processes.target(log, **options))

    def draft(self) -> Server:
        log = self.stacks.log(f"own-{len(self.servers)}")
        options = {"draft_model": self.stacks.draft_models["good"], "draft_dtype": "float64", "draft_max_sessions": 1}
        # Without grace: on SIGTERM it cuts its sessions off in mid-text.
        return self._started(processes.draft(log, **options, grace_s=0))

    def orchestrator(self, target: Server, draft: Server | None, **options: object) -> Server:
        log = self.stacks.log(f"own-{len(self.servers)}")
        return self._started(processes.orchestrator(log, target, draft, **options))

    def _started(self, server: Server) -> Server:
        self.servers.append(server)
        return server


@pytest.fixture
def own(stacks: Tiny) -> AsyncIterator[Own]:
    result = Own(stacks)
    yield result
    for server in result.servers:
        server.process.send_signal(signal.SIGCONT)
        server.process.kill()
        server.process.wait(10)


async def interrupted(address: str, act: Callable[[], None], **options: object) -> Generated:
    """Stream a long text, acting once the first tokens are there; returns what came."""
    async with AsyncClient(address) as client:
        stream = client.stream("Once upon a time", **{**LONG, **options})
        acted = False
        async for _ in stream:
            if not acted:
                act()
                acted = True
        return stream.result


async def exhaust(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


async def undisturbed(stacks: Tiny) -> list[int]:
    async with AsyncClient(stacks.orchestrators["good"].address) as client:
        result = await client.generate("Once upon a time", mode="plain", **LONG)
    return result.completions[0].token_ids


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_draft_that_goes_leaves_the_same_text_decoded_plainly(
    stacks: Tiny, own: Own, blow: signal.Signals
) -> None:
    draft = own.draft()
    orchestrator = own.orchestrator(stacks.target, draft, draft_timeout_s=0.3)
    draft.wait_ready()
    orchestrator.wait_ready()
    result = await interrupted(orchestrator.address, lambda: draft.process.send_signal(blow), draft_tokens=1)
    completion = result.completions[0]
    assert completion.token_ids == await undisturbed(stacks)
    assert completion.statistics.plain_rounds > 0
    if blow == signal.SIGKILL:
        assert "draft" in completion.statistics.degraded_reason


async def test_speculation_comes_back_with_the_draft(stacks: Tiny, own: Own) -> None:
    draft = own.draft()
    orchestrator = own.orchestrator(stacks.target, draft)
    draft.wait_ready()
    orchestrator.wait_ready()
    draft.process.kill()
    async with AsyncClient(orchestrator.address) as client:
        without = await client.generate("Once", **SHORT)
        assert without.completions[0].statistics.drafted == 0
        own.servers.append(again := _restart(stacks, draft))
        again.wait_ready()
        async with asyncio.timeout(20):
            while (await client.get_model()).degraded_reason:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        with_draft = await client.generate("Once", **SHORT)
    assert with_draft.completions[0].statistics.accepted > 0
    assert with_draft.completions[0].token_ids == without.completions[0].token_ids


def _restart(stacks: Tiny, old: Server) -> Server:
    options = {"draft_model": stacks.draft_models["good"], "draft_dtype": "float64", "draft_listen": old.address}
    return processes.draft(stacks.log("restarted"), **options)


async def test_target_that_is_gone_is_unavailable_with_retry_info_after_a_bounded_wait(stacks: Tiny, own: Own) -> None:
    target = own.target()
    orchestrator = own.orchestrator(target, None, target_wait_s=1)
    target.wait_ready()
    orchestrator.wait_ready()
    with pytest.raises(GenerationError, match="target") as caught:
        async with asyncio.timeout(30):
            await interrupted(orchestrator.address, target.process.kill)
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE
    assert caught.value.retry_after is not None


@pytest.mark.parametrize("how", ["cancel", "vanish", "deadline"])
async def test_a_client_that_leaves_frees_its_sessions_within_a_second(stacks: Tiny, own: Own, how: str) -> None:
    target, draft = own.target(), own.draft()
    orchestrator = own.orchestrator(target, draft)
    for server in (target, draft, orchestrator):
        server.wait_ready()
    client = AsyncClient(orchestrator.address)
    stream = client.stream("Once upon a time", timeout=1 if how == "deadline" else None, **LONG)
    await anext(stream)
    if how == "cancel":
        await stream.aclose()
    elif how == "vanish":
        await client.close()
    else:
        await asyncio.sleep(1.2)  # a reader too slow for its deadline
        with pytest.raises(GenerationError) as caught:
            await exhaust(stream)
        assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    # Target and draft have one session each: the next request is served with speculation only if both are free.
    await asyncio.sleep(1)
    async with AsyncClient(orchestrator.address) as other:
        result = await other.generate("Once", timeout=5, **SHORT)
    assert result.completions[0].statistics.drafted > 0
    await client.close()


async def test_a_pair_with_different_vocabularies_is_refused_at_start(stacks: Tiny, own: Own) -> None:
    foreign = stacks.directory / "foreign"
    tiny.save_model(foreign, dtype="float64", max_length=CONTEXT)
    vocabulary = (foreign / "tokenizer.json").read_text(encoding="utf-8")
    assert '"z"' in vocabulary
    (foreign / "tokenizer.json").write_text(vocabulary.replace('"z"', '"ž"'), encoding="utf-8")
    draft = processes.draft(stacks.log("foreign"), draft_model=foreign, draft_dtype="float64")
    own.servers.append(draft)
    draft.wait_ready()
    orchestrator = own.orchestrator(stacks.target, draft)
    assert orchestrator.process.wait(60) != 0
    message = orchestrator.log.read_text()
    assert "does not fit" in message
    assert "'z' for the target and 'ž' for the draft" in message
    assert "Traceback" not in message
