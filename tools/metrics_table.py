"""Print the table of metrics in docs/metrics.md, from what the three services would serve."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from draft_service.metrics import DraftMetrics
from foredraft.v1.generation_pb2 import SpeculationStatistics
from orchestrator.metrics import Failovers, Metrics
from target_service.metrics import TargetMetrics
from target_service.scheduler import Counters


def orchestrator() -> CollectorRegistry:
    """Metrics with labels are only there once they were counted."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    registry.register(Failovers(lambda: {"target": 0}))
    with metrics.request():
        metrics.sample(SpeculationStatistics(accepted_per_position=[1]), 0, 0.0).update()
    return registry


def models() -> dict[str, Iterable[Metric]]:
    """Those of services that have computed nothing yet."""
    scheduler: Any = SimpleNamespace(counters=Counters(), slots_used=0)
    drafters: Any = SimpleNamespace(counters={})
    places: Any = SimpleNamespace(count=1, taken=0, waiting=0)
    thread: Any = SimpleNamespace(idle_s=0.0)
    return {
        "target": TargetMetrics(scheduler, places, thread).collect(),
        "draft": DraftMetrics(None, drafters, places, thread).collect(),
    }


def table() -> str:
    """The table in Markdown."""
    services = {"orchestrator": orchestrator().collect(), **models()}
    found: dict[str, tuple[Metric, list[str]]] = {}
    for service, metrics in services.items():
        for metric in metrics:
            found.setdefault(metric.name, (metric, []))[1].append(service)
    lines = ["| Metric | Type | Service | Meaning |", "|---|---|---|---|"]
    for name, (metric, having) in found.items():
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
        shown = name + ("_total" if metric.type == "counter" else "") + (f"{{{', '.join(labels)}}}" if labels else "")
        lines.append(f"| `{shown}` | {metric.type} | {', '.join(having)} | {metric.documentation} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
