"""The orchestrator's life: not ready without a target, ready with one, drained on SIGTERM."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foredraft.serving.channel import channel
from foredraft.serving.server import StartError
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import target_pb2, target_pb2_grpc
from orchestrator import replicas
from orchestrator.client import AsyncClient
from orchestrator.server import SERVICE, main
from tests.orchestrator.edge import TOKENIZER_FILES, soon
from tests.orchestrator.scripted import ScriptedTarget

READY, NOT_READY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Target(ScriptedTarget):
    """A scripted target that has a tokenizer, in parts."""

    files: dict[str, bytes] = TOKENIZER_FILES

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        for name, data in self.files.items():
            for start in range(0, len(data), 1000):
                yield target_pb2.GetTokenizerResponse(file_name=name, data=data[start : start + 1000])


async def start_target(address: str, target: Target) -> grpc.aio.Server:
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    server.add_insecure_port(address)
    await server.start()
    return server


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OrchestratorSettings:
    monkeypatch.setattr(replicas, "RETRY_INTERVAL", 0.02)
    return OrchestratorSettings(listen=f"unix:{tmp_path}/edge", target=f"unix:{tmp_path}/target", draft=None, grace_s=5)


async def health(settings: OrchestratorSettings, wanted: int) -> None:
    """Return when the server's health is as wanted."""
    async with channel(settings.listen) as connection:
        stub = health_pb2_grpc.HealthStub(connection)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        async for response in stub.Watch(request, wait_for_ready=True):
            if response.status == wanted:
                return


async def test_it_is_ready_once_the_target_answers_and_drains_on_sigterm(settings: OrchestratorSettings) -> None:
    serving = asyncio.create_task(main(settings))
    await soon(health(settings, NOT_READY))
    target = Target()
    target_server = await start_target(settings.target[0], target)
    try:
        await soon(health(settings, READY))
        async with AsyncClient(settings.listen) as client:
            target.delay = 0.02
            stream = client.stream([1, 2, 3], max_new_tokens=20)
            first = await anext(stream)
            os.kill(os.getpid(), signal.SIGTERM)
            rest = [chunk async for chunk in stream]
            assert len(first.token_ids) + sum(len(chunk.token_ids) for chunk in rest) == 20
            assert stream.result.completions[0].finish_reason == "max_tokens"
        assert await asyncio.wait_for(serving, 10) == 0
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await target_server.stop(None)


async def test_a_tokenizer_that_cannot_be_used_is_said_so(settings: OrchestratorSettings) -> None:
    target = Target()
    target.files = {"tokenizer.model": b"sentencepiece"}
    target_server = await start_target(settings.target[0], target)
    with pytest.raises(StartError, match=r"no tokenizer.json, only tokenizer.model"):
        await asyncio.wait_for(main(settings), 10)
    target.files = {"tokenizer.json": b"{}"}
    with pytest.raises(StartError, match="cannot be read"):
        await asyncio.wait_for(main(settings), 10)
    await target_server.stop(None)
