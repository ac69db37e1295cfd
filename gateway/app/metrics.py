"""What one gateway process counts, as Prometheus reads it.

Responsibility: requests and their latencies by operation, failures by code, bytes sent; beside the service's own
numbers (`kvfs.system.metrics`). docs/metrics.md lists them.
Concurrency: one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvfs.system.latencies import Latencies
from kvfs.system.metrics import histogram


@dataclass(slots=True)
class Counters:
    """Counts since the process began, raised where each thing happens."""

    requests: Counter[str] = field(default_factory=Counter)
    """By the name of the operation."""
    errors: Counter[str] = field(default_factory=Counter)
    latencies: Latencies = field(default_factory=Latencies)
    """Latencies of the requests that Python answered."""
    sent_bytes: int = 0
    front_reads: int = 0
    """Requests that were answered without Python (`gateway.app.fast_path`); they are in `requests` too."""
    front_writes: int = 0
    """Writes that were recognised without Python."""

    def failed(self, code: str) -> None:
        """Count an answer with this S3 error code."""
        self.errors[code] += 1


@dataclass(frozen=True, slots=True)
class Connections:
    """Counts of the worker's other parts, taken when metrics are read."""

    open: int
    accepted: int
    closed_silent: int
    refused: int
    bodies_given_up: int
    connected: bool
    """Whether there is a session with the service."""


class WorkerCollector(Collector):
    """Export `kvfs_s3_*` of this process."""

    def __init__(self, counters: Counters, connections: Callable[[], Connections]) -> None:
        self._counters = counters
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        own, now = self._counters, self._connections()
        yield _counter("requests", "Authenticated requests.", own.requests, label="operation")
        yield _counter("errors", "Requests that failed.", own.errors, label="code")
        yield histogram(
            "kvfs_s3_operation_seconds",
            "Time from a request's head to the end of its answer, by `operation`, where Python answers.",
            own.latencies.status(),
        )
        yield _counter("sent_bytes", "Bytes of objects sent.", own.sent_bytes)
        yield _counter("front_reads", "Reads that were answered without Python.", own.front_reads)
        yield _counter("front_writes", "Writes that were recognised without Python.", own.front_writes)
        yield _gauge("open_connections", "Connections that are open.", now.open)
        yield _counter("connections", "Connections that were accepted.", now.accepted)
        yield _counter(
            "connections_closed_silent",
            "Silent connections that were closed for new ones.",
            now.closed_silent,
        )
        yield _counter("connections_refused", "Connections of addresses that have their share.", now.refused)
        yield _counter(
            "bodies_given_up", "Slow bodies that ended because others waited.", now.bodies_given_up
        )
        yield _gauge("connected_bool", "1 while there is a session with the service.", now.connected)


def _counter(name: str, text: str, value: float | Counter[str], *, label: str = "") -> Metric:
    if not isinstance(value, Counter):
        return CounterMetricFamily(f"kvfs_s3_{name}", text, value=value)
    family = CounterMetricFamily(f"kvfs_s3_{name}", text, labels=[label])
    for key, count in sorted(value.items()):
        family.add_metric([key], count)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvfs_s3_{name}", text, value=float(value))


def table(collector: Collector) -> str:
    """Render the table of docs/metrics.md."""
    rows = [
        f"| `{metric.name}{'_total' * (metric.type == 'counter')}` | {metric.type} | {metric.documentation} |"
        for metric in collector.collect()
    ]
    return "\n".join(["| metric | type | |", "|---|---|---|", *rows]) + "\n"
