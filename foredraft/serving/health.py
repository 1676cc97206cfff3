"""The health service of one server. Anybody may ask it, so no client of it can hold up another, or the server's end."""

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Request: TypeAlias = health_pb2.HealthCheckRequest
Status: TypeAlias = health_pb2.HealthCheckResponse
Context: TypeAlias = "grpc.aio.ServicerContext[Request, Status]"

# Each one holds a stream for as long as its client likes.
MAX_WATCHERS = 1000


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers for `services`, and for "", the server as a whole, which have the same status. For the event loop.

    grpc_health's own servicer for asyncio writes to watchers while it holds the lock that a change of status needs: one
    watcher that does not read would keep the status from all others.
    """

    def __init__(self, services: Collection[str]) -> None:
        self._services = {"", *services}
        self._status = Status.NOT_SERVING
        self._changed = asyncio.Event()
        self._watchers = 0

    def set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Change the status; watchers are told in their own time, and may miss one that does not last."""
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Request, context: Context) -> Status:
        """The status now; NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here; an empty name asks for all")
        return Status(status=self._status)

    async def Watch(self, request: Request, context: Context) -> AsyncIterator[Status]:
        """The status now and whenever it changes, SERVICE_UNKNOWN for a service that is not here."""
        if self._watchers >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} clients watch already; call Check, or watch later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._watchers += 1
        try:
            told = None
            while True:
                changed = self._changed
                status = self._status if request.service in self._services else Status.SERVICE_UNKNOWN
                if status != told:
                    yield Status(status=status)
                    told = status
                await changed.wait()
        finally:
            self._watchers -= 1
