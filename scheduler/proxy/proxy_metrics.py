"""What a proxy counts, and how Prometheus reads it.

Responsibility: `Counts` of one proxy, and `ProxyCollector`, which exports `kvfs_proxy_*`; docs/proxy.md lists them.

Invariants: labels are bounded: outcomes and reasons are named here, instances are the engines that there are now, whose
numbers go with them.

Concurrency: one trio thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvfs.system.latencies import Latencies
from kvfs.system.metrics import histogram
from scheduler.proxy.upstream.engines import Engines

OUTCOMES = ("answered", "refused", "rejected", "failed", "broken", "gone")
SKIPS = ("echo", "one_engine")
_COUNTS = {
    "retries": "Requests that went to another engine.",
    "failed_legs": "Legs that failed, whose request was retried or not.",
    "prefill_legs": "Prefill legs of their own.",
    "failed_prefills": "Prefill legs that failed: the decode engine computed the prompt.",
    "tokenized": "Prompts that an engine was asked to tokenize.",
    "tokenize_failures": "Part of them that got no tokens: an answer late, refused or malformed.",
    "deferred": "Requests that were to wait for room in a batch.",
    "line_full": "Part of them that were refused, since too many waited.",
    "routed_by_load": "Routes by load, since the Conductor did not answer or passed over every instance.",
    "late_routes": "Routes that the Conductor did not give in time.",
    "dropped_reports": "Reports to the Conductor for which there was no room.",
    "refused_reports": "Reports that the Conductor did not take, such as those of its life before.",
}
_GAUGES = {
    "in_flight": "Requests under way.",
    "waiting": "Part of them that wait for room in a batch.",
    "held_bytes": "Bodies and answers in memory.",
    "conductor_up": "1 while the Conductor elsewhere answers; absent without one.",
}


class Counts:
    """The numbers of one proxy's requests."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.first_bytes, self.tokens, self.waits = Latencies(), Latencies(), Latencies()

    def end(self, status: int) -> None:
        """Count a request that was answered with `status`."""
        if status < 400:
            outcome = "answered"
        elif status == 429:
            outcome = "refused"
        else:
            outcome = "rejected" if status < 500 else "failed"
        self.outcomes[outcome] += 1


class Snapshot(NamedTuple):
    """What the collector exports: numbers by the names of `_COUNTS` and `_GAUGES`."""

    counts: Counts
    engines: Engines
    numbers: Mapping[str, float]


class ProxyCollector(Collector):
    """Export one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._counts, self._engines, self._numbers = snapshot

    def collect(self) -> Iterable[Metric]:
        counts, numbers = self._counts, self._numbers
        yield _labelled("requests", "Requests, by what became of them.", "outcome", OUTCOMES, counts.outcomes)
        yield _labelled("legs_skipped", "Prefill legs left out, by reason.", "reason", SKIPS, counts.skips)
        for name, text in _COUNTS.items():
            value = numbers.get(name, counts.events[name])
            yield CounterMetricFamily(f"kvfs_proxy_{name}", text, value=value)
        for name, text in _GAUGES.items():
            if name in numbers:
                yield GaugeMetricFamily(f"kvfs_proxy_{name}", text, value=numbers[name])
        text = "Time to the first byte of an answer, by `operation`: streamed or whole."
        yield histogram("kvfs_proxy_first_byte_seconds", text, counts.first_bytes.status())
        text = "Time between two pieces of a streamed answer."
        yield histogram("kvfs_proxy_token_seconds", text, counts.tokens.status())
        text = "Time that deferred requests waited, by what became of them (`operation`): routed, refused or gone."
        yield histogram("kvfs_proxy_waited_seconds", text, counts.waits.status())
        yield from self._by_instance()

    def _by_instance(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("kvfs_proxy_instance_up", "1 unless it is out.", labels=["instance"])
        requests = GaugeMetricFamily("kvfs_proxy_instance_requests", "Legs under way.", labels=["instance"])
        predicted = CounterMetricFamily(
            "kvfs_proxy_predicted_tokens",
            "Cached tokens that the Conductor predicted for answers which report them.",
            labels=["instance"],
        )
        cached = CounterMetricFamily(
            "kvfs_proxy_cached_tokens", "Cached tokens that these answers report.", labels=["instance"]
        )
        for engine in self._engines:
            for family, value in (
                (up, float(not engine.down)),
                (requests, engine.requests),
                (predicted, engine.predicted_tokens),
                (cached, engine.cached_tokens),
            ):
                family.add_metric([engine.name], value)
        yield from (up, requests, predicted, cached)


def _labelled(name: str, text: str, label: str, known: Iterable[str], values: Counter[str]) -> Metric:
    family = CounterMetricFamily(f"kvfs_proxy_{name}", text, labels=[label])
    for key in known:
        family.add_metric([key], values[key])
    return family
