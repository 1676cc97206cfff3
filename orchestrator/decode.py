"""The decode loop: draft and target sessions of one sample, overlapped.

proposal = nothing                                # the target reads the prompt and emits the first token
while not finished:
    verdict_task = target.verify(proposal)        # the target is never idle
    draft.verifying(proposal)                     # it prepares answers for likely verdicts and pushes them
    verdict = await verdict_task
    emit(verdict)
    proposal = prepared[verdict] or draft.propose(text)   # hit: already here; miss: drafted now, or a plain round
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import grpc
from google.protobuf.duration_pb2 import Duration

from foredraft.config import OrchestratorSettings
from foredraft.serving.errors import unavailable
from foredraft.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2
from orchestrator.backends import Backends
from orchestrator.costs import TargetCosts
from orchestrator.draft import DraftSession, Proposal
from orchestrator.draft_length import DraftLength, Shared
from orchestrator.target import Metadata, TargetSession, TimedVerdict, is_lost

# Emissions that a slow reader may leave unread before the loop waits for it.
MAX_UNREAD = 64

# Replies of at most so many tokens are decoded plainly: the draft would have to read the prompt for a round or two.
SHORT_REPLY = 4

NOTHING = Proposal([])


@dataclass(frozen=True, slots=True)
class Emission:
    """What one verdict adds to the output; `proposed` draft tokens were verified for it.

    `finish_reason` is FINISH_REASON_UNSPECIFIED while the sample goes on.
    """

    token_ids: list[int]
    drafted: list[bool]
    proposed: int
    logprobs: list[common_pb2.TokenLogprobs]
    finish_reason: common_pb2.FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One sample to decode. In `sampling`, seed and max_new_tokens are set. `draft_tokens` fixes k; `deadline` is an
    instant of time.perf_counter."""

    request_id: str
    prompt: list[int]
    sample_index: int
    sampling: common_pb2.Sampling
    logprobs: int | None
    mode: generation_pb2.Mode
    drafter: common_pb2.Drafter
    draft_tokens: int | None
    max_draft_tokens: int
    deadline: float | None = None


@dataclass(slots=True)
class _Sample:
    """The state of one sample that outlives its sessions: `text` is the truth from which any of them is reopened."""

    request: DecodeRequest
    statistics: generation_pb2.SpeculationStatistics
    length: DraftLength
    costs: TargetCosts
    context_length: int
    text: list[int]
    draft_refused: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def wanted(self) -> int:
        """How many more tokens may be emitted."""
        emitted = len(self.text) - len(self.request.prompt)
        return min(self.request.sampling.max_new_tokens - emitted, self.context_length - len(self.text))

    @property
    def worth_drafting(self) -> bool:
        """Whether a draft session is of use: not for short replies, and not while plain rounds are faster."""
        if self.request.draft_tokens is None and self.request.sampling.max_new_tokens <= SHORT_REPLY:
            return False
        return self.length.prepare(self.wanted) > 0

    def timeout(self) -> float | None:
        deadline = self.request.deadline
        return None if deadline is None else max(0.0, deadline - time.perf_counter())

    def metadata(self) -> Metadata:
        return (("x-request-id", self.request.request_id),)

    def count_foreseen(self, drafted: int, accepted: int, *, hit: bool) -> None:
        """Count the verdict on a round that the draft was told of."""
        self.length.foreseen(drafted, hit)
        statistics = self.statistics
        statistics.hits += hit
        statistics.misses += not hit
        statistics.hits_all_accepted += hit and accepted == drafted
        statistics.misses_all_accepted += not hit and accepted == drafted

    def receive(self, timed: TimedVerdict, proposal: Proposal) -> Emission:
        """Append what the verdict emits to the text, and count it."""
        verdict, drafted = timed.verdict, len(proposal.token_ids)
        tokens = proposal.token_ids[: verdict.accepted]
        if verdict.HasField("next_token"):
            tokens = [*tokens, verdict.next_token]
        else:
            drafted = verdict.accepted  # What follows the end of the text was not verified.
        self.text += tokens
        if verdict.round_id > 0:  # The opening read the prompt.
            self._learn(timed)
        self.length.observe(drafted, verdict.accepted)
        self._count(timed, drafted)
        stopped_by_token = verdict.finish_reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN)
        return Emission(
            token_ids=tokens,
            drafted=[i < verdict.accepted for i in range(len(tokens))],
            proposed=drafted,
            logprobs=list(verdict.logprobs),
            finish_reason=verdict.finish_reason,
            stop_token_id=tokens[-1] if stopped_by_token else None,
        )

    def _learn(self, timed: TimedVerdict) -> None:
        timing = timed.verdict.timing
        self.costs.add(
            rows=max(1, timing.batch_rows),
            tokens=max(1, timing.batch_tokens),
            compute=1e-6 * timing.compute_us,
            queue=1e-6 * timing.queue_us,
            elapsed=timed.elapsed,
        )

    def _count(self, timed: TimedVerdict, drafted: int) -> None:
        statistics, verdict = self.statistics, timed.verdict
        if statistics.rounds == 0:
            _add(statistics.time_to_first_token, time.perf_counter() - self.started)
        statistics.rounds += 1
        statistics.plain_rounds += verdict.round_id > 0 and drafted == 0
        statistics.drafted += drafted
        statistics.accepted += verdict.accepted
        missing = drafted - len(statistics.drafted_per_position)
        statistics.drafted_per_position.extend([0] * missing)
        statistics.accepted_per_position.extend([0] * missing)
        for position in range(drafted):
            statistics.drafted_per_position[position] += 1
            statistics.accepted_per_position[position] += position < verdict.accepted
        statistics.mean_accepted_length = (len(self.text) - len(self.request.prompt)) / statistics.rounds
        compute, queue = 1e-6 * verdict.timing.compute_us, 1e-6 * verdict.timing.queue_us
        _add(statistics.target_time, compute)
        _add(statistics.queue_time, queue)
        _add(statistics.wire_time, max(0.0, timed.elapsed - compute - queue))


class Decoder:
    """Decodes samples on the target and draft services behind `backends`."""

    def __init__(self, backends: Backends, settings: OrchestratorSettings) -> None:
        self._backends = backends
        self._settings = settings
        self._costs = TargetCosts()
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

    def _sample(self, request: DecodeRequest, statistics: generation_pb2.SpeculationStatistics) -> _Sample:
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
        return _Sample(request, statistics, length, self._costs, context_length, text=list(request.prompt))

    async def _run(self, sample: _Sample, emissions: asyncio.Queue[Emission | Exception | None]) -> None:
        """Decode to the end, reopening the sessions when the target was lost and is back in time."""
        reached, give_up = -1, 0.0
        try:
            while True:
                try:
                    await self._speculate(sample, emissions)
                    break
                except grpc.aio.AioRpcError as error:
                    if not is_lost(error):
                        raise
                    if len(sample.text) > reached:
                        reached, give_up = len(sample.text), time.perf_counter() + self._settings.target_wait_s
                    await self._wait_for_target(give_up, error)
            await emissions.put(None)
        except Exception as error:
            await emissions.put(error)

    async def _speculate(self, sample: _Sample, emissions: asyncio.Queue[Emission | Exception | None]) -> None:
        """The decode loop, from the text so far to the end of the sample or of the target's session."""
        target = TargetSession(self._backends.target, timeout=sample.timeout(), metadata=sample.metadata())
        verdict_task = asyncio.create_task(target.open(self._open_target(sample)))
        draft = self._open_draft(sample)  # Both read the prompt at the same time.
        proposal, round_id = NOTHING, 0
        try:
            while True:
                announced = self._announce(sample, draft, round_id, proposal)
                timed = await verdict_task
                emission = sample.receive(timed, proposal)
                await emissions.put(emission)
                if emission.finish_reason:
                    return
                proposal, draft = await self._next_proposal(sample, draft, timed.verdict, proposal, announced)
                round_id += 1
                verdict_task = asyncio.create_task(
                    target.verify(round_id, len(sample.text), proposal.token_ids, proposal.q)
                )
        finally:
            verdict_task.cancel()
            target.close()
            # Before anything that waits: a consumer that has the last emission may cancel this task.
            _set(sample.statistics.total_time, time.perf_counter() - sample.started)
            if draft is not None:
                await self._close_draft(sample, draft)

    def _announce(self, sample: _Sample, draft: DraftSession | None, round_id: int, proposal: Proposal) -> bool:
        """Tell the draft what is being verified, if it can prepare for that; says whether it was told."""
        if sample.request.mode != generation_pb2.MODE_OVERLAPPED or draft is None or not draft.usable:
            return False
        # At least one token comes before what is prepared.
        k = sample.length.prepare(sample.wanted - 1)
        if k == 0:
            return False
        draft.verifying(round_id, sample.text, proposal.token_ids, k)
        return True

    async def _next_proposal(
        self,
        sample: _Sample,
        draft: DraftSession | None,
        verdict: target_pb2.Verdict,
        proposal: Proposal,
        announced: bool,
    ) -> tuple[Proposal, DraftSession | None]:
        """The prepared answer to the verdict on `proposal`, else a fresh one, else nothing: a plain round.

        With it comes the draft session to go on with.
        """
        prepared = None
        if announced and draft is not None:
            prepared = draft.take_prepared(verdict.accepted, verdict.next_token)
            sample.count_foreseen(len(proposal.token_ids), verdict.accepted, hit=prepared is not None)
        opened = await self._check_draft(sample, draft)
        k = sample.length.choose(sample.wanted)
        if opened is None or opened is not draft or not draft.usable or k == 0:
            # A new session reads the text while plain rounds go on.
            return NOTHING, opened
        if prepared is not None:
            sample.statistics.used_tokens += min(k, len(prepared.token_ids))
            return prepared.first(k), draft
        return await self._after_miss(sample, draft), draft

    async def _after_miss(self, sample: _Sample, draft: DraftSession) -> Proposal:
        k = sample.length.after_miss(sample.wanted)
        if k == 0:
            return NOTHING
        timeout, asked = self._settings.draft_timeout_s, time.perf_counter()
        fresh = await draft.propose(sample.text, k, timeout)
        waited = time.perf_counter() - asked
        sample.length.waited(k, waited)
        _add(sample.statistics.draft_wait_time, waited)
        if fresh is None:
            if draft.failure is None:
                sample.statistics.degraded_reason = f"the draft service did not answer within {timeout:g} s"
            return NOTHING
        _add(sample.statistics.draft_time, fresh.compute_s)
        sample.statistics.late_hits += fresh.prepared > 0
        return fresh

    def _open_target(self, sample: _Sample) -> target_pb2.OpenTarget:
        request = sample.request
        return target_pb2.OpenTarget(
            token_ids=sample.text,
            prompt_length=len(request.prompt),
            sample_index=request.sample_index,
            sampling=request.sampling,
            logprobs=request.logprobs,
        )

    def _open_draft(self, sample: _Sample) -> DraftSession | None:
        request, backend = sample.request, self._backends.draft
        if request.mode == generation_pb2.MODE_PLAIN or sample.draft_refused or not sample.worth_drafting:
            return None
        if backend is None:
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
        return DraftSession(backend.stub, message, timeout=sample.timeout(), metadata=sample.metadata())

    async def _check_draft(self, sample: _Sample, draft: DraftSession | None) -> DraftSession | None:
        """The draft session to go on with: this one, a new one if it is gone and there is a service, or none."""
        if draft is None:
            return self._open_draft(sample)
        if draft.failure is None:
            return draft
        await self._close_draft(sample, draft)
        self._backends.draft_failed(draft.failure)
        sample.draft_refused = not is_lost(draft.failure)
        sample.statistics.degraded_reason = f"the draft service ended the session: {draft.failure.details()}"
        return None

    async def _close_draft(self, sample: _Sample, draft: DraftSession) -> None:
        sample.statistics.prepared_tokens += draft.prepared_tokens
        await draft.close()

    async def _wait_for_target(self, give_up: float, error: grpc.aio.AioRpcError) -> None:
        """Return when the target answers again; raise RequestError UNAVAILABLE if it does not before `give_up`."""
        try:
            async with asyncio.timeout(give_up - time.perf_counter()):
                await self._backends.wait_for_target()
        except TimeoutError:
            wait = self._settings.target_wait_s
            message = f"the target was lost and did not come back within {wait:g} s: {error.details()}"
            raise unavailable(message, wait) from error


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


def _add(duration: Duration, seconds: float) -> None:
    _set(duration, duration.seconds + 1e-9 * duration.nanos + seconds)


def _set(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(round(1e9 * seconds))
