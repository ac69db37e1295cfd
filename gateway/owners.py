"""Whom buckets belong to, and who may therefore not come in.

Responsibility: the owner of a bucket, remembered for a moment, and the two refusals that follow from it: a credential
without rights of its own is not let into somebody else's bucket, and a request that names the owner it expects
(`x-amz-expected-bucket-owner`) is not let into another's.

Invariants: a bucket that another door made belongs to nobody, so it is everybody's and never the expected owner's. What
another worker changes is seen within limits.OWNER_MEMORY_S; what this one changes, at once. Nothing is remembered of a
bucket that is not there, and not that a young one is nobody's.

Concurrency: one trio thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway import reserved
from gateway.backend import Backend
from gateway.errors import S3Error
from kvfs import limits
from kvfs.credentials import Credential
from kvfs.errors import BucketNotFound


class Owners:
    """The owners of buckets."""

    def __init__(self, backend: Backend, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        self._known: dict[str, tuple[str | None, float]] = {}

    async def of(self, bucket: str) -> str | None:
        """None: nobody's, or not there."""
        known = self._known.get(bucket)
        if known is not None and known[1] > self._clock():
            return known[0]
        try:
            made_ns = (await self._backend.bucket(bucket)).created_ns
        except BucketNotFound:
            return None
        owner = await reserved.bucket_owner(self._backend, bucket)
        if owner is None and time.time_ns() - made_ns < limits.OWNER_MEMORY_S * 1e9:
            return None  # the worker that made it may be about to note whose it is
        if len(self._known) >= limits.MAX_REMEMBERED_OWNERS:
            self._known.clear()
        self._known[bucket] = owner, self._clock() + limits.OWNER_MEMORY_S
        return owner

    def forget(self, bucket: str) -> None:
        """Of a bucket that was made or removed."""
        self._known.pop(bucket, None)

    async def may_enter(self, credential: Credential, bucket: str) -> bool:
        """Whether the bucket is not somebody else's, or the credential has rights that reach others' buckets too."""
        return credential.rights is not None or await self.of(bucket) in (None, credential.owner_id)

    async def check_entry(self, credential: Credential, bucket: str) -> None:
        """Raises S3Error AccessDenied."""
        if not await self.may_enter(credential, bucket):
            raise S3Error("AccessDenied", f"The bucket {bucket} belongs to somebody else.")

    async def check_expected(self, expected: str | None, bucket: str) -> None:
        """`expected` is the header's value. Raises S3Error AccessDenied; leaves a missing bucket to the operation."""
        if expected is None or await self.of(bucket) == expected:
            return
        try:
            await self._backend.bucket(bucket)
        except BucketNotFound:
            return
        raise S3Error("AccessDenied", f"The bucket {bucket} does not belong to the owner that is expected.")
