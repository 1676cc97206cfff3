"""The public API: a prompt becomes tokens, its samples become one stream of text."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from foredraft.errors import RequestError, Violation, error_details, exhausted, invalid, unavailable
from foredraft.serving.logs import request_id
from foredraft.serving.rpc import RETRY_AFTER_S
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from foredraft.validation import (
    DRAFTERS,
    MODE_VALUES,
    GenerationLimits,
    check_detokenize,
    check_generate,
    check_prompt_length,
    check_tokenize,
)
from orchestrator.backends import Backends
from orchestrator.decode import Decoder, DecodeRequest
from orchestrator.merge import merge
from orchestrator.metrics import Metrics
from orchestrator.sample import Sample
from orchestrator.text import detokenize
from orchestrator.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Event: TypeAlias = generation_pb2.GenerateStreamResponse

# More tokens are spelled or turned into text in a thread, so that the event loop goes on.
LONG = 1000


@dataclass(frozen=True)
class Generation:
    """A request whose prompt is tokens and whose defaults are resolved."""

    request: generation_pb2.GenerateRequest
    request_id: str
    prompt: list[int]
    sampling: common_pb2.Sampling
    started: float
    deadline: float | None


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService on one decoder. Errors are raised as RequestError."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: Decoder,
        backends: Backends,
        settings: OrchestratorSettings,
        metrics: Metrics,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._backends = backends
        self._settings = settings
        self._metrics = metrics
        self._running = 0

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        """The stream's events, put together."""
        response = generation_pb2.GenerateResponse()
        async with aclosing(self._generate(request, context)) as events:
            async for event in events:
                collect(event, response)
        return response

    async def GenerateStream(self, request: generation_pb2.GenerateRequest, context: Context) -> AsyncIterator[Event]:
        async with aclosing(self._generate(request, context)) as events:
            async for event in events:
                yield event

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        check_tokenize(request)
        with self._admitted():
            token_ids = await self._encode_text(request)

        def response() -> generation_pb2.TokenizeResponse:
            tokens = map(self._tokenizer.spelling, token_ids)
            return generation_pb2.TokenizeResponse(token_ids=token_ids, tokens=tokens)

        return await asyncio.to_thread(response) if len(token_ids) > LONG else response()

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        check_detokenize(request, vocabulary_size=self._backends.target_model.vocabulary_size)
        token_ids = list(request.token_ids)

        def text() -> str:
            return detokenize(self._tokenizer, token_ids, keep_special_tokens=request.keep_special_tokens)

        if len(token_ids) <= LONG:
            return generation_pb2.DetokenizeResponse(text=text())
        with self._admitted():
            return generation_pb2.DetokenizeResponse(text=await asyncio.to_thread(text))

    async def GetModel(
        self, request: generation_pb2.GenerationServiceGetModelRequest, context: Context
    ) -> generation_pb2.GenerationServiceGetModelResponse:
        draft = self._backends.draft
        return generation_pb2.GenerationServiceGetModelResponse(
            target=self._backends.target_model,
            draft=draft.model if draft is not None else None,
            drafters=draft.drafters if draft is not None else [],
            degraded_reason=self._backends.degraded_reason,
            default_mode=self._default_mode(),
            max_draft_tokens=self._settings.max_draft_tokens,
            max_new_tokens_limit=self._settings.max_new_tokens_limit,
        )

    async def _generate(self, request: generation_pb2.GenerateRequest, context: Context) -> AsyncGenerator[Event, None]:
        """`started`, then the events of all samples as they come. Closing it ends every sample's sessions at once."""
        with self._metrics.request(), self._admitted():
            generation = await self._prepare(request, context)
            self._metrics.prompt_tokens.inc(len(generation.prompt))
            await context.send_initial_metadata((("x-request-id", generation.request_id),))
            yield Event(
                started=generation_pb2.Started(
                    request_id=generation.request_id,
                    seed=generation.sampling.seed,
                    prompt_token_count=len(generation.prompt),
                )
            )
            count = request.sample_count if request.HasField("sample_count") else 1
            # More at a time than the target can have would wait there, in a queue that they could fill.
            places = asyncio.Semaphore(self._backends.target_model.max_sessions or count)
            samples = [self._sample(generation, index, places) for index in range(count)]
            try:
                async with aclosing(merge(samples)) as events:
                    async for event in events:
                        yield event
            except grpc.aio.AioRpcError as error:
                raise told_by_target(error) from error

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        limit = self._settings.max_concurrent_requests
        if self._running >= limit:
            raise exhausted(f"the server already works on {limit} requests, its limit; try again later", RETRY_AFTER_S)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _prepare(self, request: generation_pb2.GenerateRequest, context: Context) -> Generation:
        """Check the request and resolve its defaults."""
        started = time.perf_counter()
        model, limit = self._backends.target_model, self._settings.max_new_tokens_limit
        limits = GenerationLimits(
            model.vocabulary_size, model.context_length, limit, self._settings.max_prompt_tokens_limit
        )
        check_generate(request, limits)
        self._check_speculation(request.speculation)
        if request.WhichOneof("prompt") == "token_ids":
            prompt = list(request.token_ids.token_ids)
        else:
            prompt = await self._encode_text(request)
        check_prompt_length(request, len(prompt), limits)
        sampling = common_pb2.Sampling()
        sampling.CopyFrom(request.sampling)
        if not sampling.HasField("seed"):
            sampling.seed = secrets.randbits(64)
        if not sampling.HasField("max_new_tokens"):
            # More than the context still holds: then it is the context that ends the sample, and the reason says so.
            sampling.max_new_tokens = limit or model.context_length
        identity = request.request_id or request_id.get() or secrets.token_hex(8)
        request_id.set(identity)
        if self._settings.log_prompts:
            logger.info("the prompt is %r", detokenize(self._tokenizer, prompt))
        remaining = context.time_remaining()
        deadline = time.perf_counter() + remaining if remaining is not None else None
        return Generation(request, identity, prompt, sampling, started, deadline)

    def _check_speculation(self, speculation: generation_pb2.Speculation) -> None:
        draft, most = self._backends.draft, self._settings.max_draft_tokens
        if speculation.draft_tokens > most:
            description = f"is {speculation.draft_tokens}; must be at most {most}, this server's limit"
            raise invalid([Violation("speculation.draft_tokens", description)])
        if speculation.drafter and draft is not None and speculation.drafter not in draft.drafters:
            offered = ", ".join(DRAFTERS[drafter] for drafter in draft.drafters)
            description = f"is {DRAFTERS[speculation.drafter]}; must be one that the draft service offers: {offered}"
            raise invalid([Violation("speculation.drafter", description)])

    async def _encode_text(self, request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest) -> list[int]:
        if request.WhichOneof("prompt") == "text":
            return await self._tokenizer.encode(request.text)
        messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
        return await self._tokenizer.encode_chat(messages)

    async def _sample(
        self, generation: Generation, index: int, places: asyncio.Semaphore
    ) -> AsyncGenerator[Event, None]:
        """The chunks of one sample, which begins when one of `places` is free, and how it ended."""
        sample = Sample(self._tokenizer, generation.request, index)
        metrics = self._metrics.sample(sample.statistics, index, generation.started)
        decoding = self._decoder.decode(self._decode_request(generation, index), sample.statistics)
        try:
            async with places, aclosing(decoding) as emissions:
                async for emission in emissions:
                    chunk = sample.take(emission)
                    metrics.emitted(len(chunk.token_ids))
                    if sample.finish_reason:
                        break
                    yield Event(chunk=chunk)
                else:
                    raise RuntimeError("decoding ended without a finish reason")
        finally:
            metrics.update()
        # Only now, so that a slow reader does not keep sessions that have nothing left to do.
        yield Event(chunk=chunk)
        completed = sample.completed(len(generation.prompt))
        logger.info(
            "sample %d: %d prompt tokens, %d tokens of output, %s",
            index,
            completed.usage.prompt_token_count,
            completed.usage.completion_token_count,
            finish_name(completed.finish_reason),
        )
        yield Event(completed=completed)

    def _decode_request(self, generation: Generation, index: int) -> DecodeRequest:
        request, speculation = generation.request, generation.request.speculation
        exactly = speculation.draft_tokens if speculation.HasField("draft_tokens") else None
        most = self._settings.max_draft_tokens
        if speculation.HasField("max_draft_tokens"):
            most = min(most, speculation.max_draft_tokens)
        plain = (most if exactly is None else exactly) == 0
        return DecodeRequest(
            request_id=generation.request_id,
            prompt=generation.prompt,
            sample_index=index,
            sampling=generation.sampling,
            logprobs=request.logprobs if request.HasField("logprobs") else None,
            mode=generation_pb2.MODE_PLAIN if plain else speculation.mode or self._default_mode(),
            drafter=speculation.drafter,
            draft_tokens=exactly,
            max_draft_tokens=most,
            deadline=generation.deadline,
        )

    def _default_mode(self) -> generation_pb2.Mode:
        return MODE_VALUES[self._settings.mode] if self._settings.speculation_enabled else generation_pb2.MODE_PLAIN


def finish_name(reason: common_pb2.FinishReason) -> str:
    """The name of a reason, which may come from a newer target."""
    known = reason in common_pb2.FinishReason.values()
    return common_pb2.FinishReason.Name(reason) if known else f"finish reason {reason}"


def collect(event: Event, response: generation_pb2.GenerateResponse) -> None:
    """Add an event of the stream to the response that has it all."""
    match event.WhichOneof("event"):
        case "started":
            response.request_id, response.seed = event.started.request_id, event.started.seed
        case "chunk":
            chunk, completion = event.chunk, _completion(response, event.chunk.sample_index)
            completion.text += chunk.text
            completion.token_ids.extend(chunk.token_ids)
            completion.drafted.extend(chunk.drafted)
            completion.logprobs.extend(chunk.logprobs)
        case "completed":
            _completion(response, event.completed.sample_index).completed.CopyFrom(event.completed)


def _completion(response: generation_pb2.GenerateResponse, index: int) -> generation_pb2.Completion:
    while len(response.completions) <= index:
        response.completions.add()
    return response.completions[index]


def told_by_target(error: grpc.aio.AioRpcError) -> RequestError:
    """What the client learns of an error that ended a session on the target."""
    code, message, details = error.code(), f"the target: {error.details()}", error_details(error)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT if details.violations:
            # OpenTarget has its fields under the same names as GenerateRequest.
            return invalid([Violation(v.field.removeprefix("open."), v.description) for v in details.violations])
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return exhausted(message, details.retry_after_s or RETRY_AFTER_S)
        case grpc.StatusCode.UNAVAILABLE:
            return unavailable(message, details.retry_after_s or RETRY_AFTER_S)
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.DEADLINE_EXCEEDED:
            return RequestError(code, message)
    logger.error("the target ended a session with %s: %s", code.name, error.details())
    return RequestError(grpc.StatusCode.INTERNAL, f"the target failed with {code.name}: {error.details()}")
