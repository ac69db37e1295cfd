"""Durability of files being written, and of what they replace.

Responsibility: make a draft's bytes durable before fsync, or a close in a durable bucket, is answered; rename the
durable bytes with their draft; retire what an answered close or rename replaces (`Store.retire`).

Invariants: one copy of a draft is made durable at a time (`OpenDraft.persisting`), and it is neither published nor made
shorter meanwhile.

Concurrency: the service's trio thread. Awaits the log, and looks at the draft anew after that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvfs.errors import DeviceFailed, KvfsError, NoSpace
from mounts.drafts.contents import DraftContents, attributes_of
from mounts.drafts.display import NodeDisplay
from mounts.kernel.backing import Backings
from mounts.kernel.call_queue import CallQueue
from mounts.kernel.nodes import Node, NodeTable
from mounts.kernel.open_draft import OpenDraft
from tiers.model.objects import Attributes
from tiers.nvme.large_draft import LargeDraft
from tiers.store.store import Store


@dataclass(eq=False)
class DraftPersistence:
    """The durable bytes of the drafts of one mount."""

    _store: Store
    _nodes: NodeTable
    _backings: Backings
    _calls: CallQueue
    _contents: DraftContents
    _display: NodeDisplay
    _renamed: deque[tuple[int, Node, OpenDraft]] = field(default_factory=deque)
    """Drafts that took a name in a durable bucket, each with the ticket of its record; those of renames that are not
    answered, which the log's queue bounds."""

    async def settle_change(self, node: Node, opened: OpenDraft) -> None:
        """Settle a close of the draft, or a truncation by path, before it is answered.

        After that no start after a kill shows the object that had its name before, a draft in a durable bucket is on
        the device, and one without a slot is in the log. Raises NoSpace, DeviceFailed; then the draft is dropped
        unless a later close succeeds.
        """
        opened.failed = True
        opened.overtaken = False
        large = opened.large
        if self._display.is_durable(node):
            await self.persist(node, opened)
        elif opened.is_settled:
            await self._renew_durable(node, opened)
        elif large is not None and node.linked and node.draft is opened:
            await large.flush()
        opened.failed, opened.answered = False, True
        if node.linked and node.draft is opened:
            self._store.retire(self._nodes.name(node))

    async def _renew_durable(self, node: Node, opened: OpenDraft) -> None:
        """Replace the bytes that fsync made durable in a cache: no start may show bytes older than the close."""
        try:
            await self.persist(node, opened)
        except (NoSpace, DeviceFailed):
            if opened.large is not None:
                raise
            self.drop_snapshot(opened)

    def renamed_over(self, node: Node) -> None:
        """Retire the object that a draft replaces by a rename that is about to be answered.

        In a durable bucket it stays until its successor is durable: `retire_settled` retires it then.
        """
        if node.draft is None or not node.linked:
            return
        node.draft.answered = True
        if self._display.is_durable(node):
            self._renamed.append((self._store.journal.awaited_ticket, node, node.draft))
        else:
            self._store.retire(self._nodes.name(node))

    def retire_settled(self) -> None:
        """Retire the objects that settled renames in durable buckets replaced, before those are answered."""
        while self._renamed and self._store.journal.has_settled(self._renamed[0][0]):
            _, node, opened = self._renamed.popleft()
            if node.draft is opened and node.linked:
                self._store.retire(self._nodes.name(node))

    async def persist(self, node: Node, opened: OpenDraft) -> None:
        """Make the bytes written so far durable under the draft's name (fsync, close in a durable bucket).

        Raises NoSpace, DeviceFailed; does nothing without the NVMe tier, or when the name is gone.
        """
        async with opened.persisting:
            # From here on a close or a rename changes what is durable, too.
            self._backings.node_settles(node.nodeid, True)
            self._calls.catch_up()
            if not node.linked or node.draft is not opened:
                return
            name, attributes = self._nodes.name(node), self._attributes(node, opened)
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
                await self._store.settle_snapshot(coming, opened.snapshot)
                opened.snapshot = opened.coming
            except KvfsError:
                if opened.coming is not None:  # else its name is gone, and nobody waits for it
                    raise
            finally:
                opened.coming = None

    def rename_snapshot(self, node: Node) -> None:
        """Rename the durable bytes of a draft to the draft's name; the journal's `settle` waits for that."""
        opened = node.draft
        if opened is None or not node.linked:
            return
        attributes = self._attributes(node, opened)
        if isinstance(opened.draft, LargeDraft):
            self._store.rename_large(opened.draft, self._nodes.name(node), attributes)
            return
        for snapshot in opened.snapshots:
            self._store.rename_snapshot(snapshot, self._nodes.name(node), attributes)

    def drop_snapshot(self, opened: OpenDraft, *, behind: bool = False) -> None:
        """Drop the durable bytes of a draft without a name, which somebody may have open for long.

        `behind`: something else has the name.
        """
        if isinstance(opened.draft, LargeDraft) and not opened.draft.sealed:
            self._store.journal.removed(opened.draft.object_id, behind=behind)
        for snapshot in opened.snapshots:
            self._store.journal.removed(snapshot, behind=behind)
        opened.snapshot = opened.coming = None

    def _attributes(self, node: Node, opened: OpenDraft) -> Attributes:
        return attributes_of(node, opened, self._contents.status(opened))
