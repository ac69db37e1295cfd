"""Files shown to the native loop, so that it answers for them: files being written and sealed ones, as they change.

Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mounts.drafts.large import status_of
from mounts.kernel.attributes import ctime_now, file_type
from mounts.kernel.backing import Backings
from mounts.kernel.nodes import Node, NodeTable
from mounts.kernel.open_draft import OpenDraft
from tiers.model.objects import ObjectInfo
from tiers.nvme.large_draft import LargeDraft
from tiers.store.store import Store


@dataclass(eq=False)
class NodeDisplay:
    """Shows nodes to the backings of one mount."""

    _store: Store
    _nodes: NodeTable
    _backings: Backings

    def is_durable(self, node: Node) -> bool:
        """Return whether a file's bucket has closed files on the device."""
        return node.linked and self._store.bucket(self._nodes.name(node).bucket).durable

    def show_draft(self, node: Node, opened: OpenDraft) -> None:
        """Show a file being written to the native loop."""
        if isinstance(opened.draft, LargeDraft):
            self._show_large(node, opened, opened.draft)
            self._show_locks(node)
            return
        extent = opened.draft.extent
        self._backings.node_draft(
            node.nodeid,
            node.ino,
            extent.slot,
            extent.generation,
            mode=stat.S_IFREG | opened.mode,
            uid=opened.uid,
            gid=opened.gid,
            ctime_ns=opened.ctime_ns,
        )
        self._show_locks(node)
        if node.linked:
            name = self._nodes.name(node)
            settles = self.is_durable(node) or opened.is_settled or opened.coming is not None
            settles = settles or self._store.names.get(name.bucket, name.key) is not None
            self._backings.node_settles(node.nodeid, settles)

    def _show_large(self, node: Node, opened: OpenDraft, draft: LargeDraft) -> None:
        """Show the attributes of a large draft, whose reads and writes come to Python."""
        self._backings.node_offloaded(
            node.nodeid,
            node.ino,
            size_bytes=draft.size_bytes,
            mode=stat.S_IFREG | opened.mode,
            uid=opened.uid,
            gid=opened.gid,
            mtime_ns=draft.times.mtime_ns,
            ctime_ns=ctime_now(opened, status_of(draft)),
        )

    def show_sealed(self, node: Node, info: ObjectInfo) -> None:
        """Show a sealed file or symbolic link to the native loop."""
        if info.extent is None or node.cached_handles:
            self.show_offloaded(node, info)
        else:
            extent = info.extent
            self._show(
                partial(self._backings.node_sealed, slot=extent.slot, generation=extent.generation),
                node,
                info,
            )

    def show_offloaded(self, node: Node, info: ObjectInfo) -> None:
        """Show the attributes of a sealed file, whose opens come to Python."""
        self._show(self._backings.node_offloaded, node, info)

    def _show(self, show: Callable[..., None], node: Node, info: ObjectInfo) -> None:
        show(
            node.nodeid,
            node.ino,
            size_bytes=info.size_bytes,
            mode=file_type(info) | info.mode,
            uid=info.uid,
            gid=info.gid,
            mtime_ns=info.mtime_ns,
            ctime_ns=info.ctime_ns,
        )
        self._show_locks(node)

    def _show_locks(self, node: Node) -> None:
        if node.lock_key:
            self._backings.node_locks(node.nodeid, node.lock_key)
