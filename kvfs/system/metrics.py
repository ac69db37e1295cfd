"""The numbers of `kvfs status`, as Prometheus reads them.

Responsibility: the list of exported values and their names (`METRICS` and `HISTOGRAMS`; a test compares it with
docs/metrics.md), and a collector for prometheus_client, which makes the text.

Invariants: names are kvfs_<part>_<what>_<unit>, where the part is a tier (dram, nvme, cold) or another source; counters
end in `_total` and begin at 0 with the service. A part that a service lacks, such as an NVMe tier, is not exported.
Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvfs.system.latencies import cumulative


@dataclass(frozen=True, slots=True)
class Metric:
    """One value: its name, its place in the status, and its meaning."""

    name: str
    path: str
    """Keys joined by dots; a tier is `tiers.NAME`."""
    help: str

    @property
    def kind(self) -> str:
        """Return "counter", "gauge" or "histogram", as Prometheus calls it."""
        if self in HISTOGRAMS:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    def family(self, value: float) -> Family:
        """Make the family of one value, as prometheus_client exports it."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return kind(self.name, self.help, value=value)


def _metrics() -> Iterator[Metric]:
    for part, rows in _PARTS.items():
        for path, name, text in rows:
            yield Metric(f"kvfs_{part}_{name}", f"{_WHERE.get(part, f'tiers.{part}.')}{path}", text)


_WHERE: Final = {
    "store": "",
    "session": "",
    "scrub": "scrub.",
    "recovery": "recovery.",
    "hbm": "hbm.",
    "cluster": "cluster.",
    "directory": "cluster.directory.",
}
"""The path of a part in the status, where it is no tier."""

_PARTS: Final[dict[str, list[tuple[str, str, str]]]] = {
    "store": [
        ("objects", "objects", "Named objects, in all tiers."),
        ("blocks", "blocks", "Blocks, in all tiers."),
        ("buckets", "buckets", "Buckets."),
        ("open_drafts", "open_drafts", "Drafts that are neither sealed nor aborted."),
        ("quota_bytes", "quota_bytes", "What one uid may hold of replaced objects."),
        ("headroom_bytes", "headroom_bytes", "DRAM that eviction keeps free."),
        (
            "unverified",
            "unverified_objects",
            "Objects that the start took over and that are still to be hashed in the background.",
        ),
        (
            "read_around_bytes",
            "read_around_bytes",
            "Memory beside DRAM that readers hold for which it has no slot.",
        ),
        ("hits", "hits_total", "Lookups that found their object."),
        ("misses", "misses_total", "Lookups that did not."),
        ("seals", "seals_total", "Objects sealed."),
        ("removals", "removals_total", "Objects removed by request."),
        ("evictions", "evictions_total", "Objects evicted from the store for room."),
        ("promotions", "promotions_total", "Objects read back into DRAM."),
        ("read_around", "reads_around_total", "Objects read beside a DRAM that had no room for them."),
        ("demotions", "demotions_total", "Objects evicted from DRAM that stay on NVMe."),
    ],
    "session": [
        ("sessions", "open", "Sessions that are open."),
        ("sessions_accepted", "accepted_total", "Sessions that were opened."),
        (
            "sessions_cut_off",
            "cut_off_total",
            "Sessions ended for not reading, or for breaking the protocol.",
        ),
        ("session_drafts", "drafts", "Drafts granted to sessions."),
    ],
    "dram": [
        ("capacity_bytes", "capacity_bytes", "The tier's limit."),
        ("used_bytes", "used_bytes", "Physical bytes in use."),
        ("held_bytes", "held_bytes", "Part of them that is unlinked and still held open."),
        ("slots", "slots", "Slots in use."),
        ("max_slots", "max_slots", "Most slots at once."),
        ("largest_object_bytes", "largest_object_bytes", "The largest object that it takes."),
    ],
    "hbm": [
        ("capacity_bytes", "capacity_bytes", "GPU memory that blocks may take, of all devices."),
        ("segment_bytes", "segment_bytes", "What is taken of it."),
        ("used_bytes", "used_bytes", "Slots in use, in it."),
        (
            "held_bytes",
            "held_bytes",
            "Part of them whose block has gone and that a process still copies from.",
        ),
        ("blocks", "blocks", "Blocks in it, of all pools."),
        ("clients", "clients", "Processes that are attached, or that have ended and are waited for."),
        ("hits", "hits_total", "Blocks that were asked for and are there."),
        ("misses", "misses_total", "Blocks that were asked for and are not."),
        ("promoted", "promoted_total", "Blocks that got a slot."),
        ("refused", "refused_total", "Seals without the checksum that the store has."),
        ("damaged", "damaged_total", "Blocks whose checksum was wrong on the device."),
        ("evicted", "evicted_total", "Blocks that were evicted for others."),
        ("adopted", "adopted_total", "Blocks that were taken over from an earlier service."),
    ],
    "nvme": [
        ("capacity_bytes", "capacity_bytes", "All segment files."),
        ("used_bytes", "used_bytes", "Segments in use, whole."),
        ("live_bytes", "live_bytes", "Records that still count."),
        ("durable_bytes", "durable_bytes", "Part of them that is never evicted."),
        ("durable_capacity_bytes", "durable_capacity_bytes", "What durable objects may fill."),
        ("segments", "segments", "Segment files."),
        ("free_segments", "free_segments", "Those that are free."),
        ("bad_segments", "bad_segments", "Those that the device failed; not used again."),
        ("segment_bytes", "segment_bytes", "Size of one."),
        ("objects", "objects", "Objects, and markers of directories."),
        ("backlog", "backlog_records", "Records that wait to be written."),
        (
            "write_behind",
            "write_behind_objects",
            "Objects in DRAM that are to be written when their turn comes.",
        ),
        ("not_admitted", "not_admitted_total", "Objects that ghost admission kept from being written."),
        (
            "write_amplification",
            "write_amplification_ratio",
            "Bytes written for each byte that was asked for.",
        ),
        ("appended_bytes", "appended_bytes_total", "Written into segments."),
        ("rewritten_bytes", "rewritten_bytes_total", "Part of it that reclaim wrote again."),
        ("syncs", "syncs_total", "Syncs of the log."),
        ("segments_reclaimed", "segments_reclaimed_total", "Segments that reclaim freed."),
        ("write_errors", "write_errors_total", "Writes and syncs that the device refused."),
        ("objects_written", "objects_written_total", "Objects queued for writing."),
        ("bytes_written", "written_bytes_total", "Their bytes."),
        ("objects_evicted", "objects_evicted_total", "Objects that reclaim evicted."),
        ("reads", "reads_total", "Extents read for somebody."),
        ("read_bytes", "read_bytes_total", "Their bytes."),
        ("corrupt", "corrupt_total", "Extents that did not match their checksums."),
        (
            "absences",
            "absences_total",
            "How often the drive was away: it left an operation without an answer.",
        ),
        (
            "late_operations",
            "late_operations",
            "Operations that nobody waits for any more, without an answer yet.",
        ),
        ("trouble", "trouble_bool", "1 while the device takes no writes."),
    ],
    "cold": [
        ("capacity_bytes", "capacity_bytes", "The tier's limit."),
        ("used_bytes", "used_bytes", "What is in the bucket, on its way there, or to be deleted there."),
        ("objects", "objects", "Objects in the bucket."),
        ("is_up", "up_bool", "1 while the endpoint can be used."),
        ("queued", "queued_objects", "Objects that wait to be sent."),
        ("leaving", "leaving_objects", "Remote objects that wait to be deleted."),
        ("uploads", "uploads_total", "Objects sent."),
        ("uploaded_bytes", "uploaded_bytes_total", "Their bytes."),
        ("fetches", "fetches_total", "Objects read back."),
        ("fetched_bytes", "fetched_bytes_total", "Their bytes."),
        ("missed", "missed_total", "Reads that the endpoint did not answer, or not in time."),
        ("evicted", "evicted_total", "Objects evicted from the bucket for room."),
        ("deleted", "deleted_total", "Remote objects deleted."),
        ("adopted", "adopted_total", "Blocks found in the bucket after the index was lost."),
        ("lost", "lost_total", "Objects that somebody else deleted from the bucket."),
        ("corrupt", "corrupt_total", "Objects that did not match their checksums."),
        ("refused", "refused_total", "Objects that the bucket did not take."),
        ("errors", "errors_total", "Requests that failed, besides reads."),
    ],
    "scrub": [
        ("rate_bytes_s", "rate_bytes_per_second", "The configured rate; 0: off."),
        ("progress", "progress_ratio", "Of the pass under way."),
        ("passes", "passes_total", "Passes that came to their end."),
        ("last_pass_s", "last_pass_seconds", "How long the last one took."),
        ("last_finished_s", "last_finished_timestamp_seconds", "When it ended."),
        ("verified_bytes", "verified_bytes_total", "Read and found right."),
        ("damaged_extents", "damaged_extents_total", "Extents on NVMe that were not."),
        ("damaged_slots", "damaged_slots_total", "Slots in DRAM that were not."),
        ("unreadable", "unreadable_total", "Extents that the device failed to read."),
    ],
    "cluster": [
        ("peers_configured", "peers", "Machines that blocks are asked of, this one left out."),
        ("peers_up", "peers_up", "Those that are asked now, not paused after a failure."),
        (
            "certificate_ends_s",
            "certificate_end_timestamp_seconds",
            "Until when this machine's certificate counts; 0: it has none.",
        ),
        ("fetched_blocks", "fetched_blocks_total", "Blocks read from peers."),
        ("fetched_bytes", "fetched_bytes_total", "Their bytes."),
        ("matches", "matches_total", "Times that a peer said what it has."),
        ("misses", "misses_total", "Blocks that a peer no longer had, or not in time."),
        ("mismatches", "mismatches_total", "Blocks whose bytes were not those of their checksum."),
        ("deadlines", "deadlines_total", "Times that a peer did not answer in time."),
        ("failures", "failures_total", "Times that a peer failed otherwise."),
        ("hedges", "hedges_total", "Slow reads that another holder was asked for as well."),
        ("hedges_won", "hedges_won_total", "Those that the other one answered first."),
        ("hedged_bytes", "hedged_bytes_total", "Bytes asked for twice so."),
        ("orders_done", "orders_done_total", "Orders of the Conductor whose blocks are all here."),
        ("orders_failed", "orders_failed_total", "Orders that were refused, or of which blocks are missing."),
        ("ordered_blocks", "ordered_blocks_total", "Blocks of those, as many as are here."),
        ("cooled_blocks", "cooled_blocks_total", "Copies that are to go next by order, since they cooled."),
        ("order_answers_failed", "order_answers_failed_total", "Times that the Conductor did not answer."),
        ("tasks_running", "tasks", "Tasks under way that bring blocks to other machines."),
        ("task_blocks", "task_blocks_total", "Blocks that tasks have brought there, or found there."),
        ("task_bytes", "task_bytes_total", "Their bytes."),
        ("task_failed_blocks", "task_failed_blocks_total", "Blocks that tasks could not bring there."),
        ("connections", "connections", "Connections that other machines read over."),
        (
            "refused",
            "refused_total",
            "Connections whose peer did not prove the secret, and those past the limit.",
        ),
        ("lifts", "lifts", "Blocks that come from NVMe while other machines wait for them."),
        ("pulls", "pulls_total", "Times that another machine had this one fetch blocks from it."),
        ("pulled_blocks", "pulled_blocks_total", "Blocks that were fetched so."),
        (
            "refused_pulls",
            "refused_pulls_total",
            "Pulls that were refused, or that brought not all for a reason.",
        ),
        ("served_requests", "served_requests_total", "Requests of other machines."),
        ("served_matches", "served_matches_total", "Those that asked what is here."),
        ("served_found", "served_blocks_total", "Blocks served to other machines."),
        ("served_bytes", "served_bytes_total", "Their bytes."),
        ("served_absent", "served_absent_total", "Blocks asked for that are not here."),
        ("served_too_large", "served_too_large_total", "Blocks longer than the asker had room for."),
        ("served_busy", "served_busy_total", "Blocks asked for that NVMe did not give in time."),
        ("served_broken", "broken_total", "Connections cut off for breaking the protocol."),
    ],
    "directory": [
        ("members_count", "members", "Machines whose lease lives, this one among them."),
        ("is_up", "up_bool", "1 while the server is asked."),
        ("epoch", "epoch", "The epoch that this machine asks for: the time of its start in us."),
        ("pending", "pending_changes", "Changes that wait to be written."),
        ("lag_s", "lag_seconds", "The age of the oldest of them."),
        ("rivals", "rivals_total", "Times that another machine said that it is this store."),
        ("lookups", "lookups_total", "Times that the directory said who has which block."),
        ("failed_lookups", "failed_lookups_total", "Times that it did not, or not in time."),
        ("refused_lookups", "refused_lookups_total", "Those that were too many at once."),
        ("written", "written_changes_total", "Changes written."),
        ("dropped", "dropped_changes_total", "Changes that found no room and were left to a manifest."),
        ("manifests", "manifests_total", "Manifests written whole."),
        ("connections", "connections_total", "Connections made to the server."),
        ("failures", "failures_total", "Times that the server failed, or could not be reached."),
        ("deadlines", "deadlines_total", "Times that it did not answer in time."),
    ],
    "recovery": [
        ("was_clean", "was_clean_bool", "1 if the last service stopped cleanly."),
        ("taken_over_objects", "taken_over_objects", "Objects in DRAM that the start took over."),
        ("taken_over_bytes", "taken_over_bytes", "Their bytes."),
        ("dropped_names", "dropped_names", "Names without bytes that it dropped."),
        (
            "rebuilt_names",
            "rebuilt_names",
            "Names that it had from the log, where the index was not believed.",
        ),
        ("log_objects", "log_objects", "Objects that it found on NVMe."),
        ("log_segments", "log_segments", "Segments that it read."),
        ("log_records", "log_records", "Records that it read."),
        ("log_s", "log_seconds", "Time to read the log."),
        ("index_s", "index_seconds", "Time to open or rebuild the name index."),
        ("adoption_s", "adoption_seconds", "Time to sort out names and slots."),
        ("verify_s", "verify_seconds", "Time to verify the slots."),
    ],
}

METRICS: Final = tuple(_metrics())
HISTOGRAMS: Final = (
    Metric(
        "kvfs_session_operation_seconds",
        "latencies.session",
        "Time from a session's request to its answer, by `operation`.",
    ),
    Metric(
        "kvfs_mount_operation_seconds",
        "latencies.mount",
        "Time from the mount's request to its answer, by `operation`, where Python answers.",
    ),
)


def value_at(status: Mapping[str, Any], path: str) -> float | None:
    """Return the number at `path` of the status; None without one. A text at `trouble` is 1, None there 0."""
    found: Any = status
    *parents, last = path.split(".")
    for key in parents:
        if isinstance(found, list):
            found = next((each for each in found if each.get("name") == key), None)
        else:
            found = found.get(key)
        if found is None:
            return None
    if last == "trouble":
        return None if last not in found else float(found[last] is not None)
    value = found.get(last)
    return None if value is None else float(value)


def histogram(name: str, text: str, latencies: Mapping[str, Any]) -> Family:
    """Make the family of one door's latencies, from `Latencies.status`."""
    family = HistogramMetricFamily(name, text, labels=["operation"])
    for operation, found in latencies.items():
        family.add_metric([operation], cumulative(found["buckets"]), found["sum_s"])
    return family


class StatusCollector(Collector):
    """Export the numbers of one status."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterable[Family]:
        for metric in METRICS:
            value = value_at(self._status, metric.path)
            if value is not None:
                yield metric.family(value)
        for metric in HISTOGRAMS:
            door = metric.path.rpartition(".")[2]
            yield histogram(metric.name, metric.help, self._status.get("latencies", {}).get(door, {}))


def exposition(*collectors: Collector) -> str:
    """Render what the collectors export in Prometheus's text format, version 0.0.4."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()
