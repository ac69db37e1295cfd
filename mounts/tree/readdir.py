"""Directory handles: readdir with a cursor, no snapshot.

Responsibility: walk a directory turn by turn in name order, merging the drafts that only the mount shows, and remember
per handle where the kernel's next offset continues. Every name that exists during the whole walk is returned exactly
once.

The first entries of a handle come with their attributes and are nodes from then on, which suits `ls -l` of a small
directory. The entries behind them are names with an inode number and a type, which cost a thirtieth: the native loop
gets them a turn at a time, answers the kernel from them, and calls for the next ones.

Invariants: one turn handles TURN entries with attributes, or NAME_TURN names, and no more, whatever the directory
holds. A handle keeps MAX_MARKS places at most, and the loop one turn's names of it.

Concurrency: the service's trio thread; a turn is one step, and other tasks run between two. A handle's walk goes on in
one task at a time (`Listing.walking`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from operator import itemgetter

import trio

from kvfs import limits, paths
from kvfs.errors import LimitExceeded, Superseded
from mounts.kernel.backing import Backings
from mounts.kernel.call_queue import CallQueue
from mounts.kernel.nodes import Node, NodeTable
from tiers.model.objects import Directory, ListedName, Name, ObjectInfo
from tiers.store.store import Store

TURN = 32
"""Entries with attributes handled in one step: a millisecond."""
NAME_TURN = 256
"""Names without attributes handled in one step: a quarter of a millisecond. A handle keeps as many in the loop: 68 KiB
at most, mostly 6."""
MARK = NAME_TURN
"""A handle remembers its place for seekdir(3) every so many names."""
MAX_MARKS = 1024
"""When a handle has so many marks, every second one is dropped."""
WITH_ATTRIBUTES = 256
"""How many names at the beginning come with their attributes."""
DOTS = (b".", b"..")
FIRST_BARE = len(DOTS) + WITH_ATTRIBUTES
"""The offset from which names may come without attributes."""


@dataclass(frozen=True, slots=True)
class Named:
    """An entry without attributes."""

    ino: int
    directory: bool


Entry = ObjectInfo | Directory | Node | Named


@dataclass(slots=True)
class Listing:
    """One open directory. Offset n continues after the n-th name that this handle returned, whose tail is `last`."""

    node: Node
    offset: int = 0
    last: bytes = b""
    walking: trio.Lock = field(default_factory=trio.Lock)
    _marks: list[bytes] = field(default_factory=lambda: [b""])
    """The tail at each multiple of `_mark_every`."""
    _mark_every: int = MARK
    _recent: dict[int, bytes] = field(default_factory=dict)
    """By offset, of the last answer: the kernel asks again for what its reader had no room for."""

    def begin_answer(self, offset: int) -> bool:
        """Continue after the n-th name; return False where `skip` has to lead there from the last mark before it."""
        if offset == 0:  # rewinddir: another walk
            self._marks, self._mark_every = [b""], MARK
        known = self._recent.get(offset, self.last if offset == self.offset else None)
        mark = min(offset // self._mark_every, len(self._marks) - 1)
        if known is not None:
            self.offset, self.last = offset, known
        else:
            self.offset, self.last = mark * self._mark_every, self._marks[mark]
        self._recent = {self.offset: self.last}
        return self.offset == offset

    def step(self, tail: bytes) -> None:
        """Advance past one more name that was returned."""
        self.pass_over([tail])
        self._recent[self.offset] = tail

    def pass_over(self, tails: Sequence[bytes]) -> None:
        """Advance past names that were skipped, or given to the loop, which finds its place among them."""
        ahead = len(self._marks) * self._mark_every - self.offset
        self._marks += tails[ahead - 1 :: self._mark_every]
        self.offset += len(tails)
        self.last = tails[-1] if tails else self.last
        if len(self._marks) > MAX_MARKS:
            self._marks, self._mark_every = self._marks[::2], 2 * self._mark_every

    @property
    def after(self) -> bytes:
        """Return the tail that the walk goes on behind."""
        return b"" if self.last in DOTS else self.last


def turn(store: Store, nodes: NodeTable, listing: Listing, limit: int) -> Sequence[tuple[bytes, Entry]]:
    """Return the next entries with their attributes, TURN and `limit` at most; none at the end."""
    if listing.offset < len(DOTS):
        return dots(listing)
    limit = min(TURN, limit)
    return list(islice(entries(store, nodes, listing.node, listing.after, limit=limit), limit))


def dots(listing: Listing) -> Sequence[tuple[bytes, Named]]:
    """Return the first entries of every directory, those that are still to come."""
    node = listing.node
    above = node.parent or node
    both = [(dot, Named(ino, True)) for dot, ino in zip(DOTS, (node.ino, above.ino), strict=True)]
    return both[listing.offset :]


def entries(
    store: Store, nodes: NodeTable, directory: Node, after: bytes, *, limit: int
) -> Iterator[tuple[bytes, Entry]]:
    """Yield (tail, entry) behind the tail `after`, in the order of keys; a `Node` is a draft. `limit` are read at once.

    A tail is the key below the directory; a subdirectory's ends in `/`, which is where keys sort it.
    """
    if directory.parent is None:
        for bucket in _bucket_tails(store, after):
            yield bucket, store.lookup(Name(bucket[:-1], b""))
        return
    drafts = nodes.drafts_in(directory)
    written = ((component, drafts[component]) for component in nodes.drafts_after(directory, after))
    sealed = _sealed(store, nodes.name(directory), after, limit)
    previous = None
    for tail, found in merge(written, sealed, key=itemgetter(0)):
        if tail != previous:
            yield tail, drafts.get(tail, found)
        previous = tail


def _sealed(
    store: Store, name: Name, after: bytes, limit: int
) -> Iterator[tuple[bytes, ObjectInfo | Directory]]:
    """Yield sealed names that are paths; where both `a` and `a/b` exist, only the directory."""
    start = name.key + after if after else b""
    while True:
        page = store.list(name.bucket, prefix=name.key, after=start, delimiter=b"/", limit=limit)
        for key, what in page.entries:
            hidden = not key.endswith(b"/") and store.names.has_prefix(name.bucket, key + b"/")
            if paths.is_path(key) and key != name.key and not hidden:
                yield key[len(name.key) :], what
        if page.next_after is None:
            return
        start = page.next_after


def _bucket_tails(store: Store, after: bytes) -> list[bytes]:
    tails = [bucket.name + b"/" for bucket in store.buckets()]
    return sorted(tail for tail in tails if tail > after)


def names(
    store: Store, nodes: NodeTable, directory: Node, after: bytes, limit: int
) -> tuple[list[ListedName], bytes | None]:
    """List names past the tail `after`, and the tail to go on behind, None at the end.

    `limit` of those that are sealed are returned, and as many drafts looked at.
    """
    if directory.parent is None:
        tails = _bucket_tails(store, after)
        found = [(tail, store.lookup(Name(tail[:-1], b"")).ino, False) for tail in tails[:limit]]
        return found, tails[limit - 1] if len(tails) > limit else None
    name = nodes.name(directory)
    page = store.list_names(name.bucket, prefix=name.key, after=after, limit=limit)
    written = list(islice(nodes.drafts_after(directory, after), limit + 1))
    if not written:
        return page.entries, page.next_after
    ends = [end for end in (page.next_after, written[limit - 1] if len(written) > limit else None) if end]
    end = min(ends, default=None)
    drafts = nodes.drafts_in(directory)
    merged = {entry[0]: entry for entry in page.entries}
    merged |= {component: (component, drafts[component].ino, False) for component in written[:limit]}
    found = sorted(entry for entry in merged.values() if end is None or entry[0] <= end)
    return found[:limit], end if len(found) <= limit else found[limit - 1][0]


@dataclass(eq=False)
class OpenListings:
    """All open directories of one mount, by handle."""

    _store: Store
    _nodes: NodeTable
    _backings: Backings
    _calls: CallQueue
    _open: dict[int, Listing] = field(default_factory=dict)
    _next: int = 1

    def open(self, directory: Node) -> int:
        """Open a directory. Raises LimitExceeded."""
        if len(self._open) >= limits.MAX_OPEN_LISTINGS:
            raise LimitExceeded(f"{limits.MAX_OPEN_LISTINGS} directories are open, which is the limit")
        number, self._next = self._next, self._next + 1
        self._backings.listing_open(number, FIRST_BARE)
        self._open[number] = Listing(directory)
        return number

    def close(self, number: int) -> None:
        """Close a directory's handle, there or not."""
        if self._open.pop(number, None) is not None:
            self._backings.listing_close(number)

    def get(self, number: int) -> Listing:
        """Find a handle. Raises Superseded."""
        listing = self._open.get(number)
        if listing is None:
            raise Superseded(f"directory handle {number} is not open")
        return listing

    def fill(self, number: int, offset: int) -> bool:
        """Give the loop the names behind the n-th, in one step; return False where `fill_in_turns` is needed."""
        listing = self.get(number)
        return not listing.walking.locked() and listing.begin_answer(offset) and self._fill(number, listing)

    async def fill_in_turns(self, number: int, offset: int) -> None:
        """Give the loop the names from `offset` on, with pauses for all others."""
        listing = self.get(number)
        async with listing.walking:
            if not listing.begin_answer(offset):
                await self.skip(listing, offset)
            if listing.offset != offset:  # the directory ends before it
                self._backings.listing_fill(number, offset, [], True)
                return
            while not self._fill(number, listing):
                await self._pause()

    def _fill(self, number: int, listing: Listing) -> bool:
        """Give one step's names to the loop; return False where there were none, and more may follow."""
        first = listing.offset
        found, end = self._names(listing)
        listing.pass_over([tail for tail, *_ in found])
        listing.last = end or listing.last
        if found or end is None:
            self._backings.listing_fill(number, first, found, end is None)
        return bool(found) or end is None

    def _names(self, listing: Listing) -> tuple[list[ListedName], bytes | None]:
        """List names as `names` does; none where the directory was removed."""
        if not listing.node.linked:
            return [], None
        return names(self._store, self._nodes, listing.node, listing.after, NAME_TURN)

    async def skip(self, listing: Listing, offset: int) -> None:
        """Advance to an offset from the last place before it that is known, step by step (seekdir)."""
        while (missing := offset - listing.offset) > 0:
            end: bytes | None
            if listing.offset < len(DOTS):
                tails, end = [dot for dot, _ in dots(listing)], DOTS[-1]
            else:
                found, end = self._names(listing)
                tails = [tail for tail, *_ in found]
            listing.pass_over(tails[:missing])
            if len(tails) < missing:
                if end is None:
                    return
                listing.last = end
            await self._pause()

    async def _pause(self) -> None:
        """Let other tasks run, then bring the tree up to date."""
        await trio.lowlevel.checkpoint()
        self._calls.catch_up()
