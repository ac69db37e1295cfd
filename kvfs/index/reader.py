"""The name index read by another process than the service: names and buckets as the last transaction left them.

Responsibility: open the service's LMDB environment read-only and look names up in it. A change is committed before a
session is answered, in memory that both processes map, so a reader that looks after the answer sees it.

Invariants: nothing is written but LMDB's own table of readers; a transaction lasts for one call, and keeps no old page
in use. Buckets are decoded once, and again when their row changes.

Concurrency: one thread. One process opens an environment once: not for use inside the service.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import lmdb

from kvfs.errors import BucketNotFound
from kvfs.index.environment import check_format, failure, read_once
from kvfs.index.listing import ListPage, list_page
from kvfs.index.rows import BucketRow, NameRow, load_row
from kvfs.index.tree import NameTree, Txn
from kvfs.limits import MAX_LIST_ENTRIES

T = TypeVar("T")


class FoundName(NamedTuple):
    """A bucket, and the row of a name in it, as one transaction saw them."""

    bucket: BucketRow
    row: NameRow | None


class NameReader:
    """Open the index of a running service. Raises FormatMismatch, Corrupt, OSError where it cannot be read.

    Its methods raise Corrupt for damage, OutOfResources where the machine lacks something.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._env = lmdb.open(
                str(path), readonly=True, create=False, max_dbs=4, max_spare_txns=2, readahead=False
            )
        except lmdb.Error as error:
            raise OSError(f"name index {path} cannot be read: {error}") from None
        self._path = path
        self._known: dict[bytes, tuple[bytes, BucketRow]] = {}
        try:
            databases = [self._env.open_db(name, create=False) for name in _DATABASES]
            meta, names, tails, self._bucket_db = databases
            check_format(read_once(self._env, lambda txn: txn.get(b"format", db=meta)), str(path))
            self._tree = NameTree(names, tails)
        except lmdb.Error as error:
            self._env.close()
            raise OSError(f"name index {path} cannot be read: {error}") from None
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def bucket(self, name: bytes) -> BucketRow:
        """Look a bucket up. Raises BucketNotFound."""
        return self._read(lambda txn: self._bucket(txn, name))

    def buckets(self) -> list[BucketRow]:
        """Return all buckets, by name."""

        def look(txn: Txn) -> list[bytes]:
            with txn.cursor(db=self._bucket_db) as cursor:
                return [name for name, _ in cursor]

        names = self._read(look)
        return [self.bucket(name) for name in names]

    def find(self, bucket: bytes, key: bytes) -> FoundName:
        """Return a bucket and the row of a name in it, None where there is none. Raises BucketNotFound, Corrupt."""
        name = bucket + b"\0" + key

        def look(txn: Txn) -> tuple[BucketRow, bytes | None]:
            return self._bucket(txn, bucket), self._tree.get(txn, name)

        where, data = self._read(look)
        return FoundName(where, None if data is None else NameRow.decode(load_row(name, data)))

    def peek(self, name: bytes) -> bytes | None:
        """Return the stored row of `bucket NUL key`, for `kvfs.index.rows.load_row`; None without one, and in a bucket
        that is bound to a namespace. Raises BucketNotFound, Corrupt."""
        bucket = name[: name.index(0)]

        def look(txn: Txn) -> bytes | None:
            return None if self._bucket(txn, bucket).namespace is not None else self._tree.get(txn, name)

        return self._read(look)

    def list(
        self,
        bucket: bytes,
        *,
        prefix: bytes = b"",
        after: bytes = b"",
        delimiter: bytes | None = None,
        limit: int = MAX_LIST_ENTRIES,
    ) -> ListPage:
        """Read one page; the arguments are those of `NameIndex.list`."""
        return self._read(lambda txn: list_page(self._tree, txn, bucket, prefix, after, delimiter, limit))

    def _bucket(self, txn: Txn, name: bytes) -> BucketRow:
        data = txn.get(name, db=self._bucket_db) if name else None
        if data is None:
            raise BucketNotFound(f"no bucket {name.decode(errors='replace')}")
        known = self._known.get(name)
        if known is None or known[0] != data:
            known = data, BucketRow.decode(name, load_row(name, data))
            self._known[name] = known
        return known[1]

    def _read(self, look: Callable[[Txn], T]) -> T:
        try:
            try:
                return read_once(self._env, look)
            except lmdb.MapResizedError:  # the service has grown the map
                self._env.set_mapsize(0)
            return read_once(self._env, look)
        except lmdb.Error as error:
            raise failure(self._path, error) from error


_DATABASES = (b"meta", b"names", b"tails", b"buckets")
