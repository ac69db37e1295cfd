"""Parts of answers that several operations share. Concurrency: pure functions."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from gateway import documents, listing
from gateway.calls import Stored
from gateway.checksums import Checksum, ChecksumType
from gateway.documents import ObjectItem, PartItem
from gateway.request import Request

http_date = documents.http_date
_PAGING = ("part-number-marker", "max-parts")
OBJECT_ATTRIBUTES = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")


def base64_text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def object_item(what: Stored) -> ObjectItem:
    """As listings show an object."""
    checksum = what.metadata.checksum
    return ObjectItem(
        what.size_bytes,
        what.etag,
        what.found.mtime_ns,
        what.metadata.owner,
        None if checksum is None else checksum.algorithm,
        None if checksum is None else checksum.type,
    )


def object_attributes(wanted: Sequence[str], what: Stored, request: Request) -> bytes:
    """The document of GetObjectAttributes. Raises S3Error InvalidArgument."""
    said = {name: request.header(b"x-amz-" + name.encode()) or "" for name in _PAGING}
    given = {name: text for name, text in said.items() if text}
    marker = listing.parse_number(given, "part-number-marker")
    most = listing.parse_limit(given, "max-parts")
    parts = what.metadata.parts
    shown = list(enumerate(parts, 1))[marker : marker + most]
    checksum = what.metadata.checksum
    items = []
    for number, part in shown:
        own = None
        if checksum is not None and part.checksum:
            own = Checksum(checksum.algorithm, part.checksum, ChecksumType.FULL_OBJECT)
        items.append(PartItem(number, part.size_bytes, "", what.found.mtime_ns, own))
    return documents.object_attributes(
        wanted,
        etag=what.etag,
        size_bytes=what.size_bytes,
        checksum=checksum,
        parts=items,
        total_parts=len(parts),
        marker=marker,
        max_parts=most,
        truncated=marker + len(shown) < len(parts),
    )
