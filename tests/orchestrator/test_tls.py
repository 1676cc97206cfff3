"""TLS and tokens on every hop: client, orchestrator and target, with files that are renewed meanwhile."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from foredraft.cli.up import with_port
from foredraft.serving.auth import new_token, token_hash
from foredraft.serving.server import Server
from foredraft.settings import OrchestratorSettings, TargetSettings
from foredraft.v1 import target_pb2, target_pb2_grpc
from orchestrator import replicas
from orchestrator.client import AsyncClient, GenerationError
from orchestrator.server import main
from tests.orchestrator.test_server import Target
from tests.serving.pki import Authority

WAIT_S = 20.0
SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


async def start_target(authority: Authority, address: str) -> Server:
    """A target that lets in only whom this authority, which has its file where the first one had, has signed for."""
    cert, key = authority.issue("target")
    server = Server.configured(
        TargetSettings(model="-", listen=address, tls_cert=cert, tls_key=key, tls_client_ca=authority.certificate),
        [SERVICE],
    )
    await server.start()
    server.add(target_pb2_grpc.add_TargetServiceServicer_to_server, Target())
    await server.set_serving()
    return server


async def text(client: AsyncClient) -> str:
    """What is generated, once the target can be reached."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(GenerationError):
                return (await client.generate([1, 2, 3], max_new_tokens=5)).text
            await asyncio.sleep(0.05)


async def test_every_hop_is_protected_and_goes_on_when_all_files_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "RETRY_INTERVAL", 0.02)
    token, tokens = new_token(), tmp_path / "tokens"
    tokens.write_text(token_hash(token).hex())
    authority = Authority(tmp_path / "pki")
    target = await start_target(authority, "127.0.0.1:0")
    cert, key = authority.issue("orchestrator")
    settings = OrchestratorSettings(
        listen=with_port("127.0.0.1:0"),
        target=(target.address,),
        draft=None,
        grace_s=1,
        target_wait_s=WAIT_S,
        auth_tokens=tokens,
        tls_cert=cert,
        tls_key=key,
        tls_ca=authority.certificate,
        tls_client_cert=cert,
        tls_client_key=key,
    )
    serving = asyncio.create_task(main(settings))
    try:
        async with AsyncClient(settings.listen, tls_ca=authority.certificate, token=token) as client:
            before = await text(client)
            await target.stop()
            renewed = Authority(tmp_path / "pki")  # in the same place: nothing signed by the old one counts any more
            renewed.issue("orchestrator")
            target = await start_target(renewed, target.address)
            assert await text(client) == before
        async with AsyncClient(settings.listen, tls_ca=renewed.certificate, token=token) as client:
            assert await text(client) == before
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await target.stop()
