"""The tree as the kernel sees it: nodes over the store's names, kept true when other doors change them.

Responsibility: find the node of a name and its attributes, and invalidate what changes under the kernel's caches. The
handlers (mounts.handlers) and open files (mounts.tree.handles) stand on it.

Invariants: a linked node shows what its name leads to in the store, or a draft; a node whose object is gone
is dead natively (OPEN answers ESTALE) and off its name before that name is invalidated: a thread sends the notice at
once, and a LOOKUP that was answered after it by the old node would keep the name in the kernel's caches for their time.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyfuse3

from kvfs import paths
from kvfs.errors import NotDirectory, NotFound, NotPermitted, Superseded
from mounts.drafts.keeper import DraftKeeper
from mounts.kernel import attributes as attrs
from mounts.kernel.backing import Backings
from mounts.kernel.call_queue import CallQueue
from mounts.kernel.nodes import ROOT_ID, Node, NodeTable
from mounts.kernel.stale_retries import StaleRetries
from mounts.tree import readdir
from mounts.tree.fetches import BlockSource, Fetches
from mounts.tree.known_names import KnownNames
from mounts.tree.xattrs import ExtendedAttributes
from tiers.model.objects import Attributes, Directory, Name, ObjectInfo
from tiers.store.catalog import extent_of
from tiers.store.directory_times import directory_of
from tiers.store.store import Store


class View:
    """One mount's tree; see the module's header."""

    def __init__(
        self,
        store: Store,
        backings: Backings,
        calls: CallQueue,
        socket: Path | None = None,
        others: BlockSource | None = None,
    ) -> None:
        self.store = store
        self.backings = backings
        self.nodes = NodeTable(backings)
        self.calls = calls
        self.drafts = DraftKeeper(store, self.nodes, backings, calls)
        self.retries = StaleRetries(backings)
        self.fetches = Fetches(store, self.nodes, backings, others)
        self.names = KnownNames(store, self.nodes, backings, self.fetches)
        self.xattrs = ExtendedAttributes(store, self.nodes, socket)
        self._started_ns = time.time_ns()
        self.listings = readdir.OpenListings(store, self.nodes, backings, calls)
        self._own_changes = 0
        self._show_directory(self.nodes.root, self.root_directory())

    # --- attributes ---------------------------------------------------------------------------------------

    def attributes(self, node: Node) -> pyfuse3.EntryAttributes:
        """Return a node's attributes as the kernel wants them. Raises NotFound, NotDirectory."""
        if node.parent is None:
            return attrs.of_directory(node, self.root_directory())
        if node.draft is not None:
            return attrs.of_draft(node, node.draft, self.drafts.contents.status(node.draft))
        if node.directory:
            if not node.linked:
                name = Name(node.component, b"")
                return attrs.of_directory(node, Directory(name, node.ino, 0o755, 0, 0, self._started_ns))
            found = self._lookup(self.nodes.name(node))
            if not isinstance(found, Directory):
                raise NotDirectory(f"{found.name} is a file now")
            return attrs.of_directory(node, found)
        if node.info is not None:
            return attrs.of_object(node, node.info)
        if node.dropped is not None:
            return node.dropped
        raise Superseded(f"node {node.nodeid} has no file any more")

    def root_directory(self) -> Directory:
        """Describe the mount's root, which belongs to the service's user."""
        uid, gid = os.geteuid(), os.getegid()
        root = Directory(Name(b"", b""), ROOT_ID, attrs.ROOT_MODE, uid, gid, self._started_ns)
        return self.store.directory_times.of(root)

    def node_of(self, parent: Node, component: bytes, found: ObjectInfo | Directory) -> Node:
        """Find or make the node that shows `found` under this name."""
        node = self.nodes.child(parent, component)
        if isinstance(found, Directory):
            if node is None or not node.directory:
                node = self._replace(node, parent, component, directory=True, ino=found.ino)
                self._show_directory(node, found)
            return node
        if node is None or node.info is None or node.info.key != found.key:
            node = self._replace(node, parent, component, directory=False, ino=found.ino)
        if node.info != found:
            self.drafts.display.show_sealed(node, found)
        self.nodes.set_object(node, found)
        return node

    def _show_directory(self, node: Node, found: Directory) -> None:
        node.heir_gid = found.gid if found.mode & stat.S_ISGID else -1
        self.backings.node_directory(
            node.nodeid,
            node.ino,
            mode=stat.S_IFDIR | found.mode,
            uid=found.uid,
            gid=found.gid,
            mtime_ns=found.mtime_ns,
            ctime_ns=found.ctime_ns,
        )

    def touch(self, directory: Node, when_ns: int | None = None) -> None:
        """Show the new times of a directory in which the kernel's step made or removed a name."""
        if directory.linked:
            self.backings.touch(
                directory.nodeid, self.store.directory_times.touch(self.nodes.name(directory), when_ns)
            )

    def _replace(
        self, old: Node | None, parent: Node, component: bytes, *, directory: bool, ino: int
    ) -> Node:
        if old is not None:
            self.backings.node_dead(old.nodeid)
        node = self.nodes.add(parent, component, directory=directory, ino=ino)
        if old is not None:
            self.nodes.release(old)
        return node

    def find(self, parent: Node, component: bytes) -> Node | None:
        """Find the node of a name, None where there is nothing. Raises NameTooLong."""
        paths.check_component(component)
        known = self.nodes.child(parent, component)
        if known is not None and (known.draft is not None or self._is_current(known)):
            return known
        if known is None and self.backings.is_free(parent.nodeid, component):
            return None
        found = self.find_sealed(parent, component)
        if found is not None:
            return self.node_of(parent, component, found)
        if known is not None:
            self.invalidate_name(known)
        self.backings.clear_unresolved(parent.nodeid, component)
        return None

    def _is_current(self, node: Node) -> bool:
        """Return whether a sealed node's object is still where the node shows it; a link's row alone says so."""
        info = node.info
        if info is None or info.target:
            return False
        entry = self.store.table.get(info.key.digest)
        return entry is not None and extent_of(entry) == info.extent

    def find_sealed(self, parent: Node, component: bytes) -> ObjectInfo | Directory | None:
        """Return the sealed object or directory of a name, drafts aside; None where there is none."""
        if parent.parent is not None:
            name = self.nodes.child_name(parent, component)
            return self.store.find_path(name) or self.fetches.directory(name)
        try:
            return self.store.lookup(Name(component, b""))
        except NotFound:
            return None

    def _lookup(self, name: Name) -> ObjectInfo | Directory:
        """Return what a name shows; a directory that leads to others' blocks needs none below it. Raises NotFound."""
        try:
            return self.store.lookup(name)
        except NotFound:
            shown = self.fetches.directory(name)
            if shown is None:
                raise
            return shown

    def need(self, parent: Node, component: bytes) -> Node:
        """Find the node of a name. Raises NotFound."""
        node = self.find(parent, component)
        if node is None:
            raise NotFound(f"no {component.decode(errors='replace')} there")
        return node

    def directory(self, nodeid: int) -> Node:
        """Return the node of a directory that has a name. Raises Superseded, NotDirectory, NotFound."""
        node = self.nodes.get(nodeid)
        if not node.directory:
            raise NotDirectory(f"node {nodeid} is a file")
        if not node.linked:
            raise NotFound(f"directory {node.component.decode(errors='replace')} was removed")
        return node

    # --- changes of this door -----------------------------------------------------------------------------

    def newest(self, node: Node) -> Node:
        """Find the node that shows a file now, of which `node` may show an earlier version that somebody has open."""
        while node.later is not None:
            node = node.later
        if node.linked or node.info is None:
            return node
        return self.nodes.of_object(node.info.key.digest) or node

    def set_sealed(
        self, node: Node, mode: int | None, uid: int | None, gid: int | None, mtime_ns: int | None
    ) -> None:
        """Set attributes of a sealed file or a directory; None keeps one. Those of a removed file are shown to whoever
        has it open."""
        name = self._name_of(node)
        if name is None:
            return
        if node.directory and name.key:
            self._keep_directory(name)
        with self.own_change():
            found = self.store.set_attributes(name, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
        if isinstance(found, Directory):
            self._show_directory(node, found)
            self.refresh_heirs(node)
            return
        self.nodes.set_object(node, found)
        if node.linked:
            self.drafts.display.show_sealed(node, found)

    def _name_of(self, node: Node) -> Name | None:
        """Find the name of a node's file, which another door may have renamed; None where it has none any more."""
        if node.linked:
            return self.nodes.name(node)
        found = None if node.info is None else self.store.lookup_object(node.info.key)
        return None if found is None else found.name

    def _keep_directory(self, name: Name) -> None:
        """Make a marker for a directory that is only a common prefix."""
        if self.store.names.get(name.bucket, name.key) is None:
            found = self.store.lookup(name)
            self.store.mark_directory(name, Attributes(mode=found.mode, uid=found.uid, gid=found.gid))

    def place(self, parent: Node, component: bytes) -> Name:
        """Return the store's name for a new file. Raises NotPermitted on the root, NameTooLong."""
        paths.check_component(component)
        if parent.parent is None:
            raise NotPermitted("the mount's root holds buckets only: make a directory there, and files in it")
        name = self.nodes.child_name(parent, component)
        paths.check_key(name.key)
        if name.key.startswith(b"kv/") and self.store.bucket(name.bucket).namespace is not None:
            raise NotPermitted(f"{name}: blocks of a bound bucket are sealed by prefix hash, not by name")
        return name

    def remove_sealed(self, name: Name, committed: Callable[[], None] = lambda: None) -> bool:
        """Remove the object that other doors see under this name, and return whether there was one. `committed`: as of
        `Store.remove`."""

        def keep() -> None:
            self.keep_above(name)
            committed()

        with self.own_change():
            try:
                self.store.remove(name, committed=keep)
            except NotFound:
                return False
        return True

    def rename_sealed(self, source: Name, target: Name, committed: Callable[[], None] = lambda: None) -> None:
        """Rename an object or directory, which other doors see. `committed`: as of `Store.rename`."""

        def keep() -> None:
            if directory_of(source) != directory_of(target):
                self.keep_above(source)
            committed()

        with self.own_change():
            self.store.rename(source, target, committed=keep)

    def keep_above(self, name: Name) -> None:
        """Make a marker for the directory of a removed name, if it has none: on a path it outlives its last name."""
        above = Name(name.bucket, paths.parent_prefix(name.key))
        if not above.key or self.store.names.has_prefix(above.bucket, above.key):
            return
        node, bucket = self.nodes.resolve(above), self.store.bucket(name.bucket)
        if node is not None and not (bucket.namespace is not None and above.key.startswith(b"kv/")):
            self.store.mark_directory(
                above, Attributes(mode=bucket.mode, uid=bucket.uid, gid=bucket.gid, ino=node.ino)
            )

    def gone(self, node: Node) -> None:
        """Unlink a node from its name; abort its draft if nobody has that open."""
        self.nodes.unlink(
            node, unresolved=node.directory
        )  # a file may have stood behind a directory of its name
        opened = node.draft
        if opened is None:
            self.backings.node_dead(node.nodeid)
        elif opened.is_unused:
            self.drafts.publisher.abort(node)
        self.nodes.release(node)

    # --- what other doors do ------------------------------------------------------------------------------

    def drain_opens(self) -> None:
        """Report to the store the opens that were answered natively: hits, and who reads which slot."""
        for nodeid, uid, _ in self.backings.drain_opens():
            node = self.nodes.find(nodeid)
            if node is not None and node.info is not None and self._is_current(node):
                if node.info.extent is not None:
                    self.store.note_reader(node.info.extent.slot, uid)
                self.store.touch(node.info.key)
        self.store.note_misses(self.backings.drain_misses())

    @contextmanager
    def own_change(self) -> Iterator[None]:
        """Mark changes as the kernel's own while the context lasts: nothing is invalidated for them, and whoever makes
        them sets and shows the times of directories (`touch`)."""
        self._own_changes += 1
        try:
            with self.store.directory_times.still():
                yield
        finally:
            self._own_changes -= 1

    @property
    def is_own_change(self) -> bool:
        """Return whether the mount itself is changing names, and so shows the change itself."""
        return self._own_changes > 0

    def refresh_heirs(self, bucket: Node) -> None:
        """Refresh the nodes that have their bucket's rights: blocks, and directories without a marker."""
        if bucket.parent is not self.nodes.root:
            return
        for node in self.nodes.below(bucket):
            if node.linked and (node.directory or (node.info is not None and node.info.name is None)):
                with suppress(NotFound):
                    self.refresh(node)

    def refresh(self, node: Node) -> None:
        """Show a node as the store has it by now, to the kernel too. Raises NotFound."""
        found = self._lookup(self.nodes.name(node))
        if isinstance(found, Directory):
            self._show_directory(node, found)
        else:
            self.nodes.set_object(node, found)
            self.drafts.display.show_sealed(node, found)
        self.backings.invalidate_attr(node.nodeid)

    def invalidate_name(self, node: Node) -> None:
        """Invalidate a name, and with a directory's all below it. Drafts keep theirs."""
        if node.parent is None or node.draft is not None:
            return
        parent = node.parent.nodeid  # which may be dropped with its last name
        for gone in (*self.nodes.below(node), node):
            if gone.draft is None and gone.linked:
                self.backings.node_dead(gone.nodeid)
                self.nodes.unlink(gone, unresolved=gone is node)
                self.nodes.release(gone)
        self.fetches.invalidate_entry(parent, node.component)
