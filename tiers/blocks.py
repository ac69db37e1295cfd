"""The blocks of the store: what is known of each besides its place, and their names by bucket.

Responsibility: blocks have no row in the name index (their names *are* their prefix hashes); this module
keeps the little that a listing or a stat needs, and answers listings of `kv/<2 hex>/<32 hex>` in order.

Invariant: a block is here exactly while it is in the index. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvfs.keys import block_name, parse_block_name


@dataclass(slots=True)
class Block:
    """One sealed block. `sequence` is also its object id."""

    bucket: bytes
    uid: int
    size_bytes: int
    sequence: int
    sealed_ns: int
    pinned: bool = False
    parent: bytes | None = None


@dataclass(slots=True)
class BlockCatalog:
    """All sealed blocks by prefix hash, and each bucket's hashes in order of their first byte."""

    _blocks: dict[bytes, Block] = field(default_factory=dict)
    _by_bucket: dict[bytes, dict[int, set[bytes]]] = field(default_factory=dict)
    _first_bytes: dict[bytes, list[int]] = field(default_factory=dict)
    _children: dict[bytes, bytes | set[bytes]] = field(default_factory=dict)
    """Prefix hash -> that of the block which follows it, whether it is here or not; a set where prompts part,
    since one for each would take 216 bytes."""

    _by_sequence: dict[int, bytes] = field(default_factory=dict)
    _ordered: tuple[set[bytes], list[bytes]] = field(default_factory=lambda: (set(), []))
    """The hashes of one first byte that were listed last, and the same in order."""

    def __len__(self) -> int:
        return len(self._blocks)

    def digests(self) -> list[bytes]:
        """All prefix hashes, in the order of their seals."""
        return list(self._blocks)

    def get(self, digest: bytes) -> Block | None:
        return self._blocks.get(digest)

    def of_sequence(self, sequence: int) -> bytes | None:
        """The prefix hash of the block with this object id."""
        return self._by_sequence.get(sequence)

    def add(self, digest: bytes, block: Block) -> None:
        self._by_sequence[block.sequence] = digest
        self._blocks[digest] = block
        if block.parent is not None:
            self._add_child(block.parent, digest)
        shelves = self._by_bucket.setdefault(block.bucket, {})
        if digest[0] not in shelves:
            shelves[digest[0]] = set()
            insort(self._first_bytes.setdefault(block.bucket, []), digest[0])
        shelves[digest[0]].add(digest)
        self._forget_order(shelves[digest[0]])

    def _add_child(self, parent: bytes, digest: bytes) -> None:
        known = self._children.setdefault(parent, digest)
        if isinstance(known, set):
            known.add(digest)
        elif known != digest:
            self._children[parent] = {known, digest}

    def _remove_child(self, parent: bytes, digest: bytes) -> None:
        known = self._children[parent]
        if isinstance(known, set):
            known.discard(digest)
            if len(known) == 1:
                (self._children[parent],) = known
        elif known == digest:
            del self._children[parent]

    def _children_of(self, parent: bytes) -> Iterable[bytes]:
        known = self._children.get(parent, ())
        return (known,) if isinstance(known, bytes) else known

    def remove(self, digest: bytes) -> Block | None:
        block = self._blocks.pop(digest, None)
        if block is None:
            return None
        self._by_sequence.pop(block.sequence, None)
        if block.parent is not None:
            self._remove_child(block.parent, digest)
        shelf = self._by_bucket[block.bucket][digest[0]]
        shelf.discard(digest)
        self._forget_order(shelf)
        if not shelf:
            del self._by_bucket[block.bucket][digest[0]]
            self._first_bytes[block.bucket].remove(digest[0])
        return block

    def descendants(self, digest: bytes) -> list[bytes]:
        """The blocks that are of no use without this one, nearest first."""
        found: list[bytes] = []
        seen = {digest}
        front = [digest]
        while front:
            front = [child for parent in front for child in self._children_of(parent) if child not in seen]
            seen.update(front)
            found += front
        return found

    def count(self, bucket: bytes) -> int:
        return sum(len(shelf) for shelf in self._by_bucket.get(bucket, {}).values())

    def names(
        self, bucket: bytes, *, prefix: bytes, after: bytes, delimiter: bytes | None
    ) -> Iterator[bytes]:
        """Block names under `prefix` and past `after`, in order; common prefixes where a delimiter collapses."""
        shelves = self._by_bucket.get(bucket, {})
        previous = after
        for first in list(self._first_bytes.get(bucket, ())):
            directory = b"kv/%02x/" % first
            if not (directory.startswith(prefix) or prefix.startswith(directory)):
                continue
            if directory < after and not after.startswith(directory):
                continue
            for name in self._shelf_names(shelves[first], directory, prefix, delimiter, previous):
                if name > previous:  # names in order: so a common prefix comes once
                    previous = name
                    yield name

    def _in_order(self, shelf: set[bytes]) -> list[bytes]:
        """The hashes of a shelf, kept from one page of a listing to the next while the shelf does not change."""
        if self._ordered[0] is not shelf:
            self._ordered = shelf, sorted(shelf)
        return self._ordered[1]

    def _forget_order(self, shelf: set[bytes]) -> None:
        if self._ordered[0] is shelf:
            self._ordered = set(), []

    def _shelf_names(
        self, shelf: set[bytes], directory: bytes, prefix: bytes, delimiter: bytes | None, after: bytes
    ) -> Iterator[bytes]:
        """The names of one first byte, each cut behind the delimiter: a common prefix may come many times. Those up to
        `after` may be left out."""
        if delimiter and (cut := directory.find(delimiter, len(prefix))) >= 0:
            yield directory[: cut + len(delimiter)]
            return
        passed = parse_block_name(after)
        order = self._in_order(shelf)
        for digest in order if passed is None else islice(order, bisect_right(order, passed), None):
            name = block_name(digest)
            if name.startswith(prefix):
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                yield name if cut < 0 else name[: cut + len(delimiter or b"")]


__all__ = ["Block", "BlockCatalog", "block_name", "parse_block_name"]
