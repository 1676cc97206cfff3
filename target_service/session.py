"""One session's state, and the rules that end its text, applied in the order in which tokens become final."""

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.sampling.params import SamplingParams
from foredraft.v1 import common_pb2

# Of one emitted token: its logprob, and the most probable tokens as (id, logprob).
TokenLogprobs = tuple[float, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session has to know about the model."""

    vocabulary_size: int
    context_length: int
    eos_token_ids: frozenset[int]


@dataclass(eq=False, slots=True)
class Session:
    """The final text of one sample and how it goes on.

    `text` is prompt and output; `logprobs` is how many most probable tokens to report, None for no logprobs at all.
    While a round is in flight `text` and `finish_reason` belong to the model thread, otherwise to the event loop.
    `away_s` is how many seconds the client lets pass between a verdict and the next round; the last one counts half.
    """

    text: list[int]
    prompt_length: int
    sample_index: int
    params: SamplingParams
    logprobs: int | None = None
    finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
    away_s: float = 0.0
    answered_at: float | None = None

    def came(self, received: float) -> None:
        """Learn that a round came, at that instant of time.perf_counter."""
        if self.answered_at is not None:
            self.away_s += 0.5 * (received - self.answered_at - self.away_s)


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a round went, in seconds, and what was in its last forward."""

    queue_s: float
    compute_s: float
    batch_rows: int
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round emits: `tokens`, of which the first `accepted` are draft tokens and at most one follows them.

    `logprobs` has one entry per token, or none if they were not asked for.
    """

    tokens: list[int]
    accepted: int
    finish_reason: common_pb2.FinishReason
    logprobs: list[TokenLogprobs]
    timing: Timing


def finish(
    tokens: Sequence[int], *, length: int, prompt_length: int, params: SamplingParams, limits: Limits
) -> tuple[int, common_pb2.FinishReason]:
    """How many of `tokens`, which continue a text of `length` tokens, are emitted, and whether the last one ends it.

    The first token that meets a rule is the last one emitted. The minimum length needs no rule: sampling masks what
    would end the text too early.
    """
    for count, token in enumerate(tokens, start=1):
        if token in limits.eos_token_ids and not params.ignore_eos:
            return count, common_pb2.FINISH_REASON_EOS
        if token in params.stop_token_ids:
            return count, common_pb2.FINISH_REASON_STOP_TOKEN
        if length + count - prompt_length >= params.max_new_tokens:
            return count, common_pb2.FINISH_REASON_MAX_TOKENS
        if length + count >= limits.context_length:
            return count, common_pb2.FINISH_REASON_CONTEXT_LENGTH
    return len(tokens), common_pb2.FINISH_REASON_UNSPECIFIED


def useful_draft_length(session: Session, limits: Limits) -> int:
    """The most draft tokens that a round can use: of what may still be emitted, the target's own token is the last."""
    length = len(session.text)
    emitted = length - session.prompt_length
    return min(session.params.max_new_tokens - emitted, limits.context_length - length) - 1
