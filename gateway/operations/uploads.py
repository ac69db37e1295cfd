"""Multipart uploads in the store: the record and parts of each until it is completed, aborted or expires.

Responsibility: the records and parts in the gateway's own bucket, so that any worker goes on with any upload, also
after a restart: `uploads/ID/` is a marker with the record, `parts/ID/NNNNN` are the parts, ordinary objects. No door
lists them with the bucket's keys; on the mount they are under `.kvfs-s3`, which only the service's user may enter.

Invariants:
- An upload exists while its record does, and has ended where its key names the object that it has become. The seal of
  that needs the record, which is removed when the object is durable; who aborts removes the record, and then looks
  whether the object was first. The record goes before the parts, so that parts without one are nobody's.
- Where there is an NVMe tier, parts are durable. Else they count as cache: a directory that is named by a hash is
  evicted as one (`kvfs.paths.unit_prefix`), so an upload that was evicted has no parts at all, and its completion
  fails with InvalidPart.
- Any worker removes, at its start and now and then, what a worker or service that died has left, and uploads that were
  idle for longer than the expiry (`expire`). `gateway.call.upload_counts` limits how many an owner may have.

Concurrency: any worker.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import trio

from gateway.backend import reserved_bucket
from gateway.backend.backend import Backend
from gateway.backend.lookup import ObjectLookup
from gateway.call.object_view import Stored, read_metadata, stored
from gateway.protocol.checksums import Algorithm, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.metadata import ObjectMetadata
from kvfs import limits
from kvfs.errors import BucketNotFound, Exists, KvfsError, NotFound

log = logging.getLogger("kvfs.gateway")

_RECORDS = "uploads/"
_PARTS = "parts/"
_TIME_BYTES, _RANDOM_BYTES = 8, 8
_ID_BYTES = _TIME_BYTES + _RANDOM_BYTES


@dataclass(frozen=True, slots=True)
class Upload:
    """One multipart upload."""

    upload_id: str
    """32 hex digits, which begin with the time."""
    bucket: str
    key: str
    owner: str
    initiated_ns: int
    metadata: ObjectMetadata = field(default_factory=ObjectMetadata)
    algorithm: Algorithm | None = None
    checksum_type: ChecksumType | None = None
    record: ObjectLookup | None = None
    """The record as it was read; its time is when the upload was last used."""

    @property
    def record_name(self) -> tuple[str, str]:
        """Return bucket and key of the upload's record."""
        return reserved_bucket.BUCKET, f"{_RECORDS}{self.upload_id}/"

    def part_key(self, number: int) -> str:
        """Return the key of a part in the reserved bucket."""
        return f"{_PARTS}{self.upload_id}/{number:05}"

    async def save(self, backend: Backend) -> None:
        """Write the upload's record."""
        record = {
            "bucket": self.bucket,
            "key": self.key,
            "owner": self.owner,
            "initiated_ns": self.initiated_ns,
            "metadata": b64encode(self.metadata.encode()).decode(),
            "algorithm": self.algorithm.value if self.algorithm else None,
            "type": self.checksum_type.value if self.checksum_type else None,
        }
        await reserved_bucket.put_note(backend, self.record_name[1], json.dumps(record).encode())

    async def touch(self, backend: Backend, expiry_s: float) -> None:
        """Renew an upload that is in use: it expires `expiry_s` from now on.

        Its time is written once in a quarter of that at most. An upload that has ended meanwhile stays ended.
        """
        now_ns = time.time_ns()
        if self.record is not None and now_ns - self.record.mtime_ns > expiry_s * 1e9 / 4:
            with suppress(NotFound, Exists):
                await backend.set_metadata(*self.record_name, self.record, self.record.user_metadata, now_ns)

    async def remove(self, backend: Backend) -> bool:
        """Remove the record and the parts, and return whether the record was there."""
        taken = await backend.remove(*self.record_name)
        await remove_parts(backend, self.upload_id)
        return taken

    async def parts(self, backend: Backend) -> dict[int, ObjectLookup]:
        """List the parts by number, in order."""
        return {number: found async for number, found in _parts(backend, self.upload_id)}


def new_upload_id(initiated_ns: int) -> str:
    """Make an id that sorts as its time, since S3 lists the uploads of one key by age."""
    return initiated_ns.to_bytes(_TIME_BYTES, "big").hex() + secrets.token_hex(_RANDOM_BYTES)


def _upload(upload_id: str, record: ObjectLookup) -> Upload | None:
    try:
        values: dict[str, Any] = json.loads(record.user_metadata)
        return Upload(
            upload_id,
            values["bucket"],
            values["key"],
            values["owner"],
            values["initiated_ns"],
            read_metadata(b64decode(values["metadata"])),
            Algorithm(values["algorithm"]) if values["algorithm"] else None,
            ChecksumType(values["type"]) if values["type"] else None,
            record,
        )
    except (ValueError, KeyError, TypeError) as error:
        log.warning("the record of upload %s cannot be read: %s", upload_id, error)
        return None


def _is_id(upload_id: str) -> bool:
    return len(upload_id) == 2 * _ID_BYTES and all(letter in "0123456789abcdef" for letter in upload_id)


async def find_upload(backend: Backend, upload_id: str, bucket: str, key: str) -> Upload | None:
    """Find the upload of an id; return None where there is none, or of another key."""
    upload = await _find_record(backend, upload_id)
    return upload if upload is not None and (upload.bucket, upload.key) == (bucket, key) else None


async def _find_record(backend: Backend, upload_id: str) -> Upload | None:
    """Find the upload of an id; return None where there is no record, or none that can be read."""
    if not _is_id(upload_id):
        return None
    try:
        found = await backend.find(reserved_bucket.BUCKET, f"{_RECORDS}{upload_id}/")
    except BucketNotFound:
        return None
    return None if found is None else _upload(upload_id, found)


async def sealed_of(backend: Backend, upload_id: str, bucket: str, key: str) -> Stored | None:
    """Find the object that an upload has become; None where the key does not stand for that. Raises BucketNotFound."""
    found = await backend.find(bucket, key)
    if found is None or found.marker or not upload_id:
        return None
    what = stored(found)
    return what if what.metadata.upload_id == upload_id else None


async def need_upload(backend: Backend, upload_id: str | None, bucket: str, key: str) -> Upload:
    """Find an upload. Raises S3Error NoSuchUpload, BucketNotFound."""
    upload = await find_upload(backend, upload_id or "", bucket, key)
    if upload is None:
        await backend.bucket(bucket)
        raise S3Error("NoSuchUpload", detail={"UploadId": upload_id or ""})
    return upload


async def all_uploads(backend: Backend) -> list[Upload]:
    """Return all uploads under way, of all buckets."""
    found = []
    async for key, row in _under(backend, _RECORDS):
        upload = _upload(key[len(_RECORDS) : -1], row)
        if upload is not None:
            found.append(upload)
    return found


async def uploads_of(backend: Backend, bucket: str) -> list[Upload]:
    """List the uploads of one bucket, by key and id."""
    found = [upload for upload in await all_uploads(backend) if upload.bucket == bucket]
    return sorted(found, key=lambda each: (each.key, each.upload_id))


async def remove_parts(backend: Backend, upload_id: str) -> None:
    """Remove all parts of an upload."""
    async for number, _ in _parts(backend, upload_id):
        await backend.remove(reserved_bucket.BUCKET, f"{_PARTS}{upload_id}/{number:05}")


async def _parts(backend: Backend, upload_id: str) -> AsyncIterator[tuple[int, ObjectLookup]]:
    async for key, found in _under(backend, f"{_PARTS}{upload_id}/"):
        name = key.rpartition("/")[2]
        if name.isdigit() and not found.marker:
            yield int(name), found


async def _under(backend: Backend, prefix: str) -> AsyncIterator[tuple[str, ObjectLookup]]:
    after: str | None = ""
    while after is not None:
        try:
            page = await backend.list(reserved_bucket.BUCKET, prefix=prefix, after=after)
        except BucketNotFound:
            return
        for key, found in page.entries:
            if found is not None:
                yield key, found
        after = page.after


async def _is_idle(backend: Backend, upload: Upload, since_ns: int) -> bool:
    """Return whether an upload's record and all of its parts are older than `since_ns`."""
    if upload.record is None or upload.record.mtime_ns >= since_ns:
        return False
    return all(found.mtime_ns < since_ns for found in (await upload.parts(backend)).values())


async def _has_ended(backend: Backend, upload: Upload) -> bool:
    """Return whether an upload has become its object, or its bucket is gone: a kill left its record."""
    try:
        return await sealed_of(backend, upload.upload_id, upload.bucket, upload.key) is not None
    except BucketNotFound:
        return True


async def expire(backend: Backend, older_than_s: float, now_ns: int | None = None) -> int:
    """Remove uploads that were idle for so long or have ended, and parts without a record; return how many uploads were
    removed."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    removed = 0
    kept = set()
    for upload in await all_uploads(backend):
        if await _has_ended(backend, upload):
            await backend.settle()  # its completion may be under way
            removed += await upload.remove(backend)
        elif await _is_idle(backend, upload, now_ns - int(older_than_s * 1e9)):
            log.info("upload %s of %s/%s has expired", upload.upload_id, upload.bucket, upload.key)
            removed += await upload.remove(backend)
        else:
            kept.add(upload.upload_id)
    found = {key[len(_PARTS) :].partition("/")[0] async for key, _ in _under(backend, _PARTS)}
    for upload_id in found - kept:
        if await _find_record(backend, upload_id) is None:  # else it was begun meanwhile
            await remove_parts(backend, upload_id)
    return removed


async def expire_for_ever(backend: Backend, older_than_s: float) -> None:
    """Remove expired uploads until cancelled."""
    while True:
        try:
            await expire(backend, older_than_s)
        except KvfsError as error:
            log.warning("expired uploads were not removed: %s", error)
        await trio.sleep(limits.EXPIRE_INTERVAL_S)
