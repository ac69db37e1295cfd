"""The segments of the NVMe tier: taken, closed with a footer, and freed.

Responsibility: what one segment holds besides records: its header (twice), its footer and trailer, and
the pool of all of them. Made by `tiers.log.pool_files`, read back by `tiers.log.segment_reader`; where segments lie is
`tiers.places`'.

Invariants:
- A segment's header says in which life (segment_sequence) it is. Records, footer and trailer of another life are
  not read. A new life starts only after the file was marked FREE durably, so nothing of an old one returns.
- Records lie without gaps from SEGMENT_DATA_START on; a footer, when there is one, lists all of them.
- Places are taken in full when the pool is made, not later: files are preallocated, block devices used by nobody else.

Concurrency: the service's trio thread; whatever reads or writes a file is async and goes through the device.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from kvfs import formats, limits
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import DeviceAway
from kvfs.formats import (
    SEGMENT_DATA_START,
    SEGMENT_HEADER,
    SEGMENT_HEADER_COPIES,
    SEGMENT_TRAILER,
    SEGMENT_TRAILER_BYTES,
    RecordHeader,
    RecordType,
    SegmentState,
)
from tiers.device.device import Device
from tiers.log.endings import Endings, Span
from tiers.log.records import encode_footer
from tiers.log.segment_reader import SegmentReader
from tiers.log.segments import Segment
from tiers.places.place import Places

_ANY_SEQUENCE = 1 << 64


class SegmentPool:
    """Takes, closes and frees the segments of one tier. Made by `open_pool`."""

    def __init__(
        self, device: Device, directory: Path, places: Places, store_id: bytes, *, trims: bool = False
    ) -> None:
        """`directory`: of what is written beside the segments, and of those that are files."""
        self.device = device
        self.directory = directory
        self.places = places
        self.store_id = store_id
        self.segment_bytes = places.segment_bytes
        self.extent_bytes = min(limits.MAX_EXTENT_BYTES, self.segment_bytes // limits.EXTENT_SHARE_OF_SEGMENT)
        self.segments: list[Segment] = []
        self.free: deque[Segment] = deque()
        self.endings = Endings(device, directory, store_id, self._spans)
        self.reader = SegmentReader(device, store_id, self.segment_bytes)
        self.next_sequence = 1
        self.live_bytes = 0
        self.kept_bytes = 0
        """Sums over all segments, kept since each durable seal asks, and there may be 65,536 segments."""
        self.trims = trims
        """Whether the bytes of a freed segment are trimmed."""

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of all segments, used or free."""
        return len(self.segments) * self.segment_bytes

    def used(self) -> list[Segment]:
        """List segments in use, oldest first."""
        return sorted(
            (s for s in self.segments if s.state is SegmentState.IN_USE), key=lambda segment: segment.sequence
        )

    def _spans(self) -> list[Span]:
        """List the spans of records that a later start may find; any, where a segment was set aside."""
        if any(segment.bad for segment in self.segments):
            return [(0, _ANY_SEQUENCE)]
        return [
            (each.first_sequence, each.last_sequence if each.closed else _ANY_SEQUENCE)
            for each in self.used()
            if each.first_sequence
        ]

    def count(self, segment: Segment, live_bytes: int, kept_bytes: int) -> None:
        """Count records of a segment, or (negative) stop counting them."""
        segment.live_bytes += live_bytes
        segment.kept_bytes += kept_bytes
        self.live_bytes += live_bytes
        self.kept_bytes += kept_bytes

    @property
    def last_sequence(self) -> int:
        """Return the highest sequence of any record."""
        return max((segment.last_sequence for segment in self.used()), default=0)

    def room(self, segment: Segment, more_records: int, more_body_bytes: int) -> int:
        """Return the bytes that so many further records may take, so that the footer still fits behind them."""
        footer = segment.footer_bytes(more_records, more_body_bytes)
        return self.segment_bytes - SEGMENT_TRAILER_BYTES - footer - segment.end

    def add(self, number: int, fd: int) -> Segment:
        """Add a segment that is open."""
        segment = Segment(number, fd)
        self.segments.append(segment)
        return segment

    def begin(self) -> None:
        """Have lives begin after all that there were, in segments that are free. REQUIRES that all were added."""
        lives = [segment.sequence for segment in self.segments]
        self.next_sequence = max([*(1 + life for life in lives), self.places.first_sequence])
        self.free = deque(s for s in self.segments if s.state is SegmentState.FREE and not s.bad)

    async def grow(self) -> Segment:
        """Make one more segment, free. Raises NoSpace, DeviceFailed."""
        number = self.places.spare([segment.number for segment in self.segments])
        segment = self.add(number, await self.places.create(number))
        self.free.append(segment)
        return segment

    async def take(self) -> Segment | None:
        """Start a new life of a free segment; return None when none is free. Raises NoSpace, DeviceFailed."""
        if not self.free:
            return None
        segment = next((each for each in self.free if not self.device.is_changing(each.fd)), None)
        if segment is None:
            raise DeviceAway("a write to each free segment is without an answer")
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        await self._write_header(segment, SegmentState.IN_USE, sequence)
        self.free.remove(segment)
        segment.sequence = sequence
        segment.state = SegmentState.IN_USE
        segment.end = SEGMENT_DATA_START
        segment.closed = False
        segment.first_sequence = segment.last_sequence = 0
        self.count(segment, -segment.live_bytes, -segment.kept_bytes)
        segment.drop_records()
        return segment

    async def release(self, segment: Segment) -> None:
        """End a life, durably: nothing that the file holds is read again. Raises NoSpace, DeviceFailed."""
        await self._write_header(segment, SegmentState.FREE, segment.sequence)
        await self.device.sync(segment.fd)
        segment.state = SegmentState.FREE
        segment.drop_records()
        if self.trims:
            await self.device.discard(segment.fd, SEGMENT_DATA_START, self.segment_bytes - SEGMENT_DATA_START)
        if not segment.bad:
            self.free.append(segment)

    async def _write_header(self, segment: Segment, state: SegmentState, sequence: int) -> None:
        page = formats.encode_page(
            SEGMENT_HEADER,
            magic=formats.SEGMENT_MAGIC,
            version=formats.SEGMENT_VERSION,
            state=state,
            store_id=self.store_id,
            segment_sequence=sequence,
            segment_bytes=self.segment_bytes,
            written_ns=time.time_ns(),
        )
        async with self.device.buffer() as view:
            both = view[:SEGMENT_DATA_START]
            both[:] = page * len(SEGMENT_HEADER_COPIES)
            await self.device.write(segment.fd, 0, both)

    async def close(self, segment: Segment) -> None:
        """Write the footer and the trailer, and make the whole segment durable. Raises NoSpace, DeviceFailed.

        What the footer lists is durable before the footer is: a start takes its word for every payload.
        """
        await self.device.sync(segment.fd)
        body = encode_footer(segment.headers, segment.bodies)
        record_bytes = segment.footer_bytes()
        header = RecordHeader(
            RecordType.FOOTER,
            sequence=segment.last_sequence,
            segment_sequence=segment.sequence,
            record_bytes=record_bytes,
            body_bytes=len(body),
            body_checksum=xxh3_64(body),
        ).encode()
        trailer = formats.encode_page(
            SEGMENT_TRAILER,
            magic=formats.TRAILER_MAGIC,
            version=formats.SEGMENT_VERSION,
            store_id=self.store_id,
            segment_sequence=segment.sequence,
            footer_offset=segment.end,
            footer_bytes=record_bytes,
            first_sequence=segment.first_sequence,
            last_sequence=segment.last_sequence,
            records=len(segment.headers),
        )
        await self._write_bytes(segment, segment.end, (header + body).ljust(record_bytes, b"\0"))
        await self._write_bytes(segment, self.segment_bytes - SEGMENT_TRAILER_BYTES, trailer)
        await self.device.sync(segment.fd)
        segment.closed = True
        segment.drop_records()

    async def _write_bytes(self, segment: Segment, offset: int, data: bytes) -> None:
        async with self.device.buffer() as view:
            for start in range(0, len(data), len(view)):
                part = view[: min(len(view), len(data) - start)]
                part[:] = data[start : start + len(part)]
                await self.device.write(segment.fd, offset + start, part)

    def close_files(self) -> None:
        """Close the endings, every segment's file, and the places."""
        self.endings.close_files()
        for segment in self.segments:
            self.device.close_file(segment.fd)
        self.places.close()
