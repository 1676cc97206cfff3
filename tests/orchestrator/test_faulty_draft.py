"""A draft whose answers cannot be used costs speed, never the text."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from foredraft.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2
from tests.orchestrator.scripted import ScriptedDraft, ScriptedTarget
from tests.orchestrator.test_decode import expected, request
from tests.orchestrator.test_replicas import Decoding, Servers, servers

__all__ = ["servers"]

Answer = draft_pb2.Proposal | draft_pb2.Continuation


class FaultyDraft(ScriptedDraft):
    """Changes its answers by `spoil`, and sends each proposal `times` times."""

    def __init__(self, spoil: Callable[[Any], object], times: int = 1) -> None:
        super().__init__()
        self.spoil = spoil
        self.times = times

    async def Draft(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        async for response in super().Draft(requests, context):
            is_proposal = response.HasField("proposal")
            self.spoil(response.proposal if is_proposal else response.prepared.continuations[0])
            for _ in range(self.times if is_proposal else 1):
                yield response


class StrictTarget(ScriptedTarget):
    """Refuses draft tokens as the real one does; `q_needed` for verification by rejection."""

    q_needed = False

    async def Verify(
        self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        async def checked() -> AsyncIterator[target_pb2.VerifyRequest]:
            async for message in requests:
                ids = message.round.token_ids
                bad_q = message.round.HasField("q") != (self.q_needed and len(ids) > 0)
                if len(ids) > 64 or any(i >= 100 for i in ids) or bad_q:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad round")
                yield message

        async for response in super().Verify(checked(), context):
            yield response


def too_many(answer: Answer) -> None:
    answer.token_ids.extend([1] * 300)


def beyond_the_vocabulary(answer: Answer) -> None:
    answer.token_ids[0] = 5000


def stray_q(answer: Answer) -> None:
    answer.q.CopyFrom(common_pb2.SparseDistributions(support=3, token_ids=b"x"))


def other_base(answer: Answer) -> None:
    if isinstance(answer, draft_pb2.Proposal):
        answer.base += 1


def nothing(answer: Answer) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (too_many, "304 tokens where at most 4 were asked for"),
        (beyond_the_vocabulary, "5000"),
        (stray_q, "q: is set"),
    ],
)
@pytest.mark.parametrize("prepare", [False, True])
async def test_answers_that_the_target_would_refuse_end_drafting_and_not_the_text(
    servers: Servers, spoil: Callable[[Any], object], says: str, prepare: bool
) -> None:
    draft, target = FaultyDraft(spoil), StrictTarget()
    draft.prepare, target.delay = prepare, 0.005
    async with Decoding(target=await servers.target(target), draft=await servers.draft(draft)) as decoding:
        assert await decoding.decode() == expected()
        assert says in decoding.statistics.degraded_reason
        assert decoding.statistics.drafted == 0


@pytest.mark.parametrize(
    ("spoil", "times", "says"),
    [(other_base, 1, "a proposal for"), (nothing, 2, "a proposal that nobody asked for")],
)
async def test_proposals_out_of_turn_end_drafting_and_not_the_text(
    servers: Servers, spoil: Callable[[Any], object], times: int, says: str
) -> None:
    draft, target = FaultyDraft(spoil, times), StrictTarget()
    target.delay = 0.005
    async with Decoding(target=await servers.target(target), draft=await servers.draft(draft)) as decoding:
        output = await decoding.decode(mode=generation_pb2.MODE_SEQUENTIAL)
        assert output == expected()
        assert says in decoding.statistics.degraded_reason


@pytest.mark.parametrize(
    ("q", "says"),
    [
        (None, "q: is not set"),
        (common_pb2.SparseDistributions(support=0), "q.support: is 0"),
        (
            common_pb2.SparseDistributions(support=1, token_ids=b"1234", probabilities=b"1234"),
            "q.token_ids: has 4 bytes",
        ),
    ],
)
async def test_rejection_sampling_with_a_draft_that_does_not_tell_its_distributions_goes_on_plainly(
    servers: Servers, q: common_pb2.SparseDistributions | None, says: str
) -> None:
    draft, target = FaultyDraft(lambda answer: answer.q.CopyFrom(q) if q else None), StrictTarget()
    target.q_needed = True
    async with Decoding(target=await servers.target(target), draft=await servers.draft(draft)) as decoding:
        asked = request(generation_pb2.MODE_OVERLAPPED, 40)
        asked.sampling.method, asked.sampling.temperature = common_pb2.METHOD_REJECTION, 1.0
        output = [t async for e in decoding.decoder.decode(asked, decoding.statistics) for t in e.token_ids]
        assert output == expected()
        assert says in decoding.statistics.degraded_reason
