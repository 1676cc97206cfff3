"""What the clients return: the contract's answers as plain Python values."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from foredraft.v1 import common_pb2, generation_pb2


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability under the target."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The emitted token and the most probable ones at one position."""

    chosen: Logprob
    top: list[Logprob]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of one sample. The text of a token may come in a later chunk."""

    sample_index: int
    text: str
    token_ids: list[int]
    drafted: list[bool]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Statistics:
    """How speculation went for one sample; times in seconds."""

    mode: str
    reproducibility: str
    rounds: int
    plain_rounds: int
    drafted: int
    accepted: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    mean_accepted_length: float
    hits: int
    misses: int
    prepared_tokens: int
    used_tokens: int
    time_to_first_token: float
    total_time: float
    target_time: float
    queue_time: float
    draft_wait_time: float
    wire_time: float
    degraded_reason: str
    hits_all_accepted: int
    misses_all_accepted: int
    late_hits: int
    draft_time: float
    failovers: int


@dataclass(slots=True)
class Completion:
    """One sample. What follows `logprobs` is set when it has ended.

    `finish_reason` is "eos", "stop_token", "stop_string", "max_tokens" or "context_length".
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_string: str | None = None
    stop_token_id: int | None = None
    prompt_token_count: int = 0
    completion_token_count: int = 0
    statistics: Statistics | None = None


@dataclass(slots=True)
class Generated:
    """The samples of one request, in order of their index."""

    request_id: str = ""
    seed: int = 0
    completions: list[Completion] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.completions[0].text

    def add(self, event: generation_pb2.GenerateStreamResponse) -> Chunk | None:
        """Take in one event of a stream; returns it if it is a chunk."""
        if event.HasField("started"):
            self.request_id, self.seed = event.started.request_id, event.started.seed
        elif event.HasField("completed"):
            _complete(self._completion(event.completed.sample_index), event.completed)
        elif event.HasField("chunk"):
            chunk = read_chunk(event.chunk)
            completion = self._completion(chunk.sample_index)
            completion.text += chunk.text
            completion.token_ids += chunk.token_ids
            completion.drafted += chunk.drafted
            completion.logprobs += chunk.logprobs
            return chunk
        return None

    def _completion(self, index: int) -> Completion:
        while len(self.completions) <= index:
            self.completions.append(Completion())
        return self.completions[index]


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Token ids and how the tokenizer spells them."""

    token_ids: list[int]
    tokens: list[str]


@dataclass(frozen=True, slots=True)
class Model:
    """The identity of a loaded model; see the proto's Model."""

    name: str
    weights_hash: str
    dtype: str
    device: str
    context_length: int
    vocabulary_size: int
    vocabulary_hash: str
    eos_token_ids: list[int]
    parameter_count: int
    batch_invariant: bool
    max_sessions: int


@dataclass(frozen=True, slots=True)
class Models:
    """The models in use and the server's defaults and limits. `degraded_reason` says why there is no speculation."""

    target: Model
    draft: Model | None
    drafters: list[str]
    degraded_reason: str
    default_mode: str
    max_draft_tokens: int
    max_new_tokens_limit: int | None


def read_generated(response: generation_pb2.GenerateResponse) -> Generated:
    """All samples of a unary call."""
    generated = Generated(response.request_id, response.seed)
    for message in response.completions:
        completion = Completion(
            message.text, list(message.token_ids), list(message.drafted), _logprobs(message.logprobs)
        )
        _complete(completion, message.completed)
        generated.completions.append(completion)
    return generated


def read_chunk(message: generation_pb2.Chunk) -> Chunk:
    """A chunk of a stream."""
    return Chunk(
        message.sample_index,
        message.text,
        list(message.token_ids),
        list(message.drafted),
        _logprobs(message.logprobs),
    )


def _logprobs(messages: Iterable[common_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    def logprob(message: common_pb2.Logprob) -> Logprob:
        return Logprob(message.token_id, message.logprob)

    return [TokenLogprobs(logprob(message.chosen), [logprob(top) for top in message.top]) for message in messages]


def _complete(completion: Completion, message: generation_pb2.Completed) -> None:
    completion.finish_reason = _name(common_pb2.FinishReason, message.finish_reason)
    if message.finish_reason == common_pb2.FINISH_REASON_STOP_STRING:
        completion.stop_string = message.stop_string
    if message.HasField("stop_token_id"):
        completion.stop_token_id = message.stop_token_id
    completion.prompt_token_count = message.usage.prompt_token_count
    completion.completion_token_count = message.usage.completion_token_count
    values = _values(message.statistics)
    values["mode"] = _name(generation_pb2.Mode, message.statistics.mode)
    values["reproducibility"] = _name(generation_pb2.Reproducibility, message.statistics.reproducibility)
    completion.statistics = Statistics(**values)


def read_models(message: generation_pb2.GenerationServiceGetModelResponse) -> Models:
    """The answer of GetModel."""
    return Models(
        target=Model(**_values(message.target)),
        draft=Model(**_values(message.draft)) if message.HasField("draft") else None,
        drafters=[_name(common_pb2.Drafter, drafter) for drafter in message.drafters],
        degraded_reason=message.degraded_reason,
        default_mode=_name(generation_pb2.Mode, message.default_mode),
        max_draft_tokens=message.max_draft_tokens,
        max_new_tokens_limit=message.max_new_tokens_limit if message.HasField("max_new_tokens_limit") else None,
    )


def _values(message: Message) -> dict[str, Any]:
    """The fields of a flat message as plain Python values; durations become seconds."""
    values: dict[str, Any] = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if isinstance(value, Duration):
            value = value.ToTimedelta().total_seconds()
        values[descriptor.name] = list(value) if descriptor.is_repeated else value
    return values


def _name(enum: Any, value: int) -> str:
    """A value of an enum as this module spells it: "MODE_PLAIN" is "plain"; one of a newer server is "unspecified"."""
    value = value if value in enum.values() else 0
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return str(enum.Name(value).removeprefix(prefix).lower())
