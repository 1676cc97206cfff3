"""The Python clients, over a real socket."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from foredraft.v1 import common_pb2, generation_pb2
from orchestrator.client import AsyncClient, Client, GenerationError
from orchestrator.decode import DecodeRequest, Emission
from orchestrator.results import read_generated
from tests.orchestrator.edge import EOS, MODEL, Edge, emission, saying, serving, soon, tokens


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with serving(tmp_path) as edge:
        hello = emission(tokens("Hello "), accepted=1, logprobs=True)
        edge.decoder.script = saying(
            hello, emission([*tokens("you"), EOS], finish=common_pb2.FINISH_REASON_EOS, logprobs=True)
        )
        yield edge


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(edge.address) as client:
        yield client


@pytest.fixture
def blocking(edge: Edge) -> Iterator[Client]:
    """To be used in a thread: the server lives in the event loop."""
    with Client(edge.address) as client:
        yield client


async def endless(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
    yield emission(tokens("a"))
    await asyncio.Event().wait()


async def test_generate_returns_plain_python_values(edge: Edge, client: AsyncClient) -> None:
    generated = await client.generate("Once", request_id="mine", seed=7, logprobs=1, sample_count=2)
    assert (generated.request_id, generated.seed, generated.text) == ("mine", 7, "Hello you")
    for completion in generated.completions:
        assert completion.token_ids == [*tokens("Hello you"), EOS]
        assert completion.drafted == [True] + [False] * (len(completion.token_ids) - 1)
        assert [logprobs.chosen.token_id for logprobs in completion.logprobs] == completion.token_ids
        assert (completion.finish_reason, completion.stop_string, completion.stop_token_id) == ("eos", None, EOS)
        assert completion.prompt_token_count == len(tokens("Once"))
        assert completion.completion_token_count == len(completion.token_ids)
        assert completion.statistics is not None
        assert (completion.statistics.rounds, completion.statistics.accepted) == (2, 1)


async def test_a_stream_brings_chunks_and_ends_with_what_generate_returns(client: AsyncClient) -> None:
    stream = client.stream("Once", request_id="mine", seed=7, sample_count=2)
    chunks = [chunk async for chunk in stream]
    generated = await client.generate("Once", request_id="mine", seed=7, sample_count=2)
    assert stream.result == generated
    for index, completion in enumerate(generated.completions):
        assert "".join(chunk.text for chunk in chunks if chunk.sample_index == index) == completion.text


async def test_the_blocking_client_returns_the_same(client: AsyncClient, blocking: Client) -> None:
    generated = await asyncio.to_thread(blocking.generate, "Once", request_id="mine", seed=7)
    stream = await asyncio.to_thread(blocking.stream, "Once", request_id="mine", seed=7)
    chunks = await asyncio.to_thread(list, stream)
    assert generated == stream.result == await client.generate("Once", request_id="mine", seed=7)
    assert "".join(chunk.text for chunk in chunks) == generated.text


async def test_every_option_reaches_the_decoder(edge: Edge, client: AsyncClient) -> None:
    await client.generate(
        [1, 2, 3],
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={4: 2.5},
        seed=2**64 - 1,
        method="rejection",
        q_support=32,
        max_new_tokens=9,
        min_new_tokens=2,
        stop_token_ids=[8],
        ignore_eos=True,
        logprobs=0,
        mode="sequential",
        drafter="ngram",
        draft_tokens=3,
    )
    request = edge.decoder.requests[0]
    assert request.prompt == [1, 2, 3]
    assert request.sampling == common_pb2.Sampling(
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={4: 2.5},
        seed=2**64 - 1,
        method="METHOD_REJECTION",
        q_support=32,
        max_new_tokens=9,
        min_new_tokens=2,
        stop_token_ids=[8],
        ignore_eos=True,
    )
    assert (request.mode, request.drafter, request.draft_tokens, request.logprobs) == (2, 2, 3, 0)


@pytest.mark.parametrize("stop", ["lo", ["lo", "you"]])
async def test_stop_takes_one_string_or_several(client: AsyncClient, stop: str | list[str]) -> None:
    (completion,) = (await client.generate("Once", stop=stop)).completions
    assert (completion.text, completion.finish_reason, completion.stop_string) == ("Hel", "stop_string", "lo")
    assert (await client.generate("Once", stop=stop, include_stop_string=True)).text == "Hello"


async def test_a_conversation_is_a_prompt(edge: Edge, client: AsyncClient) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    await client.generate(messages=messages)
    assert edge.decoder.requests[0].prompt == (await client.tokenize(messages=messages)).token_ids


@pytest.mark.parametrize("arguments", [{}, {"prompt": "Once", "messages": [{"role": "user", "content": "Hi"}]}])
async def test_exactly_one_kind_of_prompt_is_wanted(client: AsyncClient, arguments: dict) -> None:
    with pytest.raises(ValueError, match="either a prompt or messages"):
        await client.generate(**arguments)


async def test_an_option_that_does_not_exist_is_an_error(client: AsyncClient) -> None:
    with pytest.raises(TypeError, match="temprature"):
        await client.generate("Once", temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "Once", "seed": -1}, "seed"),
        ({"prompt": "Once", "max_new_tokens": 2**32}, "max_new_tokens"),
        ({"prompt": "Once", "draft_tokens": -1}, "draft_tokens"),
        ({"prompt": "Once", "sample_count": -1}, "sample_count"),
        ({"prompt": "Once", "method": "zork"}, "method"),
        ({"prompt": "lone \ud800 surrogate"}, "text"),
        ({"prompt": [1, -1]}, "token_ids"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "content"),
    ],
)
async def test_a_value_that_no_request_can_hold_is_an_error_that_names_the_field(
    client: AsyncClient, arguments: dict, field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        await client.generate(**arguments)


async def test_closing_a_stream_early_ends_the_request(edge: Edge, client: AsyncClient) -> None:
    edge.decoder.script = endless
    async with client.stream("Once") as stream:
        assert (await anext(stream)).text == "a"
    await soon(edge.decoder.idle.wait())
    assert [chunk async for chunk in stream] == []


async def test_a_dropped_stream_ends_the_request(edge: Edge, client: AsyncClient) -> None:
    edge.decoder.script = endless
    async for _ in client.stream("Once"):
        break
    await soon(edge.decoder.idle.wait())


async def test_closing_a_blocking_stream_early_ends_the_request(edge: Edge, blocking: Client) -> None:
    edge.decoder.script = endless

    def read_one() -> list[str]:
        with blocking.stream("Once") as stream:
            first = next(stream).text
        return [first, *(chunk.text for chunk in stream)]

    assert await asyncio.to_thread(read_one) == ["a"]
    await soon(edge.decoder.idle.wait())


async def test_a_dropped_blocking_stream_ends_the_request(edge: Edge, blocking: Client) -> None:
    edge.decoder.script = endless

    def read_one() -> None:
        for _ in blocking.stream("Once"):
            break

    await asyncio.to_thread(read_one)
    await soon(edge.decoder.idle.wait())


async def test_errors_tell_status_fields_and_when_to_come_back(edge: Edge, client: AsyncClient) -> None:
    with pytest.raises(GenerationError, match="INVALID_ARGUMENT") as caught:
        await client.generate("Once", temperature=-1)
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in caught.value.violations] == ["sampling.temperature"]
    with pytest.raises(GenerationError, match="top_p"):
        async for _ in client.stream("Once", top_p=5):
            pass
    edge.decoder.script = endless
    with pytest.raises(GenerationError) as caught:
        await client.generate("Once", timeout=0.2)
    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_blocking_client_tells_errors_alike(tmp_path: Path) -> None:
    async with serving(tmp_path, max_concurrent_requests=1) as edge, AsyncClient(edge.address) as client:
        edge.decoder.script = endless
        with Client(edge.address) as blocking:
            with pytest.raises(GenerationError) as caught:
                await asyncio.to_thread(blocking.generate, "Once", top_p=5)
            assert [v.field for v in caught.value.violations] == ["sampling.top_p"]
            async with client.stream("Once") as stream:
                await anext(stream)
                with pytest.raises(GenerationError) as caught:
                    await asyncio.to_thread(list, blocking.stream("Once"))
        assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after == 1


async def test_tokens_text_and_models_come_as_plain_values(client: AsyncClient, blocking: Client) -> None:
    tokenized = await client.tokenize("Hello")
    assert tokenized.token_ids == tokens("Hello")
    assert await client.detokenize(tokenized.token_ids) == "Hello"
    models = await client.get_model()
    assert (models.target.name, models.target.eos_token_ids, models.draft) == (MODEL.name, [EOS], None)
    assert (models.default_mode, models.max_draft_tokens) == ("overlapped", 4)
    assert models.max_new_tokens_limit is None
    assert await asyncio.to_thread(blocking.tokenize, "Hello") == tokenized
    assert await asyncio.to_thread(blocking.detokenize, tokenized.token_ids) == "Hello"
    assert await asyncio.to_thread(blocking.get_model) == models


def test_enum_values_of_a_newer_server_count_as_unspecified() -> None:
    completed = generation_pb2.Completed(finish_reason=99, statistics={"mode": 99})  # type: ignore[arg-type]
    response = generation_pb2.GenerateResponse(completions=[generation_pb2.Completion(text="a", completed=completed)])
    completion = read_generated(response).completions[0]
    assert (completion.text, completion.finish_reason) == ("a", "unspecified")
    assert completion.statistics.mode == "unspecified"
