"""Servers over real sockets: health, reflection, errors, draining."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from foredraft.errors import MAX_VIOLATIONS, ErrorDetails, Violation, error_details
from foredraft.serving.channel import channel
from foredraft.serving.server import Server, StartError
from foredraft.v1 import generation_pb2, generation_pb2_grpc, target_pb2, target_pb2_grpc
from tests.serving.tiny_server import SERVICES, TinyTarget, add_services

Status = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING = Status.SERVING, Status.NOT_SERVING


@asynccontextmanager
async def serving(
    address: str = "127.0.0.1:0", **options: int
) -> AsyncIterator[tuple[Server, TinyTarget, grpc.aio.Channel]]:
    server = Server(address, SERVICES, **options)
    await server.start()
    target = add_services(server)
    await server.set_serving()
    async with channel(server.address) as connection:
        yield server, target, connection
    await server.stop()


@asynccontextmanager
async def process(grace_s: float, *options: str) -> AsyncIterator[tuple[Process, grpc.aio.Channel]]:
    command = [sys.executable, "-m", "tests.serving.tiny_server", "127.0.0.1:0", str(grace_s), *options]
    child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    assert child.stdout is not None
    try:
        async with channel((await child.stdout.readline()).decode().strip()) as connection:
            while not options and await check(connection) != SERVING:
                pass
            yield child, connection
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def check(connection: grpc.aio.Channel, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(connection).Check(request)).status


async def error_of(call: grpc.aio.UnaryUnaryCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


def generate(connection: grpc.aio.Channel, **fields: str) -> grpc.aio.UnaryUnaryCall:
    stub = generation_pb2_grpc.GenerationServiceStub(connection)
    return stub.Generate(generation_pb2.GenerateRequest(**fields), timeout=10)


def generate_bytes(connection: grpc.aio.Channel, data: bytes) -> grpc.aio.UnaryUnaryCall:
    return connection.unary_unary("/foredraft.v1.GenerationService/Generate")(data, timeout=10)


def round_(round_id: int) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(round=target_pb2.Round(round_id=round_id))


async def test_health_is_not_serving_until_ready_and_calls_are_told_to_come_back() -> None:
    server = Server("127.0.0.1:0", SERVICES)
    await server.start()
    async with channel(server.address) as connection:
        assert [await check(connection, name) for name in ("", *SERVICES)] == [NOT_SERVING] * 3
        error = await error_of(generate(connection, text="hello"))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert error.details() == "the server is starting; try again later"
        assert error_details(error).retry_after_s == 1.0

        add_services(server)
        await server.set_serving()
        assert [await check(connection, name) for name in ("", *SERVICES)] == [SERVING] * 3
        assert (await generate(connection, request_id="r")).request_id == "r"
    await server.stop()


async def test_watchers_of_health_see_the_end() -> None:
    async with serving() as (server, _, connection):
        watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop())
        assert (await watch.read()).status == NOT_SERVING
        await stopping


async def test_reflection_lists_our_services_and_describes_them() -> None:
    async with serving() as (_, _, connection):
        call = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert listed >= {*SERVICES, "grpc.health.v1.Health"}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[0]))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()


async def test_details_of_an_error_arrive_intact() -> None:
    async with serving() as (_, _, connection):
        error = await error_of(generate(connection, text="invalid"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "sampling.top_p: must be in (0, 1], is 2 (and 1 more)"
    violations = (Violation("sampling.top_p", "must be in (0, 1], is 2"), Violation("text", "must be longer"))
    assert error_details(error) == ErrorDetails(violations)


async def test_many_long_violations_still_fit_the_trailers() -> None:
    async with serving() as (_, _, connection):
        error = await error_of(generate(connection, text="invalid everywhere"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").endswith("(and 999 more)")
    assert len(error_details(error).violations) == MAX_VIOLATIONS


async def test_details_of_an_error_in_the_middle_of_a_stream_arrive_intact() -> None:
    async with serving() as (_, _, connection):
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        call = stub.GenerateStream(generation_pb2.GenerateRequest(text="invalid"))
        assert [(await call.read()).chunk.sample_index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error_details(raised.value) == ErrorDetails((Violation("text", "must be longer"),))


async def test_an_unexpected_error_tells_neither_client_nor_log_what_it_quotes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as (_, _, connection):
        error = await error_of(generate(connection, text="broken: a secret prompt"))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details() == "internal error (KeyError); the server's log has more"
    record = next(record for record in caplog.records if record.name == "foredraft.serving.rpc")
    assert "/foredraft.v1.GenerationService/Generate failed with KeyError" in record.getMessage()
    assert "in Generate" in record.getMessage()
    assert "secret" not in caplog.text


async def test_text_that_is_no_utf8_is_an_invalid_argument_naming_the_field() -> None:
    chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="XXX")])
    data = generation_pb2.GenerateRequest(chat=chat).SerializeToString().replace(b"XXX", b"\xff\xfeX")
    async with serving() as (_, _, connection):
        error = await error_of(generate_bytes(connection, data))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    violation = Violation("chat.messages[0].content", "must be valid UTF-8, and is not")
    assert error_details(error).violations == (violation,)


async def test_bytes_that_are_no_message_are_an_invalid_argument() -> None:
    async with serving() as (_, _, connection):
        error = await error_of(generate_bytes(connection, b"\xff\xff"))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert [v.field for v in error_details(error).violations] == ["request"]

        call = connection.stream_stream("/foredraft.v1.TargetService/Verify")()
        await call.write(b"\xff\xff")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_over_the_limit_exhausts_resources() -> None:
    async with serving(max_message_bytes=1000) as (_, _, connection):
        error = await error_of(generate(connection, text="x" * 2000))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await generate(connection, text="x" * 500)).request_id == ""


@pytest.mark.parametrize("ending", ["close", "half-close", "cancel", "deadline", "channel"])
async def test_a_session_is_released_however_its_stream_ends(ending: str) -> None:
    async with serving() as (server, target, _), channel(server.address) as connection:
        stub = target_pb2_grpc.TargetServiceStub(connection)
        call = stub.Verify(timeout=0.2 if ending == "deadline" else None)
        await call.write(round_(7))
        assert (await call.read()).verdict.round_id == 7
        assert not target.released.is_set()
        if ending == "close":
            await call.write(target_pb2.VerifyRequest(close=target_pb2.CloseTarget()))
        elif ending == "half-close":
            await call.done_writing()
        elif ending == "cancel":
            call.cancel()
        elif ending == "channel":
            await connection.close()
        await asyncio.wait_for(target.released.wait(), 10)


async def test_draining_refuses_new_calls_and_lets_running_ones_end() -> None:
    async with serving() as (server, _, connection):
        call = target_pb2_grpc.TargetServiceStub(connection).Verify()
        await call.write(round_(1))
        await call.read()
        stopping = asyncio.create_task(server.stop(grace_s=60))
        while await check(connection) == SERVING:
            pass
        error = await error_of(generate(connection, text="hello"))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert error_details(error).retry_after_s == 1.0

        await call.write(round_(2))
        assert (await call.read()).verdict.round_id == 2
        await call.write(target_pb2.VerifyRequest(close=target_pb2.CloseTarget()))
        assert await call.code() == grpc.StatusCode.OK
        await asyncio.wait_for(stopping, 10)


async def test_calls_that_outlast_the_grace_period_end_with_unavailable() -> None:
    async with serving() as (server, target, connection):
        call = target_pb2_grpc.TargetServiceStub(connection).Verify()
        await call.write(round_(1))
        await call.read()
        await asyncio.wait_for(server.stop(grace_s=0.05), 10)
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(target.released.wait(), 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_an_idle_server_with_status_0(number: int) -> None:
    async with process(grace_s=60) as (child, _):
        child.send_signal(number)
        assert await asyncio.wait_for(child.wait(), 20) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_server_that_is_still_loading(number: int) -> None:
    async with process(60, "hang") as (child, connection):
        assert await check(connection) == NOT_SERVING
        child.send_signal(number)
        assert await asyncio.wait_for(child.wait(), 20) == 128 + number


async def test_after_sigterm_a_running_session_ends_in_its_own_time() -> None:
    async with process(grace_s=60) as (child, connection):
        call = target_pb2_grpc.TargetServiceStub(connection).Verify()
        await call.write(round_(1))
        await call.read()
        child.terminate()
        while await check(connection) == SERVING:
            pass
        await call.write(round_(2))
        assert (await call.read()).verdict.round_id == 2
        await call.write(target_pb2.VerifyRequest(close=target_pb2.CloseTarget()))
        assert await call.code() == grpc.StatusCode.OK
        assert await asyncio.wait_for(child.wait(), 20) == 0


async def test_a_second_signal_ends_the_server_at_once() -> None:
    async with process(grace_s=3600) as (child, connection):
        call = target_pb2_grpc.TargetServiceStub(connection).Verify()
        await call.write(round_(1))
        await call.read()
        child.terminate()
        while await check(connection) == SERVING:
            pass
        child.terminate()
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(child.wait(), 20) == 0


async def test_shut_down_after_a_failure_gives_a_failing_exit_code() -> None:
    async with serving() as (server, _, _):
        server.shut_down(1)
        assert await server.wait() == 1


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_an_address_in_use_is_refused_with_a_sentence(kind: str, tmp_path: Path) -> None:
    async with serving("127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket") as (server, _, connection):
        with pytest.raises(StartError) as raised:
            await Server(server.address, SERVICES).start()
        assert str(raised.value) == (
            f"cannot listen on {server.address}: Address already in use; free it or choose another address"
        )
        assert await check(connection) == SERVING


async def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with serving(f"unix:{path}") as (_, _, connection):
        assert await check(connection) == SERVING


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("localhost", 'the address must be "host:port" or "unix:/path"'),
        (":0", 'the address must be "host:port" or "unix:/path"'),
        ("localhost:http", 'the address must be "host:port" or "unix:/path"'),
        ("192.0.2.1:0", "Cannot assign requested address"),
        (f"unix:{__file__}", "there is a file, and it is no socket"),
        ("unix:/no/such/directory/socket", "no such directory"),
    ],
)
async def test_an_address_that_cannot_be_had_is_refused_with_the_reason(address: str, reason: str) -> None:
    with pytest.raises(StartError, match=f"cannot listen on {address}: {reason}; "):
        await Server(address, SERVICES).start()


async def test_a_process_that_cannot_start_says_why_and_fails_without_a_traceback() -> None:
    async with serving() as (server, _, _):
        command = [sys.executable, "-m", "tests.serving.tiny_server", server.address, "1"]
        child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        _, stderr = await asyncio.wait_for(child.communicate(), 20)
    assert child.returncode == 1
    assert f"error: cannot listen on {server.address}: Address already in use" in stderr.decode()
    assert "Traceback" not in stderr.decode()
