"""Python clients of the public API, one blocking and one for asyncio. They need gRPC and nothing else.

with Client("127.0.0.1:50051") as client:
    print(client.generate("Once upon a time", max_new_tokens=50).text)
    for chunk in client.stream(messages=[{"role": "user", "content": "Hello!"}]):
        print(chunk.text, end="", flush=True)
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypedDict, Unpack, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from foredraft.serving.errors import Violation, error_details
from foredraft.v1 import common_pb2, generation_pb2, generation_pb2_grpc

Prompt = str | Sequence[int]

DEFAULT_ADDRESS = "127.0.0.1:50051"
OPTIONS = (
    # A long prompt brings no data for a while: pings tell a busy server from a dead one.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Many samples with logprobs exceed gRPC's 4 MB.
    ("grpc.max_receive_message_length", -1),
)


class Options(TypedDict, total=False):
    """What `generate` and `stream` take beside the prompt; what is left out, the server decides."""

    messages: Sequence[Mapping[str, str]]
    request_id: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    method: Literal["coupled", "rejection", "block"]
    q_support: int
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    stop: str | Sequence[str]
    include_stop_string: bool
    sample_count: int
    logprobs: int
    keep_special_tokens: bool
    mode: Literal["plain", "sequential", "overlapped"]
    drafter: Literal["model", "ngram"]
    draft_tokens: int
    max_draft_tokens: int


class GenerationError(Exception):
    """A call that failed: gRPC status, a sentence, what was wrong with which field, and when to try again (seconds)."""

    def __init__(
        self,
        status: grpc.StatusCode,
        message: str,
        violations: Sequence[Violation] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.message = message
        self.violations = tuple(violations)
        self.retry_after = retry_after


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

    def _add(self, event: generation_pb2.GenerateStreamResponse) -> Chunk | None:
        """Take in one event of a stream; returns the chunk if it is one."""
        if event.HasField("started"):
            self.request_id, self.seed = event.started.request_id, event.started.seed
        elif event.HasField("completed"):
            _complete(self._completion(event.completed.sample_index), event.completed)
        elif event.HasField("chunk"):
            chunk = _chunk(event.chunk)
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


class Stream(Iterator[Chunk]):
    """The chunks of a running request; `result` has all that came so far. Closing it early ends the request."""

    def __init__(self, call: Any) -> None:
        self.result = Generated()
        self._call = call
        self._closed = False

    def __next__(self) -> Chunk:
        with _errors():
            while not self._closed:
                chunk = self.result._add(next(self._call))
                if chunk is not None:
                    return chunk
        raise StopIteration

    def close(self) -> None:
        """End the request; does nothing if it has ended."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(AsyncIterator[Chunk]):
    """The chunks of a running request; `result` has all that came so far. Closing it early ends the request."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, generation_pb2.GenerateStreamResponse]) -> None:
        self.result = Generated()
        self._call = call
        self._events = aiter(call)
        self._closed = False

    async def __anext__(self) -> Chunk:
        with _errors():
            while not self._closed:
                chunk = self.result._add(await anext(self._events))
                if chunk is not None:
                    return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the request; does nothing if it has ended."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # After a `break` out of a loop over it; gRPC's own call would linger until the next garbage collection.
        self._call.cancel()


class Client:
    """A blocking client of the service at "host:port" or "unix:/path"; may be used from several threads.

    Every call raises GenerationError if it fails. `timeout` is in seconds; without it a call takes as long as it takes.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generated:
        """Generate from a text, token ids or `messages`, and return everything at once."""
        with _errors():
            return _generated(self._stub.Generate(_request(prompt, options), timeout=timeout))

    def stream(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Generate from a text, token ids or `messages`, and return the output as it comes."""
        return Stream(self._stub.GenerateStream(_request(prompt, options), timeout=timeout))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout: float | None = None,
    ) -> Tokenized:
        """A text or `messages` as the model reads it."""
        with _errors():
            response = self._stub.Tokenize(_tokenize_request(text, messages), timeout=timeout)
        return Tokenized(list(response.token_ids), list(response.tokens))

    def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """Token ids as text."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=keep_special_tokens)
        with _errors():
            return self._stub.Detokenize(request, timeout=timeout).text

    def get_model(self, *, timeout: float | None = None) -> Models:
        """The models in use and the server's defaults."""
        with _errors():
            return _models(self._stub.GetModel(generation_pb2.GenerationServiceGetModelRequest(), timeout=timeout))

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio. Create it inside the event loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generated:
        """Generate from a text, token ids or `messages`, and return everything at once."""
        with _errors():
            return _generated(await self._stub.Generate(_request(prompt, options), timeout=timeout))

    def stream(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Generate from a text, token ids or `messages`, and return the output as it comes."""
        return AsyncStream(self._stub.GenerateStream(_request(prompt, options), timeout=timeout))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout: float | None = None,
    ) -> Tokenized:
        """A text or `messages` as the model reads it."""
        with _errors():
            response = await self._stub.Tokenize(_tokenize_request(text, messages), timeout=timeout)
        return Tokenized(list(response.token_ids), list(response.tokens))

    async def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """Token ids as text."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=keep_special_tokens)
        with _errors():
            return (await self._stub.Detokenize(request, timeout=timeout)).text

    async def get_model(self, *, timeout: float | None = None) -> Models:
        """The models in use and the server's defaults."""
        request = generation_pb2.GenerationServiceGetModelRequest()
        with _errors():
            return _models(await self._stub.GetModel(request, timeout=timeout))

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@contextmanager
def _errors() -> Iterator[None]:
    """Raise gRPC's errors as GenerationError."""
    try:
        yield
    except grpc.RpcError as error:
        call = cast(grpc.aio.AioRpcError, error)  # The blocking one has the same methods.
        details = error_details(call)
        raise GenerationError(call.code(), call.details() or "", details.violations, details.retry_after_s) from error


def _request(prompt: Prompt | None, options: Options) -> generation_pb2.GenerateRequest:
    """The request that says what the arguments say. Raises ValueError and TypeError for values it cannot hold."""
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    messages = values.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise ValueError("give either a prompt or messages")
    if "stop" in values:
        stop = values.pop("stop")
        values["stop_strings"] = [stop] if isinstance(stop, str) else stop
    for name in ("method", "mode", "drafter"):
        if name in values:
            values[name] = f"{name}_{values[name]}".upper()
    sampling = common_pb2.Sampling(**_pop(values, common_pb2.Sampling))
    speculation = generation_pb2.Speculation(**_pop(values, generation_pb2.Speculation))
    unknown = values.keys() - generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = generation_pb2.GenerateRequest(sampling=sampling, speculation=speculation, **values)
    if messages is not None:
        request.chat.CopyFrom(_chat(messages))
    elif isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(generation_pb2.TokenIds(token_ids=prompt))
    return request


def _pop(values: dict[str, Any], message: type[Message]) -> dict[str, Any]:
    """Take those values out that are fields of this message."""
    return {name: values.pop(name) for name in message.DESCRIPTOR.fields_by_name if name in values}


def _chat(messages: Sequence[Mapping[str, str]]) -> generation_pb2.Chat:
    return generation_pb2.Chat(messages=[generation_pb2.ChatMessage(**message) for message in messages])


def _tokenize_request(text: str | None, messages: Sequence[Mapping[str, str]] | None) -> generation_pb2.TokenizeRequest:
    if (text is None) == (messages is None):
        raise ValueError("give either a text or messages")
    if messages is not None:
        return generation_pb2.TokenizeRequest(chat=_chat(messages))
    return generation_pb2.TokenizeRequest(text=text)


def _generated(response: generation_pb2.GenerateResponse) -> Generated:
    generated = Generated(response.request_id, response.seed)
    for message in response.completions:
        completion = Completion(
            message.text, list(message.token_ids), list(message.drafted), _logprobs(message.logprobs)
        )
        _complete(completion, message.completed)
        generated.completions.append(completion)
    return generated


def _chunk(message: generation_pb2.Chunk) -> Chunk:
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


def _models(message: generation_pb2.GenerationServiceGetModelResponse) -> Models:
    return Models(
        target=Model(**_values(message.target)),
        draft=Model(**_values(message.draft)) if message.HasField("draft") else None,
        drafters=[_name(common_pb2.Drafter, drafter) for drafter in message.drafters],
        degraded_reason=message.degraded_reason,
        default_mode=_name(generation_pb2.Mode, message.default_mode),
        max_draft_tokens=message.max_draft_tokens,
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
    """A value of an enum as this module spells it: "MODE_PLAIN" is "plain"."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return str(enum.Name(value).removeprefix(prefix).lower())
