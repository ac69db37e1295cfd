"""Reads a segment's records back: from its footer, or by a scan.

Responsibility: which records of a segment's present life are there. A footer lists all of them; without one a scan
verifies header, body and payload of each, and skips what lies between.

Invariants: nothing of another life of the file is returned; records come in the order of their sequences.
Concurrency: the service's trio thread; reads go through the device.
"""

from __future__ import annotations

import logging
from typing import Any

from kvfs import formats, limits
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, DeviceFailed, FormatMismatch
from kvfs.formats import (
    RECORD_HEADER,
    SEGMENT_DATA_START,
    SEGMENT_TRAILER,
    SEGMENT_TRAILER_BYTES,
    RecordHeader,
    RecordType,
)
from tiers.device.device import Device
from tiers.log.records import decode_records, split_footer
from tiers.log.segments import PAGE_BYTES, Listing, LoggedRecord, Segment, list_records, page_up

_log = logging.getLogger("kvfs.nvme")


class SegmentReader:
    """Reads the segments of one pool."""

    def __init__(self, device: Device, store_id: bytes, segment_bytes: int) -> None:
        self._device = device
        self._store_id = store_id
        self._segment_bytes = segment_bytes

    async def read_bytes(self, segment: Segment, offset: int, length: int) -> bytes:
        """Read whole pages. Raises DeviceFailed, after READ_ATTEMPTS: durable objects may be in the segment."""
        out = bytearray(length)
        async with self._device.buffer() as view:
            for start in range(0, length, len(view)):
                part = view[: min(len(view), length - start)]
                await self._read_part(segment, offset + start, part)
                out[start : start + len(part)] = part
        return bytes(out)

    async def _read_part(self, segment: Segment, offset: int, into: memoryview) -> None:
        for left in reversed(range(limits.READ_ATTEMPTS)):
            try:
                await self._device.read(segment.fd, offset, into)
                return
            except DeviceFailed:
                if not left:
                    raise

    async def records(self, segment: Segment) -> list[LoggedRecord]:
        """Read the records of a segment's present life: from its footer, or else by a scan that verifies payloads."""
        listing = await self.listing(segment)
        offset = SEGMENT_DATA_START
        found: list[LoggedRecord] = []
        for number, (header, body) in enumerate(decode_records(listing.headers, listing.bodies)):
            found.append(LoggedRecord(listing.offsets[number] if listing.offsets else offset, header, body))
            offset += header["record_bytes"]
        return found

    async def listing(self, segment: Segment) -> Listing:
        """Read the records of a segment, not decoded. Raises DeviceFailed."""
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
            segment, self._segment_bytes - SEGMENT_TRAILER_BYTES, SEGMENT_TRAILER_BYTES
        )
        return self.check_trailer(segment, formats.decode_page(SEGMENT_TRAILER, formats.TRAILER_MAGIC, data))

    def check_footer(self, segment: Segment, data: bytes) -> memoryview:
        """Return the body of a footer's record. Raises Corrupt, FormatMismatch."""
        header = RecordHeader.decode(data)
        footer = memoryview(data)[RECORD_HEADER.size : RECORD_HEADER.size + header.body_bytes]
        if header.segment_sequence != segment.sequence or header.body_checksum != xxh3_64(footer):
            raise Corrupt("the footer does not match its checksum, or belongs to another life")
        return footer

    def check_trailer(self, segment: Segment, trailer: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a trailer of this life, whose footer fits. Raises Corrupt."""
        if trailer["store_id"] != self._store_id or trailer["segment_sequence"] != segment.sequence:
            raise Corrupt("the trailer belongs to another life of the file")
        start, length = trailer["footer_offset"], trailer["footer_bytes"]
        if (
            start % PAGE_BYTES
            or length % PAGE_BYTES
            or not (
                SEGMENT_DATA_START <= start <= start + length <= self._segment_bytes - SEGMENT_TRAILER_BYTES
            )
        ):
            raise Corrupt(f"a footer of {length} bytes at {start} does not fit")
        return trailer

    async def _from_scan(self, segment: Segment) -> list[LoggedRecord]:
        """Read every record whose header, body and payload match their checksums; skip what lies between."""
        records: list[LoggedRecord] = []
        offset = SEGMENT_DATA_START
        window = _Window(self, segment, self._segment_bytes - SEGMENT_TRAILER_BYTES)
        while offset < window.limit:
            data = await window.at(offset, RECORD_HEADER.size)
            header = self._header_at(segment, data, records)
            if header is None or offset + header["record_bytes"] > window.limit:
                offset += formats.RECORD_ALIGNMENT
                continue
            if header["type"] == RecordType.FOOTER:
                break
            body = _whole_body(header, await window.at(offset, header["record_bytes"]))
            if body is None:
                offset += formats.RECORD_ALIGNMENT
                continue
            records.append(LoggedRecord(offset, header, body))
            offset += header["record_bytes"]
            segment.end = page_up(offset)
        segment.closed = True
        if records:
            segment.first_sequence = records[0].header["sequence"]
            segment.last_sequence = records[-1].header["sequence"]
        return records

    def _header_at(
        self, segment: Segment, data: memoryview, records: list[LoggedRecord]
    ) -> dict[str, Any] | None:
        """Decode a header, if it is one of this life and younger than the record before it."""
        if bytes(data[:4]) != formats.RECORD_MAGIC:
            return None
        try:
            RecordHeader.decode(bytes(data))
        except (Corrupt, FormatMismatch):
            return None
        header = RECORD_HEADER.decode(data)
        younger = not records or header["sequence"] > records[-1].header["sequence"]
        if header["segment_sequence"] != segment.sequence:
            return None
        return header if younger or header["type"] == RecordType.FOOTER else None


class _Window:
    """Reads a segment in pieces of limits.SCAN_BYTES, or of a record where that is larger."""

    def __init__(self, reader: SegmentReader, segment: Segment, limit: int) -> None:
        self.limit = limit
        self._reader = reader
        self._segment = segment
        self._data, self._base = memoryview(b""), 0

    async def at(self, offset: int, size_bytes: int) -> memoryview:
        """Return so many bytes; fewer where the limit is before their end. Raises DeviceFailed."""
        if not self._base <= offset <= offset + size_bytes <= self._base + len(self._data):
            self._base = offset // PAGE_BYTES * PAGE_BYTES
            length = max(page_up(offset - self._base + size_bytes), limits.SCAN_BYTES)
            length = min(length, self.limit - self._base)
            self._data = memoryview(await self._reader.read_bytes(self._segment, self._base, length))
        start = offset - self._base
        return self._data[start : start + size_bytes]


def _whole_body(header: dict[str, Any], record: memoryview) -> bytes | None:
    """Return a record's body; None where body or payload does not match its checksum."""
    body = bytes(record[RECORD_HEADER.size : RECORD_HEADER.size + header["body_bytes"]])
    start = header["payload_offset"]
    payload = record[start : start + header["payload_bytes"]]
    whole = not header["payload_bytes"] or xxh3_64(payload) == header["payload_checksum"]
    if not whole or (body and xxh3_64(body) != header["body_checksum"]):
        return None
    return body
