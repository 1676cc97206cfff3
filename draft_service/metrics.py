"""What Prometheus learns of the draft service."""

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from draft_service.scheduler import Scheduler
from draft_service.stream import Places
from foredraft.engine.engine import Engine
from foredraft.serving import metrics
from foredraft.serving.model_thread import ModelThread


class DraftMetrics(Collector):
    """Reads what the model thread and the event loop count, in the thread that serves metrics. No engine: no model."""

    def __init__(self, engine: Engine | None, scheduler: Scheduler, places: Places, thread: ModelThread) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._places = places
        self._thread = thread

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        drafters = self._scheduler.counters.values()
        slots_used = self._engine.slots_used if self._engine is not None else 0
        yield from metrics.sessions(self._places.count, slots_used, self._places.taken)
        yield from metrics.batches(
            sum(counters.forwards for counters in drafters),
            sum(counters.forward_rows for counters in drafters),
            sum(counters.forward_tokens for counters in drafters),
        )
        yield metrics.idle_seconds("draft", self._thread.idle_s)
