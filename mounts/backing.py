"""How bytes reach the kernel in each mode of the mount: one interface, two implementations.

Responsibility: attach open handles to slots. `FuseLoop` (native) is one implementation: passthrough, or
READ and WRITE answered without the interpreter. `PlainBackings` is the other: descriptors that Python
reads and writes, where pyfuse3 owns the mount alone.

Concurrency: the service's trio thread, except for what `FuseLoop` does in its own threads.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Protocol

import pyfuse3

from kvfs.errors import Superseded


class Backings(Protocol):
    """What the operations need of either implementation; see `kvfs._native.fuse_loop.FuseLoop`."""

    @property
    def lists_names(self) -> bool:
        """Whether listings may go on without attributes."""
        ...

    def listing_open(self, fh: int, start: int) -> None: ...
    def listing_close(self, fh: int) -> None: ...
    def listing_fill(self, fh: int, first: int, names: list[tuple[bytes, int]], ended: bool) -> None: ...

    def node_directory(
        self, nodeid: int, ino: int, *, mode: int, uid: int, gid: int, mtime_ns: int, ctime_ns: int = 0
    ) -> None: ...
    def touch(self, nodeid: int, when_ns: int) -> bool: ...
    def node_draft(
        self, nodeid: int, ino: int, slot: int, generation: int, *, mode: int, uid: int, gid: int
    ) -> None: ...
    def node_sealed(
        self,
        nodeid: int,
        ino: int,
        slot: int,
        generation: int,
        *,
        size_bytes: int,
        mode: int,
        uid: int,
        gid: int,
        mtime_ns: int,
        ctime_ns: int,
    ) -> None: ...
    def node_away(
        self,
        nodeid: int,
        ino: int,
        *,
        size_bytes: int,
        mode: int,
        uid: int,
        gid: int,
        mtime_ns: int,
        ctime_ns: int,
    ) -> None: ...

    def node_settles(self, nodeid: int, settles: bool) -> None: ...

    def node_privileged(self, nodeid: int, mtime_ns: int) -> None: ...
    def node_locks(self, nodeid: int, key: int) -> None: ...
    def node_dead(self, nodeid: int) -> None: ...
    def node_drop(self, nodeid: int) -> int: ...
    def link(self, parent: int, name: bytes, nodeid: int) -> None: ...
    def unlink(self, parent: int, name: bytes, nodeid: int) -> None: ...
    def doubt(self, parent: int, name: bytes, nodeid: int) -> None: ...
    def undoubt(self, parent: int, name: bytes) -> None: ...
    def know_names(self, nodeid: int, room: int, names: bytes) -> None: ...
    def acquire(self, nodeid: int, fd: int) -> int: ...
    def release(self, nodeid: int) -> int: ...
    def opens(self, nodeid: int) -> int: ...
    def expect(self, thread: int, expected: bool) -> None: ...
    def killed(self, nodeid: int) -> bool: ...
    def flushed(self, nodeid: int) -> bool: ...
    def relay_opens(self, relay: bool) -> None: ...
    def drain_opens(self) -> list[tuple[int, int, int]]: ...
    def drain_misses(self) -> int: ...
    def invalidate_entry(self, parent: int, name: bytes) -> None: ...
    def invalidate_attr(self, nodeid: int) -> None: ...
    def stats(self) -> dict[str, int]: ...


class PlainBackings:
    """Descriptors by node, for `read` and `write` in Python. Inode numbers are the nodeids here."""

    lists_names = False

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, int]] = {}
        self._killed: dict[int, bool] = {}

    def listing_open(self, fh: int, start: int) -> None:
        pass

    def listing_close(self, fh: int) -> None:
        pass

    def listing_fill(self, fh: int, first: int, names: list[tuple[bytes, int]], ended: bool) -> None:
        pass

    def node_directory(self, nodeid: int, ino: int, **_: int) -> None:
        pass

    def touch(self, nodeid: int, when_ns: int) -> bool:
        return True

    def node_draft(self, nodeid: int, ino: int, slot: int, generation: int, **_: int) -> None:
        pass

    def node_sealed(self, nodeid: int, ino: int, slot: int, generation: int, **_: int) -> None:
        pass

    def node_away(self, nodeid: int, ino: int, **_: int) -> None:
        pass

    def node_settles(self, nodeid: int, settles: bool) -> None:
        pass

    def node_privileged(self, nodeid: int, mtime_ns: int) -> None:
        pass

    def node_locks(self, nodeid: int, key: int) -> None:
        pass

    def node_dead(self, nodeid: int) -> None:
        pass

    def node_drop(self, nodeid: int) -> int:
        self._killed.pop(nodeid, None)
        return 0

    def link(self, parent: int, name: bytes, nodeid: int) -> None:
        pass

    def unlink(self, parent: int, name: bytes, nodeid: int) -> None:
        pass

    def doubt(self, parent: int, name: bytes, nodeid: int) -> None:
        pass

    def undoubt(self, parent: int, name: bytes) -> None:
        pass

    def know_names(self, nodeid: int, room: int, names: bytes) -> None:
        pass

    def acquire(self, nodeid: int, fd: int) -> int:
        held, count = self._open.get(nodeid, (-1, 0))
        self._open[nodeid] = (held if count else os.dup(fd), count + 1)
        return count + 1

    def release(self, nodeid: int) -> int:
        held, count = self._open.get(nodeid, (-1, 0))
        if count == 0:
            raise Superseded(f"the backing of node {nodeid} is not open")
        if count == 1:
            del self._open[nodeid]
            os.close(held)
        else:
            self._open[nodeid] = (held, count - 1)
        return count - 1

    def opens(self, nodeid: int) -> int:
        return self._open.get(nodeid, (-1, 0))[1]

    def expect(self, thread: int, expected: bool) -> None:
        pass

    def descriptor(self, nodeid: int) -> int:
        """The open descriptor of a node. Raises Superseded."""
        held, count = self._open.get(nodeid, (-1, 0))
        if count == 0:
            raise Superseded(f"the backing of node {nodeid} is not open")
        return held

    def flushed(self, nodeid: int) -> bool:
        return nodeid in self._killed

    def note_flush(self, nodeid: int, killed: bool) -> None:
        self._killed[nodeid] = killed

    def killed(self, nodeid: int) -> bool:
        return self._killed.get(nodeid, False)

    def relay_opens(self, relay: bool) -> None:
        pass

    def drain_opens(self) -> list[tuple[int, int, int]]:
        return []

    def drain_misses(self) -> int:
        return 0

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        pyfuse3.invalidate_entry_async(pyfuse3.InodeT(parent), pyfuse3.FileNameT(name), ignore_enoent=True)

    def invalidate_attr(self, nodeid: int) -> None:
        with suppress(OSError):  # the kernel may not know it any more
            pyfuse3.invalidate_inode(pyfuse3.InodeT(nodeid), attr_only=True)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        for held, _ in self._open.values():
            os.close(held)
        self._open.clear()
