"""What Prometheus learns of the target service."""

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from foredraft.serving import metrics
from foredraft.serving.model_thread import ModelThread
from target_service.places import Places
from target_service.scheduler import Scheduler


class TargetMetrics(Collector):
    """Reads what the model thread and the event loop count, in the thread that serves metrics."""

    def __init__(self, scheduler: Scheduler, places: Places, thread: ModelThread) -> None:
        self._scheduler = scheduler
        self._places = places
        self._thread = thread

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        counters, places = self._scheduler.counters, self._places
        yield from metrics.sessions(places.count, self._scheduler.slots_used, places.taken)
        yield metrics.gauge("queue_depth", "Sessions that wait for a slot.", places.waiting)
        yield from metrics.batches(counters.forwards, counters.rows, counters.tokens)
        yield metrics.idle_seconds("target", self._thread.idle_s)
