"""CopyObject, and what UploadPartCopy shares with it.

Responsibility: a source with its conditions and range, and copying its bytes into a draft, in a worker thread and in
the kernel where no digest is wanted. Objects larger than DRAM takes are read, and written, window by window. A copy
onto itself changes metadata only: no byte moves.

Invariants: the source's descriptor, or transfer, is its lease from before the conditions are checked until the copy is
sealed.

Concurrency: one task per call, one worker thread per copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import md5
from typing import Any, TypeVar

import trio

from gateway import checksums, conditions, documents, large, metadata, ranges
from gateway import etag as etags
from gateway.calls import Answer, Call, Document, Stored, no_such_key
from gateway.checksums import Algorithm, Checksum, ChecksumType
from gateway.drafts import Draft
from gateway.errors import S3Error
from gateway.large import Transfer
from gateway.metadata import ObjectMetadata
from gateway.moving import copy_range
from gateway.ranges import Span
from gateway.stored import pack_marker, stored
from gateway.writing import check_size, is_large, is_pinned, write_condition
from kvfs import limits
from kvfs.errors import ObjectTooLarge

_SOURCE = b"x-amz-copy-source-"
_Target = TypeVar("_Target")
_KEPT = ("content_type", "headers", "user")
_CHANGES = (b"x-amz-checksum-algorithm", b"x-amz-storage-class")
"""With one of these a copy onto itself is one that changes something, as S3 sees it."""


@dataclass(frozen=True, slots=True)
class Source:
    """An open source object."""

    what: Stored
    descriptor: int
    """-1 for a marker, and for what no slot holds."""
    transfer: Transfer | None = None
    """That of an object that no slot holds."""

    async def pieces(self, span: Span) -> AsyncGenerator[tuple[int, int, int], None]:
        """(descriptor, offset, count) of the span's bytes, each to be copied before the next is asked for."""
        at = span.start
        while at < span.end:
            if self.transfer is None:
                count = min(span.end - at, limits.COPY_TURN_BYTES)
                yield self.descriptor, at, count
            else:
                count = await self.transfer.read(at, span.end - at)
                yield self.transfer.window.descriptor, 0, count
            at += count


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy as it was sealed: by now its key may stand for another object."""

    said: ObjectMetadata
    object_id: int
    mtime_ns: int

    @property
    def etag(self) -> str:
        return etags.of_object(self.said.etag, self.object_id)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What is copied, and which digests are taken on the way."""

    source: Source
    span: Span
    take_md5: bool
    algorithm: Algorithm | None


@asynccontextmanager
async def open_source(call: Call) -> AsyncIterator[Source]:
    """The source of a copy. Raises S3Error AccessDenied, NoSuchKey, PreconditionFailed; BucketNotFound."""
    named = call.action.source
    assert named is not None
    await call.need_right("read", named.bucket, of_source=True)
    async with _opened(call, named.bucket, named.key) as source:
        wanted = conditions.from_headers(call.request, _SOURCE)
        conditions.check_source(wanted, source.what.etag, source.what.modified_s)
        yield source


@asynccontextmanager
async def _opened(call: Call, bucket: str, key: str) -> AsyncIterator[Source]:
    try:
        opened = await call.backend.open(bucket, key)
    except ObjectTooLarge:
        async with large.reading(call.backend, call.owner, bucket, key) as (transfer, found):
            yield Source(stored(found), -1, transfer)
        return
    if opened is None:
        raise no_such_key(key)
    found, descriptor = opened
    try:
        yield Source(stored(found), descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def part_span(call: Call, source: Source) -> Span:
    """What UploadPartCopy takes of its source. Raises S3Error InvalidArgument, InvalidRange."""
    header = call.request.header(b"x-amz-copy-source-range")
    return ranges.of_copy(header, source.what.size_bytes)


async def copy_object(call: Call) -> Answer:
    await call.backend.bucket(call.bucket)
    named = call.action.source
    assert named is not None
    replaces = _directive(call, b"x-amz-metadata-directive")
    replaces_tags = _directive(call, b"x-amz-tagging-directive")
    itself = (named.bucket, named.key) == (call.bucket, call.key)
    async with open_source(call) as source:
        said = _metadata(call, source.what, replaces, replaces_tags)
        if itself and not (replaces or replaces_tags or any(map(call.request.header, _CHANGES))):
            raise S3Error(
                "InvalidRequest",
                "This copy request is illegal because it is trying to copy an object to itself without changing "
                "the object's metadata.",
            )
        if itself and not call.request.header(b"x-amz-checksum-algorithm"):
            copy = await _change_itself(call, source, said)
        else:
            copy = await _copy_bytes(call, source, said)
    if is_pinned(copy.said) and not call.key.endswith("/"):
        await call.backend.pin(call.bucket, call.key, copy.object_id)
    return Document(200, (), documents.copy_object(copy.etag, copy.mtime_ns, copy.said.checksum))


def _directive(call: Call, header: bytes) -> bool:
    value = call.request.header(header) or "COPY"
    if value not in ("COPY", "REPLACE"):
        raise S3Error("InvalidArgument", f"Unknown {header.decode()}: it is COPY or REPLACE.")
    return value == "REPLACE"


def _metadata(call: Call, what: Stored, replaces: bool, replaces_tags: bool) -> ObjectMetadata:
    """The copy's metadata, still without digests."""
    new = replace(metadata.from_request(call.request), owner=call.owner)
    if not replaces:
        new = replace(new, **{name: getattr(what.metadata, name) for name in _KEPT})
    if not replaces_tags:
        new = replace(new, tags=what.metadata.tags)
    new.encode()
    return new


async def _change_itself(call: Call, source: Source, said: ObjectMetadata) -> Copy:
    """A copy onto itself: new metadata and a new time, the same bytes."""
    what = source.what
    said = replace(said, etag=what.metadata.etag, checksum=what.metadata.checksum, parts=what.metadata.parts)
    if what.found.block:
        raise S3Error("NotImplemented", "A block has no metadata of its own.")
    encoded = pack_marker(said, what.inline) if what.found.marker else said.encode()
    mtime_ns = time.time_ns()
    await call.backend.set_metadata(call.bucket, call.key, what.found, encoded, mtime_ns)
    return Copy(said, what.found.object_id, mtime_ns)


async def _copy_bytes(call: Call, source: Source, said: ObjectMetadata) -> Copy:
    size_bytes, now_ns = source.what.size_bytes, time.time_ns()
    condition = await write_condition(call)
    plan = _plan(call, source)
    if call.key.endswith("/"):
        return await _copy_to_marker(call, plan, said)
    check_size(call, size_bytes)
    if is_large(call, size_bytes):
        async with transfer_for(call, source, call.bucket) as transfer:
            said = copied_digests(said, plan, await run_copy(plan, transfer))
            seal = replace(condition, user_metadata=said.encode(), mtime_ns=now_ns)
            return Copy(said, await transfer.seal(seal), now_ns)
    async with draft_for(call, source, size_bytes) as draft:
        said = copied_digests(said, plan, await run_copy(plan, draft))
        seal = replace(condition, user_metadata=said.encode(), mtime_ns=now_ns)
        return Copy(said, await call.backend.seal(draft, seal), now_ns)


@asynccontextmanager
async def draft_for(call: Call, source: Source, size_bytes: int) -> AsyncIterator[Draft]:
    """A draft for a copy, given back unless it is sealed."""

    @asynccontextmanager
    async def reserved() -> AsyncIterator[Draft]:
        draft = await call.backend.reserve(call.owner, size_bytes)
        try:
            yield draft
        finally:
            await call.backend.abort(draft)

    async with _room(call, source, reserved()) as draft:
        yield draft


def transfer_for(call: Call, source: Source, bucket: str) -> AbstractAsyncContextManager[Transfer]:
    """The same where no slot holds the copy."""
    return _room(call, source, large.writing(call.backend, call.owner, bucket))


@asynccontextmanager
async def _room(
    call: Call, source: Source, target: AbstractAsyncContextManager[_Target]
) -> AsyncIterator[_Target]:
    """What a copy is written into, with the window that its source is read through, if it is."""
    async with AsyncExitStack() as stack:
        if source.transfer is None:
            yield await stack.enter_async_context(target)
            return
        async with call.backend.turns.pair():
            into = await stack.enter_async_context(target)
            await source.transfer.take_window()
        yield into


async def _copy_to_marker(call: Call, plan: CopyPlan, said: ObjectMetadata) -> Copy:
    if plan.span.size_bytes > limits.MAX_MARKER_BODY_BYTES:
        raise S3Error(
            "EntityTooLarge", f"A key that ends in '/' takes at most {limits.MAX_MARKER_BODY_BYTES} bytes."
        )
    source = plan.source
    body = source.what.inline
    if source.descriptor >= 0:
        body = os.pread(source.descriptor, plan.span.size_bytes, plan.span.start)
    digests = _Digests(plan)
    digests.update(memoryview(body))
    said = copied_digests(said, plan, digests)
    made = await call.backend.put_marker(call.bucket, call.key, pack_marker(said, body))
    return Copy(said, made.object_id, made.mtime_ns)


def _plan(call: Call, source: Source) -> CopyPlan:
    """Whole object. An MD5 and a checksum that the source has are taken over; others are computed."""
    what = source.what
    name = call.request.header(b"x-amz-checksum-algorithm")
    try:
        algorithm = None if name is None else Algorithm(name.upper())
    except ValueError:
        raise S3Error("InvalidRequest", f"There is no checksum {name}.") from None
    had = what.metadata.checksum
    if algorithm is None and had is not None and had.type is ChecksumType.COMPOSITE:
        algorithm = had.algorithm
    take_md5 = call.settings.takes_md5(call.bucket) and (not what.metadata.etag or "-" in what.metadata.etag)
    return CopyPlan(source, Span(0, what.size_bytes), take_md5, algorithm)


class _Digests:
    """Taken while bytes are copied."""

    def __init__(self, plan: CopyPlan) -> None:
        self._md5: Any = md5(usedforsecurity=False) if plan.take_md5 else None
        self._checksum = None if plan.algorithm is None else checksums.digester(plan.algorithm)
        self.wanted = self._md5 is not None or self._checksum is not None

    def update(self, data: memoryview) -> None:
        for each in (self._md5, self._checksum):
            if each is not None:
                each.update(data)

    @property
    def md5(self) -> bytes | None:
        return None if self._md5 is None else bytes(self._md5.digest())

    @property
    def checksum(self) -> bytes | None:
        return None if self._checksum is None else self._checksum.digest()


def copied_digests(said: ObjectMetadata, plan: CopyPlan, digests: _Digests) -> ObjectMetadata:
    """The metadata of a copy, once its bytes were copied."""
    had = plan.source.what.metadata
    whole = plan.span == Span(0, plan.source.what.size_bytes)
    etag = digests.md5.hex() if digests.md5 is not None else ""
    if not etag and whole and "-" not in had.etag:
        etag = had.etag
    checksum = None
    if plan.algorithm is not None and digests.checksum is not None:
        checksum = Checksum(plan.algorithm, digests.checksum)
    elif whole and had.checksum is not None and had.checksum.type is ChecksumType.FULL_OBJECT:
        checksum = had.checksum
    return replace(said, etag=etag, checksum=checksum)


async def run_copy(plan: CopyPlan, target: Draft | Transfer) -> _Digests:
    """Copy the span into a draft, or append it to a large object. Raises NoSpace, Corrupt."""
    digests = _Digests(plan)
    source, span = plan.source, plan.span
    if source.what.found.marker:
        assert isinstance(target, Draft)
        piece = memoryview(source.what.inline)[span.start : span.end]
        digests.update(piece)
        os.pwrite(target.descriptor, piece, 0)
        return digests
    copied = 0
    async with aclosing(source.pieces(span)) as pieces:
        async for descriptor, offset, count in pieces:
            if isinstance(target, Draft):
                await trio.to_thread.run_sync(
                    copy_range, descriptor, offset, target.descriptor, copied, count, digests
                )
            else:
                await large.append_slot(target, descriptor, offset, count, digests)
            copied += count
    return digests
