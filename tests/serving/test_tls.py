"""TLS over real sockets: who gets in, who does not, and renewal without a restart."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from foredraft.serving.address import is_loopback
from foredraft.serving.channel import channel
from foredraft.serving.server import AnySettings, Server, StartError
from foredraft.serving.tls import ClientTls, TlsError
from foredraft.settings import DraftSettings, OrchestratorSettings, TargetSettings
from foredraft.v1 import generation_pb2, generation_pb2_grpc
from tests.serving.pki import Authority
from tests.serving.tiny_server import SERVICES, add_services

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def others(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "others")


@asynccontextmanager
async def serving(address: str = "127.0.0.1:0", **options: Any) -> AsyncIterator[Server]:
    server = Server(address, SERVICES, **options)
    await server.start()
    add_services(server)
    await server.set_serving()
    try:
        yield server
    finally:
        await server.stop()


async def answer(server: Server, tls: ClientTls | None, authority: str | None = None) -> str:
    """What a new connection brings: "OK", or the status."""
    async with channel(server.address, tls, authority=authority) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        try:
            await stub.Generate(generation_pb2.GenerateRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def health(address: str) -> Any:
    async with grpc.aio.insecure_channel(address) as connection:
        return (await health_pb2_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest(), timeout=10)).status


async def reflection_status(connection: grpc.aio.Channel) -> grpc.StatusCode:
    call = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo()
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.done_writing()
        await call.read()
    return await call.code()


async def served_certificate(server: Server) -> str:
    host, _, port = server.address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def test_a_server_with_tls_lets_in_who_trusts_its_authority_and_nobody_in_plaintext(
    ours: Authority, others: Authority
) -> None:
    async with serving(tls=ours.server()) as server:
        assert await answer(server, ours.client()) == "OK"
        assert await answer(server, others.client()) == "UNAVAILABLE"
        assert await answer(server, None) == "UNAVAILABLE"


async def test_a_certificate_must_be_for_the_host_or_for_the_authority_that_is_asked_for(ours: Authority) -> None:
    async with serving(tls=ours.server("target.example")) as server:
        assert await answer(server, ours.client()) == "UNAVAILABLE"
        assert await answer(server, ours.client(), authority="target.example") == "OK"
        assert await answer(server, ours.client(), authority="draft.example") == "UNAVAILABLE"


async def test_with_mutual_tls_a_client_needs_a_certificate_of_the_right_authority(
    ours: Authority, others: Authority
) -> None:
    async with serving(tls=ours.server(mutual=True)) as server:
        assert await answer(server, ours.client(signed_by=ours)) == "OK"
        assert await answer(server, ours.client()) == "UNAVAILABLE"
        assert await answer(server, ours.client(signed_by=others)) == "UNAVAILABLE"


async def test_a_renewed_certificate_is_served_without_a_restart_and_running_calls_go_on(ours: Authority) -> None:
    async with serving(tls=ours.server()) as server, channel(server.address, ours.client()) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        await stub.Generate(generation_pb2.GenerateRequest())
        before = await served_certificate(server)
        cert, _ = ours.issue("server")
        after = await served_certificate(server)
        assert before != after
        assert after.strip() in cert.read_text()
        await stub.Generate(generation_pb2.GenerateRequest())


async def test_the_authority_of_the_clients_can_be_replaced_too(ours: Authority, others: Authority) -> None:
    async with serving(tls=ours.server(mutual=True)) as server:
        client = ours.client(signed_by=others)
        trusting = ClientTls(ours.directory / "old.pem", client.cert, client.key)
        trusting.ca.write_bytes(ours.certificate.read_bytes())
        assert await answer(server, trusting) == "UNAVAILABLE"
        ours.certificate.write_bytes(others.certificate.read_bytes())
        assert await answer(server, trusting) == "OK"


async def test_files_that_do_not_fit_together_yet_leave_the_old_ones_in_use(
    ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tls = ours.server()
    async with serving(tls=tls) as server:
        before = await served_certificate(server)
        cert, key = ours.issue("renewed")
        tls.cert.write_bytes(cert.read_bytes())
        assert await served_certificate(server) == before
        assert await served_certificate(server) == before
        assert caplog.text.count("the TLS files in use so far stay") == 1
        tls.key.unlink()
        assert await answer(server, ours.client()) == "OK"
        tls.key.write_bytes(key.read_bytes())
        assert await served_certificate(server) != before
    assert "PRIVATE KEY" not in caplog.text


async def test_a_client_sees_that_its_files_have_changed(ours: Authority) -> None:
    tls = ours.client(signed_by=ours)
    before = tls.fingerprint()
    assert tls.fingerprint() == before
    ours.issue("client")
    assert tls.fingerprint() != before


@pytest.mark.parametrize("damage", ["missing", "no certificate", "other key"])
async def test_files_that_cannot_be_used_are_refused_at_the_start_with_a_sentence(damage: str, ours: Authority) -> None:
    tls = ours.server()
    if damage == "missing":
        tls.cert.unlink()
        sentence = f"tls_cert: cannot read {tls.cert}: No such file or directory"
    elif damage == "no certificate":
        tls.cert.write_text("hello")
        sentence = f"tls_cert {tls.cert} and tls_key {tls.key} must be a PEM certificate chain"
    else:
        tls.key.write_bytes(ours.issue("other")[1].read_bytes())
        sentence = "key values mismatch"
    with pytest.raises(StartError, match=sentence):
        await Server("127.0.0.1:0", SERVICES, tls=tls).start()


def test_a_client_refuses_files_that_cannot_be_used(ours: Authority) -> None:
    ours.certificate.write_text("hello")
    with pytest.raises(TlsError, match=f"tls_ca: {ours.certificate} must hold PEM certificates of authorities"):
        ours.client().credentials()


async def test_an_address_for_other_machines_needs_tls_or_consent(
    ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StartError, match=r"0\.0\.0\.0:0 can be reached from other machines, and there is no TLS"):
        await Server("0.0.0.0:0", SERVICES).start()
    for protection, warned in (
        ({"insecure": True}, True),
        ({"tls": ours.server()}, True),
        ({"tls": ours.server(mutual=True)}, False),
    ):
        caplog.clear()
        server = Server("0.0.0.0:0", SERVICES, **protection)  # type: ignore[arg-type]
        await server.start()
        await server.stop()
        assert ("whoever can reach" in caplog.text) == warned


@pytest.mark.parametrize("kind", [TargetSettings, DraftSettings, OrchestratorSettings])
async def test_the_options_of_every_service_reach_its_server(kind: type[AnySettings], ours: Authority) -> None:
    cert, key = ours.issue("server")
    options: dict[str, Any] = {"listen": "127.0.0.1:0", "health_listen": "127.0.0.1:0", "tls_cert": cert}
    options |= {"tls_key": key, "tls_client_ca": ours.certificate, "reflection": False, "max_message_bytes": 2**16}
    options |= {"model": "-"} if kind is TargetSettings else {}
    server = Server.configured(kind(**options), SERVICES)
    await server.start()
    add_services(server)
    await server.set_serving()
    assert await answer(server, ours.client(signed_by=ours)) == "OK"
    assert await answer(server, ours.client()) == "UNAVAILABLE"
    assert await health(str(server.health_address)) == SERVING
    async with channel(server.address, ours.client(signed_by=ours)) as connection:
        assert await reflection_status(connection) is grpc.StatusCode.UNIMPLEMENTED
        generate = generation_pb2_grpc.GenerationServiceStub(connection).Generate
        too_long = generate(generation_pb2.GenerateRequest(text="x" * 2**17))
        assert await too_long.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop()
    open_to_all = kind(**{**options, "listen": "0.0.0.0:0", "tls_cert": None, "tls_key": None, "tls_client_ca": None})
    with pytest.raises(StartError, match="allow it with --insecure"):
        await Server.configured(open_to_all, SERVICES).start()
    allowed = Server.configured(open_to_all.model_copy(update={"insecure": True}), SERVICES)
    await allowed.start()
    await allowed.stop()


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.1.2.3:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/socket", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("192.0.2.1:1", False),
        ("[::ffff:192.0.2.1]:1", False),
        ("localhost.example:1", False),
    ],
)
def test_what_only_this_machine_can_reach(address: str, local: bool) -> None:
    assert is_loopback(address) == local


async def test_through_a_unix_socket_there_is_no_tls(ours: Authority, tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/socket", tls=ours.server()) as server:
        assert await answer(server, None) == "OK"
        assert await answer(server, ours.client()) == "OK"


async def test_the_health_port_answers_in_plaintext_and_serves_nothing_else(ours: Authority) -> None:
    server = Server("127.0.0.1:0", SERVICES, tls=ours.server(mutual=True), health_address="127.0.0.1:0")
    await server.start()
    assert server.health_address is not None
    assert await health(server.health_address) == health_pb2.HealthCheckResponse.NOT_SERVING
    add_services(server)
    await server.set_serving()
    assert await health(server.health_address) == SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await health(server.address)
    async with channel(server.health_address) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generation_pb2_grpc.GenerationServiceStub(connection).Generate(generation_pb2.GenerateRequest())
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop()


async def test_a_health_address_in_use_is_refused() -> None:
    async with serving() as first:
        with pytest.raises(StartError, match=f"cannot listen on {first.address}: Address already in use"):
            await Server("127.0.0.1:0", SERVICES, health_address=first.address).start()


@pytest.mark.parametrize("on", [True, False])
async def test_reflection_can_be_switched_off(on: bool) -> None:
    async with serving(reflection=on) as server, channel(server.address) as connection:
        expected = grpc.StatusCode.OK if on else grpc.StatusCode.UNIMPLEMENTED
        assert await reflection_status(connection) is expected
