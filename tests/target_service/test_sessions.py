"""How sessions begin and end: bad messages, clients that leave in any way, queues, signs of life."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest

from foredraft.v1 import common_pb2, target_pb2
from target_service import service as service_module
from target_service.places import WAITING_PER_PLACE
from tests import tiny
from tests.target_service.kit import (
    CHUNK,
    CONTEXT,
    Client,
    Service,
    generate,
    open_message,
    round_message,
    running,
    until,
)

PROMPT = tiny.tokenizer().encode("The quick brown fox")
EOS = tiny.tokenizer().eos_token_id
LONG = list(range(100, 100 + 6 * CHUNK))
CLOSE = target_pb2.VerifyRequest(close=target_pb2.CloseTarget())
Code = grpc.StatusCode


def unset(*names: str) -> target_pb2.VerifyRequest:
    message = open_message(PROMPT)
    for name in names:
        message.open.sampling.ClearField(name)
    return message


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (target_pb2.VerifyRequest(), {"message"}),
        (open_message([]), {"open.token_ids"}),
        (open_message([1, tiny.VOCABULARY_SIZE]), {"open.token_ids[1]"}),
        (open_message([1] * (CONTEXT + 1)), {"open.token_ids"}),
        (open_message([1] * CONTEXT), {"open.prompt_length"}),
        (open_message(PROMPT, prompt_length=0), {"open.prompt_length"}),
        (open_message(PROMPT, prompt_length=len(PROMPT) + 1), {"open.prompt_length"}),
        (open_message(PROMPT, logprobs=21), {"open.logprobs"}),
        (open_message(PROMPT, temperature=-1, top_p=2.0), {"open.sampling.temperature", "open.sampling.top_p"}),
        (unset("seed", "max_new_tokens"), {"open.sampling.seed", "open.sampling.max_new_tokens"}),
    ],
)
async def test_a_bad_opening_is_answered_with_the_names_of_its_fields(
    service: Service, message: target_pb2.VerifyRequest, fields: set[str]
) -> None:
    client = Client(service.stub)
    await client.send(message)
    code, text, details = await client.error()
    assert code == Code.INVALID_ARGUMENT
    assert {violation.field for violation in details.violations} == fields
    assert text


def q(support: int, token_ids: Sequence[int], probabilities: Sequence[float]) -> common_pb2.SparseDistributions:
    return common_pb2.SparseDistributions(
        support=support,
        token_ids=np.array(token_ids, "<u4").tobytes(),
        probabilities=np.array(probabilities, "<f4").tobytes(),
    )


@pytest.mark.parametrize(
    ("draft", "of", "field"),
    [
        ([tiny.VOCABULARY_SIZE], q(1, [5], [1]), "round.token_ids[0]"),
        ([5] * 65, q(1, [5] * 65, [1] * 65), "round.token_ids"),
        ([5], None, "round.q"),
        ([5], q(0, [], []), "round.q.support"),
        ([5, 6], q(1, [5], [1]), "round.q.token_ids"),
        ([5], q(2, [5, 6], [0.5, float("nan")]), "round.q.probabilities[0]"),
        ([5], q(2, [5, 6], [0.5, 0.2]), "round.q.probabilities[0]"),
        ([5], q(2, [5, tiny.VOCABULARY_SIZE], [0.5, 0.5]), "round.q.token_ids[0]"),
    ],
)
async def test_a_bad_round_is_answered_with_the_name_of_its_field(
    service: Service, draft: list[int], of: common_pb2.SparseDistributions | None, field: str
) -> None:
    client = Client(service.stub)
    await client.open(PROMPT, temperature=1, method=common_pb2.METHOD_BLOCK)
    await client.send(round_message(1, len(client.text), draft, of))
    code, _, details = await client.error()
    assert code == Code.INVALID_ARGUMENT
    assert field in {violation.field for violation in details.violations}


@pytest.mark.parametrize(
    ("rounds", "reason"),
    [
        ([(1, 0)], "base is"),
        ([(1, -1)], "base is"),
        ([(1, 2)], "base is"),
        ([(0, 1)], "round_id is 0"),
        ([(3, 1), (3, 2)], "round_id is 3"),
    ],
)
async def test_a_round_that_does_not_fit_the_text_is_refused(
    service: Service, rounds: list[tuple[int, int]], reason: str
) -> None:
    client = Client(service.stub)
    await client.open(PROMPT)
    for round_id, output_length in rounds[:-1]:
        await client.send(round_message(round_id, len(PROMPT) + output_length))
        await client.verdict()
    round_id, output_length = rounds[-1]
    await client.send(round_message(round_id, len(PROMPT) + output_length))
    code, text, _ = await client.error()
    assert code == Code.FAILED_PRECONDITION
    assert reason in text


async def test_messages_out_of_order_are_refused(service: Service) -> None:
    before = Client(service.stub)
    await before.send(round_message(1, 5))
    twice = Client(service.stub)
    await twice.open(PROMPT)
    await twice.send(open_message(PROMPT))
    ended = Client(service.stub)
    await ended.open(PROMPT, max_new_tokens=1)
    await ended.send(round_message(1, len(ended.text)))
    for client, reason in ((before, "open"), (twice, "open"), (ended, "MAX_TOKENS")):
        code, text, _ = await client.error()
        assert code == Code.FAILED_PRECONDITION
        assert reason in text


async def test_a_second_round_while_one_is_in_flight_is_refused(service: Service) -> None:
    client = Client(service.stub)
    await client.open(PROMPT)
    with service.gate():
        await client.send(round_message(1, len(client.text)))
        await client.send(round_message(2, len(client.text) + 1))
        code, text, _ = await client.error()
    assert code == Code.FAILED_PRECONDITION
    assert "wait for" in text


@pytest.mark.parametrize(
    ("output", "sampling", "reason"),
    [
        ([20, EOS], {}, "EOS"),
        ([20, EOS, 21], {}, "EOS"),
        ([20, 21], {"max_new_tokens": 2}, "MAX_TOKENS"),
        ([20, 21], {"stop_token_ids": [21]}, "STOP_TOKEN"),
        ([20] * (CONTEXT - len(PROMPT)), {"max_new_tokens": 1000}, "CONTEXT_LENGTH"),
    ],
)
async def test_a_sample_that_has_ended_cannot_be_resumed(
    service: Service, output: list[int], sampling: dict[str, object], reason: str
) -> None:
    client = Client(service.stub)
    await client.send(open_message(PROMPT + output, prompt_length=len(PROMPT), **sampling))
    code, text, _ = await client.error()
    assert code == Code.FAILED_PRECONDITION
    assert reason in text


async def test_the_last_verdict_frees_the_slot_while_the_stream_is_open(service: Service) -> None:
    client = Client(service.stub)
    await client.open(PROMPT, max_new_tokens=1)
    await service.until_empty()
    await client.close()


@pytest.mark.parametrize("in_flight", [True, False], ids=["in flight", "between rounds"])
@pytest.mark.parametrize("leave", ["close", "cancel", "half-close"])
async def test_a_client_that_leaves_frees_its_slot(service: Service, leave: str, in_flight: bool) -> None:
    client = Client(service.stub)
    await client.open(PROMPT)
    with service.gate() as forwards:
        if in_flight:
            await client.send(round_message(1, len(client.text), [5, 6]))
        if leave == "close":
            await client.close()
        elif leave == "cancel":
            client.call.cancel()
        else:
            await client.call.done_writing()
            code, _, _ = await client.error()
            assert code == Code.CANCELLED
        forwards.release()
        await service.until_empty()


async def test_a_client_that_leaves_while_its_prompt_is_read_stops_the_reading(service: Service) -> None:
    client = Client(service.stub)
    forwards_before = service.target.scheduler.counters.forwards
    with service.gate() as forwards:
        await client.send(open_message(LONG))
        forwards.release()
        client.call.cancel()
        await until(lambda: service.target.places.taken == 0)
        forwards.release()
        await service.until_empty()
    assert service.target.scheduler.counters.forwards - forwards_before <= 2


async def test_streams_that_never_open_a_session_leave_nothing(service: Service) -> None:
    silent, closing, ending = (Client(service.stub) for _ in range(3))
    await silent.call.wait_for_connection()
    silent.call.cancel()
    await closing.close()
    await ending.call.done_writing()
    assert (await ending.error())[0] == Code.CANCELLED
    assert service.held == (0, 0, 0)


async def test_a_connection_that_breaks_frees_its_sessions(model: Path) -> None:
    async with running(model) as service:
        clients = [Client(service.stub) for _ in range(3)]
        for client in clients:
            await client.open(PROMPT)
        assert service.held == (3, 3, 3)
        await service.connection.close()
        await service.until_empty()


async def test_a_silent_session_is_closed(model: Path) -> None:
    async with running(model, idle_timeout_s=0.2) as service:
        opened, silent = Client(service.stub), Client(service.stub)
        await opened.open(PROMPT)
        for client in (opened, silent):
            code, text, _ = await client.error()
            assert code == Code.DEADLINE_EXCEEDED
            assert "0.2 s" in text
        await service.until_empty()


async def test_a_session_too_many_waits_and_then_goes_away(model: Path) -> None:
    async with running(model, queue_timeout_s=0.1, max_sessions=1) as service:
        first, second = Client(service.stub), Client(service.stub)
        await first.open(PROMPT)
        await second.send(open_message(PROMPT))
        code, text, details = await second.error()
        assert code == Code.RESOURCE_EXHAUSTED
        assert details.retry_after_s
        assert "0.1 s" in text
        await first.close()
        await generate(service, PROMPT)
        await service.until_empty()


async def test_waiting_sessions_are_served_in_order_and_their_number_is_bounded(model: Path) -> None:
    async with running(model, max_sessions=1) as service:
        places = service.target.places
        holder, *waiting = (Client(service.stub) for _ in range(1 + WAITING_PER_PLACE))
        await holder.open(PROMPT)
        for count, client in enumerate(waiting, start=1):
            await client.send(open_message(PROMPT))
            await until(lambda count=count: places.waiting == count)
        refused = Client(service.stub)
        await refused.send(open_message(PROMPT))
        code, _, details = await refused.error()
        assert code == Code.RESOURCE_EXHAUSTED
        assert details.retry_after_s
        first, gives_up, *others = waiting
        gives_up.call.cancel()
        await until(lambda: places.waiting == WAITING_PER_PLACE - 1)
        for before, client in pairwise([holder, first, *others]):
            await before.close()
            await client.verdict()
        await others[-1].close()
        await service.until_empty()


async def test_progress_comes_only_after_another_forward(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "PROGRESS_S", 0.01)
    client = Client(service.stub)
    seen = [service.target.scheduler.counters.forwards]
    with service.gate() as forwards:
        await client.send(open_message(LONG[1:]))
        for _ in range(3):
            forwards.release()
            response = await client.read()
            seen.append(response.progress.forwards)
            # Time for several more, which must not come.
            await asyncio.sleep(0.05)
        forwards.release(100)
        await client.verdict()
    assert seen == list(range(seen[0], seen[0] + 4))
    await client.close()
