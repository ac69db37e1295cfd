"""CompleteMultipartUpload: parts become one object.

Responsibility: check what the client listed against the parts that are there, copy them into one draft, and seal
it. A retry of a completion that succeeded gets the same answer: the object remembers its upload.

Invariants:
- Everything is checked before a byte is copied, and a part that is uploaded again between its check and its copy fails
  the completion.
- The seal needs the upload's record, which is removed once the object is durable: of a completion and an abort that
  race, one wins, and a completion that ends in the middle, whatever ends it, leaves the record, the object, or both.
- The seal replaces only what the key named before the record was seen, so that of completions that race the first one
  counts, and a late one does not replace what was put after it.

Concurrency: one task per call, one worker thread per copy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import quote

import trio

from gateway.backend import reserved_bucket
from gateway.backend.body_budget import Draft
from gateway.backend.copy_range import copy_range
from gateway.backend.drafts import Seal
from gateway.backend.lookup import ObjectLookup
from gateway.call import large_transfer
from gateway.call.call import Answer, Call, document_answer
from gateway.call.large_transfer import Transfer
from gateway.call.object_view import Stored, stored
from gateway.call.receive import read_document
from gateway.operations.put_object import check_size, is_large, is_pinned, write_condition
from gateway.operations.uploads import Upload, find_upload, remove_parts, sealed_of
from gateway.protocol import checksums, conditions
from gateway.protocol import etag as etags
from gateway.protocol.checksums import Checksum, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.metadata import ObjectMetadata, PartMetadata
from gateway.xml import requests, responses
from gateway.xml.requests import PartReference
from kvfs import limits
from kvfs.errors import Exists, KvfsError, NotFound
from kvfs.protocol.messages import Op

log = logging.getLogger("kvfs.gateway")

_SEAL_ATTEMPTS = 256
"""A seal fails where another write of the key came between, and costs about a millisecond. On a busy machine one of
eight writers of a key lost 32 times in a row."""


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    what: Stored


async def complete(call: Call) -> Answer:
    """Answer CompleteMultipartUpload."""
    async with read_document(_without_checksums(call), requests.complete_multipart_upload()) as listed:
        return await _complete(call, listed)


async def _complete(call: Call, listed: Sequence[PartReference]) -> Answer:
    upload_id = call.action.upload_id or ""
    upload = await find_upload(call.backend, upload_id, call.bucket, call.key)
    before = await sealed_of(call.backend, upload_id, call.bucket, call.key)
    if upload is None or before is not None:
        return await _completed_before(call, upload, before)
    _check_checksums_given(upload, listed)
    await upload.touch(call.backend, call.settings.upload_expiry_s)
    parts = _listed_parts(listed, await upload.parts(call.backend))
    said = _metadata(call, upload, parts)
    size_bytes = sum(part.what.size_bytes for part in parts)
    await call.backend.bucket(call.bucket)
    check_size(call, size_bytes, in_parts=True)
    await write_condition(call)
    if is_large(call, size_bytes):
        return await _complete_large(call, upload, parts, said)
    async with call.backend.drafts.reserved(call.owner, size_bytes) as draft:
        await _join(call, upload, parts, draft)
        return await _seal(call, upload, said, partial(call.backend.drafts.seal, draft))


def _without_checksums(call: Call) -> Call:
    """Drop `x-amz-checksum-*`, in headers or query: here they are of the object, not of the document."""
    headers = [pair for pair in call.request.headers if not pair[0].startswith(b"x-amz-checksum-")]
    return replace(call, request=replace(call.request, headers=headers, raw_query=b""))


def _check_checksums_given(upload: Upload, listed: Sequence[PartReference]) -> None:
    """Check that each part comes with its checksum where it must. Raises S3Error InvalidRequest."""
    algorithm = upload.algorithm
    if algorithm is None or upload.checksum_type is not ChecksumType.COMPOSITE:
        return
    for part in listed:
        if algorithm not in part.checksums:
            raise S3Error(
                "InvalidRequest",
                f"The upload was begun with composite {algorithm.value} checksums: its completion names that of each "
                f"part, and part {part.number} has none.",
            )


def _listed_parts(listed: Sequence[PartReference], found: dict[int, ObjectLookup]) -> list[_Part]:
    """Find the parts that are listed. Raises S3Error InvalidPart, EntityTooSmall."""
    parts = []
    for each in listed:
        row = found.get(each.number)
        what = None if row is None else stored(row)
        if what is None or what.etag != each.etag or not _matches(each, what):
            raise S3Error("InvalidPart", detail={"PartNumber": str(each.number), "ETag": each.etag})
        parts.append(_Part(each.number, what))
    for part in parts[:-1]:
        if part.what.size_bytes < limits.MIN_PART_BYTES:
            raise S3Error(
                "EntityTooSmall",
                detail={
                    "PartNumber": str(part.number),
                    "ProposedSize": str(part.what.size_bytes),
                    "MinSizeAllowed": str(limits.MIN_PART_BYTES),
                },
            )
    return parts


def _matches(part: PartReference, what: Stored) -> bool:
    """Return whether the part has the checksums that are listed."""
    checksum = what.metadata.checksum
    return all(
        checksum is not None and checksum.algorithm is algorithm and checksum.digest == digest
        for algorithm, digest in part.checksums.items()
    )


def _metadata(call: Call, upload: Upload, parts: Sequence[_Part]) -> ObjectMetadata:
    """Make the object's metadata. Raises S3Error InvalidRequest, BadDigest."""
    size_bytes = sum(part.what.size_bytes for part in parts)
    given = call.request.header(b"x-amz-mp-object-size")
    if given is not None and given != str(size_bytes):
        raise S3Error(
            "InvalidRequest", f"x-amz-mp-object-size is {given[:20]}, the parts have {size_bytes} bytes."
        )
    tags = [part.what.metadata.etag for part in parts]
    etag = etags.multipart([bytes.fromhex(tag) for tag in tags]) if all(tags) else ""
    checksum = _checksum(call, upload, parts)
    return replace(
        upload.metadata,
        etag=etag,
        checksum=checksum,
        upload_id=upload.upload_id,
        parts=tuple(_part_metadata(part, checksum) for part in parts),
    )


def _part_metadata(part: _Part, checksum: Checksum | None) -> PartMetadata:
    """Describe a part, with its checksum where the object has one, too."""
    own = part.what.metadata.checksum
    digest = own.digest if own is not None and checksum is not None else b""
    return PartMetadata(part.what.size_bytes, digest)


def _checksum(call: Call, upload: Upload, parts: Sequence[_Part]) -> Checksum | None:
    """Compute the object's checksum out of the parts'. Raises S3Error InvalidRequest, BadDigest, InvalidPart."""
    given, type_ = checksums.of_object(call.request)
    algorithm = upload.algorithm
    if type_ not in (None, upload.checksum_type):
        raise S3Error("InvalidRequest", "x-amz-checksum-type is not the one that the upload was begun with.")
    if algorithm is None and given is not None and given.algorithm.is_crc:
        algorithm = given.algorithm
    if algorithm is None or (given is not None and given.algorithm is not algorithm):
        if given is not None:
            raise S3Error(
                "InvalidRequest", f"The upload was not begun with {given.algorithm.value} checksums."
            )
        return None
    own = [part.what.metadata.checksum for part in parts]
    digests = [each.digest for each in own if each is not None and each.algorithm is algorithm]
    if len(digests) != len(parts):
        code = "InvalidRequest" if upload.algorithm is None else "InvalidPart"
        raise S3Error(code, f"A part has no {algorithm.value} checksum.")
    if upload.checksum_type is ChecksumType.COMPOSITE:
        found = checksums.composite(algorithm, digests)
    else:
        pairs = zip(digests, (part.what.size_bytes for part in parts), strict=True)
        found = Checksum(algorithm, checksums.combine(algorithm, pairs))
    if given is not None:
        checksums.verify(algorithm.value, given.digest, found.digest)
        if given.parts not in (0, found.parts):
            raise S3Error("BadDigest", f"The checksum of {given.parts} parts was given for {found.parts}.")
    return found


async def _complete_large(call: Call, upload: Upload, parts: Sequence[_Part], said: ObjectMetadata) -> Answer:
    """Complete an upload that no slot can hold: append its parts window by window to an object on NVMe."""
    async with _transfers(call, parts) as (transfer, source):
        for part in parts:
            if source is not None and is_large(call, part.what.size_bytes):
                await _append_large(call, upload, part, transfer, source)
                continue
            async with _open_part(call, upload, part) as descriptor:
                await large_transfer.append_slot(transfer, descriptor, 0, part.what.size_bytes)
        return await _seal(call, upload, said, transfer.seal)


@asynccontextmanager
async def _transfers(call: Call, parts: Sequence[_Part]) -> AsyncIterator[tuple[Transfer, Transfer | None]]:
    """Begin the transfer that writes the object, and one that reads the parts that no slot holds, if there are any.

    Both have their windows, or neither has.
    """
    async with AsyncExitStack() as stack:
        target = large_transfer.writing(call.backend, call.owner, call.bucket)
        if not any(is_large(call, part.what.size_bytes) for part in parts):
            yield await stack.enter_async_context(target), None
            return
        async with call.backend.drafts.queue.pair():
            transfer = await stack.enter_async_context(target)
            source = await stack.enter_async_context(large_transfer.readers(call.backend, call.owner))
        yield transfer, source


async def _append_large(
    call: Call, upload: Upload, part: _Part, transfer: Transfer, source: Transfer
) -> None:
    """Append a part that no slot holds. Raises S3Error InvalidPart where it is another one by now, or gone."""
    try:
        found = await source.open(reserved_bucket.BUCKET, upload.part_key(part.number))
    except NotFound:
        found = None
    if found is None or found.object_id != part.what.found.object_id:
        raise S3Error("InvalidPart", detail={"PartNumber": str(part.number)})
    at, end = 0, part.what.size_bytes
    while at < end:
        count = await source.read(at, end - at)
        await large_transfer.append_slot(transfer, source.window.descriptor, 0, count)
        at += count
    await source.session.control(Op.LARGE_CLOSE)


async def _join(call: Call, upload: Upload, parts: Sequence[_Part], draft: Draft) -> None:
    """Copy the parts' bytes in order into a draft."""
    at = 0
    for part in parts:
        async with _open_part(call, upload, part) as descriptor:
            await _copy(descriptor, draft, at, part.what.size_bytes)
        at += part.what.size_bytes


@asynccontextmanager
async def _open_part(call: Call, upload: Upload, part: _Part) -> AsyncIterator[int]:
    """Open a part's bytes. Raises S3Error InvalidPart where it is another one by now, or gone."""
    opened = await call.backend.open(reserved_bucket.BUCKET, upload.part_key(part.number))
    if opened is None:
        raise S3Error("InvalidPart", detail={"PartNumber": str(part.number)})
    found, descriptor = opened
    try:
        if found.object_id != part.what.found.object_id:
            raise S3Error("InvalidPart", detail={"PartNumber": str(part.number)})
        yield descriptor
    finally:
        os.close(descriptor)


async def _copy(descriptor: int, draft: Draft, at: int, size_bytes: int) -> None:
    for start in range(0, size_bytes, limits.COPY_TURN_BYTES):
        count = min(size_bytes - start, limits.COPY_TURN_BYTES)
        await trio.to_thread.run_sync(copy_range, descriptor, start, draft.descriptor, at + start, count)


# --- the end -----------------------------------------------------------------------------------------------
async def _seal(
    call: Call, upload: Upload, said: ObjectMetadata, seal: Callable[[Seal], Awaitable[int]]
) -> Answer:
    """Seal what the upload becomes, unless another completion or an abort comes first. Raises S3Error NoSuchUpload,
    PreconditionFailed, OperationAborted of a key that changes all the time."""
    plain = Seal(call.bucket, call.key, said.encode(), needs=upload.record_name)
    for _ in range(_SEAL_ATTEMPTS):
        found = await call.backend.find(call.bucket, call.key)
        what = None if found is None else stored(found)
        if what is not None and what.metadata.upload_id == upload.upload_id:
            return await _completed_before(call, upload, what)
        conditions.check_write(call.conditions, None if what is None else what.etag)
        expected_id = None if found is None else found.object_id
        try:
            object_id = await seal(replace(plain, replace=found is not None, expected_id=expected_id))
        except (Exists, NotFound):
            if await find_upload(call.backend, upload.upload_id, call.bucket, call.key) is None:
                before = await sealed_of(call.backend, upload.upload_id, call.bucket, call.key)
                return await _completed_before(call, None, before)
        else:
            await _tidy(call, upload, said, object_id)
            return _answer(call, said, object_id)
    raise S3Error("OperationAborted")


async def _completed_before(call: Call, upload: Upload | None, before: Stored | None) -> Answer:
    """Answer a completion that another one preceded, and end what that may have left. Raises S3Error NoSuchUpload."""
    if before is None:
        raise S3Error("NoSuchUpload", detail={"UploadId": call.action.upload_id or ""})
    await call.backend.settle()  # the other one may not have been answered yet
    await _tidy(call, upload, before.metadata, before.found.object_id)
    return _answer(call, before.metadata, before.found.object_id)


async def _tidy(call: Call, upload: Upload | None, said: ObjectMetadata, object_id: int) -> None:
    """Pin the object and remove the upload, neither of which may fail the completion."""
    try:
        if is_pinned(said):
            await call.backend.pin(call.bucket, call.key, object_id)
        if upload is not None:
            await upload.remove(call.backend)
        else:
            await remove_parts(call.backend, said.upload_id)
    except KvfsError as error:
        log.warning("what is left of upload %s stays until it expires: %s", said.upload_id, error)


def _answer(call: Call, said: ObjectMetadata, object_id: int) -> Answer:
    etag = etags.of_object(said.etag, object_id)
    scheme = "https" if call.secure else "http"
    location = f"{scheme}://{call.request.host}/{call.bucket}/{quote(call.key)}"
    body = responses.complete_multipart_upload(location, call.bucket, call.key, etag, said.checksum)
    return document_answer(200, (), body)
