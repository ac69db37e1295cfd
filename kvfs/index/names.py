"""The ordered index of names: which object each bucket and key stands for.

Responsibility: the names of all buckets, the buckets, and a few small values of the service (`meta`), in one
LMDB environment. Names are flat and ordered as S3 sees them, by the bytes of `bucket NUL key`. Rows are described in
`kvfs.index.rows`, long names in `kvfs.index.tree`, the file, its growth and its durability in `kvfs.index.environment`.

Invariants:
- One call is one transaction: after an error all of it happened or nothing.
- A listing is the sorted sequence of entries (keys, and common prefixes once each) that are greater than
  `after`; its cost is per entry returned, since a common prefix is skipped with one seek.

Concurrency: one process and one thread; no transaction outlives a call. A call waits for a device only where a page has
to be read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self

from kvfs.errors import Corrupt, CrossDevice, Exists, IsDirectory, LimitExceeded, NotEmpty, NotFound
from kvfs.index import levels
from kvfs.index.environment import NameEnvironment
from kvfs.index.full_names import bucket_base, check_name, full_name, full_prefix, is_name
from kvfs.index.levels import LevelPage
from kvfs.index.listing import ListEntry, ListPage, list_page, list_start
from kvfs.index.rows import (
    DIRECTORY,
    PINNED,
    BucketRow,
    NameRow,
    clear_flags,
    is_directory_row,
    is_name_row,
    load_row,
    row_of,
    store_row,
)
from kvfs.index.tree import NameScan, NameTree, Txn
from kvfs.limits import DEFAULT_NAME_MAP_BYTES, MAX_BUCKETS, MAX_KEY_BYTES, MAX_LIST_ENTRIES

__all__ = ["DIRECTORY", "PINNED", "BucketRow", "ListEntry", "ListPage", "NameIndex", "NameRow", "is_name"]


_Keys = Sequence[tuple[bytes, bytes]]
_Pairs = list[tuple[bytes, bytes]]
_Rows = list[NameRow | None]
Sift = Callable[[_Pairs], _Pairs]
"""Takes a page of (`bucket NUL key`, stored row) and returns a part of it."""


class NameIndex:
    """Look up and change names and buckets; `open` makes it."""

    def __init__(self, env: NameEnvironment) -> None:
        self.environment = env
        """Where other rows are kept in the same file, with the same durability."""
        self.get_meta, self.put_meta = env.get_meta, env.put_meta
        self.next_ids, self.skip_ids = env.next_ids, env.skip_ids
        self.next_bucket_id, self.skip_bucket_ids = env.next_bucket_id, env.skip_bucket_ids
        self.clear_dead_readers, self.close = env.clear_dead_readers, env.close
        self._tree = NameTree(env.open_db(b"names"), env.open_db(b"tails"))
        self._bucket_db = env.open_db(b"buckets")
        self._buckets = env.read(self._load_buckets)

    @classmethod
    def open(cls, path: Path, *, map_size_bytes: int = DEFAULT_NAME_MAP_BYTES) -> NameIndex:
        """Open or create the index in the directory `path`.

        Raises InvalidRequest for a map size over its limit, FormatMismatch for an index of a newer version,
        Corrupt for a file that LMDB refuses: the caller removes the directory and builds a new one.
        """
        env = NameEnvironment(path, map_size_bytes=map_size_bytes)
        try:
            return cls(env)
        except BaseException:
            env.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- names -------------------------------------------------------------------------------------------

    def get(self, bucket: bytes, key: bytes) -> NameRow | None:
        """Return the row of a name, or None. Raises Corrupt, InvalidRequest, NameTooLong."""
        name = full_name(bucket, key)
        data = self.environment.read(lambda txn: self._tree.get(txn, name))
        return None if data is None else row_of(name, data)

    def put(self, bucket: bytes, key: bytes, row: NameRow) -> None:
        """Write the row of a name, in place of an earlier one."""
        name = full_name(bucket, key)
        data = store_row(name, row.encode())
        self.environment.write(lambda txn: self._tree.put(txn, name, data))

    def put_many(self, rows: Iterable[tuple[bytes, bytes]]) -> int:
        """Put (`bucket NUL key`, encoded row) pairs, MAX_LIST_ENTRIES in one transaction; return how many."""
        total = 0
        pairs = ((name, store_row(check_name(name), row)) for name, row in rows)
        while page := list(islice(pairs, MAX_LIST_ENTRIES)):
            self.environment.write(partial(self._tree.put_many, pairs=page))
            total += len(page)
        return total

    def remove(self, bucket: bytes, key: bytes) -> NameRow | None:
        """Remove a name; return its row, None where there was none."""
        return self.remove_many([(bucket, key)])[0]

    def take(self, bucket: bytes, key: bytes, check: Callable[[NameRow], None]) -> NameRow | None:
        """Remove a name and return its row, None where there was none. Where `check` raises of the row, it stays."""
        name = full_name(bucket, key)

        def change(txn: Txn) -> NameRow | None:
            data = self._tree.remove(txn, name)
            if data is None:
                return None
            check(row := row_of(name, data))
            return row

        return self.environment.write(change, removes=True)

    def remove_many(self, keys: _Keys) -> _Rows:
        """Remove (bucket, key) pairs in one transaction; return the row of each, None where there was none."""
        names = [full_name(bucket, key) for bucket, key in keys]
        removed = self.environment.write(
            lambda txn: [self._tree.remove(txn, name) for name in names], removes=True
        )
        pairs = zip(names, removed, strict=True)
        return [None if data is None else row_of(name, data) for name, data in pairs]

    def rename(
        self,
        src_bucket: bytes,
        src_key: bytes,
        dst_bucket: bytes,
        dst_key: bytes,
        *,
        without: int = 0,
        replace: bool = True,
    ) -> tuple[NameRow, NameRow | None]:
        """Move a row, less the flags `without`; return it, and the row that it replaced.

        Raises NotFound, IsDirectory where keys are below the new one, Exists where it has a row that may not be
        replaced. A rename to the same name replaces nothing.
        """
        source, target = full_name(src_bucket, src_key), full_name(dst_bucket, dst_key)
        below = target + b"/"

        def change(txn: Txn) -> tuple[bytes, bytes | None]:
            scan = NameScan(self._tree, txn)
            # The key that moves may be one below, and the only one.
            is_directory = source != target and scan.seek(below) and scan.name.startswith(below)
            data = self._tree.remove(txn, source)
            if data is None:
                raise NotFound(f"no key {src_key!r} in bucket {src_bucket!r}")
            if is_directory:
                raise IsDirectory(f"key {dst_key!r} in bucket {dst_bucket!r} is a directory")
            row = clear_flags(load_row(source, data), without)
            replaced = self._tree.put(txn, target, store_row(target, row))
            if source == target:
                return row, None
            if replaced is not None and not replace:
                raise Exists(f"key {dst_key!r} in bucket {dst_bucket!r} exists")
            return row, replaced

        row, replaced = self.environment.write(change)
        return NameRow.decode(row), None if replaced is None else row_of(target, replaced)

    def rename_prefix(
        self, src_bucket: bytes, src_prefix: bytes, dst_bucket: bytes, dst_prefix: bytes, *, limit: int
    ) -> _Pairs:
        """Move every key under a prefix in one transaction; return (old key, new key) pairs in order.

        Raises CrossDevice when there are more than `limit` keys, NameTooLong for a new key that is too long,
        NotEmpty where a new key is taken by anything but an empty directory's marker; then nothing is moved.
        """
        source, target = full_prefix(src_bucket, src_prefix), full_prefix(dst_bucket, dst_prefix)

        def change(txn: Txn) -> _Pairs:
            moved = self._under(txn, source, limit)
            for name, _ in moved:
                self._tree.remove(txn, name)
            pairs: _Pairs = []
            for name, data in moved:
                new_key = dst_prefix + name[len(source) :]
                new_name = full_name(dst_bucket, new_key)
                replaced = self._tree.put(txn, new_name, store_row(new_name, load_row(name, data)))
                if replaced is not None and not is_directory_row(replaced):
                    raise NotEmpty(f"key {new_key!r} in bucket {dst_bucket!r} is in the way of a rename")
                pairs.append((name[len(src_bucket) + 1 :], new_key))
            return pairs

        return [] if source == target else self.environment.write(change)

    def _under(self, txn: Txn, prefix: bytes, limit: int) -> _Pairs:
        """Return (full name, value) of everything under a full prefix. Raises CrossDevice over `limit`."""
        rows: _Pairs = []
        scan = NameScan(self._tree, txn)
        found = scan.seek(prefix)
        while found and scan.name.startswith(prefix):
            if len(rows) == limit:
                raise CrossDevice(f"more than {limit} keys under {prefix!r} cannot move in one transaction")
            rows.append((scan.name, scan.value()))
            found = scan.step()
        return rows

    def has_prefix(self, bucket: bytes, prefix: bytes) -> bool:
        """Return whether any key of the bucket starts with `prefix`."""
        if len(prefix) > MAX_KEY_BYTES:
            return False
        full = full_prefix(bucket, prefix)

        def look(txn: Txn) -> bool:
            scan = NameScan(self._tree, txn)
            return scan.seek(full) and scan.name.startswith(full)

        return self.environment.read(look)

    def rows(self) -> Iterator[tuple[bytes, bytes, NameRow | None]]:
        """Yield every (bucket, key, row) in order, None for a row that cannot be read.

        The index may change meanwhile: it is read in pages, and a change behind the iteration is not seen.
        """
        for bucket, key, data in self.encoded_rows():
            yield bucket, key, None if data is None else NameRow.decode(data)

    def encoded_rows(self, sift: Sift | None = None) -> Iterator[tuple[bytes, bytes, bytes | None]]:
        """Yield what `rows` does, but encoded: decoding takes most of the time of a million rows. Of each page only
        what `sift` returns is yielded."""

        def look(txn: Txn, start: bytes) -> _Pairs:
            return NameScan(self._tree, txn).page(start, MAX_LIST_ENTRIES)

        start = b"\0"
        last = b""
        while page := self.environment.read(partial(look, start=start)):
            for name, stored in page if sift is None else sift(page):
                bucket, _, key = name.partition(b"\0")
                if bucket == last:
                    bucket = last  # one for all of its keys
                last = bucket
                try:
                    data = load_row(name, stored)
                except Corrupt:
                    yield bucket, key, None
                else:
                    yield bucket, key, data if is_name_row(data) else None
            start = page[-1][0] + b"\0"

    def prune(self, keep: Callable[[bytes, bytes, bytes | None], bool], sift: Sift | None = None) -> int:
        """Remove every row for which `keep(bucket, key, encoded row)` is false; return how many. Raises Corrupt.

        Of each page only what `sift` returns is asked about.

        The encoded row is None where its checksum does not match.
        """
        removed = 0
        doomed: list[bytes] = []

        def flush() -> None:
            gone = self.environment.write(
                lambda txn: [self._tree.remove(txn, name) for name in doomed], removes=True
            )
            if None in gone:
                raise Corrupt(f"name index: {doomed[gone.index(None)][:80]!r} is listed and not found")
            doomed.clear()

        for bucket, key, row in self.encoded_rows(sift):
            if not keep(bucket, key, row):
                doomed.append(bucket + b"\0" + key)
                removed += 1
            if len(doomed) == MAX_LIST_ENTRIES:
                flush()
        flush()
        return removed

    def list(
        self,
        bucket: bytes,
        *,
        prefix: bytes = b"",
        after: bytes = b"",
        delimiter: bytes | None = None,
        limit: int = MAX_LIST_ENTRIES,
    ) -> ListPage:
        """Return one page of the keys under `prefix`, greater than `after`, in byte order.

        With a delimiter, keys that hold it after the prefix are one entry, the common prefix up to it. Where `after`
        is a common prefix, nothing under it follows. Raises LimitExceeded for a page over the limit.
        """
        return self.environment.read(
            lambda txn: list_page(self._tree, txn, bucket, prefix, after, delimiter, limit)
        )

    def level(self, bucket: bytes, *, prefix: bytes, after: bytes, limit: int) -> LevelPage:
        """Return the paths directly below the directory `prefix`, greater than the tail `after`. Raises Corrupt.

        A page looks at `limit` names.
        """
        whole = full_prefix(bucket, prefix)
        start = list_start(bucket + b"\0", prefix, prefix + after if after else b"", b"/")

        def look(txn: Txn) -> LevelPage:
            page = levels.scan_page(self._tree, txn, whole, start, limit)
            if page is not None:
                return page
            listed = list_page(self._tree, txn, bucket, prefix, prefix + after, b"/", limit)
            return levels.page_of_list(self._tree, txn, bucket, prefix, listed.entries, more=listed.truncated)

        return self.environment.read(look)

    # --- buckets -----------------------------------------------------------------------------------------

    def put_bucket(self, row: BucketRow) -> None:
        """Create or replace a bucket's row. Raises LimitExceeded."""
        bucket_base(row.name)
        if row.name not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
            raise LimitExceeded(f"bucket {row.name!r} would be one more than the limit of {MAX_BUCKETS}")
        data = store_row(row.name, row.encode())
        self.environment.write(lambda txn: txn.put(row.name, data, db=self._bucket_db))
        self._buckets[row.name] = row

    def get_bucket(self, name: bytes) -> BucketRow | None:
        """Return the row of a bucket, or None."""
        return self._buckets.get(name)

    def remove_bucket(self, name: bytes) -> BucketRow | None:
        """Remove a bucket; return its row. Raises NotEmpty while it holds a key."""
        base = bucket_base(name)

        def change(txn: Txn) -> None:
            scan = NameScan(self._tree, txn)
            if scan.seek(base) and scan.name.startswith(base):
                raise NotEmpty(f"bucket {name!r} still holds {scan.name[len(base) :]!r}")
            txn.delete(name, db=self._bucket_db)

        self.environment.write(change, removes=True)
        return self._buckets.pop(name, None)

    def buckets(self) -> Sequence[BucketRow]:
        """Return all buckets, by name."""
        return sorted(self._buckets.values(), key=lambda row: row.name)

    def _load_buckets(self, txn: Txn) -> dict[bytes, BucketRow]:
        with txn.cursor(db=self._bucket_db) as cursor:
            return {name: BucketRow.decode(name, load_row(name, data)) for name, data in cursor}
