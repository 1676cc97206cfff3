"""TargetService: one session for each Verify stream, and the identity of the model."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc

from foredraft.serving.errors import RequestError
from foredraft.v1 import common_pb2, target_pb2, target_pb2_grpc
from foredraft.validation import vocabulary_page
from target_service.places import Places
from target_service.scheduler import Scheduler
from target_service.session import Limits
from target_service.stream import Stream, discard

PROGRESS_S = 1.0
FILE_PART_BYTES = 2**20

Context = grpc.aio.ServicerContext[Any, Any]


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """The handlers. They raise RequestError, which the server turns into a status."""

    def __init__(
        self,
        identity: common_pb2.Model,
        vocabulary: Sequence[str],
        tokenizer_files: Mapping[str, bytes],
        limits: Limits,
        scheduler: Scheduler,
        places: Places,
        *,
        idle_timeout_s: float,
    ) -> None:
        self._identity = identity
        self._vocabulary = vocabulary
        self._tokenizer_files = tokenizer_files
        self._limits = limits
        self._scheduler = scheduler
        self._places = places
        self._idle_timeout_s = idle_timeout_s
        self._failed = asyncio.Event()
        self._failure = grpc.StatusCode.INTERNAL

    def fail(self, status: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> None:
        """Ends every session, now and later, with `status`: the model thread is gone, or cannot go on."""
        self._failure = status
        self._failed.set()

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """One session. It reads on while a round is in flight, so that a client that leaves frees its slot at once."""
        requests = aiter(request_iterator)
        reading = asyncio.create_task(_next(requests))
        failed = asyncio.create_task(self._failed.wait())
        stream = Stream(self._limits, self._scheduler, self._places)
        forwards = 0
        try:
            while True:
                verifying = stream.verifying
                await asyncio.wait(
                    {reading, failed, verifying or reading},
                    timeout=PROGRESS_S if verifying else self._idle_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if failed.done():
                    raise RequestError(self._failure, "the model failed and the server is going down")
                if verifying is not None and verifying.done():
                    yield stream.take()
                elif reading.done():
                    request = reading.result()
                    if request is None and not stream.ended:
                        message = "the stream ended without a close message; its session was dropped"
                        raise RequestError(grpc.StatusCode.CANCELLED, message)
                    if request is None or request.HasField("close"):
                        return
                    stream.begin(request)
                    forwards = self._scheduler.counters.forwards
                    reading = asyncio.create_task(_next(requests))
                elif verifying is None:
                    message = f"no message came for {self._idle_timeout_s:g} s; close sessions that are not in use"
                    raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
                elif forwards != self._scheduler.counters.forwards:
                    forwards = self._scheduler.counters.forwards
                    yield target_pb2.VerifyResponse(progress=target_pb2.Progress(forwards=forwards))
        finally:
            discard(reading)
            discard(failed)
            stream.release()

    async def GetModel(
        self, request: target_pb2.TargetServiceGetModelRequest, context: Context
    ) -> target_pb2.TargetServiceGetModelResponse:
        return target_pb2.TargetServiceGetModelResponse(model=self._identity)

    async def ListVocabulary(
        self, request: common_pb2.ListVocabularyRequest, context: Context
    ) -> common_pb2.ListVocabularyResponse:
        ids, next_page_token = vocabulary_page(request, len(self._vocabulary))
        tokens = self._vocabulary[ids.start : ids.stop]
        return common_pb2.ListVocabularyResponse(tokens=tokens, next_page_token=next_page_token)

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        for name, data in self._tokenizer_files.items():
            for start in range(0, max(len(data), 1), FILE_PART_BYTES):
                part = data[start : start + FILE_PART_BYTES]
                yield target_pb2.GetTokenizerResponse(file_name=name, data=part)


async def _next(requests: AsyncIterator[target_pb2.VerifyRequest]) -> target_pb2.VerifyRequest | None:
    return await anext(requests, None)
