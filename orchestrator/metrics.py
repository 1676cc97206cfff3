"""What Prometheus learns of the orchestrator, and the spans of rounds: both from what a sample tells anyway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from foredraft.errors import RequestError
from foredraft.v1.generation_pb2 import SpeculationStatistics

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

# Seconds between looks at the statistics of a sample that goes on.
LOOK_EVERY_S = 0.5

# Seconds.
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class Metrics:
    """The orchestrator's numbers in `registry`. With `tracer`, every round becomes a span of the trace in progress."""

    def __init__(self, registry: CollectorRegistry, tracer: Tracer | None = None) -> None:
        self.tracer = tracer

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"foredraft_{name}", meaning, labels, registry=registry)

        self._in_flight = Gauge("foredraft_requests_in_flight", "Requests to generate in work.", registry=registry)
        self._requests = counter("requests", "Requests to generate that ended, by gRPC status.", "code")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = counter("generated_tokens", "Tokens of output.")
        self.first_token = Histogram(
            "foredraft_time_to_first_token_seconds",
            "From the arrival of a request to the first token of a sample.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.token = Histogram(
            "foredraft_inter_token_latency_seconds",
            "Time between verdicts divided by the tokens that the later one gave, once for each of these.",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        # By the name that `gained` gives them.
        self.gains: dict[str, Counter] = {
            "drafts": counter("spec_decode_num_drafts", "Rounds with draft tokens."),
            "drafted": counter("spec_decode_num_draft_tokens", "Draft tokens that were verified."),
            "accepted": counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
            "accepted_per_position": counter(
                "spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens that were accepted, by position in their round.",
                "position",
            ),
            "rounds": counter("rounds", "Verdicts, those on openings left out; kind: plain or drafted.", "kind"),
            "hits": counter(
                "hits", "Verdicts whose continuation had been prepared; kind: all_accepted or refused.", "kind"
            ),
            "misses": counter(
                "misses", "Verdicts whose continuation had not been prepared; kind: all_accepted or refused.", "kind"
            ),
            "late_hits": counter("late_hits", "Misses whose continuation had been begun."),
            "prepared": counter("prepared_tokens", "Draft tokens that were prepared for verdicts."),
            "used": counter("used_tokens", "Prepared tokens that were sent to the target."),
        }
        for kind in ("plain", "drafted"):
            self.gains["rounds"].labels(kind)
        for name in ("hits", "misses"):
            for kind in ("all_accepted", "refused"):
                self.gains[name].labels(kind)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request and how it ends."""
        code = "OK"
        self._in_flight.inc()
        try:
            yield
        except RequestError as error:
            code = error.status.name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except BaseException:
            code = "INTERNAL"
            raise
        finally:
            self._requests.labels(code).inc()
            self._in_flight.dec()

    def sample(self, statistics: SpeculationStatistics, index: int, started: float) -> SampleMetrics:
        """What counts a sample of a request that came at `started` (time.perf_counter)."""
        return SampleMetrics(self, statistics, index, started)


class SampleMetrics:
    """Counts one sample as it goes, by what its statistics have gained since the last look."""

    def __init__(self, metrics: Metrics, statistics: SpeculationStatistics, index: int, started: float) -> None:
        self._metrics = metrics
        self._statistics = statistics
        self._index = index
        self._last = started
        self._last_ns = time.time_ns()
        self._emitted = False
        self._looked = started
        self._counted: dict[tuple[str, str], int] = {}

    def emitted(self, tokens: int) -> None:
        """A verdict gave the client so many tokens."""
        now, metrics = time.perf_counter(), self._metrics
        elapsed, self._last = now - self._last, now
        if self._emitted:
            for _ in range(tokens):
                metrics.token.observe(elapsed / tokens)
        elif tokens:
            metrics.first_token.observe(elapsed)
            self._emitted = True
        metrics.generated_tokens.inc(tokens)
        if metrics.tracer is not None:
            self._trace_round(metrics.tracer, tokens, self.update())
        elif now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self.update()

    def update(self) -> dict[str, int]:
        """Count what the statistics have gained, and return it. Once more when the sample has ended.

        What a stop string takes back again, as far as it was counted already, stays counted.
        """
        gains = {}
        for (name, label), value in gained(self._statistics):
            gain = value - self._counted.get((name, label), 0)
            if gain > 0:
                self._counted[name, label] = value
                counter = self._metrics.gains[name]
                (counter.labels(label) if label else counter).inc(gain)
                gains[f"{name}.{label}" if label else name] = gain
        return gains

    def _trace_round(self, tracer: Tracer, tokens: int, gains: Mapping[str, int]) -> None:
        attributes = {f"foredraft.{name}": gain for name, gain in gains.items()}
        attributes |= {"foredraft.sample": self._index, "foredraft.tokens": tokens}
        span = tracer.start_span("round", start_time=self._last_ns, attributes=attributes)
        self._last_ns = time.time_ns()
        span.end(self._last_ns)


def gained(statistics: SpeculationStatistics) -> Iterable[tuple[tuple[str, str], int]]:
    """The statistics as counters: name and label, "" for none, and value."""
    s = statistics
    drafts = s.drafted_per_position[0] if s.drafted_per_position else 0
    yield ("drafts", ""), drafts
    yield ("drafted", ""), s.drafted
    yield ("accepted", ""), s.accepted
    for position, accepted in enumerate(s.accepted_per_position):
        yield ("accepted_per_position", str(position)), accepted
    yield ("rounds", "plain"), s.plain_rounds
    yield ("rounds", "drafted"), drafts
    yield ("hits", "all_accepted"), s.hits_all_accepted
    yield ("hits", "refused"), s.hits - s.hits_all_accepted
    yield ("misses", "all_accepted"), s.misses_all_accepted
    yield ("misses", "refused"), s.misses - s.misses_all_accepted
    yield ("late_hits", ""), s.late_hits
    yield ("prepared", ""), s.prepared_tokens
    yield ("used", ""), s.used_tokens


class Failovers(Collector):
    """Sessions that were lost, by service, as `read` tells when it is asked."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        meaning = "Sessions that were lost with their service and went on elsewhere or without."
        family = CounterMetricFamily("foredraft_failovers", meaning, labels=["service"])
        for service, count in self._read().items():
            family.add_metric([service], count)
        yield family
