"""Traces: what is sent, and that a traced call ends as any other."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from foredraft.errors import error_details
from foredraft.serving.channel import channel
from foredraft.serving.server import Server, StartError
from foredraft.serving.tracing import Tracing
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import generation_pb2, generation_pb2_grpc, target_pb2, target_pb2_grpc
from tests.serving.tiny_server import SERVICES, TinyTarget, add_services


@asynccontextmanager
async def traced() -> AsyncIterator[tuple[Server, TinyTarget, grpc.aio.Channel, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    server = Server("127.0.0.1:0", SERVICES, tracing=Tracing("test", exporter))
    await server.start()
    target = add_services(server)
    await server.set_serving()
    async with channel(server.address) as connection:
        yield server, target, connection, exporter
    await server.stop()


async def test_a_session_is_freed_when_its_client_goes_away() -> None:
    async with traced() as (_, target, connection, _):
        call = target_pb2_grpc.TargetServiceStub(connection).Verify()
        await call.write(target_pb2.VerifyRequest(round=target_pb2.Round(round_id=1)))
        assert (await call.read()).verdict.round_id == 1
        call.cancel()
        await asyncio.wait_for(target.released.wait(), 10)


async def test_errors_keep_their_details_and_give_the_span_their_status() -> None:
    async with traced() as (_, _, connection, exporter):
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(generation_pb2.GenerateRequest(text="invalid"))
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len(error_details(raised.value).violations) == 2
        stream = stub.GenerateStream(generation_pb2.GenerateRequest(text="invalid"))
        assert [(await stream.read()).chunk.sample_index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
    spans = exporter.get_finished_spans()
    assert [(span.attributes or {})["rpc.grpc.status_code"] for span in spans] == [3, 3]


async def test_an_unexpected_error_gives_the_prompt_away_to_no_trace() -> None:
    async with traced() as (_, _, connection, exporter):
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(generation_pb2.GenerateRequest(text="broken secret"))
    [span] = exporter.get_finished_spans()
    assert "secret" not in span.to_json()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the names of the services and spans that it gets."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []

    async def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            [service] = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            self.names += [(service, span.name) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_a_collector_at_the_latest_when_the_server_stops() -> None:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = OrchestratorSettings(listen="127.0.0.1:0", otlp_endpoint=f"http://127.0.0.1:{port}")
    traced_server = Server.configured(settings, SERVICES)
    await traced_server.start()
    add_services(traced_server)
    await traced_server.set_serving()
    async with channel(traced_server.address) as connection:
        await generation_pb2_grpc.GenerationServiceStub(connection).Generate(generation_pb2.GenerateRequest())
    await traced_server.stop()
    await server.stop(None)
    assert collector.names == [("foredraft-orchestrator", "/foredraft.v1.GenerationService/Generate")]


async def test_without_the_packages_a_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    settings = OrchestratorSettings(otlp_endpoint="http://127.0.0.1:4317")
    with pytest.raises(StartError, match=r"pip install 'foredraft\[tracing\]'"):
        Server.configured(settings, SERVICES)
