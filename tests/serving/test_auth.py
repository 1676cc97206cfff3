"""Bearer tokens over a real socket: let in, refused, added and revoked without a restart, never logged."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from foredraft.serving.auth import Tokens, TokensError, new_token, token_hash
from foredraft.serving.channel import channel
from foredraft.serving.server import Server
from foredraft.v1 import generation_pb2, generation_pb2_grpc
from tests.serving.tiny_server import SERVICES, add_services

ASK = 'this server needs a token: send the metadata "authorization: Bearer TOKEN"'
UNKNOWN = "the token is not one of those that this server lets in"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def write(file: Path, text: str) -> None:
    file.write_text(text)


def let_in(file: Path, *tokens: str) -> None:
    file.write_text("# who may come\n\n" + "".join(f"{token_hash(token).hex()} somebody\n" for token in tokens))


def remove(file: Path) -> None:
    file.unlink()


@asynccontextmanager
async def serving(file: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = Server("127.0.0.1:0", SERVICES, tokens=Tokens(file))
    await server.start()
    add_services(server)
    await server.set_serving()
    async with channel(server.address) as connection:
        yield connection
    await server.stop()


async def answer(connection: grpc.aio.Channel, *authorization: str) -> str | None:
    """What is wrong with these authorizations, None if the call went through."""
    stub = generation_pb2_grpc.GenerationServiceStub(connection)
    metadata = [("authorization", value) for value in authorization]
    call = stub.Generate(generation_pb2.GenerateRequest(), timeout=10, metadata=metadata)
    if await call.code() is grpc.StatusCode.OK:
        return None
    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    return await call.details()


async def test_a_call_needs_a_token_that_is_let_in(file: Path) -> None:
    one, other = new_token(), new_token()
    let_in(file, one, other)
    async with serving(file) as connection:
        assert await answer(connection, f"Bearer {one}") is None
        assert await answer(connection, f"bearer {other}") is None
        assert await answer(connection, f"Bearer {new_token()}") == UNKNOWN
        assert await answer(connection, f"Bearer {token_hash(one).hex()}") == UNKNOWN
        for bad in (
            (),
            ("",),
            ("Bearer",),
            ("Bearer ",),
            (one,),
            (f"Basic {one}",),
            (f"Bearer {one}", f"Bearer {one}"),
        ):
            assert await answer(connection, *bad) == ASK


async def test_streams_need_a_token_too_and_nothing_of_them_is_read(file: Path) -> None:
    let_in(file, new_token())
    async with serving(file) as connection:
        call = connection.stream_stream("/foredraft.v1.TargetService/Verify")()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        stream = connection.unary_stream("/foredraft.v1.GenerationService/GenerateStream")(b"\xff")
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token_and_reflection_does(file: Path) -> None:
    token = new_token()
    let_in(file, token)
    async with serving(file) as connection:
        response = await health_pb2_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo
        assert await reflect().code() is grpc.StatusCode.UNAUTHENTICATED
        call = reflect(metadata=[("authorization", f"Bearer {token}")])
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_tokens_are_added_and_revoked_without_a_restart(file: Path) -> None:
    old, new = new_token(), new_token()
    let_in(file, old)
    async with serving(file) as connection:
        assert await answer(connection, f"Bearer {new}") == UNKNOWN
        let_in(file, old, new)
        assert await answer(connection, f"Bearer {old}") is None
        assert await answer(connection, f"Bearer {new}") is None
        replacement = file.with_name("replacement")
        let_in(replacement, new)
        replacement.rename(file)
        assert await answer(connection, f"Bearer {old}") == UNKNOWN
        let_in(file)
        assert await answer(connection, f"Bearer {new}") == UNKNOWN


async def test_a_file_that_cannot_be_used_any_more_leaves_the_old_tokens_in_force(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = new_token()
    let_in(file, token)
    async with serving(file) as connection:
        write(file, f"{token}\n")
        for _ in range(3):
            assert await answer(connection, f"Bearer {token}") is None
        assert caplog.text.count("the tokens known so far stay: auth_tokens: line 1 of") == 1
        remove(file)
        for _ in range(3):
            assert await answer(connection, f"Bearer {token}") is None
        assert caplog.text.count("cannot read") == 1
        let_in(file, new_token())
        assert await answer(connection, f"Bearer {token}") == UNKNOWN
    assert token not in caplog.text
    assert token_hash(token).hex() not in caplog.text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "auth_tokens: cannot read .*: No such file or directory"),
        (b"hello\n", "auth_tokens: line 1 of .* must begin with the SHA-256 of a token in 64 hex digits"),
        (b"\xff\xff", "auth_tokens: .* is no text"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(file: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TokensError, match=sentence):
        Tokens(file)
