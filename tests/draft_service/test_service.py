"""The draft service over real sockets."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.server import main, start_draft
from draft_service.stream import MAX_WAITING
from foredraft.sampling.params import Method, SamplingParams
from foredraft.serving.channel import channel
from foredraft.serving.server import Server, StartError
from foredraft.settings import DraftSettings
from foredraft.v1 import common_pb2, draft_pb2
from tests import tiny
from tests.draft_service.kit import MAX_SESSIONS, Client, Service, open_request, running
from tests.draft_service.reference import COUPLED, DRAFT, EOS, MAX_MODEL_LEN, PARAMETERS, PROMPT, Reference, opening

NGRAM = common_pb2.DRAFTER_NGRAM
MODEL = common_pb2.DRAFTER_MODEL
COMBINED = common_pb2.DRAFTER_COMBINED
Status = grpc.StatusCode


@asynccontextmanager
async def session(service: Service, params: SamplingParams = COUPLED, **options: Any) -> AsyncIterator[Client]:
    client = Client(service)
    await client.open(params, **options)
    try:
        yield client
        await client.close()
    finally:
        client.call.cancel()


@pytest.mark.parametrize("name", PARAMETERS)
async def test_proposals_and_prepared_answers_are_what_the_draft_model_samples(
    name: str, service: Service, draft: Reference
) -> None:
    opened = opening(PARAMETERS[name])
    async with session(service, PARAMETERS[name]) as client:
        proposal = await client.propose([60], 4)
        assert proposal == draft.draft(opened, client.text, 4)[0]
        await client.verifying(proposal, 3)
        for prepared in await client.wait_prepared(2):
            verdict = [*client.text, *proposal[: prepared.accepted], prepared.next_token]
            assert prepared.token_ids == draft.draft(opened, verdict, 3)[0]


async def test_what_became_final_may_come_with_what_is_verified(service: Service, draft: Reference) -> None:
    async with session(service, COUPLED) as client:
        proposal = await client.propose([60], 4)
        commit = draft_pb2.Commit(base=len(client.text), token_ids=[*proposal[:2], 61])
        await client.verifying([62], 3, commit=commit)
        (prepared, *_) = await client.wait_prepared(2)
        verdict = [*client.text, *[62][: prepared.accepted], prepared.next_token]
        assert client.text[-1] == 61
        assert prepared.token_ids == draft.draft(opening(COUPLED), verdict, 3)[0]


async def test_q_goes_with_every_draft_token_of_rejection_sampling_and_with_no_other(
    service: Service, draft: Reference
) -> None:
    params = PARAMETERS["rejection"]
    async with session(service, params) as client:
        await client.commit([60], 3)
        proposal = await client.proposal()
        _, q = draft.draft(opening(params), client.text, 3)
        assert q is not None
        shape = (len(proposal.token_ids), proposal.q.support)
        ids = np.frombuffer(proposal.q.token_ids, "<u4").reshape(shape)
        probabilities = np.frombuffer(proposal.q.probabilities, "<f4").reshape(shape)
        assert ids.tolist() == q.token_ids.tolist()
        np.testing.assert_allclose(probabilities, q.probabilities.numpy(), rtol=1e-5)
        await client.verifying(list(proposal.token_ids), 3)
        assert all(prepared.q.support == params.q_support for prepared in await client.wait_prepared(2))
    for name in ("coupled", "greedy", "greedy rejection"):
        async with session(service, PARAMETERS[name]) as client:
            await client.commit([60], 3)
            proposal = await client.proposal()
            assert proposal.token_ids
            assert not proposal.HasField("q")


async def test_sessions_at_the_same_time_do_not_mix(service: Service, draft: Reference) -> None:
    async def converse(index: int) -> None:
        params = replace(COUPLED, seed=index)
        text = [70 + index, *PROMPT]
        opened = opening(params, text)
        async with session(service, params, text=text) as client:
            proposal = await client.propose([60 + index], 3)
            for _ in range(4):
                assert proposal == draft.draft(opened, client.text, 3)[0]
                await client.verifying(proposal, 3)
                proposal = await client.propose([*proposal[:1], 90], 3)

    await asyncio.gather(*(converse(index) for index in range(MAX_SESSIONS)))


async def test_a_hit_costs_no_forward(service: Service) -> None:
    async with session(service) as client:
        proposal = await client.propose([60], 3)
        await client.verifying(proposal, 3)
        prepared = (await client.wait_prepared(4))[0]
        counters = service.model_counters
        hits, forwards = counters.hits, counters.forwards
        await client.commit([*proposal[: prepared.accepted], prepared.next_token], len(prepared.token_ids))
        again = await client.proposal()
        assert again.token_ids == prepared.token_ids
        assert again.prepared_token_count == len(prepared.token_ids)
        assert (counters.hits, counters.forwards) == (hits + 1, forwards)


async def test_what_is_prepared_for_a_round_that_is_over_costs_no_forward(service: Service) -> None:
    async with session(service) as client:
        proposal = await client.propose([60], 3)
        with service.gate() as gate:
            forwards = service.model_counters.forwards
            await client.verifying(proposal, 3)
            await gate.wait_entered()
            gate.release()
            await gate.wait_entered()
            await client.commit([90], 1)
            await service.until_posted()
            gate.release(100)
            await client.proposal()
            # Two passes for the round, one for the proposal.
            assert service.model_counters.forwards == forwards + 3
            assert client.prepared == []


async def test_times_are_reported(service: Service) -> None:
    async with session(service) as client:
        started = time.perf_counter()
        await client.commit([60], 2)
        proposal = await client.proposal()
        elapsed = time.perf_counter() - started
        assert proposal.compute_us > 0
        assert proposal.compute_us + proposal.queue_us <= 1e6 * elapsed


async def test_the_drafter_can_be_chosen_for_each_session(service: Service, draft: Reference) -> None:
    text = [70, 71, 72, 73, 70, 71]
    for drafter in (NGRAM, COMBINED):
        async with session(service, text=text, drafter=drafter) as client:
            assert await client.propose([72], 3) == [73, 70, 71]
    # Only one token comes again.
    opened, text = opening(COUPLED, [70, 71, 72, 73]), [70, 71, 72, 73, 71]
    by_model = draft.draft(opened, text, 3)[0]
    for drafter, expected in ((NGRAM, [72, 73, 71]), (MODEL, by_model), (COMBINED, by_model)):
        async with session(service, text=opened.text, drafter=drafter) as client:
            assert await client.propose([71], 3) == expected


async def test_a_server_with_a_model_combines_it_with_ngrams_unless_told_otherwise(model: Path) -> None:
    async with running(model, drafter=None) as service:
        response = await service.stub.GetModel(draft_pb2.DraftServiceGetModelRequest())
        assert (list(response.drafters), response.default_drafter) == ([MODEL, NGRAM, COMBINED], COMBINED)
        async with session(service, text=[70, 71, 72, 73, 70]) as client:
            assert await client.propose([71], 3) == [72, 73, 70]


async def test_a_server_without_a_model_drafts_with_ngrams(ngrams: Service) -> None:
    model = await ngrams.stub.GetModel(draft_pb2.DraftServiceGetModelRequest())
    assert not model.HasField("model")
    assert (list(model.drafters), model.default_drafter) == ([NGRAM], NGRAM)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ngrams.stub.ListVocabulary(common_pb2.ListVocabularyRequest())
    assert caught.value.code() is Status.FAILED_PRECONDITION
    async with session(ngrams, text=[7, 8, 9, 10**6, 7, 8]) as client:
        assert await client.propose([9], 2) == [10**6, 7]
        await client.verifying([10**6], 2)
        (prepared,) = await client.wait_prepared(1)
        assert (prepared.accepted, prepared.next_token, list(prepared.token_ids)) == (1, 7, [8, 9])


async def test_the_model_and_its_vocabulary_are_described(service: Service) -> None:
    response = await service.stub.GetModel(draft_pb2.DraftServiceGetModelRequest())
    assert (list(response.drafters), response.default_drafter) == ([MODEL, NGRAM, COMBINED], MODEL)
    model = response.model
    assert (model.dtype, model.device, model.context_length) == ("float64", "cpu", MAX_MODEL_LEN)
    assert (model.vocabulary_size, list(model.eos_token_ids)) == (tiny.VOCABULARY_SIZE, [EOS])
    page = await service.stub.ListVocabulary(common_pb2.ListVocabularyRequest(page_size=300))
    rest = await service.stub.ListVocabulary(common_pb2.ListVocabularyRequest(page_token=page.next_page_token))
    tokens = [*page.tokens, *rest.tokens]
    assert tokens == tiny.tokenizer().convert_ids_to_tokens(list(range(tiny.VOCABULARY_SIZE)))
    assert rest.next_page_token == ""


def changed(**fields: Any) -> draft_pb2.DraftRequest:
    """An open request with these fields instead."""
    request = open_request(COUPLED)
    for name in fields:
        request.open.ClearField(name)
    request.open.MergeFrom(draft_pb2.OpenDraft(**fields))
    return request


def without_seed() -> draft_pb2.DraftRequest:
    request = open_request(COUPLED)
    request.open.sampling.ClearField("seed")
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (draft_pb2.DraftRequest(), "message"),
        (changed(token_ids=[]), "open.token_ids"),
        (changed(token_ids=[1, 320], prompt_length=1), "open.token_ids[1]"),
        (changed(prompt_length=0), "open.prompt_length"),
        (changed(prompt_length=len(PROMPT) + 1), "open.prompt_length"),
        (changed(eos_token_ids=[320]), "open.eos_token_ids[0]"),
        (changed(drafter=9), "open.drafter"),
        (changed(sampling=common_pb2.Sampling(seed=1, max_new_tokens=1, top_p=2)), "open.sampling.top_p"),
        (without_seed(), "open.sampling.seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_opening_names_the_field(service: Service, request_: draft_pb2.DraftRequest, field: str) -> None:
    client = Client(service)
    await client.call.write(request_)
    status, _, details = await client.error()
    assert status is Status.INVALID_ARGUMENT
    assert [violation.field for violation in details.violations] == [field]


@pytest.mark.parametrize("drafter", [MODEL, COMBINED])
async def test_a_drafter_that_is_not_there_is_refused(ngrams: Service, drafter: int) -> None:
    client = Client(ngrams)
    await client.open(COUPLED, drafter=drafter)
    status, message, details = await client.error()
    assert status is Status.INVALID_ARGUMENT
    assert [violation.field for violation in details.violations] == ["open.drafter"]
    assert "DRAFTER_NGRAM" in message


@pytest.mark.parametrize(
    ("send", "status", "words"),
    [
        (lambda client: client.commit([60], 1, base=len(PROMPT) + 1), Status.FAILED_PRECONDITION, "base is"),
        (lambda client: client.commit([60], 1, base=len(PROMPT) - 1), Status.FAILED_PRECONDITION, "prompt"),
        (lambda client: client.commit([60] * 101, 1), Status.FAILED_PRECONDITION, "max_new_tokens is 100"),
        (lambda client: client.verifying([60], 1, base=len(PROMPT) + 1), Status.FAILED_PRECONDITION, "base is"),
        (lambda client: client.open(COUPLED), Status.FAILED_PRECONDITION, "open came out of order"),
        (lambda client: client.commit([320], 1), Status.INVALID_ARGUMENT, "commit.token_ids[0]"),
        (lambda client: client.commit([60], 65), Status.INVALID_ARGUMENT, "commit.max_tokens"),
        (lambda client: client.verifying([320], 1), Status.INVALID_ARGUMENT, "verifying.token_ids[0]"),
        (
            lambda client: client.verifying([], 1, commit=draft_pb2.Commit(base=2, token_ids=[320])),
            Status.INVALID_ARGUMENT,
            "verifying.commit.token_ids[0]",
        ),
        (
            lambda client: client.verifying([], 1, commit=draft_pb2.Commit(base=2, token_ids=[60], max_tokens=1)),
            Status.INVALID_ARGUMENT,
            "verifying.commit.max_tokens",
        ),
        (lambda client: client.verifying([60] * 65, 1), Status.INVALID_ARGUMENT, "verifying.token_ids"),
        (lambda client: client.call.done_writing(), Status.CANCELLED, "without a close message"),
    ],
)
async def test_a_message_that_does_not_fit_ends_the_session(
    service: Service, send: Callable[[Client], Any], status: grpc.StatusCode, words: str
) -> None:
    client = Client(service)
    await client.open(COUPLED)
    await send(client)
    code, message, _ = await client.error()
    assert code is status
    assert words in message


async def test_a_session_begins_with_open(service: Service) -> None:
    client = Client(service)
    await client.commit([60], 1, base=1)
    code, message, _ = await client.error()
    assert code is Status.FAILED_PRECONDITION
    assert "commit came out of order" in message


async def test_a_round_on_an_older_text_is_ignored(service: Service) -> None:
    async with session(service) as client:
        proposal = await client.propose([60], 2)
        await client.verifying(proposal, 2, base=len(client.text) - 1)
        await client.propose([*proposal, 61], 2)
        assert client.prepared == []


async def test_more_sessions_than_fit_are_refused_until_one_has_ended(service: Service) -> None:
    clients = [Client(service) for _ in range(MAX_SESSIONS)]
    for client in clients:
        await client.open(COUPLED)
        await client.propose([60], 1)
    extra = Client(service)
    await extra.open(COUPLED)
    status, message, details = await extra.error()
    assert status is Status.RESOURCE_EXHAUSTED
    assert f"all {MAX_SESSIONS} sessions" in message
    assert details.retry_after_s is not None
    await clients.pop().close()
    async with session(service) as client:
        await client.propose([60], 1)
    for client in clients:
        await client.close()


@pytest.mark.parametrize("prepare", [False, True])
async def test_a_cancelled_session_is_freed(service: Service, prepare: bool) -> None:
    client = Client(service)
    await client.open(COUPLED)
    proposal = await client.propose([60], 2)
    if prepare:
        await client.verifying(proposal, 4)
        await client.wait_prepared(1)
    await service.until((1, 1, 1))
    client.call.cancel()
    await service.until((0, 0, 0))


async def test_a_session_whose_client_vanishes_is_freed(service: Service) -> None:
    async with channel(service.server.address) as connection:
        call = type(service.stub)(connection).Draft()
        await call.write(open_request(COUPLED))
        await service.until((1, 1, 1))
    await service.until((0, 0, 0))
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call.read()


async def test_a_silent_session_is_closed(model: Path) -> None:
    async with running(model, idle_timeout_s=0.2) as service:
        client = Client(service)
        await client.open(COUPLED)
        status, message, _ = await client.error()
        assert status is Status.DEADLINE_EXCEEDED
        assert "no message came for 0.2 s" in message
        await service.until((0, 0, 0))


async def test_a_client_that_floods_a_busy_drafter_is_refused(service: Service) -> None:
    client = Client(service)
    await client.open(COUPLED)
    await client.propose([60], 1)
    with service.gate() as gate:
        await client.commit([61], 1)
        await gate.wait_entered()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(MAX_WAITING + 1):
                await client.commit([61], 0, base=len(client.text) - 1)
        status, _, details = await client.error()
    assert status is Status.RESOURCE_EXHAUSTED
    assert details.retry_after_s is not None


@pytest.mark.parametrize("method", Method)
async def test_parameters_that_leave_no_token_to_draw_end_drafting_for_one_session_alone(
    service: Service, method: Method
) -> None:
    # Within their ranges, but logits divided by both are infinite.
    overflowing = replace(COUPLED, method=method, temperature=5e-324, repetition_penalty=5e-324, presence_penalty=100)
    async with session(service) as other, session(service, overflowing) as client:
        await client.verifying([60], 3)
        for tokens in ([60], [61, 62]):
            assert await client.propose(tokens, 3) == []
            await client.verifying([63], 3)
        assert len(await other.propose([60], 3)) == 3


async def test_a_failure_of_the_drafter_ends_all_sessions_and_the_server(model: Path) -> None:
    async with running(model) as service:
        clients = [Client(service), Client(service)]
        for client in clients:
            await client.open(COUPLED)
            await client.propose([60], 1)
        waiting = asyncio.create_task(service.server.wait())

        def broken(rows: object) -> Any:
            raise RuntimeError("out of memory")

        assert service.draft.engine is not None
        service.draft.engine.forward = broken  # type: ignore[method-assign]
        await clients[0].commit([61], 1)
        for client in clients:
            status, message, _ = await client.error()
            assert status is Status.INTERNAL
            assert "the drafter failed" in message
        assert await waiting == 1


async def test_a_server_that_loads_is_not_serving_yet(model: Path) -> None:
    server = Server("127.0.0.1:0", ["foredraft.v1.DraftService"])
    await server.start()
    async with channel(server.address) as connection:
        health = health_pb2_grpc.HealthStub(connection)
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        settings: dict[str, Any] = {"draft_model": str(model), "threads": 1, "max_model_len": 64}
        draft = await start_draft(DraftSettings(**settings), server)
        await server.set_serving()
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    await server.stop()
    await draft.stop()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"draft_model": "/nowhere/at/all"}, "/nowhere/at/all"), ({"max_model_len": 513}, "has a context of 512")],
)
async def test_a_draft_that_cannot_be_served_is_refused_with_a_sentence(
    model: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(StartError, match=words):
        await main(DraftSettings(**{"listen": "127.0.0.1:0", "draft_model": str(model), **settings}))


async def test_a_model_can_draft_with_its_own_first_layers(model: Path) -> None:
    one_layer = Reference(**{**DRAFT, "layers": 1})
    async with running(model, draft_layers=1) as service, session(service) as client:
        assert await client.propose([60], 4) == one_layer.draft(opening(COUPLED), client.text, 4)[0]
