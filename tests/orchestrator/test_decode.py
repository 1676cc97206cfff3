"""The decode loop against scripted services over real sockets: what it promises whatever the services do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from foredraft.errors import RequestError
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import common_pb2, draft_pb2_grpc, generation_pb2, target_pb2, target_pb2_grpc
from orchestrator import replicas
from orchestrator.backends import Backends, PairError
from orchestrator.decode import Decoder, DecodeRequest
from orchestrator.draft_length import DraftLength
from orchestrator.state import check_verdict
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget, token_at

PROMPT = [token_at(i) for i in range(5)]


@dataclass
class Stack:
    target: ScriptedTarget
    draft: ScriptedDraft
    settings: OrchestratorSettings
    backends: Backends
    statistics: generation_pb2.SpeculationStatistics

    async def decode(
        self,
        mode: generation_pb2.Mode = generation_pb2.MODE_OVERLAPPED,
        count: int = 40,
        each: Callable[[list[int]], None] = lambda text: None,
        draft_tokens: int | None = 4,
    ) -> list[int]:
        """Output tokens; `each` sees the output after every emission."""
        output: list[int] = []
        decoder = Decoder(self.backends, self.settings)
        async for emission in decoder.decode(request(mode, count, draft_tokens), self.statistics):
            output += emission.token_ids
            each(output)
        return output


def request(mode: generation_pb2.Mode, count: int, draft_tokens: int | None = 4) -> DecodeRequest:
    return DecodeRequest(
        request_id="test",
        prompt=PROMPT,
        sample_index=0,
        sampling=common_pb2.Sampling(temperature=0, seed=1, max_new_tokens=count),
        logprobs=None,
        mode=mode,
        drafter=common_pb2.DRAFTER_UNSPECIFIED,
        draft_tokens=draft_tokens,
        max_draft_tokens=4,
    )


def expected(count: int = 40) -> list[int]:
    return [token_at(len(PROMPT) + i) for i in range(count)]


@pytest.fixture
async def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setattr(replicas, "RETRY_INTERVAL", 0.02)
    target, draft = ScriptedTarget(), ScriptedDraft()
    addresses = {name: f"unix:{tmp_path}/{name}" for name in ("target", "draft")}
    target_server, draft_server = grpc.aio.server(), grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, target_server)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, draft_server)
    target_server.add_insecure_port(addresses["target"])
    draft_server.add_insecure_port(addresses["draft"])
    await asyncio.gather(target_server.start(), draft_server.start())
    settings = OrchestratorSettings(**addresses, draft_timeout_s=0.1, target_wait_s=0.3)
    backends = Backends(settings)
    await backends.connect()
    yield Stack(target, draft, settings, backends, generation_pb2.SpeculationStatistics())
    await backends.close()
    await asyncio.gather(target_server.stop(None), draft_server.stop(None))


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, at most five seconds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "mode", [generation_pb2.MODE_PLAIN, generation_pb2.MODE_SEQUENTIAL, generation_pb2.MODE_OVERLAPPED]
)
@pytest.mark.parametrize("wrong", [set(), {10, 11, 20, 33}, set(range(1000))])
async def test_text_is_the_targets_in_every_mode_with_any_draft(
    stack: Stack, mode: generation_pb2.Mode, wrong: set[int]
) -> None:
    stack.draft.wrong = wrong
    assert await stack.decode(mode) == expected()


async def test_foreseen_verdicts_need_no_further_proposal(stack: Stack) -> None:
    stack.target.delay = 0.05  # far more than preparing takes
    await stack.decode()
    statistics = stack.statistics
    # Every verdict but the last is followed by a proposal, and all were prepared.
    assert statistics.hits == statistics.rounds - 1
    assert statistics.misses == 0
    assert all(commit.max_tokens == 0 for commit in stack.draft.commits)
    assert statistics.used_tokens == statistics.drafted == statistics.accepted == 40 - statistics.rounds


async def test_statistics_add_up(stack: Stack) -> None:
    stack.draft.wrong = {12, 13, 30}
    await stack.decode()
    statistics = stack.statistics
    assert statistics.accepted + statistics.rounds == 40
    assert sum(statistics.accepted_per_position) == statistics.accepted
    assert sum(statistics.drafted_per_position) == statistics.drafted
    assert statistics.mean_accepted_length == pytest.approx(40 / statistics.rounds)
    assert statistics.misses > 0
    assert statistics.prepared_tokens >= statistics.used_tokens > 0
    assert statistics.total_time.ToNanoseconds() >= statistics.time_to_first_token.ToNanoseconds() > 0


async def test_hits_and_misses_are_told_by_kind(stack: Stack) -> None:
    stack.target.delay = 0.05
    stack.draft.wrong = {12, 13, 30}
    await stack.decode()
    statistics = stack.statistics
    # The scripted draft prepares for just one verdict: that all is accepted.
    assert statistics.hits == statistics.hits_all_accepted > 0
    assert statistics.misses > statistics.misses_all_accepted == 0


async def test_after_a_miss_the_draft_catches_up_while_plain_rounds_go_on(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLength, "after_miss", lambda self, wanted: 0)
    stack.target.delay = 0.02
    stack.draft.wrong = {12, 25}
    assert await stack.decode() == expected()
    assert all(commit.max_tokens == 0 for commit in stack.draft.commits), "the target waited for a draft"
    assert stack.statistics.plain_rounds > 0
    assert stack.statistics.hits > 0
    assert stack.statistics.draft_wait_time.ToNanoseconds() == 0


async def test_short_replies_are_not_drafted_for_unless_asked(stack: Stack) -> None:
    assert await stack.decode(count=4, draft_tokens=None) == expected(4)
    assert stack.statistics.drafted == 0
    assert await stack.decode(count=4, draft_tokens=4) == expected(4)
    assert stack.statistics.drafted > 0


async def test_a_draft_that_does_not_pay_is_left_alone_and_tried_again(stack: Stack) -> None:
    stack.target.delay = 0.01  # A draft costs a fraction of that.
    stack.draft.wrong = set(range(1000))
    decoder = Decoder(stack.backends, stack.settings)

    async def decode() -> generation_pb2.SpeculationStatistics:
        statistics = generation_pb2.SpeculationStatistics()
        sample = request(generation_pb2.MODE_SEQUENTIAL, 150, draft_tokens=None)
        assert [t async for e in decoder.decode(sample, statistics) for t in e.token_ids] == expected(150)
        return statistics

    await decode()
    stack.draft.wrong = set()
    later = [await decode() for _ in range(4)]
    assert later[-1].accepted > 60, "drafting did not come back"


async def test_draft_tokens_never_exceed_what_may_still_be_emitted(stack: Stack) -> None:
    assert await stack.decode(count=7) == expected(7)
    assert all(r.base + len(r.token_ids) < len(PROMPT) + 7 for r in stack.target.rounds)


async def test_sequential_mode_announces_nothing(stack: Stack) -> None:
    await stack.decode(generation_pb2.MODE_SEQUENTIAL)
    assert stack.statistics.prepared_tokens == stack.statistics.hits == stack.statistics.misses == 0
    assert stack.statistics.accepted == stack.statistics.drafted > 0


async def test_silent_draft_costs_one_timeout_and_is_used_again_when_it_answers(stack: Stack) -> None:
    stack.draft.prepare = False

    def fall_silent_for_a_while(output: list[int]) -> None:
        if len(output) >= 10 and stack.statistics.plain_rounds == 0:
            stack.draft.silent.clear()
        if len(output) >= 30:
            stack.draft.silent.set()

    output = await stack.decode(count=400, each=fall_silent_for_a_while)
    assert output == expected(400)
    assert stack.statistics.plain_rounds > 10
    assert stack.target.rounds[-1].token_ids, "drafting did not resume"
    assert stack.statistics.degraded_reason == "the draft service did not answer within 0.1 s"


async def test_draft_that_dies_leaves_plain_decoding_and_says_so(stack: Stack) -> None:
    def die(output: list[int]) -> None:
        stack.draft.refuse = grpc.StatusCode.UNAVAILABLE

    assert await stack.decode(count=100, each=die) == expected(100)
    assert "draft service" in stack.statistics.degraded_reason
    assert stack.statistics.plain_rounds > 0


async def test_draft_without_a_free_session_leaves_plain_decoding(stack: Stack) -> None:
    stack.draft.refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await stack.decode() == expected()
    assert stack.statistics.degraded_reason
    assert stack.statistics.drafted == 0


async def test_a_masked_error_of_one_session_does_not_take_the_draft_from_all_others(stack: Stack) -> None:
    # What grpc makes of any status, a refusal for example, if a write meets the end of the stream.
    stack.draft.refuse, stack.draft.refusal = grpc.StatusCode.INTERNAL, "Internal error from Core"
    assert await stack.decode() == expected()
    assert stack.backends.draft is not None
    stack.draft.refuse = None
    stack.statistics.Clear()
    assert await stack.decode() == expected()
    assert stack.statistics.drafted > 0
    assert not stack.statistics.degraded_reason


async def test_lost_target_is_reopened_with_the_tokens_so_far(stack: Stack) -> None:
    stack.target.die_at = 20
    assert await stack.decode() == expected()
    resumed = stack.target.opened[-1]
    assert list(resumed.token_ids) == [token_at(i) for i in range(len(resumed.token_ids))]
    assert len(resumed.token_ids) >= 20
    assert resumed.prompt_length == len(PROMPT)


async def test_target_with_other_weights_is_not_used_to_go_on(stack: Stack) -> None:
    stack.target.die_at = 20
    stack.target.weights_hash = "b" * 64
    with pytest.raises(RequestError, match="other weights") as caught:
        await stack.decode()
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE


async def test_target_that_stays_away_ends_in_unavailable_with_retry_info(stack: Stack) -> None:
    stack.target.die_at, stack.target.away = 20, True
    with pytest.raises(RequestError, match="did not come back") as caught:
        await stack.decode()
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details


async def test_closing_the_generator_frees_both_sessions(stack: Stack) -> None:
    generator = Decoder(stack.backends, stack.settings).decode(
        request(generation_pb2.MODE_OVERLAPPED, 900), stack.statistics
    )
    await anext(generator)
    assert stack.target.sessions == stack.draft.sessions == 1
    await generator.aclose()
    await settled(lambda: stack.target.sessions == stack.draft.sessions == 0)


async def test_statistics_are_whole_for_a_consumer_that_leaves_with_the_last_emission(stack: Stack) -> None:
    generator = Decoder(stack.backends, stack.settings).decode(
        request(generation_pb2.MODE_OVERLAPPED, 20), stack.statistics
    )
    async for emission in generator:
        if emission.finish_reason:
            break
    await generator.aclose()
    assert stack.statistics.total_time.ToNanoseconds() > 0
    assert stack.statistics.prepared_tokens > 0


async def test_sessions_end_with_the_sample(stack: Stack) -> None:
    await stack.decode()
    await settled(lambda: stack.target.sessions == stack.draft.sessions == 0)


async def test_slow_reader_holds_the_target_back(stack: Stack) -> None:
    generator = Decoder(stack.backends, stack.settings).decode(
        request(generation_pb2.MODE_PLAIN, 900), stack.statistics
    )
    await anext(generator)
    await settled(lambda: len(stack.target.rounds) >= 60)
    await asyncio.sleep(0.2)
    assert len(stack.target.rounds) < 100
    await generator.aclose()


@pytest.mark.parametrize("refusal", [None, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_a_sample_leaves_nothing_running_even_if_the_draft_ends_its_session(
    stack: Stack, refusal: grpc.StatusCode | None
) -> None:
    before = calls()
    stack.draft.refuse = refusal
    assert await stack.decode() == expected()
    # The watch over a draft that was lost begins anew, with other tasks.
    await settled(lambda: len(calls()) <= len(before))


def calls() -> set[asyncio.Task[object]]:
    """The tasks that run, without those in which the scripted servers wait for calls."""
    return {task for task in asyncio.all_tasks() if "AioServer" not in repr(task)}


async def test_draft_with_another_vocabulary_is_refused_naming_the_first_difference(stack: Stack) -> None:
    stack.draft.model.vocabulary_hash = "w"
    stack.draft.vocabulary[42] = "other"
    backends = Backends(stack.settings)
    with pytest.raises(PairError, match=r"vocabulary v\).*token 42 is '42' for the target and 'other' for the draft"):
        await backends.connect()
    await backends.close()


@pytest.mark.parametrize(
    "verdict",
    [
        target_pb2.Verdict(accepted=3, next_token=1),
        target_pb2.Verdict(),
        target_pb2.Verdict(finish_reason=common_pb2.FINISH_REASON_EOS),
    ],
)
def test_a_verdict_that_no_target_may_give_is_an_error_and_not_an_endless_text(verdict: target_pb2.Verdict) -> None:
    with pytest.raises(RequestError) as caught:
        check_verdict(verdict, drafted=2)
    assert caught.value.status is grpc.StatusCode.INTERNAL
