"""The port that metrics are served on."""

import runpy
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from foredraft.serving.metrics import MetricsServer
from foredraft.serving.model_thread import ModelThread
from foredraft.serving.server import Server, StartError

ROOT = Path(__file__).resolve().parents[2]


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
        return text


def test_the_port_serves_the_registry_and_the_process_until_it_is_closed() -> None:
    registry = CollectorRegistry()
    Counter("foredraft_things", "Things.", registry=registry).inc(3)
    server = MetricsServer("127.0.0.1:0", registry)
    text = scrape(server.address)
    assert "foredraft_things_total 3.0" in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text
    server.stop()
    with pytest.raises(OSError, match="refused"):
        scrape(server.address)


async def test_a_server_whose_metrics_port_is_taken_does_not_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = Server("127.0.0.1:0", ["foredraft.v1.TargetService"], metrics_address=address)
        with pytest.raises(StartError, match="cannot serve metrics on 127"):
            await server.start()
        await server.stop()


def test_a_model_thread_is_idle_while_it_waits_and_not_while_it_works() -> None:
    working, go_on = threading.Event(), threading.Event()

    def step() -> bool:
        working.set()
        go_on.wait()
        go_on.clear()
        return False

    thread = ModelThread(step, name="test", on_failure=lambda error: None)
    thread.start()
    try:
        assert working.wait(10)
        assert [thread.idle_s, thread.idle_s] == [0.0, 0.0]
        working.clear()
        go_on.set()
        while not thread.idle_s:
            pass
        first = thread.idle_s
        assert thread.idle_s > first
        thread.wake()
        assert working.wait(10)
        second = thread.idle_s
        assert second > first
        assert thread.idle_s == second
    finally:
        go_on.set()
        thread.stop()


def test_the_docs_have_the_current_table_of_metrics() -> None:
    table = runpy.run_path(str(ROOT / "tools" / "metrics_table.py"))["table"]()
    docs = (ROOT / "docs" / "metrics.md").read_text()
    assert docs.partition("<!-- metrics -->\n")[2].partition("\n<!-- /metrics -->")[0] == table
