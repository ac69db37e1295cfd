"""The bodies of a segment's META, BUCKET and TOMBSTONE records, and of its footer.

Responsibility: turn a body into bytes and back; the header around it is `kvfs.formats.RecordHeader`, which
carries object id, key, sequence, generation and the body's checksum.

Invariants: a body is a fixed part, then byte strings, each behind its u32 length, and nothing after them;
decoding any other bytes raises Corrupt. A META says all there is to know of a name, so that one record
suffices and older ones of the same object count no more: a rename, too, is a META with the new name.
Concurrency: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvfs import limits
from kvfs.errors import Corrupt, InvalidRequest
from kvfs.formats import RECORD_HEADER, RecordType
from kvfs.index.rows import BucketRow, NameRow

_LENGTH: Final = struct.Struct("<I")
_TOMBSTONE: Final = struct.Struct("<QQ")

_LONGEST: Final = {
    "bucket": limits.MAX_BUCKET_NAME_BYTES,
    "key": limits.MAX_KEY_BYTES,
    "row": limits.MAX_USER_METADATA_BYTES + limits.MAX_NAMESPACE_BYTES,
}


def _pack_strings(**parts: bytes) -> bytes:
    out = bytearray()
    for name, part in parts.items():
        if len(part) > _LONGEST[name]:
            raise InvalidRequest(f"{name} of {len(part)} bytes, the limit is {_LONGEST[name]}")
        out += _LENGTH.pack(len(part)) + part
    return bytes(out)


def _unpack_strings(body: bytes, *names: str) -> list[bytes]:
    parts = []
    offset = 0
    for name in names:
        if offset + _LENGTH.size > len(body):
            raise Corrupt(f"record body: it ends before the length of {name}")
        (length,) = _LENGTH.unpack_from(body, offset)
        offset += _LENGTH.size
        if length > _LONGEST[name] or offset + length > len(body):
            raise Corrupt(f"record body: {name} of {length} bytes does not fit")
        parts.append(bytes(body[offset : offset + length]))
        offset += length
    if offset != len(body):
        raise Corrupt(f"record body: {len(body) - offset} bytes after its end")
    return parts


@dataclass(frozen=True, slots=True)
class MetaBody:
    """Says which name an object has from this record's sequence on, with its row (`kvfs.index.rows`)."""

    bucket: bytes
    key: bytes
    row: NameRow

    def encode(self) -> bytes:
        """Encode the body of a META record."""
        return _pack_strings(bucket=self.bucket, key=self.key, row=self.row.encode())

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode the body of a META record. Raises Corrupt."""
        bucket, key, row = _unpack_strings(body, "bucket", "key", "row")
        return cls(bucket, key, NameRow.decode(row))


def peek_meta(body: bytes) -> tuple[bytes, bytes]:
    """Return (`bucket NUL key`, encoded row) of an encoded MetaBody, ten times as fast as decoding.
    Raises Corrupt."""
    try:
        (bucket_bytes,) = _LENGTH.unpack_from(body, 0)
        key_at = 2 * _LENGTH.size + bucket_bytes
        (key_bytes,) = _LENGTH.unpack_from(body, key_at - _LENGTH.size)
        row_at = key_at + key_bytes + _LENGTH.size
        bucket, key = body[_LENGTH.size : _LENGTH.size + bucket_bytes], body[key_at : key_at + key_bytes]
        return bucket + b"\0" + key, body[row_at:]
    except struct.error:
        raise Corrupt(f"record body of {len(body)} bytes is no name") from None


@dataclass(frozen=True, slots=True)
class RenameBody:
    """Says that every name under a directory's key, as of this record's sequence, is under another one. The header has
    the id of the object whose new name is logged last: once that is there, so are the others."""

    source: tuple[bytes, bytes]
    target: tuple[bytes, bytes]
    """(bucket, key) of the directory; the key ends in '/'."""

    def encode(self) -> bytes:
        """Encode the body of a RENAME record."""
        return b"".join(_pack_strings(bucket=b, key=k) for b, k in (self.source, self.target))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode the body of a RENAME record. Raises Corrupt."""
        source, source_key, target, target_key = _unpack_strings(body, "bucket", "key", "bucket", "key")
        return cls((source, source_key), (target, target_key))

    def moved(self, meta: MetaBody) -> MetaBody:
        """Return the name that an object under the directory has instead."""
        return MetaBody(self.target[0], self.target[1] + meta.key[len(self.source[1]) :], meta.row)


@dataclass(frozen=True, slots=True)
class BucketBody:
    """Describes a bucket from this record's sequence on; a TOMBSTONE of its id ends it."""

    row: BucketRow

    def encode(self) -> bytes:
        """Encode the body of a BUCKET record."""
        return _pack_strings(bucket=self.row.name, row=self.row.encode())

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode the body of a BUCKET record. Raises Corrupt."""
        name, row = _unpack_strings(body, "bucket", "row")
        return cls(BucketRow.decode(name, row))


@dataclass(frozen=True, slots=True)
class TombstoneBody:
    """Ends all records of objects and buckets, by id: all at once, since the body has one checksum."""

    deleted_sequence: int
    """Every record that it deletes is older; reclaim keeps the tombstone while a segment that old exists."""
    object_ids: tuple[int, ...]

    def encode(self) -> bytes:
        """Encode the body of a TOMBSTONE record. Raises InvalidRequest for no ids, or too many."""
        count = len(self.object_ids)
        if not 0 < count <= limits.MAX_TOMBSTONE_IDS:
            raise InvalidRequest(f"tombstone of {count} ids: 1 to {limits.MAX_TOMBSTONE_IDS} are possible")
        return _TOMBSTONE.pack(self.deleted_sequence, count) + struct.pack(f"<{count}Q", *self.object_ids)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode the body of a TOMBSTONE record. Raises Corrupt."""
        if len(body) < _TOMBSTONE.size:
            raise Corrupt(f"record body: {len(body)} bytes where {_TOMBSTONE.size} are needed")
        deleted, count = _TOMBSTONE.unpack_from(body)
        if not 0 < count <= limits.MAX_TOMBSTONE_IDS or len(body) != _TOMBSTONE.size + 8 * count:
            raise Corrupt(f"record body: {count} ids in {len(body)} bytes")
        return cls(deleted, struct.unpack_from(f"<{count}Q", body, _TOMBSTONE.size))


def encode_footer(headers: Sequence[bytes], bodies: Sequence[bytes]) -> bytes:
    """Join the headers of a segment's records in order, then the bodies of those that have one."""
    return b"".join((*headers, *bodies))


def split_footer(footer: memoryview, records: int) -> tuple[memoryview, memoryview, int]:
    """Split a footer whose checksum holds into (headers, bodies, bytes of the records). Raises Corrupt."""
    body_at = records * RECORD_HEADER.size
    if body_at > len(footer):
        raise Corrupt(f"footer of {len(footer)} bytes: too short for {records} records")
    headers, bodies = footer[:body_at], footer[body_at:]
    bodies_bytes = records_bytes = 0
    for type_, body_bytes, record_bytes in _LENGTHS.iter_unpack(headers):
        if type_ == RecordType.FOOTER:
            raise Corrupt(f"footer of {len(footer)} bytes: it lists itself")
        bodies_bytes += body_bytes
        records_bytes += record_bytes
    if bodies_bytes != len(bodies):
        raise Corrupt(f"footer: bodies of {bodies_bytes} bytes, and {len(bodies)} bytes for them")
    return headers, bodies, records_bytes


def footer_records(footer: memoryview, records: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield (header fields, body) of each record of such a footer. Raises Corrupt."""
    headers, bodies, _ = split_footer(footer, records)
    return decode_records(headers, bodies)


def decode_records(headers: memoryview, bodies: memoryview) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield (header fields, body) of each record of what `split_footer` returned."""
    body_at = 0
    for fields in RECORD_HEADER.struct.iter_unpack(headers):
        raw = dict(zip(RECORD_HEADER.names, fields, strict=True))
        body_end = body_at + raw["body_bytes"]
        yield raw, bytes(bodies[body_at:body_end])
        body_at = body_end


_LENGTHS: Final = RECORD_HEADER.only("type", "body_bytes", "record_bytes")
