"""Buckets: made, changed and removed, in the index, the journal and the listeners.

Invariants: a change is in the index before the journal has it. A namespace is bound once, to a bucket without names
under `kv/`.
Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import time
from dataclasses import replace

from kvfs import limits, paths
from kvfs.errors import Exists, LimitExceeded, NotEmpty
from kvfs.index.names import NameIndex
from kvfs.index.rows import GHOST_ADMISSION, LARGE, BucketRow
from kvfs.namespaces import Namespace
from tiers.model.objects import Bucket, Change, ChangeKind, Directory, Name
from tiers.store.catalog import bucket_of_row
from tiers.store.context import Context


class BucketOps:
    """See the module's header."""

    def __init__(self, context: Context) -> None:
        self._catalog, self._names = context.catalog, context.catalog.names
        self._listeners, self._journal = context.listeners, context.journal

    def create_bucket(
        self,
        name: bytes,
        *,
        uid: int,
        gid: int,
        mode: int = 0o755,
        durable: bool = False,
        admits_all: bool = True,
        large: bool = False,
        namespace: Namespace | None = None,
    ) -> Bucket:
        """Make a bucket. Raises Exists, InvalidRequest, NameTooLong, LimitExceeded; DeviceMissing for a durable or
        large one without the NVMe tier."""
        self._journal.check_queue()
        if durable:
            self._journal.check_durable(0)
        self._check_large(large)
        self._check_new(name)
        now = time.time_ns()
        row = BucketRow(
            name=name,
            bucket_id=self._names.next_bucket_id(),
            class_="durable" if durable else "cache",
            flags=(0 if admits_all else GHOST_ADMISSION) | (LARGE if large else 0),
            uid=uid,
            gid=gid,
            mode=mode & 0o7777,
            created_ns=now,
            mtime_ns=now,
            namespace=namespace.digest if namespace else None,
            namespace_json=namespace.canonical if namespace else b"",
        )
        self._put(row)
        self._catalog.directory_times.touch(Name(b"", b""))
        return bucket_of_row(row)

    def adopt_bucket(self, row: BucketRow) -> None:
        """Make a bucket anew as a lower tier has it, with an id of its own. Raises as `create_bucket`."""
        self._check_new(row.name)
        self._put(replace(row, bucket_id=self._names.next_bucket_id(), flags=row.flags & ~LARGE))

    def _check_large(self, large: bool | None) -> None:
        """Check that there is a tier for large objects where one is wanted. Raises DeviceMissing."""
        if large:
            _ = self._journal.large

    def _check_new(self, name: bytes) -> None:
        paths.check_bucket(name)
        if self._names.get_bucket(name) is not None:
            raise Exists(f"bucket {name.decode()} exists")
        if len(self._names.buckets()) >= limits.MAX_BUCKETS:
            raise LimitExceeded(
                f"bucket {name.decode()}: there are {limits.MAX_BUCKETS} buckets, which is the limit"
            )

    def _put(self, row: BucketRow) -> None:
        self._names.put_bucket(row)
        self._journal.bucket(row)

    def set_bucket(
        self,
        name: bytes,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
        namespace: Namespace | None = None,
        large: bool | None = None,
    ) -> Bucket:
        """Change what is given. Raises BucketNotFound; Exists, NotEmpty for a namespace that cannot be bound;
        DeviceMissing for `large` without the NVMe tier."""
        self._journal.check_queue()
        self._check_large(large)
        row = self._catalog.bucket_row(name)
        if namespace is not None:
            row = _bound(self._names, row, namespace)
        row = replace(
            row,
            mode=row.mode if mode is None else mode & 0o7777,
            uid=row.uid if uid is None else uid,
            gid=row.gid if gid is None else gid,
            mtime_ns=row.mtime_ns if mtime_ns is None else mtime_ns,
            flags=row.flags if large is None else row.flags & ~LARGE | (LARGE if large else 0),
        )
        self._put(row)
        self.set_times(Name(name, b""), mtime_ns)
        self._listeners.notify(Change(ChangeKind.ATTRIBUTES, Name(name, b""), None))
        return bucket_of_row(row)

    def remove_bucket(self, name: bytes) -> None:
        """Remove a bucket. Raises NotEmpty while any name or block is in it."""
        bucket = self._catalog.bucket(name)
        self._catalog.native_seals.end_channels(name)
        if self._names.has_prefix(name, b"") or self._catalog.blocks.count(name):
            raise NotEmpty(f"bucket {name.decode()} is not empty")
        self._names.remove_bucket(name)
        self._journal.bucket_removed(bucket.bucket_id)
        self._listeners.notify(Change(ChangeKind.REMOVED, Name(name, b""), None))

    def set_times(self, name: Name, mtime_ns: int | None) -> None:
        """Record that a directory's attributes changed, and its mtime if that is given."""
        found = self._catalog.lookup(name)
        assert isinstance(found, Directory)
        self._catalog.directory_times.set(
            name, found.mtime_ns if mtime_ns is None else mtime_ns, time.time_ns()
        )


def _bound(names: NameIndex, row: BucketRow, namespace: Namespace) -> BucketRow:
    if row.namespace not in (None, namespace.digest):
        raise Exists(f"bucket {row.name.decode()} is bound to another namespace already")
    if row.namespace is None and names.has_prefix(row.name, b"kv/"):
        raise NotEmpty(
            f"bucket {row.name.decode()} has names under kv/, which a namespace needs for its blocks"
        )
    return replace(row, namespace=namespace.digest, namespace_json=namespace.canonical)
