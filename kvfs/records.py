"""The bodies of a segment's META, RENAME and TOMBSTONE records: names as the log keeps them.

Responsibility: turn a body into bytes and back; the header around it is `kvfs.formats.RecordHeader`, which
carries object id, key, sequence, generation and the body's checksum.

Invariants: a body is a fixed part, then byte strings, each behind its u32 length, and nothing after them;
decoding any other bytes raises Corrupt.
Concurrency: pure functions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

from kvfs import limits
from kvfs.errors import Corrupt, InvalidRequest

_META: Final = struct.Struct("<QQqqIIII")
_RENAME: Final = struct.Struct("<QQ")
_TOMBSTONE: Final = struct.Struct("<QQ")
_LENGTH: Final = struct.Struct("<I")

_LONGEST: Final = {
    "bucket": limits.MAX_BUCKET_NAME_BYTES,
    "key": limits.MAX_KEY_BYTES,
    "new_bucket": limits.MAX_BUCKET_NAME_BYTES,
    "new_key": limits.MAX_KEY_BYTES,
    "etag": limits.MAX_KEY_BYTES,
    "user_metadata": limits.MAX_XATTR_VALUE_BYTES,
}


def _pack_strings(**parts: bytes) -> bytes:
    out = bytearray()
    for name, part in parts.items():
        if len(part) > _LONGEST[name]:
            raise InvalidRequest(f"{name} of {len(part)} bytes, the limit is {_LONGEST[name]}")
        out += _LENGTH.pack(len(part)) + part
    return bytes(out)


def _unpack_strings(body: bytes, offset: int, *names: str) -> list[bytes]:
    parts = []
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


def _fixed(layout: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) < layout.size:
        raise Corrupt(f"record body: {len(body)} bytes where {layout.size} are needed")
    return layout.unpack_from(body)


@dataclass(frozen=True, slots=True)
class MetaBody:
    """A name and the object that it stands for from this record's sequence on."""

    bucket: bytes
    key: bytes
    object_id: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int
    flags: int = 0
    """Bit 0: pinned. The bucket's class decides about eviction, not the name."""
    etag: bytes = b""
    user_metadata: bytes = b""

    def encode(self) -> bytes:
        fixed = (
            self.object_id,
            self.size_bytes,
            self.mtime_ns,
            self.ctime_ns,
            self.mode,
            self.uid,
            self.gid,
            self.flags,
        )
        return _META.pack(*fixed) + _pack_strings(
            bucket=self.bucket, key=self.key, etag=self.etag, user_metadata=self.user_metadata
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        object_id, size, mtime, ctime, mode, uid, gid, flags = _fixed(_META, body)
        bucket, key, etag, metadata = _unpack_strings(
            body, _META.size, "bucket", "key", "etag", "user_metadata"
        )
        return cls(bucket, key, object_id, size, mtime, ctime, mode, uid, gid, flags, etag, metadata)


@dataclass(frozen=True, slots=True)
class RenameBody:
    """The object `object_id` has another name from this record's sequence on; what had that name is gone."""

    bucket: bytes
    key: bytes
    new_bucket: bytes
    new_key: bytes
    object_id: int
    replaced_object_id: int = 0

    def encode(self) -> bytes:
        return _RENAME.pack(self.object_id, self.replaced_object_id) + _pack_strings(
            bucket=self.bucket, key=self.key, new_bucket=self.new_bucket, new_key=self.new_key
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        object_id, replaced = _fixed(_RENAME, body)
        bucket, key, new_bucket, new_key = _unpack_strings(
            body, _RENAME.size, "bucket", "key", "new_bucket", "new_key"
        )
        return cls(bucket, key, new_bucket, new_key, object_id, replaced)


@dataclass(frozen=True, slots=True)
class TombstoneBody:
    """Older records of this name, or (without a name) of the header's key, count no more."""

    object_id: int
    deleted_sequence: int
    """The newest record that it deletes; reclaim keeps the tombstone while one that old exists."""
    bucket: bytes = b""
    key: bytes = b""

    def encode(self) -> bytes:
        return _TOMBSTONE.pack(self.object_id, self.deleted_sequence) + _pack_strings(
            bucket=self.bucket, key=self.key
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        object_id, deleted = _fixed(_TOMBSTONE, body)
        bucket, key = _unpack_strings(body, _TOMBSTONE.size, "bucket", "key")
        return cls(object_id, deleted, bucket, key)
