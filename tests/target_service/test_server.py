"""The server as a whole: identity, start, draining and failure."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoTokenizer

from foredraft.serving import model_thread
from foredraft.serving.channel import channel
from foredraft.serving.server import StartError
from foredraft.settings import TargetSettings
from foredraft.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.server import main
from tests import tiny
from tests.target_service.kit import CONTEXT, Client, Service, open_message, running, until

PROMPT = tiny.tokenizer().encode("The quick brown fox")


async def test_the_model_is_identified(service: Service, model: Path) -> None:
    identity = (await service.stub.GetModel(target_pb2.TargetServiceGetModelRequest())).model
    assert identity.name == str(model)
    assert (identity.dtype, identity.device) == ("float64", "cpu")
    assert (identity.context_length, identity.max_sessions) == (CONTEXT, 8)
    assert identity.vocabulary_size == tiny.VOCABULARY_SIZE
    assert list(identity.eos_token_ids) == [tiny.tokenizer().eos_token_id]
    assert len(identity.weights_hash) == len(identity.vocabulary_hash) == 64
    assert identity.parameter_count == sum(p.numel() for p in tiny.model(padding_rows=8).parameters())


async def test_the_vocabulary_comes_in_pages(service: Service) -> None:
    tokens: list[str] = []
    request = common_pb2.ListVocabularyRequest(page_size=100)
    sizes = []
    while not sizes or request.page_token:
        page = await service.stub.ListVocabulary(request)
        sizes.append(len(page.tokens))
        tokens += page.tokens
        request.page_token = page.next_page_token
    assert sizes == [100, 100, 100, 20]
    assert tokens == tiny.tokenizer().convert_ids_to_tokens(range(tiny.VOCABULARY_SIZE))
    assert (await service.stub.ListVocabulary(common_pb2.ListVocabularyRequest())).tokens == tokens


@pytest.mark.parametrize("fields", [{"page_size": -1}, {"page_token": "x"}])
async def test_a_bad_page_is_refused(service: Service, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await service.stub.ListVocabulary(common_pb2.ListVocabularyRequest(**fields))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_tokenizer_works_from_its_streamed_files(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("target_service.service.FILE_PART_BYTES", 1000)
    async for part in service.stub.GetTokenizer(target_pb2.GetTokenizerRequest()):
        assert len(part.data) <= 1000
        with (tmp_path / part.file_name).open("ab") as file:
            file.write(part.data)
    copy, original = AutoTokenizer.from_pretrained(tmp_path), tiny.tokenizer()
    messages = [{"role": "user", "content": "Grüße, 世界"}]
    assert copy(tiny.TEXT[2]).input_ids == original(tiny.TEXT[2]).input_ids
    assert copy.apply_chat_template(messages, tokenize=False) == original.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_model_len": 10_000}, "max_model_len"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(
    model: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StartError, match=reason):
        async with running(**{"model": model, **settings}):
            pass


async def test_on_sigterm_running_sessions_finish_and_the_exit_code_is_zero(model: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/target.sock"
    settings = TargetSettings(model=str(model), listen=address, dtype="float64", max_model_len=CONTEXT, threads=1)
    process = asyncio.create_task(main(settings))
    async with channel(address) as connection:
        stub = target_pb2_grpc.TargetServiceStub(connection)
        await ready(connection)
        client = Client(stub)
        await client.open(PROMPT, max_new_tokens=5, ignore_eos=True)
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            # None: a session from before the signal was seen.
            if (code := await outcome(Client(stub))) is not None:
                break
        assert code == grpc.StatusCode.UNAVAILABLE
        while not client.finish_reason:
            await client.round()
        assert len(client.output) == 5
        await client.close()
        assert await process == 0


async def test_when_the_model_fails_every_session_ends_and_so_does_the_server(model: Path) -> None:
    async with running(model) as service:
        waiting = asyncio.create_task(service.server.wait())
        idle, working = Client(service.stub), Client(service.stub)
        await idle.open(PROMPT)

        def forward(rows: Sequence[Any]) -> Any:
            raise RuntimeError("out of memory")

        service.target.scheduler._engine.forward = forward  # type: ignore[method-assign]
        await working.send(open_message(PROMPT))
        for client in (idle, working):
            code, text, _ = await client.error()
            assert code == grpc.StatusCode.INTERNAL
            assert "model failed" in text
        assert await waiting == 1


async def ready(connection: grpc.aio.Channel) -> None:
    await connection.channel_ready()
    async for response in health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest()):
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            return


async def outcome(client: Client) -> grpc.StatusCode | None:
    """The status of a stream that is refused, maybe as it is opened; None for one that works, which is closed."""
    try:
        await client.send(open_message(PROMPT))
        if await client.call.read() is not grpc.aio.EOF:
            await client.close()
            return None
    except grpc.aio.AioRpcError:
        pass
    return await client.call.code()


async def test_a_target_whose_forward_hangs_stops_without_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_thread, "STOP_TIMEOUT_S", 0.05)
    async with running(model) as service:
        with service.gate():
            client = Client(service.stub)
            await client.send(open_message(PROMPT))
            await until(lambda: service.target.thread.step_s > 0)
            client.call.cancel()
            assert not await service.target.stop()
        await until(lambda: service.target.thread.step_s == 0)
        assert await service.target.stop()
