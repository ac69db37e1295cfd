"""Objects with their metadata: what the store found, as S3 sees it.

Responsibility: read an object's user metadata, its ETag, and the body of a marker. A key that ends in '/' is a
directory's marker to the store and has no bytes of its own: what S3 put there, up to limits.MAX_MARKER_BODY_BYTES,
is kept behind its metadata.

Invariants: metadata that another door wrote, or that is damaged, is no failure: the object is then one that this door
did not write. Concurrency: pure functions, memoised.
"""

from __future__ import annotations

import logging
import struct
from functools import lru_cache

from gateway import etag as etags
from gateway.calls import Stored
from gateway.found import Found
from gateway.metadata import ObjectMetadata
from kvfs import limits
from kvfs.errors import Corrupt

log = logging.getLogger("kvfs.gateway")

_MARKER = struct.Struct("<8sI")
_MARKER_MAGIC = b"kvfs-dir"
_DIRECTORY = ObjectMetadata(content_type="application/x-directory")


def read_metadata(data: bytes) -> ObjectMetadata:
    """Remembered where it is short: of the others, 4,096 would take 256 MiB."""
    return _read_remembered(data) if len(data) <= limits.REMEMBERED_METADATA_BYTES else _read(data)


def _read(data: bytes) -> ObjectMetadata:
    try:
        return ObjectMetadata.decode(data)
    except Corrupt as error:
        log.warning("an object's metadata cannot be read: %s", error)
        return ObjectMetadata()


_read_remembered = lru_cache(maxsize=4096)(_read)


def stored(found: Found) -> Stored:
    """`found` with what its user metadata says."""
    if found.marker:
        metadata, inline = unpack_marker(found.user_metadata)
    else:
        metadata, inline = read_metadata(found.user_metadata), b""
    return Stored(found, metadata, etags.of_object(metadata.etag, found.object_id), inline)


def pack_marker(metadata: ObjectMetadata, body: bytes) -> bytes:
    """The user metadata of a directory's marker."""
    encoded = metadata.encode()
    return _MARKER.pack(_MARKER_MAGIC, len(encoded)) + encoded + body


def unpack_marker(data: bytes) -> tuple[ObjectMetadata, bytes]:
    if len(data) < _MARKER.size:
        return _DIRECTORY, b""
    magic, length = _MARKER.unpack_from(data)
    if magic != _MARKER_MAGIC or _MARKER.size + length > len(data):
        return _DIRECTORY, b""
    end = _MARKER.size + length
    return read_metadata(data[_MARKER.size : end]), data[end:]
