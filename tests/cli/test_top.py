"""`foredraft top` and the metrics of real processes."""

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from typer.testing import CliRunner

from draft_service.metrics import DraftMetrics
from foredraft.cli import app
from foredraft.cli import top as module
from foredraft.cli.top import Endpoint, render
from foredraft.cli.up import METRICS, Stack
from foredraft.v1.generation_pb2 import SpeculationStatistics
from orchestrator.client import AsyncClient
from orchestrator.metrics import Failovers, Metrics
from target_service.metrics import TargetMetrics
from tests import tiny


def text(endpoints: dict[str, Endpoint]) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(endpoints))
    return console.export_text()


def line(shown: str, *words: str) -> str:
    """The part of the display that begins with these words, up to the next border."""
    found = [part.strip() for row in shown.splitlines() for part in row.split("│")]
    [part] = [part for part in found if part.split()[: len(words)] == list(words)]
    return " ".join(part.split()[len(words) :])


def target(**counters: int) -> CollectorRegistry:
    scheduler: Any = SimpleNamespace(counters=SimpleNamespace(**counters), slots_used=3)
    places: Any = SimpleNamespace(count=16, taken=3, waiting=2)
    thread: Any = SimpleNamespace(idle_s=counters["forwards"] / 10)
    registry = CollectorRegistry()
    registry.register(TargetMetrics(scheduler, places, thread))
    return registry


def recorded(endpoint: Endpoint, now: float, registry: CollectorRegistry) -> None:
    endpoint.add(now, generate_latest(registry).decode())


def test_two_scrapes_ten_seconds_apart_show_what_happened_between_them() -> None:
    endpoints = {name: Endpoint("nowhere") for name in ("target", "draft", "orchestrator")}
    recorded(endpoints["target"], 100.0, target(forwards=10, rows=10, tokens=10))
    recorded(endpoints["target"], 110.0, target(forwards=60, rows=110, tokens=510))

    registry = CollectorRegistry()
    metrics = Metrics(registry)
    registry.register(Failovers(lambda: {"target": 1, "draft": 2}))
    statistics = SpeculationStatistics(drafted=1000, accepted=1000, drafted_per_position=[1000])
    metrics.sample(statistics, 0, 0.0).update()
    recorded(endpoints["orchestrator"], 100.0, registry)
    statistics = SpeculationStatistics(
        rounds=21,
        plain_rounds=5,
        drafted=45,
        accepted=27,
        drafted_per_position=[15, 15, 15],
        accepted_per_position=[12, 9, 6],
        hits=9,
        hits_all_accepted=6,
        misses=6,
        prepared_tokens=300,
        used_tokens=30,
    )
    sample = metrics.sample(statistics, 0, 0.0)
    sample.update()
    for _ in range(8):
        metrics.token.observe(0.004)
    metrics.generated_tokens.inc(200)
    recorded(endpoints["orchestrator"], 110.0, registry)

    shown = text(endpoints)
    assert line(shown, "target") == "3 3 of 16 2 2.0 10.0 5.0 50 %"
    assert line(shown, "draft") == "- - - - - - -"
    assert line(shown, "output") == "20.0 tokens/s"
    assert line(shown, "between", "tokens") == "3.8 ms, p95 4.9 ms"
    assert line(shown, "first", "token") == "-, p95 -"
    assert line(shown, "failovers") == "3"
    assert line(shown, "acceptance") == "60 %"
    assert line(shown, "accepted", "/", "round") == "1.80 tokens"
    assert line(shown, "plain", "rounds") == "25 %"
    assert line(shown, "hits,", "all", "accepted") == "100 %"
    assert line(shown, "hits,", "refused") == "33 %"
    assert line(shown, "used,", "wasted") == "3.0, 27.0 tokens/s"
    assert [line(shown, "token", n).split()[-2] for n in "123"] == ["80", "60", "40"]


def test_a_service_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    endpoint = Endpoint(address)
    endpoint.scrape()
    assert f"no answer from {address}" in text({"draft": endpoint})


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x00\x18\x04\x00\x00\x00\x00\x00grpc\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n<html>hello {world}</html>\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc 1\n",
        b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe\n",
        b"HTTP/1.1 200 OK\r\n\r\nabc NaNx\n",
    ],
    ids=["gRPC", "HTML", "cut off", "no UTF-8", "no number"],
)
def test_what_answers_with_something_else_than_metrics_is_named(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        endpoint = Endpoint(address)
        endpoint.scrape()
        server.join()
    assert f"no metrics at {address}: " in text({"target": endpoint})


@pytest.mark.parametrize("address", ["127.0.0.1:abc", "127.0.0.1 :90"])
def test_what_is_no_address_is_named(address: str) -> None:
    endpoint = Endpoint(address)
    endpoint.scrape()
    assert address in text({"target": endpoint})


def test_into_a_pipe_it_shows_what_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    result = CliRunner().invoke(app, ["top", "--metrics", "127.0.0.1:1"])
    assert result.exit_code == 0
    assert "no answer from 127.0.0.1:1" in result.output


def test_without_addresses_it_says_which_are_missing() -> None:
    result = CliRunner().invoke(app, ["top"])
    assert result.exit_code == 2
    assert "give --metrics, --target-metrics or --draft-metrics" in result.stderr


async def test_real_processes_serve_metrics_that_the_display_understands_and_log_json(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    options = {
        "model": str(model),
        "draft_model": str(model),
        "threads": 1,
        "draft_threads": 1,
        "listen": "127.0.0.1:0",
    }
    options |= {**dict.fromkeys(METRICS, "127.0.0.1:0"), "log_format": "json", "log_level": "debug"}
    lines: list[tuple[str, str]] = []
    names = ("orchestrator", "target", "draft")
    async with Stack(options, on_line=lambda *line: lines.append(line)) as stack:
        endpoints = {name: Endpoint(stack.metrics[option]) for name, option in zip(names, METRICS, strict=True)}
        for endpoint in endpoints.values():
            endpoint.scrape()
        async with AsyncClient(stack.address) as client:
            result = await client.generate("Once", max_new_tokens=20, seed=1, draft_tokens=2)
        for endpoint in endpoints.values():
            endpoint.scrape()
    logged = [(name, json.loads(text)) for name, text in lines]
    assert {name for name, entry in logged if entry.get("request_id") == result.request_id} == set(names)
    [completion] = result.completions
    assert completion.statistics is not None
    orchestrator, target, draft = (endpoints[name] for name in names)
    assert orchestrator.gain("foredraft_generated_tokens_total") == completion.completion_token_count
    assert orchestrator.gain("foredraft_spec_decode_num_draft_tokens_total") == completion.statistics.drafted
    assert target.value("foredraft_slots") == draft.value("foredraft_slots") == 16
    for endpoint in (target, draft):
        assert (endpoint.gain("foredraft_batch_tokens_sum") or 0) > 0
    assert (draft.value("foredraft_idle_seconds_total", service="draft") or 0) > 0
    assert "no answer" not in text(endpoints)


def test_draft_metrics_without_a_model_have_no_slots_in_use() -> None:
    scheduler: Any = SimpleNamespace(counters={})
    places: Any = SimpleNamespace(count=4, taken=1)
    thread: Any = SimpleNamespace(idle_s=1.5)
    registry = CollectorRegistry()
    registry.register(DraftMetrics(None, scheduler, places, thread))
    assert registry.get_sample_value("foredraft_slots_used") == 0
    assert registry.get_sample_value("foredraft_sessions") == 1
    assert registry.get_sample_value("foredraft_idle_seconds_total", {"service": "draft"}) == 1.5


@pytest.mark.parametrize("counts", [[], [0.0, 0.0]])
def test_a_histogram_that_has_seen_nothing_has_no_quantiles(counts: list[float]) -> None:
    endpoint = Endpoint("nowhere")
    for now, count in enumerate(counts):
        endpoint.add(float(now), f'# TYPE h histogram\nh_bucket{{le="1"}} {count}\nh_bucket{{le="+Inf"}} {count}\n')
    assert endpoint.quantile(0.5, "h") is None
