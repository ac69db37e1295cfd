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

import trio

from gateway.backend.body_budget import Draft
from gateway.backend.copy_range import copy_range
from gateway.backend.drafts import Seal
from gateway.call import large_transfer
from gateway.call.call import Answer, Call, document_answer, no_such_key
from gateway.call.digests import Digests
from gateway.call.large_transfer import Transfer
from gateway.call.object_view import Stored, pack_marker, stored
from gateway.operations.put_object import check_size, is_large, is_pinned, write_condition
from gateway.protocol import conditions, metadata
from gateway.protocol import etag as etags
from gateway.protocol.checksums import Algorithm, Checksum, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.metadata import ObjectMetadata
from gateway.protocol.ranges import Span
from gateway.xml import responses
from kvfs import limits
from kvfs.errors import ObjectTooLarge

_SOURCE = b"x-amz-copy-source-"
_KEPT = ("content_type", "headers", "user")
_CHANGES = (b"x-amz-checksum-algorithm", b"x-amz-storage-class")
"""Headers with which a copy onto itself changes something, as S3 sees it."""


@dataclass(frozen=True, slots=True)
class Source:
    """An open source object."""

    what: Stored
    descriptor: int
    """-1 for a marker or symbolic link, and for what no slot holds."""
    transfer: Transfer | None = None
    """The lease of an object that no slot holds."""

    async def pieces(self, span: Span) -> AsyncGenerator[tuple[int, int, int], None]:
        """Yield (descriptor, offset, count) of the span's pieces, each to be copied before the next is asked for."""
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
        """Return the ETag of the copy."""
        return etags.of_object(self.said.etag, self.object_id)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The bytes of a copy, and the digests that are taken of them."""

    source: Source
    span: Span
    take_md5: bool
    algorithm: Algorithm | None


@asynccontextmanager
async def open_source(call: Call) -> AsyncIterator[Source]:
    """Open the source of a copy. Raises S3Error AccessDenied, NoSuchKey, PreconditionFailed; BucketNotFound."""
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
        async with large_transfer.reading(call.backend, call.owner, bucket, key) as (transfer, found):
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


async def copy_object(call: Call) -> Answer:
    """Answer CopyObject."""
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
            copy = await _copy_to_key(call, source, said)
    if is_pinned(copy.said) and not call.key.endswith("/") and not source.what.found.target:
        await call.backend.pin(call.bucket, call.key, copy.object_id)
    return document_answer(200, (), responses.copy_result(copy.etag, copy.mtime_ns, copy.said.checksum))


def _directive(call: Call, header: bytes) -> bool:
    value = call.request.header(header) or "COPY"
    if value not in ("COPY", "REPLACE"):
        raise S3Error("InvalidArgument", f"Unknown {header.decode()}: it is COPY or REPLACE.")
    return value == "REPLACE"


def _metadata(call: Call, what: Stored, replaces: bool, replaces_tags: bool) -> ObjectMetadata:
    """Make the copy's metadata, still without digests."""
    new = replace(metadata.from_request(call.request), owner=call.owner)
    if not replaces:
        new = replace(new, **{name: getattr(what.metadata, name) for name in _KEPT})
    if not replaces_tags:
        new = replace(new, tags=what.metadata.tags)
    new.encode()
    return new


async def _change_itself(call: Call, source: Source, said: ObjectMetadata) -> Copy:
    """Copy an object onto itself: give it new metadata and a new time, and keep its bytes."""
    what = source.what
    said = replace(said, etag=what.metadata.etag, checksum=what.metadata.checksum, parts=what.metadata.parts)
    if what.found.block:
        raise S3Error("NotImplemented", "A block has no metadata of its own.")
    encoded = pack_marker(said, what.inline) if what.found.marker else said.encode()
    mtime_ns = time.time_ns()
    await call.backend.set_metadata(call.bucket, call.key, what.found, encoded, mtime_ns)
    return Copy(said, what.found.object_id, mtime_ns)


async def _copy_to_key(call: Call, source: Source, said: ObjectMetadata) -> Copy:
    condition = await write_condition(call)
    plan = _plan(call, source)
    if call.key.endswith("/"):
        return await _copy_to_marker(call, plan, said)
    if source.what.found.target:
        return await _copy_link(call, plan, said, condition)
    check_size(call, plan.span.size_bytes)
    return await seal_copy(call, plan, said, condition)


async def _copy_link(call: Call, plan: CopyPlan, said: ObjectMetadata, condition: Seal) -> Copy:
    """Copy a symbolic link, which leads where its source does."""
    target = plan.source.what.found.target
    said = _copied_digests(said, plan, _digests_of(plan, target))
    made = await call.backend.put_link(call.bucket, call.key, target, said.encode(), condition)
    return Copy(said, made.object_id, made.mtime_ns)


async def seal_copy(call: Call, plan: CopyPlan, said: ObjectMetadata, seal: Seal) -> Copy:
    """Copy what is planned into a draft, or where no slot holds it into a large object, and seal that."""
    async with _target(call, plan, seal.bucket) as target:
        said = _copied_digests(said, plan, await _copy_bytes(plan, target))
        now_ns = time.time_ns()
        seal = replace(seal, user_metadata=said.encode(), mtime_ns=now_ns)
        if isinstance(target, Transfer):
            return Copy(said, await target.seal(seal), now_ns)
        return Copy(said, await call.backend.drafts.seal(target, seal), now_ns)


@asynccontextmanager
async def _target(call: Call, plan: CopyPlan, bucket: str) -> AsyncIterator[Draft | Transfer]:
    """Begin what a copy is written into, with the window that its source is read through, if it is."""
    target: AbstractAsyncContextManager[Draft | Transfer]
    if is_large(call, plan.span.size_bytes):
        target = large_transfer.writing(call.backend, call.owner, bucket)
    else:
        target = call.backend.drafts.reserved(call.owner, plan.span.size_bytes)
    async with AsyncExitStack() as stack:
        if plan.source.transfer is None:
            yield await stack.enter_async_context(target)
            return
        async with call.backend.drafts.queue.pair():
            into: Draft | Transfer = await stack.enter_async_context(target)
            await plan.source.transfer.take_window()
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
    said = _copied_digests(said, plan, _digests_of(plan, body))
    made = await call.backend.put_marker(call.bucket, call.key, pack_marker(said, body))
    return Copy(said, made.object_id, made.mtime_ns)


def _digests_of(plan: CopyPlan, body: bytes) -> Digests:
    digests = Digests.of(plan.take_md5, plan.algorithm)
    for digester in digests.by_name.values():
        digester.update(body)
    return digests


def _plan(call: Call, source: Source) -> CopyPlan:
    """Plan the copy of a whole object, which keeps the source's MD5 and checksum; others are computed."""
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


def _copied_digests(said: ObjectMetadata, plan: CopyPlan, digests: Digests) -> ObjectMetadata:
    """Make the metadata of a copy, once its bytes were copied."""
    had = plan.source.what.metadata
    whole = plan.span == Span(0, plan.source.what.size_bytes)
    md5 = digests.get("md5")
    etag = md5.hex() if md5 is not None else ""
    if not etag and whole and "-" not in had.etag:
        etag = had.etag
    checksum = None
    if plan.algorithm is not None:
        checksum = Checksum(plan.algorithm, digests.by_name[plan.algorithm.value].digest())
    elif whole and had.checksum is not None and had.checksum.type is ChecksumType.FULL_OBJECT:
        checksum = had.checksum
    return replace(said, etag=etag, checksum=checksum)


async def _copy_bytes(plan: CopyPlan, target: Draft | Transfer) -> Digests:
    """Copy the span into a draft, or append it to a large object. Raises NoSpace, Corrupt."""
    source, span = plan.source, plan.span
    if source.descriptor < 0 and source.transfer is None:
        assert isinstance(target, Draft)
        piece = source.what.inline[span.start : span.end]
        os.pwrite(target.descriptor, piece, 0)
        return _digests_of(plan, piece)
    digests = Digests.of(plan.take_md5, plan.algorithm)
    digesters = tuple(digests.by_name.values())
    copied = 0
    async with aclosing(source.pieces(span)) as pieces:
        async for descriptor, offset, count in pieces:
            if isinstance(target, Draft):
                await trio.to_thread.run_sync(
                    copy_range, descriptor, offset, target.descriptor, copied, count, digesters
                )
            else:
                await large_transfer.append_slot(target, descriptor, offset, count, digesters)
            copied += count
    return digests
