"""The numbers of `kvfs status`, as Prometheus reads them.

Responsibility: which values are exposed under which names (`METRICS`, the one list; `docs/metrics.md` is held against
it by a test), and their text form: Prometheus's exposition format 0.0.4. That is three kinds of lines; a client library
would bring a registry of its own, and the numbers are in the status already.

Invariants: names are kvfs_<part>_<what>_<unit>, where the part is a tier (dram, nvme, cold) or what else counts;
counters end in `_total` and begin at 0 with the service. What a service does not have, such as an NVMe tier, is not
shown.
Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Metric:
    """One value: its name, where it stands in the status, and what it says."""

    name: str
    path: str
    """Keys joined by dots; a tier is `tiers.NAME`."""
    help: str

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def _metrics() -> Iterator[Metric]:
    for part, rows in _PARTS.items():
        for path, name, text in rows:
            yield Metric(f"kvfs_{part}_{name}", f"{_WHERE[part]}{path}", text)


_WHERE: Final = {
    "store": "",
    "session": "",
    "dram": "tiers.dram.",
    "nvme": "tiers.nvme.",
    "cold": "tiers.cold.",
    "scrub": "scrub.",
    "recovery": "recovery.",
}

_PARTS: Final[dict[str, list[tuple[str, str, str]]]] = {
    "store": [
        ("objects", "objects", "Named objects, in all tiers."),
        ("blocks", "blocks", "Blocks, in all tiers."),
        ("buckets", "buckets", "Buckets."),
        ("open_drafts", "open_drafts", "Drafts that are neither sealed nor given up."),
        ("quota_bytes", "quota_bytes", "What one uid may hold of replaced objects."),
        ("headroom_bytes", "headroom_bytes", "DRAM that eviction keeps free."),
        (
            "read_around_bytes",
            "read_around_bytes",
            "Memory beside DRAM that readers hold for which it has no slot.",
        ),
        ("hits", "hits_total", "Lookups that found their object."),
        ("misses", "misses_total", "Lookups that did not."),
        ("seals", "seals_total", "Objects sealed."),
        ("removals", "removals_total", "Objects removed by request."),
        ("evictions", "evictions_total", "Objects that left the store for room."),
        ("promotions", "promotions_total", "Objects read back into DRAM."),
        ("read_around", "reads_around_total", "Objects read beside a DRAM that had no room for them."),
        ("demotions", "demotions_total", "Objects that left DRAM and stay on NVMe."),
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
        ("objects_evicted", "objects_evicted_total", "Objects that reclaim let go."),
        ("reads", "reads_total", "Extents read for somebody."),
        ("read_bytes", "read_bytes_total", "Their bytes."),
        ("corrupt", "corrupt_total", "Extents that did not match their checksums."),
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
        ("evicted", "evicted_total", "Objects that left the bucket for room."),
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


def value_at(status: Mapping[str, Any], path: str) -> float | None:
    """The number there; None where there is none. A text counts as 1, its absence among others as 0."""
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


def exposition(status: Mapping[str, Any]) -> str:
    """The status in Prometheus's text format, version 0.0.4."""
    lines = []
    for metric in METRICS:
        value = value_at(status, metric.path)
        if value is not None:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            lines.append(f"{metric.name} {int(value) if value.is_integer() else value}")
    return "\n".join(lines) + "\n"


def table() -> str:
    """The list as in docs/metrics.md."""
    rows = [f"| `{metric.name}` | {metric.kind} | `{metric.path}` | {metric.help} |" for metric in METRICS]
    return "\n".join(["| metric | type | in `kvfs status --json` | |", "|---|---|---|---|", *rows]) + "\n"
