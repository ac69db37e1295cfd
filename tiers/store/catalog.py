"""The catalogue of the store: buckets, names and blocks, as every door sees them.

Responsibility: find objects and directories by keys, paths and hashes; pages of them are `tiers.store.listings`'. It
changes nothing by itself: the other parts of the store keep its maps true.

Invariants:
- A name row without a table entry is stale and reads as NotFound; that of a directory or symbolic link needs none.
- Blocks are found by name only in the bucket that they were sealed into.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

from kvfs import limits, paths
from kvfs._native.shared.table import TIER_DRAM, TIER_UNVERIFIED, Entry, Table
from kvfs.errors import BucketNotFound, Exists, InvalidRequest, NotFound, NotPermitted
from kvfs.formats import tier_of
from kvfs.index.levels import unmarked_ino
from kvfs.index.names import NameIndex, NameRow
from kvfs.index.rows import DIRECTORY, GHOST_ADMISSION, LARGE, LINK, PINNED, ROW_ONLY, BucketRow
from kvfs.keys import parse_block_name
from tiers.model.blocks import BlockCatalog
from tiers.model.names import NameCatalog
from tiers.model.objects import BlockPlaced, Bound, Bucket, Directory, Name, ObjectInfo
from tiers.model.tier import Extent, Kind, StoreKey, object_key
from tiers.store.directory_times import DirectoryTimes


class Seals:
    """Reports blocks that are sealed beside the event loop (`tiers.sessions.native_seals`); by itself none."""

    def catch_up(self) -> None:
        """Enter every block that is in the table."""

    def end_channels(self, bucket: bytes) -> None:
        """End native seals into this bucket."""

    def settled(self) -> AbstractContextManager[None]:
        """Have every block of the table entered, and none appear meanwhile but by the event loop."""
        return nullcontext()


class Catalog:
    """Finds what is in the store, and what it is called."""

    def __init__(self, names: NameIndex, table: Table) -> None:
        self.names = names
        self.table = table
        self.directory_times = DirectoryTimes(names)
        self.blocks = BlockCatalog()
        self.native_seals = Seals()
        """`catch_up` before a block is looked for."""
        self.name_of = NameCatalog()
        self.counts = {"seals": 0, "evictions": 0, "removals": 0, "hits": 0, "misses": 0}
        self.counts |= {"promotions": 0, "demotions": 0}
        self._buckets: dict[bytes, tuple[BucketRow, Bucket]] = {}
        """The buckets that were asked for last, by name, each with the row that it describes."""

    @property
    def object_count(self) -> int:
        """Return objects and blocks, without directories."""
        return len(self.name_of) + len(self.blocks)

    def bucket(self, name: bytes) -> Bucket:
        """Return a bucket. Raises BucketNotFound."""
        row = self.bucket_row(name)
        known = self._buckets.get(name)
        if known is None or known[0] is not row:
            if len(self._buckets) >= limits.MAX_BUCKETS:
                self._buckets.clear()
            known = self._buckets[name] = row, bucket_of_row(row)
        return known[1]

    def bound(self, name: bytes) -> Bound | None:
        """Describe the namespace of a bucket and its blocks; None for a bucket that is bound to none."""
        row = self.bucket_row(name)
        if row.namespace is None:
            return None
        model = json.loads(row.namespace_json).get("model", "")
        return Bound(model, self.blocks.count(name), self.blocks.size_bytes(name))

    def bucket_row(self, name: bytes) -> BucketRow:
        """Return a bucket's row. Raises BucketNotFound."""
        row = self.names.get_bucket(name)
        if row is None:
            raise BucketNotFound(f"no bucket {name.decode(errors='replace')!r}")
        return row

    def buckets(self) -> list[Bucket]:
        """List all buckets."""
        return [bucket_of_row(row) for row in self.names.buckets()]

    def lookup(self, name: Name) -> ObjectInfo | Directory:
        """Return what an exact key names: an object first, else a directory. Raises NotFound, BucketNotFound."""
        bucket = self.bucket(name.bucket)
        if digest := block_digest(bucket, name.key):
            return self._block_of(bucket, digest)
        if name.key and not name.key.endswith(b"/"):
            row = self.row(name)
            if row is not None:
                return self.info_of_row(name, row)
            name = Name(name.bucket, name.key + b"/")
        return self.directory(bucket, name)

    def check_bytes(self, name: Name, row: NameRow) -> None:
        """Check that some tier has the object of a row, unless that is a symbolic link's. Raises NotFound."""
        if not row.flags & LINK and self.table.get(object_key(row.object_id).digest) is None:
            self.counts["misses"] += 1
            raise NotFound(f"{name} has no bytes in any tier")

    def find_path(self, name: Name) -> ObjectInfo | Directory | None:
        """Return what the path view shows: where both `a` and `a/b` exist, the directory. None where there is nothing.

        `name.key` has no trailing `/`. Raises BucketNotFound.
        """
        bucket = self.bucket(name.bucket)
        if bucket.namespace is not None and name.key.startswith(b"kv"):
            return self._find_bound(bucket, name)
        row = self.row(name)
        directory = Name(name.bucket, name.key + b"/")
        if self.names.has_prefix(directory.bucket, directory.key):
            return self.directory(bucket, directory)
        if row is not None:
            with suppress(NotFound):
                return self.info_of_row(name, row)
        else:
            self.counts["misses"] += 1
        return None

    def _find_bound(self, bucket: Bucket, name: Name) -> ObjectInfo | Directory | None:
        """Find a path in a bucket whose names under `kv/` are blocks."""
        try:
            if block_digest(bucket, name.key) is None:
                return self.directory(bucket, Name(name.bucket, name.key + b"/"))
        except NotFound:
            pass
        try:
            return self.lookup(name)
        except NotFound:
            return None

    def lookup_block(self, digest: bytes) -> ObjectInfo:
        """Return a block by its prefix hash. Raises NotFound."""
        self.native_seals.catch_up()
        block, entry = self.blocks.get(digest), self.table.get(digest)
        if block is None or entry is None:
            self.counts["misses"] += 1
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
        """Return a block by its name: only in the bucket that it was sealed into, whose rights are its own."""
        if self.block_bucket(digest) != bucket.name:
            self.counts["misses"] += 1
            raise NotFound(f"no block {digest.hex()} in bucket {bucket.name.decode()}")
        return self.lookup_block(digest)

    def key_of(self, digest: bytes) -> StoreKey:
        """Return the key of an object or block."""
        return StoreKey(Kind.BLOCK if digest in self.blocks else Kind.OBJECT, digest)

    def tiers_of(self, digest: bytes) -> int:
        """Return which tiers have an object, as bits of the table; 0 where there is no such object."""
        entry = self.table.get(digest)
        return 0 if entry is None else entry.tiers

    def lookup_object(self, key: StoreKey) -> ObjectInfo | None:
        """Return the object that has this key, whatever its name is now; None when there is none."""
        try:
            if key.kind is Kind.BLOCK:
                return self.lookup_block(key.digest)
            name = self.name_of.get(key.digest)
            row = None if name is None else self.row(name)
            return None if name is None or row is None else self.info_of_row(name, row)
        except NotFound:
            return None

    def object_id_of(self, digest: bytes) -> int | None:
        """Return the id of the object that has this key, if there is one."""
        if digest in self.name_of:
            return int.from_bytes(digest, "big")
        return self.blocks.sequence_of(digest)

    def placed_blocks(self) -> Iterator[BlockPlaced]:
        """Yield every block that is there when it is reached, as if it had just come to the tiers that have it."""
        for digest in self.blocks.digests():
            block, entry = self.blocks.get(digest), self.table.get(digest)
            if block is not None and entry is not None:
                yield BlockPlaced(digest, block.parent, block.bucket, 0, entry.tiers)

    def block_bucket(self, digest: bytes) -> bytes | None:
        """Return the bucket that a block was sealed into, whose rights are the block's; None for no such block."""
        self.native_seals.catch_up()
        block = self.blocks.get(digest)
        return None if block is None else block.bucket

    def match(self, digests: bytes | memoryview) -> int:
        """Return how many prefix hashes (16 bytes each) are present without a gap from the first on."""
        return self.table.match(digests)

    def check_name(self, name: Name) -> Bucket:
        """Return the bucket of a name. Raises InvalidRequest, BucketNotFound."""
        paths.check_key(name.key)
        return self.bucket(name.bucket)

    def row(self, name: Name) -> NameRow | None:
        """Return the row of a named object or symbolic link; None where there is none, or a directory."""
        row = self.names.get(name.bucket, name.key)
        return None if row is None or row.flags & DIRECTORY else row

    def info_of_row(self, name: Name, row: NameRow) -> ObjectInfo:
        """Describe the object or symbolic link of a row. Raises NotFound."""
        if row.flags & LINK:
            return self.info(name, row, None, "index")
        entry = self.table.get(object_key(row.object_id).digest)
        if entry is None:
            self.counts["misses"] += 1
            raise NotFound(f"{name} has no bytes in any tier")
        return self.info_of_entry(name, row, entry)

    def check_expected(self, name: Name, expected_id: int) -> None:
        """Check which object has a name. Raises NotFound where nothing has the name, Exists where another object has
        it."""
        row = self.names.get(name.bucket, name.key)
        if row is None or (
            not row.flags & ROW_ONLY and self.table.get(object_key(row.object_id).digest) is None
        ):
            raise NotFound(f"no object {name}")
        if row.object_id != expected_id:
            raise Exists(f"{name} is object {row.object_id}, not {expected_id}")

    def check_sealable(
        self, name: Name, *, replace: bool, expected_id: int | None = None
    ) -> tuple[Bucket, NameRow | None]:
        """Return the bucket that an object of this name goes to, and the row of the one that it replaces.

        Raises InvalidRequest, NotPermitted, Exists, NotFound.
        """
        bucket = self.check_name(name)
        if name.key.endswith(b"/"):
            raise InvalidRequest(f"{name} ends in '/': only a directory has such a name")
        if block_digest(bucket, name.key):
            raise NotPermitted(f"{name}: names under kv/ of a bound bucket are blocks, sealed by prefix hash")
        old = self.row(name)
        if old is not None and not replace:
            raise Exists(f"{name} exists")
        if expected_id is not None:
            self.check_expected(name, expected_id)
        return bucket, old

    def info_of_entry(self, name: Name, row: NameRow, entry: Entry) -> ObjectInfo:
        """Describe an object whose entry in the table was found."""
        return self.info(name, row, extent_of(entry), tier_of(entry.tiers), entry.hits)

    def info(self, name: Name, row: NameRow, extent: Extent | None, tier: str, hits: int = 0) -> ObjectInfo:
        """Describe an object by its row, and where it is."""
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
            target=row.target,
        )

    def directory(self, bucket: Bucket, name: Name) -> Directory:
        """Return the directory of a name whose key ends in `/` or is empty. Raises NotFound."""
        if len(name.key) > limits.MAX_KEY_BYTES:  # the longest key, taken for a directory's
            raise NotFound(f"no object {name}")
        if name.key:
            row = self.names.get(name.bucket, name.key)
            if row is not None:
                return self.directory_times.of(directory_of_row(name, row))
            if not self.has_directory(name.bucket, name.key):
                raise NotFound(f"no object {name}")
        return self.directory_times.of(directory_of_bucket(bucket, name))

    def has_directory(self, bucket: bytes, prefix: bytes) -> bool:
        """Return whether any name, a block's included, starts with `prefix`."""
        return self.names.has_prefix(bucket, prefix) or any(self.block_names(bucket, prefix, b"", b"/"))

    def block_names(
        self, bucket: bytes, prefix: bytes, after: bytes, delimiter: bytes | None
    ) -> Iterable[bytes]:
        """Yield names of blocks under `prefix` and past `after`, in order, with those sealed natively meanwhile."""
        self.native_seals.catch_up()
        return self.blocks.names(bucket, prefix=prefix, after=after, delimiter=delimiter)


IN_SLOT = TIER_DRAM | TIER_UNVERIFIED
"""Bits of an entry whose object has a slot of DRAM, to be read there or not."""


def extent_of(entry: Entry) -> Extent | None:
    """Return where the table says that the object can be read in DRAM, if it can."""
    return Extent(entry.slot, entry.generation) if entry.tiers & TIER_DRAM else None


def slot_of(entry: Entry) -> Extent | None:
    """Return the slot that an object has, verified or not."""
    return Extent(entry.slot, entry.generation) if entry.tiers & IN_SLOT else None


def bucket_of_row(row: BucketRow) -> Bucket:
    """Describe the bucket of a row."""
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


def directory_of_bucket(bucket: Bucket, name: Name) -> Directory:
    """Return a directory without a marker."""
    return Directory(
        name, unmarked_ino(name.bucket, name.key), bucket.mode, bucket.uid, bucket.gid, bucket.mtime_ns
    )


def directory_of_row(name: Name, row: NameRow) -> Directory:
    """Return a directory as its marker's row says."""
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


def block_digest(bucket: Bucket, key: bytes) -> bytes | None:
    """Return the prefix hash that `key` spells in a bound bucket, else None."""
    return parse_block_name(key) if bucket.namespace is not None else None
