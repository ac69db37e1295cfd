"""Buckets: made, changed and described over their rows in the name index.

Responsibility: the rules for buckets alone; what is in one is the store's business. Functions over the
index, no state. Concurrency: the service's trio thread.
"""

from __future__ import annotations

import time
from dataclasses import replace

from kvfs import limits, paths
from kvfs.errors import BucketNotFound, Exists, LimitExceeded, NotEmpty
from kvfs.keys import Namespace
from kvfs.name_rows import GHOST_ADMISSION, LARGE
from kvfs.names import BucketRow, NameIndex
from tiers.model import Bucket


def create(
    names: NameIndex,
    name: bytes,
    *,
    uid: int,
    gid: int,
    mode: int,
    durable: bool,
    admits_all: bool,
    large: bool,
    namespace: Namespace | None,
) -> Bucket:
    """Raises Exists, InvalidRequest, NameTooLong, LimitExceeded."""
    _check_new(names, name)
    now = time.time_ns()
    row = BucketRow(
        name=name,
        bucket_id=names.next_bucket_id(),
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
    names.put_bucket(row)
    return _bucket(row)


def adopt(names: NameIndex, row: BucketRow) -> None:
    """Make a bucket as another index had it, with an id of this one's. Raises as `create`."""
    _check_new(names, row.name)
    names.put_bucket(replace(row, bucket_id=names.next_bucket_id(), flags=row.flags & ~LARGE))


def _check_new(names: NameIndex, name: bytes) -> None:
    paths.check_bucket(name)
    if names.get_bucket(name) is not None:
        raise Exists(f"bucket {name.decode()} exists")
    if len(names.buckets()) >= limits.MAX_BUCKETS:
        raise LimitExceeded(
            f"bucket {name.decode()}: there are {limits.MAX_BUCKETS} buckets, which is the limit"
        )


def get(names: NameIndex, name: bytes) -> Bucket:
    """Raises BucketNotFound."""
    return _bucket(_row(names, name))


def every(names: NameIndex) -> list[Bucket]:
    return [_bucket(row) for row in names.buckets()]


def change(
    names: NameIndex,
    name: bytes,
    *,
    mode: int | None,
    uid: int | None,
    gid: int | None,
    mtime_ns: int | None,
    namespace: Namespace | None,
    large: bool | None,
) -> Bucket:
    """Change what is given. A namespace is bound once, to a bucket without names under `kv/`."""
    row = _row(names, name)
    if namespace is not None:
        row = _bound(names, row, namespace)
    row = replace(
        row,
        mode=row.mode if mode is None else mode & 0o7777,
        uid=row.uid if uid is None else uid,
        gid=row.gid if gid is None else gid,
        mtime_ns=row.mtime_ns if mtime_ns is None else mtime_ns,
        flags=row.flags if large is None else row.flags & ~LARGE | (LARGE if large else 0),
    )
    names.put_bucket(row)
    return _bucket(row)


def _bound(names: NameIndex, row: BucketRow, namespace: Namespace) -> BucketRow:
    if row.namespace not in (None, namespace.digest):
        raise Exists(f"bucket {row.name.decode()} is bound to another namespace already")
    if row.namespace is None and names.has_prefix(row.name, b"kv/"):
        raise NotEmpty(
            f"bucket {row.name.decode()} has names under kv/, which a namespace needs for its blocks"
        )
    return replace(row, namespace=namespace.digest, namespace_json=namespace.canonical)


def _row(names: NameIndex, name: bytes) -> BucketRow:
    row = names.get_bucket(name)
    if row is None:
        raise BucketNotFound(f"no bucket {name.decode(errors='replace')!r}")
    return row


def _bucket(row: BucketRow) -> Bucket:
    return Bucket(
        name=row.name,
        bucket_id=row.bucket_id,
        durable=row.class_ == "durable",
        uid=row.uid,
        gid=row.gid,
        mode=row.mode,
        created_ns=row.created_ns,
        mtime_ns=row.mtime_ns,
        namespace=row.namespace,
        admits_all=not row.flags & GHOST_ADMISSION,
        large=bool(row.flags & LARGE),
    )
