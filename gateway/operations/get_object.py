"""GetObject, HeadObject and GetObjectAttributes.

Responsibility: conditions, ranges and parts of a read, and its headers. Bytes leave from the slot itself
(`FileAnswer`); the open descriptor is the lease, so what overwrites or removes the key meanwhile changes nothing.

Concurrency: one task per call.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import lru_cache

from gateway.backend.lookup import ObjectLookup
from gateway.call import large_transfer
from gateway.call.call import Answer, AnyAnswer, Call, FileAnswer, HeadAnswer, document_answer, no_such_key
from gateway.call.large_transfer import LargeAnswer
from gateway.call.object_view import Stored, find_stored, read_metadata, stored, unpack_marker
from gateway.protocol import checksums, conditions, list_pages, metadata, ranges
from gateway.protocol import etag as etags
from gateway.protocol.checksums import Checksum, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.ranges import Span
from gateway.protocol.request import Request
from gateway.xml import responses
from gateway.xml.items import PartItem
from gateway.xml.writer import http_date
from kvfs import limits
from kvfs.errors import ObjectTooLarge

_OVERRIDES = {
    "response-content-type": "Content-Type",
    "response-content-language": "Content-Language",
    "response-expires": "Expires",
    "response-cache-control": "Cache-Control",
    "response-content-disposition": "Content-Disposition",
    "response-content-encoding": "Content-Encoding",
}

_PAGING = ("part-number-marker", "max-parts")
_OBJECT_ATTRIBUTES = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")


async def get_object(call: Call) -> AnyAnswer | LargeAnswer:
    """Answer GetObject: lease the object, from another machine where need be, and send it or a range."""
    try:
        opened = await call.backend.open(call.bucket, call.key)
        if opened is None and await call.backend.fetch(call.bucket, call.key):
            opened = await call.backend.open(call.bucket, call.key)
    except ObjectTooLarge:
        return await _get_large(call)
    if opened is None:
        raise no_such_key(call.key)
    found, descriptor = opened
    try:
        what, status, span, headers = _look_at(call, found)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    if descriptor < 0:
        return Answer(status, headers, what.inline[span.start : span.end])
    return FileAnswer(status, headers, descriptor, span.start, span.size_bytes)


async def _get_large(call: Call) -> LargeAnswer:
    """Read an object that no slot holds in pieces; it is leased before its metadata is read."""
    transfer = await large_transfer.begin(call.backend, call.owner)
    try:
        found = await transfer.open(call.bucket, call.key)
        _, status, span, headers = _look_at(call, found)
    except BaseException:
        transfer.close()
        raise
    return LargeAnswer(status, headers, transfer, span.start, span.size_bytes)


async def head_object(call: Call) -> AnyAnswer:
    """Answer HeadObject."""
    found = await call.backend.find(call.bucket, call.key)
    if found is None and await call.backend.fetch(call.bucket, call.key):
        found = await call.backend.find(call.bucket, call.key)
    if found is None:
        raise no_such_key(call.key)
    _, status, span, headers = _look_at(call, found)
    return HeadAnswer(status, headers, span.size_bytes)


async def get_object_attributes(call: Call) -> Answer:
    """Answer GetObjectAttributes."""
    names = call.request.header(b"x-amz-object-attributes")
    if not names:
        raise S3Error("InvalidArgument", "The header x-amz-object-attributes is missing.")
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in _OBJECT_ATTRIBUTES]
    if unknown:
        raise S3Error("InvalidArgument", f"There is no object attribute {unknown[0]!r}.")
    what = await find_stored(call)
    body = _object_attributes(wanted, what, call.request)
    return document_answer(200, [("Last-Modified", http_date(what.found.mtime_ns))], body)


def _object_attributes(wanted: Sequence[str], what: Stored, request: Request) -> bytes:
    """Make the document of GetObjectAttributes. Raises S3Error InvalidArgument."""
    said = {name: request.header(b"x-amz-" + name.encode()) or "" for name in _PAGING}
    given = {name: text for name, text in said.items() if text}
    marker = list_pages.parse_number(given, "part-number-marker")
    most = list_pages.parse_limit(given, "max-parts")
    parts = what.metadata.parts
    shown = list(enumerate(parts, 1))[marker : marker + most]
    checksum = what.metadata.checksum
    items = []
    for number, part in shown:
        own = None
        if checksum is not None and part.checksum:
            own = Checksum(checksum.algorithm, part.checksum, ChecksumType.FULL_OBJECT)
        items.append(PartItem(number, part.size_bytes, "", what.found.mtime_ns, own))
    return responses.object_attributes(
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


def _look_at(call: Call, found: ObjectLookup) -> tuple[Stored, int, Span, list[tuple[str, str]]]:
    """Check the conditions, and return what is there, the status, the bytes that are asked for, and the headers.

    Raises S3Error.
    """
    what = stored(found)
    conditions.check_read(call.conditions, what.etag, what.modified_s)
    span = _span(call, what)
    headers = _headers(call, what, span)
    return what, 200 if span is None else 206, span or Span(0, what.size_bytes), headers


def _span(call: Call, what: Stored) -> Span | None:
    """Return the bytes that are asked for; None: all of them. Raises S3Error InvalidRange, InvalidPartNumber."""
    part = call.action.part_number
    header = call.request.header(b"range")
    if part is None:
        return ranges.parse(header, what.size_bytes)
    if header is not None:
        raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
    return ranges.of_part([each.size_bytes for each in what.metadata.parts], part, what.size_bytes)


def _headers(call: Call, what: Stored, span: Span | None) -> list[tuple[str, str]]:
    found = what.found
    make = _remembered_headers
    if len(found.user_metadata) > limits.REMEMBERED_METADATA_BYTES:
        make = stored_headers
    headers = list(make(found.user_metadata, found.marker, found.mtime_ns, what.etag))
    headers += [("x-kvfs-tier", found.tier), ("x-kvfs-hits", str(found.hits))]
    if found.target:
        headers.append(("x-kvfs-symlink", "true"))
    if span is not None:
        headers.append(("Content-Range", ranges.content_range(span, what.size_bytes)))
    parts = what.metadata.parts
    if call.action.part_number is not None and parts:
        headers.append(("x-amz-mp-parts-count", str(len(parts))))
    if call.request.header_bytes(b"x-amz-checksum-mode") == b"ENABLED" and what.metadata.checksum:
        _add_checksum(headers, call, what, span)
    if call.request.raw_query:
        _override(headers, call)
    return headers


def stored_headers(data: bytes, marker: bool, mtime_ns: int, etag: str) -> tuple[tuple[str, str], ...]:
    """Make the headers that depend only on the object, whose user metadata is `data`."""
    parsed = unpack_marker(data)[0] if marker else read_metadata(data)
    headers = [
        ("ETag", etags.quote(etag)),
        ("Last-Modified", http_date(mtime_ns)),
        ("Accept-Ranges", "bytes"),
    ]
    return (*headers, *metadata.response_headers(parsed))


_remembered_headers: Callable[[bytes, bool, int, str], tuple[tuple[str, str], ...]]
_remembered_headers = lru_cache(maxsize=4096)(stored_headers)


def _add_checksum(headers: list[tuple[str, str]], call: Call, what: Stored, span: Span | None) -> None:
    """Add the checksum of the whole object, or of the part that is asked for; a mere range has none."""
    checksum = what.metadata.checksum
    assert checksum is not None
    number = call.action.part_number
    if number is not None and what.metadata.parts:
        digest = what.metadata.parts[number - 1].checksum
        if digest:
            headers.append((checksum.algorithm.header, b64encode(digest).decode()))
            headers.append(("x-amz-checksum-type", checksum.type.value))
    elif span is None or span.size_bytes == what.size_bytes:
        headers += checksums.headers(checksum).items()


def _override(headers: list[tuple[str, str]], call: Call) -> None:
    """Override headers by response-content-type and its like, which only signed requests have. Raises S3Error."""
    for name, header in _OVERRIDES.items():
        value = call.action.arguments.get(name)
        if value is None:
            continue
        if not value.isprintable() or not value.isascii():
            raise S3Error("InvalidArgument", f"The value of {name} cannot stand in a header.")
        headers[:] = [pair for pair in headers if pair[0].lower() != header.lower()]
        headers.append((header, value))
