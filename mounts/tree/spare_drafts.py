"""Drafts made ahead of need, which the native loop gives to CREATEs that it answers by itself.

Responsibility: keep a few of them at the loop while files are being created, make open files of those that the loop has
used, and abort the rest at the end.

Invariants: a spare has a slot, a nodeid, a file id and a handle, and no bytes; it counts as a slot in use and as
nobody's draft; the uid that creates a file with it is charged as for any draft, once this thread handles the call.
There are few at first, and twice as many each time that all have run out, until the mount ends: at most SPARE_DRAFTS,
one slot in SLOTS_PER_SPARE_DRAFT and one descriptor in DESCRIPTORS_PER_SPARE_DRAFT, those included that the loop has
used and nobody is charged for yet; and none while they could lead a uid past its share of the slots: creations are
calls then, and refused there.

Concurrency: the service's trio thread; the loop's thread takes spares at any time.
"""

from __future__ import annotations

import logging
import os
import resource
import stat

from kvfs import limits
from kvfs._native.fuse.loop import Call, FuseLoop
from kvfs.errors import KvfsError
from mounts.tree.handles import OpenFiles
from mounts.tree.view import View
from tiers.model.tier import Extent

log = logging.getLogger("kvfs.mount")


class SpareDrafts:
    """The spares of one mount; see the module's header."""

    def __init__(self, loop: FuseLoop, view: View, files: OpenFiles) -> None:
        self._loop = loop
        self._view = view
        self._files = files
        self._made: dict[int, tuple[Extent, int]] = {}
        self._wanted, self._were_all_made = 0, True
        view.store.share_listeners.append(self._withhold)

    def wanted(self) -> None:
        """Keep spares, or more of them if there are none left: files are being created."""
        if self._were_all_made and not self._loop.spares:
            more = max(2 * self._wanted, limits.SPARE_DRAFTS_AT_ONCE)
            descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = min(self._view.store.space.most_spares, descriptors // limits.DESCRIPTORS_PER_SPARE_DRAFT)
            self._wanted, self._were_all_made = min(more, most), False

    def refill(self) -> bool:
        """Make spares that are missing, as far as there is room without eviction; return whether some still are."""
        try:
            for _ in range(limits.SPARE_DRAFTS_AT_ONCE):
                if not self._is_short():
                    break
                self._add()
        except (KvfsError, OSError) as error:
            log.debug("no spare draft is made: %s", error)
            return False
        self._were_all_made |= len(self._made) >= self._wanted
        return self._is_short()

    def _is_short(self) -> bool:
        # Not `loop.spares`: one that it has used is charged to nobody before `adopt`, and a creator on another
        # processor uses each as soon as it is there.
        return len(self._made) < self._wanted and not self._view.store.space.is_share_near

    def _add(self) -> None:
        store, nodes = self._view.store, self._view.nodes
        nodeid = nodes.allot()
        try:
            extent = store.prepare()
        except KvfsError:
            nodes.free(nodeid)
            raise
        ino = store.names.next_ids(1)
        self._made[nodeid] = extent, ino
        self._loop.node_draft(nodeid, ino, extent.slot, extent.generation, mode=stat.S_IFREG, uid=0, gid=0)
        descriptor = -1
        try:
            descriptor = store.dram.open_draft(extent)
            self._loop.spare_add(nodeid, self._files.allot(changes=True), descriptor)
        except (KvfsError, OSError):
            self._loop.node_drop(nodeid)
            self._drop(nodeid)
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def adopt(self, call: Call) -> None:
        """Add the open file of a CREATE that the loop answered with a spare."""
        extent, ino = self._made.pop(call.other)
        view = self._view
        node = view.drafts.adopt(
            call.other,
            view.nodes.get(call.nodeid),
            call.name,
            extent,
            mode=stat.S_IMODE(call.mode),
            uid=call.uid,
            gid=call.gid,
            ino=ino,
        )
        self._files.adopt(node, call.offset, pid=call.pid)
        view.touch(view.nodes.get(call.nodeid), call.when_ns)

    def _withhold(self, is_share_near: bool) -> None:
        """Withdraw the spares at the loop while some uid has almost its share of the slots."""
        while is_share_near and (nodeid := self._loop.spare_take()):
            self._drop(nodeid)

    def close(self) -> None:
        """Abort all spares, when the loop has stopped."""
        self._view.store.share_listeners.remove(self._withhold)
        while self._loop.spare_take():
            pass
        for nodeid in list(self._made):  # also spares whose CREATE was never handled here
            self._drop(nodeid)

    def _drop(self, nodeid: int) -> None:
        extent, _ = self._made.pop(nodeid)
        self._view.store.dram.abort(extent)
        self._view.nodes.free(nodeid)
