"""PutObject and DeleteObject.

Responsibility: from a body to a sealed object under its key, on the condition that the request names, and the way
back. Keys of blocks and of directories' markers go their own ways.

Invariants: everything that can be refused by the headers alone is refused before the body is asked for. A draft is
sealed or aborted, whatever happens. Conditions hold at the moment of the seal: the service compares there.

Concurrency: one task per call.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.backend.backend import Backend
from gateway.backend.drafts import Seal
from gateway.backend.lookup import BucketInfo
from gateway.call import large_transfer
from gateway.call.body_plan import object_bytes
from gateway.call.call import Answer, Body, Call
from gateway.call.large_transfer import WindowSink
from gateway.call.object_view import pack_marker, stored
from gateway.call.receive import Received, crc64nvme, receive
from gateway.call.sinks import DraftSink, MemorySink
from gateway.protocol import checksums, conditions, metadata
from gateway.protocol import etag as etags
from gateway.protocol.errors import S3Error
from gateway.protocol.metadata import ObjectMetadata
from gateway.protocol.plain_put import PlainPut
from kvfs import limits
from kvfs._native.s3.receiver import Receiver
from kvfs.keys import parse_block_name

PIN = "kvfs-pin"
"""User metadata that pins an object, unless its value is `0`, `false` or empty."""


async def put_object(call: Call) -> Answer:
    """Answer PutObject, of a block where the key is a prefix hash in a bucket bound to a namespace."""
    bucket = await call.backend.bucket(call.bucket)
    said = metadata.from_request(call.request)
    size_bytes = object_bytes(call)
    checksums.wanted(call.request)
    condition = await write_condition(call)
    digest = parse_block_name(call.key.encode()) if bucket.namespace is not None else None
    if call.key.endswith("/"):
        return await _put_marker(call, said, size_bytes)
    check_size(call, size_bytes)
    if digest is not None:
        return await _put_block(call, bucket, digest, size_bytes)
    if is_large(call, size_bytes):
        return await _put_large(call, said, condition)
    async with call.backend.drafts.reserved(call.owner, size_bytes, call.body) as draft:
        took_md5 = call.settings.takes_md5(call.bucket)
        received = await receive(call, DraftSink(draft), take_md5=took_md5)
        said = with_digests(said, received, took_md5, call.owner)
        seal = replace(condition, user_metadata=said.encode(), checksum=received.xxh3)
        object_id = await call.backend.drafts.seal(draft, seal)
    if is_pinned(said):
        await call.backend.pin(call.bucket, call.key, object_id)
    return _sealed_answer(said, object_id)


async def put_plain(backend: Backend, write: PlainPut, body: Body) -> Answer:
    """Put an object that has neither conditions nor metadata nor another checksum than CRC-64/NVME."""
    draft = await backend.drafts.reserve(write.owner, write.size_bytes, body)
    try:
        receiver = Receiver(write.checksum is not None)
        if not await body.receive_file(draft.descriptor, receiver, draft.holding):
            raise S3Error("InternalError")
        checksum = crc64nvme(receiver, write.checksum) if write.checksum is not None else None
        said = ObjectMetadata(checksum=checksum, owner=write.owner)
        seal = Seal(write.bucket, write.key, said.encode(), checksum=receiver.xxh3)
        object_id = await backend.drafts.seal(draft, seal)
    finally:
        await backend.drafts.abort(draft)
    return _sealed_answer(said, object_id)


def with_digests(said: ObjectMetadata, received: Received, took_md5: bool, owner: str = "") -> ObjectMetadata:
    """Add a body's digests and its owner to the metadata."""
    md5 = received.md5 if took_md5 and received.md5 is not None else None
    etag = "" if md5 is None else md5.hex()
    return replace(said, etag=etag, checksum=received.checksum, owner=owner)


def is_pinned(said: ObjectMetadata) -> bool:
    """Return whether user metadata asks for the object to be pinned."""
    return said.user.get(PIN, "").lower() not in ("", "0", "false")


async def _put_large(call: Call, said: ObjectMetadata, condition: Seal) -> Answer:
    """Put an object larger than DRAM takes."""
    took_md5 = call.settings.takes_md5(call.bucket)
    async with large_transfer.writing(call.backend, call.owner, call.bucket, call.body) as transfer:
        received = await receive(call, WindowSink(transfer), take_md5=took_md5)
        said = with_digests(said, received, took_md5, call.owner)
        object_id = await transfer.seal(replace(condition, user_metadata=said.encode()))
    return _sealed_answer(said, object_id)


def is_large(call: Call, size_bytes: int) -> bool:
    """Return whether no slot can hold so much."""
    return size_bytes > call.backend.sessions.largest_object_bytes


def check_size(call: Call, size_bytes: int, what: str = "object", *, in_parts: bool = False) -> None:
    """Check the size of an object or part, which S3 bounds too, unless it came `in_parts`.

    Raises S3Error EntityTooLarge.
    """
    sessions = call.backend.sessions
    most = max(sessions.largest_object_bytes, sessions.largest_large_bytes) or limits.MAX_SINGLE_PUT_BYTES
    if not in_parts:
        most = min(most, limits.MAX_SINGLE_PUT_BYTES)
    if size_bytes > most:
        why = "" if sessions.largest_large_bytes else ", a quarter of DRAM: there is no NVMe tier"
        raise S3Error(
            "EntityTooLarge",
            f"The largest {what} here has {most} bytes{why}.",
            detail={"ProposedSize": str(size_bytes), "MaxSizeAllowed": str(most)},
        )


async def write_condition(call: Call) -> Seal:
    """Check the request's condition a first time, and return a seal that the service checks it for again."""
    seal = Seal(call.bucket, call.key, b"")
    if not call.conditions:
        return seal
    found = await call.backend.find(call.bucket, call.key)
    conditions.check_write(call.conditions, None if found is None else stored(found).etag)
    if found is None or "*" in call.conditions.if_none_match:
        return replace(seal, replace=False)
    return replace(seal, expected_id=found.object_id)


def _sealed_answer(said: ObjectMetadata, object_id: int) -> Answer:
    """Answer with what was sealed, since by now its key may stand for another object."""
    headers = [("ETag", etags.quote(etags.of_object(said.etag, object_id)))]
    if said.checksum is not None:
        headers += checksums.headers(said.checksum).items()
    return Answer(200, headers)


# --- markers and blocks ------------------------------------------------------------------------------------
async def _put_marker(call: Call, said: ObjectMetadata, size_bytes: int) -> Answer:
    """Put a key that ends in '/': its body is kept with its name."""
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


async def _put_block(call: Call, bucket: BucketInfo, digest: bytes, size_bytes: int) -> Answer:
    """Put a block: the first one counts, and has no metadata."""
    async with call.backend.drafts.reserved(call.owner, size_bytes, call.body) as draft:
        received = await receive(call, DraftSink(draft))
        object_id = await call.backend.drafts.seal_block(draft, bucket, digest)
    return _sealed_answer(ObjectMetadata(checksum=received.checksum), object_id)


# --- removal -----------------------------------------------------------------------------------------------
async def delete_object(call: Call) -> Answer:
    """Delete a key; a missing one counts as deleted, unless If-Match wants it."""
    expected_id = await expected_of(call, call.key, conditions.of_deletion(call.request))
    await call.backend.remove(call.bucket, call.key, expected_id=expected_id)
    return Answer(204)


async def expected_of(call: Call, key: str, wanted: conditions.Conditions) -> int | None:
    """Find the object that may be removed, where there are conditions. Raises S3Error."""
    if not wanted:
        return None
    found = await call.backend.find(call.bucket, key)
    if found is None:
        conditions.check_deletion(wanted, None, 0, 0)
        return None
    what = stored(found)
    conditions.check_deletion(wanted, what.etag, what.size_bytes, what.modified_s)
    return None if found.marker else found.object_id
