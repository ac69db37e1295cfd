"""The read side of the store: buckets, names, blocks and listings, as every door sees them.

Responsibility: turn keys and paths into objects and directories, and list them in order. It changes nothing
but buckets' rows; what is written, moved and removed is `tiers.store`, which builds on it.

Invariants:
- A name row without a table entry is stale and reads as NotFound.
- Blocks are found by name only in the bucket that they were sealed into.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice

from kvfs import limits, paths
from kvfs._native.table import TIER_DRAM, Entry, Table
from kvfs.errors import NotFound
from kvfs.formats import tier_of
from kvfs.keys import parse_block_name
from kvfs.name_levels import unmarked_ino
from kvfs.names import NameIndex, NameRow
from tiers import buckets
from tiers.base import Extent, Kind, StoreKey, object_digest, object_key
from tiers.blocks import BlockCatalog
from tiers.directory_times import DirectoryTimes
from tiers.model import BlockPlaced, Bucket, Directory, Name, NamePage, ObjectInfo, Page
from tiers.native_seals import NoSeals

PINNED = 1
DIRECTORY = 2


class Catalog:
    """What is in the store. `TieredStore` is one."""

    def __init__(self, names: NameIndex, table: Table) -> None:
        self.names = names
        self.table = table
        self.directory_times = DirectoryTimes(names)
        self._blocks = BlockCatalog()
        self.native_seals = NoSeals()
        """Blocks that are sealed beside the event loop: `catch_up` before one is looked for."""
        self._name_of: dict[bytes, Name] = {}
        self._counts = {"seals": 0, "evictions": 0, "removals": 0, "hits": 0, "misses": 0}
        self._counts |= {"promotions": 0, "demotions": 0}

    @property
    def object_count(self) -> int:
        """Objects and blocks, without directories."""
        return len(self._name_of) + len(self._blocks)

    def bucket(self, name: bytes) -> Bucket:
        """Raises BucketNotFound."""
        return buckets.get(self.names, name)

    def buckets(self) -> list[Bucket]:
        return buckets.every(self.names)

    def lookup(self, name: Name) -> ObjectInfo | Directory:
        """What an exact key names: an object first, else a directory. Raises NotFound, BucketNotFound."""
        bucket = self.bucket(name.bucket)
        if digest := block_digest(bucket, name.key):
            return self._block_of(bucket, digest)
        if name.key and not name.key.endswith(b"/"):
            row = self._row(name)
            if row is not None:
                return self._info_of_row(name, row)
        return self._directory(bucket, Name(name.bucket, _as_prefix(name.key)))

    def find_path(self, name: Name) -> ObjectInfo | Directory | None:
        """What the path view shows: where both `a` and `a/b` exist, the directory. None where there is nothing.

        `name.key` has no trailing `/`. Raises BucketNotFound.
        """
        bucket = self.bucket(name.bucket)
        if bucket.namespace is not None and name.key.startswith(b"kv"):
            return self._find_bound(bucket, name)
        row = self._row(name)
        directory = Name(name.bucket, name.key + b"/")
        if self.names.has_prefix(directory.bucket, directory.key):
            return self._directory(bucket, directory)
        if row is not None:
            entry = self.table.get(object_key(row.object_id).digest)
            if entry is not None:
                return self._info_of_entry(name, row, entry)
        self._counts["misses"] += 1
        return None

    def _find_bound(self, bucket: Bucket, name: Name) -> ObjectInfo | Directory | None:
        """The same in a bucket whose names under `kv/` are blocks."""
        try:
            if block_digest(bucket, name.key) is None:
                return self._directory(bucket, Name(name.bucket, name.key + b"/"))
        except NotFound:
            pass
        try:
            return self.lookup(name)
        except NotFound:
            return None

    def lookup_block(self, digest: bytes) -> ObjectInfo:
        self.native_seals.catch_up()
        block, entry = self._blocks.get(digest), self.table.get(digest)
        if block is None or entry is None:
            self._counts["misses"] += 1
            raise NotFound(f"no block {digest.hex()}")
        bucket = self.bucket(block.bucket)
        return ObjectInfo(
            name=None,
            key=StoreKey(Kind.BLOCK, digest),
            extent=extent_of(entry),
            tier=tier_of(entry.tiers),
            object_id=block.sequence,
            ino=block.sequence,
            size_bytes=entry.size_bytes,
            mode=bucket.mode & 0o444,
            uid=bucket.uid,
            gid=bucket.gid,
            mtime_ns=block.sealed_ns,
            ctime_ns=block.sealed_ns,
            sequence=block.sequence,
            pinned=block.pinned,
            hits=entry.hits,
        )

    def _block_of(self, bucket: Bucket, digest: bytes) -> ObjectInfo:
        """A block by its name: only in the bucket that it was sealed into, whose rights are its own."""
        if self.block_bucket(digest) != bucket.name:
            self._counts["misses"] += 1
            raise NotFound(f"no block {digest.hex()} in bucket {bucket.name.decode()}")
        return self.lookup_block(digest)

    def lookup_object(self, key: StoreKey) -> ObjectInfo | None:
        """The object that has this key, whatever its name is now; None when there is none."""
        try:
            if key.kind is Kind.BLOCK:
                return self.lookup_block(key.digest)
            name = self._name_of.get(key.digest)
            row = None if name is None else self._row(name)
            return None if name is None or row is None else self._info_of_row(name, row)
        except NotFound:
            return None

    def object_id_of(self, digest: bytes) -> int | None:
        """The id of the object that has this key, if there is one."""
        if digest in self._name_of:
            return int.from_bytes(digest, "big")
        block = self._blocks.get(digest)
        return None if block is None else block.sequence

    def placed_blocks(self) -> Iterator[BlockPlaced]:
        """Every block that is there when it is reached, and the tiers that have it, as if it had just come to them."""
        for digest in self._blocks.digests():
            block, entry = self._blocks.get(digest), self.table.get(digest)
            if block is not None and entry is not None:
                yield BlockPlaced(digest, block.parent, block.bucket, 0, entry.tiers)

    def block_bucket(self, digest: bytes) -> bytes | None:
        """The bucket that a block was sealed into, whose rights are the block's; None for no such block."""
        self.native_seals.catch_up()
        block = self._blocks.get(digest)
        return None if block is None else block.bucket

    def match(self, digests: bytes | memoryview) -> int:
        """How many prefix hashes (16 bytes each) are present without a gap from the first on."""
        return self.table.match(digests)

    def list(
        self,
        bucket: bytes,
        *,
        prefix: bytes = b"",
        after: bytes = b"",
        delimiter: bytes | None = None,
        limit: int = limits.MAX_LIST_ENTRIES,
    ) -> Page:
        """Names in byte order past `after`, at most `limit`; names that share `delimiter` past the prefix are one."""
        where = self.bucket(bucket)
        page = self.names.list(bucket, prefix=prefix, after=after, delimiter=delimiter, limit=limit)
        rows = {entry.name: entry.row for entry in page.entries}
        blocks = self._block_names(bucket, prefix, after, delimiter) if where.namespace else ()
        entries: list[tuple[bytes, ObjectInfo | Directory]] = []
        last = b""
        end = page.entries[-1].name if page.truncated else None
        for key in merge(rows, blocks):
            if key == last:
                continue
            if len(entries) == limit or (end is not None and key > end):
                return Page(entries, last or None)
            last = key
            found: ObjectInfo | Directory | None
            if delimiter and key.find(delimiter, len(prefix)) >= 0:
                found = self._common(where, key)
            else:
                found = self._listed(where, key, rows.get(key))
            if found is not None:
                entries.append((key, found))
        return Page(entries, last if page.truncated else None)

    def list_names(self, bucket: bytes, *, prefix: bytes, after: bytes, limit: int) -> NamePage:
        """The paths directly below a directory, past the tail `after`: tails and inode numbers alone, of `limit` names
        looked at, in a twentieth of the time that `list` takes. A file with the name of a directory is left out."""
        where = self.bucket(bucket)
        page = self.names.level(bucket, prefix=prefix, after=after, limit=limit)
        known, has_prefix = self._name_of, self.names.has_prefix
        entries = [
            (tail, ino)
            for tail, ino, object_id, doubtful in page.entries
            if not object_id
            or (
                object_digest(object_id) in known
                and not (doubtful and has_prefix(bucket, prefix + tail + b"/"))
            )
        ]
        named = NamePage(entries, page.last)
        return named if where.namespace is None else self._with_blocks(bucket, prefix, after, limit, named)

    def _with_blocks(
        self, bucket: bytes, prefix: bytes, after: bytes, limit: int, named: NamePage
    ) -> NamePage:
        """A page of names with the blocks, which have no rows, that come among them."""
        blocks = self._block_names(bucket, prefix, prefix + after if after else b"", b"/")
        keys = list(islice(blocks, limit + 1))
        ends = [named.next_after, keys[limit - 1][len(prefix) :] if len(keys) > limit else None]
        end = min((each for each in ends if each is not None), default=None)
        found = dict(named.entries)
        for key in keys[:limit]:
            digest = parse_block_name(key)
            block = None if digest is None else self._blocks.get(digest)
            if digest is None:
                found.setdefault(key[len(prefix) :], unmarked_ino(bucket, key))
            elif block is not None and self.table.get(digest) is not None:
                found[key[len(prefix) :]] = block.sequence
        entries = sorted(item for item in found.items() if end is None or item[0] <= end)
        return NamePage(entries[:limit], end if len(entries) <= limit else entries[limit - 1][0])

    def _common(self, bucket: Bucket, prefix: bytes) -> Directory:
        """A common prefix of a listing; one that ends in `/` may have a marker's attributes."""
        row = self.names.get(bucket.name, prefix) if prefix.endswith(b"/") else None
        name = Name(bucket.name, prefix)
        return self.directory_times.of(
            _directory_of_bucket(bucket, name) if row is None else directory_of_row(name, row)
        )

    def _listed(self, bucket: Bucket, key: bytes, row: NameRow | None) -> ObjectInfo | Directory | None:
        name = Name(bucket.name, key)
        try:
            if row is None or row.flags & DIRECTORY:
                return self.lookup(name)
            return self._info_of_row(name, row)
        except NotFound:
            return None

    def _check_name(self, name: Name) -> Bucket:
        paths.check_key(name.key)
        return self.bucket(name.bucket)

    def _row(self, name: Name) -> NameRow | None:
        row = self.names.get(name.bucket, name.key)
        return None if row is None or row.flags & DIRECTORY else row

    def _info_of_row(self, name: Name, row: NameRow) -> ObjectInfo:
        entry = self.table.get(object_key(row.object_id).digest)
        if entry is None:
            self._counts["misses"] += 1
            raise NotFound(f"{name} has no bytes in any tier")
        return self._info_of_entry(name, row, entry)

    def _info_of_entry(self, name: Name, row: NameRow, entry: Entry) -> ObjectInfo:
        return self._info(name, row, extent_of(entry), tier_of(entry.tiers), entry.hits)

    def _info(self, name: Name, row: NameRow, extent: Extent | None, tier: str, hits: int = 0) -> ObjectInfo:
        return ObjectInfo(
            name=name,
            key=object_key(row.object_id),
            extent=extent,
            tier=tier,
            object_id=row.object_id,
            ino=row.ino,
            size_bytes=row.size_bytes,
            mode=row.mode,
            uid=row.uid,
            gid=row.gid,
            mtime_ns=row.mtime_ns,
            ctime_ns=row.ctime_ns,
            sequence=row.sequence,
            pinned=bool(row.flags & PINNED),
            hits=hits,
            user_metadata=row.user_metadata,
        )

    def _directory(self, bucket: Bucket, name: Name) -> Directory:
        """`name.key` ends in `/` or is empty. Raises NotFound."""
        if len(name.key) > limits.MAX_KEY_BYTES:  # the longest key, taken for a directory's
            raise NotFound(f"no object {name}")
        if name.key:
            row = self.names.get(name.bucket, name.key)
            if row is not None:
                return self.directory_times.of(directory_of_row(name, row))
            if not self._has_directory(name.bucket, name.key):
                raise NotFound(f"no object {name}")
        return self.directory_times.of(_directory_of_bucket(bucket, name))

    def _has_directory(self, bucket: bytes, prefix: bytes) -> bool:
        """Whether any name, a block's included, starts with `prefix`."""
        return self.names.has_prefix(bucket, prefix) or any(self._block_names(bucket, prefix, b"", b"/"))

    def _block_names(
        self, bucket: bytes, prefix: bytes, after: bytes, delimiter: bytes | None
    ) -> Iterable[bytes]:
        self.native_seals.catch_up()
        return self._blocks.names(bucket, prefix=prefix, after=after, delimiter=delimiter)


def extent_of(entry: Entry) -> Extent | None:
    """Where the table says that the object is in DRAM, if it is there."""
    return Extent(entry.slot, entry.generation) if entry.tiers & TIER_DRAM else None


def _directory_of_bucket(bucket: Bucket, name: Name) -> Directory:
    """A directory without a marker."""
    return Directory(
        name, unmarked_ino(name.bucket, name.key), bucket.mode, bucket.uid, bucket.gid, bucket.mtime_ns
    )


def directory_of_row(name: Name, row: NameRow) -> Directory:
    return Directory(
        name,
        row.ino,
        row.mode,
        row.uid,
        row.gid,
        row.mtime_ns,
        row.object_id,
        row.user_metadata,
        row.ctime_ns,
    )


def _as_prefix(key: bytes) -> bytes:
    return key if not key or key.endswith(b"/") else key + b"/"


def block_digest(bucket: Bucket, key: bytes) -> bytes | None:
    """The prefix hash that `key` spells in a bound bucket, else None."""
    return parse_block_name(key) if bucket.namespace is not None else None
