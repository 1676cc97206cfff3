import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foredraft.cli.up import with_port
from foredraft.serving.channel import channel
from foredraft.settings import OrchestratorSettings
from orchestrator.server import SERVICE, main
from tests import tiny
from tests.draft_service import kit as draft_kit
from tests.target_service import kit as target_kit

START_S = 60.0


@dataclass(frozen=True)
class Stack:
    """The three services in this process, with blocking channels to them, which calls in threads may use."""

    target: target_kit.Service
    draft: draft_kit.Service
    addresses: dict[str, str]
    channels: dict[str, grpc.Channel]

    async def until_empty(self) -> None:
        """Returns once no session, place or slot is taken, and fails if that does not come."""
        await self.target.until_empty()
        await self.draft.until((0, 0, 0))


@pytest.fixture(scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    directory = tmp_path_factory.mktemp("fuzz")
    model = tiny.save_model(directory / "model", dtype="float64")
    async with target_kit.running(model) as target, draft_kit.running(model, drafter="combined") as draft:
        settings = OrchestratorSettings(
            listen=with_port("127.0.0.1:0"), target=target.server.address, draft=draft.server.address, grace_s=1
        )
        serving = asyncio.create_task(main(settings))
        async with channel(settings.listen) as connection:
            await asyncio.wait_for(until_serving(connection), START_S)
        addresses = {"target": target.server.address, "draft": draft.server.address, "orchestrator": settings.listen}
        channels = {service: grpc.insecure_channel(address) for service, address in addresses.items()}
        yield Stack(target, draft, addresses, channels)
        for opened in channels.values():
            opened.close()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def until_serving(connection: grpc.aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(connection).Watch
    async for response in watch(health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True):
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            return
