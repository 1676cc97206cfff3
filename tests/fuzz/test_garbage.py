"""Bytes that are no gRPC at all on the services' ports: they go on serving, and nothing stays behind."""

import asyncio
import contextlib
import struct
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from foredraft.serving.channel import channel
from foredraft.serving.server import Server
from foredraft.serving.tls import ClientTls
from tests.fuzz.conftest import Stack
from tests.serving.pki import Authority
from tests.serving.tiny_server import SERVICES, add_services

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
CLIENT_HELLO = bytes.fromhex("16030100310100002d0303") + bytes(32) + bytes.fromhex("000002130101000002")
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAIT_S = 10.0

frames = st.builds(
    lambda kind, flags, stream, payload: struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + stream + payload,
    st.integers(0, 12),
    st.integers(0, 255),
    st.sampled_from([b"\0\0\0\0", b"\0\0\0\1", b"\0\0\0\2", b"\xff\xff\xff\xff"]),
    st.binary(max_size=40),
)
garbage = (
    st.binary(max_size=200)
    | st.lists(frames, max_size=5).map(lambda made: PREFACE + SETTINGS + b"".join(made))
    | st.binary(max_size=40).map(lambda rest: PREFACE + rest)
)
fuzzed = settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])


async def send(address: str, data: bytes) -> None:
    """Send bytes, and read until the server hangs up or has said what it has to say."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.write_eof()
            await asyncio.wait_for(reader.read(), WAIT_S)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def serves(address: str, tls: ClientTls | None = None) -> bool:
    async with channel(address, tls) as connection:
        response = await health_pb2_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("service", ["target", "draft", "orchestrator"])
@fuzzed
@given(data=garbage)
@example(data=b"")
@example(data=REQUEST)
@example(data=CLIENT_HELLO)
@example(data=PREFACE + SETTINGS)
async def test_any_bytes_on_a_port_leave_the_server_serving(stack: Stack, service: str, data: bytes) -> None:
    await send(stack.addresses[service], data)
    assert await serves(stack.addresses[service])
    await stack.until_empty()


async def test_any_bytes_on_a_port_with_tls_leave_the_server_serving(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    server = Server("127.0.0.1:0", SERVICES, tls=authority.server(mutual=True), health_address="127.0.0.1:0")
    await server.start()
    add_services(server)
    await server.set_serving()
    assert server.health_address is not None
    for address in (server.address, server.health_address):
        for data in (b"", b"\0" * 1000, REQUEST, CLIENT_HELLO, CLIENT_HELLO[:20], PREFACE + SETTINGS):
            await send(address, data)
    assert await serves(server.address, authority.client(signed_by=authority))
    assert await serves(server.health_address)
    await server.stop()


async def test_connections_that_say_nothing_keep_nobody_out(stack: Stack) -> None:
    host, _, port = stack.addresses["orchestrator"].rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
    assert await serves(stack.addresses["orchestrator"])
    for _, writer in silent:
        writer.close()


async def test_a_message_that_grows_when_decompressed_is_refused_by_its_size(stack: Stack) -> None:
    async with channel(stack.addresses["orchestrator"]) as connection:
        call = connection.unary_unary("/foredraft.v1.GenerationService/Generate")(
            b"a" * (64 * 2**20), compression=grpc.Compression.Gzip, timeout=60
        )
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await serves(stack.addresses["orchestrator"])
