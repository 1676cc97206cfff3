"""The decode loop: draft and target sessions of one sample, overlapped.

proposal = nothing                                # the target reads the prompt and emits the first token
while not finished:
    verdict_task = target.verify(proposal)        # the target is never idle
    draft.verifying(proposal)                     # it prepares answers for likely verdicts and pushes them
    verdict = await verdict_task
    emit(verdict)
    proposal = prepared[verdict] or draft.propose(text)   # hit: already here; miss: drafted now, or a plain round
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import grpc

from foredraft.errors import RequestError, unavailable
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2
from orchestrator.backends import Backends, TargetReplica
from orchestrator.costs import TargetCosts
from orchestrator.draft import DraftSession, Proposal
from orchestrator.draft_length import DraftLength, Shared
from orchestrator.state import DecodeRequest as DecodeRequest
from orchestrator.state import Emission as Emission
from orchestrator.state import SampleState
from orchestrator.target import TargetSession, TimedVerdict, is_lost

# Emissions that a slow reader may leave unread before the loop waits for it.
MAX_UNREAD = 64

# A draft session is given up after so many timeouts without an answer.
ABANDON_AFTER = 3

NOTHING = Proposal([])


class Decoder:
    """Decodes samples on the target and draft services behind `backends`."""

    def __init__(self, backends: Backends, settings: OrchestratorSettings) -> None:
        self._backends = backends
        self._settings = settings
        self._costs = TargetCosts()
        # Samples that have left a target that drains and have not reached another yet.
        self._moving: set[int] = set()
        self._shared: dict[tuple[generation_pb2.Mode, common_pb2.Drafter], Shared] = {}

    async def decode(
        self, request: DecodeRequest, statistics: generation_pb2.SpeculationStatistics
    ) -> AsyncGenerator[Emission, None]:
        """Yield the output of one sample verdict by verdict, filling `statistics` as it goes.

        Closing the generator ends the sessions on both services at once. Raises grpc.aio.AioRpcError as the target
        does, and RequestError UNAVAILABLE if the target was gone for too long.
        """
        sample = self._sample(request, statistics)
        emissions: asyncio.Queue[Emission | Exception | None] = asyncio.Queue(MAX_UNREAD)
        task = asyncio.create_task(self._run(sample, emissions))
        try:
            while (emission := await emissions.get()) is not None:
                if isinstance(emission, Exception):
                    raise emission
                yield emission
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _sample(self, request: DecodeRequest, statistics: generation_pb2.SpeculationStatistics) -> SampleState:
        turns = request.mode != generation_pb2.MODE_OVERLAPPED
        length = DraftLength(
            limit=request.max_draft_tokens if request.draft_tokens is None else request.draft_tokens,
            shared=self._shared.setdefault((request.mode, request.drafter), Shared(self._costs, turns)),
            fixed=request.draft_tokens is not None,
            target_accept_rate=self._settings.target_accept_rate,
        )
        statistics.mode = request.mode
        statistics.reproducibility = _reproducibility(request)
        context_length = self._backends.target_model.context_length
        return SampleState(request, statistics, length, self._costs, context_length, text=list(request.prompt))

    async def _run(self, sample: SampleState, emissions: asyncio.Queue[Emission | Exception | None]) -> None:
        """Decode to the end, on another target when one was lost or drains."""
        targets, lost = self._backends.targets, None
        reached, give_up, cause = -1, time.perf_counter() + self._settings.target_wait_s, ""
        try:
            while True:
                replica = await self._pick_target(sample, lost, give_up, cause)
                try:
                    if await self._speculate(sample, replica, emissions):
                        break
                except grpc.aio.AioRpcError as error:
                    if not is_lost(error):
                        raise
                    lost, cause = replica, error.details() or error.code().name
                    targets.failed(replica, f"lost a session: {cause}")
                if len(sample.text) > reached:  # Else it got stuck here before, and time runs.
                    reached, give_up = len(sample.text), time.perf_counter() + self._settings.target_wait_s
                elif time.perf_counter() > give_up:
                    raise self._gone(cause)
            await emissions.put(None)
        except Exception as error:
            await emissions.put(error)
        finally:
            self._moving.discard(id(sample))

    async def _pick_target(
        self, sample: SampleState, lost: TargetReplica | None, give_up: float, cause: str
    ) -> TargetReplica:
        """A target for the text so far, rather not the one that was lost.

        Raises RequestError UNAVAILABLE if there is none before `give_up`.
        """
        targets = self._backends.targets
        try:
            async with asyncio.timeout(give_up - time.perf_counter()):
                while True:
                    without = [lost] if lost is not None and targets.usable != [lost] else []
                    replica = targets.pick(sample.text, without=without)
                    if replica is not None:
                        return replica
                    await targets.wait()
        except TimeoutError:
            raise self._gone(targets.reason or cause) from None

    def _gone(self, cause: str) -> RequestError:
        wait = self._settings.target_wait_s
        return unavailable(f"the target was lost and did not come back within {wait:g} s: {cause}", wait)

    async def _speculate(
        self, sample: SampleState, replica: TargetReplica, emissions: asyncio.Queue[Emission | Exception | None]
    ) -> bool:
        """The decode loop, from the text so far to the end of the sample, or False: to where it had better move."""
        targets = self._backends.targets
        async with replica.session() as stub:
            self._moving.discard(id(sample))
            target = TargetSession(
                stub,
                silence_s=self._settings.target_silence_s,
                timeout=sample.timeout(),
                metadata=sample.metadata(),
            )
            verdict_task = asyncio.create_task(target.open(self._open_target(sample)))
            draft = self._open_draft(sample)  # Both read the prompt at the same time.
            proposal, round_id = NOTHING, 0
            try:
                while True:
                    asked = self._announce(sample, draft, round_id, proposal)
                    timed = await verdict_task
                    emission = sample.receive(timed.verdict, proposal)
                    ends = emission.finish_reason or (replica.draining and self._may_move(sample))
                    ready = None
                    if not ends:
                        draft, ready = await self._ready(sample, draft, timed.verdict, proposal, asked)
                    if ready is not None:
                        # The target goes on at once: neither counting nor readers hold it up.
                        proposal, round_id = ready, round_id + 1
                        verdict_task = self._verify(sample, target, round_id, proposal)
                        await asyncio.sleep(0)  # for the task to send
                    sample.learn(timed, emission.proposed)
                    await emissions.put(emission)
                    if ends:
                        return bool(emission.finish_reason)
                    if ready is None and draft is not None:
                        proposal, round_id = await self._after_miss(sample, draft), round_id + 1
                        verdict_task = self._verify(sample, target, round_id, proposal)
            finally:
                verdict_task.cancel()
                target.close()
                targets.remember(sample.text, replica)
                # Before anything that waits: a consumer that has the last emission may cancel this task.
                sample.write_times()
                if draft is not None:
                    await self._close_draft(sample, draft)

    def _verify(
        self, sample: SampleState, target: TargetSession, round_id: int, proposal: Proposal
    ) -> asyncio.Task[TimedVerdict]:
        return asyncio.create_task(target.verify(round_id, len(sample.text), proposal.token_ids, proposal.q))

    def _may_move(self, sample: SampleState) -> bool:
        """Whether another target has room, which is then kept for this sample: elsewhere it would have to wait."""
        if self._backends.targets.room <= len(self._moving):
            return False
        self._moving.add(id(sample))
        return True

    def _announce(self, sample: SampleState, draft: DraftSession | None, round_id: int, proposal: Proposal) -> int:
        """Tell the draft what is being verified, if it can prepare for that; how many tokens it is asked for."""
        if sample.request.mode != generation_pb2.MODE_OVERLAPPED or draft is None or not draft.usable:
            return 0
        # At least one token comes before what is prepared.
        k = sample.length.prepare(sample.wanted - 1)
        if k > 0:
            self._costs.drafting()
            draft.verifying(round_id, sample.text, proposal.token_ids, k, sample.length.least)
        return k

    async def _ready(
        self,
        sample: SampleState,
        draft: DraftSession | None,
        verdict: target_pb2.Verdict,
        proposal: Proposal,
        asked: int,
    ) -> tuple[DraftSession | None, Proposal | None]:
        """The draft session to go on with, and what to verify at once after the verdict on `proposal`.

        That is the prepared answer, nothing for a plain round, or None: a draft that is not there is to be waited for.
        """
        prepared = None
        if asked > 0 and draft is not None:
            prepared = draft.take_prepared(verdict.accepted, verdict.next_token)
            sample.count_foreseen(len(proposal.token_ids), verdict.accepted, hit=prepared is not None)
            if prepared is not None:
                sample.length.prepared(asked, len(prepared.token_ids))
        opened = await self._check_draft(sample, draft)
        k = sample.length.choose(sample.wanted)
        if opened is None or opened is not draft or not draft.usable or k == 0:
            # A new session reads the text while plain rounds go on.
            return opened, NOTHING
        if prepared is None:
            return draft, None if sample.length.after_miss(sample.wanted) > 0 else NOTHING
        sample.statistics.used_tokens += min(k, len(prepared.token_ids))
        return draft, prepared.first(k)

    async def _after_miss(self, sample: SampleState, draft: DraftSession) -> Proposal:
        k = sample.length.after_miss(sample.wanted)
        if k == 0:  # Learnt from the verdict itself.
            return NOTHING
        if sample.request.mode == generation_pb2.MODE_OVERLAPPED:
            self._costs.drafting()
        timeout, asked = self._settings.draft_timeout_s, time.perf_counter()
        fresh = await draft.propose(sample.text, k, timeout)
        waited = time.perf_counter() - asked
        if draft.failure is None:
            sample.length.waited(k, waited)
        sample.seconds["draft_wait_time"] += waited
        if fresh is None:
            if draft.failure is None:
                sample.statistics.degraded_reason = f"the draft service did not answer within {timeout:g} s"
            return NOTHING
        sample.seconds["draft_time"] += fresh.compute_s
        sample.statistics.late_hits += fresh.prepared > 0
        return fresh

    def _open_target(self, sample: SampleState) -> target_pb2.OpenTarget:
        request = sample.request
        return target_pb2.OpenTarget(
            token_ids=sample.text,
            prompt_length=len(request.prompt),
            sample_index=request.sample_index,
            sampling=request.sampling,
            logprobs=request.logprobs,
        )

    def _open_draft(self, sample: SampleState) -> DraftSession | None:
        request, drafts = sample.request, self._backends.drafts
        if request.mode == generation_pb2.MODE_PLAIN or not sample.worth_drafting:
            return None
        replica = drafts.pick(sample.text, without=sample.refused_by)
        if replica is None:
            if not sample.refused_by:
                sample.statistics.degraded_reason = self._backends.degraded_reason
            return None
        message = draft_pb2.OpenDraft(
            token_ids=sample.text,
            prompt_length=len(request.prompt),
            sample_index=request.sample_index,
            sampling=request.sampling,
            drafter=request.drafter,
            eos_token_ids=self._backends.target_model.eos_token_ids,
        )
        replica.sessions += 1
        sample.draft_replica = replica
        size = self._backends.target_model.vocabulary_size
        return DraftSession(
            replica.stub, message, vocabulary_size=size, timeout=sample.timeout(), metadata=sample.metadata()
        )

    async def _check_draft(self, sample: SampleState, draft: DraftSession | None) -> DraftSession | None:
        """The draft session to go on with: this one, a new one if it is gone and there is a service, or none."""
        replica = sample.draft_replica
        if draft is None or replica is None:
            return self._open_draft(sample)
        silent = draft.overdue_s > ABANDON_AFTER * self._settings.draft_timeout_s
        moves = replica.draining and bool(self._backends.drafts.usable)
        if draft.failure is None and not silent and not moves:
            return draft
        await self._close_draft(sample, draft)
        if moves:
            return self._open_draft(sample)
        if draft.failure is None:
            self._backends.drafts.failed(replica, "did not answer")
            return None
        reason = f"the session on the draft service ended: {draft.failure.details()}"
        sample.statistics.degraded_reason = reason
        if not is_lost(draft.failure):
            sample.refused_by.append(replica)
        elif draft.failure.code() is grpc.StatusCode.UNAVAILABLE:
            self._backends.drafts.failed(replica, f"lost a session: {draft.failure.details()}")
        # A masked status (see is_lost) may also mean that just this session was refused: the next one will tell.
        return None

    async def _close_draft(self, sample: SampleState, draft: DraftSession) -> None:
        sample.statistics.prepared_tokens += draft.prepared_tokens
        draft.prepared_tokens = 0  # This may be called again if it is cancelled.
        replica, sample.draft_replica = sample.draft_replica, None
        if replica is not None:
            replica.sessions -= 1
            self._backends.drafts.remember(sample.text, replica)
        await draft.close()


def _reproducibility(request: DecodeRequest) -> generation_pb2.Reproducibility:
    """Which promise a seed gives: draws of rejection and block verification depend on where rounds begin."""
    sampling = request.sampling
    by_seed = sampling.method in (common_pb2.METHOD_UNSPECIFIED, common_pb2.METHOD_COUPLED)
    greedy = sampling.HasField("temperature") and sampling.temperature == 0
    if by_seed or greedy or request.mode == generation_pb2.MODE_PLAIN:
        return generation_pb2.REPRODUCIBILITY_SEED
    if request.mode == generation_pb2.MODE_SEQUENTIAL and request.draft_tokens is not None:
        return generation_pb2.REPRODUCIBILITY_SEED_AND_DRAFT
    return generation_pb2.REPRODUCIBILITY_NONE
