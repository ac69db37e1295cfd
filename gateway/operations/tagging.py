"""Tagging: an object's tags are read, replaced and removed as a part of its metadata, a bucket's are kept beside it.

Invariants: tags of objects change by comparing and replacing the metadata of one very object; the bytes, the ETag and
the time of the last change stay. Tags of a bucket end with it, whichever door removes it.

Concurrency: one task per call; a change that another one overtook is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.backend import reserved_bucket
from gateway.call.call import Answer, Call, document_answer, no_such_key
from gateway.call.object_view import find_stored, pack_marker
from gateway.call.receive import read_document
from gateway.protocol.errors import S3Error
from gateway.xml import requests, responses
from kvfs.errors import Exists, NotFound

_ATTEMPTS = 4


# --- of objects ----------------------------------------------------------------------------------------------
async def get_tagging(call: Call) -> Answer:
    """Answer with the tags in the order of their keys."""
    tags = (await find_stored(call)).metadata.tags
    return document_answer(200, (), responses.tagging(dict(sorted(tags.items()))))


async def put_tagging(call: Call) -> Answer:
    """Answer PutObjectTagging: replace all tags of an object."""
    async with read_document(call, requests.tagging()) as tags:
        await _change(call, tags)
    return Answer(200)


async def delete_tagging(call: Call) -> Answer:
    """Answer DeleteObjectTagging."""
    await _change(call, {})
    return Answer(204)


async def _change(call: Call, tags: Mapping[str, str]) -> None:
    for _ in range(_ATTEMPTS):
        what = await find_stored(call)
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
    """Answer GetBucketTagging. Raises S3Error NoSuchTagSet where there are none."""
    bucket = await call.backend.bucket(call.bucket)
    tags = await reserved_bucket.bucket_tags(call.backend, bucket)
    if not tags:
        raise S3Error("NoSuchTagSet", detail={"BucketName": call.bucket})
    return document_answer(200, (), responses.tagging(dict(sorted(tags.items()))))


async def put_bucket_tagging(call: Call) -> Answer:
    """Answer PutBucketTagging: replace all tags of a bucket."""
    bucket = await call.backend.bucket(call.bucket)
    async with read_document(call, requests.bucket_tagging()) as tags:
        await reserved_bucket.note_tags(call.backend, bucket, tags)
    return Answer(204)


async def delete_bucket_tagging(call: Call) -> Answer:
    """Answer DeleteBucketTagging."""
    await reserved_bucket.note_tags(call.backend, await call.backend.bucket(call.bucket), {})
    return Answer(204)
