"""The gateway's own bucket: owners and tags of buckets, and uploads.

Responsibility: the bucket `.kvfs-s3`, of mode 0700 and with a name that S3 cannot have, and the owners and tags of
buckets in it: directory markers `owners/BUCKET/`, whose user metadata is the owner's name, and `tags/BUCKET/`, with
JSON that holds the bucket's time of creation, so that a later bucket of that name does not get its tags. Markers have
no bytes, so they are never evicted. Uploads are `gateway.operations.uploads`'s.

Concurrency: any worker; every write is one operation of the service.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from gateway.backend.backend import Backend
from gateway.backend.lookup import BucketInfo
from kvfs.errors import BucketNotFound, Exists
from kvfs.protocol.messages import Op

BUCKET = ".kvfs-s3"
_OWNERS = "owners/"
_TAGS = "tags/"


async def make(backend: Backend) -> None:
    """Make the bucket, if it is not there yet: durable where that can be, so that no part of an upload is evicted."""
    tiers = (await backend.status())["tiers"]
    durable = any(tier["name"] == "nvme" for tier in tiers)
    with contextlib.suppress(Exists):
        await backend.sessions.control(Op.BUCKET_CREATE, bucket=BUCKET, mode=0o700, durable=durable)


async def put_note(backend: Backend, key: str, data: bytes) -> None:
    """Put a marker with `data` in the place of an earlier one; `key` ends in '/'."""
    try:
        await backend.put_marker(BUCKET, key, data)
    except BucketNotFound:
        await make(backend)
        await backend.put_marker(BUCKET, key, data)


async def note_owner(backend: Backend, bucket: str, owner: str) -> None:
    """Note who owns a bucket."""
    await put_note(backend, f"{_OWNERS}{bucket}/", owner.encode())


async def bucket_owner(backend: Backend, bucket: str) -> str | None:
    """Return who owns a bucket; None where nobody was noted."""
    try:
        found = await backend.find(BUCKET, f"{_OWNERS}{bucket}/")
    except BucketNotFound:
        return None
    return None if found is None else found.user_metadata.decode()


async def remove_notes(backend: Backend, bucket: str) -> None:
    """Remove what was noted of a bucket, there or not."""
    with contextlib.suppress(BucketNotFound):
        await backend.remove(BUCKET, f"{_OWNERS}{bucket}/")
        await backend.remove(BUCKET, f"{_TAGS}{bucket}/")


async def note_tags(backend: Backend, bucket: BucketInfo, tags: Mapping[str, str]) -> None:
    """Replace a bucket's tags; an empty mapping removes them."""
    if tags:
        note = {"created_ns": bucket.created_ns, "tags": dict(tags)}
        await put_note(backend, f"{_TAGS}{bucket.name}/", json.dumps(note, ensure_ascii=False).encode())
    else:
        with contextlib.suppress(BucketNotFound):
            await backend.remove(BUCKET, f"{_TAGS}{bucket.name}/")


async def bucket_tags(backend: Backend, bucket: BucketInfo) -> dict[str, str]:
    """Return a bucket's tags; those of an earlier bucket of the name do not count."""
    try:
        found = await backend.find(BUCKET, f"{_TAGS}{bucket.name}/")
    except BucketNotFound:
        return {}
    note = json.loads(found.user_metadata) if found is not None else {}
    return dict(note["tags"]) if note.get("created_ns") == bucket.created_ns else {}
