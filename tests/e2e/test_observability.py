"""Metrics, traces and logs of the three services, in this process and over real sockets."""

import asyncio
import logging
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from draft_service.server import SERVICE_NAME as DRAFT
from draft_service.server import start_draft
from foredraft.serving.channel import channel
from foredraft.serving.logs import add_ids
from foredraft.serving.server import Server
from foredraft.serving.tracing import Tracing
from foredraft.settings import DraftSettings, OrchestratorSettings, TargetSettings
from foredraft.v1 import common_pb2, generation_pb2, generation_pb2_grpc, target_pb2, target_pb2_grpc
from orchestrator.backends import Backends
from orchestrator.client import AsyncClient
from orchestrator.decode import Decoder
from orchestrator.metrics import Failovers, Metrics
from orchestrator.results import Completion
from orchestrator.server import SERVICE as ORCHESTRATOR
from orchestrator.service import GenerationServicer
from orchestrator.tokenizer import Tokenizer
from target_service.server import SERVICE_NAME as TARGET
from target_service.server import start_target
from tests import tiny

SLOTS = 2
PREFIX = "foredraft_"


@dataclass
class Services:
    """The three servers by full service name, a client, and what each has traced."""

    servers: dict[str, Server]
    client: AsyncClient
    exporters: dict[str, InMemorySpanExporter]

    async def scrape(self, name: str) -> dict[str, float]:
        """Values by name and labels, as in `hits_total{kind="refused"}`, of our own metrics."""
        text = await asyncio.to_thread(_get, f"http://{self.servers[name].metrics_address}/metrics")
        return {
            sample.name.removeprefix(PREFIX) + _labels(sample.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        }

    async def until(self, name: str, metric: str, value: float) -> None:
        """Return when a metric has a value."""
        async with asyncio.timeout(10):
            while (await self.scrape(name))[metric] != value:
                pass

    async def spans(self) -> dict[str, list[ReadableSpan]]:
        """All spans of each service so far; ends tracing."""
        for server in self.servers.values():
            if server.tracing is not None:
                await server.tracing.stop()
        return {name: list(exporter.get_finished_spans()) for name, exporter in self.exporters.items()}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
        return text


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is often right."""
    directory = tmp_path_factory.mktemp("models")
    target = tiny.save_model(directory / "target", idle_layers=8)
    return target, tiny.save_model(directory / "draft", noise=0.1)


@asynccontextmanager
async def running(directory: Path, models: tuple[Path, Path], *, traced: bool = False) -> AsyncIterator[Services]:
    exporters = {name: InMemorySpanExporter() for name in (TARGET, DRAFT, ORCHESTRATOR)}
    servers = {
        name: Server(
            f"unix:{directory}/{name}",
            [name],
            metrics_address="127.0.0.1:0",
            tracing=Tracing(name, exporter) if traced else None,
        )
        for name, exporter in exporters.items()
    }
    for server in servers.values():
        await server.start()
    target, draft = map(str, models)
    started = [
        await start_target(TargetSettings(model=target, threads=1, max_sessions=SLOTS), servers[TARGET]),
        await start_draft(DraftSettings(draft_model=draft, drafter="model", threads=1), servers[DRAFT]),
    ]
    for name in (TARGET, DRAFT):
        await servers[name].set_serving()
    settings = OrchestratorSettings(
        target=servers[TARGET].address, draft=servers[DRAFT].address, draft_timeout_s=20, max_concurrent_requests=8
    )
    backends = Backends(settings)
    await backends.connect()
    tokenizer = Tokenizer(await backends.fetch_tokenizer())
    server = servers[ORCHESTRATOR]
    server.metrics.register(
        Failovers(lambda: {"target": backends.targets.failovers, "draft": backends.drafts.failovers})
    )
    metrics = Metrics(server.metrics, server.tracing.tracer if server.tracing is not None else None)
    servicer = GenerationServicer(tokenizer, Decoder(backends, settings), backends, settings, metrics)
    server.add(generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
    await server.set_serving()
    try:
        async with AsyncClient(server.address) as client:
            yield Services(servers, client, exporters)
    finally:
        await backends.close()
        for server in reversed(servers.values()):
            await server.stop()
        for service in started:
            await service.stop()


@pytest.fixture(scope="module")
async def services(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with running(tmp_path_factory.mktemp("services"), models) as running_services:
        yield running_services


def counted(completions: list[Completion]) -> dict[str, float]:
    """What the orchestrator's counters should have gained for these samples, which had each its own request."""
    statistics = [completion.statistics for completion in completions if completion.statistics is not None]
    assert len(statistics) == len(completions)

    def of(name: str) -> int:
        return sum(getattr(s, name) for s in statistics)

    drafts = sum(s.drafted_per_position[0] for s in statistics if s.drafted_per_position)
    expected = {
        "spec_decode_num_drafts_total": drafts,
        "spec_decode_num_draft_tokens_total": of("drafted"),
        "spec_decode_num_accepted_tokens_total": of("accepted"),
        'hits_total{kind="all_accepted"}': of("hits_all_accepted"),
        'hits_total{kind="refused"}': of("hits") - of("hits_all_accepted"),
        'misses_total{kind="all_accepted"}': of("misses_all_accepted"),
        'misses_total{kind="refused"}': of("misses") - of("misses_all_accepted"),
        "late_hits_total": of("late_hits"),
        "prepared_tokens_total": of("prepared_tokens"),
        "used_tokens_total": of("used_tokens"),
        'rounds_total{kind="plain"}': of("plain_rounds"),
        'rounds_total{kind="drafted"}': drafts,
        "generated_tokens_total": sum(completion.completion_token_count for completion in completions),
        "prompt_tokens_total": sum(completion.prompt_token_count for completion in completions),
        "time_to_first_token_seconds_count": len(completions),
        "inter_token_latency_seconds_count": sum(completion.completion_token_count - 1 for completion in completions),
        'requests_total{code="OK"}': len(completions),
    }
    for position in range(max(len(s.accepted_per_position) for s in statistics)):
        accepted = sum(s.accepted_per_position[position] for s in statistics if position < len(s.accepted_per_position))
        expected[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'] = accepted
    return {name: float(value) for name, value in expected.items()}


def gained(before: Mapping[str, float], after: Mapping[str, float], names: Iterator[str]) -> dict[str, float]:
    return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}


async def test_the_metrics_agree_with_the_statistics_of_the_answers(services: Services) -> None:
    before = await services.scrape(ORCHESTRATOR)
    passes = {name: (await services.scrape(name))["batch_rows_count"] for name in (TARGET, DRAFT)}
    completions = []
    for seed, mode in enumerate(["overlapped", "overlapped", "sequential", "plain"]):
        drafting: dict[str, Any] = {} if mode == "plain" else {"draft_tokens": 3}
        result = await services.client.generate("Once upon", max_new_tokens=40, seed=seed, mode=mode, **drafting)
        completions += result.completions
    after = await services.scrape(ORCHESTRATOR)
    expected = counted(completions)
    assert gained(before, after, iter(expected)) == expected
    assert expected["spec_decode_num_accepted_tokens_total"] > 0
    assert (
        sum(
            expected[f'{name}_total{{kind="{kind}"}}']
            for name in ("hits", "misses")
            for kind in ("all_accepted", "refused")
        )
        > 0
    )
    assert after["requests_in_flight"] == 0
    assert (after['failovers_total{service="target"}'], after['failovers_total{service="draft"}']) == (0, 0)
    for name in (TARGET, DRAFT):
        metrics = await services.scrape(name)
        assert metrics["batch_rows_count"] > passes[name]
        assert metrics["batch_tokens_sum"] >= metrics["batch_rows_sum"] >= metrics["batch_rows_count"]


async def test_a_stop_string_and_samples_of_one_request_are_counted_as_the_statistics_say(services: Services) -> None:
    text = (await services.client.generate("Once upon", max_new_tokens=40, seed=5)).text
    before = await services.scrape(ORCHESTRATOR)
    result = await services.client.generate(
        "Once upon", max_new_tokens=40, seed=5, draft_tokens=4, stop=[text[len(text) // 2 :][:2]]
    )
    after = await services.scrape(ORCHESTRATOR)
    [completion] = result.completions
    assert completion.finish_reason == "stop_string"
    expected = counted(result.completions)
    assert gained(before, after, iter(expected)) == expected


async def test_counters_never_go_down(services: Services) -> None:
    def counters(samples: Mapping[str, float]) -> dict[str, float]:
        ends = ("_total", "_count", "_sum", "_bucket")
        return {name: value for name, value in samples.items() if name.partition("{")[0].endswith(ends)}

    for name in services.servers:
        first = counters(await services.scrape(name))
        await services.client.generate("Once upon", max_new_tokens=10, draft_tokens=2)
        second = counters(await services.scrape(name))
        assert first
        assert all(second[sample] >= value for sample, value in first.items())
        assert second != first


async def test_refusals_and_cancelled_requests_are_counted_by_status(services: Services) -> None:
    before = await services.scrape(ORCHESTRATOR)
    async with channel(services.servers[ORCHESTRATOR].address) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(generation_pb2.GenerateRequest())
        call = stub.GenerateStream(
            generation_pb2.GenerateRequest(text="Once", sampling={"max_new_tokens": 400, "ignore_eos": True})
        )
        await call.read()
        call.cancel()
        await services.until(ORCHESTRATOR, "requests_in_flight", 0)
    after = await services.scrape(ORCHESTRATOR)
    codes = [f'requests_total{{code="{code}"}}' for code in ("INVALID_ARGUMENT", "CANCELLED", "OK")]
    assert list(gained(before, after, iter(codes)).values()) == [1, 1, 0]


async def test_the_target_tells_its_sessions_slots_and_queue(services: Services) -> None:
    async with channel(services.servers[TARGET].address) as connection:
        stub = target_pb2_grpc.TargetServiceStub(connection)
        opening = target_pb2.OpenTarget(
            token_ids=[5, 6, 7],
            prompt_length=3,
            sampling=common_pb2.Sampling(seed=1, max_new_tokens=9, ignore_eos=True),
        )
        calls = [stub.Verify() for _ in range(SLOTS + 1)]
        for call in calls[:SLOTS]:
            await call.write(target_pb2.VerifyRequest(open=opening))
            await call.read()
        await calls[-1].write(target_pb2.VerifyRequest(open=opening))
        await services.until(TARGET, "queue_depth", 1)
        metrics = await services.scrape(TARGET)
        assert [metrics[name] for name in ("slots", "slots_used", "sessions")] == [SLOTS, SLOTS, SLOTS]
        for call in calls:
            call.cancel()
        await services.until(TARGET, "slots_used", 0)
        metrics = await services.scrape(TARGET)
        assert [metrics[name] for name in ("slots", "sessions", "queue_depth")] == [SLOTS, 0, 0]


async def test_every_services_log_has_the_requests_id_and_the_answer_echoes_it(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.handler.addFilter(add_ids)
    async with channel(services.servers[ORCHESTRATOR].address) as connection:
        stub = generation_pb2_grpc.GenerationServiceStub(connection)
        request = generation_pb2.GenerateRequest(
            text="Once", sampling={"max_new_tokens": 20}, speculation={"draft_tokens": 2}
        )
        call = stub.Generate(request, metadata=(("x-request-id", "from-metadata"),))
        assert (await call).request_id == "from-metadata"
        assert ("x-request-id", "from-metadata") in list(await call.initial_metadata())
        request.request_id = "from-request"
        call = stub.Generate(request, metadata=(("x-request-id", "from-metadata"),))
        assert (await call).request_id == "from-request"
    methods = (f"/{TARGET}/Verify", f"/{DRAFT}/Draft", f"/{ORCHESTRATOR}/Generate")
    wanted = {(identity, method) for identity in ("from-metadata", "from-request") for method in methods}

    def logged() -> set[tuple[str, str]]:
        records = [record for record in caplog.records if record.name.endswith("rpc") and record.args]
        return {(getattr(record, "request_id", ""), str(record.args[0])) for record in records}  # type: ignore[index]

    async with asyncio.timeout(10):
        while not wanted <= logged():  # The sessions end after the answer.
            await services.scrape(TARGET)


async def test_a_request_is_one_trace_through_the_three_services(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with running(tmp_path, models, traced=True) as services:
        async with channel(services.servers[ORCHESTRATOR].address) as connection:
            stub = generation_pb2_grpc.GenerationServiceStub(connection)
            trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
            call = stub.GenerateStream(
                generation_pb2.GenerateRequest(
                    text="Once", sampling={"max_new_tokens": 20}, speculation={"draft_tokens": 2}
                ),
                metadata=(("traceparent", f"00-{trace_id}-{parent}-01"),),
            )
            events = [event async for event in call]
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(generation_pb2.GenerateRequest())
        spans = await services.spans()
    [request] = [span for span in spans[ORCHESTRATOR] if span.name.endswith("/GenerateStream")]
    assert request.parent is not None
    assert request.parent.span_id == int(parent, 16)
    [verify], [draft] = spans[TARGET], spans[DRAFT]
    assert (verify.name, draft.name) == (f"/{TARGET}/Verify", f"/{DRAFT}/Draft")
    rounds = [span for span in spans[ORCHESTRATOR] if span.name == "round"]
    assert len(rounds) == events[-1].completed.statistics.rounds
    for span in (request, verify, draft, *rounds):
        assert span.context is not None
        assert span.context.trace_id == int(trace_id, 16)
    for span in (verify, draft, *rounds):
        assert span.parent is not None
        assert request.context is not None
        assert span.parent.span_id == request.context.span_id
    told = [span.attributes or {} for span in rounds]
    assert sum(int(str(a["foredraft.tokens"])) for a in told) == events[-1].completed.usage.completion_token_count
    [refused] = [span for span in spans[ORCHESTRATOR] if span.name.endswith("/Generate")]
    assert (refused.attributes or {})["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
