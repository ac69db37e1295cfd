"""Segment files read byte by byte and held against their checksums, their footers, and each other.

Responsibility: open the files of a pool that no service uses, and say of each what it holds and what is wrong with
it. It changes nothing; what the records mean, and what is to be done, is `tiers.fsck`.

What is verified: both copies of a segment's header; of a segment in use its trailer and footer, and of each record
the header, the body and the payload, all against their checksums; where there is a footer, header and body also
against its copy of them. Not verified, since nothing reads it: padding, what lies behind the last record, and the
contents of free segments.

A segment without a footer is one that a crash left: its records are found by reading on from one to the next. A
power cut may have torn the last ones. They are reported like any others that do not hold, as nobody can tell.

Concurrency: async over the device, one buffer a segment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfs import formats, limits
from kvfs._native.slots import xxh3_64
from kvfs.errors import Corrupt, DeviceFailed, FormatMismatch, KvfsError
from kvfs.formats import (
    RECORD_ALIGNMENT,
    RECORD_HEADER,
    RECORD_MAGIC,
    SEGMENT_DATA_START,
    SEGMENT_HEADER,
    SEGMENT_HEADER_COPIES,
    SEGMENT_TRAILER_BYTES,
    RecordHeader,
    RecordType,
    SegmentState,
)
from kvfs.records import BucketBody, MetaBody, TombstoneBody, footer_records
from tiers.device import Device
from tiers.segments import GEOMETRY, PAGE_BYTES, Found, Segment, SegmentPool, page_up

Tick = Callable[[int], None]
"""Told how many more bytes were verified."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is not what was written."""

    offset: int
    what: str
    header: dict[str, Any] | None = None
    """None where it is not known what the record was."""
    lost: bool = True
    """False where all that counts of it is there nevertheless, from the footer."""

    @property
    def type(self) -> RecordType | None:
        return None if self.header is None else RecordType(self.header["type"])


@dataclass(slots=True)
class SegmentCheck:
    """What was found in one file."""

    segment: Segment
    path: Path
    faults: list[str] = field(default_factory=list)
    """Of the file as a whole: header copies, trailer, footer."""
    records: list[Found] = field(default_factory=list)
    """Those whose header is known, in order; also those whose payload is damaged."""
    bad: list[BadRecord] = field(default_factory=list)
    worn: bool = False
    """The file is short, or the device fails to read it: it is not to be used again."""
    hopeless: bool = False
    """No header: nothing in the file can be trusted to be of its present life."""
    has_footer: bool = False
    is_cut: bool = False
    """The end of the file is gone, and no footer says what was there."""

    @property
    def is_clean(self) -> bool:
        return not (self.faults or self.bad or self.hopeless)

    @property
    def has_holes(self) -> bool:
        """Whether a record was lost of which nobody knows what it said."""
        return (
            self.hopeless
            or self.is_cut
            or any(bad.lost and bad.type is not RecordType.DATA for bad in self.bad)
        )


@dataclass(slots=True)
class PoolCheck:
    """All files of a directory, and its geometry."""

    pool: SegmentPool
    checks: list[SegmentCheck]
    geometry_fault: str = ""
    """What is wrong with the file that says the segments' size."""

    @property
    def bytes_to_verify(self) -> int:
        """At most."""
        used = sum(check.segment.state is SegmentState.IN_USE for check in self.checks)
        return used * self.pool.segment_bytes


def look_at_pool(device: Device, directory: Path, store_id: bytes) -> PoolCheck | None:
    """The files there, opened, with what their headers say; None where there is no pool.

    Raises FormatMismatch for another store's, or where nothing says how large segments are.
    """
    paths = sorted(path for path in directory.glob("*.seg") if path.is_file())
    if not paths and not (directory / GEOMETRY).exists():
        return None
    copies = {path: [_copy(path, at) for at in SEGMENT_HEADER_COPIES] for path in paths}
    segment_bytes, fault = _geometry(directory, store_id, [raw for raws in copies.values() for raw in raws])
    pool = SegmentPool(device, directory, store_id, segment_bytes)
    checks = []
    try:
        for path in paths:
            check = _open(pool, path, store_id)
            checks.append(check)
            _check_header(check, pool, copies[path])
    except BaseException:
        pool.close_files()
        raise
    pool.next_sequence = 1 + max((segment.sequence for segment in pool.segments), default=0)
    pool.free.extend(s for s in pool.segments if s.state is SegmentState.FREE and not s.bad)
    return PoolCheck(pool, checks, fault)


def _open(pool: SegmentPool, path: Path, store_id: bytes) -> SegmentCheck:
    fd = pool.device.open_file(path, pool.segment_bytes, create=False)
    segment = Segment(int(path.stem, 16), fd)
    pool.segments.append(segment)
    check = SegmentCheck(segment, path)
    if path.stat().st_size != pool.segment_bytes:
        check.faults.append(f"has {path.stat().st_size} bytes instead of {pool.segment_bytes}")
        check.worn = segment.bad = True
    return check


_Copy = dict[str, Any] | str | None
"""A copy of a segment's header, what is wrong with it, or None where there never was one."""


def _copy(path: Path, at: int) -> _Copy:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            data = file.read(PAGE_BYTES)
        if len(data) == PAGE_BYTES and not any(data):
            return None
        raw = formats.decode_page(SEGMENT_HEADER, formats.SEGMENT_MAGIC, data)
    except (KvfsError, OSError) as error:
        return str(error)
    return raw if raw["state"] in (1, 2) else f"{SEGMENT_HEADER.name}: state {raw['state']}"


def _geometry(directory: Path, store_id: bytes, copies: list[_Copy]) -> tuple[int, str]:
    """(bytes of a segment, what is wrong with the file that says it). Headers outvote it: they have checksums."""
    raws = [raw for raw in copies if isinstance(raw, dict)]
    if raws and not any(raw["store_id"] == store_id for raw in raws):
        raise FormatMismatch(
            f"{directory} holds the segments of store {raws[0]['store_id'].hex()}, not of {store_id.hex()}"
        )
    sizes = [raw["segment_bytes"] for raw in raws if raw["store_id"] == store_id]
    path = directory / GEOMETRY
    try:
        found = json.loads(path.read_text())
        version, owner = int(found["format"]), bytes.fromhex(found["store_id"])
        size = int(found["segment_bytes"])
        fault = "" if owner == store_id else f"says store {owner.hex()}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        version, size, fault = 0, 0, f"does not say what the segment files are: {error}"
    if version > formats.SEGMENT_VERSION and not sizes:
        raise FormatMismatch(f"{path} says format {version}, this kvfs reads up to {formats.SEGMENT_VERSION}")
    if not fault and version != formats.SEGMENT_VERSION:
        fault = f"says format {version}"
    if sizes:
        voted = max(set(sizes), key=sizes.count)
        if not fault and voted != size:
            fault = f"says segments of {size} bytes, the segments themselves say {voted}"
        return voted, fault
    if fault:
        raise FormatMismatch(f"{path} {fault}, and no segment is readable that could say it")
    return size, ""


def _check_header(check: SegmentCheck, pool: SegmentPool, copies: list[_Copy]) -> None:
    """Which life the file is in."""
    segment = check.segment
    good = []
    for number, raw in enumerate(copies):
        if isinstance(raw, dict):
            if raw["store_id"] == pool.store_id and raw["segment_bytes"] == pool.segment_bytes:
                good.append(raw)
            else:
                check.faults.append(f"copy {number} of its header is of another store or size")
        elif raw is not None:
            check.faults.append(f"copy {number} of its header is damaged ({raw})")
    if good:
        if None in copies:
            check.faults.append("a copy of its header is empty")
        raw = max(good, key=lambda raw: (raw["segment_sequence"], -raw["state"]))
        segment.sequence, segment.state = raw["segment_sequence"], SegmentState(raw["state"])
    elif check.faults or _begins_with_a_record(check.path):
        check.hopeless = segment.bad = True
        if not check.faults:
            check.faults.append("its header is empty, but records follow")


def _begins_with_a_record(path: Path) -> bool:
    with path.open("rb", buffering=0) as file:
        file.seek(SEGMENT_DATA_START)
        return file.read(len(RECORD_MAGIC)) == RECORD_MAGIC


async def check_segment(pool: SegmentPool, check: SegmentCheck, tick: Tick) -> None:
    """Verify a segment in use; `check` is filled in."""
    async with pool.device.buffer() as view:
        await _Reader(pool, check, view, tick).run()
    check.segment.closed = True


class _Reader:
    """One segment's records, read in order."""

    def __init__(self, pool: SegmentPool, check: SegmentCheck, view: memoryview, tick: Tick) -> None:
        self.pool = pool
        self.check = check
        self.segment = check.segment
        self._file_bytes = check.path.stat().st_size
        self.limit = min(pool.segment_bytes - SEGMENT_TRAILER_BYTES, page_up(self._file_bytes))
        self._view = view
        self._tick = tick
        self._base = 0
        self._length = 0
        self._last = 0

    # --- bytes --------------------------------------------------------------------------------------------

    async def bytes_at(self, offset: int, length: int) -> memoryview:
        """Raises DeviceFailed, Corrupt where the file ends."""
        if not self._base <= offset <= offset + length <= self._base + self._length:
            await self._fill(offset, length)
        return self._view[offset - self._base : offset - self._base + length]

    async def _fill(self, offset: int, length: int) -> None:
        base = offset // PAGE_BYTES * PAGE_BYTES
        need = page_up(offset - base + length)
        wanted = max(need, min(limits.SCAN_BYTES, self.limit - base))
        self._length = 0
        if self._file_bytes < base + wanted <= page_up(self._file_bytes):
            self._read_end(base, wanted)
            return
        for size in dict.fromkeys((wanted, need)):  # after an error only what is needed: the rest may be well
            try:
                await self.pool.device.read(self.segment.fd, base, self._view[:size])
            except (DeviceFailed, Corrupt):
                if size == need:
                    self.check.worn = True
                    raise
                continue
            self._base, self._length = base, size
            return

    def _read_end(self, base: int, size: int) -> None:
        """The end of a file within a page, followed by zeros: a start extends the file, and reads that."""
        with self.check.path.open("rb") as file:
            file.seek(base)
            data = file.read(size)
        self._view[:size] = data + bytes(size - len(data))
        self._base, self._length = base, size

    # --- a segment ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        footer = await self._footer()
        self.check.has_footer = footer is not None
        if footer is not None:
            for found, head in footer:
                await self._compare(found, head)
        else:
            await self._scan()
            self.check.is_cut = self.check.path.stat().st_size < self.pool.segment_bytes
        if self.check.records:
            self.segment.first_sequence = self.check.records[0].header["sequence"]
            self.segment.last_sequence = self.check.records[-1].header["sequence"]

    async def _footer(self) -> list[tuple[Found, bytes]] | None:
        """The records that the footer lists, each with its header's bytes; None where there is none."""
        try:
            page = await self.pool.read_bytes(
                self.segment, self.pool.segment_bytes - SEGMENT_TRAILER_BYTES, SEGMENT_TRAILER_BYTES
            )
        except (DeviceFailed, Corrupt) as error:
            self.check.worn = True
            self.check.faults.append(f"its trailer cannot be read ({error})")
            return None
        if not any(page):
            return None
        try:
            raw = formats.decode_page(formats.SEGMENT_TRAILER, formats.TRAILER_MAGIC, page)
            if raw["segment_sequence"] != self.segment.sequence:
                return None  # of an earlier life
            trailer = self.pool.check_trailer(self.segment, raw)
            data = await self.pool.read_bytes(self.segment, trailer["footer_offset"], trailer["footer_bytes"])
            footer = self.pool.check_footer(self.segment, data)
            found = list(_listed(footer, trailer["records"]))
        except KvfsError as error:
            self.check.worn = self.check.worn or isinstance(error, DeviceFailed)
            self.check.faults.append(f"its footer cannot be used ({error})")
            return None
        self._tick(len(page) + len(data))
        self.segment.end = trailer["footer_offset"]
        return found

    async def _compare(self, found: Found, head: bytes) -> None:
        """A record against the footer's copy of its header and body."""
        header = found.header
        self.check.records.append(found)
        try:
            record = await self.bytes_at(found.offset, header["record_bytes"])
        except (DeviceFailed, Corrupt) as error:
            lost = bool(header["payload_bytes"])
            self.check.bad.append(BadRecord(found.offset, f"cannot be read ({error})", header, lost))
            return
        self._tick(len(record))
        body = record[RECORD_HEADER.size : RECORD_HEADER.size + header["body_bytes"]]
        if record[: RECORD_HEADER.size] != head or body != found.body:
            what = "the record is not the one that the footer lists"
            self.check.bad.append(BadRecord(found.offset, what, header, lost=False))
        if not _payload_holds(record, header):
            self.check.bad.append(BadRecord(found.offset, "its payload does not match its checksum", header))

    # --- without a footer ---------------------------------------------------------------------------------

    async def _scan(self) -> None:
        offset = SEGMENT_DATA_START
        while offset + RECORD_HEADER.size <= self.limit:
            header, damaged = await self._header_at(offset)
            if header is None:
                following = await self._next_header(offset + RECORD_ALIGNMENT)
                if damaged or following is not None:
                    what = damaged or f"no record for {(following or 0) - offset} bytes, then more"
                    self.check.bad.append(BadRecord(offset, what))
                if following is None:
                    break
                offset = following
                continue
            if header["type"] == RecordType.FOOTER:
                break
            await self._take(offset, header)
            offset += header["record_bytes"]
        self.segment.end = page_up(min(offset, self.limit))

    async def _take(self, offset: int, header: dict[str, Any]) -> None:
        self._last = header["sequence"]
        try:
            record = await self.bytes_at(offset, header["record_bytes"])
        except (DeviceFailed, Corrupt) as error:
            self.check.bad.append(BadRecord(offset, f"cannot be read ({error})", header))
            return
        self._tick(len(record))
        body = bytes(record[RECORD_HEADER.size : RECORD_HEADER.size + header["body_bytes"]])
        problem = _body_problem(header, body)
        if problem:
            self.check.bad.append(BadRecord(offset, problem, header))
            return
        self.check.records.append(Found(offset, header, body))
        if not _payload_holds(record, header):
            self.check.bad.append(BadRecord(offset, "its payload does not match its checksum", header))

    async def _header_at(self, offset: int) -> tuple[dict[str, Any] | None, str]:
        """The header there, if it is one of this life and younger than the last; else what looks damaged there."""
        try:
            data = bytes(await self.bytes_at(offset, RECORD_HEADER.size))
        except (DeviceFailed, Corrupt) as error:
            return None, f"cannot be read ({error})"
        try:
            RecordHeader.decode(data)
        except FormatMismatch as error:
            return None, str(error)
        except Corrupt:
            return None, "its header does not match its checksum" if _resembles(data) else ""
        header = RECORD_HEADER.decode(data)
        fits = offset + header["record_bytes"] <= self.limit and header["record_bytes"] <= len(self._view)
        younger = header["sequence"] > self._last or header["type"] == RecordType.FOOTER
        if header["segment_sequence"] != self.segment.sequence or not (fits and younger):
            return None, ""
        return header, ""

    async def _next_header(self, offset: int) -> int | None:
        while offset + RECORD_HEADER.size <= self.limit:
            try:
                await self.bytes_at(offset, RECORD_HEADER.size)
            except (DeviceFailed, Corrupt):
                offset = (offset // PAGE_BYTES + 1) * PAGE_BYTES
                continue
            end = self._base + self._length
            for at in _magics(self._view[: self._length], offset - self._base):
                header, _ = await self._header_at(self._base + at)
                if header is not None:
                    return self._base + at
            offset = end
        return None


def _listed(footer: memoryview, records: int) -> Iterator[tuple[Found, bytes]]:
    """Raises Corrupt."""
    offset = SEGMENT_DATA_START
    for number, (raw, body) in enumerate(footer_records(footer, records)):
        at = number * RECORD_HEADER.size
        problem = _body_problem(raw, body)
        if problem:
            raise Corrupt(f"record {number} of the footer: {problem}")
        yield Found(offset, raw, body), bytes(footer[at : at + RECORD_HEADER.size])
        offset += raw["record_bytes"]


def _magics(view: memoryview, start: int) -> Iterator[int]:
    """Where a record could begin, from `start` on, in a window that begins at a page."""
    data = bytes(view)
    at = data.find(RECORD_MAGIC, start)
    while at >= 0:
        if at % RECORD_ALIGNMENT == 0 and at + RECORD_HEADER.size <= len(data):
            yield at
        at = data.find(RECORD_MAGIC, at + 1)


def _resembles(data: bytes) -> bool:
    """Whether a header that does not match its checksum was one: most of what never changes is there."""
    raw = RECORD_HEADER.decode(data)
    fixed = ((raw["magic"], RECORD_MAGIC), (raw["version"], formats.RECORD_VERSION))
    same = sum(found == wanted for found, wanted in fixed) + (raw["header_bytes"] == RECORD_HEADER.size)
    return bool(same >= 2)


def _payload_holds(record: memoryview, header: dict[str, Any]) -> bool:
    if not header["payload_bytes"]:
        return True
    start, wanted = header["payload_offset"], int(header["payload_checksum"])
    found: int = xxh3_64(record[start : start + header["payload_bytes"]])
    return found == wanted


_BODIES = {
    RecordType.META: MetaBody.decode,
    RecordType.BUCKET: BucketBody.decode,
    RecordType.TOMBSTONE: TombstoneBody.decode,
}


def _body_problem(header: dict[str, Any], body: bytes) -> str:
    if body and xxh3_64(body) != header["body_checksum"]:
        return "its body does not match its checksum"
    decode = _BODIES.get(header["type"])
    try:
        if decode is not None:
            decode(body)
    except Corrupt as error:
        return str(error)
    return ""
