"""How files being written end: published when they are closed, or dropped.

Responsibility: publish a draft that the last writer has closed, a moment later and while nobody waits, once nobody can
write it any more; drop one that was torn, overtaken or could not be kept.

Invariants:
- The order of two doors is that of their answers: a draft that was closed before another door sealed its name is
  dropped, one that is closed later takes that object's place.
- A draft is published only when the kernel says that nobody can write it any more (`WriterActive` else):
  a shared writable mapping outlives RELEASE, so such a draft lingers under its name until it is unmapped.

Concurrency: the service's trio thread. Lingering drafts wait in tasks of their own, which look at the draft anew after
each wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from kvfs.errors import IsDirectory, KvfsError, NoSpace, NotFound, ObjectTooLarge, WriterActive
from mounts.drafts.contents import DraftContents, attributes_of
from mounts.drafts.display import NodeDisplay
from mounts.kernel import attributes
from mounts.kernel.backing import Backings
from mounts.kernel.call_queue import CallQueue
from mounts.kernel.nodes import Node, NodeTable
from mounts.kernel.open_draft import OpenDraft
from tiers.model.objects import Name, ObjectInfo, Unpublished
from tiers.nvme.large_draft import LargeDraft
from tiers.store.store import Store

log = logging.getLogger("kvfs.mount")

PUBLISH_DELAY_S = 0.001
"""A rename mostly follows close() at once: an object published after the rename needs one name transaction, not two,
and the writer does not wait for it."""
PUBLISHED_AT_ONCE = 8
"""Drafts published before other tasks get their turn: 2 ms. Of a burst of 200 files all at once took 40, and whoever
came by another door waited for it."""
LINGER_FIRST_S = 0.0002
"""The closing process still drops its reference when RELEASE arrives: microseconds later it is gone."""
LINGER_MOST_S = 0.1
"""How often a draft that is still mapped for writing is looked at."""


@dataclass(eq=False)
class DraftPublisher:
    """The ends of all drafts of one mount."""

    _store: Store
    _nodes: NodeTable
    _backings: Backings
    _calls: CallQueue
    _contents: DraftContents
    _display: NodeDisplay
    _nursery: trio.Nursery | None = None
    _due: dict[int, tuple[Node, OpenDraft]] = field(default_factory=dict)
    _ripe: dict[int, tuple[Node, OpenDraft]] = field(default_factory=dict)
    _due_changed: trio.Event = field(default_factory=trio.Event)
    is_publishing: bool = False

    def run_in(self, nursery: trio.Nursery) -> None:
        """Begin the task that publishes closed drafts, in this nursery."""
        self._nursery = nursery
        nursery.start_soon(self._publish_later)

    def end_writing(self, node: Node, opened: OpenDraft) -> None:
        """Publish, drop or keep a draft that nobody has open for writing."""
        dropped = opened.torn or opened.overtaken or (opened.failed and not opened.answered)
        if opened.awaited and not dropped:
            return
        if dropped or opened.untouched or not node.linked:
            if dropped or opened.handles == 0:
                self.abort(node)
            return
        opened.closed = True
        waiting = self._due.get(node.nodeid) or self._ripe.get(node.nodeid)
        if not opened.lingering and (waiting is None or waiting[1] is not opened):  # else an earlier draft's
            self._ripe.pop(node.nodeid, None)
            self._due[node.nodeid] = (node, opened)
            self._due_changed.set()

    def publish_if_closed(self, node: Node, opened: OpenDraft) -> bool:
        """Publish a draft that was closed a moment ago, and return whether it is sealed now."""
        return opened.closed and node.linked and self._publish(node, opened)

    def publish_now(self, name: Name) -> Unpublished | None:
        """Publish a closed draft of this name, for another door; return the draft where it cannot be sealed yet."""
        self._calls.catch_up()
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
            self._calls.catch_up()
            self.ripen()
            await self._publish_all()

    async def _publish_all(self) -> None:
        while self.publish_ripe(lambda: False):
            await trio.lowlevel.checkpoint()

    def ripen(self) -> None:
        """Note that closed drafts are ready: their writer has begun with its next file, so names will not change."""
        self._ripe.update(self._due)
        self._due.clear()

    def publish_ripe(self, interrupted: Callable[[], bool]) -> bool:
        """Publish PUBLISHED_AT_ONCE ready drafts, while their writer is busy, until `interrupted` says that there is
        other work; return whether more are ready."""
        if not self._ripe:
            return False
        for _ in range(PUBLISHED_AT_ONCE):
            if not self._ripe or interrupted():
                break
            node, opened = self._ripe.pop(next(iter(self._ripe)))
            if node.draft is opened and opened.closed:
                self._publish_or_linger(node, opened)
        self._store.maintain()
        return bool(self._ripe)

    async def publish_last(self) -> None:
        """Publish all drafts without a writer: the mount has ended, so that nobody opens them again.

        Waits for those that cannot be published yet, which their mappings or the device hold up.
        """
        async with trio.open_nursery() as self._nursery:
            self._calls.catch_up()
            for node in list(self._nodes):
                if node.draft is not None and node.draft.writers == 0:
                    node.draft.awaited.clear()
                    self.end_writing(node, node.draft)
            self.ripen()
            await self._publish_all()

    def _publish_or_linger(self, node: Node, opened: OpenDraft) -> None:
        if not node.linked:
            if opened.is_unused:
                self.abort(node)
        elif not self._publish(node, opened):
            opened.lingering = True
            assert self._nursery is not None
            self._nursery.start_soon(self._linger, node, opened)

    async def _linger(self, node: Node, opened: OpenDraft) -> None:
        delay_s = LINGER_FIRST_S
        try:
            while True:
                await trio.sleep(delay_s)
                delay_s = min(delay_s * 2, LINGER_MOST_S)
                self._calls.catch_up()
                if node.draft is opened and opened.closed:
                    await self._write_out(node, opened)
                if node.draft is not opened or not opened.closed:  # published, or somebody writes it again
                    return
                if not node.linked and opened.is_unused:
                    self.abort(node)
                    return
                if node.linked and self._publish(node, opened):
                    return
        finally:
            opened.lingering = False

    async def _write_out(self, node: Node, opened: OpenDraft) -> None:
        """Write a draft without a slot to the device; drop one that cannot be written."""
        large = opened.large
        if large is None or not node.linked or large.is_written:
            return
        try:
            await large.flush()
        except KvfsError as error:
            if node.draft is opened and opened.closed:
                log.log(error.log_level, "%s was not published: %s", self._nodes.name(node), error)
                self.abort(node)

    def _publish(self, node: Node, opened: OpenDraft) -> bool:
        """Seal the draft under its name; return False while somebody can still write it, or will."""
        if opened.awaited:
            return False
        self._backings.node_settles(node.nodeid, True)  # no rename is answered natively from here on
        self._calls.catch_up()
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
        if opened.large is not None and opened.handles == 0:
            opened.large.close()
        elif opened.large is not None:  # its last reader closes it
            node.cached_handles += opened.handles
        self._display.show_sealed(node, info)
        self._nodes.release(node)
        return True

    def _publish_failed(self, node: Node, opened: OpenDraft, error: OSError | KvfsError) -> bool:
        """Drop a draft that cannot be sealed, and return True; or False, where sealing is tried again.

        It is tried again when descriptors or memory are short, and while there is no room for a draft in a durable
        bucket, whose close was answered.
        """
        kept = self._display.is_durable(node) and isinstance(error, NoSpace)
        if isinstance(error, KvfsError) and not kept:
            log.log(error.log_level, "%s was not published: %s", self._nodes.name(node), error)
            self.abort(node)
            return True
        if not opened.late:
            log.warning("%s cannot be published yet: %s", self._nodes.name(node), error)
        opened.late = True
        return False

    def _seal(self, node: Node, opened: OpenDraft, name: Name) -> ObjectInfo:
        status, most = self._contents.status(opened), self._contents.largest_bytes
        sealed = attributes_of(node, opened, status)
        if isinstance(opened.draft, LargeDraft):
            return self._store.seal_large(opened.draft, name, sealed)
        if status.st_size > most:
            raise ObjectTooLarge(f"{name} has {status.st_size} bytes: the limit is {most}")
        return self._store.seal(opened.draft, name, sealed, snapshot=opened.snapshot)

    def overtake(self, node: Node) -> None:
        """Drop a draft that was closed before another door sealed its name.

        A draft that is still open stays, and takes that object's place with its close.
        """
        opened = node.draft
        if opened is None:
            return
        opened.overtaken = opened.closed or self._backings.flushed(node.nodeid)
        if opened.overtaken and node.linked:  # it may have come to the name while the other door changed it
            self._store.reinstate(self._nodes.name(node))
        if opened.closed:
            self.abort(node)
        else:
            self._backings.node_settles(node.nodeid, True)

    def abort(self, node: Node) -> None:
        """Abort a draft and unlink its name; remove the object that had the name before, if its end was answered.

        Readers who have the draft open keep their bytes.
        """
        opened = node.draft
        if opened is None:
            return
        before = self._nodes.name(node) if opened.answered and node.linked and not opened.overtaken else None
        was_linked = node.linked
        opened.ended.set()
        self._nodes.unlink(node, unresolved=True)  # it may have stood before a sealed object
        with suppress(OSError):  # descriptors may be short
            node.dropped = attributes.of_draft(node, opened, self._contents.status(opened))
        self._nodes.set_draft(node, None)
        self._backings.node_dead(node.nodeid)
        if was_linked and node.parent is not None:
            self._backings.invalidate_entry(node.parent.nodeid, node.component)
        if opened.large is None or opened.handles == 0:  # else its last reader ends it
            self._contents.abort(opened.draft)
        for snapshot in opened.snapshots:
            self._store.journal.removed(snapshot)
        if before is not None:
            with suppress(NotFound, IsDirectory):
                self._store.remove(before)
        self._nodes.release(node)
