"""The tree as the kernel sees it: nodes over the store's names, kept true when other doors change them.

Responsibility: find the node of a name, its attributes, and what must be invalidated when an object or
name changes under the kernel's caches. The handlers (mounts.operations) and open files (mounts.files) stand
on it.

Invariants: a linked node shows what its name leads to in the store, or a draft; a node whose object is gone
is dead natively (OPEN answers ESTALE) before its name is forgotten.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyfuse3

from kvfs import limits, paths
from kvfs.errors import NotDirectory, NotFound, NotPermitted
from mounts import attributes as attrs
from mounts import listings
from mounts.backing import Backings
from mounts.drafts import DraftKeeper
from mounts.nodes import Node, NodeTable
from mounts.promises import Promises
from mounts.xattrs import ExtendedAttributes
from tiers.base import StoreKey
from tiers.catalog import extent_of
from tiers.directory_times import directory_of
from tiers.model import Attributes, Change, ChangeKind, Directory, Name, ObjectInfo
from tiers.store import TieredStore


class View:
    """One mount's tree; see the module's header."""

    def __init__(self, store: TieredStore, backings: Backings, socket: Path | None) -> None:
        self.store = store
        self.backings = backings
        self.nodes = NodeTable(backings)
        self.drafts = DraftKeeper(store, self.nodes, backings)
        self.promises = Promises(backings)
        self.xattrs = ExtendedAttributes(store, self.nodes, socket)
        self._started_ns = time.time_ns()
        self.catch_up: Callable[[], None] = lambda: None
        """Handles what the native loop has queued; nothing in the plain mode."""
        self.is_behind: Callable[[], bool] = lambda: False
        """Whether something is queued: then there may be files that are not in the tree yet."""
        self.listings = listings.OpenListings(store, self.nodes, backings, lambda: self.catch_up())
        self._emptied: list[Name] = []
        self.drafts.catch_up = lambda: self.catch_up()
        self._own_changes = 0
        root = self.nodes.root
        backings.node_directory(
            root.nodeid,
            root.ino,
            mode=stat.S_IFDIR | attrs.ROOT_MODE,
            uid=os.geteuid(),
            gid=os.getegid(),
            mtime_ns=self._started_ns,
        )

    # --- attributes ---------------------------------------------------------------------------------------

    def attributes(self, node: Node) -> pyfuse3.EntryAttributes:
        if node.parent is None:
            return attrs.of_root(node, self._root().mtime_ns)
        if node.draft is not None:
            return attrs.of_draft(node, node.draft, self.drafts.status(node.draft))
        if node.directory:
            if not node.linked:
                name = Name(node.component, b"")
                return attrs.of_directory(node, Directory(name, node.ino, 0o755, 0, 0, self._started_ns))
            found = self.store.lookup(self.nodes.name(node))
            if not isinstance(found, Directory):
                raise NotDirectory(f"{found.name} is a file now")
            return attrs.of_directory(node, found)
        if node.info is None:
            return attrs.of_nothing(node)
        return attrs.of_object(node, node.info)

    def _root(self) -> Directory:
        started_ns = self._started_ns
        return self.store.directory_times.of(Directory(Name(b"", b""), 1, attrs.ROOT_MODE, 0, 0, started_ns))

    def node_of(self, parent: Node, component: bytes, found: ObjectInfo | Directory) -> Node:
        """The node that shows `found` under this name: the one known, or a new one."""
        node = self.nodes.child(parent, component)
        if isinstance(found, Directory):
            if node is None or not node.directory:
                node = self._replace(node, parent, component, directory=True, ino=found.ino)
                self._show_directory(node, found)
            return node
        if node is None or node.info is None or node.info.key != found.key:
            node = self._replace(node, parent, component, directory=False, ino=found.ino)
            self.drafts.show_sealed(node, found)
        elif node.info != found:
            self.drafts.show_sealed(node, found)
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
        """A name came to a directory or left it, by a step of the kernel's, which then asks for the new times."""
        if directory.linked:
            self.backings.touch(
                directory.nodeid, self.store.directory_times.touch(self.nodes.name(directory), when_ns)
            )

    def _show_touched(self, change: Change) -> None:
        """The directories of a change by any door have their times; the kernel drops those that it has."""
        for name in {directory_of(name) for name in (change.name, change.new_name) if name is not None}:
            node = self.nodes.resolve(name) if name.bucket else self.nodes.root
            if node is None or not node.directory:
                continue
            times = (
                self._root()
                if node.parent is None
                else self.store.directory_times.of(Directory(name, node.ino, 0, 0, 0, 0))
            )
            if times.mtime_ns and self.backings.touch(node.nodeid, times.mtime_ns) and not self._own_changes:
                self.backings.invalidate_attr(node.nodeid)

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
        """The node of a name, None where there is nothing. Raises NameTooLong."""
        paths.check_component(component)
        known = self.nodes.child(parent, component)
        if known is not None and (known.draft is not None or self._is_current(known)):
            return known
        found = self._find_sealed(parent, component)
        if found is not None:
            return self.node_of(parent, component, found)
        if known is not None:
            self.forget_name(known)
        self.backings.undoubt(parent.nodeid, component)
        return None

    def _is_current(self, node: Node) -> bool:
        """Whether a sealed node still shows what the store has: its object is where it was."""
        info = node.info
        if info is None:
            return False
        entry = self.store.table.get(info.key.digest)
        return entry is not None and extent_of(entry) == info.extent

    def _find_sealed(self, parent: Node, component: bytes) -> ObjectInfo | Directory | None:
        if parent.parent is not None:
            return self.store.find_path(self.nodes.child_name(parent, component))
        try:
            return self.store.lookup(Name(component, b""))
        except NotFound:
            return None

    def need(self, parent: Node, component: bytes) -> Node:
        """The node of a name. Raises NotFound."""
        node = self.find(parent, component)
        if node is None:
            raise NotFound(f"no {component.decode(errors='replace')} there")
        return node

    def directory(self, nodeid: int) -> Node:
        node = self.nodes.get(nodeid)
        if not node.directory:
            raise NotDirectory(f"node {nodeid} is a file")
        if not node.linked:
            raise NotFound(f"directory {node.component.decode(errors='replace')} was removed")
        return node

    # --- which names there are ----------------------------------------------------------------------------

    def learn_names(self, directory: Node) -> None:
        """Have the native loop know all names of a directory, so that it can tell which are free."""
        if directory.names_known or directory.parent is None or not directory.linked:
            return
        directory.names_known = True
        found, end = listings.names(self.store, self.nodes, directory, b"", limits.MAX_LEARNED_NAMES)
        if end is None:
            self.know_names(directory, [tail.removesuffix(b"/") for tail, _ in found])

    def know_names(self, directory: Node, components: Iterable[bytes]) -> None:
        """Nothing is in this directory but `components` and what is linked."""
        name = self.nodes.name(directory)
        bucket = self.store.bucket(name.bucket)
        if name.key.startswith(b"kv/") and bucket.namespace is not None:
            return  # blocks, whose names are made by their seal
        if bucket.durable:
            return  # a draft there is shown before it is opened: its close() waits for the device
        if bucket.large:
            return  # a draft there has no slot that could be made ahead
        directory.names_known = True
        room = min(limits.MAX_COMPONENT_BYTES, limits.MAX_KEY_BYTES - len(name.key))
        self.backings.know_names(directory.nodeid, max(room, 0), b"/".join(components))

    def unknow_names(self, directory: Node) -> None:
        """The directory has another name: what fits below it is another length, and may be blocks."""
        for node in (directory, *self.nodes.below(directory)):
            if node.names_known and node.linked:
                node.names_known = False
                self.backings.know_names(node.nodeid, 0, b"")

    def _doubt(self, name: Name) -> None:
        """Something has this name now that the kernel does not know."""
        above = self.nodes.root
        for component in (name.bucket, *name.key.removesuffix(b"/").split(b"/")):
            node = self.nodes.child(above, component)
            if node is None:
                self.backings.doubt(above.nodeid, component, 0)
                return
            above = node

    def _end_doubt(self, name: Name) -> None:
        """What had this name is gone, and the kernel did not know it."""
        above = self.nodes.resolve(Name(name.bucket, paths.parent_prefix(name.key)))
        key = name.key.removesuffix(b"/")
        if above is None or not above.names_known or self.nodes.resolve(name) is not None:
            return
        if not self.store.names.get(name.bucket, key) and not self.store.names.has_prefix(
            name.bucket, key + b"/"
        ):
            self.backings.undoubt(above.nodeid, key.rpartition(b"/")[2])

    # --- changes of this door -----------------------------------------------------------------------------

    def set_sealed(
        self, node: Node, mode: int | None, uid: int | None, gid: int | None, mtime_ns: int | None
    ) -> pyfuse3.EntryAttributes:
        changes = (mode, uid, gid, mtime_ns)
        if node.linked and any(value is not None for value in changes):
            name = self.nodes.name(node)
            if node.directory and name.key:
                self._keep_directory(name)
            with self.own_change():
                found = self.store.set_attributes(name, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
            if isinstance(found, ObjectInfo):
                self.nodes.set_object(node, found)
                self.drafts.show_sealed(node, found)
            else:
                self._show_directory(node, found)
                self._refresh_heirs(node)
        return self.attributes(node)

    def _keep_directory(self, name: Name) -> None:
        """Give a directory that is only a common prefix a marker of its own."""
        if self.store.names.get(name.bucket, name.key) is None:
            found = self.store.lookup(name)
            self.store.mark_directory(name, Attributes(mode=found.mode, uid=found.uid, gid=found.gid))

    def place(self, parent: Node, component: bytes) -> Name:
        """Where a new file of this name would be. Raises NotPermitted on the root, NameTooLong."""
        paths.check_component(component)
        if parent.parent is None:
            raise NotPermitted("the mount's root holds buckets only: make a directory there, and files in it")
        name = self.nodes.child_name(parent, component)
        paths.check_key(name.key)
        if name.key.startswith(b"kv/") and self.store.bucket(name.bucket).namespace is not None:
            raise NotPermitted(f"{name}: blocks of a bound bucket are sealed by prefix hash, not by name")
        return name

    def remove_sealed(self, name: Name) -> None:
        """Remove what other doors see under this name, if anything."""
        with self.own_change():
            try:
                self.store.remove(name)
            except NotFound:
                return
        self.keep_above(name)

    def keep_above(self, name: Name) -> None:
        """On a path a directory outlives its last name: what was a common prefix only is marked now."""
        above = Name(name.bucket, paths.parent_prefix(name.key))
        if not above.key or self.store.names.has_prefix(above.bucket, above.key):
            return
        node, bucket = self.nodes.resolve(above), self.store.bucket(name.bucket)
        if node is not None and not (bucket.namespace is not None and above.key.startswith(b"kv/")):
            self.store.mark_directory(
                above, Attributes(mode=bucket.mode, uid=bucket.uid, gid=bucket.gid, ino=node.ino)
            )

    def gone(self, node: Node) -> None:
        """The node's name no longer leads to it; a draft that nobody has open goes with it."""
        self.nodes.unlink(node, doubt=node.directory)  # a file may have stood behind a directory of its name
        opened = node.draft
        if opened is None:
            self.backings.node_dead(node.nodeid)
        elif opened.handles == 0 and not opened.awaited:
            self.drafts.discard(node)
        self.nodes.release(node)

    # --- what other doors do ------------------------------------------------------------------------------

    def drain_opens(self) -> None:
        """Tell the store of opens that were answered natively: hits, and who reads which slot."""
        for nodeid, uid, _ in self.backings.drain_opens():
            node = self.nodes.find(nodeid)
            if node is not None and node.info is not None and self._is_current(node):
                if node.info.extent is not None:
                    self.store.note_reader(node.info.extent.slot, uid)
                self.store.touch(node.info.key)
        self.store.note_misses(self.backings.drain_misses())

    @contextmanager
    def own_change(self) -> Iterator[None]:
        """The kernel knows what it has asked for itself: no invalidation for that."""
        self._own_changes += 1
        try:
            yield
        finally:
            self._own_changes -= 1

    def on_change(self, change: Change) -> None:
        """A name or object changed, by this door or another: what the kernel caches of it goes."""
        if change.kind is ChangeKind.MOVED and change.key is not None:
            self._show_moved(change.key)
            return
        if change.kind is not ChangeKind.ATTRIBUTES:
            self._show_touched(change)
        if self._own_changes and not change.evicted:
            return
        replaces = change.kind in (ChangeKind.SEALED, ChangeKind.RENAMED)
        others = replaces and not self.drafts.is_publishing
        if others:
            self.catch_up()
        if change.key is not None and change.kind is ChangeKind.REMOVED:
            node = self.nodes.of_object(change.key.digest)
        elif change.name is not None:
            node = self.nodes.resolve(change.name)
        else:
            node = None
        if change.kind is ChangeKind.ATTRIBUTES:
            if node is not None and node.draft is None and node.parent is not None:
                self._refresh(node)
                self._refresh_heirs(node)
            return
        if node is not None and (
            change.kind is not ChangeKind.SEALED or node.info is None or node.info.key != change.key
        ):
            self.forget_name(node)
        if change.kind is ChangeKind.SEALED:
            if others and node is not None and change.key is not None:
                self.drafts.overtake(node)
            self._come(change.name, node)
        elif change.kind is ChangeKind.RENAMED:
            target = self.nodes.resolve(change.new_name) if change.new_name is not None else None
            if target is not None:
                self.forget_name(target)
                self.drafts.overtake(target)
            self._come(change.new_name, target)
        if change.kind is not ChangeKind.SEALED and change.name is not None:
            self._gone(change.name, node)

    def _come(self, name: Name | None, node: Node | None) -> None:
        """A name that another door made; a file gives way to a directory of its name."""
        if node is None and name is not None:
            self._doubt(name)
        for above in self._nodes_above(name):
            if not above.directory:
                self.forget_name(above)

    def _gone(self, name: Name, node: Node | None) -> None:
        if node is None:
            self._end_doubt(name)
        if self.is_behind():
            self._emptied.append(name)
        else:
            self._check_above(name)

    def check_emptied(self) -> None:
        """Look at the directories that lost a name while the tree was behind."""
        emptied, self._emptied = self._emptied, []
        for name in emptied:
            self._check_above(name)

    def _show_moved(self, key: StoreKey) -> None:
        """An object came to DRAM or left it: the same bytes, so the kernel's caches stay."""
        node = self.nodes.of_object(key.digest)
        found = self.store.lookup_object(key) if node is not None and node.draft is None else None
        if node is not None and found is not None:
            self.nodes.set_object(node, found)
            self.drafts.show_sealed(node, found)

    def _check_above(self, gone: Name) -> None:
        """A common prefix ends with its last name."""
        for above in self._nodes_above(gone):
            assert above.parent is not None
            if isinstance(self._find_sealed(above.parent, above.component), Directory):
                return
            if not self.nodes.has_drafts_below(above):
                self.forget_name(above)

    def _nodes_above(self, name: Name | None) -> Iterator[Node]:
        """The known nodes between a name and its bucket, the lowest first."""
        prefix = paths.parent_prefix(name.key) if name is not None else b""
        while name is not None and prefix:
            node = self.nodes.resolve(Name(name.bucket, prefix))
            if node is not None:
                yield node
            prefix = paths.parent_prefix(prefix)

    def _refresh_heirs(self, bucket: Node) -> None:
        """What has its bucket's rights: blocks, and directories without a marker."""
        if bucket.parent is not self.nodes.root:
            return
        for node in self.nodes.below(bucket):
            if node.linked and (node.directory or (node.info is not None and node.info.name is None)):
                with suppress(NotFound):
                    self._refresh(node)

    def _refresh(self, node: Node) -> None:
        found = self.store.lookup(self.nodes.name(node))
        if isinstance(found, Directory):
            self._show_directory(node, found)
        else:
            self.nodes.set_object(node, found)
            self.drafts.show_sealed(node, found)
        self.backings.invalidate_attr(node.nodeid)

    def forget_name(self, node: Node) -> None:
        """A name, and with a directory's all below it, does not lead to its node any more. Drafts keep theirs."""
        if node.parent is None or node.draft is not None:
            return
        self.backings.invalidate_entry(node.parent.nodeid, node.component)
        for gone in (*self.nodes.below(node), node):
            if gone.draft is None and gone.linked:
                self.backings.node_dead(gone.nodeid)
                self.nodes.unlink(gone, doubt=gone is node)
                self.nodes.release(gone)
