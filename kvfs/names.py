"""The ordered index of names: which object each bucket and key stands for.

Responsibility: the names of all buckets, the buckets, and a few small values of the service (`meta`), in one
LMDB environment. Names are flat and ordered as S3 sees them, by the bytes of `bucket NUL key`; what a path
means is said elsewhere. Rows are described in `kvfs.name_rows`, long names in `kvfs.name_tree`, the file, its
growth and its durability in `kvfs.name_env`.

Invariants:
- One call is one transaction: after an error all of it happened or nothing.
- A listing is the sorted sequence of entries (keys, and common prefixes once each) that are greater than
  `after`; its cost is per entry returned, since a common prefix is skipped with one seek.

Concurrency: one process and one thread; no transaction outlives a call. No call waits for a device unless the
index is synchronous or a page has to be read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from kvfs import name_levels
from kvfs.errors import Corrupt, CrossDevice, InvalidRequest, LimitExceeded, NameTooLong, NotEmpty, NotFound
from kvfs.limits import (
    DEFAULT_NAME_MAP_BYTES,
    MAX_BUCKET_NAME_BYTES,
    MAX_BUCKETS,
    MAX_KEY_BYTES,
    MAX_LIST_ENTRIES,
    MAX_NAME_MAP_BYTES,
)
from kvfs.name_env import NameEnvironment
from kvfs.name_levels import LevelPage
from kvfs.name_rows import (
    DIRECTORY,
    PINNED,
    BucketRow,
    NameRow,
    clear_flags,
    is_directory_row,
    is_name_row,
    load_row,
    store_row,
)
from kvfs.name_tree import NameScan, NameTree

if TYPE_CHECKING:
    import lmdb

    Txn = lmdb.Transaction[bytes]

__all__ = ["DIRECTORY", "PINNED", "BucketRow", "ListEntry", "ListPage", "NameIndex", "NameRow", "is_name"]


class ListEntry(NamedTuple):
    """One entry of a listing: a key and its row, or a common prefix (with its delimiter) and None."""

    name: bytes
    row: NameRow | None


class ListPage(NamedTuple):
    entries: list[ListEntry]
    truncated: bool
    """Whether more entries follow; the next page starts with `after` = the last entry's name."""


_Keys = Sequence[tuple[bytes, bytes]]
_Pairs = list[tuple[bytes, bytes]]
_Rows = list[NameRow | None]


def _check_part(what: str, part: bytes, limit: int) -> None:
    if len(part) > limit:
        raise NameTooLong(f"{what} {part[:40]!r}... has {len(part)} bytes, the limit is {limit}")
    if b"\0" in part:
        raise InvalidRequest(f"{what} {part!r} holds a NUL byte")


def _bucket_base(bucket: bytes) -> bytes:
    """What every full name of a bucket starts with. Raises InvalidRequest, NameTooLong."""
    if not bucket:
        raise InvalidRequest("the bucket name is empty")
    _check_part("bucket name", bucket, MAX_BUCKET_NAME_BYTES)
    return bucket + b"\0"


def _full_name(bucket: bytes, key: bytes) -> bytes:
    """`bucket NUL key`. Raises InvalidRequest, NameTooLong."""
    if not key:
        raise InvalidRequest(f"a key in bucket {bucket!r} is empty")
    _check_part("key", key, MAX_KEY_BYTES)
    return _bucket_base(bucket) + key


def _check_name(name: bytes) -> bytes:
    """A `bucket NUL key`. Raises InvalidRequest, NameTooLong."""
    bucket, _, key = name.partition(b"\0")
    return _full_name(bucket, key)


def is_name(name: bytes) -> bool:
    """Whether the index takes this `bucket NUL key`."""
    try:
        _check_name(name)
    except InvalidRequest:
        return False
    return True


def _full_prefix(bucket: bytes, prefix: bytes) -> bytes:
    _check_part("key prefix", prefix, MAX_KEY_BYTES)
    return _bucket_base(bucket) + prefix


def _row(name: bytes, stored: bytes) -> NameRow:
    """Raises Corrupt."""
    return NameRow.decode(load_row(name, stored))


def _past(prefix: bytes) -> bytes:
    """The smallest byte string above everything that starts with `prefix`, which holds a byte below 0xff."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,))


def _list_start(base: bytes, prefix: bytes, after: bytes, delimiter: bytes | None) -> bytes:
    """Where a listing of the entries greater than `after` begins to look."""
    if after < prefix or not after:
        return base + prefix
    cut = after.find(delimiter, len(prefix)) if delimiter and after.startswith(prefix) else -1
    if delimiter and cut >= 0:
        return _past(base + after[: cut + len(delimiter)])
    return base + after + b"\0"


def list_page(
    tree: NameTree, txn: Txn, bucket: bytes, prefix: bytes, after: bytes, delimiter: bytes | None, limit: int
) -> ListPage:
    """See `NameIndex.list`."""
    if not 0 <= limit <= MAX_LIST_ENTRIES:
        raise LimitExceeded(f"a page of {limit} entries, the limit is {MAX_LIST_ENTRIES}")
    _check_part("after", after, MAX_KEY_BYTES)
    full_prefix = _full_prefix(bucket, prefix)
    base = bucket + b"\0"
    page: list[ListEntry] = []
    scan = NameScan(tree, txn)
    found = scan.seek(_list_start(base, prefix, after, delimiter))
    while found and scan.name.startswith(full_prefix):
        if len(page) == limit:
            return ListPage(page, limit > 0)
        key = scan.name[len(base) :]
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if delimiter and cut >= 0:
            common = key[: cut + len(delimiter)]
            page.append(ListEntry(common, None))
            found = scan.seek(_past(base + common))
        else:
            page.append(ListEntry(key, _row(scan.name, scan.value())))
            found = scan.step()
    return ListPage(page, False)


class NameIndex:
    """See the module's header. Built by `open`."""

    def __init__(self, env: NameEnvironment) -> None:
        self._env = env
        self._tree = NameTree(env.open_db(b"names"), env.open_db(b"tails"))
        self._bucket_db = env.open_db(b"buckets")
        self._buckets = env.read(self._load_buckets)
        self._counts: dict[bytes, int] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        map_size_bytes: int = DEFAULT_NAME_MAP_BYTES,
        sync: bool = False,
        max_map_bytes: int = MAX_NAME_MAP_BYTES,
    ) -> NameIndex:
        """Open or create the index in the directory `path`.

        Raises InvalidRequest for a map size over its limit, FormatMismatch for an index of a newer version,
        Corrupt for anything that LMDB refuses: the caller removes the directory and builds a new one.
        """
        env = NameEnvironment(path, map_size_bytes=map_size_bytes, max_map_bytes=max_map_bytes, sync=sync)
        try:
            return cls(env)
        except BaseException:
            env.close()
            raise

    @property
    def environment(self) -> NameEnvironment:
        """For what else is kept in the same file, with the same durability."""
        return self._env

    def forget_dead_readers(self) -> None:
        """Of `kvfs.name_reader`, after a process that may have had one has ended."""
        self._env.forget_dead_readers()

    def close(self) -> bool:
        """Flush and close; whether all of it is on the device. Closing twice is harmless."""
        return self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- names -------------------------------------------------------------------------------------------

    def get(self, bucket: bytes, key: bytes) -> NameRow | None:
        name = _full_name(bucket, key)
        data = self._env.read(lambda txn: self._tree.get(txn, name))
        return None if data is None else _row(name, data)

    def put(self, bucket: bytes, key: bytes, row: NameRow) -> None:
        name = _full_name(bucket, key)
        data = store_row(name, row.encode())
        old = self._env.write(lambda txn: self._tree.put(txn, name, data))
        if old is None:
            self._count(bucket, 1)

    def put_many(self, rows: Iterable[tuple[bytes, bytes]]) -> int:
        """Put (`bucket NUL key`, encoded row) pairs, MAX_LIST_ENTRIES in one transaction; how many."""
        total = 0
        pairs = ((name, store_row(_check_name(name), row)) for name, row in rows)
        while page := list(islice(pairs, MAX_LIST_ENTRIES)):
            self._env.write(partial(self._tree.put_many, pairs=page))
            total += len(page)
        self._counts.clear()
        return total

    def remove(self, bucket: bytes, key: bytes) -> NameRow | None:
        """Remove a name; the row that it had, or None where there was none."""
        return self.remove_many([(bucket, key)])[0]

    def remove_many(self, keys: _Keys) -> _Rows:
        """Remove (bucket, key) pairs in one transaction; the row of each, or None where there was none."""
        names = [_full_name(bucket, key) for bucket, key in keys]
        removed = self._env.write(lambda txn: [self._tree.remove(txn, name) for name in names], removes=True)
        for (bucket, _), data in zip(keys, removed, strict=True):
            if data is not None:
                self._count(bucket, -1)
        pairs = zip(names, removed, strict=True)
        return [None if data is None else _row(name, data) for name, data in pairs]

    def rename(
        self, src_bucket: bytes, src_key: bytes, dst_bucket: bytes, dst_key: bytes, *, without: int = 0
    ) -> NameRow | None:
        """Move a row, without these flags; the row that it replaced. Onto itself it does nothing. Raises NotFound."""
        source, target = _full_name(src_bucket, src_key), _full_name(dst_bucket, dst_key)

        def change(txn: Txn) -> bytes | None:
            data = self._tree.remove(txn, source)
            if data is None:
                raise NotFound(f"no key {src_key!r} in bucket {src_bucket!r}")
            row = clear_flags(load_row(source, data), without)
            replaced = self._tree.put(txn, target, store_row(target, row))
            return None if source == target else replaced

        replaced = self._env.write(change)
        self._count(src_bucket, -1)
        self._count(dst_bucket, 1 if replaced is None else 0)
        return None if replaced is None else _row(target, replaced)

    def rename_prefix(
        self, src_bucket: bytes, src_prefix: bytes, dst_bucket: bytes, dst_prefix: bytes, *, limit: int
    ) -> _Pairs:
        """Move every key under a prefix in one transaction; (old key, new key) in order, empty where none is.

        Raises CrossDevice when there are more than `limit` keys, NameTooLong for a new key that is too long,
        NotEmpty where a new key is taken by anything but an empty directory's marker. Then nothing moved.
        """
        source, target = _full_prefix(src_bucket, src_prefix), _full_prefix(dst_bucket, dst_prefix)

        def change(txn: Txn) -> tuple[_Pairs, int]:
            moved = self._under(txn, source, limit)
            for name, _ in moved:
                self._tree.remove(txn, name)
            pairs: _Pairs = []
            markers = 0
            for name, data in moved:
                new_key = dst_prefix + name[len(source) :]
                new_name = _full_name(dst_bucket, new_key)
                replaced = self._tree.put(txn, new_name, store_row(new_name, load_row(name, data)))
                if replaced is not None:
                    if not is_directory_row(replaced):
                        raise NotEmpty(f"key {new_key!r} in bucket {dst_bucket!r} is in the way of a rename")
                    markers += 1
                pairs.append((name[len(src_bucket) + 1 :], new_key))
            return pairs, markers

        if source == target:
            return []
        pairs, markers = self._env.write(change)
        self._count(src_bucket, -len(pairs))
        self._count(dst_bucket, len(pairs) - markers)
        return pairs

    def _under(self, txn: Txn, prefix: bytes, limit: int) -> _Pairs:
        """(full name, value) of everything under a full prefix. Raises CrossDevice over `limit`."""
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
        """Whether any key of the bucket starts with `prefix`; none does with one longer than a key."""
        if len(prefix) > MAX_KEY_BYTES:
            return False
        full = _full_prefix(bucket, prefix)

        def look(txn: Txn) -> bool:
            scan = NameScan(self._tree, txn)
            return scan.seek(full) and scan.name.startswith(full)

        return self._env.read(look)

    def count(self, bucket: bytes) -> int:
        """Number of keys; the first call per bucket and opening walks them, later ones are a dict lookup."""
        base = _bucket_base(bucket)
        if bucket not in self._counts:

            def walk(txn: Txn) -> int:
                scan = NameScan(self._tree, txn)
                found, total = scan.seek(base), 0
                while found and scan.name.startswith(base):
                    total += 1
                    found = scan.step()
                return total

            self._counts[bucket] = self._env.read(walk)
        return self._counts[bucket]

    def rows(self) -> Iterator[tuple[bytes, bytes, NameRow | None]]:
        """Every (bucket, key, row) in order, None for a row that cannot be read. Read in pages: the index may
        change meanwhile, and what is then behind the iteration is not seen again."""
        for bucket, key, data in self.encoded_rows():
            yield bucket, key, None if data is None else NameRow.decode(data)

    def encoded_rows(self) -> Iterator[tuple[bytes, bytes, bytes | None]]:
        """As `rows`, not decoded, which is most of what a million rows take; None where they cannot be."""

        def look(txn: Txn, start: bytes) -> _Pairs:
            return NameScan(self._tree, txn).page(start, MAX_LIST_ENTRIES)

        start = b"\0"
        last = b""
        while page := self._env.read(partial(look, start=start)):
            for name, stored in page:
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

    def prune(self, keep: Callable[[bytes, bytes, bytes | None], bool]) -> int:
        """Remove every row of which `keep(bucket, key, encoded row)` is false; how many went. A row whose checksum
        does not hold is None. Raises Corrupt."""
        removed = 0
        doomed: list[bytes] = []

        def flush() -> None:
            gone = self._env.write(
                lambda txn: [self._tree.remove(txn, name) for name in doomed], removes=True
            )
            if None in gone:
                raise Corrupt(f"name index: {doomed[gone.index(None)][:80]!r} is listed and not found")
            doomed.clear()

        for bucket, key, row in self.encoded_rows():
            if not keep(bucket, key, row):
                doomed.append(bucket + b"\0" + key)
                removed += 1
            if len(doomed) == MAX_LIST_ENTRIES:
                flush()
        flush()
        self._counts.clear()
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
        """One page of the keys under `prefix`, greater than `after`, in byte order.

        With a delimiter, keys that hold it after the prefix show once, as the common prefix up to it. `after`
        may be a common prefix: then nothing under it follows. Raises LimitExceeded for a page over the limit.
        """
        return self._env.read(lambda txn: list_page(self._tree, txn, bucket, prefix, after, delimiter, limit))

    def level(self, bucket: bytes, *, prefix: bytes, after: bytes, limit: int) -> LevelPage:
        """The paths directly below the directory `prefix` and greater than the tail `after`, `limit` names looked at.

        Raises Corrupt.
        """
        full_prefix = _full_prefix(bucket, prefix)
        start = _list_start(bucket + b"\0", prefix, prefix + after if after else b"", b"/")

        def look(txn: Txn) -> LevelPage:
            page = name_levels.scan_page(self._tree, txn, full_prefix, start, limit)
            if page is not None:
                return page
            listed = list_page(self._tree, txn, bucket, prefix, prefix + after, b"/", limit)
            return name_levels.page_of_list(
                self._tree, txn, bucket, prefix, listed.entries, more=listed.truncated
            )

        return self._env.read(look)

    # --- buckets -----------------------------------------------------------------------------------------

    def put_bucket(self, row: BucketRow) -> None:
        """Create or replace a bucket's row. Raises LimitExceeded."""
        _bucket_base(row.name)
        if row.name not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
            raise LimitExceeded(f"bucket {row.name!r} would be one more than the limit of {MAX_BUCKETS}")
        data = store_row(row.name, row.encode())
        self._env.write(lambda txn: txn.put(row.name, data, db=self._bucket_db))
        self._buckets[row.name] = row

    def get_bucket(self, name: bytes) -> BucketRow | None:
        return self._buckets.get(name)

    def remove_bucket(self, name: bytes) -> BucketRow | None:
        """Remove a bucket; the row that it had. Raises NotEmpty while it holds a key."""
        base = _bucket_base(name)

        def change(txn: Txn) -> None:
            scan = NameScan(self._tree, txn)
            if scan.seek(base) and scan.name.startswith(base):
                raise NotEmpty(f"bucket {name!r} still holds {scan.name[len(base) :]!r}")
            txn.delete(name, db=self._bucket_db)

        self._env.write(change, removes=True)
        self._counts.pop(name, None)
        return self._buckets.pop(name, None)

    def buckets(self) -> Sequence[BucketRow]:
        """All buckets, by name."""
        return sorted(self._buckets.values(), key=lambda row: row.name)

    def _load_buckets(self, txn: Txn) -> dict[bytes, BucketRow]:
        with txn.cursor(db=self._bucket_db) as cursor:
            return {name: BucketRow.decode(name, load_row(name, data)) for name, data in cursor}

    # --- meta and ids ------------------------------------------------------------------------------------

    def get_meta(self, key: bytes) -> bytes | None:
        return self._env.get_meta(key)

    def put_meta(self, key: bytes, value: bytes) -> None:
        """Raises InvalidRequest for the keys that the index keeps for itself."""
        self._env.put_meta(key, value)

    def next_ids(self, n: int) -> int:
        """Take `n` consecutive object ids; the first. They were never given out before."""
        return self._env.next_ids(n)

    def skip_ids(self, past: int) -> None:
        """Give out no id at or below `past`: for ids that were found in the data itself."""
        self._env.skip_ids(past)

    def next_bucket_id(self) -> int:
        """An id for a bucket to be made; none ever had it. Raises LimitExceeded."""
        return self._env.next_bucket_id()

    def skip_bucket_ids(self, past: int) -> None:
        """Give out no bucket id at or below `past`: for ids that were found in the data itself."""
        self._env.skip_bucket_ids(past)

    def _count(self, bucket: bytes, change: int) -> None:
        if bucket in self._counts:
            self._counts[bucket] += change
