"""The format of objects in the cold tier's bucket: their names, and the header before their bytes.

Responsibility: names and headers, both ways (docs/formats.md); pure functions.

Invariants:
- A remote name is never used twice: object ids are not given out again (`kvfs.index.environment`), and a block's has
  its own.
- What is read under a name is believed only if its header says the same object and size, and its own checksum and
  that of the bytes hold. So a bucket that answers with another object's bytes, or with half of them, gives a miss.
- Names sort as their keys do: a listing of the bucket can be held against the index page by page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, FormatMismatch
from kvfs.formats import COLD_HEADER, COLD_MAGIC, COLD_VERSION
from tiers.model.tier import Kind, StoreKey, object_key

HEADER_BYTES: Final = COLD_HEADER.size
OWNER: Final = "owner.json"
BUCKETS: Final = "buckets/"
BLOCKS: Final = "blocks/"
OBJECTS: Final = "objects/"
NO_PARENT: Final = bytes(16)

_BLOCK = re.compile(r"blocks/([0-9a-f]{2})/([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{16})-([^/]{1,63})")
_OBJECT = re.compile(r"objects/([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class ColdName:
    """Names an object in the bucket."""

    key: StoreKey
    object_id: int
    parent: bytes = NO_PARENT
    """Of a block: the prefix hash before it, or zeros."""
    bucket: bytes = b""
    """Of a block: the bucket that it was sealed into."""

    @property
    def parent_or_none(self) -> bytes | None:
        """Return the hash of the block before this one; None for a first block or a named object."""
        return self.parent if any(self.parent) else None

    def __str__(self) -> str:
        if self.key.kind is Kind.OBJECT:
            return f"{OBJECTS}{self.object_id:016x}"
        digest = self.key.digest.hex()
        return (
            f"{BLOCKS}{digest[:2]}/{digest}-{self.parent.hex()}-{self.object_id:016x}-{self.bucket.decode()}"
        )


def parse_name(text: str) -> ColdName | None:
    """Return the object of a remote name, without the tier's prefix; None for what is no object's."""
    if found := _OBJECT.fullmatch(text):
        object_id = int(found[1], 16)
        return ColdName(object_key(object_id), object_id)
    if (found := _BLOCK.fullmatch(text)) and found[2].startswith(found[1]):
        key = StoreKey(Kind.BLOCK, bytes.fromhex(found[2]))
        return ColdName(key, int(found[4], 16), bytes.fromhex(found[3]), found[5].encode())
    return None


@dataclass(frozen=True, slots=True)
class ColdHeader:
    """Describes an object before its bytes."""

    name: ColdName
    size_bytes: int
    checksum: int
    """XXH3-64 of the payload."""
    sealed_at_ns: int
    uid: int

    def encode(self, store_id: bytes) -> bytes:
        """Encode the header for the store with this id."""
        head = COLD_HEADER.encode(
            magic=COLD_MAGIC,
            version=COLD_VERSION,
            kind=int(self.name.key.kind),
            store_id=store_id,
            key=self.name.key.digest,
            parent=self.name.parent,
            object_id=self.name.object_id,
            size_bytes=self.size_bytes,
            checksum=self.checksum,
            sealed_at_ns=self.sealed_at_ns,
            uid=self.uid,
        )[:-8]
        return head + xxh3_64(head).to_bytes(8, "little")


def decode_header(data: bytes | memoryview, name: ColdName, size_bytes: int) -> ColdHeader:
    """Decode the header that was read under `name`. Raises Corrupt where it is of another object or size,
    FormatMismatch."""
    raw = COLD_HEADER.decode(data)
    if raw["magic"] != COLD_MAGIC:
        raise Corrupt(f"{name}: magic {raw['magic']!r} instead of {COLD_MAGIC!r}")
    if raw["header_checksum"] != xxh3_64(data[: HEADER_BYTES - 8]):
        raise Corrupt(f"{name}: its header does not match its checksum")
    if raw["version"] != COLD_VERSION:
        raise FormatMismatch(f"{name}: version {raw['version']}, this code reads {COLD_VERSION}")
    found = (raw["kind"], raw["key"], raw["parent"], raw["object_id"], raw["size_bytes"])
    key = name.key
    if found != (int(key.kind), key.digest, name.parent, name.object_id, size_bytes):
        raise Corrupt(f"{name}: its header is of another object")
    return ColdHeader(name, size_bytes, raw["checksum"], raw["sealed_at_ns"], raw["uid"])


def check_payload(payload: memoryview, header: ColdHeader) -> None:
    """Check that a payload has the header's size and checksum. Raises Corrupt."""
    if len(payload) != header.size_bytes or xxh3_64(payload) != header.checksum:
        raise Corrupt(f"{header.name}: its {len(payload)} bytes do not match their checksum")
