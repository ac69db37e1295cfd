"""The nodes that the kernel knows: the file or directory of each nodeid, and its name.

Responsibility: nodeids, lookup counts, and the tree of (parent, component) edges; names are computed from
the tree, so that renaming a directory moves one edge. No I/O, no store.

Invariants:
- A nodeid is `generation << 24 | index`; the generation moves with every node and begins at random, so that a nodeid
  never comes back with other bytes, nor does one of an earlier start, which handles may still have (open_by_handle_at).
- A node stays while the kernel has lookups of it, a handle or draft of it is open, or a child is kept.
- At most one node is linked under a (parent, component).
- A name whose node is dropped while it may still lead somewhere is marked unresolved at the mirror.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from pyfuse3 import EntryAttributes

from kvfs.errors import LimitExceeded, Superseded
from kvfs.limits import MAX_NODES
from mounts.kernel.open_draft import OpenDraft
from tiers.model.objects import Name, ObjectInfo

ROOT_ID = 1
INDEX_BITS = 24
GENERATIONS = 1 << 39
"""The highest bit of a nodeid is free: it marks the handles that the native loop gives out, which are nodeids."""


@dataclass(slots=True, eq=False)
class Node:
    """One file, symbolic link or directory as the kernel refers to it."""

    nodeid: int
    parent: Node | None
    component: bytes
    directory: bool
    ino: int
    lookups: int = 0
    children: int = 0
    handles: int = 0
    cached_handles: int = 0
    """Of those, how many read a sealed file through the page cache: while there are any, none has passthrough."""
    later: Node | None = None
    """The node that took its place when the file was opened for writing, while this version of it was open."""
    linked: bool = True
    """Whether its name still leads to it."""
    info: ObjectInfo | None = None
    """The sealed object or symbolic link; None for directories and drafts."""
    draft: OpenDraft | None = None
    dropped: EntryAttributes | None = None
    """What it was when its draft was dropped, for those who still have it open or just looked its name up."""
    heir_gid: int = -1
    """The group of files made in it, if it is a directory with the setgid bit; -1: the maker's group."""
    lock_key: int = 0
    """The inode number that its locks are on, if not its own: that of an earlier version, which was open then."""
    names_known: bool = False
    """Whether a directory's names have been given to the mirror, or are too many for that."""

    @property
    def target(self) -> bytes:
        """Return where it leads, if it is a symbolic link; else nothing."""
        return b"" if self.info is None else self.info.target


class Mirror(Protocol):
    """What answers LOOKUP natively, and so must know the edges (mounts.kernel.backing.Backings)."""

    def link(self, parent: int, name: bytes, nodeid: int) -> None:
        """Answer LOOKUP of the name with this node from now on."""

    def unlink(self, parent: int, name: bytes, nodeid: int) -> None:
        """Take the name away from this node; a name that leads to another node by now stays."""

    def mark_unresolved(self, parent: int, name: bytes, nodeid: int) -> None:
        """Have LOOKUP of the name, which led to the node (0: to none), answered in Python: something may have it."""

    def node_drop(self, nodeid: int) -> int:
        """Drop a node, unless lookups of it were answered natively; return their number."""


@dataclass(slots=True)
class NodeTable:
    """All nodes, by nodeid and by (parent, component); `mirror` is kept in step."""

    mirror: Mirror
    root: Node = field(
        default_factory=lambda: Node(ROOT_ID, None, b"", directory=True, ino=ROOT_ID, lookups=1)
    )
    _by_id: dict[int, Node] = field(default_factory=dict)
    _edges: dict[tuple[int, bytes], Node] = field(default_factory=dict)
    _by_digest: dict[bytes, Node] = field(default_factory=dict)
    _drafts: dict[int, dict[bytes, Node]] = field(default_factory=dict)
    _draft_order: dict[int, list[bytes]] = field(default_factory=dict)
    """Their components in order, so that a listing finds its place among them."""
    _lock_keys: dict[int, int] = field(default_factory=dict)
    """By inode number, while a node of an earlier version is kept."""
    _later: dict[int, list[int]] = field(default_factory=dict)
    """Inode numbers of the versions that came after a node's, by nodeid."""
    _free: list[int] = field(default_factory=list)
    _next_index: int = 2
    _generation: int = field(default_factory=lambda: secrets.randbelow(GENERATIONS))

    def __post_init__(self) -> None:
        self._by_id[ROOT_ID] = self.root

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, nodeid: int) -> Node:
        """Return the node of this id. Raises Superseded."""
        node = self._by_id.get(nodeid)
        if node is None:
            raise Superseded(f"node {nodeid} is no longer known")
        return node

    def find(self, nodeid: int) -> Node | None:
        """Return the node of this id, or None."""
        return self._by_id.get(nodeid)

    def child(self, parent: Node, component: bytes) -> Node | None:
        """Return the node that has this name in a directory, or None."""
        return self._edges.get((parent.nodeid, component))

    def of_object(self, digest: bytes) -> Node | None:
        """Find the node that shows the sealed object with this store key."""
        return self._by_digest.get(digest)

    def drafts_in(self, directory: Node) -> dict[bytes, Node]:
        """Return the drafts linked directly in a directory, by component."""
        return self._drafts.get(directory.nodeid, {})

    def drafts_after(self, directory: Node, after: bytes) -> Iterator[bytes]:
        """Return the components greater than `after` of drafts in a directory, in order, while none changes."""
        order = self._draft_order.get(directory.nodeid, [])
        return islice(order, bisect_right(order, after), None)

    def has_drafts_below(self, directory: Node) -> bool:
        """Return whether any draft is linked anywhere below. Looks at every directory that holds one."""
        return any(_is_below(next(iter(drafts.values())), directory) for drafts in self._drafts.values())

    def below(self, directory: Node) -> list[Node]:
        """Return all nodes under a directory. Looks at every node, unless there are none."""
        return [node for node in self if _is_below(node, directory)] if directory.children else []

    def add(self, parent: Node, component: bytes, *, directory: bool, ino: int) -> Node:
        """Add a node, linked under its name in place of whatever was there."""
        nodeid = self.allot()
        node = self._place(nodeid, parent, component, directory=directory, ino=ino)
        self.mirror.link(parent.nodeid, component, nodeid)
        return node

    def adopt(self, nodeid: int, parent: Node, component: bytes, *, ino: int) -> Node:
        """Add a node for a file that the mirror has linked by itself, under a nodeid from `allot`."""
        return self._place(nodeid, parent, component, directory=False, ino=ino)

    def allot(self) -> int:
        """Allot a nodeid for a new node. Raises LimitExceeded."""
        if not self._free and self._next_index >= MAX_NODES:
            raise LimitExceeded(
                f"{MAX_NODES} files and directories are known to the kernel, which is the limit"
            )
        index = self._free.pop() if self._free else self._next_index
        if index == self._next_index:
            self._next_index += 1
        self._generation = (self._generation + 1) % GENERATIONS
        return self._generation << INDEX_BITS | index

    def free(self, nodeid: int) -> None:
        """Free a nodeid that no node has."""
        self._free.append(nodeid & (1 << INDEX_BITS) - 1)

    def _place(self, nodeid: int, parent: Node, component: bytes, *, directory: bool, ino: int) -> Node:
        old = self.child(parent, component)
        if old is not None:
            self._cut(old)
        node = Node(nodeid, parent, component, directory, ino, lock_key=self._lock_keys.get(ino, 0))
        self._by_id[nodeid] = node
        self._edges[parent.nodeid, component] = node
        parent.children += 1
        if old is not None:
            self.release(old)
        return node

    def share_locks(self, node: Node, later: Node) -> None:
        """Put the locks of `later` on the inode number of `node`, which stays open and whose place `later` took."""
        node.later = later
        later.lock_key = self._lock_keys[later.ino] = node.lock_key or node.ino
        self._later.setdefault(node.nodeid, []).append(later.ino)

    def set_object(self, node: Node, info: ObjectInfo | None) -> None:
        """Set the sealed object that a node shows; None: none."""
        if node.info is not None and self._by_digest.get(node.info.key.digest) is node:
            del self._by_digest[node.info.key.digest]
        node.info = info
        if info is not None and node.linked:
            self._by_digest[info.key.digest] = node

    def set_draft(self, node: Node, draft: OpenDraft | None) -> None:
        """Set the draft that a node is written to; None: it is written no more."""
        node.draft = draft
        self._note_draft(node)

    def _note_draft(self, node: Node) -> None:
        assert node.parent is not None
        here = self._drafts.setdefault(node.parent.nodeid, {})
        order = self._draft_order.setdefault(node.parent.nodeid, [])
        if node.draft is not None and node.linked:
            if node.component not in here:
                insort(order, node.component)
            here[node.component] = node
        elif here.get(node.component) is node:
            del here[node.component]
            del order[bisect_left(order, node.component)]
        if not here:
            del self._drafts[node.parent.nodeid], self._draft_order[node.parent.nodeid]

    def unlink(self, node: Node, *, unresolved: bool = False) -> None:
        """Unlink a node from its name; it lives on for those who have it open.

        `unresolved`: the name may lead somewhere all the same.
        """
        if not node.linked or node.parent is None:
            return
        if unresolved:
            self.mirror.mark_unresolved(node.parent.nodeid, node.component, node.nodeid)
        else:
            self.mirror.unlink(node.parent.nodeid, node.component, node.nodeid)
        self._cut(node)

    def _cut(self, node: Node) -> None:
        assert node.parent is not None
        node.linked = False
        self._edges.pop((node.parent.nodeid, node.component), None)
        if node.info is not None and self._by_digest.get(node.info.key.digest) is node:
            del self._by_digest[node.info.key.digest]
        self._note_draft(node)

    def move(self, node: Node, parent: Node, component: bytes, *, mirrored: bool = False) -> None:
        """Move a node to another name, in place of whatever is there; `mirrored`: the mirror has done so."""
        old = self.child(parent, component)
        if old is node:
            return
        if old is not None:
            self._cut(old)
        assert node.parent is not None
        draft, node.draft = node.draft, None
        self._note_draft(node)
        former, former_component = node.parent, node.component
        self._edges.pop((former.nodeid, former_component), None)
        former.children -= 1
        node.parent, node.component, node.draft = parent, component, draft
        parent.children += 1
        self._edges[parent.nodeid, component] = node
        if not mirrored:
            self.mirror.link(parent.nodeid, component, node.nodeid)
            if node.directory:  # a file of its name may have stood behind it
                self.mirror.mark_unresolved(former.nodeid, former_component, node.nodeid)
            else:
                self.mirror.unlink(former.nodeid, former_component, node.nodeid)
        self._note_draft(node)
        self.release(former)
        if old is not None:
            self.release(old)

    def drop_lookups(self, node: Node, lookups: int) -> None:
        """Subtract lookups that the kernel dropped."""
        node.lookups -= lookups
        self.release(node)

    def release(self, node: Node) -> None:
        """Drop the node, and parents kept only for it, when nothing needs them."""
        current: Node | None = node
        while current is not None and current.nodeid in self._by_id and self._unneeded(current):
            if self.mirror.node_drop(current.nodeid) > 0:
                break
            self.unlink(current, unresolved=True)
            del self._by_id[current.nodeid]
            for ino in self._later.pop(current.nodeid, ()):
                del self._lock_keys[ino]
            self.free(current.nodeid)
            assert current.parent is not None
            current.parent.children -= 1
            current = current.parent

    @staticmethod
    def _unneeded(node: Node) -> bool:
        return (
            node.parent is not None
            and node.lookups <= 0
            and node.children == 0
            and node.handles == 0
            and node.draft is None
        )

    def name(self, node: Node) -> Name:
        """Compute the node's name from its edges; a directory's key ends in `/`. The root has none: empty bytes."""
        parts: list[bytes] = []
        current: Node | None = node
        while current is not None and current.parent is not None:
            parts.append(current.component)
            current = current.parent
        if not parts:
            return Name(b"", b"")
        key = b"/".join(reversed(parts[:-1]))
        return Name(parts[-1], key + b"/" if node.directory and key else key)

    def child_name(self, parent: Node, component: bytes) -> Name:
        """Return the name that a file `component` has in `parent`, which is not the root."""
        above = self.name(parent)
        return Name(above.bucket, above.key + component)

    def resolve(self, name: Name) -> Node | None:
        """Find the linked node of a name, if the kernel knows one."""
        node = self.child(self.root, name.bucket)
        for component in name.key.removesuffix(b"/").split(b"/") if name.key else ():
            if node is None:
                return None
            node = self.child(node, component)
        return node

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._by_id.values()))


def _is_below(node: Node, directory: Node) -> bool:
    above = node.parent
    while above is not None and above is not directory:
        above = above.parent
    return above is directory
