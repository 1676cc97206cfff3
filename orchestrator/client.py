"""Python clients of the public API, one blocking and one for asyncio. They need gRPC and nothing else.

with Client("127.0.0.1:50051") as client:
    print(client.generate("Once upon a time", max_new_tokens=50).text)
    for chunk in client.stream(messages=[{"role": "user", "content": "Hello!"}]):
        print(chunk.text, end="", flush=True)
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, cast

import grpc
from google.protobuf.message import Message

from foredraft.errors import Violation, error_details
from foredraft.serving.address import is_loopback
from foredraft.serving.retry import RETRY
from foredraft.serving.tls import ClientTls, TlsError
from foredraft.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from orchestrator.results import (
    Chunk,
    Completion,
    Generated,
    Logprob,
    Model,
    Models,
    Statistics,
    Tokenized,
    TokenLogprobs,
    read_generated,
    read_models,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "Credentials",
    "Generated",
    "GenerationError",
    "Logprob",
    "Model",
    "Models",
    "Options",
    "Statistics",
    "Stream",
    "TlsError",
    "TokenLogprobs",
    "Tokenized",
    "Violation",
]

Prompt = str | Sequence[int]
M = TypeVar("M", bound=Message)

DEFAULT_ADDRESS = "127.0.0.1:50051"
OPTIONS = (
    # A long prompt brings no data for a while: pings tell a busy server from a dead one.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Many samples with logprobs exceed gRPC's 4 MB.
    ("grpc.max_receive_message_length", -1),
    RETRY,
)


class Credentials(TypedDict, total=False):
    """How a client is let in: PEM files for TLS, and a token."""

    tls_ca: str | PathLike[str] | None
    tls_client_cert: str | PathLike[str] | None
    tls_client_key: str | PathLike[str] | None
    token: str | None
    insecure: bool


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
    drafter: Literal["model", "ngram", "combined"]
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


class Stream(Iterator[Chunk]):
    """The chunks of a running request; `result` has all that came so far. Closing it early ends the request."""

    def __init__(self, call: Any) -> None:
        self.result = Generated()
        self._call = call
        self._closed = False

    def __next__(self) -> Chunk:
        with _errors():
            while not self._closed:
                chunk = self.result.add(next(self._call))
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
                chunk = self.result.add(await anext(self._events))
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

    With `tls_ca`, a PEM file of authorities, it speaks TLS, and shows the certificate of `tls_client_cert` and
    `tls_client_key` if the server wants one. `token` is sent with every call, and without TLS only to this machine
    unless `insecure`. Raises TlsError for files that cannot be used, and ValueError for a token that may not be sent.

    Every call raises GenerationError if it fails. `timeout` is in seconds; without it a call takes as long as it takes.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, **credentials: Unpack[Credentials]) -> None:
        tls, self._metadata = _secured(address, credentials)
        self._channel = (
            grpc.insecure_channel(address, OPTIONS)
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), OPTIONS)
        )
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generated:
        """Generate from a text, token ids or `messages`, and return everything at once."""
        with _errors():
            return read_generated(
                self._stub.Generate(_request(prompt, options), timeout=timeout, metadata=self._metadata)
            )

    def stream(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Generate from a text, token ids or `messages`, and return the output as it comes."""
        return Stream(self._stub.GenerateStream(_request(prompt, options), timeout=timeout, metadata=self._metadata))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout: float | None = None,
    ) -> Tokenized:
        """A text or `messages` as the model reads it."""
        with _errors():
            response = self._stub.Tokenize(_tokenize_request(text, messages), timeout=timeout, metadata=self._metadata)
        return Tokenized(list(response.token_ids), list(response.tokens))

    def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """Token ids as text."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=keep_special_tokens)
        with _errors():
            return self._stub.Detokenize(request, timeout=timeout, metadata=self._metadata).text

    def get_model(self, *, timeout: float | None = None) -> Models:
        """The models in use and the server's defaults."""
        with _errors():
            return read_models(
                self._stub.GetModel(
                    generation_pb2.GenerationServiceGetModelRequest(), timeout=timeout, metadata=self._metadata
                )
            )

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio. Create it inside the event loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS, **credentials: Unpack[Credentials]) -> None:
        tls, self._metadata = _secured(address, credentials)
        self._channel = (
            grpc.aio.insecure_channel(address, OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials(), OPTIONS)
        )
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generated:
        """Generate from a text, token ids or `messages`, and return everything at once."""
        with _errors():
            return read_generated(
                await self._stub.Generate(_request(prompt, options), timeout=timeout, metadata=self._metadata)
            )

    def stream(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Generate from a text, token ids or `messages`, and return the output as it comes."""
        return AsyncStream(
            self._stub.GenerateStream(_request(prompt, options), timeout=timeout, metadata=self._metadata)
        )

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout: float | None = None,
    ) -> Tokenized:
        """A text or `messages` as the model reads it."""
        with _errors():
            response = await self._stub.Tokenize(
                _tokenize_request(text, messages), timeout=timeout, metadata=self._metadata
            )
        return Tokenized(list(response.token_ids), list(response.tokens))

    async def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """Token ids as text."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=keep_special_tokens)
        with _errors():
            return (await self._stub.Detokenize(request, timeout=timeout, metadata=self._metadata)).text

    async def get_model(self, *, timeout: float | None = None) -> Models:
        """The models in use and the server's defaults."""
        request = generation_pb2.GenerationServiceGetModelRequest()
        with _errors():
            return read_models(await self._stub.GetModel(request, timeout=timeout, metadata=self._metadata))

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _secured(address: str, credentials: Credentials) -> tuple[ClientTls | None, tuple[tuple[str, str], ...] | None]:
    """TLS, None for plaintext, and the metadata of every call. Raises ValueError."""
    ca, cert, key = (credentials.get(name) for name in ("tls_ca", "tls_client_cert", "tls_client_key"))
    if (cert is None) != (key is None) or (cert is not None and ca is None):
        raise ValueError("tls_client_cert, tls_client_key and tls_ca must be given together")
    tls = None
    # A server does not speak TLS through its Unix socket.
    if ca is not None and not address.startswith("unix:"):
        tls = ClientTls(Path(str(ca)), *(Path(str(path)) for path in (cert, key) if path is not None))
    token = credentials.get("token")
    if not token:
        return tls, None
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("token: must be printable ASCII without blanks")
    if tls is None and not credentials.get("insecure") and not is_loopback(address):
        raise ValueError(
            f"token: without TLS, anyone on the way to {address} could read it; give tls_ca, or insecure=True to send "
            "it anyway"
        )
    return tls, (("authorization", f"Bearer {token}"),)


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
    values["sampling"] = _filled(common_pb2.Sampling, _pop(values, common_pb2.Sampling))
    values["speculation"] = _filled(generation_pb2.Speculation, _pop(values, generation_pb2.Speculation))
    unknown = values.keys() - generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    if messages is not None:
        values["chat"] = _chat(messages)
    elif isinstance(prompt, str):
        values["text"] = prompt
    else:
        values["token_ids"] = _filled(generation_pb2.TokenIds, {"token_ids": prompt})
    return _filled(generation_pb2.GenerateRequest, values)


def _pop(values: dict[str, Any], message: type[Message]) -> dict[str, Any]:
    """Take those values out that are fields of this message."""
    return {name: values.pop(name) for name in message.DESCRIPTOR.fields_by_name if name in values}


def _filled(kind: type[M], values: Mapping[str, Any]) -> M:
    """A message with these fields. Raises ValueError or TypeError that names the one whose value it cannot hold."""
    message = kind()
    for name, value in values.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except UnicodeError as error:
            raise ValueError(f"{name}: has a lone surrogate, which UTF-8 cannot hold") from error
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return message


def _chat(messages: Sequence[Mapping[str, str]]) -> generation_pb2.Chat:
    return generation_pb2.Chat(messages=[_filled(generation_pb2.ChatMessage, message) for message in messages])


def _tokenize_request(text: str | None, messages: Sequence[Mapping[str, str]] | None) -> generation_pb2.TokenizeRequest:
    if (text is None) == (messages is None):
        raise ValueError("give either a text or messages")
    if messages is not None:
        return generation_pb2.TokenizeRequest(chat=_chat(messages))
    return _filled(generation_pb2.TokenizeRequest, {"text": text})
