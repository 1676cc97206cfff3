"""DraftService: one session for each Draft stream, and the identity of what drafts."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from draft_service.messages import response
from draft_service.scheduler import Scheduler
from draft_service.stream import Offer, Places, Stream
from foredraft.errors import RequestError, failed_precondition
from foredraft.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from foredraft.validation import vocabulary_page

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The handlers. They raise RequestError, which the server turns into a status.

    `identity` and `vocabulary` are None and empty if there is no model.
    """

    def __init__(
        self,
        identity: common_pb2.Model | None,
        vocabulary: Sequence[str],
        offer: Offer,
        scheduler: Scheduler,
        places: Places,
        *,
        idle_timeout_s: float,
    ) -> None:
        self._identity = identity
        self._vocabulary = vocabulary
        self._offer = offer
        self._scheduler = scheduler
        self._places = places
        self._idle_timeout_s = idle_timeout_s
        self._has_failed = False
        self._streams: set[Stream] = set()

    def fail(self) -> None:
        """End every session, now and later, with INTERNAL: the model thread is gone."""
        self._has_failed = True
        for stream in self._streams:
            stream.events.put_nowait(_failed())

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Context
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """One session: requests are handed on as they come, answers as they are ready."""
        if self._has_failed:
            raise _failed()
        stream = Stream(self._offer, self._scheduler, self._places)
        reading = asyncio.create_task(stream.read(request_iterator))
        self._streams.add(stream)
        try:
            while True:
                try:
                    async with asyncio.timeout(stream.heard + self._idle_timeout_s - time.perf_counter()):
                        event = await stream.events.get()
                except TimeoutError:
                    if time.perf_counter() - stream.heard < self._idle_timeout_s:
                        continue
                    message = f"no message came for {self._idle_timeout_s:g} s; close sessions that are not in use"
                    raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, message) from None
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    return
                yield response(event)
        finally:
            self._streams.discard(stream)
            reading.cancel()
            stream.release()

    async def GetModel(
        self, request: draft_pb2.DraftServiceGetModelRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelResponse:
        return draft_pb2.DraftServiceGetModelResponse(
            model=self._identity, drafters=self._offer.drafters, default_drafter=self._offer.default_drafter
        )

    async def ListVocabulary(
        self, request: common_pb2.ListVocabularyRequest, context: Context
    ) -> common_pb2.ListVocabularyResponse:
        if self._identity is None:
            raise failed_precondition("this server drafts with n-grams and has no model, hence no vocabulary")
        token_ids, next_page_token = vocabulary_page(request, len(self._vocabulary))
        return common_pb2.ListVocabularyResponse(
            tokens=[self._vocabulary[token] for token in token_ids], next_page_token=next_page_token
        )


def _failed() -> RequestError:
    return RequestError(grpc.StatusCode.INTERNAL, "the drafter failed and the server is going down")
