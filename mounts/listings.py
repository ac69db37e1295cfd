"""Directory handles: readdir with a cursor, no snapshot.

Responsibility: walk a directory turn by turn in name order, merging the drafts that only the mount shows,
and remember per handle where the kernel's next offset continues. Every name that exists during the whole
walk is returned exactly once.

The first entries of a handle come with their attributes and are nodes from then on, which is what `ls -l` of a small
directory wants; those behind them are names with an inode number and a type, which cost a tenth.

Concurrency: the service's trio thread; a turn is one step, and everybody else has theirs between two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice

from kvfs import paths
from mounts.nodes import Node, NodeTable
from tiers.model import Directory, Name, ObjectInfo
from tiers.store import TieredStore

TURN = 32
"""Names handled in one step: a few hundred microseconds."""
MARK = 256
"""Every so many names a handle remembers its place for seekdir(3)."""
WITH_ATTRIBUTES = 256
"""Names at the beginning that come with their attributes."""
DOTS = (b".", b"..")


@dataclass(frozen=True, slots=True)
class Named:
    """An entry without attributes."""

    ino: int
    directory: bool


Found = ObjectInfo | Directory | Node | Named


@dataclass(slots=True)
class Listing:
    """One open directory. Offset n continues after the n-th name that this handle returned, whose tail is `last`."""

    node: Node
    offset: int = 0
    last: bytes = b""
    _marks: list[bytes] = field(default_factory=lambda: [b""])
    """The tail at each multiple of MARK."""
    _recent: dict[int, bytes] = field(default_factory=dict)
    """By offset, of the last answer: the kernel asks again for what its reader had no room for."""

    def begin_answer(self, offset: int) -> bool:
        """Continue after the n-th name; False where `skip` has to lead there from the last mark before it."""
        known = self._recent.get(offset, self.last if offset == self.offset else None)
        mark = min(offset // MARK, len(self._marks) - 1)
        if known is not None:
            self.offset, self.last = offset, known
        else:
            self.offset, self.last = mark * MARK, self._marks[mark]
        self._recent = {self.offset: self.last}
        return self.offset == offset

    def step(self, tail: bytes) -> None:
        """One more name was returned, or skipped."""
        self.offset, self.last = self.offset + 1, tail
        self._recent[self.offset] = tail
        if self.offset == len(self._marks) * MARK:
            self._marks.append(tail)


def turn(
    store: TieredStore, nodes: NodeTable, listing: Listing, *, bare: bool
) -> Sequence[tuple[bytes, Found]]:
    """The next names, TURN at most; none at the end. `bare`: names may come without attributes."""
    if listing.offset < len(DOTS):
        node = listing.node
        above = node.parent or node
        return [(dot, Named(ino, True)) for dot, ino in zip(DOTS, (node.ino, above.ino), strict=True)][
            listing.offset :
        ]
    after = b"" if listing.last in DOTS else listing.last
    found = entries(
        store, nodes, listing.node, after, limit=TURN, bare=bare and listing.offset >= WITH_ATTRIBUTES
    )
    return list(islice(found, TURN))


def entries(
    store: TieredStore, nodes: NodeTable, directory: Node, after: bytes, *, limit: int, bare: bool = False
) -> Iterator[tuple[bytes, Found]]:
    """(tail, what it is) past the tail `after`, in the order of keys; a `Node` is a draft. `limit` are read at once.

    A tail is the key below the directory; a subdirectory's ends in `/`, which is where keys sort it.
    """
    if directory.parent is None:
        for bucket in sorted(found.name for found in store.buckets()):
            if bucket + b"/" > after:
                yield bucket + b"/", store.lookup(Name(bucket, b""))
        return
    drafts = nodes.drafts_in(directory)
    written = ((component, drafts[component]) for component in sorted(drafts) if component > after)
    sealed = _sealed(store, nodes.name(directory), after, limit, bare)
    previous = None
    for tail, found in merge(written, sealed, key=lambda item: item[0]):
        if tail != previous:
            yield tail, drafts.get(tail, found)
        previous = tail


def _sealed(
    store: TieredStore, name: Name, after: bytes, limit: int, bare: bool
) -> Iterator[tuple[bytes, Found]]:
    """Sealed names that are paths; where both `a` and `a/b` exist, only the directory."""
    start = name.key + after if after else b""
    while True:
        found: Sequence[tuple[bytes, Found]]
        if bare:
            names = store.list_names(name.bucket, prefix=name.key, after=start, limit=limit)
            found = [(key, Named(ino, key.endswith(b"/"))) for key, ino in names.entries]
            following = names.next_after
        else:
            page = store.list(name.bucket, prefix=name.key, after=start, delimiter=b"/", limit=limit)
            found, following = page.entries, page.next_after
        for key, what in found:
            hidden = not key.endswith(b"/") and store.names.has_prefix(name.bucket, key + b"/")
            if paths.is_path(key) and key != name.key and not hidden:
                yield key[len(name.key) :], what
        if following is None:
            return
        start = following
