"""`foredraft top`: what the services do now, from the metrics that they serve."""

import time
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Annotated

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foredraft.cli.flags import Config
from foredraft.config import ConfigError, collect

INTERVAL_S = 1.0
TIMEOUT_S = 1.0
# Rates are over this many scrapes.
SCRAPES = 10
NOTHING = "-"

# Names and labels of samples, and their values.
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Endpoint:
    """The metrics of one service: its last scrapes, the oldest first, and why there is none any more."""

    address: str
    scrapes: deque[tuple[float, Samples]] = field(default_factory=lambda: deque(maxlen=SCRAPES))
    failure: str = ""

    def scrape(self) -> None:
        """Ask for the metrics; a service that does not answer begins anew when it does."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=TIMEOUT_S) as response:
                self.add(time.perf_counter(), response.read().decode())
        except OSError as error:
            self._fail(f"no answer from {self.address}: {getattr(error, 'reason', error)}")
        # In Python's notation, for it may hold what was received.
        except (HTTPException, ValueError) as error:
            self._fail(f"no metrics at {self.address}: {error!r:.200}")

    def _fail(self, failure: str) -> None:
        self.scrapes.clear()
        self.failure = failure

    def add(self, now: float, text: str) -> None:
        """Take in a scrape, made at `now` (seconds)."""
        samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        self.scrapes.append((now, samples))
        self.failure = ""

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the last values of a metric with these labels; None if there are none."""
        return total(self.scrapes[-1][1], name, labels) if self.scrapes else None

    def gain(self, name: str, **labels: str) -> float | None:
        """What a counter has gained in all scrapes; None if that is not known."""
        if len(self.scrapes) < 2:
            return None
        new, old = total(self.scrapes[-1][1], name, labels), total(self.scrapes[0][1], name, labels)
        return None if new is None else max(0.0, new - (old or 0.0))

    def rate(self, name: str, **labels: str) -> float | None:
        """What a counter gains in a second; None if that is not known."""
        gain = self.gain(name, **labels)
        return None if gain is None else gain / (self.scrapes[-1][0] - self.scrapes[0][0])

    def labels(self, name: str, label: str) -> list[str]:
        """The values that a label of a metric has."""
        samples = self.scrapes[-1][1] if self.scrapes else {}
        return [dict(labels)[label] for sample, labels in samples if sample == name]

    def quantile(self, q: float, name: str) -> float | None:
        """A quantile of what a histogram has seen in all scrapes, interpolated; None if it has seen nothing."""
        bounds = sorted((float(bound), bound) for bound in set(self.labels(f"{name}_bucket", "le")))
        counts = [self.gain(f"{name}_bucket", le=bound) or 0.0 for _, bound in bounds]
        if not counts or counts[-1] == 0:
            return None
        wanted = q * counts[-1]
        lower = below = 0.0
        for (upper, _), count in zip(bounds, counts, strict=True):
            if count >= wanted:
                return lower if upper == float("inf") else lower + (upper - lower) * (wanted - below) / (count - below)
            lower, below = upper, count
        return lower


def total(samples: Samples, name: str, labels: Mapping[str, str]) -> float | None:
    """The sum of the samples of this name with at least these labels; None if there are none."""
    wanted = frozenset(labels.items())
    found = [value for (sample, its), value in samples.items() if sample == name and its >= wanted]
    return sum(found) if found else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """None where there is nothing to divide."""
    return part / whole if part is not None and whole else None


def number(value: float | None, unit: str = "", digits: int = 1) -> str:
    """The value for people."""
    return NOTHING if value is None else f"{value:,.{digits}f}{unit}"


def percent(value: float | None) -> str:
    """A share for people."""
    return NOTHING if value is None else f"{100 * value:.0f} %"


def milliseconds(seconds: float | None) -> str:
    """A duration for people."""
    return number(None if seconds is None else 1000 * seconds, " ms", 0 if seconds and seconds > 0.1 else 1)


def services(endpoints: Mapping[str, Endpoint]) -> RenderableType:
    """Target and draft: what they hold, compute and wait."""
    table = Table("service", box=box.SIMPLE_HEAD, expand=True)
    for heading in ("sessions", "slots", "queue", "sessions/pass", "tokens/pass", "passes/s", "idle"):
        table.add_column(heading, justify="right")
    for name, endpoint in endpoints.items():
        passes = endpoint.gain("foredraft_batch_rows_count")
        slots = endpoint.value("foredraft_slots")
        table.add_row(
            name,
            number(endpoint.value("foredraft_sessions"), digits=0),
            NOTHING if slots is None else f"{endpoint.value('foredraft_slots_used'):.0f} of {slots:.0f}",
            number(endpoint.value("foredraft_queue_depth"), digits=0),
            number(ratio(endpoint.gain("foredraft_batch_rows_sum"), passes)),
            number(ratio(endpoint.gain("foredraft_batch_tokens_sum"), passes)),
            number(endpoint.rate("foredraft_batch_rows_count")),
            percent(endpoint.rate("foredraft_idle_seconds_total", service=name)),
        )
    return Panel(table, title="target and draft")


def requests(endpoint: Endpoint) -> RenderableType:
    """Throughput and latency."""
    first, token = "foredraft_time_to_first_token_seconds", "foredraft_inter_token_latency_seconds"
    return pairs(
        "requests",
        [
            ("in flight", number(endpoint.value("foredraft_requests_in_flight"), digits=0)),
            ("ended", number(endpoint.rate("foredraft_requests_total"), " / s", 2)),
            ("output", number(endpoint.rate("foredraft_generated_tokens_total"), " tokens/s")),
            ("prompts", number(endpoint.rate("foredraft_prompt_tokens_total"), " tokens/s")),
            ("first token", f"{quantiles(endpoint, first)}"),
            ("between tokens", f"{quantiles(endpoint, token)}"),
            ("failovers", number(endpoint.value("foredraft_failovers_total"), digits=0)),
        ],
    )


def quantiles(endpoint: Endpoint, name: str) -> str:
    """Median and 95th percentile."""
    return f"{milliseconds(endpoint.quantile(0.5, name))}, p95 {milliseconds(endpoint.quantile(0.95, name))}"


def speculation(endpoint: Endpoint) -> RenderableType:
    """What drafting gives."""
    prefix = "foredraft_spec_decode_num_"
    drafts, accepted = endpoint.gain(f"{prefix}drafts_total"), endpoint.gain(f"{prefix}accepted_tokens_total")
    prepared, used = (endpoint.rate(f"foredraft_{name}_tokens_total") for name in ("prepared", "used"))
    wasted = None if prepared is None or used is None else max(0.0, prepared - used)
    plain, rounds = endpoint.gain("foredraft_rounds_total", kind="plain"), endpoint.gain("foredraft_rounds_total")
    rows = [
        ("acceptance", percent(ratio(accepted, endpoint.gain(f"{prefix}draft_tokens_total")))),
        ("accepted / round", number(ratio(accepted, drafts), " tokens", 2)),
        ("plain rounds", percent(ratio(plain, rounds))),
        ("hits, all accepted", percent(hit_rate(endpoint, "all_accepted"))),
        ("hits, refused", percent(hit_rate(endpoint, "refused"))),
        ("late hits", number(endpoint.rate("foredraft_late_hits_total"), " / s")),
        ("prepared", number(prepared, " tokens/s")),
        ("used, wasted", f"{number(used)}, {number(wasted, ' tokens/s')}"),
    ]
    name = f"{prefix}accepted_tokens_per_pos_total"
    for position in sorted(set(endpoint.labels(name, "position")), key=int):
        share = ratio(endpoint.gain(name, position=position), drafts)
        rows.append((f"token {int(position) + 1}", f"{'█' * round(20 * (share or 0.0)):<20} {percent(share)}"))
    return pairs("speculation", rows)


def hit_rate(endpoint: Endpoint, kind: str) -> float | None:
    """Of the verdicts of a kind, those whose continuation had been prepared."""
    hits, misses = (endpoint.gain(f"foredraft_{name}_total", kind=kind) for name in ("hits", "misses"))
    return None if hits is None or misses is None else ratio(hits, hits + misses)


def pairs(title: str, rows: Sequence[tuple[str, str]]) -> RenderableType:
    """Names and values."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, "dim"), value)
    return Panel(table, title=title)


def render(endpoints: Mapping[str, Endpoint]) -> RenderableType:
    """All that is known of the services, by name."""
    parts: list[RenderableType] = []
    models = {name: endpoint for name, endpoint in endpoints.items() if name != "orchestrator"}
    if models:
        parts.append(services(models))
    if "orchestrator" in endpoints:
        columns = Table.grid(expand=True)
        columns.add_column(ratio=1)
        columns.add_column(ratio=1)
        columns.add_row(requests(endpoints["orchestrator"]), speculation(endpoints["orchestrator"]))
        parts.append(columns)
    parts += [Text(endpoint.failure, "red") for endpoint in endpoints.values() if endpoint.failure]
    return Group(*parts)


def address(name: str) -> typer.models.OptionInfo:
    """The flag of one service's metrics."""
    option: typer.models.OptionInfo = typer.Option(
        metavar="HOST:PORT", help=f"Its metrics; else {name} of the configuration."
    )
    return option


def top(
    metrics: Annotated[str | None, address("metrics_listen")] = None,
    target_metrics: Annotated[str | None, address("target_metrics_listen")] = None,
    draft_metrics: Annotated[str | None, address("draft_metrics_listen")] = None,
    config: Config = None,
) -> None:
    """Show sessions, acceptance, throughput and idle time of running services: until Ctrl-C, or once if piped."""
    options = collect({}, config)
    given = {
        "target": target_metrics or options.get("target_metrics_listen"),
        "draft": draft_metrics or options.get("draft_metrics_listen"),
        "orchestrator": metrics or options.get("metrics_listen"),
    }
    endpoints = {name: Endpoint(where) for name, where in given.items() if where is not None}
    if not endpoints:
        raise ConfigError("give --metrics, --target-metrics or --draft-metrics, as `foredraft up` prints them")
    console = Console()
    try:
        if not console.is_terminal:
            scrape(endpoints)
            time.sleep(INTERVAL_S)
            scrape(endpoints)
            console.print(render(endpoints))
            return
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                scrape(endpoints)
                live.update(render(endpoints), refresh=True)
                time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        pass


def scrape(endpoints: Mapping[str, Endpoint]) -> None:
    """Ask all for their metrics."""
    for endpoint in endpoints.values():
        endpoint.scrape()
