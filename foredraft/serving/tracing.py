"""OpenTelemetry traces: one for each request, through all three services.

Needs the packages of the extra `tracing`. Importing this module does not; nothing else here imports them at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# Seconds that sending a batch of spans may take, also the last one of a server that stops.
EXPORT_TIMEOUT_S = 5

# Whether there is tracing in this process.
_started = False


class TracingError(Exception):
    """Traces cannot be sent; the message says why."""


class Tracing:
    """Makes spans of a service's calls and hands them to `exporter` in a thread of its own.

    `interceptor` is for the server and `tracer` for further spans. Calls through `propagating` channels carry the
    trace on.
    """

    def __init__(self, service: str, exporter: SpanExporter) -> None:
        from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        global _started
        _started = True
        self._provider = TracerProvider(resource=Resource.create({"service.name": f"foredraft-{service}"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("foredraft")
        # What the services ask one another on connecting is no request.
        wanted = filters.negate(filters.any_of(filters.method_prefix("Get"), filters.method_prefix("List")))
        self.interceptor: grpc.aio.ServerInterceptor = aio_server_interceptor(  # type: ignore[no-untyped-call]
            self._provider, wanted
        )

    async def stop(self) -> None:
        """Send what is left."""
        await asyncio.to_thread(self._provider.shutdown)


def connect(endpoint: str, service: str) -> Tracing:
    """Traces for the OTLP collector at `endpoint` (gRPC, such as "http://127.0.0.1:4317"). Raises TracingError."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return Tracing(service, OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
    except ImportError as error:
        message = (
            f"otlp_endpoint needs packages that are not installed ({error.name}): pip install 'foredraft[tracing]'"
        )
        raise TracingError(message) from None


def trace_id() -> str:
    """The id of the trace in progress, 32 hexadecimal digits; empty if there is none."""
    if not _started:
        return ""
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def propagating(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """The channel, whose calls carry the trace in progress as metadata from now on.

    The library has interceptors for that, but under any interceptor grpc.aio turns the writes of a stream into a queue
    and a task that outlives a stream that the server ends.
    """
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, _propagating(getattr(channel, kind)))
    return channel


def _propagating(make_method: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        method = make_method(*args, **kwargs)

        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *_headers()), **kwargs)

        return call

    return make


def _headers() -> tuple[tuple[str, str], ...]:
    if not _started:
        return ()
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
