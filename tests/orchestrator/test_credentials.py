"""How the clients of the public API are let in: TLS and tokens, with the orchestrator's own servicer."""

import asyncio
from pathlib import Path

import grpc
import pytest

from foredraft.serving.auth import Tokens, new_token, token_hash
from foredraft.serving.server import Server
from foredraft.v1 import generation_pb2_grpc
from orchestrator.client import AsyncClient, Client, Credentials, GenerationError, TlsError
from orchestrator.server import SERVICE
from tests.serving.pki import Authority
from tests.serving.tiny_server import TinyGeneration


async def test_both_clients_speak_mutual_tls_and_send_their_token(tmp_path: Path) -> None:
    authority, token, file = Authority(tmp_path / "pki"), new_token(), tmp_path / "tokens"
    file.write_text(token_hash(token).hex())
    server = Server("127.0.0.1:0", [SERVICE], tls=authority.server(mutual=True), tokens=Tokens(file))
    await server.start()
    server.add(generation_pb2_grpc.add_GenerationServiceServicer_to_server, TinyGeneration())
    await server.set_serving()
    cert, key = authority.issue("client")
    credentials: Credentials = {
        "tls_ca": authority.certificate,
        "tls_client_cert": cert,
        "tls_client_key": str(key),
        "token": token,
    }
    async with AsyncClient(server.address, **credentials) as client:
        assert (await client.generate("Once", request_id="mine")).request_id == "mine"
    with Client(server.address, **credentials) as blocking:
        generated = await asyncio.to_thread(blocking.generate, "Once", request_id="mine")
        assert generated.request_id == "mine"
    async with AsyncClient(server.address, **(credentials | {"token": new_token()})) as client:
        with pytest.raises(GenerationError) as raised:
            await client.generate("Once")
        assert raised.value.status is grpc.StatusCode.UNAUTHENTICATED
    async with AsyncClient(server.address, tls_ca=authority.certificate, token=token) as client:
        with pytest.raises(GenerationError) as raised:
            await client.generate("Once")
        assert raised.value.status is grpc.StatusCode.UNAVAILABLE
    await server.stop()


def test_a_token_is_not_sent_in_plaintext_to_another_machine_unless_asked_for() -> None:
    with pytest.raises(ValueError, match=r"token: without TLS, anyone on the way to example\.com:1 could read it"):
        Client("example.com:1", token="secret")
    Client("example.com:1", token="secret", insecure=True).close()
    Client("localhost:1", token="secret").close()


@pytest.mark.parametrize("token", ["my secret", "secret\n", "sécret"])
def test_a_token_that_cannot_be_sent_is_refused_without_repeating_it(token: str) -> None:
    with pytest.raises(ValueError, match="token: must be printable ASCII without blanks") as raised:
        Client("localhost:1", token=token)
    assert token not in str(raised.value)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"tls_ca: cannot read .*: No such file or directory"):
        Client("localhost:1", tls_ca=tmp_path / "missing.pem")
    with pytest.raises(ValueError, match="must be given together"):
        Client("localhost:1", tls_client_cert=tmp_path / "client.pem")
