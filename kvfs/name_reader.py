"""The name index read by another process than the service: names and buckets as the last transaction left them.

Responsibility: open the service's LMDB environment read-only and look names up in it. What a session was answered is
in the index before the answer, so a reader that looks after it sees it: LMDB's readers begin at the newest committed
transaction, and the service commits in memory that both map.

Invariants: nothing is written but LMDB's own table of readers; a transaction lasts for one call, so no page is kept
from being used again. Buckets are decoded once, and again when their row changes.

Concurrency: one thread. One process opens an environment once: not for use inside the service.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import lmdb

from kvfs.errors import BucketNotFound, Corrupt
from kvfs.limits import MAX_LIST_ENTRIES
from kvfs.name_env import check_format
from kvfs.name_rows import BucketRow, NameRow, load_row
from kvfs.name_tree import NameTree
from kvfs.names import ListPage, list_page

if TYPE_CHECKING:
    Txn = lmdb.Transaction[bytes]

T = TypeVar("T")


class FoundName(NamedTuple):
    bucket: BucketRow
    row: NameRow | None


class NameReader:
    """Raises, when built: FormatMismatch, Corrupt, OSError for an index that this process cannot read."""

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
            with self._env.begin() as txn:
                check_format(txn.get(b"format", db=meta), str(path))
            self._tree = NameTree(names, tails)
        except lmdb.Error as error:
            self._env.close()
            raise OSError(f"name index {path} cannot be read: {error}") from None
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def bucket(self, name: bytes) -> BucketRow:
        """Raises BucketNotFound."""
        return self._read(lambda txn: self._bucket(txn, name))

    def buckets(self) -> list[BucketRow]:
        """All buckets, by name."""

        def look(txn: Txn) -> list[bytes]:
            with txn.cursor(db=self._bucket_db) as cursor:
                return [name for name, _ in cursor]

        names = self._read(look)
        return [self.bucket(name) for name in names]

    def find(self, bucket: bytes, key: bytes) -> FoundName:
        """A bucket and the row of a name in it, None where there is none. Raises BucketNotFound, Corrupt."""
        name = bucket + b"\0" + key

        def look(txn: Txn) -> tuple[BucketRow, bytes | None]:
            return self._bucket(txn, bucket), self._tree.get(txn, name)

        where, data = self._read(look)
        return FoundName(where, None if data is None else NameRow.decode(load_row(name, data)))

    def peek(self, name: bytes) -> bytes | None:
        """What is stored under `bucket NUL key`, undecoded (`kvfs.name_rows.load_row`); None where there is nothing,
        or the bucket is bound to a namespace. Raises BucketNotFound, Corrupt."""
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
        """As `NameIndex.list`."""
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
                with self._env.begin() as txn:
                    return look(txn)
            except lmdb.MapResizedError:  # the service has grown the map
                self._env.set_mapsize(0)
                with self._env.begin() as txn:
                    return look(txn)
        except lmdb.Error as error:
            raise Corrupt(f"name index {self._path}: {error}") from error


_DATABASES = (b"meta", b"names", b"tails", b"buckets")
