"""Any message to any method of the three services: the status says whose mistake it was, and nothing stays behind."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from foredraft.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2
from tests.fuzz.conftest import Stack
from tests.fuzz.messages import message

Status = grpc.StatusCode
# What a server may answer to a client's mistakes; INTERNAL, UNKNOWN and a deadline would be its own.
FAIR = {
    Status.OK,
    Status.INVALID_ARGUMENT,
    Status.FAILED_PRECONDITION,
    Status.RESOURCE_EXHAUSTED,
    Status.NOT_FOUND,
    Status.CANCELLED,  # a session that ends without the message that closes it
}
TIMEOUT_S = 60.0

fuzzed = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)

UNARY: dict[str, tuple[str, type[Message]]] = {
    "/foredraft.v1.TargetService/GetModel": ("target", target_pb2.TargetServiceGetModelRequest),
    "/foredraft.v1.TargetService/ListVocabulary": ("target", common_pb2.ListVocabularyRequest),
    "/foredraft.v1.TargetService/GetTokenizer": ("target", target_pb2.GetTokenizerRequest),
    "/foredraft.v1.DraftService/GetModel": ("draft", draft_pb2.DraftServiceGetModelRequest),
    "/foredraft.v1.DraftService/ListVocabulary": ("draft", common_pb2.ListVocabularyRequest),
    "/foredraft.v1.GenerationService/Generate": ("orchestrator", generation_pb2.GenerateRequest),
    "/foredraft.v1.GenerationService/GenerateStream": ("orchestrator", generation_pb2.GenerateRequest),
    "/foredraft.v1.GenerationService/Tokenize": ("orchestrator", generation_pb2.TokenizeRequest),
    "/foredraft.v1.GenerationService/Detokenize": ("orchestrator", generation_pb2.DetokenizeRequest),
    "/foredraft.v1.GenerationService/GetModel": ("orchestrator", generation_pb2.GenerationServiceGetModelRequest),
}
STREAMS: dict[str, tuple[str, type[Message]]] = {
    "/foredraft.v1.TargetService/Verify": ("target", target_pb2.VerifyRequest),
    "/foredraft.v1.DraftService/Draft": ("draft", draft_pb2.DraftRequest),
}


def test_every_method_is_covered() -> None:
    modules = (target_pb2, draft_pb2, generation_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods == UNARY.keys() | STREAMS.keys()


def ending(
    connection: grpc.Channel, method: str, requests: Sequence[bytes], *, in_turn: bool
) -> tuple[Status, str | None]:
    """How a call with these messages ends; `in_turn`, a message waits for something to come after the one before.

    A stream of requests fits every kind of method. The client is the blocking one: that for asyncio says INTERNAL
    itself if the server ends a call that is still being written to.
    """
    turn = threading.Semaphore(1)

    def paced() -> Iterator[bytes]:
        for request in requests:
            turn.acquire(timeout=TIMEOUT_S)
            yield request

    call: Any = connection.stream_stream(method)(paced() if in_turn else iter(requests), timeout=TIMEOUT_S)
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            turn.release()
    turn.release(len(requests) + 1)
    return call.code(), call.details()


async def check(stack: Stack, method: str, requests: Sequence[Message | bytes], *, in_turn: bool = False) -> None:
    service, _ = (UNARY | STREAMS)[method]
    encoded = [request if isinstance(request, bytes) else request.SerializeToString() for request in requests]
    status, details = await asyncio.to_thread(ending, stack.channels[service], method, encoded, in_turn=in_turn)
    event(status.name)
    assert status in FAIR, details
    await stack.until_empty()


def sampling() -> st.SearchStrategy[common_pb2.Sampling]:
    """Mostly a small request, with some of what is allowed and some of what is not."""
    small = st.builds(
        common_pb2.Sampling,
        max_new_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        method=st.sampled_from(common_pb2.Method.values()),
        seed=st.integers(0, 2**64 - 1),
        ignore_eos=st.booleans(),
    )
    return st.builds(merged, message(common_pb2.Sampling), small) | small


def merged(base: common_pb2.Sampling, over: common_pb2.Sampling) -> common_pb2.Sampling:
    base.MergeFrom(over)
    return base


TOKENS = st.lists(st.integers(3, 300), min_size=1, max_size=20)
DRAFT = st.lists(st.integers(3, 300), max_size=5)


@pytest.mark.parametrize("method", UNARY)
@fuzzed
@given(data=st.data())
async def test_any_request_gets_a_fair_status(stack: Stack, method: str, data: st.DataObject) -> None:
    request = data.draw(message(UNARY[method][1]))
    await check(stack, method, [request])


@pytest.mark.parametrize("method", UNARY)
@fuzzed
@given(request=st.binary(max_size=64))
async def test_any_bytes_get_a_fair_status(stack: Stack, method: str, request: bytes) -> None:
    await check(stack, method, [request])


@pytest.mark.parametrize("method", STREAMS)
@fuzzed
@given(requests=st.lists(st.binary(max_size=64), max_size=3))
@example(requests=[])
@example(requests=[b"", b""])
async def test_any_bytes_in_a_session_get_a_fair_status(stack: Stack, method: str, requests: list[bytes]) -> None:
    await check(stack, method, requests)


@fuzzed
@given(data=st.data(), stream=st.booleans())
async def test_requests_that_are_nearly_right_get_a_fair_status(
    stack: Stack, data: st.DataObject, stream: bool
) -> None:
    request = data.draw(message(generation_pb2.GenerateRequest) | st.builds(generation_pb2.GenerateRequest))
    request.sampling.CopyFrom(data.draw(sampling()))
    request.sample_count = data.draw(st.integers(1, 3))
    request.text = data.draw(st.text(min_size=1, max_size=20))
    request.logprobs = data.draw(st.integers(0, 3))
    request.ClearField("stop_strings")
    method = "GenerateStream" if stream else "Generate"
    await check(stack, f"/foredraft.v1.GenerationService/{method}", [request])


@pytest.mark.parametrize("method", STREAMS)
@fuzzed
@given(data=st.data())
async def test_any_conversation_gets_a_fair_status(stack: Stack, method: str, data: st.DataObject) -> None:
    requests = data.draw(st.lists(message(STREAMS[method][1]), max_size=4))
    await check(stack, method, requests)


@fuzzed
@given(data=st.data(), tokens=TOKENS, sampling=sampling())
async def test_any_messages_in_a_verify_session_get_a_fair_status(
    stack: Stack, data: st.DataObject, tokens: list[int], sampling: common_pb2.Sampling
) -> None:
    opened = target_pb2.OpenTarget(token_ids=tokens, prompt_length=len(tokens), sampling=sampling)
    near = st.integers(len(tokens) - 1, len(tokens) + 6)
    rounds = st.builds(target_pb2.Round, round_id=st.integers(0, 4), base=near, token_ids=DRAFT)
    request = st.builds(target_pb2.VerifyRequest, round=rounds) | message(target_pb2.VerifyRequest)
    right = target_pb2.Round(round_id=1, base=len(tokens) + 1, token_ids=data.draw(DRAFT))
    messages = [target_pb2.VerifyRequest(open=opened), target_pb2.VerifyRequest(round=right)]
    messages += data.draw(st.lists(request, max_size=4))
    await check(stack, "/foredraft.v1.TargetService/Verify", messages, in_turn=data.draw(st.booleans()))


@fuzzed
@given(data=st.data(), tokens=TOKENS, sampling=sampling())
async def test_any_messages_in_a_draft_session_get_a_fair_status(
    stack: Stack, data: st.DataObject, tokens: list[int], sampling: common_pb2.Sampling
) -> None:
    opened = draft_pb2.OpenDraft(
        token_ids=tokens,
        prompt_length=len(tokens),
        sampling=sampling,
        drafter=data.draw(st.sampled_from(common_pb2.Drafter.values())),
    )
    length = len(tokens)
    near = st.integers(max(length - 2, 0), length + 4)
    commits = st.builds(draft_pb2.Commit, base=near, token_ids=TOKENS, max_tokens=st.integers(0, 8))
    verifying = st.builds(
        draft_pb2.Verifying, round_id=st.integers(0, 3), base=near, token_ids=TOKENS, max_tokens=st.integers(0, 8)
    )
    request = (
        st.builds(draft_pb2.DraftRequest, commit=commits)
        | st.builds(draft_pb2.DraftRequest, verifying=verifying)
        | message(draft_pb2.DraftRequest)
    )
    messages = [draft_pb2.DraftRequest(open=opened), *data.draw(st.lists(request, max_size=5))]
    await check(stack, "/foredraft.v1.DraftService/Draft", messages)
