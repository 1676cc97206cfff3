"""The health service: what it says, and that a client which does not read it holds up nobody."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foredraft.serving import health
from foredraft.serving.channel import channel
from foredraft.serving.server import Server

SERVICE = "foredraft.v1.TargetService"
Status = health_pb2.HealthCheckResponse
TIMEOUT_S = 20

# Types and flags of HTTP/2 frames, and a setting (RFC 9113, 6).
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, health_pb2_grpc.HealthStub]]:
    server = Server("127.0.0.1:0", [SERVICE])
    await server.start()
    await server.set_serving()
    async with channel(server.address) as connection:
        yield server, health_pb2_grpc.HealthStub(connection)
        await asyncio.wait_for(server.stop(), TIMEOUT_S)


def asking(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


def header(name: bytes, value: bytes) -> bytes:
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    head = await reader.readexactly(9)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


@asynccontextmanager
async def watcher_that_takes_nothing(address: str) -> AsyncIterator[None]:
    """A client that watches and lets the server send no data; the server's answer to it has begun."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/grpc.health.v1.Health/Watch",
        b":authority": b"client",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    message = asking(SERVICE).SerializeToString()
    writer.write(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
        + frame(HEADERS, END_HEADERS, 1, b"".join(header(*pair) for pair in headers.items()))
        + frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", len(message)) + message)
    )
    while True:
        kind, flags, content = await asyncio.wait_for(read_frame(reader), TIMEOUT_S)
        if kind in (SETTINGS, PING) and not flags & ACK:
            writer.write(frame(kind, ACK, 0, content if kind == PING else b""))
        elif kind == HEADERS:
            break
    yield
    writer.close()


async def test_a_watcher_that_takes_nothing_holds_up_neither_others_nor_the_end() -> None:
    async with serving() as (server, stub), watcher_that_takes_nothing(server.address):
        watch = stub.Watch(asking(SERVICE), timeout=TIMEOUT_S)
        assert (await watch.read()).status == Status.SERVING
        stopping = asyncio.create_task(server.stop())
        assert (await watch.read()).status == Status.NOT_SERVING
        await asyncio.wait_for(stopping, TIMEOUT_S)


async def test_a_service_that_is_not_here_is_not_found_and_watched_as_unknown() -> None:
    async with serving() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(asking("other"))
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(asking("other"), timeout=TIMEOUT_S)
        assert (await watch.read()).status == Status.SERVICE_UNKNOWN
        assert not watch.done()
        watch.cancel()


async def test_one_watcher_too_many_is_refused_until_another_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS", 2)
    async with serving() as (_, stub):
        watches = [stub.Watch(asking(service), timeout=TIMEOUT_S) for service in ("", "other")]
        for watch in watches:
            await watch.read()
        refused = stub.Watch(asking(SERVICE))
        assert await refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(asking(SERVICE))).status == Status.SERVING
        watches[0].cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while await (watch := stub.Watch(asking(SERVICE))).read() is grpc.aio.EOF:
                pass
        watch.cancel()
