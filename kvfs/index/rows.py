"""What the rows of the name index hold, down to the byte.

Responsibility: `NameRow` (a name's value) and `BucketRow` (a bucket's value), their encoding, and the checksum
that binds a row to its name: LMDB has none, and another name's row would mean another object's bytes.
All integers are little-endian. The first byte of a row is its version; a row of another version, of a wrong
length or with a non-zero reserved field is `Corrupt`.

    NameRow    version u8 = 1 | digest length u8 (0 or 16) | reserved u16 = 0 | flags u32 | mode u32
               | uid u32 | gid u32 | object_id u64 | ino u64 | size_bytes u64 | sequence u64
               | mtime_ns i64 | ctime_ns i64 | digest | target (size_bytes, of a symbolic link only)
               | user metadata (the rest)
    BucketRow  version u8 = 1 | class u8 (1 cache, 2 durable) | namespace digest length u8 (0 or 16)
               | flags u8 (bit 0: ghost admission, bit 1: large) | bucket_id u32 | uid u32 | gid u32 | mode u32
               | created_ns i64 | mtime_ns i64 | namespace digest | namespace description (the rest)

    stored     row | the low 32 bits of XXH3-64 over key and row

Concurrency: values only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, InvalidRequest, LimitExceeded
from kvfs.limits import MAX_LINK_TARGET_BYTES, MAX_NAMESPACE_BYTES, MAX_USER_METADATA_BYTES

PINNED: Final = 1
"""`NameRow.flags`: never evicted."""
DIRECTORY: Final = 2
"""`NameRow.flags`: the marker of an empty directory; it has no bytes in any tier."""
SNAPSHOT: Final = 4
"""`NameRow.flags`, in the log only: a file still being written, as it was when its writer asked for durability."""
RETIRED: Final = 8
"""`NameRow.flags`: a closed or renamed file is about to take the name, and its close or rename was answered: a start
does not restore the name's object."""
LINK: Final = 16
"""`NameRow.flags`: a symbolic link, whose target is in the row."""
ROW_ONLY: Final = DIRECTORY | LINK
"""`NameRow.flags`: the row is all that there is: no tier has bytes of it."""

GHOST_ADMISSION: Final = 1
"""`BucketRow.flags`: NVMe takes an object only when it is read or written again."""
LARGE: Final = 2
"""`BucketRow.flags`: files written on the mount go to NVMe extent by extent, and may be larger than DRAM takes."""
_BUCKET_FLAGS: Final = GHOST_ADMISSION | LARGE

DIGEST_BYTES: Final = 16
ROW_VERSION: Final = 1
MAX_BUCKET_ID: Final = (1 << 32) - 1
"""The slot header and the records of segments have four bytes for it; 0 stands for no bucket."""

_NAME = struct.Struct("<BBHIIIIQQQQqq")
_BUCKET = struct.Struct("<BBBBIIIIqq")
_CHECK_BYTES: Final = 4
_FLAGS_OFFSET: Final = 4
_FLAGS = struct.Struct("<I")
_PEEK = struct.Struct("<4xI12xQ")
_SIZE = struct.Struct("<36xQ")
_U32 = (0, (1 << 32) - 1)
_U64 = (0, (1 << 64) - 1)
_I64 = (-(1 << 63), (1 << 63) - 1)
_RANGES: Final = {
    "bucket_id": (1, MAX_BUCKET_ID),
    "flags": _U32,
    "mode": _U32,
    "uid": _U32,
    "gid": _U32,
    "object_id": _U64,
    "ino": _U64,
    "size_bytes": _U64,
    "sequence": _U64,
    "mtime_ns": _I64,
    "ctime_ns": _I64,
    "created_ns": _I64,
}

BucketClass = Literal["cache", "durable"]
_CLASS_CODES: Final[dict[str, int]] = {"cache": 1, "durable": 2}
_CLASSES: Final[dict[int, BucketClass]] = {1: "cache", 2: "durable"}


def _out_of_range(row: object) -> InvalidRequest:
    """Return an error that names the field that made `struct` refuse `row`."""
    for name, (low, high) in _RANGES.items():
        value = getattr(row, name, low)
        if not isinstance(value, int) or not low <= value <= high:
            return InvalidRequest(f"{type(row).__name__}.{name} is {value!r}, outside {low} to {high}")
    return InvalidRequest(f"{type(row).__name__} cannot be encoded: {row!r}")


@dataclass(frozen=True, slots=True)
class NameRow:
    """What a name stands for. `digest` is the 16-byte store key of a block, or empty for a named object."""

    object_id: int
    ino: int
    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    sequence: int
    flags: int
    digest: bytes = b""
    user_metadata: bytes = b""
    target: bytes = b""
    """Where a symbolic link leads: `size_bytes` bytes without NUL; of anything else none."""

    def encode(self) -> bytes:
        """Return the row's bytes. Raises InvalidRequest, LimitExceeded naming the field."""
        if len(self.digest) not in (0, DIGEST_BYTES):
            raise InvalidRequest(f"NameRow.digest has {len(self.digest)} bytes, not 0 or {DIGEST_BYTES}")
        if len(self.user_metadata) > MAX_USER_METADATA_BYTES:
            raise LimitExceeded(
                f"user metadata has {len(self.user_metadata)} bytes, the limit is {MAX_USER_METADATA_BYTES}"
            )
        if self.flags & LINK or self.target:
            self._check_target()
        try:
            head = _NAME.pack(
                ROW_VERSION,
                len(self.digest),
                0,
                self.flags,
                self.mode,
                self.uid,
                self.gid,
                self.object_id,
                self.ino,
                self.size_bytes,
                self.sequence,
                self.mtime_ns,
                self.ctime_ns,
            )
        except struct.error:
            raise _out_of_range(self) from None
        return head + self.digest + self.target + self.user_metadata

    def _check_target(self) -> None:
        fits = is_link_target(self.target) and self.size_bytes == len(self.target)
        if not (self.flags & LINK and fits):
            raise InvalidRequest(
                f"NameRow.target of {len(self.target)} bytes, of an object of {self.size_bytes}"
            )

    @classmethod
    def decode(cls, data: bytes) -> NameRow:
        """Return the row that `encode` wrote. Raises Corrupt."""
        if not is_name_row(data):
            raise Corrupt(f"name row of {len(data)} bytes that begins with {data[:4].hex()}")
        (
            _, digest_length, _, flags, mode, uid, gid,
            object_id, ino, size_bytes, sequence, mtime_ns, ctime_ns,
        ) = _NAME.unpack_from(data)  # fmt: skip
        end = _NAME.size + digest_length
        tail = end + size_bytes if flags & LINK else end
        return cls(
            object_id, ino, size_bytes, mode, uid, gid, mtime_ns, ctime_ns, sequence, flags,
            data[_NAME.size : end], data[tail:], data[end:tail],
        )  # fmt: skip


_LEAST_BYTES: Final = {
    bytes((ROW_VERSION, digest_bytes, 0, 0)): _NAME.size + digest_bytes for digest_bytes in (0, DIGEST_BYTES)
}
"""The first bytes of a NameRow, and its least length with each of them."""


def is_name_row(data: bytes) -> bool:
    """Return whether `NameRow.decode` takes these bytes, in a tenth of its time."""
    least = _LEAST_BYTES.get(data[:4], len(data) + 1)
    return len(data) >= least and (not data[_FLAGS_OFFSET] & LINK or _has_target(data, least))


def _has_target(data: bytes, start: int) -> bool:
    (size_bytes,) = _SIZE.unpack_from(data)
    target = data[start : start + min(size_bytes, MAX_LINK_TARGET_BYTES)]
    return len(target) == size_bytes and is_link_target(target)


def is_link_target(target: bytes) -> bool:
    """Return whether a symbolic link can lead there."""
    return 1 <= len(target) <= MAX_LINK_TARGET_BYTES and b"\0" not in target


def store_row(key: bytes, row: bytes) -> bytes:
    """Return what the index stores under `key` for an encoded row."""
    return row + _check(key, row)


def load_row(key: bytes, stored: bytes) -> bytes:
    """Return the encoded row that was stored under `key`. Raises Corrupt where the checksum over both differs."""
    row = stored[:-_CHECK_BYTES]
    if stored[-_CHECK_BYTES:] != _check(key, row):
        raise Corrupt(f"row {key[:80]!r} of the name index does not match its checksum")
    return row


def row_of(key: bytes, stored: bytes) -> NameRow:
    """Decode the row of a name as it is stored. Raises Corrupt."""
    return NameRow.decode(load_row(key, stored))


def _check(key: bytes, row: bytes) -> bytes:
    return xxh3_64(key + row).to_bytes(8, "little")[:_CHECK_BYTES]


def is_directory_row(data: bytes) -> bool:
    """Return whether an encoded NameRow has the DIRECTORY flag, without decoding the rest."""
    return len(data) > _FLAGS_OFFSET and bool(data[_FLAGS_OFFSET] & DIRECTORY)


def peek_row(data: bytes) -> tuple[int, int]:
    """Return (object id, flags) of an encoded NameRow, in a tenth of the time of `decode`. Raises Corrupt."""
    try:
        flags, object_id = _PEEK.unpack_from(data)
    except struct.error:
        raise Corrupt(f"name row has {len(data)} bytes, fewer than {_PEEK.size}") from None
    return object_id, flags


def clear_flags(data: bytes, flags: int) -> bytes:
    """Return an encoded NameRow without these flags."""
    (found,) = _FLAGS.unpack_from(data, _FLAGS_OFFSET)
    if not found & flags:
        return data
    return data[:_FLAGS_OFFSET] + _FLAGS.pack(found & ~flags) + data[_FLAGS_OFFSET + _FLAGS.size :]


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A bucket. `namespace` is the 16-byte digest of the namespace that it is bound to, if any.

    `bucket_id` stands for the bucket where a name would be too long, such as in the headers of its blocks; it is never
    0, never changes, and is never given out again.
    """

    name: bytes
    bucket_id: int
    class_: BucketClass
    uid: int
    gid: int
    mode: int
    created_ns: int
    mtime_ns: int
    namespace: bytes | None = None
    namespace_json: bytes = b""
    flags: int = 0

    def encode(self) -> bytes:
        """Return the row's bytes; the name is the key and not part of them. Raises InvalidRequest, LimitExceeded."""
        code = _CLASS_CODES.get(self.class_)
        if code is None:
            raise InvalidRequest(f"bucket class is {self.class_!r}, not one of {sorted(_CLASS_CODES)}")
        digest = self.namespace or b""
        if len(digest) not in (0, DIGEST_BYTES):
            raise InvalidRequest(f"BucketRow.namespace has {len(digest)} bytes, not {DIGEST_BYTES}")
        if len(self.namespace_json) > MAX_NAMESPACE_BYTES:
            raise LimitExceeded(
                f"bucket {self.name!r}: a namespace of {len(self.namespace_json)} bytes, "
                f"the limit is {MAX_NAMESPACE_BYTES}"
            )
        if self.bucket_id == 0 or self.flags & ~_BUCKET_FLAGS:
            raise _out_of_range(self)
        try:
            head = _BUCKET.pack(
                ROW_VERSION,
                code,
                len(digest),
                self.flags,
                self.bucket_id,
                self.uid,
                self.gid,
                self.mode,
                self.created_ns,
                self.mtime_ns,
            )
        except struct.error:
            raise _out_of_range(self) from None
        return head + digest + self.namespace_json

    @classmethod
    def decode(cls, name: bytes, data: bytes) -> BucketRow:
        """Return the row that `encode` wrote under `name`. Raises Corrupt."""
        if len(data) < _BUCKET.size:
            raise Corrupt(f"row of bucket {name!r} has {len(data)} bytes, fewer than {_BUCKET.size}")
        (
            version, code, digest_length, flags, bucket_id, uid, gid, mode, created_ns, mtime_ns,
        ) = _BUCKET.unpack_from(data)  # fmt: skip
        end = _BUCKET.size + digest_length
        known = version == ROW_VERSION and code in _CLASSES and digest_length in (0, DIGEST_BYTES)
        if not known or not bucket_id or flags & ~_BUCKET_FLAGS or end > len(data):
            raise Corrupt(f"row of bucket {name!r}: version {version}, class {code}, digest {digest_length}")
        class_ = _CLASSES[code]
        namespace = data[_BUCKET.size : end] or None
        return cls(
            name, bucket_id, class_, uid, gid, mode, created_ns, mtime_ns, namespace, data[end:], flags
        )
