"""Files being written: from CREATE (or an open for writing) to the seal that publishes them.

Responsibility: the life of a draft on the mount. A file being written is a normal file under its own name
for whoever opens it there; the last writer's RELEASE publishes it; a writer that dies by a signal leaves
nothing.

Invariants:
- A sealed object is never written: opening it for writing makes a draft with its bytes. That is the same node where
  nobody has the object open, and else a new one, which the kernel finds when it looks the name up again.
- Once a close or rename of a draft was answered, or a truncation by path, what had its name before is never shown
  again: its row is retired (`TieredStore.retire`) before the answer, and where the draft is dropped, it goes with it.
- The order of two doors is that of their answers: a draft that was closed before another door sealed its name is
  dropped, one that is closed later takes that object's place.
- A draft is published only when the kernel says that nobody can write it any more (`WriterActive` else):
  a shared writable mapping outlives RELEASE, so such a draft lingers under its name until it is unmapped.

Concurrency: the service's trio thread. Awaits: copying a large object into a draft (`rewrite`), and the
waits of lingering drafts, which run as tasks of their own and look at the draft anew after each wait.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import trio

from kvfs import limits
from kvfs.errors import DeviceFailed, IsDirectory, KvfsError, NoSpace, NotFound, ObjectTooLarge, WriterActive
from mounts.attributes import FileStatus, mode_now
from mounts.backing import Backings
from mounts.large import begin_copy, large_of, status_of
from mounts.nodes import Node, NodeTable, OpenDraft
from tiers.base import Extent
from tiers.large import LargeDraft
from tiers.model import Attributes, Draft, Name, ObjectInfo, Unpublished
from tiers.store import TieredStore

log = logging.getLogger("kvfs.mount")

COPY_INLINE_BYTES = 4 * limits.MIB
"""Copied on the event loop: 4 MiB take about 0.5 ms, a thread's round trip 0.1 ms."""
PUBLISH_DELAY_S = 0.001
"""A rename mostly follows close() at once: published after it, the object needs one name transaction, not two,
and the writer does not wait for it."""
LINGER_FIRST_S = 0.0002
"""The closing process still drops its reference when RELEASE arrives: microseconds later it is gone."""
LINGER_MOST_S = 0.1
"""How often a draft that is still mapped for writing is looked at."""


class DraftKeeper:
    """All drafts of one mount."""

    def __init__(self, store: TieredStore, nodes: NodeTable, backings: Backings) -> None:
        self._store = store
        self._nodes = nodes
        self._backings = backings
        self._nursery: trio.Nursery | None = None
        self.catch_up: Callable[[], None] = lambda: None
        """Handles what the native loop has queued: what it has renamed is published under its new name."""
        self._due: dict[int, tuple[Node, OpenDraft]] = {}
        self._ripe: dict[int, tuple[Node, OpenDraft]] = {}
        self._due_changed = trio.Event()
        self._renamed: deque[tuple[int, Node, OpenDraft]] = deque()
        """Drafts that took a name in a durable bucket, each with the ticket of its record; those of renames that are
        not answered, which the log's queue bounds."""
        self.is_publishing = False
        self.writers_changed = trio.Event()
        self.writers = 0

    def run_in(self, nursery: trio.Nursery) -> None:
        """Where lingering drafts wait."""
        self._nursery = nursery
        nursery.start_soon(self._publish_later)

    # --- beginning ----------------------------------------------------------------------------------------

    def create(self, parent: Node, component: bytes, *, mode: int, uid: int, gid: int, ino: int = 0) -> Node:
        """A new empty file, linked under its name in place of what was there. Raises NoSpace, QuotaExceeded."""
        draft = self._reserve(self._nodes.name(parent).bucket, uid)
        ino = ino or self._store.names.next_ids(1)
        try:
            node = self._nodes.add(parent, component, directory=False, ino=ino)
        except KvfsError:
            self._abort(draft)
            raise
        opened = OpenDraft(draft, mode=mode & 0o7777, uid=uid, gid=gid, ctime_ns=time.time_ns())
        self.keep_privileges(opened)
        self._nodes.set_draft(node, opened)
        self.show_draft(node, opened)
        return node

    def keep_privileges(self, opened: OpenDraft) -> None:
        """setuid and setgid were given to what the draft holds now."""
        if opened.mode & (stat.S_ISUID | stat.S_ISGID):
            opened.privileged_ns = self.status(opened).st_mtime_ns

    def _reserve(self, bucket: bytes, uid: int) -> Draft | LargeDraft:
        """An empty draft: in DRAM, or in a large bucket on NVMe."""
        if self._store.bucket(bucket).large:
            return self._store.begin_large(bucket, uid=uid)
        draft = self._store.reserve(0, uid=uid)
        self._set_slot_times(draft, None)
        return draft

    def _set_slot_times(self, draft: Draft, times_ns: tuple[int, int] | None) -> None:
        """Access and modification; None: now. The slot may have had another file before."""
        descriptor = self._store.open_draft(draft)
        try:
            os.utime(descriptor, ns=times_ns) if times_ns else os.utime(descriptor)
        finally:
            os.close(descriptor)

    def _abort(self, draft: Draft | LargeDraft) -> None:
        if isinstance(draft, LargeDraft):
            self._store.abort_large(draft)
        else:
            self._store.abort(draft)

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
        """A file that the native loop has created and opened for writing, from a spare draft."""
        node = self._nodes.adopt(nodeid, parent, component, ino=ino)
        draft = self._store.grant(extent, uid=uid)
        opened = OpenDraft(draft, mode=mode & 0o7777, uid=uid, gid=gid, ctime_ns=time.time_ns())
        self._nodes.set_draft(node, opened)
        self._count_handle(node, opened, writable=True)
        return node

    async def rewrite(
        self, node: Node, info: ObjectInfo, *, uid: int, keep_bytes: bool, thread: int
    ) -> Node | None:
        """A draft with the object's bytes, which awaits `thread`: the node that has it now, None where the object
        was replaced meanwhile."""
        bucket = self._nodes.name(node).bucket
        draft: Draft | LargeDraft
        if not keep_bytes:
            draft = self._reserve(bucket, uid)
        elif self._store.bucket(bucket).large:
            draft = await begin_copy(self._store, bucket, info, uid=uid)
            draft.times.atime_ns = draft.times.mtime_ns = info.mtime_ns
        else:
            if info.extent is None:
                await self._store.load(info, uid=uid)
                if node.info is None or node.info.key != info.key:
                    return None
                info = node.info
            draft = await self._reserve_copy(info, uid)
        if not node.linked or node.info is None or node.info.key != info.key:
            self._abort(draft)
            return None
        opened = OpenDraft(
            draft, mode=info.mode, uid=info.uid, gid=info.gid, ctime_ns=time.time_ns(), pinned=info.pinned
        )
        opened.awaited.add(thread)
        opened.untouched = True
        opened.privileged_ns = info.mtime_ns if keep_bytes else 0
        target = self._place_of_draft(node, info)
        self._nodes.set_draft(target, opened)
        self.show_draft(target, opened)
        return target

    def _place_of_draft(self, node: Node, info: ObjectInfo) -> Node:
        """The node of a draft that takes the place of a sealed object: its own where nobody has the object open.

        Else the bytes that are open stay with their node, and the name leads to another file from now on.
        """
        assert node.parent is not None
        self._show_away(node, info)  # from here on opens come here
        if node.handles == 0 and self._backings.opens(node.nodeid) == 0:
            self._nodes.set_object(node, None)
            self._backings.invalidate_attr(node.nodeid)
            return node
        ino = self._store.names.next_ids(1)
        target = self._nodes.add(node.parent, node.component, directory=False, ino=ino)
        self._nodes.share_locks(node, target)
        self._backings.node_dead(node.nodeid)
        return target

    def come_back(self, node: Node, opened: OpenDraft, thread: int) -> None:
        """The draft is no longer kept for this thread, which may have opened it."""
        opened.awaited.discard(thread)
        if opened.awaited or opened.handles > 0 or node.draft is not opened:
            return
        if opened.untouched:
            self.discard(node)
        else:
            self.settle(node, opened)

    async def _reserve_copy(self, info: ObjectInfo, uid: int) -> Draft:
        """A draft in DRAM with the bytes of an object there."""
        source = self._store.open_read(info, uid=uid)
        try:
            draft = self._store.reserve(info.size_bytes, uid=uid)
            try:
                await self._copy(source, self._store.open_draft(draft), info.size_bytes)
                self._set_slot_times(draft, (info.mtime_ns, info.mtime_ns))  # until something is written
            except BaseException:
                self._store.abort(draft)
                raise
        finally:
            os.close(source)
        return draft

    @staticmethod
    async def _copy(source: int, target: int, size_bytes: int) -> None:
        try:
            if size_bytes <= COPY_INLINE_BYTES:
                copy_bytes(source, target, size_bytes)
            else:
                await trio.to_thread.run_sync(copy_bytes, source, target, size_bytes)
        finally:
            os.close(target)

    # --- handles ------------------------------------------------------------------------------------------

    def open(self, node: Node, opened: OpenDraft, *, writable: bool) -> None:
        """Count a handle and make the slot, if there is one, its backing."""
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
            if large_of(opened) is None:
                self.writers += 1
                self.writers_changed.set()

    def close(self, node: Node, opened: OpenDraft, *, writable: bool) -> None:
        """Count a handle's end; with the last writer the draft is published or dropped."""
        large = large_of(opened)
        if large is None:
            self._backings.release(node.nodeid)
        opened.handles -= 1
        node.handles -= 1
        if writable:
            opened.writers -= 1
            self.writers -= large is None
            if opened.writers == 0:
                opened.torn = self._backings.killed(node.nodeid)
        if large is not None and opened.handles == 0 and node.draft is not opened:
            self._store.abort_large(large)  # or, sealed, let go of it
        if opened.writers == 0 and node.draft is opened:
            self.settle(node, opened)

    def settle(self, node: Node, opened: OpenDraft) -> None:
        """Nobody has the draft open for writing: publish it, drop it, or let it linger."""
        dropped = opened.torn or opened.overtaken or (opened.failed and not opened.answered)
        if opened.awaited and not dropped:
            return
        if dropped or opened.untouched or not node.linked:
            if dropped or opened.handles == 0:
                self.discard(node)
            return
        opened.closed = True
        waiting = self._due.get(node.nodeid) or self._ripe.get(node.nodeid)
        if not opened.lingering and (
            waiting is None or waiting[1] is not opened
        ):  # else an earlier draft's turn
            self._ripe.pop(node.nodeid, None)
            self._due[node.nodeid] = (node, opened)
            self._due_changed.set()

    def publish_if_closed(self, node: Node, opened: OpenDraft) -> bool:
        """Publish now what was closed a moment ago, so that whoever comes finds it sealed; whether it is."""
        return opened.closed and node.linked and self._publish(node, opened)

    def publish_now(self, name: Name) -> Unpublished | None:
        """For another door: publish what is closed under `name`; it is returned where that is still to come."""
        self.catch_up()
        node = self._nodes.resolve(name)
        opened = node.draft if node is not None else None
        if node is None or opened is None or self.publish_if_closed(node, opened):
            return None
        if opened.writers > 0 and not (opened.answered or self._backings.flushed(node.nodeid)):
            return None
        return Unpublished(opened.ended, was_answered=opened.closed or opened.answered)

    async def _publish_later(self) -> None:
        while True:
            await self._due_changed.wait()
            self._due_changed = trio.Event()
            await trio.sleep(PUBLISH_DELAY_S)
            self.catch_up()
            self.ripen()
            self.publish_ripe(lambda: False)

    def ripen(self) -> None:
        """A writer has begun with its next file: those closed before have the names that they will have."""
        self._ripe.update(self._due)
        self._due.clear()

    def publish_ripe(self, interrupted: Callable[[], bool]) -> None:
        """Publish those, while the writer is busy writing, until `interrupted` says that there is other work."""
        if not self._ripe:
            return
        while self._ripe and not interrupted():
            node, opened = self._ripe.pop(next(iter(self._ripe)))
            if node.draft is opened and opened.closed:
                self._settle_now(node, opened)
        self._store.maintain()

    def publish_closed(self) -> None:
        """Publish at once whatever is closed: the mount is gone, and nobody comes to write it again."""
        self.catch_up()
        self.ripen()
        for node, opened in list(self._ripe.values()):
            if node.draft is opened:
                self.publish_if_closed(node, opened)

    def _settle_now(self, node: Node, opened: OpenDraft) -> None:
        if not node.linked:
            if opened.handles == 0 and not opened.awaited:
                self.discard(node)
        elif not self._publish(node, opened):
            opened.lingering = True
            self._spawn(self._linger, node, opened)

    async def _linger(self, node: Node, opened: OpenDraft) -> None:
        delay_s = LINGER_FIRST_S
        try:
            while True:
                await trio.sleep(delay_s)
                delay_s = min(delay_s * 2, LINGER_MOST_S)
                self.catch_up()
                if node.draft is opened and opened.closed:
                    await self._write_out(node, opened)
                if (
                    node.draft is not opened or not opened.closed
                ):  # somebody writes it again, or it is published
                    return
                if not node.linked and opened.handles == 0 and not opened.awaited:
                    self.discard(node)
                    return
                if node.linked and self._publish(node, opened):
                    return
        finally:
            opened.lingering = False

    async def _write_out(self, node: Node, opened: OpenDraft) -> None:
        """Have a draft without a slot written; one that cannot be is dropped."""
        large = large_of(opened)
        if large is None or not node.linked or large.is_written:
            return
        try:
            await large.flush()
        except KvfsError as error:
            if node.draft is opened and opened.closed:
                log.log(error.log_level, "%s was not published: %s", self._nodes.name(node), error)
                self.discard(node)

    # --- ends ---------------------------------------------------------------------------------------------

    def _publish(self, node: Node, opened: OpenDraft) -> bool:
        """Seal the draft under its name; False while somebody can still write it, or will."""
        if opened.awaited:
            return False
        self._backings.node_settles(node.nodeid, True)  # no rename is answered natively from here on
        self.catch_up()
        if node.draft is not opened or not (node.linked and opened.closed):
            return node.draft is not opened
        if opened.persisting.locked():
            return False
        name, self.is_publishing = self._nodes.name(node), True
        try:
            with self._store.directory_times.still():
                info = self._seal(node, opened, name)
        except WriterActive:
            return False
        except (OSError, KvfsError) as error:
            return self._publish_failed(node, opened, error)
        finally:
            self.is_publishing = False
        opened.ended.set()
        self._nodes.set_draft(node, None)
        self._nodes.set_object(node, info)
        self.show_sealed(node, info)
        if isinstance(opened.draft, LargeDraft):
            self._part(node, opened, opened.draft, info)
        self._nodes.release(node)
        return True

    def _publish_failed(self, node: Node, opened: OpenDraft, error: OSError | KvfsError) -> bool:
        """Drop the draft, or try again later: when descriptors or memory are short, and while there is no room for what
        a durable bucket's writer was told is kept. True when it is dropped."""
        kept = self.is_durable(node) and isinstance(error, NoSpace)
        if isinstance(error, KvfsError) and not kept:
            log.log(error.log_level, "%s was not published: %s", self._nodes.name(node), error)
            self.discard(node)
            return True
        if not opened.late:
            log.warning("%s cannot be published yet: %s", self._nodes.name(node), error)
        opened.late = True
        return False

    def _seal(self, node: Node, opened: OpenDraft, name: Name) -> ObjectInfo:
        times = self.status(opened)
        attributes = _attributes(node, opened, times)
        if isinstance(opened.draft, LargeDraft):
            return self._store.seal_large(opened.draft, name, attributes)
        if times.st_size > self.largest_bytes:
            raise ObjectTooLarge(f"{name} has {times.st_size} bytes: the limit is {self.largest_bytes}")
        return self._store.seal(opened.draft, name, attributes, snapshot=opened.snapshot)

    def _part(self, node: Node, opened: OpenDraft, draft: LargeDraft, info: ObjectInfo) -> None:
        """A sealed draft ends with its readers. While there are any, an object that DRAM takes gets a node of its own:
        passthrough and they cannot be on one."""
        if opened.handles == 0:
            draft.close()
        elif not self._store.is_large(info) and node.parent is not None:
            self._backings.invalidate_entry(node.parent.nodeid, node.component)
            self._backings.node_dead(node.nodeid)
            self._nodes.unlink(node, doubt=True)

    async def settle_change(self, node: Node, opened: OpenDraft) -> None:
        """Before a close of the draft is answered, or a truncation by path: what had its name before does not come
        back, and in a durable bucket it is on the device. One without a slot is in the log. Raises NoSpace,
        DeviceFailed, and then the draft is dropped unless a later one succeeds."""
        opened.failed = True
        opened.overtaken = False
        large = large_of(opened)
        if self.is_durable(node):
            await self.persist(node, opened)
        elif self.is_settled(opened):
            await self._renew_durable(node, opened)
        elif large is not None and node.linked and node.draft is opened:
            await large.flush()
        opened.failed, opened.answered = False, True
        if node.linked and node.draft is opened and self._store.retire(self._nodes.name(node)):
            await self._store.journal.settle()

    async def _renew_durable(self, node: Node, opened: OpenDraft) -> None:
        """What was made durable of a cache's draft (fsync) is older than what is closed now: no start may show that."""
        try:
            await self.persist(node, opened)
        except (NoSpace, DeviceFailed):
            if large_of(opened) is not None:
                raise
            self.forget_snapshot(opened)

    @staticmethod
    def is_settled(opened: OpenDraft) -> bool:
        """Whether anything of the draft is on the device."""
        if isinstance(opened.draft, LargeDraft):
            return opened.draft.persisted_bytes is not None
        return opened.snapshot is not None

    def renamed_over(self, node: Node) -> None:
        """The draft has taken another's name: before that is answered, as `settle_change`. What was durable stays until
        its successor is, which `retire_settled` sees to."""
        if node.draft is None or not node.linked:
            return
        node.draft.answered = True
        if self.is_durable(node):
            self._renamed.append((self._store.journal.promised, node, node.draft))
        else:
            self._store.retire(self._nodes.name(node))

    def retire_settled(self) -> None:
        """Before a rename is answered that is durable: what lost its name by that does not come back."""
        while self._renamed and self._store.journal.has_settled(self._renamed[0][0]):
            _, node, opened = self._renamed.popleft()
            if node.draft is opened and node.linked:
                self._store.retire(self._nodes.name(node))

    def overtake(self, node: Node) -> None:
        """Another door has sealed an object under the draft's name: it takes the place of a draft that was closed
        before, and one that is closed later takes its."""
        opened = node.draft
        if opened is None:
            return
        opened.overtaken = opened.closed or self._backings.flushed(node.nodeid)
        if opened.overtaken and node.linked:  # it may have come to the name while the other door changed it
            self._store.reinstate(self._nodes.name(node))
        if opened.closed:
            self.discard(node)
        else:
            self._backings.node_settles(node.nodeid, True)

    async def persist(self, node: Node, opened: OpenDraft) -> None:
        """What is written so far is durable under the draft's name when this returns (fsync, close in a durable
        bucket). Raises NoSpace, DeviceFailed; does nothing without the NVMe tier, or when the name is gone."""
        async with opened.persisting:
            # From here on a close or a rename changes what is durable, too.
            self._backings.node_settles(node.nodeid, True)
            self.catch_up()
            if not node.linked or node.draft is not opened:
                return
            name, attributes = self._nodes.name(node), _attributes(node, opened, self.status(opened))
            if isinstance(opened.draft, LargeDraft):
                await self._store.persist_large(opened.draft, name, attributes)
                return
            if opened.snapshot is not None and self._store.is_snapshot(opened.snapshot, opened.draft):
                self._store.rename_snapshot(opened.snapshot, name, attributes)
                await self._store.journal.settle()
                return
            coming = opened.coming = self._store.put_snapshot(opened.draft, name, attributes)
            if coming is None:
                return
            try:
                await self._store.journal.settle_snapshot(coming, opened.snapshot)
                opened.snapshot = opened.coming
            except KvfsError:
                if opened.coming is not None:  # else its name is gone, and nobody waits for it
                    raise
            finally:
                opened.coming = None

    def rename_snapshot(self, node: Node) -> None:
        """What is durable of a draft gets its draft's name; `settle` waits for that."""
        opened = node.draft
        if opened is None or not node.linked:
            return
        attributes = _attributes(node, opened, self.status(opened))
        if isinstance(opened.draft, LargeDraft):
            self._store.rename_large(opened.draft, self._nodes.name(node), attributes)
            return
        for snapshot in opened.snapshots:
            self._store.rename_snapshot(snapshot, self._nodes.name(node), attributes)

    def forget_snapshot(self, opened: OpenDraft, *, behind: bool = False) -> None:
        """What is durable of a draft without a name does not come back, though somebody may have it open for long.
        `behind`: something else has the name."""
        if isinstance(opened.draft, LargeDraft) and not opened.draft.sealed:
            self._store.journal.removed(opened.draft.object_id, behind=behind)
        for snapshot in opened.snapshots:
            self._store.journal.removed(snapshot, behind=behind)
        opened.snapshot = opened.coming = None

    def show_draft(self, node: Node, opened: OpenDraft) -> None:
        """Let the native loop answer for a file being written."""
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
        )
        self._show_locks(node)
        if opened.mode & (stat.S_ISUID | stat.S_ISGID):
            self._backings.node_privileged(node.nodeid, opened.privileged_ns)
        if node.linked:
            name = self._nodes.name(node)
            settles = self.is_durable(node) or self.is_settled(opened) or opened.coming is not None
            settles = settles or self._store.names.get(name.bucket, name.key) is not None
            self._backings.node_settles(node.nodeid, settles)

    def _show_large(self, node: Node, opened: OpenDraft, draft: LargeDraft) -> None:
        """Its attributes as they are; reads and writes come to Python."""
        self._backings.node_away(
            node.nodeid,
            node.ino,
            size_bytes=draft.size_bytes,
            mode=stat.S_IFREG | opened.mode,
            uid=opened.uid,
            gid=opened.gid,
            mtime_ns=draft.times.mtime_ns,
            ctime_ns=max(draft.times.ctime_ns, opened.ctime_ns),
        )

    def is_durable(self, node: Node) -> bool:
        """Whether the file's bucket promises that it is on the device once it is closed."""
        return node.linked and self._store.bucket(self._nodes.name(node).bucket).durable

    def show_sealed(self, node: Node, info: ObjectInfo) -> None:
        """Let the native loop answer for the node."""
        if info.extent is None:
            self._show_away(node, info)
        else:
            extent = info.extent
            self._show(
                partial(self._backings.node_sealed, slot=extent.slot, generation=extent.generation),
                node,
                info,
            )

    def _show_away(self, node: Node, info: ObjectInfo) -> None:
        """Let it answer for the attributes; opens come here."""
        self._show(self._backings.node_away, node, info)

    def _show(self, show: Callable[..., None], node: Node, info: ObjectInfo) -> None:
        show(
            node.nodeid,
            node.ino,
            size_bytes=info.size_bytes,
            mode=stat.S_IFREG | info.mode,
            uid=info.uid,
            gid=info.gid,
            mtime_ns=info.mtime_ns,
            ctime_ns=info.ctime_ns,
        )
        self._show_locks(node)

    def _show_locks(self, node: Node) -> None:
        if node.lock_key:
            self._backings.node_locks(node.nodeid, node.lock_key)

    def discard(self, node: Node) -> None:
        """Drop a draft and its name, and what had the name before, where that was answered to be gone; readers who
        have it open keep their bytes."""
        opened = node.draft
        if opened is None:
            return
        before = self._nodes.name(node) if opened.answered and node.linked and not opened.overtaken else None
        if node.linked and node.parent is not None:
            self._backings.invalidate_entry(node.parent.nodeid, node.component)
        opened.ended.set()
        self._nodes.unlink(node, doubt=True)  # it may have stood before a sealed object
        self._nodes.set_draft(node, None)
        self._backings.node_dead(node.nodeid)
        if large_of(opened) is None or opened.handles == 0:  # else its last reader ends it
            self._abort(opened.draft)
        for snapshot in opened.snapshots:
            self._store.journal.removed(snapshot)
        if before is not None:
            with suppress(NotFound, IsDirectory):
                self._store.remove(before)
        self._nodes.release(node)

    # --- looks --------------------------------------------------------------------------------------------

    @property
    def largest_bytes(self) -> int:
        return self._store.dram.largest_object_bytes

    def status(self, opened: OpenDraft) -> FileStatus:
        """Size and times: the slot file's, as passthrough writes left them."""
        if isinstance(opened.draft, LargeDraft):
            return status_of(opened.draft)
        descriptor = self._store.open_draft(opened.draft)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    async def truncate(self, node: Node, opened: OpenDraft, size_bytes: int) -> None:
        """Set the size. Growth of a slot is allocated at once: a hole mapped in a full tier is SIGBUS."""
        if isinstance(opened.draft, LargeDraft):
            durable_bytes = opened.draft.persisted_bytes
            if durable_bytes is not None and size_bytes < durable_bytes:
                opened.draft.persisted_bytes = size_bytes
                self.rename_snapshot(node)
                self._store.journal.keep_order()  # the size before the cut extent, behind which are zeros
            await opened.draft.truncate(size_bytes)
            if durable_bytes is not None:  # what was cut off is not kept for what is durable of it
                await self.persist(node, opened)
            self.show_draft(node, opened)
        else:
            self._truncate_slot(opened.draft, size_bytes)
        opened.untouched = False

    def _truncate_slot(self, draft: Draft, size_bytes: int) -> None:
        if size_bytes > self.largest_bytes:
            raise ObjectTooLarge(f"{size_bytes} bytes: the limit is {self.largest_bytes}")
        descriptor = self._store.open_draft(draft)
        try:
            grown = size_bytes - os.fstat(descriptor).st_size
            if grown > 0:
                self._store.make_room(grown)
                os.posix_fallocate(descriptor, size_bytes - grown, grown)
            else:
                os.ftruncate(descriptor, size_bytes)
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    def set_times(self, opened: OpenDraft, atime_ns: int | None, mtime_ns: int | None) -> None:
        if isinstance(opened.draft, LargeDraft):
            times = opened.draft.times
            times.atime_ns = times.atime_ns if atime_ns is None else atime_ns
            times.mtime_ns = times.mtime_ns if mtime_ns is None else mtime_ns
            return
        descriptor = self._store.open_draft(opened.draft)
        try:
            now = os.fstat(descriptor)
            os.utime(
                descriptor,
                ns=(
                    now.st_atime_ns if atime_ns is None else atime_ns,
                    now.st_mtime_ns if mtime_ns is None else mtime_ns,
                ),
            )
        finally:
            os.close(descriptor)

    def _spawn(self, function: object, *arguments: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(function, *arguments)  # type: ignore[arg-type]


def _attributes(node: Node, opened: OpenDraft, times: FileStatus) -> Attributes:
    return Attributes(
        mode=mode_now(opened, times.st_mtime_ns),
        uid=opened.uid,
        gid=opened.gid,
        mtime_ns=times.st_mtime_ns,
        ino=node.ino,
        pinned=opened.pinned,
    )


def copy_bytes(source: int, target: int, size_bytes: int) -> None:
    """Copy a whole file within the tier. Raises OSError, ENOSPC among them."""
    done = 0
    while done < size_bytes:
        count = os.sendfile(target, source, done, size_bytes - done)
        if count == 0:
            raise OSError(errno.EIO, "the object ended before its size")
        done += count
