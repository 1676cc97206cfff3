"""Target and draft services over real sockets whose text is a known sequence, for tests of the decode loop."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from foredraft.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

EOS = 99


def token_at(position: int) -> int:
    """The token of the text at this position."""
    return (position * 7 + 3) % 97


class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """Accepts draft tokens that are those of the text. `die_at` ends streams with UNAVAILABLE at that length, once;
    every verdict takes `delay` seconds; `away` tells its model to nobody."""

    def __init__(self) -> None:
        self.sessions = 0
        self.opened: list[target_pb2.OpenTarget] = []
        self.rounds: list[target_pb2.Round] = []
        self.die_at: int | None = None
        self.delay = 0.0
        self.weights_hash = "a" * 64
        self.away = False

    async def GetModel(self, request: Any, context: Any) -> target_pb2.TargetServiceGetModelResponse:
        if self.away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        model = common_pb2.Model(
            name="scripted",
            weights_hash=self.weights_hash,
            context_length=1000,
            vocabulary_size=100,
            vocabulary_hash="v",
            eos_token_ids=[EOS],
        )
        return target_pb2.TargetServiceGetModelResponse(model=model)

    async def ListVocabulary(self, request: Any, context: Any) -> common_pb2.ListVocabularyResponse:
        return common_pb2.ListVocabularyResponse(tokens=[str(i) for i in range(100)])

    async def Verify(
        self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        self.sessions += 1
        try:
            length = end = 0
            async for message in requests:
                await asyncio.sleep(self.delay)
                accepted, round_id, tokens = 0, 0, 1
                if message.HasField("open"):
                    self.opened.append(message.open)
                    length = len(message.open.token_ids)
                    end = message.open.prompt_length + message.open.sampling.max_new_tokens
                else:
                    self.rounds.append(message.round)
                    assert message.round.base == length
                    round_id = message.round.round_id
                    drafted = message.round.token_ids
                    tokens += len(drafted)
                    while accepted < len(drafted) and drafted[accepted] == token_at(length + accepted):
                        accepted += 1
                if self.die_at is not None and length >= self.die_at:
                    self.die_at = None
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted death")
                length += accepted + 1
                verdict = target_pb2.Verdict(round_id=round_id, accepted=accepted, next_token=token_at(length - 1))
                verdict.timing.compute_us = round(1e6 * self.delay)
                verdict.timing.batch_rows, verdict.timing.batch_tokens = 1, tokens
                if length >= end:
                    verdict.finish_reason = common_pb2.FINISH_REASON_MAX_TOKENS
                yield target_pb2.VerifyResponse(verdict=verdict)
        finally:
            self.sessions -= 1


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Drafts the text, wrongly at every position in `wrong`, and prepares the verdict that accepts everything.

    While `silent`, it answers nothing; `refuse` ends new sessions with that status.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self.wrong: set[int] = set()
        self.silent = asyncio.Event()
        self.silent.set()
        self.refuse: grpc.StatusCode | None = None
        self.refusal = "scripted refusal"
        self.prepare = True
        self.commits: list[draft_pb2.Commit] = []
        self.model = common_pb2.Model(name="scripted-draft", vocabulary_hash="v", vocabulary_size=100)
        self.vocabulary = [str(i) for i in range(100)]

    async def GetModel(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetModelResponse:
        return draft_pb2.DraftServiceGetModelResponse(
            model=self.model, drafters=[common_pb2.DRAFTER_MODEL], default_drafter=common_pb2.DRAFTER_MODEL
        )

    async def ListVocabulary(self, request: Any, context: Any) -> common_pb2.ListVocabularyResponse:
        return common_pb2.ListVocabularyResponse(tokens=self.vocabulary)

    def draft(self, base: int, count: int) -> list[int]:
        return [token_at(p) if p not in self.wrong else 98 for p in range(base, base + count)]

    async def Draft(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        self.sessions += 1
        try:
            async for message in requests:
                if self.refuse is not None:
                    await context.abort(self.refuse, self.refusal)
                await self.silent.wait()
                if message.HasField("commit"):
                    self.commits.append(message.commit)
                    base = message.commit.base + len(message.commit.token_ids)
                    if message.commit.max_tokens:
                        tokens = self.draft(base, message.commit.max_tokens)
                        yield draft_pb2.DraftResponse(proposal=draft_pb2.Proposal(base=base, token_ids=tokens))
                elif message.HasField("verifying"):
                    announced = message.verifying
                    if announced.HasField("commit"):
                        self.commits.append(announced.commit)
                    if not self.prepare:
                        continue
                    accepted = len(announced.token_ids)
                    base = announced.base + accepted + 1
                    continuation = draft_pb2.Continuation(
                        accepted=accepted,
                        next_token=token_at(base - 1),
                        token_ids=self.draft(base, announced.max_tokens),
                    )
                    prepared = draft_pb2.Prepared(round_id=announced.round_id, continuations=[continuation])
                    yield draft_pb2.DraftResponse(prepared=prepared)
        finally:
            self.sessions -= 1
