"""What a Conductor counts, as Prometheus reads it.

Responsibility: `kvfs_conductor_*` of one status; docs/conductor.md lists them. Concurrency: pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvfs.system.metrics import histogram

_COUNTS = {
    "routed": "Requests that were given instances.",
    "refused": "Requests that were refused, to be tried again.",
    "deferred": "Requests that were told to wait for room in a batch, each once.",
    "left": "Part of them that were cancelled while they waited.",
    "degraded": "Requests routed by load alone, since nothing was known of any cache, or of the prompt's tokens.",
    "without_tokens": "Part of them whose prompts came without tokens and hashes.",
    "done": "Requests that ended with a report.",
    "cancelled": "Requests that were cancelled.",
    "orphaned": "Requests that ended because their instance was removed.",
    "unknown_ids": "Reports of requests that were over, or of another process.",
    "unreachable": "Reports that an instance failed, and times that one was found not to answer.",
    "restarts_seen": "Restarts and sleeps of engines that their metrics showed before any event.",
    "lost_batches": "Batches of events that no replay brought.",
    "mute_streams": "Publishers that said nothing of blocks which their engines made, and are not believed.",
    "unregistered_batches": "Batches of topics that no instance is registered for.",
    "predicted_tokens": "Cached tokens that were predicted for answers which report them.",
    "cached_tokens": "Cached tokens that these answers report.",
    "over_limit": "Blocks that the index had no room or no source for.",
}
_INSTANCE = {
    "queued": "Prefills that wait.",
    "active_requests": "Requests in the batch.",
    "requests": "Reservations.",
    "distrusted": "1 where its answers fall short of its events.",
    "reachable": "1 unless it failed lately or does not answer.",
    "draining": "1 where it takes no more requests.",
    "kept": "1 where its batch is kept for the request that waits longest.",
}
_STREAM = ("unknown", "current", "partial", "mute")


class ConductorCollector(Collector):
    """Export one status."""

    def __init__(
        self,
        status: Mapping[str, Any],
        requests: Counter[str],
        errors: Counter[str],
        latencies: Mapping[str, Any],
    ) -> None:
        self._status, self._requests, self._errors, self._latencies = status, requests, errors, latencies

    def collect(self) -> Iterable[Metric]:
        status = self._status
        yield _gauge("blocks", "Blocks in the index.", status["blocks"])
        yield _gauge("reservations", "Requests that are routed and not over.", status["reservations"])
        yield _gauge(
            "waiting", "Deferred requests that were not routed, refused or cancelled yet.", status["waiting"]
        )
        yield _counter("expired", "Requests that ended by their deadline.", status["expired"])
        for name, text in _COUNTS.items():
            yield _counter(name, text, status["counts"].get(name, 0))
        yield _labelled("unregistered_topic_batches", "The same, by topic.", "topic", status["unregistered"])
        yield from _decisions(status["decisions"])
        yield _labelled("requests", "HTTP requests.", "operation", self._requests)
        yield _labelled("errors", "HTTP requests that failed.", "code", self._errors)
        yield histogram("kvfs_conductor_operation_seconds", "Time of HTTP requests.", self._latencies)
        for name, text in _INSTANCE.items():
            family = GaugeMetricFamily(f"kvfs_conductor_instance_{name}", text, labels=["instance"])
            for each in status["instances"]:
                family.add_metric([each["name"]], float(each[name]))
            yield family
        yield from _streams(status["streams"])
        if status["copies"] is not None:
            text = "Orders to copy hot prefixes, and their blocks, by what became of them."
            yield _labelled("copies", text, "outcome", status["copies"]["counts"])
        if status["roles"] is not None:
            yield from _roles(status["roles"])


def _decisions(found: Mapping[str, Any]) -> Iterable[Metric]:
    yield _labelled("refusals", "Requests that were refused, by reason.", "reason", found["refused"])
    yield _counter("prompt_tokens", "Tokens of the prompts that were routed.", found["prompt_tokens"])
    text = "Part of them that is not computed, by the medium that had it."
    yield _labelled("reused_tokens", text, "medium", found["reused_tokens"])
    text = "Requests that took longer than their limit, `ttft` or `tbt`."
    yield _labelled("late", text, "limit", found["late"])
    text = "TTFT and TBT of requests (`operation`), as clients report tokens."
    yield histogram("kvfs_conductor_request_seconds", text, found["latencies"])


def _roles(found: Mapping[str, Any]) -> Iterable[Metric]:
    yield _labelled("role_orders", "Orders to relabel an instance, by outcome.", "outcome", found["counts"])
    text = "What a side of a pool carries; 1: as much as it may."
    family = GaugeMetricFamily("kvfs_conductor_role_pressure", text, labels=["model", "role"])
    for each in found["sides"]:
        family.add_metric([each["model"], each["role"]], each["pressure"])
    yield family


def _streams(streams: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
    known = GaugeMetricFamily(
        "kvfs_conductor_stream_state", "1 for what is known of a stream.", labels=["stream", "state"]
    )
    blocks = GaugeMetricFamily(
        "kvfs_conductor_stream_blocks", "Blocks of a stream.", labels=["stream", "medium"]
    )
    events = CounterMetricFamily(
        "kvfs_conductor_stream_events", "Events of a stream that were taken.", labels=["stream"]
    )
    for each in streams:
        events.add_metric([each["stream"]], each["events"])
        for state in _STREAM:
            known.add_metric([each["stream"], state], float(each["knowledge"] == state))
        for medium, count in each["blocks"].items():
            blocks.add_metric([each["stream"], medium], count)
    yield from (known, blocks, events)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvfs_conductor_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvfs_conductor_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvfs_conductor_{name}", text, labels=[label])
    for key, count in sorted(values.items()):
        family.add_metric([key], count)
    return family
