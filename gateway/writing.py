"""PutObject and DeleteObject.

Responsibility: from a body to a sealed object under its key, on the condition that the request names, and the way
back. Keys of blocks and of directories' markers go their own ways.

Invariants: everything that can be refused by the headers alone is refused before the body is asked for. A draft is
sealed or given back, whatever happens. Conditions hold at the moment of the seal: the service compares there.

Concurrency: one task per call.
"""

from __future__ import annotations

from dataclasses import replace

from gateway import checksums, conditions, large, metadata
from gateway import etag as etags
from gateway.backend import Backend, Seal
from gateway.body_plan import object_bytes
from gateway.calls import Answer, Body, Call
from gateway.errors import S3Error
from gateway.found import BucketInfo, Found
from gateway.large import WindowSink
from gateway.metadata import ObjectMetadata
from gateway.plain import PlainPut
from gateway.receiving import DraftSink, MemorySink, Received, crc64nvme, receive
from gateway.stored import pack_marker, stored
from kvfs import limits
from kvfs._native.receiver import Receiver
from kvfs.keys import parse_block_name

PIN = "kvfs-pin"
"""User metadata that pins an object, unless its value is `0`, `false` or empty."""


async def put_object(call: Call) -> Answer:
    bucket = await call.backend.bucket(call.bucket)
    said = metadata.from_request(call.request)
    size_bytes = object_bytes(call)
    checksums.wanted(call.request)
    condition = await write_condition(call)
    digest = _block_digest(bucket, call.key)
    if call.key.endswith("/"):
        return await _put_marker(call, said, size_bytes)
    check_size(call, size_bytes)
    if digest is not None:
        return await _put_block(call, bucket, digest, size_bytes)
    if is_large(call, size_bytes):
        return await _put_large(call, said, condition)
    draft = await call.backend.reserve(call.owner, size_bytes, call.body)
    try:
        took_md5 = call.settings.takes_md5(call.bucket)
        received = await receive(call, DraftSink(draft), take_md5=took_md5)
        said = with_digests(said, received, took_md5, call.owner)
        seal = replace(condition, user_metadata=said.encode(), checksum=received.xxh3)
        object_id = await call.backend.seal(draft, seal)
    finally:
        await call.backend.abort(draft)
    if is_pinned(said):
        await call.backend.pin(call.bucket, call.key, object_id)
    return _sealed_answer(said, object_id)


async def put_plain(backend: Backend, write: PlainPut, body: Body) -> Answer:
    """`put_object` of what has neither conditions nor metadata nor another checksum."""
    draft = await backend.reserve(write.owner, write.size_bytes, body)
    try:
        receiver = Receiver(write.checksum is not None)
        if not await body.receive_file(draft.descriptor, receiver, draft.holding):
            raise S3Error("InternalError")
        checksum = crc64nvme(receiver, write.checksum) if write.checksum is not None else None
        said = ObjectMetadata(checksum=checksum, owner=write.owner)
        seal = Seal(write.bucket, write.key, said.encode(), checksum=receiver.xxh3)
        object_id = await backend.seal(draft, seal)
    finally:
        await backend.abort(draft)
    return _sealed_answer(said, object_id)


def with_digests(said: ObjectMetadata, received: Received, took_md5: bool, owner: str = "") -> ObjectMetadata:
    """The metadata of a body that came whole."""
    md5 = received.md5 if took_md5 and received.md5 is not None else None
    etag = "" if md5 is None else md5.hex()
    return replace(said, etag=etag, checksum=received.checksum, owner=owner)


def is_pinned(said: ObjectMetadata) -> bool:
    return said.user.get(PIN, "").lower() not in ("", "0", "false")


async def _put_large(call: Call, said: ObjectMetadata, condition: Seal) -> Answer:
    """An object larger than DRAM takes."""
    took_md5 = call.settings.takes_md5(call.bucket)
    async with large.writing(call.backend, call.owner, call.bucket, call.body) as transfer:
        received = await receive(call, WindowSink(transfer), take_md5=took_md5)
        said = with_digests(said, received, took_md5, call.owner)
        object_id = await transfer.seal(replace(condition, user_metadata=said.encode()))
    return _sealed_answer(said, object_id)


def is_large(call: Call, size_bytes: int) -> bool:
    """Whether no slot can hold so much."""
    return size_bytes > call.backend.largest_object_bytes


def check_size(call: Call, size_bytes: int, what: str = "object") -> None:
    """Of one request's body. Raises S3Error EntityTooLarge."""
    _check(call, size_bytes, min(limits.MAX_SINGLE_PUT_BYTES, _largest(call)), what)


def check_whole(call: Call, size_bytes: int) -> None:
    """As `check_size`, of a multipart object, which S3 bounds by its parts only."""
    _check(call, size_bytes, _largest(call), "object")


def _largest(call: Call) -> int:
    return (
        max(call.backend.largest_object_bytes, call.backend.largest_large_bytes)
        or limits.MAX_SINGLE_PUT_BYTES
    )


def _check(call: Call, size_bytes: int, most: int, what: str) -> None:
    if size_bytes > most:
        why = "" if call.backend.largest_large_bytes else ", a quarter of DRAM: there is no NVMe tier"
        raise S3Error(
            "EntityTooLarge",
            f"The largest {what} here has {most} bytes{why}.",
            detail={"ProposedSize": str(size_bytes), "MaxSizeAllowed": str(most)},
        )


async def write_condition(call: Call) -> Seal:
    """The seal with the request's condition, which is checked here for a first time."""
    seal = Seal(call.bucket, call.key, b"")
    if not call.conditions:
        return seal
    found = await call.backend.find(call.bucket, call.key)
    conditions.check_write(call.conditions, None if found is None else stored(found).etag)
    if found is None or "*" in call.conditions.if_none_match:
        return replace(seal, replace=False)
    return replace(seal, expected_id=found.object_id)


def _sealed_answer(said: ObjectMetadata, object_id: int) -> Answer:
    """Answer with what was sealed: by now its key may stand for another object."""
    headers = [("ETag", etags.quote(etags.of_object(said.etag, object_id)))]
    if said.checksum is not None:
        headers += checksums.headers(said.checksum).items()
    return Answer(200, headers)


# --- markers and blocks ------------------------------------------------------------------------------------
async def _put_marker(call: Call, said: ObjectMetadata, size_bytes: int) -> Answer:
    """A key that ends in '/': its body is kept with its name."""
    most = limits.MAX_MARKER_BODY_BYTES
    if size_bytes > most:
        raise S3Error(
            "EntityTooLarge",
            f"A key that ends in '/' takes at most {most} bytes.",
            detail={"ProposedSize": str(size_bytes), "MaxSizeAllowed": str(most)},
        )
    sink = MemorySink(most)
    received = await receive(call, sink, take_md5=True)
    said = with_digests(said, received, True, call.owner)
    made = await call.backend.put_marker(call.bucket, call.key, pack_marker(said, bytes(sink.data)))
    return _sealed_answer(said, made.object_id)


def _block_digest(bucket: BucketInfo, key: str) -> bytes | None:
    return parse_block_name(key.encode()) if bucket.namespace is not None else None


async def _put_block(call: Call, bucket: BucketInfo, digest: bytes, size_bytes: int) -> Answer:
    """A block: the first one counts, and has no metadata."""
    draft = await call.backend.reserve(call.owner, size_bytes, call.body)
    try:
        received = await receive(call, DraftSink(draft))
        object_id = await call.backend.seal_block(draft, bucket, digest)
    finally:
        await call.backend.abort(draft)
    return _sealed_answer(ObjectMetadata(checksum=received.checksum), object_id)


# --- removal -----------------------------------------------------------------------------------------------
async def delete_object(call: Call) -> Answer:
    await remove_key(call, call.bucket, call.key, conditions.of_deletion(call.request))
    return Answer(204)


async def remove_key(call: Call, bucket: str, key: str, wanted: conditions.Conditions) -> None:
    """Remove a key; a missing one counts as removed, unless If-Match wants it. Raises S3Error, BucketNotFound."""
    expected_id = await expected_of(call, bucket, key, wanted)
    await call.backend.remove(bucket, key, expected_id=expected_id)


async def expected_of(call: Call, bucket: str, key: str, wanted: conditions.Conditions) -> int | None:
    """The object that may be removed, where there are conditions. Raises S3Error."""
    if not wanted:
        return None
    found: Found | None = await call.backend.find(bucket, key)
    if found is None:
        conditions.check_deletion(wanted, None, 0, 0)
        return None
    what = stored(found)
    conditions.check_deletion(wanted, what.etag, what.size_bytes, what.modified_s)
    return None if found.marker else found.object_id
