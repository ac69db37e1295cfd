"""ListObjects (1 and 2) and ListObjectVersions over the store's ordered names.

Responsibility: feed `gateway.listing`, which decides what a page holds, with the pages of the store.
Concurrency: one task per call; a bucket that changes meanwhile shows some state of each key.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from gateway import documents, listing
from gateway.answers import object_item
from gateway.calls import Answer, Call, Document
from gateway.documents import ObjectItem
from gateway.listing import Listing, ListRequest, Page, Wanted
from gateway.stored import stored
from kvfs import limits

_Render = Callable[[str, ListRequest, Listing[ObjectItem]], bytes]


async def list_objects(call: Call) -> Answer:
    return await _list(call, listing.parse_v1(call.action.arguments), documents.list_objects_v1)


async def list_objects_v2(call: Call) -> Answer:
    return await _list(call, listing.parse_v2(call.action.arguments), documents.list_objects_v2)


async def list_object_versions(call: Call) -> Answer:
    request = listing.parse_versions(call.action.arguments)
    return await _list(call, request, documents.list_object_versions)


async def _list(call: Call, request: ListRequest, render: _Render) -> Answer:
    await call.backend.bucket(call.bucket)
    pages: Generator[Wanted, Page[ObjectItem], Listing[ObjectItem]] = listing.collect(request)
    try:
        wanted = next(pages)
        while True:
            wanted = pages.send(await _page(call, wanted))
    except StopIteration as end:
        found: Listing[ObjectItem] = end.value
    return Document(200, (), render(call.bucket, request, found))


async def _page(call: Call, wanted: Wanted) -> Page[ObjectItem]:
    """What the store has after `wanted.after`; a page of it may end before the limit without being the last."""
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
            entries.append((key, None if row is None else object_item(stored(row))))
        after = found.after
    return Page(entries, after is not None)
