"""DraftService: one session for each Draft stream, and the identity of what drafts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from draft_service.scheduler import Scheduler
from draft_service.stream import Offer, Places, Stream
from foredraft.serving.errors import RequestError, failed_precondition
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
        self._failed = asyncio.Event()

    def fail(self) -> None:
        """End every session, now and later, with INTERNAL: the model thread is gone."""
        self._failed.set()

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Context
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """One session: requests are handed on as they come, answers as they are ready."""
        requests = aiter(request_iterator)
        stream = Stream(self._offer, self._scheduler, self._places)
        failed = asyncio.create_task(self._failed.wait())
        reading = asyncio.create_task(_next(requests))
        answering = asyncio.create_task(stream.answers.get())
        try:
            while True:
                tasks = {failed, reading, answering}
                done, _ = await asyncio.wait(tasks, timeout=self._idle_timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if failed in done:
                    raise RequestError(grpc.StatusCode.INTERNAL, "the drafter failed and the server is going down")
                if not done:
                    message = f"no message came for {self._idle_timeout_s:g} s; close sessions that are not in use"
                    raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
                if answering in done:
                    yield answering.result()
                    # Branches are often done together, and the last may be the one that is needed.
                    while not stream.answers.empty():
                        yield stream.answers.get_nowait()
                    answering = asyncio.create_task(stream.answers.get())
                if reading in done:
                    request = reading.result()
                    if request is None:
                        message = "the stream ended without a close message; its session was dropped"
                        raise RequestError(grpc.StatusCode.CANCELLED, message)
                    if request.HasField("close"):
                        return
                    stream.handle(request)
                    reading = asyncio.create_task(_next(requests))
        finally:
            for task in (failed, reading, answering):
                task.cancel()
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


async def _next(requests: AsyncIterator[draft_pb2.DraftRequest]) -> draft_pb2.DraftRequest | None:
    return await anext(requests, None)
