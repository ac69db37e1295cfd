"""How bytes reach the kernel in each mode of the mount: one set of methods, two implementations.

Responsibility: attach open handles to slots. `FuseLoop` (native) does it by passthrough, or answers READ and WRITE
without the interpreter. `PlainBackings` keeps descriptors that Python reads and writes, where pyfuse3 owns the mount
alone.

Concurrency: the service's trio thread, except for what `FuseLoop` does in its own threads.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pyfuse3

from kvfs._native.fuse.loop import FuseLoop
from kvfs.errors import Superseded


class PlainBackings:
    """Descriptors by node, for `read` and `write` in Python. Inode numbers are the nodeids here."""

    lists_names = False

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, int]] = {}
        self._killed: dict[int, bool] = {}

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Ignore what only a native loop uses."""

    node_directory = node_draft = node_sealed = node_offloaded = _ignore
    node_settles = node_locks = node_dead = _ignore
    link = unlink = mark_unresolved = clear_unresolved = know_names = _ignore
    listing_open = listing_close = listing_fill = _ignore
    expect = relay_opens = _ignore

    def touch(self, nodeid: int, when_ns: int) -> bool:
        """Return True: the kernel may always have other times of a directory."""
        return True

    def is_free(self, parent: int, name: bytes) -> bool:
        """Return False: no directory's names are known."""
        return False

    def node_drop(self, nodeid: int) -> int:
        """Drop what is known of a node; return 0, as no lookup is answered natively."""
        self._killed.pop(nodeid, None)
        return 0

    def acquire(self, nodeid: int, fd: int) -> int:
        """Count an open handle; the first one makes a duplicate of `fd` the backing. Return the count."""
        held, count = self._open.get(nodeid, (-1, 0))
        self._open[nodeid] = (held if count else os.dup(fd), count + 1)
        return count + 1

    def release(self, nodeid: int) -> int:
        """Count a handle closed, the last of which closes the backing; return the count."""
        held = self.descriptor(nodeid)
        count = self.opens(nodeid) - 1
        if count == 0:
            del self._open[nodeid]
            os.close(held)
        else:
            self._open[nodeid] = (held, count)
        return count

    def opens(self, nodeid: int) -> int:
        """Return how many handles of a node are open."""
        return self._open.get(nodeid, (-1, 0))[1]

    def descriptor(self, nodeid: int) -> int:
        """Return the open descriptor of a node. Raises Superseded."""
        held, count = self._open.get(nodeid, (-1, 0))
        if count == 0:
            raise Superseded(f"the backing of node {nodeid} is not open")
        return held

    def flushed(self, nodeid: int) -> bool:
        """Return whether a descriptor of the node was closed: its RELEASE may be under way."""
        return nodeid in self._killed

    def note_flush(self, nodeid: int, killed: bool) -> None:
        """Note a FLUSH of the node, and whether it came from a process that is dying by a signal."""
        self._killed[nodeid] = killed

    def killed(self, nodeid: int) -> bool:
        """Return whether the last FLUSH of the node came from a process that is dying by a signal."""
        return self._killed.get(nodeid, False)

    def drain_opens(self) -> list[tuple[int, int, int]]:
        """Return an empty list: no open is answered natively."""
        return []

    def drain_misses(self) -> int:
        """Return 0: no lookup is answered natively."""
        return 0

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Make the kernel look `name` up again; never waits."""
        pyfuse3.invalidate_entry_async(pyfuse3.InodeT(parent), pyfuse3.FileNameT(name), ignore_enoent=True)

    def invalidate_attr(self, nodeid: int) -> None:
        """Make the kernel ask for the node's attributes again."""
        with suppress(OSError):  # the kernel may not know it any more
            pyfuse3.invalidate_inode(pyfuse3.InodeT(nodeid), attr_only=True)

    def close(self) -> None:
        """Close all backings."""
        for held, _ in self._open.values():
            os.close(held)
        self._open.clear()


Backings = FuseLoop | PlainBackings
