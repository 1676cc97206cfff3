"""What every call of our services passes through: refusal unless serving, decoding, counting, translation of errors.

So that traces see how calls end, the library's interceptor stands between that and gRPC. It knows async generators, but
neither closes them nor knows statuses with details.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from foredraft.errors import RequestError, Violation, abort, invalid, unavailable
from foredraft.serving.auth import Tokens
from foredraft.serving.logs import request_id
from foredraft.serving.undecodable import undecodable

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

RETRY_AFTER_S = 1.0
# As in GenerateRequest.
MAX_REQUEST_ID = 128


class Services(grpc.GenericRpcHandler):
    """The services of a server. Their handlers are coroutine functions (one response) and async generators (streams).

    A RequestError that they raise becomes the call's status and details, and a request that cannot be decoded
    INVALID_ARGUMENT; what else they raise is logged and becomes INTERNAL. A generator is closed, so that its `finally`
    runs, before the call ends, however it ends. With `tokens`, calls without one of them are refused. While `refusal`
    is set, every new call of our own services is answered with it. While a call is handled, `logs.request_id` is its
    metadata's x-request-id, and `interceptor` makes it part of a trace.
    """

    def __init__(self, tokens: Tokens | None = None, interceptor: grpc.aio.ServerInterceptor | None = None) -> None:
        self._tokens = tokens
        self._interceptor = interceptor
        self.refusal: RequestError | None = unavailable("the server is starting; try again later", RETRY_AFTER_S)
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Called by generated code, which takes this for a server; gRPC's own wants all handlers before it starts."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, "Handler"]) -> None:
        """Called by generated code with what `add_generic_rpc_handlers` has had already."""

    def service(self, details: grpc.HandlerCallDetails) -> "Handler | None":
        if self._tokens is not None and (refusal := self._tokens.refusal(details)) is not None:
            return _refusing(refusal)
        if self.refusal is not None and details.method.startswith("/foredraft."):
            return _refusing(self.refusal)
        for handlers in self._handlers:
            handler = handlers.service(details)
            if handler is not None:
                return self._called(handler, details)
        return None

    def _called(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        guarded = self._guarded(handler, details.method)

        async def call(request: Any, context: Context) -> Any:
            request_id.set(_request_id(context))
            async with AsyncExitStack() as closing:

                def respond(request: Any, context: Context) -> Any:
                    responses = guarded(request, context)
                    if handler.response_streaming:
                        closing.push_async_callback(responses.aclose)
                    return responses

                traced = await self._traced(_replaced(handler, respond), details)
                if not handler.response_streaming:
                    return await traced(request, context)
                async for response in await closing.enter_async_context(aclosing(traced(request, context))):
                    await context.write(response)
            return None

        return _replaced(handler, call)

    async def _traced(self, handler: Handler, details: grpc.HandlerCallDetails) -> Any:
        """The behaviour of `handler`, within a span if there is tracing."""
        if self._interceptor is not None and details.method.startswith("/foredraft."):

            async def continuation(_: grpc.HandlerCallDetails) -> Handler:
                return handler

            return _behaviour(await self._interceptor.intercept_service(continuation, details))
        return _behaviour(handler)

    def _guarded(self, handler: Handler, method: str) -> Any:
        """The behaviour of `handler`, counted, with its errors as statuses."""
        behaviour = _behaviour(handler)

        async def respond(request: Any, context: Context) -> Any:
            async with self._ended(method, context):
                return await behaviour(_decoded(handler, request), context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with (
                self._ended(method, context),
                aclosing(behaviour(_decoded(handler, request), context)) as responses,
            ):
                async for response in responses:
                    yield response

        return stream if handler.response_streaming else respond

    @asynccontextmanager
    async def _ended(self, method: str, context: Context) -> AsyncIterator[None]:
        started = time.perf_counter()
        try:
            with self._counted():
                yield
        except grpc.aio.BaseError:
            raise  # an abort, or a client that has gone: gRPC knows both
        except RequestError as error:
            await abort(context, error)
        except DecodeError:
            await abort(context, invalid([Violation("request", "a message of the stream cannot be decoded")]))
        except Exception as error:
            _log(method, error)
            message = f"internal error ({type(error).__name__}); the server's log has more"
            await abort(context, RequestError(grpc.StatusCode.INTERNAL, message))
        finally:
            logger.debug("%s ended after %.3f s", method, time.perf_counter() - started)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if self.running == 0:
                self.idle.set()


_FACTORIES = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def _replaced(handler: Handler, behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Handler:
    """`handler` with another behaviour, which decodes unary requests itself: gRPC answers UNKNOWN to bad bytes."""
    kind = next(kind for kind in _FACTORIES if getattr(handler, kind))
    factory: Any = _FACTORIES[kind]
    decoder = handler.request_deserializer if handler.request_streaming else None
    replaced: Handler = factory(behaviour, decoder, handler.response_serializer)
    return replaced


def _refusing(refusal: RequestError) -> Handler:
    # A stream on both sides fits every kind of call and reads nothing before it answers.
    async def refuse(_requests: Any, context: Context) -> None:
        await abort(context, refusal)

    handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return handler


def _behaviour(handler: "Handler | None") -> Any:
    return next(filter(None, (getattr(handler, kind) for kind in _FACTORIES)))


def _decoded(handler: Handler, request: Any) -> Any:
    """The request of a unary call, which comes as bytes; a stream decodes its own."""
    if handler.request_streaming:
        return request
    decode: Any = handler.request_deserializer
    try:
        return decode(request)
    except DecodeError:
        # The generated code passes the message class's FromString, which knows the class.
        raise invalid([undecodable(decode.__self__.DESCRIPTOR, request)]) from None


def _request_id(context: Context) -> str:
    found = (value for key, value in context.invocation_metadata() or () if key == "x-request-id")
    return str(next(found, ""))[:MAX_REQUEST_ID]


def _log(method: str, error: Exception) -> None:
    """Where it happened, without the exception's message: that may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed with %s at\n%s", method, type(error).__name__, frames)
    logger.debug("the message of that %s", type(error).__name__, exc_info=error)
