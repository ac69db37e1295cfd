"""Directories of which the native loop knows all names, so that it knows which names are free.

Invariants: a name that may have come to a known directory without the loop is marked unresolved before its maker is
answered.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvfs import limits, paths
from mounts.kernel.backing import Backings
from mounts.kernel.nodes import Node, NodeTable
from mounts.tree import readdir
from mounts.tree.fetches import Fetches
from tiers.model.objects import Name
from tiers.store.store import Store


@dataclass(eq=False)
class KnownNames:
    """The names that one loop knows."""

    _store: Store
    _nodes: NodeTable
    _backings: Backings
    _fetches: Fetches

    def learn(self, directory: Node) -> None:
        """Give all names of a directory to the native loop, so that it knows which are free."""
        if directory.names_known or directory.parent is None or not directory.linked:
            return
        directory.names_known = True
        found, end = readdir.names(self._store, self._nodes, directory, b"", limits.MAX_LEARNED_NAMES)
        if end is None:
            self.know(directory, [tail.removesuffix(b"/") for tail, *_ in found])

    def know(self, directory: Node, components: Iterable[bytes]) -> None:
        """Give `components` to the loop as all names of a directory besides those that are linked."""
        name = self._nodes.name(directory)
        bucket = self._store.bucket(name.bucket)
        if name.key.startswith(b"kv/") and bucket.namespace is not None:
            return  # blocks, whose names are made by their seal
        if not name.key and self._fetches.covers(bucket):
            return  # `kv`, which others' blocks are below
        if bucket.durable:
            return  # a draft there is shown before it is opened: its close() waits for the device
        if bucket.large:
            return  # a draft there has no slot that could be made ahead
        directory.names_known = True
        room = min(limits.MAX_COMPONENT_BYTES, limits.MAX_KEY_BYTES - len(name.key))
        self._backings.know_names(directory.nodeid, max(room, 0), b"/".join(components))

    def unlearn(self, directory: Node) -> None:
        """Invalidate the loop's names below a directory whose name has changed.

        Keys below it may be of another length now, and may be blocks.
        """
        for node in (directory, *self._nodes.below(directory)):
            if node.names_known and node.linked:
                node.names_known = False
                self._backings.know_names(node.nodeid, 0, b"")

    def bound(self, bucket: Node) -> None:
        """Note that a bucket may be bound to a namespace by now, so that `kv` leads to blocks of others."""
        if bucket.names_known and self._fetches.covers(self._store.bucket(bucket.component)):
            self.unlearn(bucket)

    def mark_unresolved(self, name: Name) -> None:
        """Mark a name that something has now of which the kernel does not know."""
        above = self._nodes.root
        for component in (name.bucket, *name.key.removesuffix(b"/").split(b"/")):
            node = self._nodes.child(above, component)
            if node is None:
                self._backings.mark_unresolved(above.nodeid, component, 0)
                return
            above = node

    def clear_unresolved(self, name: Name) -> None:
        """Clear the mark of a name that nothing has any more."""
        above = self._nodes.resolve(Name(name.bucket, paths.parent_prefix(name.key)))
        key = name.key.removesuffix(b"/")
        if above is None or not above.names_known or self._nodes.resolve(name) is not None:
            return
        if not self._store.names.get(name.bucket, key) and not self._store.names.has_prefix(
            name.bucket, key + b"/"
        ):
            self._backings.clear_unresolved(above.nodeid, key.rpartition(b"/")[2])
