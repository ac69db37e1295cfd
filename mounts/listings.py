"""Directory handles: readdir with a cursor, no snapshot.

Responsibility: walk a directory page by page in name order, merging the drafts that only the mount shows,
and remember per handle where the kernel's next offset continues. Every name that exists during the whole
walk is returned exactly once.

Concurrency: the service's trio thread; a page is read in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from kvfs import paths
from mounts.nodes import Node, NodeTable
from tiers.model import Directory, Name, ObjectInfo
from tiers.store import TieredStore

PAGE = 256
"""Names read from the index at once: about 2 ms of the event loop."""


@dataclass(slots=True)
class Listing:
    """One open directory. Offset n continues after the n-th name that this handle returned, whose tail is `last`."""

    node: Node
    offset: int = 0
    last: bytes = b""

    def rewind(self) -> None:
        self.offset, self.last = 0, b""


def entries(
    store: TieredStore, nodes: NodeTable, directory: Node, after: bytes
) -> Iterator[tuple[bytes, ObjectInfo | Directory | Node]]:
    """(tail, what it is) past the tail `after`, in the order of keys; a `Node` is a draft.

    A tail is the key below the directory; a subdirectory's ends in `/`, which is where keys sort it.
    """
    if directory.parent is None:
        for bucket in sorted(found.name for found in store.buckets()):
            if bucket + b"/" > after:
                yield bucket + b"/", store.lookup(Name(bucket, b""))
        return
    drafts = nodes.drafts_in(directory)
    written = ((component, drafts[component]) for component in sorted(drafts) if component > after)
    sealed = _sealed(store, nodes.name(directory), after)
    previous = None
    for tail, found in merge(written, sealed, key=lambda item: item[0]):
        if tail != previous:
            yield tail, drafts.get(tail, found)
        previous = tail


def _sealed(store: TieredStore, name: Name, after: bytes) -> Iterator[tuple[bytes, ObjectInfo | Directory]]:
    """Sealed names that are paths; where both `a` and `a/b` exist, only the directory."""
    start = name.key + after if after else b""
    while True:
        page = store.list(name.bucket, prefix=name.key, after=start, delimiter=b"/", limit=PAGE)
        for key, found in page.entries:
            hidden = isinstance(found, ObjectInfo) and store.names.has_prefix(name.bucket, key + b"/")
            if paths.is_path(key) and key != name.key and not hidden:
                yield key[len(name.key) :], found
        if page.next_after is None:
            return
        start = page.next_after
