"""Tagging: an object's tags are read, replaced and removed as a part of its metadata, a bucket's are kept beside it.

Invariants: tags of objects change by comparing and replacing the metadata of one very object; the bytes, the ETag and
the time of the last change stay. Tags of a bucket end with it, whichever door removes it.

Concurrency: one task per call; a change that another one overtook is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway import bodies, documents, reserved
from gateway.calls import Answer, Call, Document, Stored, no_such_key
from gateway.errors import S3Error
from gateway.stored import pack_marker, stored
from kvfs.errors import Exists, NotFound

_ATTEMPTS = 4


# --- of objects ----------------------------------------------------------------------------------------------
async def get_tagging(call: Call) -> Answer:
    """By key: tags have no order of their own."""
    tags = (await _find(call)).metadata.tags
    return Document(200, (), documents.tagging(dict(sorted(tags.items()))))


async def put_tagging(call: Call) -> Answer:
    async with call.read(bodies.tagging()) as tags:
        await _change(call, tags)
    return Answer(200)


async def delete_tagging(call: Call) -> Answer:
    await _change(call, {})
    return Answer(204)


async def _find(call: Call) -> Stored:
    found = await call.backend.find(call.bucket, call.key)
    if found is None:
        raise no_such_key(call.key)
    return stored(found)


async def _change(call: Call, tags: Mapping[str, str]) -> None:
    for _ in range(_ATTEMPTS):
        what = await _find(call)
        if what.found.block:
            raise S3Error("NotImplemented", "A block has no tags.")
        changed = replace(what.metadata, tags=dict(tags), etag=what.etag)
        encoded = pack_marker(changed, what.inline) if what.found.marker else changed.encode()
        try:
            await call.backend.set_metadata(call.bucket, call.key, what.found, encoded)
        except Exists:
            continue
        except NotFound:
            raise no_such_key(call.key) from None
        return
    raise S3Error("OperationAborted")


# --- of buckets ----------------------------------------------------------------------------------------------
async def get_bucket_tagging(call: Call) -> Answer:
    bucket = await call.backend.bucket(call.bucket)
    tags = await reserved.bucket_tags(call.backend, bucket)
    if not tags:
        raise S3Error("NoSuchTagSet", detail={"BucketName": call.bucket})
    return Document(200, (), documents.tagging(dict(sorted(tags.items()))))


async def put_bucket_tagging(call: Call) -> Answer:
    bucket = await call.backend.bucket(call.bucket)
    async with call.read(bodies.bucket_tagging()) as tags:
        await reserved.note_tags(call.backend, bucket, tags)
    return Answer(204)


async def delete_bucket_tagging(call: Call) -> Answer:
    await reserved.note_tags(call.backend, await call.backend.bucket(call.bucket), {})
    return Answer(204)
