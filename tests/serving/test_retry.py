"""Which calls gRPC tries again by itself."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from foredraft.serving.channel import channel
from foredraft.v1 import generation_pb2, generation_pb2_grpc
from orchestrator.client import AsyncClient, GenerationError


class Away(generation_pb2_grpc.GenerationServiceServicer):
    """Is away for the first `times` calls."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    async def _maybe(self, context: Any) -> None:
        self.calls += 1
        if self.calls <= self.times:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")

    async def Detokenize(self, request: Any, context: Any) -> generation_pb2.DetokenizeResponse:
        await self._maybe(context)
        return generation_pb2.DetokenizeResponse(text="here")

    async def Generate(self, request: Any, context: Any) -> generation_pb2.GenerateResponse:
        await self._maybe(context)
        return generation_pb2.GenerateResponse()


async def serve(servicer: Away, directory: Path) -> tuple[grpc.aio.Server, str]:
    server, address = grpc.aio.server(), f"unix:{directory}/socket"
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server, address


async def test_questions_are_asked_again_while_a_server_is_away(tmp_path: Path) -> None:
    away = Away(2)
    server, address = await serve(away, tmp_path)
    async with AsyncClient(address) as client:
        assert await client.detokenize([1]) == "here"
    away.calls = 0
    async with channel(address) as made:
        stub = generation_pb2_grpc.GenerationServiceStub(made)
        response = await stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[1]))
    assert (response.text, away.calls) == ("here", 3)
    await server.stop(None)


async def test_a_server_that_stays_away_is_asked_three_times_and_no_more(tmp_path: Path) -> None:
    away = Away(100)
    server, address = await serve(away, tmp_path)
    async with AsyncClient(address) as client:
        with pytest.raises(GenerationError):
            await client.detokenize([1])
    assert away.calls == 3
    await server.stop(None)


async def test_generating_is_never_tried_again_unasked(tmp_path: Path) -> None:
    away = Away(1)
    server, address = await serve(away, tmp_path)
    async with AsyncClient(address) as client:
        with pytest.raises(GenerationError):
            await client.generate("x")
    assert away.calls == 1
    await server.stop(None)
