"""What a draft session keeps of the answers that come while a round is verified."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from foredraft.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from orchestrator.draft import DraftSession
from tests.orchestrator.scripted import ScriptedDraft
from tests.target_service.kit import until

SAMPLING = common_pb2.Sampling(max_new_tokens=20, seed=1)
OPEN = draft_pb2.OpenDraft(token_ids=[1, 2, 3], prompt_length=3, sampling=SAMPLING)


class GrowingDraft(ScriptedDraft):
    """Sends continuations for two verdicts, longer by a token with every message of `lengths`."""

    def __init__(self, lengths: list[int], round_id: int) -> None:
        super().__init__()
        self.lengths, self.round_id = lengths, round_id
        self.requests: list[draft_pb2.DraftRequest] = []

    async def Draft(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        async for request in requests:
            self.requests.append(request)
            for length in self.lengths if request.HasField("verifying") else []:
                continuations = [
                    draft_pb2.Continuation(accepted=accepted, next_token=7, token_ids=range(10, 10 + length))
                    for accepted in (0, 2)
                ]
                prepared = draft_pb2.Prepared(round_id=self.round_id, continuations=continuations)
                yield draft_pb2.DraftResponse(prepared=prepared)


@pytest.mark.parametrize(("round_id", "kept"), [(5, 4), (4, 0)])
async def test_the_longest_continuation_for_a_verdict_on_the_round_counts(round_id: int, kept: int) -> None:
    draft, server = GrowingDraft([2, 3, 4], round_id), grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    port = server.add_insecure_port("127.0.0.1:0")
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        session = DraftSession(draft_pb2_grpc.DraftServiceStub(channel), OPEN, vocabulary_size=100)
        stack.push_async_callback(session.close)
        session.verifying(5, [1, 2, 3, 4], [5, 6], max_tokens=4, min_tokens=2)
        session.verifying(5, [1, 2, 3, 4], [5, 6], max_tokens=4, min_tokens=2)
        await until(lambda: len(draft.requests) == 3 and session.prepared_tokens == 2 * kept)
        found = session.take_prepared(2, 7)
        assert (found.token_ids if found else []) == list(range(10, 10 + kept))
        assert session.take_prepared(1, 7) is None
    first, second = (request.verifying for request in draft.requests[1:])
    # What became final goes along with what is verified after it, once.
    assert (first.base, first.commit.base, list(first.commit.token_ids)) == (4, 3, [4])
    assert (first.max_tokens, first.min_tokens) == (4, 2)
    assert not second.HasField("commit")
