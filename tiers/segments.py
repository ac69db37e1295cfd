"""Segment files of the NVMe tier: made, opened, found again, read back and freed.

Responsibility: what one segment file holds besides records: its header (twice), its footer and trailer, and
the pool of all of them. What records mean is `tiers.log` and `tiers.replay`; formats are `kvfs.formats`.

Invariants:
- A file's header says in which life (segment_sequence) it is. Records, footer and trailer of another life are
  not read. A new life starts only after the file was marked FREE durably, so nothing of an old one returns.
- Records lie without gaps from SEGMENT_DATA_START on; a footer, when there is one, lists all of them.
- Files are preallocated in full: capacity is taken from the filesystem when the pool is made, not later.

Concurrency: the service's trio thread; whatever reads or writes a file is async and goes through the device.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvfs import formats, limits
from kvfs._native.slots import xxh3_64
from kvfs.errors import ConfigError, Corrupt, DeviceFailed, FormatMismatch, KvfsError
from kvfs.formats import (
    RECORD_HEADER,
    SEGMENT_DATA_START,
    SEGMENT_HEADER,
    SEGMENT_HEADER_COPIES,
    SEGMENT_TRAILER,
    SEGMENT_TRAILER_BYTES,
    RecordHeader,
    RecordType,
    SegmentState,
)
from kvfs.records import decode_records, encode_footer, split_footer
from tiers.device import Device
from tiers.endings import Endings, Span

_log = logging.getLogger("kvfs.nvme")

PAGE_BYTES = 4096
_ANY_SEQUENCE = 1 << 64
GEOMETRY = "pool.json"
"""The file that says whose the segments are, and how large."""


def page_up(value: int) -> int:
    """To the next multiple of a page, the unit of every direct read and write."""
    return -(-value // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True)
class Segment:
    """One file and what is known of its present life."""

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
        """The footer's record, in whole pages, if so much were added."""
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

    def forget_records(self) -> None:
        self.headers, self.bodies, self.bodies_bytes = [], [], 0


class Listing(NamedTuple):
    """The records of a segment as its footer has them, one behind the other: not decoded, since a start has a
    million of them."""

    headers: memoryview
    """RECORD_HEADER.size bytes each."""
    bodies: memoryview
    offsets: list[int] | None = None
    """Where each record is, for a scan, which may skip something; None: without gaps from SEGMENT_DATA_START on."""


@dataclass(frozen=True, slots=True)
class Found:
    """One record of a segment, as its footer or a scan found it."""

    offset: int
    header: dict[str, Any]
    """The fields of formats.RECORD_HEADER."""
    body: bytes


def list_records(records: Sequence[Found]) -> Listing:
    """Records that were decoded, as a footer would have them."""
    headers = b"".join(RECORD_HEADER.encode(**each.header) for each in records)
    bodies = b"".join(each.body for each in records)
    return Listing(memoryview(headers), memoryview(bodies), [each.offset for each in records])


class SegmentPool:
    """All segment files of one directory. Made by `open_pool`."""

    def __init__(self, device: Device, directory: Path, store_id: bytes, segment_bytes: int) -> None:
        self.device = device
        self.directory = directory
        self.store_id = store_id
        self.segment_bytes = segment_bytes
        self.extent_bytes = min(limits.MAX_EXTENT_BYTES, segment_bytes // limits.EXTENT_SHARE_OF_SEGMENT)
        self.segments: list[Segment] = []
        self.free: deque[Segment] = deque()
        self.endings = Endings(device, directory, store_id)
        self.endings.spans = self._spans
        self.next_sequence = 1
        self.live_bytes = 0
        self.kept_bytes = 0
        """Both of all segments together: each durable seal asks, and there may be 65,536 of them."""
        self.trims = False
        """Whether the device is told what a freed segment no longer holds."""

    @property
    def capacity_bytes(self) -> int:
        return len(self.segments) * self.segment_bytes

    def used(self) -> list[Segment]:
        """Segments in use, oldest first."""
        return sorted(
            (s for s in self.segments if s.state is SegmentState.IN_USE), key=lambda segment: segment.sequence
        )

    def _spans(self) -> list[Span]:
        """Of the records that a later start may find. Nobody knows those of a segment that was set aside."""
        if any(segment.bad for segment in self.segments):
            return [(0, _ANY_SEQUENCE)]
        return [
            (each.first_sequence, each.last_sequence if each.closed else _ANY_SEQUENCE)
            for each in self.used()
            if each.first_sequence
        ]

    def count(self, segment: Segment, live_bytes: int, kept_bytes: int) -> None:
        """Records of a segment begin to count, or (negative) count no more."""
        segment.live_bytes += live_bytes
        segment.kept_bytes += kept_bytes
        self.live_bytes += live_bytes
        self.kept_bytes += kept_bytes

    @property
    def last_sequence(self) -> int:
        """Of all records that are there."""
        return max((segment.last_sequence for segment in self.used()), default=0)

    def room(self, segment: Segment, more_records: int, more_body_bytes: int) -> int:
        """Bytes that so many further records may take, so that the footer still fits behind them."""
        footer = segment.footer_bytes(more_records, more_body_bytes)
        return self.segment_bytes - SEGMENT_TRAILER_BYTES - footer - segment.end

    # --- lives --------------------------------------------------------------------------------------------

    def path(self, segment: Segment) -> Path:
        return self.directory / f"{segment.number:08x}.seg"

    def grow(self) -> Segment:
        """One more file, free. Raises NoSpace, DeviceFailed."""
        segment = Segment(1 + max((s.number for s in self.segments), default=-1), -1)
        segment.fd = self.device.open_file(self.path(segment), self.segment_bytes, create=True)
        self.segments.append(segment)
        self.free.append(segment)
        return segment

    async def take(self) -> Segment | None:
        """Start a new life of a free segment; None when none is free. Raises NoSpace, DeviceFailed."""
        if not self.free:
            return None
        segment = self.free[0]
        await self._write_header(segment, SegmentState.IN_USE, self.next_sequence)
        self.free.popleft()
        segment.sequence = self.next_sequence
        self.next_sequence += 1
        segment.state = SegmentState.IN_USE
        segment.end = SEGMENT_DATA_START
        segment.closed = False
        segment.first_sequence = segment.last_sequence = 0
        self.count(segment, -segment.live_bytes, -segment.kept_bytes)
        segment.forget_records()
        return segment

    async def release(self, segment: Segment) -> None:
        """End a life, durably: nothing that the file holds is read again. Raises NoSpace, DeviceFailed."""
        await self._write_header(segment, SegmentState.FREE, segment.sequence)
        await self.device.sync(segment.fd)
        segment.state = SegmentState.FREE
        segment.forget_records()
        if self.trims:
            self.device.discard(segment.fd, SEGMENT_DATA_START, self.segment_bytes - SEGMENT_DATA_START)
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
        segment.forget_records()

    async def _write_bytes(self, segment: Segment, offset: int, data: bytes) -> None:
        async with self.device.buffer() as view:
            for start in range(0, len(data), len(view)):
                part = view[: min(len(view), len(data) - start)]
                part[:] = data[start : start + len(part)]
                await self.device.write(segment.fd, offset + start, part)

    # --- reading back -------------------------------------------------------------------------------------

    async def read_bytes(self, segment: Segment, offset: int, length: int) -> bytes:
        """Raises DeviceFailed, after READ_ATTEMPTS: a segment that a start does without takes durable objects with it.

        Offset and length are whole pages.
        """
        out = bytearray(length)
        async with self.device.buffer() as view:
            for start in range(0, length, len(view)):
                part = view[: min(len(view), length - start)]
                await self._read_part(segment, offset + start, part)
                out[start : start + len(part)] = part
        return bytes(out)

    async def _read_part(self, segment: Segment, offset: int, into: memoryview) -> None:
        for left in reversed(range(limits.READ_ATTEMPTS)):
            try:
                await self.device.read(segment.fd, offset, into)
                return
            except DeviceFailed:
                if not left:
                    raise

    async def records(self, segment: Segment) -> list[Found]:
        """The records of a segment's present life: from its footer, or else by a scan that verifies payloads."""
        listing = await self.listing(segment)
        offset = SEGMENT_DATA_START
        found: list[Found] = []
        for number, (header, body) in enumerate(decode_records(listing.headers, listing.bodies)):
            found.append(Found(listing.offsets[number] if listing.offsets else offset, header, body))
            offset += header["record_bytes"]
        return found

    async def listing(self, segment: Segment) -> Listing:
        """As `records`, not decoded. Raises DeviceFailed."""
        try:
            return await self._from_footer(segment)
        except Corrupt as error:
            if segment.closed:
                _log.warning("segment %d: scanned, since its footer is not usable: %s", segment.number, error)
        return list_records(await self._from_scan(segment))

    async def _from_footer(self, segment: Segment) -> Listing:
        trailer = await self._trailer(segment)
        data = await self.read_bytes(segment, trailer["footer_offset"], trailer["footer_bytes"])
        footer = self.check_footer(segment, data)
        headers, bodies, records_bytes = split_footer(footer, trailer["records"])
        offset = SEGMENT_DATA_START + records_bytes
        if offset != trailer["footer_offset"]:
            raise Corrupt(f"the footer's records end at {offset}, not at {trailer['footer_offset']}")
        segment.end, segment.closed = offset, True
        segment.first_sequence, segment.last_sequence = trailer["first_sequence"], trailer["last_sequence"]
        return Listing(headers, bodies)

    async def _trailer(self, segment: Segment) -> dict[str, Any]:
        data = await self.read_bytes(
            segment, self.segment_bytes - SEGMENT_TRAILER_BYTES, SEGMENT_TRAILER_BYTES
        )
        return self.check_trailer(segment, formats.decode_page(SEGMENT_TRAILER, formats.TRAILER_MAGIC, data))

    def check_footer(self, segment: Segment, data: bytes) -> memoryview:
        """The body of a footer's record. Raises Corrupt, FormatMismatch."""
        header = RecordHeader.decode(data)
        footer = memoryview(data)[RECORD_HEADER.size : RECORD_HEADER.size + header.body_bytes]
        if header.segment_sequence != segment.sequence or header.body_checksum != xxh3_64(footer):
            raise Corrupt("the footer does not match its checksum, or belongs to another life")
        return footer

    def check_trailer(self, segment: Segment, trailer: dict[str, Any]) -> dict[str, Any]:
        """The fields of a trailer of this life, whose footer fits. Raises Corrupt."""
        if trailer["store_id"] != self.store_id or trailer["segment_sequence"] != segment.sequence:
            raise Corrupt("the trailer belongs to another life of the file")
        start, length = trailer["footer_offset"], trailer["footer_bytes"]
        if (
            start % PAGE_BYTES
            or length % PAGE_BYTES
            or not (
                SEGMENT_DATA_START <= start <= start + length <= self.segment_bytes - SEGMENT_TRAILER_BYTES
            )
        ):
            raise Corrupt(f"a footer of {length} bytes at {start} does not fit")
        return trailer

    async def _from_scan(self, segment: Segment) -> list[Found]:
        """Every record whose header, body and payload hold; what lies between them is skipped."""
        found: list[Found] = []
        offset = SEGMENT_DATA_START
        limit = self.segment_bytes - SEGMENT_TRAILER_BYTES
        data, base = b"", 0
        while offset < limit:
            if not base <= offset <= offset + RECORD_HEADER.size <= base + len(data):
                base = offset // PAGE_BYTES * PAGE_BYTES
                data = await self.read_bytes(segment, base, min(limits.SCAN_BYTES, limit - base))
            header = self._header_at(segment, data, offset - base, found)
            if header is None or offset + header["record_bytes"] > limit:
                offset += formats.RECORD_ALIGNMENT
                continue
            if header["type"] == RecordType.FOOTER:
                break
            need = header["record_bytes"]
            if offset + need > base + len(data):
                base = offset // PAGE_BYTES * PAGE_BYTES
                length = page_up(offset - base + need)
                data = await self.read_bytes(segment, base, min(max(length, limits.SCAN_BYTES), limit - base))
            record = memoryview(data)[offset - base : offset - base + need]
            body = bytes(record[RECORD_HEADER.size : RECORD_HEADER.size + header["body_bytes"]])
            start = header["payload_offset"]
            payload = record[start : start + header["payload_bytes"]]
            whole = not header["payload_bytes"] or xxh3_64(payload) == header["payload_checksum"]
            if not whole or (body and xxh3_64(body) != header["body_checksum"]):
                offset += formats.RECORD_ALIGNMENT
                continue
            found.append(Found(offset, header, body))
            offset += need
            segment.end = page_up(offset)
        segment.closed = True
        if found:
            segment.first_sequence = found[0].header["sequence"]
            segment.last_sequence = found[-1].header["sequence"]
        return found

    def _header_at(self, segment: Segment, data: bytes, at: int, found: list[Found]) -> dict[str, Any] | None:
        """The header there, if it is one of this life and younger than the record before it."""
        if data[at : at + 4] != formats.RECORD_MAGIC:
            return None
        try:
            RecordHeader.decode(data[at : at + RECORD_HEADER.size])
        except (Corrupt, FormatMismatch):
            return None
        header = RECORD_HEADER.decode(memoryview(data)[at:])
        younger = not found or header["sequence"] > found[-1].header["sequence"]
        if header["segment_sequence"] != segment.sequence:
            return None
        return header if younger or header["type"] == RecordType.FOOTER else None

    def close_files(self) -> None:
        self.endings.close_files()
        for segment in self.segments:
            self.device.close_file(segment.fd)


async def open_pool(
    device: Device, directory: Path, *, store_id: bytes, capacity_bytes: int, segment_bytes: int | None = None
) -> SegmentPool:
    """The segment files of `directory`, made where they are missing, with the state that their headers say.

    A directory that has files keeps their size. Raises ConfigError for a capacity out of bounds, NoSpace when
    the filesystem cannot hold it, FormatMismatch for the files of another store or a newer format.
    """
    segment_bytes, highest = _look(
        directory, store_id, segment_bytes or default_segment_bytes(capacity_bytes)
    )
    count = capacity_bytes // segment_bytes
    if not limits.MIN_SEGMENTS <= count <= limits.MAX_SEGMENTS:
        raise ConfigError(
            f"NVMe capacity of {capacity_bytes} bytes makes {count} segments of {segment_bytes}: "
            f"{limits.MIN_SEGMENTS} to {limits.MAX_SEGMENTS} are possible"
        )
    pool = SegmentPool(device, directory, store_id, segment_bytes)
    try:
        for number in range(max(count, highest + 1)):
            await _open_segment(pool, number, wanted=number < count)
    except BaseException:
        pool.close_files()
        raise
    pool.next_sequence = 1 + max((s.sequence for s in pool.segments), default=0)
    pool.free = deque(s for s in pool.segments if s.state is SegmentState.FREE and not s.bad)
    pool.endings.size_for(pool.capacity_bytes)
    return pool


def default_segment_bytes(capacity_bytes: int) -> int:
    """A 64th of the capacity, as a power of two within the limits."""
    share = max(1, capacity_bytes // limits.SEGMENTS_WANTED)
    return min(max(1 << share.bit_length() - 1, limits.MIN_SEGMENT_BYTES), limits.MAX_SEGMENT_BYTES)


def _look(directory: Path, store_id: bytes, segment_bytes: int) -> tuple[int, int]:
    """(bytes of a segment, highest number of a file) of the directory, which is made where it is missing."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    size = _settle_geometry(directory, store_id, segment_bytes)
    return size, max((int(path.stem, 16) for path in directory.glob("*.seg")), default=-1)


def _settle_geometry(directory: Path, store_id: bytes, segment_bytes: int) -> int:
    """The size that the files there have, else the wanted one, written down. Raises ConfigError, FormatMismatch."""
    path = directory / GEOMETRY
    try:
        found = json.loads(path.read_text())
        version, owner, size = (
            int(found["format"]),
            bytes.fromhex(found["store_id"]),
            int(found["segment_bytes"]),
        )
    except FileNotFoundError:
        if segment_bytes % PAGE_BYTES or not (
            limits.MIN_SEGMENT_BYTES <= segment_bytes <= limits.MAX_SEGMENT_BYTES
        ):
            raise ConfigError(
                f"segments of {segment_bytes} bytes: whole pages from {limits.MIN_SEGMENT_BYTES} to "
                f"{limits.MAX_SEGMENT_BYTES} are possible"
            ) from None
        if any(directory.glob("*.seg")):
            raise FormatMismatch(f"{directory} holds segment files, but no {GEOMETRY}") from None
        text = json.dumps(
            {"format": formats.SEGMENT_VERSION, "store_id": store_id.hex(), "segment_bytes": segment_bytes}
        )
        temporary = directory / (GEOMETRY + ".new")
        temporary.write_text(text + "\n")
        with temporary.open() as file:
            os.fsync(file.fileno())
        temporary.rename(path)
        return segment_bytes
    except (ValueError, KeyError, TypeError) as error:
        raise FormatMismatch(f"{path} does not say what the segment files are: {error}") from None
    if version > formats.SEGMENT_VERSION:
        raise FormatMismatch(f"{path} says format {version}, this kvfs reads up to {formats.SEGMENT_VERSION}")
    if owner != store_id:
        raise FormatMismatch(
            f"{directory} holds the segments of store {owner.hex()}, not of {store_id.hex()}"
        )
    return size


async def _open_segment(pool: SegmentPool, number: int, *, wanted: bool) -> None:
    """Add one file to the pool; one past the wanted capacity only while it holds something."""
    path = pool.directory / f"{number:08x}.seg"
    exists = path.exists()
    if not exists and not wanted:
        return
    fd = pool.device.open_file(path, pool.segment_bytes, create=not exists)
    segment = Segment(number, fd)
    pool.segments.append(segment)
    if not exists:
        return
    try:
        _lengthen(pool, path)
    except OSError as error:
        _log.error("segment file %s is set aside: %s", path, error)
        segment.bad = True
        return
    try:
        raw = await _read_header(pool, segment)
    except KvfsError as error:
        _log.error("segment file %s is set aside: %s", path, error)
        segment.bad = True
        return
    if raw is not None:
        segment.sequence = raw["segment_sequence"]
        segment.state = SegmentState(raw["state"])
    if not wanted and segment.state is SegmentState.FREE:
        pool.segments.pop()
        pool.device.close_file(fd)
        path.unlink()


def _lengthen(pool: SegmentPool, path: Path) -> None:
    """Give a file that was cut its length back, so that what is left of it can be read: zeros are no records."""
    missing = pool.segment_bytes - path.stat().st_size
    if missing > 0:
        _log.error("segment file %s is %d bytes short: what they held is lost", path, missing)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, pool.segment_bytes)


async def _read_header(pool: SegmentPool, segment: Segment) -> dict[str, Any] | None:
    """The newest of the header's copies; None for a file never used. Raises Corrupt, FormatMismatch, DeviceFailed."""
    data = await pool.read_bytes(segment, 0, SEGMENT_DATA_START)
    if not any(data):
        return None
    good: list[dict[str, Any]] = []
    problem: KvfsError = Corrupt("no copy of its header is readable")
    for at in SEGMENT_HEADER_COPIES:
        try:
            raw = formats.decode_page(SEGMENT_HEADER, formats.SEGMENT_MAGIC, data[at : at + PAGE_BYTES])
        except (Corrupt, FormatMismatch) as error:
            problem = error
            continue
        if raw["store_id"] != pool.store_id:
            raise FormatMismatch(f"it belongs to store {raw['store_id'].hex()}")
        if raw["segment_bytes"] != pool.segment_bytes or raw["state"] not in (1, 2):
            raise Corrupt(f"its header says {raw['segment_bytes']} bytes, state {raw['state']}")
        good.append(raw)
    if not good:
        raise problem
    return max(good, key=lambda raw: (raw["segment_sequence"], -raw["state"]))


__all__ = ["DeviceFailed", "Found", "Segment", "SegmentPool", "default_segment_bytes", "open_pool", "page_up"]
