"""Objects of the store with their metadata, as S3 sees them.

Responsibility: read an object's user metadata, its ETag, and the body of a marker. A key that ends in '/' is a
directory's marker to the store and has no bytes of its own: a body that S3 put there, up to
limits.MAX_MARKER_BODY_BYTES, is kept behind its metadata.

Invariants: metadata that another door wrote, or that is damaged, is no failure: the object counts as one that this door
did not write. Concurrency: pure functions, memoised.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from functools import lru_cache

from gateway.backend.lookup import ObjectLookup
from gateway.call.call import Call, no_such_key
from gateway.protocol import etag as etags
from gateway.protocol.metadata import ObjectMetadata
from kvfs import limits
from kvfs.errors import Corrupt

log = logging.getLogger("kvfs.gateway")

_MARKER = struct.Struct("<8sI")
_MARKER_MAGIC = b"kvfs-dir"
_DIRECTORY = ObjectMetadata(content_type="application/x-directory")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object with its metadata read."""

    found: ObjectLookup
    metadata: ObjectMetadata
    etag: str
    inline: bytes = b""
    """The body, where the object is a marker or a symbolic link."""

    @property
    def size_bytes(self) -> int:
        """Return the object's size; of a directory's marker, that of its inline body."""
        return len(self.inline) if self.found.marker else self.found.size_bytes

    @property
    def modified_s(self) -> int:
        """Return the time of modification in whole seconds since 1970, as HTTP shows it."""
        return self.found.mtime_ns // 1_000_000_000


def read_metadata(data: bytes) -> ObjectMetadata:
    """Read metadata, and remember those that are short: 4,096 of the others would take 256 MiB."""
    return _read_remembered(data) if len(data) <= limits.REMEMBERED_METADATA_BYTES else _read(data)


def _read(data: bytes) -> ObjectMetadata:
    try:
        return ObjectMetadata.decode(data)
    except Corrupt as error:
        log.warning("an object's metadata cannot be read: %s", error)
        return ObjectMetadata()


_read_remembered = lru_cache(maxsize=4096)(_read)


def stored(found: ObjectLookup) -> Stored:
    """Read the user metadata of an object."""
    if found.marker:
        metadata, inline = unpack_marker(found.user_metadata)
    else:
        metadata, inline = read_metadata(found.user_metadata), found.target
    return Stored(found, metadata, etags.of_object(metadata.etag, found.object_id), inline)


def pack_marker(metadata: ObjectMetadata, body: bytes) -> bytes:
    """Encode the user metadata of a directory's marker."""
    encoded = metadata.encode()
    return _MARKER.pack(_MARKER_MAGIC, len(encoded)) + encoded + body


def unpack_marker(data: bytes) -> tuple[ObjectMetadata, bytes]:
    """Split a directory's user metadata into S3's metadata and body; of one not made by S3, defaults."""
    if len(data) < _MARKER.size:
        return _DIRECTORY, b""
    magic, length = _MARKER.unpack_from(data)
    if magic != _MARKER_MAGIC or _MARKER.size + length > len(data):
        return _DIRECTORY, b""
    end = _MARKER.size + length
    return read_metadata(data[_MARKER.size : end]), data[end:]


async def find_stored(call: Call) -> Stored:
    """Find the object that a request is about. Raises S3Error NoSuchKey; BucketNotFound."""
    found = await call.backend.find(call.bucket, call.key)
    if found is None:
        raise no_such_key(call.key)
    return stored(found)
