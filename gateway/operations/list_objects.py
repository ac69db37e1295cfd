"""ListObjects (1 and 2) and ListObjectVersions over the store's ordered names.

Responsibility: feed `gateway.protocol.list_pages`, which decides what a page holds, with the pages of the store.
Concurrency: one task per call; a bucket that changes meanwhile shows some state of each key.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from gateway.call.call import Answer, Call, document_answer
from gateway.call.object_view import Stored, stored
from gateway.protocol import list_pages
from gateway.protocol.list_pages import Listing, ListRequest, Page, Wanted
from gateway.xml import listings
from gateway.xml.items import ObjectItem
from kvfs import limits

_Render = Callable[[str, ListRequest, Listing[ObjectItem]], bytes]


async def list_objects(call: Call) -> Answer:
    """Answer ListObjects, version 1."""
    return await _list(call, list_pages.parse_v1(call.action.arguments), listings.list_objects_v1)


async def list_objects_v2(call: Call) -> Answer:
    """Answer ListObjectsV2."""
    return await _list(call, list_pages.parse_v2(call.action.arguments), listings.list_objects_v2)


async def list_object_versions(call: Call) -> Answer:
    """Answer ListObjectVersions: each object has one version."""
    request = list_pages.parse_versions(call.action.arguments)
    return await _list(call, request, listings.list_object_versions)


async def _list(call: Call, request: ListRequest, render: _Render) -> Answer:
    await call.backend.bucket(call.bucket)
    pages: Generator[Wanted, Page[ObjectItem], Listing[ObjectItem]] = list_pages.collect(request)
    try:
        wanted = next(pages)
        while True:
            wanted = pages.send(await _page(call, wanted))
    except StopIteration as end:
        found: Listing[ObjectItem] = end.value
    return document_answer(200, (), render(call.bucket, request, found))


async def _page(call: Call, wanted: Wanted) -> Page[ObjectItem]:
    """Read what the store has after `wanted.after`; a page of it may end before the limit without being the last."""
    entries: list[tuple[str, ObjectItem | None]] = []
    after: str | None = wanted.after
    while after is not None and len(entries) < wanted.limit:
        found = await call.backend.list(
            call.bucket,
            prefix=wanted.prefix,
            after=after,
            delimiter=wanted.delimiter,
            limit=min(wanted.limit - len(entries), limits.MAX_LIST_ENTRIES),
        )
        for key, row in found.entries:
            entries.append((key, None if row is None else _object_item(stored(row))))
        after = found.after
    return Page(entries, after is not None)


def _object_item(what: Stored) -> ObjectItem:
    """Describe an object as listings show it."""
    checksum = what.metadata.checksum
    return ObjectItem(
        what.size_bytes,
        what.etag,
        what.found.mtime_ns,
        what.metadata.owner,
        None if checksum is None else checksum.algorithm,
        None if checksum is None else checksum.type,
    )
