"""Owners of buckets, and who may enter which.

Responsibility: the owner of a bucket, remembered for a moment, and the two refusals that follow from it: a credential
without rights of its own may not enter another owner's bucket, and a request that names the owner it expects
(`x-amz-expected-bucket-owner`) may enter only that owner's.

Invariants: a bucket that another door made belongs to nobody: all may enter it, and it is never the expected owner's. A
change by another worker is seen within limits.OWNER_MEMORY_S, one by this worker at once. Nothing is remembered of a
missing bucket, nor that a young one is nobody's.

Concurrency: one trio thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.backend import reserved_bucket
from gateway.backend.backend import Backend
from gateway.protocol.errors import S3Error
from kvfs import limits
from kvfs.config.credentials import Credential
from kvfs.errors import BucketNotFound


class Owners:
    """The owners of buckets."""

    def __init__(self, backend: Backend, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        self._known: dict[str, tuple[str | None, float]] = {}

    async def of(self, bucket: str) -> str | None:
        """Find the owner of a bucket; return None for a bucket that is nobody's, or not there."""
        known = self._known.get(bucket)
        if known is not None and known[1] > self._clock():
            return known[0]
        try:
            made_ns = (await self._backend.bucket(bucket)).created_ns
        except BucketNotFound:
            return None
        owner = await reserved_bucket.bucket_owner(self._backend, bucket)
        if owner is None and time.time_ns() - made_ns < limits.OWNER_MEMORY_S * 1e9:
            return None  # the worker that made it may be about to note the owner
        if len(self._known) >= limits.MAX_REMEMBERED_OWNERS:
            self._known.clear()
        self._known[bucket] = owner, self._clock() + limits.OWNER_MEMORY_S
        return owner

    def lets_in(self, credential: Credential, bucket: str) -> bool:
        """Return `may_enter` as far as it is remembered; False where the index is to be asked."""
        if credential.rights is not None:
            return True
        known = self._known.get(bucket)
        return known is not None and known[1] > self._clock() and known[0] in (None, credential.owner_id)

    def invalidate(self, bucket: str) -> None:
        """Drop what is remembered of a bucket that was made or removed."""
        self._known.pop(bucket, None)

    async def may_enter(self, credential: Credential, bucket: str) -> bool:
        """Return whether a credential may enter a bucket: nobody's, its own, or any where it has rights of its own."""
        return credential.rights is not None or await self.of(bucket) in (None, credential.owner_id)

    async def check_entry(self, credential: Credential, bucket: str) -> None:
        """Check that a credential may enter a bucket. Raises S3Error AccessDenied."""
        if not await self.may_enter(credential, bucket):
            raise S3Error("AccessDenied", f"The bucket {bucket} belongs to somebody else.")

    async def check_expected(self, expected: str | None, bucket: str) -> None:
        """Check that a bucket, if it is there, has the owner in a request's header. Raises S3Error AccessDenied."""
        if expected is None or await self.of(bucket) == expected:
            return
        try:
            await self._backend.bucket(bucket)
        except BucketNotFound:
            return
        raise S3Error("AccessDenied", f"The bucket {bucket} does not belong to the owner that is expected.")
