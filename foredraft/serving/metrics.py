"""Prometheus metrics on a port of their own.

A service's numbers are read when they are scraped, in a thread of their own, from what its other threads count anyway.
"""

import threading
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class MetricsServer:
    """Serves a registry, and what is known of the process, at http://`address`/metrics until `stop`.

    `address` is "host:port"; with port 0 a free one, which it then has. Raises OSError if it cannot be had.
    """

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        host, _, port = address.rpartition(":")
        ProcessCollector(registry=registry)
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = prometheus_client.start_http_server(int(port), host.strip("[]"), registry)
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Close the port. Blocks for up to half a second: call it with `asyncio.to_thread`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    """What goes up and down."""
    return GaugeMetricFamily(f"foredraft_{name}", meaning, value=value)


def summary(name: str, meaning: str, count: int, total: float) -> SummaryMetricFamily:
    """How often something was seen, and the sum of what was seen."""
    return SummaryMetricFamily(f"foredraft_{name}", meaning, count_value=count, sum_value=total)


def idle_seconds(service: str, seconds: float) -> CounterMetricFamily:
    """How long a model thread has waited for work."""
    meaning = "Seconds that the model thread waited for work."
    family = CounterMetricFamily("foredraft_idle_seconds", meaning, labels=["service"])
    family.add_metric([service], seconds)
    return family


def sessions(slots: int, slots_used: int, count: int) -> list[GaugeMetricFamily]:
    """What a service with sessions has of them."""
    return [
        gauge("slots", "Sessions that the service has room for.", slots),
        gauge("slots_used", "Slots of the KV cache that sessions hold.", slots_used),
        gauge("sessions", "Sessions that are open.", count),
    ]


def batches(forwards: int, rows: int, tokens: int) -> list[SummaryMetricFamily]:
    """What the forward passes computed; the count of both is that of the passes."""
    return [
        summary("batch_rows", "Sessions in a forward pass.", forwards, rows),
        summary("batch_tokens", "Tokens in a forward pass.", forwards, tokens),
    ]
