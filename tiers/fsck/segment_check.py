"""Segment files read byte by byte and compared with their checksums and footers.

Responsibility: report of each segment of a pool that no service uses what it holds and what is wrong with it. It
changes nothing; headers are `tiers.fsck.pool_check`, what the records mean is `tiers.fsck.check`.

What is verified: of a segment in use its trailer and footer, and of each record the header, the body and the payload,
all against their checksums; where there is a footer, header and body also against its copy of them. Not verified, since
nothing reads it: padding, what lies behind the last record, and the contents of free segments.

A segment without a footer is one that a crash left: its records are found by reading on from one to the next. A power
cut may have torn the last ones. They are reported like other damaged ones: nothing says which they are.

Concurrency: async over the device, one buffer a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvfs import formats, limits
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, DeviceFailed, FormatMismatch, KvfsError
from kvfs.formats import (
    RECORD_ALIGNMENT,
    RECORD_HEADER,
    RECORD_MAGIC,
    SEGMENT_DATA_START,
    SEGMENT_TRAILER_BYTES,
    RecordHeader,
    RecordType,
)
from tiers.fsck.pool_check import BadRecord, SegmentCheck
from tiers.log.pool import SegmentPool
from tiers.log.records import BucketBody, MetaBody, RenameBody, TombstoneBody, footer_records
from tiers.log.segments import PAGE_BYTES, LoggedRecord, page_up

Tick = Callable[[int], None]
"""Notified of how many more bytes were verified."""


async def check_segment(pool: SegmentPool, check: SegmentCheck, tick: Tick) -> None:
    """Verify a segment in use; `check` is filled in."""
    async with pool.device.buffer() as view:
        await _Reader(pool, check, view, tick).run()
    check.segment.closed = True


class _Reader:
    """Reads one segment's records in order."""

    def __init__(self, pool: SegmentPool, check: SegmentCheck, view: memoryview, tick: Tick) -> None:
        self.pool = pool
        self.check = check
        self.segment = check.segment
        self._file_bytes = check.size_bytes
        self.limit = min(pool.segment_bytes - SEGMENT_TRAILER_BYTES, page_up(self._file_bytes))
        self._view = view
        self._tick = tick
        self._base = 0
        self._length = 0
        self._last = 0

    async def bytes_at(self, offset: int, length: int) -> memoryview:
        """Read bytes of the segment. Raises DeviceFailed, Corrupt where the file ends."""
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
        """Read the end of a file within a page, followed by zeros: a start extends the file, and reads that."""
        data = self.check.place.read(base, size)
        self._view[:size] = data + bytes(size - len(data))
        self._base, self._length = base, size

    async def run(self) -> None:
        footer = await self._footer()
        self.check.has_footer = footer is not None
        if footer is not None:
            for found, head in footer:
                await self._compare(found, head)
        else:
            await self._scan()
            self.check.is_cut = self._file_bytes < self.pool.segment_bytes
        if self.check.records:
            self.segment.first_sequence = self.check.records[0].header["sequence"]
            self.segment.last_sequence = self.check.records[-1].header["sequence"]

    async def _footer(self) -> list[tuple[LoggedRecord, bytes]] | None:
        """Read the records that the footer lists, each with its header's bytes; return None without a footer."""
        try:
            page = await self.pool.reader.read_bytes(
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
            trailer = self.pool.reader.check_trailer(self.segment, raw)
            data = await self.pool.reader.read_bytes(
                self.segment, trailer["footer_offset"], trailer["footer_bytes"]
            )
            footer = self.pool.reader.check_footer(self.segment, data)
            found = list(_listed(footer, trailer["records"]))
        except KvfsError as error:
            self.check.worn = self.check.worn or isinstance(error, DeviceFailed)
            self.check.faults.append(f"its footer cannot be used ({error})")
            return None
        self._tick(len(page) + len(data))
        self.segment.end = trailer["footer_offset"]
        return found

    async def _compare(self, found: LoggedRecord, head: bytes) -> None:
        """Compare a record with the footer's copy of its header and body."""
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
        self.check.records.append(LoggedRecord(offset, header, body))
        if not _payload_holds(record, header):
            self.check.bad.append(BadRecord(offset, "its payload does not match its checksum", header))

    async def _header_at(self, offset: int) -> tuple[dict[str, Any] | None, str]:
        """Read a header, if it is one of this life and younger than the last; else say what looks damaged there."""
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


def _listed(footer: memoryview, records: int) -> Iterator[tuple[LoggedRecord, bytes]]:
    """Yield each record of a footer with its header's bytes. Raises Corrupt."""
    offset = SEGMENT_DATA_START
    for number, (raw, body) in enumerate(footer_records(footer, records)):
        at = number * RECORD_HEADER.size
        problem = _body_problem(raw, body)
        if problem:
            raise Corrupt(f"record {number} of the footer: {problem}")
        yield LoggedRecord(offset, raw, body), bytes(footer[at : at + RECORD_HEADER.size])
        offset += raw["record_bytes"]


def _magics(view: memoryview, start: int) -> Iterator[int]:
    """Yield where a record could begin, from `start` on, in a window that begins at a page."""
    data = bytes(view)
    at = data.find(RECORD_MAGIC, start)
    while at >= 0:
        if at % RECORD_ALIGNMENT == 0 and at + RECORD_HEADER.size <= len(data):
            yield at
        at = data.find(RECORD_MAGIC, at + 1)


def _resembles(data: bytes) -> bool:
    """Return whether a header that does not match its checksum was one: most of what never changes is there."""
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
    RecordType.RENAME: RenameBody.decode,
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
