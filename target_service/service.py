"""TargetService: one session for each Verify stream, and the identity of the model."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc

from foredraft.errors import RequestError
from foredraft.v1 import common_pb2, target_pb2, target_pb2_grpc
from foredraft.validation import vocabulary_page
from target_service.places import Places
from target_service.scheduler import Scheduler
from target_service.session import Limits
from target_service.stream import Stream

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
        self._failure: grpc.StatusCode | None = None
        self._streams: set[Stream] = set()

    def fail(self, status: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> None:
        """Ends every session, now and later, with `status`: the model thread is gone, or cannot go on."""
        self._failure = status
        for stream in self._streams:
            stream.events.put_nowait(_failed(status))

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """One session, which tells of progress while a verdict takes long and ends when no round came for too long."""
        if self._failure is not None:
            raise _failed(self._failure)
        stream = Stream(self._limits, self._scheduler, self._places)
        reading = asyncio.create_task(stream.read(request_iterator))
        self._streams.add(stream)
        tick = min(PROGRESS_S, self._idle_timeout_s)
        answered, forwards = time.perf_counter(), self._scheduler.counters.forwards
        try:
            while True:
                try:
                    async with asyncio.timeout(tick):
                        event = await stream.events.get()
                except TimeoutError:
                    if not stream.verifying:
                        self._check_idle(since=answered)
                    elif forwards != self._scheduler.counters.forwards:
                        forwards = self._scheduler.counters.forwards
                        yield target_pb2.VerifyResponse(progress=target_pb2.Progress(forwards=forwards))
                    continue
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    return
                yield stream.take(event)
                answered, forwards = time.perf_counter(), self._scheduler.counters.forwards
        finally:
            self._streams.discard(stream)
            reading.cancel()
            stream.release()

    def _check_idle(self, since: float) -> None:
        if time.perf_counter() - since >= self._idle_timeout_s:
            message = f"no message came for {self._idle_timeout_s:g} s; close sessions that are not in use"
            raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, message)

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


def _failed(status: grpc.StatusCode) -> RequestError:
    return RequestError(status, "the model failed and the server is going down")
