"""Drafts made ahead of need, which the native loop gives to CREATEs that it answers by itself.

Responsibility: keep a few of them at the loop while files are being created, turn those that were given away
into open files, and give the rest back at the end.

Invariants: a spare has a slot, a nodeid, a file id and a handle, and no bytes; it counts as a slot in use and as
nobody's draft; who is given it is charged for it as for any draft, once this thread hears of it. They are at most
SPARE_DRAFTS and one slot in SLOTS_PER_SPARE_DRAFT, and there are none while they could lead a uid past its share of the
slots: creations are calls then, and refused there.

Concurrency: the service's trio thread; the loop's thread takes spares at any time.
"""

from __future__ import annotations

import logging
import os
import stat

from kvfs._native.fuse_loop import Call, FuseLoop
from kvfs.errors import KvfsError
from mounts.files import OpenFiles
from mounts.view import View
from tiers.base import Extent

log = logging.getLogger("kvfs.mount")


class SpareDrafts:
    """The spares of one mount; see the module's header."""

    def __init__(self, loop: FuseLoop, view: View, files: OpenFiles) -> None:
        self._loop = loop
        self._view = view
        self._files = files
        self._made: dict[int, tuple[Extent, int]] = {}
        self._wanted = 0
        view.store.share_listeners.append(self._withhold)

    def wanted(self) -> None:
        """Files are being created: keep spares from now on."""
        self._wanted = self._view.store.space.most_spares

    def refill(self) -> None:
        """Make the spares that are missing, as far as there is room without eviction."""
        try:
            while self._loop.spares < self._wanted and not self._view.store.space.is_share_near:
                self._add()
        except (KvfsError, OSError) as error:
            log.debug("no spare draft is made: %s", error)

    def _add(self) -> None:
        store, nodes = self._view.store, self._view.nodes
        nodeid = nodes.allot()
        try:
            extent = store.prepare()
        except KvfsError:
            nodes.give_back(nodeid)
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
        """A spare was given to a CREATE: from now on it is an open file like any other."""
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

    def _withhold(self, near: bool) -> None:
        """Take back what is at the loop while some uid is near to its share of the slots."""
        while near and (nodeid := self._loop.spare_take()):
            self._drop(nodeid)

    def close(self) -> None:
        """Give all spares back, when the loop has stopped."""
        self._view.store.share_listeners.remove(self._withhold)
        while self._loop.spare_take():
            pass
        for nodeid in list(self._made):  # also what was given away and never heard of
            self._drop(nodeid)

    def _drop(self, nodeid: int) -> None:
        extent, _ = self._made.pop(nodeid)
        self._view.store.dram.abort(extent)
        self._view.nodes.give_back(nodeid)
