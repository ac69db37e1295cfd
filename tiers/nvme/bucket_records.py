"""Records of buckets in the log: one of each bucket counts, and reclaim moves it.

Responsibility: where the newest record of each bucket lies, and what it counts for. Concurrency: the service's trio
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfs.formats import RecordType
from kvfs.index.rows import BucketRow
from tiers.log.entries import Location, Record
from tiers.log.records import BucketBody
from tiers.nvme.stored import counted_bytes

Place = tuple[Location, int]
"""Where a record lies, and the bytes that it counts for."""


@dataclass(slots=True)
class _Bucket:
    row: BucketRow
    place: Place | None = None


class BucketRecords:
    """See the module's header."""

    def __init__(self, account: Callable[[Place | None, int], None]) -> None:
        """Begin without buckets. `account` counts a record in its segment, or (-1) stops counting it."""
        self._account = account
        self._buckets: dict[int, _Bucket] = {}

    def is_durable(self, bucket_id: int) -> bool:
        """Return whether this bucket's objects are durable."""
        bucket = self._buckets.get(bucket_id)
        return bucket is not None and bucket.row.class_ == "durable"

    def adopt(self, row: BucketRow, place: Place) -> None:
        """Count a bucket of a replay."""
        self._buckets[row.bucket_id] = _Bucket(row, place)
        self._account(place, 1)

    def put(self, row: BucketRow) -> Record:
        """Make the record of a bucket as it is now."""
        bucket = self._buckets.setdefault(row.bucket_id, _Bucket(row))
        bucket.row = row
        return self._record(bucket)

    def remove(self, bucket_id: int) -> bool:
        """Stop counting a bucket; return whether there was one."""
        bucket = self._buckets.pop(bucket_id, None)
        if bucket is not None:
            self._account(bucket.place, -1)
        return bucket is not None

    def record_at(self, bucket_id: int, here: Location) -> Record | None:
        """Make the record of a bucket as it is now, if its record here is the one that counts."""
        bucket = self._buckets.get(bucket_id)
        live = bucket is not None and bucket.place is not None and bucket.place[0] == here
        return self._record(bucket) if bucket is not None and live else None

    def _record(self, bucket: _Bucket) -> Record:
        bucket_id, body, original = bucket.row.bucket_id, BucketBody(bucket.row).encode(), bucket.place

        def move_to(place: Place | None) -> None:
            if self._buckets.get(bucket_id) is bucket:
                self._account(bucket.place, -1)
                bucket.place = place
                self._account(place, 1)

        def written(location: Location, record_bytes: int, _: int) -> None:
            move_to((location, counted_bytes(record_bytes, len(body))))

        header: dict[str, int | bytes] = {"bucket_id": bucket_id}
        return Record(
            RecordType.BUCKET, bucket_id, header, body, written=written, lost=lambda error: move_to(original)
        )
