"""The three services on emulated models, in this process and over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from draft_service.server import SERVICE_NAME as DRAFT
from draft_service.server import start_draft
from foredraft.serving.server import Server
from foredraft.settings import DraftSettings, OrchestratorSettings, TargetSettings
from foredraft.v1 import generation_pb2_grpc
from orchestrator.backends import Backends
from orchestrator.client import AsyncClient
from orchestrator.decode import Decoder
from orchestrator.metrics import Metrics
from orchestrator.server import SERVICE as ORCHESTRATOR
from orchestrator.service import GenerationServicer
from orchestrator.tokenizer import Tokenizer
from target_service.server import SERVICE_NAME as TARGET
from target_service.server import start_target

EMULATE = "target=5ms+0.1ms/token,draft=1ms,accept=0.7"


@asynccontextmanager
async def services(directory: Path) -> AsyncIterator[AsyncClient]:
    """Target, draft and orchestrator on Unix sockets, and a client."""
    addresses = {name: f"unix:{directory}/{name}" for name in (TARGET, DRAFT, ORCHESTRATOR)}
    servers = {name: Server(address, [name]) for name, address in addresses.items()}
    for server in servers.values():
        await server.start()
    target = await start_target(TargetSettings(emulate=EMULATE), servers[TARGET])
    draft = await start_draft(DraftSettings(emulate=EMULATE, drafter="model"), servers[DRAFT])
    await servers[TARGET].set_serving()
    await servers[DRAFT].set_serving()
    # A loaded machine must not turn rounds into plain ones.
    settings = OrchestratorSettings(target=addresses[TARGET], draft=addresses[DRAFT], draft_timeout_s=20)
    backends = Backends(settings)
    await backends.connect()
    tokenizer = Tokenizer(await backends.fetch_tokenizer())
    metrics = Metrics(servers[ORCHESTRATOR].metrics)
    servicer = GenerationServicer(tokenizer, Decoder(backends, settings), backends, settings, metrics)
    servers[ORCHESTRATOR].add(generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
    await servers[ORCHESTRATOR].set_serving()
    try:
        async with AsyncClient(addresses[ORCHESTRATOR]) as client:
            yield client
    finally:
        await backends.close()
        for server in reversed(servers.values()):
            await server.stop()
        await draft.stop()
        await target.stop()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_text_is_the_same_in_every_mode_and_speculation_happens(tmp_path: Path, temperature: float) -> None:
    async with services(tmp_path) as client:
        request = {"temperature": temperature, "seed": 3, "max_new_tokens": 60}
        plain = (await client.generate("Hello, 世界!", mode="plain", **request)).completions[0]
        assert plain.completion_token_count == 60
        for mode in ("sequential", "overlapped"):
            one = (await client.generate("Hello, 世界!", mode=mode, draft_tokens=3, **request)).completions[0]
            assert one.text == plain.text
            assert one.statistics.accepted > 0
            assert one.statistics.accepted < one.statistics.drafted
            assert not one.statistics.degraded_reason


async def test_models_are_called_emulated(tmp_path: Path) -> None:
    async with services(tmp_path) as client:
        models = await client.get_model()
        assert models.target.name == "emulated target (5ms+0.1ms/token)"
        assert models.draft.name == "emulated draft (1ms, accept 0.7)"
