"""Segments of the NVMe tier and their records, as values.

Responsibility: what is known of one segment file, and of the records in it. Files are `tiers.log.pool`, formats
`kvfs.formats`, what records mean `tiers.recovery.log_replay`.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfs.formats import RECORD_HEADER, SEGMENT_DATA_START, SegmentState

PAGE_BYTES = 4096


def page_up(value: int) -> int:
    """Round up to whole pages, the unit of every direct read and write."""
    return -(-value // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True)
class Segment:
    """Describes one file and its present life."""

    number: int
    fd: int
    sequence: int = 0
    state: SegmentState = SegmentState.FREE
    end: int = SEGMENT_DATA_START
    """Where the next record goes; a multiple of PAGE_BYTES."""
    closed: bool = False
    """Nothing is appended any more."""
    bad: bool = False
    """Its header or records could not be read at the start: never used again while this service runs."""
    failed: bool = False
    """The device failed it since: not reclaimed before the device has taken another write."""
    first_sequence: int = 0
    last_sequence: int = 0
    live_bytes: int = 0
    """Of records that still count; changed by `SegmentPool.count`, as `kept_bytes`."""
    kept_bytes: int = 0
    """Part of live_bytes: of durable objects, which reclaim must move."""
    headers: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """Of the records so far, for the footer; empty once it is written."""
    bodies_bytes: int = 0

    def footer_bytes(self, more_records: int = 0, more_body_bytes: int = 0) -> int:
        """Return the size of the footer's record, in whole pages, if so much were added."""
        records = len(self.headers) + more_records
        return page_up(RECORD_HEADER.size * (records + 1) + self.bodies_bytes + more_body_bytes)

    def note(self, header: bytes, body: bytes, sequence: int) -> None:
        """Count a record that was written."""
        self.headers.append(header)
        if body:
            self.bodies.append(body)
            self.bodies_bytes += len(body)
        self.first_sequence = self.first_sequence or sequence
        self.last_sequence = sequence

    def drop_records(self) -> None:
        """Drop the headers and bodies that were kept for the footer."""
        self.headers, self.bodies, self.bodies_bytes = [], [], 0


class Listing(NamedTuple):
    """Holds the records of a segment as its footer has them, not decoded: a start has a million of them."""

    headers: memoryview
    """RECORD_HEADER.size bytes each."""
    bodies: memoryview
    offsets: list[int] | None = None
    """Where each record is, for a scan, which may skip something; None: without gaps from SEGMENT_DATA_START on."""


@dataclass(frozen=True, slots=True)
class LoggedRecord:
    """Describes one record of a segment, as its footer or a scan shows it."""

    offset: int
    header: dict[str, Any]
    """The fields of formats.RECORD_HEADER."""
    body: bytes


def list_records(records: Sequence[LoggedRecord]) -> Listing:
    """List records that were decoded, as a footer would have them."""
    headers = b"".join(RECORD_HEADER.encode(**each.header) for each in records)
    bodies = b"".join(each.body for each in records)
    return Listing(memoryview(headers), memoryview(bodies), [each.offset for each in records])
