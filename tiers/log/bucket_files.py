"""Files that repeat the buckets' rows, away from segments and index.

Responsibility: `buckets/<bucket id>` in the data directory, a file for each bucket. A damaged segment may cost the
bucket's record; where the index is lost too, every name in the bucket would be lost with that one record.

Invariants: a file is there, synced, before the bucket's record is queued, and removed before its deletion is. So it is
never older than a record; where it cannot be written it is removed, and the log alone has the bucket. Files count only
for an index that is built anew, and never for a bucket that the log says has ended.

Concurrency: the service's trio thread. A change blocks it for two syncs, and buckets change seldom.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import KvfsError
from kvfs.index.rows import BucketRow
from tiers.device.files import sync_directory
from tiers.log.records import BucketBody

_log = logging.getLogger("kvfs.store")

DIRECTORY: Final = "buckets"
_CHECKSUM_BYTES: Final = 8
_MOST_BYTES: Final = 1 << 16
"""More than any row has: nothing larger is read."""


class BucketFiles:
    """Repeats the buckets of one data directory."""

    def __init__(self, home: Path) -> None:
        self._path = home / DIRECTORY

    def load(self) -> dict[int, BucketRow]:
        """Return the rows by bucket id; damaged files are passed over."""
        found: dict[int, BucketRow] = {}
        for file in sorted(self._path.iterdir()) if self._path.is_dir() else ():
            row = _read(file)
            if row is not None and file.name == _name(row.bucket_id):
                found[row.bucket_id] = row
        return found

    def put(self, row: BucketRow) -> None:
        """Write a bucket as it is now, durably."""
        try:
            self._write(row, synced=True)
            self._sync()
        except OSError as error:
            _log.warning("%s: bucket %s is in the log alone: %s", self._path, row.name.decode(), error)
            self.remove(row.bucket_id)

    def remove(self, bucket_id: int) -> None:
        """Remove the file of a bucket, durably."""
        try:
            (self._path / _name(bucket_id)).unlink(missing_ok=True)
            self._sync()
        except OSError as error:
            _log.warning("%s: %s", self._path, error)

    def complete(self, rows: Iterable[BucketRow]) -> None:
        """Write and remove files, at a start, so that these buckets are there; not synced, since index or log has
        them."""
        known, wanted = self.load(), {row.bucket_id: row for row in rows}
        try:
            for bucket_id in known.keys() - wanted.keys():
                (self._path / _name(bucket_id)).unlink(missing_ok=True)
            for bucket_id, row in wanted.items():
                if known.get(bucket_id) != row:
                    self._write(row, synced=False)
        except OSError as error:
            _log.warning("%s: not all buckets are repeated there: %s", self._path, error)

    def _write(self, row: BucketRow, *, synced: bool) -> None:
        body = BucketBody(row).encode()
        self._path.mkdir(mode=0o700, exist_ok=True)
        temporary = self._path / f"{_name(row.bucket_id)}.new"
        with temporary.open("wb") as file:
            file.write(xxh3_64(body).to_bytes(_CHECKSUM_BYTES, "little") + body)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(self._path / _name(row.bucket_id))

    def _sync(self) -> None:
        if self._path.is_dir():
            sync_directory(self._path)


def _name(bucket_id: int) -> str:
    return f"{bucket_id:016x}"


def _read(file: Path) -> BucketRow | None:
    """Read one file; return None where it is damaged, or no bucket's."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MOST_BYTES)
        body = data[_CHECKSUM_BYTES:]
        if int.from_bytes(data[:_CHECKSUM_BYTES], "little") != xxh3_64(body):
            return None
        return BucketBody.decode(body).row
    except (OSError, KvfsError):
        return None
