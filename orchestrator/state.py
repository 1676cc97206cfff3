"""The state of one sample while it is decoded: what outlives any session on the services."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import grpc

from foredraft.errors import RequestError
from foredraft.v1 import common_pb2, generation_pb2, target_pb2
from orchestrator.backends import DraftReplica
from orchestrator.costs import TargetCosts
from orchestrator.draft import Proposal
from orchestrator.draft_length import DraftLength
from orchestrator.target import Metadata, TimedVerdict

# Replies of at most so many tokens are decoded plainly: the draft would have to read the prompt for a round or two.
SHORT_REPLY = 4


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
class SampleState:
    """The state of one sample that outlives its sessions: `text` is the truth from which any of them is reopened."""

    request: DecodeRequest
    statistics: generation_pb2.SpeculationStatistics
    length: DraftLength
    costs: TargetCosts
    context_length: int
    text: list[int]
    refused_by: list[DraftReplica] = field(default_factory=list)
    draft_replica: DraftReplica | None = None
    started: float = field(default_factory=time.perf_counter)
    # By the statistics' names of them; written there at the end.
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

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

    def receive(self, verdict: target_pb2.Verdict, proposal: Proposal) -> Emission:
        """Append what the verdict emits to the text; `learn` has the rest, which can wait.

        Raises RequestError INTERNAL for a verdict that no target may give.
        """
        drafted = len(proposal.token_ids)
        check_verdict(verdict, drafted)
        tokens = proposal.token_ids[: verdict.accepted]
        if verdict.HasField("next_token"):
            tokens = [*tokens, verdict.next_token]
        else:
            drafted = verdict.accepted  # What follows the end of the text was not verified.
        self.text += tokens
        stopped_by_token = verdict.finish_reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN)
        return Emission(
            token_ids=tokens,
            drafted=[i < verdict.accepted for i in range(len(tokens))],
            proposed=drafted,
            logprobs=list(verdict.logprobs),
            finish_reason=verdict.finish_reason,
            stop_token_id=tokens[-1] if stopped_by_token else None,
        )

    def learn(self, timed: TimedVerdict, drafted: int) -> None:
        """Count a verdict on `drafted` tokens, and learn from it for later rounds."""
        verdict, timing = timed.verdict, timed.verdict.timing
        compute, queue = 1e-6 * timing.compute_us, 1e-6 * timing.queue_us
        if verdict.round_id > 0:  # The opening read the prompt.
            self.costs.add(
                rows=max(1, timing.batch_rows),
                tokens=max(1, timing.batch_tokens),
                compute=compute,
                queue=queue,
                elapsed=timed.elapsed,
                alone=self.costs.was_alone(timed.elapsed),
            )
        self.length.observe(drafted, verdict.accepted)
        self._count(verdict, drafted)
        self.seconds["target_time"] += compute
        self.seconds["queue_time"] += queue
        self.seconds["wire_time"] += max(0.0, timed.elapsed - compute - queue)

    def write_times(self) -> None:
        """Complete the statistics."""
        self.seconds["total_time"] = time.perf_counter() - self.started
        for name, seconds in self.seconds.items():
            getattr(self.statistics, name).FromNanoseconds(round(1e9 * seconds))

    def _count(self, verdict: target_pb2.Verdict, drafted: int) -> None:
        statistics = self.statistics
        if statistics.rounds == 0:
            self.seconds["time_to_first_token"] = time.perf_counter() - self.started
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


def check_verdict(verdict: target_pb2.Verdict, drafted: int) -> None:
    """Raises RequestError INTERNAL unless the verdict accepts what was drafted and either ends the text or goes on."""
    if verdict.accepted > drafted:
        wrong = f"accepted {verdict.accepted} of {drafted} draft tokens"
    elif not verdict.HasField("next_token") and not (verdict.finish_reason and verdict.accepted):
        wrong = "has no next token, and no accepted one that ends the text"
    else:
        return
    raise RequestError(grpc.StatusCode.INTERNAL, f"the target's verdict on round {verdict.round_id} {wrong}")
