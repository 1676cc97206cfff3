"""What every call of our services passes through: refusal unless serving, decoding, counting, translation of errors."""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from foredraft.serving.auth import Tokens
from foredraft.serving.errors import RequestError, Violation, abort, invalid, unavailable
from foredraft.serving.undecodable import undecodable

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

RETRY_AFTER_S = 1.0


class Services(grpc.GenericRpcHandler):
    """The services of a server. Their handlers are coroutine functions (one response) and async generators (streams).

    A RequestError that they raise becomes the call's status and details, and a request that cannot be decoded
    INVALID_ARGUMENT; what else they raise is logged and becomes INTERNAL. A generator is closed, so that its `finally`
    runs, before the call ends, however it ends. With `tokens`, calls without one of them are refused. While `refusal`
    is set, every new call of our own services is answered with it.
    """

    def __init__(self, tokens: Tokens | None = None) -> None:
        self._tokens = tokens
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
                return self._guarded(handler, details.method)
        return None

    def _guarded(self, handler: Handler, method: str) -> Handler:
        behaviour: Any = next(filter(None, (getattr(handler, kind) for kind in _FACTORIES)))

        async def run(request: Any, context: Context) -> Any:
            if not handler.request_streaming:
                request = _decoded(handler, request)
            if not handler.response_streaming:
                return await behaviour(request, context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
            return None

        async def guarded(request: Any, context: Context) -> Any:
            try:
                with self._counted():
                    return await run(request, context)
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

        return _replaced(handler, guarded)

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


def _decoded(handler: Handler, data: bytes) -> Any:
    decode: Any = handler.request_deserializer
    try:
        return decode(data)
    except DecodeError:
        # The generated code passes the message class's FromString, which knows the class.
        raise invalid([undecodable(decode.__self__.DESCRIPTOR, data)]) from None


def _log(method: str, error: Exception) -> None:
    """Where it happened, without the exception's message: that may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed with %s at\n%s", method, type(error).__name__, frames)
    logger.debug("the message of that %s", type(error).__name__, exc_info=error)
