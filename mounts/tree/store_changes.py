"""Changes of the store by other doors, carried over to the mount's tree and the kernel's caches.

Responsibility: for each change of the store, what is invalidated in the kernel, which nodes and drafts are replaced,
and which directories end with their last name.

Invariants: a name that another door made is marked unresolved, or its node replaced, before that door answers. A
directory stays as it is when a file changes that it hides (keys `a` and `a/b`: the path shows the directory `a`).

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvfs import paths
from mounts.kernel.nodes import Node
from mounts.tree.view import View
from tiers.model.objects import Change, ChangeKind, Directory, Name
from tiers.model.tier import StoreKey
from tiers.store.directory_times import directory_of


class StoreChanges:
    """Follows the changes of a view's store."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._store, self._nodes = view.store, view.nodes
        self._backings, self._drafts = view.backings, view.drafts
        self._emptied: list[Name] = []

    def on_change(self, change: Change) -> None:
        """Invalidate the kernel's caches of a name or object that changed, by this door or another."""
        if change.kind is ChangeKind.MOVED and change.key is not None:
            self._show_moved(change.key)
            return
        if self._view.is_own_change and not change.evicted:
            return  # whoever makes it shows the new times (`View.touch`)
        if change.kind is not ChangeKind.ATTRIBUTES:
            self._show_touched(change)
        replaces = change.kind in (ChangeKind.SEALED, ChangeKind.RENAMED)
        others = replaces and not self._drafts.publisher.is_publishing
        if others:
            self._view.calls.catch_up()
        if change.key is not None and change.kind is ChangeKind.REMOVED:
            node = self._nodes.of_object(change.key.digest)
        elif change.name is not None:
            node = self._shown(change.name)
        else:
            node = None
        if change.kind is ChangeKind.ATTRIBUTES:
            if node is not None and node.draft is None and node.parent is not None:
                self._view.refresh(node)
                self._view.refresh_heirs(node)
                if node.parent is self._nodes.root:
                    self._view.names.bound(node)
            return
        if node is not None and (
            change.kind is not ChangeKind.SEALED or node.info is None or node.info.key != change.key
        ):
            self._view.invalidate_name(node)
        if change.kind is ChangeKind.SEALED:
            if others and node is not None and change.key is not None:
                self._drafts.publisher.overtake(node)
            self._note_made(change.name, node)
        elif change.kind is ChangeKind.RENAMED:
            target = self._shown(change.new_name) if change.new_name is not None else None
            if target is not None:
                self._view.invalidate_name(target)
                self._drafts.publisher.overtake(target)
            self._note_made(change.new_name, target)
        if change.kind is not ChangeKind.SEALED and change.name is not None:
            self._note_removed(change.name, node)

    def _shown(self, name: Name) -> Node | None:
        """Find the node that shows what has this name; None where a directory hides a file of the name."""
        node = self._nodes.resolve(name)
        is_file = name.key[-1:] not in (b"", b"/")
        is_hidden = is_file and node is not None and node.directory and self._is_directory(node)
        return None if is_hidden else node

    def _is_directory(self, node: Node) -> bool:
        """Return whether the path still shows a directory there: in the store, or above files being written."""
        assert node.parent is not None
        found = self._view.find_sealed(node.parent, node.component)
        return isinstance(found, Directory) or self._nodes.has_drafts_below(node)

    def _note_made(self, name: Name | None, node: Node | None) -> None:
        """Note a name that another door made; a directory of that name takes the place of a file."""
        if node is None and name is not None:
            self._view.names.mark_unresolved(name)
        for above in self._nodes_above(name):
            if not above.directory:
                self._view.invalidate_name(above)

    def _note_removed(self, name: Name, node: Node | None) -> None:
        if node is None:
            self._view.names.clear_unresolved(name)
        if self._view.calls.is_behind():
            self._emptied.append(name)
        else:
            self._check_above(name)

    def check_emptied(self) -> None:
        """Check the directories in which a name was removed while the tree was behind."""
        emptied, self._emptied = self._emptied, []
        for name in emptied:
            self._check_above(name)

    def _show_moved(self, key: StoreKey) -> None:
        """Show where an object is now; its bytes are the same, so that the kernel's caches stay."""
        node = self._nodes.of_object(key.digest)
        found = self._store.lookup_object(key) if node is not None and node.draft is None else None
        if node is not None and found is not None:
            self._nodes.set_object(node, found)
            self._drafts.display.show_sealed(node, found)

    def _check_above(self, gone: Name) -> None:
        """Invalidate the directories that were only common prefixes and whose last name was removed."""
        for above in self._nodes_above(gone):
            if self._is_directory(above):
                return
            self._view.invalidate_name(above)

    def _nodes_above(self, name: Name | None) -> Iterator[Node]:
        """Yield the known nodes between a name and its bucket, the lowest first."""
        prefix = paths.parent_prefix(name.key) if name is not None else b""
        while name is not None and prefix:
            node = self._nodes.resolve(Name(name.bucket, prefix))
            if node is not None:
                yield node
            prefix = paths.parent_prefix(prefix)

    def _show_touched(self, change: Change) -> None:
        """Show the new times of the directories that a change is in, and invalidate those that the kernel has."""
        for name in {directory_of(name) for name in (change.name, change.new_name) if name is not None}:
            node = self._nodes.resolve(name) if name.bucket else self._nodes.root
            if node is None or not node.directory:
                continue
            times = (
                self._view.root_directory()
                if node.parent is None
                else self._store.directory_times.of(Directory(name, node.ino, 0, 0, 0, 0))
            )
            if (
                times.mtime_ns
                and self._backings.touch(node.nodeid, times.mtime_ns)
                and not self._view.is_own_change
            ):
                self._backings.invalidate_attr(node.nodeid)
