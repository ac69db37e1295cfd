"""Files being written: from CREATE (or an open for writing) to the close that has them published.

Responsibility: the life of a draft on the mount. A file being written is a normal file under its own name
for whoever opens it there; the last writer's RELEASE has it published (`mounts.drafts.publisher`); a writer that dies
by a signal publishes nothing.

Invariants:
- A sealed object is never written: opening it for writing makes a draft with its bytes. That is the same node where
  nobody has the object open, and else a new one, which the kernel finds when it looks the name up again.
- Once a close or rename of a draft was answered, or a truncation by path, the object that had its name before is never
  shown again: its row is retired (`mounts.drafts.persistence`) before the answer, and removed where the draft is
  dropped.

Concurrency: the service's trio thread. Awaits: copying a large object into a draft (`rewrite`), and the copy of a draft
that fsync or close makes before the draft's size is set.
"""

from __future__ import annotations

import os
import time

import trio

from kvfs.errors import KvfsError
from mounts.drafts.contents import DraftContents
from mounts.drafts.display import NodeDisplay
from mounts.drafts.large import begin_copy
from mounts.drafts.persistence import DraftPersistence
from mounts.drafts.publisher import DraftPublisher
from mounts.kernel.backing import Backings
from mounts.kernel.call_queue import CallQueue
from mounts.kernel.nodes import Node, NodeTable
from mounts.kernel.open_draft import OpenDraft
from tiers.model.objects import Draft, ObjectInfo
from tiers.model.tier import Extent
from tiers.nvme.large_draft import LargeDraft
from tiers.store.store import Store


class DraftKeeper:
    """All drafts of one mount."""

    def __init__(self, store: Store, nodes: NodeTable, backings: Backings, calls: CallQueue) -> None:
        self._store = store
        self._nodes = nodes
        self._backings = backings
        self.contents = DraftContents(store)
        self.display = NodeDisplay(store, nodes, backings)
        parts = (store, nodes, backings, calls, self.contents, self.display)
        self.persistence = DraftPersistence(*parts)
        self.publisher = DraftPublisher(*parts)
        self.writers_changed = trio.Event()
        self.writers = 0

    # --- beginning ----------------------------------------------------------------------------------------

    def create(self, parent: Node, component: bytes, *, mode: int, uid: int, gid: int) -> Node:
        """Make an empty file, linked under its name in place of what was there. Raises NoSpace, QuotaExceeded."""
        draft = self.contents.reserve(self._nodes.name(parent).bucket, uid)
        try:
            ino = self._store.names.next_ids(1)
            node = self._nodes.add(parent, component, directory=False, ino=ino)
        except KvfsError:
            self.contents.abort(draft)
            raise
        opened = OpenDraft(draft, mode=mode & 0o7777, uid=uid, gid=gid, ctime_ns=time.time_ns())
        self._nodes.set_draft(node, opened)
        self.display.show_draft(node, opened)
        return node

    def adopt(
        self,
        nodeid: int,
        parent: Node,
        component: bytes,
        extent: Extent,
        *,
        mode: int,
        uid: int,
        gid: int,
        ino: int,
    ) -> Node:
        """Take over a file that the native loop has created and opened for writing, from a spare draft.

        It was changed when its slot was, which the loop has shown.
        """
        node = self._nodes.adopt(nodeid, parent, component, ino=ino)
        draft = self._store.grant(extent, uid=uid)
        opened = OpenDraft(draft, mode=mode & 0o7777, uid=uid, gid=gid, ctime_ns=0)
        self._nodes.set_draft(node, opened)
        self._count_handle(node, opened, writable=True)
        return node

    async def rewrite(
        self, node: Node, info: ObjectInfo, *, uid: int, keep_bytes: bool, thread: int
    ) -> Node | None:
        """Make a draft with the object's bytes, which awaits `thread`, and return its node.

        Returns None where the object was replaced meanwhile.
        """
        bucket = self._nodes.name(node).bucket
        draft: Draft | LargeDraft
        if not keep_bytes:
            draft = self.contents.reserve(bucket, uid)
        elif self._store.bucket(bucket).large:
            draft = await begin_copy(self._store, bucket, info, uid=uid)
            draft.times.atime_ns = draft.times.mtime_ns = info.mtime_ns
        else:
            if info.extent is None:
                await self._store.load(info, uid=uid)
                if node.info is None or node.info.key != info.key:
                    return None
                info = node.info
            draft = await self.contents.reserve_copy(info, uid)
        if not node.linked or node.info is None or node.info.key != info.key:
            self.contents.abort(draft)
            return None
        opened = OpenDraft(
            draft, mode=info.mode, uid=info.uid, gid=info.gid, ctime_ns=time.time_ns(), pinned=info.pinned
        )
        opened.awaited.add(thread)
        opened.untouched = True
        target = self._place_of_draft(node, info)
        self._nodes.set_draft(target, opened)
        self.display.show_draft(target, opened)
        return target

    def _place_of_draft(self, node: Node, info: ObjectInfo) -> Node:
        """Return the node for a draft that replaces a sealed object: the object's own, unless somebody has that open.

        Bytes that are open stay with their node, and the name leads to a new node from now on.
        """
        assert node.parent is not None
        self.display.show_offloaded(node, info)  # from here on opens come to Python
        if node.handles == 0 and self._backings.opens(node.nodeid) == 0:
            self._nodes.set_object(node, None)
            self._backings.invalidate_attr(node.nodeid)
            return node
        ino = self._store.names.next_ids(1)
        target = self._nodes.add(node.parent, node.component, directory=False, ino=ino)
        self._nodes.share_locks(node, target)
        self._backings.node_dead(node.nodeid)
        return target

    def end_wait(self, node: Node, opened: OpenDraft, thread: int) -> None:
        """End a thread's wait for a draft, whether the thread has opened it or not."""
        opened.awaited.discard(thread)
        if opened.awaited or opened.handles > 0 or node.draft is not opened:
            return
        if opened.untouched:
            self.publisher.abort(node)
        else:
            self.publisher.end_writing(node, opened)

    # --- handles ------------------------------------------------------------------------------------------

    def open(self, node: Node, opened: OpenDraft, *, writable: bool) -> None:
        """Count a handle of a draft, and make the slot, if there is one, its backing."""
        if not isinstance(opened.draft, LargeDraft):
            descriptor = self._store.open_draft(opened.draft)
            try:
                self._backings.acquire(node.nodeid, descriptor)
            finally:
                os.close(descriptor)
        self._count_handle(node, opened, writable=writable)

    def _count_handle(self, node: Node, opened: OpenDraft, *, writable: bool) -> None:
        opened.handles += 1
        node.handles += 1
        if writable:
            opened.closed = opened.untouched = False
            opened.writers += 1
            if opened.large is None:
                self.writers += 1
                self.writers_changed.set()

    def close(self, node: Node, opened: OpenDraft, *, writable: bool) -> None:
        """Count the end of a handle; with the last writer's end the draft is published or dropped."""
        large = opened.large
        if large is None:
            self._backings.release(node.nodeid)
        opened.handles -= 1
        node.handles -= 1
        if writable:
            opened.writers -= 1
            self.writers -= large is None
            if opened.writers == 0:
                opened.torn = self._backings.killed(node.nodeid)
        if large is not None and node.draft is not opened:
            if opened.handles == 0:
                self._store.abort_large(large)  # or, sealed, end its lease
            if large.sealed:
                self.end_cached(node)
        if opened.writers == 0 and node.draft is opened:
            self.publisher.end_writing(node, opened)

    def end_cached(self, node: Node) -> None:
        """Count the end of a handle that read a sealed file through the page cache; the next may have passthrough."""
        node.cached_handles -= 1
        if node.cached_handles == 0 and node.linked and node.info is not None:
            self.display.show_sealed(node, node.info)

    async def truncate(self, node: Node, opened: OpenDraft, size_bytes: int) -> None:
        """Set the size of a draft; growth of a slot is allocated at once: a hole mapped in a full tier is SIGBUS.

        Waits for those whose fsync or close copies the draft: what is cut off would be missing in the copy.
        """
        if isinstance(opened.draft, LargeDraft):
            durable_bytes = opened.draft.persisted_bytes
            if durable_bytes is not None and size_bytes < durable_bytes:
                opened.draft.persisted_bytes = size_bytes
                self.persistence.rename_snapshot(node)
                self._store.journal.large.keep_order()  # the size before the cut extent, behind which are zeros
            await opened.draft.truncate(size_bytes)
            if durable_bytes is not None:  # what was cut off is not kept for what is durable of it
                await self.persistence.persist(node, opened)
            self.display.show_draft(node, opened)
        else:
            async with opened.persisting:
                self.contents.truncate_slot(opened.draft, size_bytes)
        opened.untouched = False
