"""What the public API promises, over a real socket."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import grpc
import pytest

from foredraft.errors import Violation, error_details, unavailable
from foredraft.serving.channel import channel
from foredraft.serving.logs import add_ids
from foredraft.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from orchestrator.backends import Draft
from orchestrator.decode import DecodeRequest, Emission
from orchestrator.service import finish_name
from tests.orchestrator.edge import CONTEXT_LENGTH, EOS, Edge, emission, in_rounds, saying, serving, soon, tokens

Request = generation_pb2.GenerateRequest
Stub = generation_pb2_grpc.GenerationServiceStub


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with serving(tmp_path) as edge:
        yield edge


@pytest.fixture
async def stub(edge: Edge) -> AsyncIterator[Stub]:
    async with channel(edge.address) as connection:
        yield generation_pb2_grpc.GenerationServiceStub(connection)


async def stream(stub: Stub, request: Request) -> list[generation_pb2.GenerateStreamResponse]:
    return [event async for event in stub.GenerateStream(request)]


async def failure(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


async def violations(call: object) -> tuple[Violation, ...]:
    error = await failure(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error_details(error).violations


async def endless(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
    """Emits once and then waits until it is closed."""
    yield emission(tokens("a"))
    await asyncio.Event().wait()


async def test_a_stream_starts_brings_chunks_and_completes(edge: Edge, stub: Stub) -> None:
    started, *chunks, completed = await stream(stub, Request(text="Once", request_id="mine", sampling={"seed": 7}))
    assert started.started == generation_pb2.Started(request_id="mine", seed=7, prompt_token_count=len(tokens("Once")))
    assert "".join(event.chunk.text for event in chunks) == "Hello, world!"
    assert [t for event in chunks for t in event.chunk.token_ids] == tokens("Hello, world!")
    assert completed.completed.finish_reason == common_pb2.FINISH_REASON_MAX_TOKENS
    assert completed.completed.usage.completion_token_count == len(tokens("Hello, world!"))
    assert not completed.completed.HasField("stop_token_id")


async def test_generate_returns_what_the_stream_brings(edge: Edge, stub: Stub) -> None:
    last = emission(tokens("!"), finish=common_pb2.FINISH_REASON_MAX_TOKENS, logprobs=True)
    edge.decoder.script = saying(emission(tokens("Hello"), accepted=2, logprobs=True), last)
    request = Request(text="Once", sample_count=2, sampling={"seed": 7}, request_id="x", logprobs=0)
    events = await stream(stub, request)
    response = await stub.Generate(request)
    assert (response.request_id, response.seed) == ("x", 7)
    for index, completion in enumerate(response.completions):
        chunks = [e.chunk for e in events if e.HasField("chunk") and e.chunk.sample_index == index]
        assert completion.text == "".join(chunk.text for chunk in chunks) == "Hello!"
        assert completion.token_ids == [t for chunk in chunks for t in chunk.token_ids]
        assert completion.drafted == [d for chunk in chunks for d in chunk.drafted]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.completed.sample_index == index


async def test_samples_share_the_seed_differ_in_index_and_interleave(edge: Edge, stub: Stub) -> None:
    turns = [asyncio.Event(), asyncio.Event(), asyncio.Event()]
    turns[0].set()

    async def in_turn(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
        # Each waits for the others to have had their turn: only samples that run at the same time get through.
        for finish in (0, 0, common_pb2.FINISH_REASON_MAX_TOKENS):
            await turns[request.sample_index].wait()
            turns[request.sample_index].clear()
            turns[(request.sample_index + 1) % 3].set()
            yield emission(tokens("a"), finish=finish)

    edge.decoder.script = in_turn
    events = await stream(stub, Request(text="Once", sample_count=3))
    chunks = [event.chunk.sample_index for event in events if event.HasField("chunk")]
    assert chunks[:6] == [0, 1, 2, 0, 1, 2]
    assert sorted(r.sample_index for r in edge.decoder.requests) == [0, 1, 2]
    assert len({r.sampling.seed for r in edge.decoder.requests}) == 1


async def test_no_more_samples_run_at_a_time_than_the_target_has_sessions(edge: Edge, stub: Stub) -> None:
    model = common_pb2.Model(max_sessions=2)
    model.MergeFrom(edge.backends.target_model)
    edge.backends.target_model = model
    running = []

    async def script(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
        running.append(edge.decoder.running)
        await asyncio.sleep(0)
        yield emission(tokens("a"), finish=common_pb2.FINISH_REASON_MAX_TOKENS)

    edge.decoder.script = script
    response = await stub.Generate(Request(text="Once", sample_count=16))
    assert [completion.text for completion in response.completions] == ["a"] * 16
    assert len(running) == 16
    assert max(running) == 2


async def test_a_seed_is_chosen_and_told_if_none_is_given(edge: Edge, stub: Stub) -> None:
    seeds = {(await stub.Generate(Request(text="Once"))).seed for _ in range(3)}
    assert len(seeds) == 3
    assert seeds == {request.sampling.seed for request in edge.decoder.requests}


async def test_the_request_id_is_in_the_initial_metadata_and_chosen_if_not_given(edge: Edge, stub: Stub) -> None:
    call = stub.GenerateStream(Request(text="Once", request_id="mine"))
    assert dict(await call.initial_metadata())["x-request-id"] == "mine"
    response = await stub.Generate(Request(text="Once"))
    assert response.request_id == edge.decoder.requests[-1].request_id != ""


async def test_without_max_new_tokens_the_context_is_the_limit(edge: Edge, stub: Stub) -> None:
    await stub.Generate(Request(text="Once"))
    assert edge.decoder.requests[0].sampling.max_new_tokens >= CONTEXT_LENGTH - len(tokens("Once"))


async def test_without_max_new_tokens_the_servers_limit_counts(tmp_path: Path) -> None:
    async with serving(tmp_path, max_new_tokens_limit=5) as edge, channel(edge.address) as connection:
        await generation_pb2_grpc.GenerationServiceStub(connection).Generate(Request(text="Once"))
        assert edge.decoder.requests[0].sampling.max_new_tokens == 5


async def test_parameters_reach_the_decoder_unchanged(edge: Edge, stub: Stub) -> None:
    sampling = common_pb2.Sampling(
        temperature=0, top_k=3, seed=2**64 - 1, max_new_tokens=9, logit_bias={5: -1.0}, ignore_eos=True
    )
    await stub.Generate(Request(token_ids={"token_ids": [1, 2, 3]}, sampling=sampling, logprobs=4))
    request = edge.decoder.requests[0]
    assert request.sampling == sampling
    assert (request.prompt, request.logprobs) == ([1, 2, 3], 4)
    await stub.Generate(Request(text="Once"))
    assert edge.decoder.requests[1].logprobs is None


@pytest.mark.parametrize(
    ("speculation", "mode", "exactly", "most"),
    [
        ({}, generation_pb2.MODE_OVERLAPPED, None, 4),
        ({"mode": "MODE_SEQUENTIAL"}, generation_pb2.MODE_SEQUENTIAL, None, 4),
        ({"draft_tokens": 0}, generation_pb2.MODE_PLAIN, 0, 4),
        ({"draft_tokens": 3}, generation_pb2.MODE_OVERLAPPED, 3, 4),
        ({"max_draft_tokens": 2}, generation_pb2.MODE_OVERLAPPED, None, 2),
        ({"max_draft_tokens": 64}, generation_pb2.MODE_OVERLAPPED, None, 4),
        ({"max_draft_tokens": 0}, generation_pb2.MODE_PLAIN, None, 0),
    ],
)
async def test_speculation_is_resolved_against_the_servers_defaults(
    edge: Edge, stub: Stub, speculation: dict, mode: int, exactly: int | None, most: int
) -> None:
    await stub.Generate(Request(text="Once", speculation=speculation))
    request = edge.decoder.requests[0]
    assert (request.mode, request.draft_tokens, request.max_draft_tokens) == (mode, exactly, most)


async def test_speculation_that_the_server_cannot_give_is_refused(edge: Edge, stub: Stub) -> None:
    too_many = Request(text="Once", speculation={"draft_tokens": 5})
    assert [v.field for v in await violations(stub.Generate(too_many))] == ["speculation.draft_tokens"]
    edge.backends.draft = Draft(None, [common_pb2.DRAFTER_NGRAM])
    other = Request(text="Once", speculation={"drafter": common_pb2.DRAFTER_MODEL})
    assert "ngram" in (await violations(stub.Generate(other)))[0].description


async def test_a_stop_string_ends_text_tokens_flags_logprobs_and_counts_alike(edge: Edge, stub: Stub) -> None:
    ids = tokens("one STOP two")
    edge.decoder.script = saying(emission(ids, accepted=len(ids) - 1, logprobs=True))
    response = await stub.Generate(Request(text="Once", stop_strings=["STOP"], logprobs=0))
    (completion,) = response.completions
    kept = len(tokens("one STOP"))
    assert completion.text == "one "
    assert completion.token_ids == ids[:kept]
    assert len(completion.drafted) == len(completion.logprobs) == kept
    assert completion.completed.usage.completion_token_count == kept
    assert completion.completed.finish_reason == common_pb2.FINISH_REASON_STOP_STRING
    assert completion.completed.stop_string == "STOP"
    statistics = completion.completed.statistics
    assert statistics.accepted == statistics.drafted == sum(statistics.accepted_per_position) == kept
    assert statistics.mean_accepted_length == kept


async def test_a_stop_string_closes_the_sessions_and_drops_the_rest(edge: Edge, stub: Stub) -> None:
    async def script(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
        for token_id in tokens("say STOP"):
            yield emission([token_id])
        await asyncio.Event().wait()

    edge.decoder.script = script
    request = Request(text="Once", stop_strings=["STOP"], include_stop_string=True)
    assert (await stub.Generate(request)).completions[0].text == "say STOP"
    assert edge.decoder.running == 0


async def test_the_eos_token_counts_and_is_silent_unless_special_tokens_are_kept(edge: Edge, stub: Stub) -> None:
    ids = [*tokens("Hi"), EOS]
    edge.decoder.script = saying(emission(ids, finish=common_pb2.FINISH_REASON_EOS))
    (silent,) = (await stub.Generate(Request(text="Once"))).completions
    (kept,) = (await stub.Generate(Request(text="Once", keep_special_tokens=True))).completions
    assert (silent.text, kept.text) == ("Hi", "Hi<|im_end|>")
    for completion in (silent, kept):
        assert completion.token_ids == ids
        assert completion.completed.usage.completion_token_count == len(ids)
        assert completion.completed.stop_token_id == EOS


async def test_every_chunk_is_whole_characters(edge: Edge, stub: Stub) -> None:
    text = "日本語 🎉 done"
    edge.decoder.script = saying(*in_rounds(text, size=1))
    texts = [event.chunk.text for event in await stream(stub, Request(text="Once")) if event.HasField("chunk")]
    assert "".join(texts) == text
    assert not any("�" in piece for piece in texts)


async def test_bad_fields_are_named(edge: Edge, stub: Stub) -> None:
    request = Request(sampling={"temperature": -1, "top_p": 2}, sample_count=0)
    fields = {v.field for v in await violations(stub.Generate(request))}
    assert fields == {"prompt", "sampling.temperature", "sampling.top_p", "sample_count"}
    assert edge.decoder.requests == []


async def test_a_prompt_that_fills_the_context_is_refused(edge: Edge, stub: Stub) -> None:
    long = Request(text="a b " * CONTEXT_LENGTH)
    (violation,) = await violations(stub.Generate(long))
    assert violation.field == "text"
    assert str(CONTEXT_LENGTH - 1) in violation.description


async def test_a_prompt_beyond_the_servers_limit_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, max_prompt_tokens_limit=8) as edge, channel(edge.address) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        (violation,) = await violations(stub.Generate(Request(text="a b " * 8)))
        assert violation.field == "text"
        assert "at most 8" in violation.description
        assert edge.decoder.requests == []
        await stub.Generate(Request(text="a b"))


async def test_what_the_chat_template_refuses_is_the_clients_error(edge: Edge, stub: Stub) -> None:
    chat = generation_pb2.Chat(messages=[{"role": "assistant", "content": "I begin"}])
    for call in (stub.Generate(Request(chat=chat)), stub.Tokenize(generation_pb2.TokenizeRequest(chat=chat))):
        (violation,) = await violations(call)
        assert violation.field == "chat.messages"
        assert "begin with the user" in violation.description


async def test_a_chat_is_rendered_up_to_where_the_assistant_speaks(edge: Edge, stub: Stub) -> None:
    chat = generation_pb2.Chat(messages=[{"role": "user", "content": "Hi"}])
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    response = await stub.Tokenize(generation_pb2.TokenizeRequest(chat=chat))
    assert response.token_ids == tokens(rendered)
    await stub.Generate(Request(chat=chat))
    assert edge.decoder.requests[0].prompt == tokens(rendered)


@pytest.mark.parametrize("text", ["Hello, wörld! 🎉", "a long text " * 1000])
async def test_tokenize_and_detokenize_are_inverse(stub: Stub, text: str) -> None:
    tokenized = await stub.Tokenize(generation_pb2.TokenizeRequest(text=text))
    assert tokenized.token_ids == tokens(text)
    assert len(tokenized.tokens) == len(tokenized.token_ids)
    response = await stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=tokenized.token_ids))
    assert response.text == text


async def test_detokenize_refuses_ids_beyond_the_vocabulary(stub: Stub) -> None:
    (violation,) = await violations(stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[1, 10_000])))
    assert violation.field == "token_ids[1]"


async def test_get_model_tells_models_defaults_and_why_there_is_no_speculation(edge: Edge, stub: Stub) -> None:
    response = await stub.GetModel(generation_pb2.GenerationServiceGetModelRequest())
    assert response.target == edge.backends.target_model
    assert not response.HasField("draft")
    assert response.degraded_reason == "there is no draft"
    assert (response.default_mode, response.max_draft_tokens) == (generation_pb2.MODE_OVERLAPPED, 4)
    assert not response.HasField("max_new_tokens_limit")
    draft = common_pb2.Model(name="small")
    edge.backends.draft = Draft(draft, [common_pb2.DRAFTER_MODEL])
    response = await stub.GetModel(generation_pb2.GenerationServiceGetModelRequest())
    assert (response.draft, list(response.drafters)) == (draft, [common_pb2.DRAFTER_MODEL])


async def test_cancelling_ends_every_sample_at_once(edge: Edge, stub: Stub) -> None:
    edge.decoder.script = endless
    call = stub.GenerateStream(Request(text="Once", sample_count=4))
    while edge.decoder.running < 4:
        await call.read()
    call.cancel()
    await soon(edge.decoder.idle.wait())


async def test_cancelling_generate_ends_every_sample_at_once(edge: Edge, stub: Stub) -> None:
    began = asyncio.Event()

    async def script(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
        began.set()
        await asyncio.Event().wait()
        yield emission([])

    edge.decoder.script = script
    call = stub.Generate(Request(text="Once", sample_count=4))
    await soon(began.wait())
    call.cancel()
    await soon(edge.decoder.idle.wait())


async def test_a_client_that_vanishes_ends_every_sample(edge: Edge) -> None:
    edge.decoder.script = endless
    connection = channel(edge.address)
    call = generation_pb2_grpc.GenerationServiceStub(connection).GenerateStream(Request(text="Once", sample_count=2))
    await call.read()
    await connection.close()
    await soon(edge.decoder.idle.wait())


async def test_a_deadline_ends_every_sample_and_is_passed_on(edge: Edge, stub: Stub) -> None:
    edge.decoder.script = endless
    error = await failure(stub.Generate(Request(text="Once", sample_count=2), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await soon(edge.decoder.idle.wait())
    assert all(request.deadline is not None for request in edge.decoder.requests)


async def test_a_slow_reader_is_waited_for(edge: Edge, stub: Stub) -> None:
    emitted, total = 0, 2000
    large = common_pb2.TokenLogprobs(top=[common_pb2.Logprob(token_id=300, logprob=-1)] * 10_000)

    async def script(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
        nonlocal emitted
        for emitted in range(total):  # noqa: B007
            yield dataclasses.replace(emission([300]), logprobs=[large])

    edge.decoder.script = script
    call = stub.GenerateStream(Request(text="Once"))
    await call.read()
    seen = -1
    while seen != emitted:  # until the sample stands still for 50 turns of the loop
        seen = emitted
        for _ in range(50):
            await asyncio.sleep(0.002)
    assert emitted < total / 2
    call.cancel()
    await soon(edge.decoder.idle.wait())


async def test_one_failing_sample_ends_the_others(edge: Edge, stub: Stub) -> None:
    async def script(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
        if request.sample_index == 1:
            raise unavailable("the target was lost", 3)
        yield emission(tokens("a"))
        await asyncio.Event().wait()

    edge.decoder.script = script
    error = await failure(stub.Generate(Request(text="Once", sample_count=3)))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the target was lost")
    assert error_details(error).retry_after_s == 3
    assert edge.decoder.running == 0


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL),
    ],
)
async def test_errors_of_the_target_are_told_with_a_fitting_status(
    edge: Edge, stub: Stub, code: grpc.StatusCode, told: grpc.StatusCode
) -> None:
    async def script(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no free session")
        yield

    edge.decoder.script = script
    error = await failure(stub.Generate(Request(text="Once")))
    assert error.code() is told
    assert "no free session" in (error.details() or "")
    if told in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
        assert error_details(error).retry_after_s is not None


async def test_requests_beyond_the_limit_are_told_to_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path, max_concurrent_requests=1) as edge, channel(edge.address) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        edge.decoder.script = endless
        first = stub.GenerateStream(Request(text="Once"))
        await first.read()
        error = await failure(stub.Generate(Request(text="Once")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_details(error).retry_after_s is not None
        first.cancel()
        await soon(edge.decoder.idle.wait())
        edge.decoder.script = saying(*in_rounds("Hello"))
        assert (await stub.Generate(Request(text="Once"))).completions[0].text == "Hello"


@pytest.mark.parametrize("log_prompts", [True, False])
async def test_prompts_are_logged_only_if_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    caplog.set_level("DEBUG")
    caplog.handler.addFilter(add_ids)
    async with serving(tmp_path, log_prompts=log_prompts) as edge, channel(edge.address) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        await stub.Generate(Request(text="my secret", request_id="mine"))
    assert ("secret" in caplog.text) == log_prompts
    assert "Hello" not in caplog.text
    logged = [record for record in caplog.records if record.name == "orchestrator.service"]
    assert logged
    assert all(record.request_id == "mine" for record in logged)  # type: ignore[attr-defined]


def test_a_finish_reason_of_a_newer_target_has_a_name() -> None:
    assert finish_name(common_pb2.FINISH_REASON_EOS) == "FINISH_REASON_EOS"
    assert finish_name(99) == "finish reason 99"  # type: ignore[arg-type]
