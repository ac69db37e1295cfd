"""The blocks of the store: their attributes, parents, and their names by bucket.

Responsibility: blocks have no row in the name index (their names *are* their prefix hashes); this module
keeps the little that a listing or a stat needs, and answers listings of `kv/<2 hex>/<32 hex>` in order.

Invariants: a block is here exactly while it is in the index. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvfs._native.catalog.block_index import BlockIndex
from kvfs.keys import block_name, parse_block_name


@dataclass(frozen=True, slots=True)
class Block:
    """Describes one sealed block. `sequence` is also its object id."""

    bucket: bytes
    uid: int
    size_bytes: int
    sequence: int
    sealed_ns: int
    pinned: bool = False
    parent: bytes | None = None


class BlockCatalog:
    """Keeps all sealed blocks by prefix hash, natively: a million Python objects would be a gigabyte."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        """Native; `bucket_number` gives the numbers of its buckets."""
        self._numbers: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._ordered: tuple[bytes, int, list[bytes]] = (b"", -1, [])
        """The bucket and the first byte that were listed last, and their hashes in order."""

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.index

    def digests(self, *, newest_first: bool = False) -> Iterator[bytes]:
        """Yield all prefix hashes, in the order of their seals or in the reverse."""
        keys = self.index.keys()
        places = range(0, len(keys), 16)
        return (bytes(keys[at : at + 16]) for at in (reversed(places) if newest_first else places))

    def get(self, digest: bytes) -> Block | None:
        """Return a block's attributes; None where it is not sealed here."""
        fields = self.index.get(digest)
        return None if fields is None else Block(self._names[fields[0]], *fields[1:])

    def sequence_of(self, digest: bytes) -> int | None:
        """Return the object id of the block with this prefix hash."""
        return self.index.sequence_of(digest)

    def of_sequence(self, sequence: int) -> bytes | None:
        """Return the prefix hash of the block with this object id."""
        return self.index.of_sequence(sequence)

    def bucket_number(self, bucket: bytes) -> int:
        """Return the number that the native index has for a bucket."""
        number = self._numbers.get(bucket)
        if number is None:
            number = self._numbers[bucket] = self.index.open_bucket()
            self._names[number] = bucket
        return number

    def add(self, digest: bytes, block: Block) -> None:
        """Enter a sealed block under its prefix hash, in place of an earlier one."""
        self.index.add(
            digest,
            self.bucket_number(block.bucket),
            block.uid,
            block.size_bytes,
            block.sequence,
            block.sealed_ns,
            block.pinned,
            block.parent,
        )
        self._drop_order(block.bucket, digest)

    def pin(self, digest: bytes, pinned: bool) -> None:
        """Note whether a block is pinned."""
        self.index.pin(digest, pinned)

    def remove(self, digest: bytes) -> Block | None:
        """Take a block out and return its attributes, or None; a bucket's number ends with its last block."""
        fields = self.index.remove(digest)
        if fields is None:
            return None
        number, bucket = fields[0], self._names[fields[0]]
        self._drop_order(bucket, digest)
        if not self.index.bucket_blocks(number):
            del self._numbers[bucket], self._names[number]
            self.index.close_bucket(number)
        return Block(bucket, *fields[1:])

    def children(self, digest: bytes) -> int:
        """Count the other blocks, of whatever bucket, that have this one as their parent."""
        return self.index.children(digest)

    def descendants(self, digest: bytes) -> list[bytes]:
        """List the blocks that are of no use without this one, parents first."""
        return self.index.descendants(digest)

    def count(self, bucket: bytes) -> int:
        """Return how many blocks a bucket has."""
        number = self._numbers.get(bucket)
        return 0 if number is None else self.index.bucket_blocks(number)

    def size_bytes(self, bucket: bytes) -> int:
        """Return the bytes of a bucket's blocks."""
        number = self._numbers.get(bucket)
        return 0 if number is None else self.index.bucket_bytes(number)

    def names(
        self, bucket: bytes, *, prefix: bytes, after: bytes, delimiter: bytes | None
    ) -> Iterator[bytes]:
        """Yield block names under `prefix` and past `after`, in order; common prefixes where a delimiter collapses."""
        number, previous = self._numbers.get(bucket), after
        if number is None:
            return
        for first in range(256):
            directory = b"kv/%02x/" % first
            if not (directory.startswith(prefix) or prefix.startswith(directory)):
                continue
            if directory < after and not after.startswith(directory):
                continue
            if not self.index.shelf_blocks(number, first):
                continue
            for name in self._shelf_names(bucket, first, prefix, delimiter, previous):
                if name > previous:  # names in order: so a common prefix comes once
                    previous = name
                    yield name

    def _in_order(self, bucket: bytes, first: int) -> list[bytes]:
        """Sort the hashes of one first byte, kept from one page of a listing to the next while they do not change."""
        if self._ordered[:2] != (bucket, first):
            self._ordered = bucket, first, self.index.shelf(self._numbers[bucket], first)
        return self._ordered[2]

    def _drop_order(self, bucket: bytes, digest: bytes) -> None:
        if self._ordered[:2] == (bucket, digest[0]):
            self._ordered = b"", -1, []

    def _shelf_names(
        self, bucket: bytes, first: int, prefix: bytes, delimiter: bytes | None, after: bytes
    ) -> Iterator[bytes]:
        """Yield the names of one first byte, each cut behind the delimiter: a common prefix may come many times. Names
        up to `after` may be missing."""
        directory = b"kv/%02x/" % first
        if delimiter and (cut := directory.find(delimiter, len(prefix))) >= 0:
            yield directory[: cut + len(delimiter)]
            return
        passed = parse_block_name(after)
        order = self._in_order(bucket, first)
        for digest in order if passed is None else islice(order, bisect_right(order, passed), None):
            name = block_name(digest)
            if name.startswith(prefix):
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                yield name if cut < 0 else name[: cut + len(delimiter or b"")]
