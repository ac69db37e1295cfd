"""Open files that Python answers for: drafts, and sealed objects where no native loop does.

Responsibility: the handle table; close, sync, and in the plain mode read and write. Files are opened by
`mounts.tree.opener`.

Concurrency: the service's trio thread. Reads, writes and syncs of files without a slot wait for the device.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from kvfs._native.fuse.loop import died_by_signal
from kvfs.errors import Superseded
from mounts.kernel.backing import PlainBackings
from mounts.kernel.nodes import Node
from mounts.kernel.open_draft import OpenDraft
from mounts.tree.view import View
from tiers.nvme.large_objects import LargeReader

NATIVE_HANDLE = 1 << 63
"""Marks a handle that the native loop opened on a sealed file; the rest is its nodeid (kvfs/_native/fuse)."""


@dataclass(slots=True)
class Handle:
    """One open file; `opened` is None for a sealed object. `pid` opened it."""

    node: Node
    opened: OpenDraft | None
    writable: bool
    pid: int
    reader: LargeReader | None = None
    """The lease of a sealed object that DRAM cannot take."""


class OpenFiles:
    """All handles that Python opened, whose numbers are odd where they write the file, or made it: the native loop
    checks that."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._handles: dict[int, Handle] = {}
        self._next_handle = 0

    def add(self, handle: Handle, *, made: bool = False) -> int:
        """Add a handle, and return its number; `made`: its opener made the file."""
        number = self.allot(changes=handle.writable or made)
        self._handles[number] = handle
        return number

    def allot(self, *, changes: bool) -> int:
        """Allot the number of a handle; `changes`: the handle writes the file, or made it."""
        self._next_handle += 1
        return self._next_handle << 1 | changes

    def adopt(self, node: Node, number: int, *, pid: int) -> None:
        """Add a handle on a draft that the native loop opened."""
        self._handles[number] = Handle(node, node.draft, writable=True, pid=pid)

    async def read(self, number: int, offset: int, size: int) -> bytes:
        """Read a file without a slot, and in the plain mode any. Raises Superseded for one with passthrough: the kernel
        asks for it where posix_fadvise(2) reads ahead, into a cache that nobody reads."""
        handle = self._handles.get(number)
        if handle is None:
            raise Superseded(f"handle {number} was opened natively")
        source = handle.reader or (handle.opened.large if handle.opened is not None else None)
        if source is not None:
            return await source.read(offset, size)
        return os.pread(self._descriptor(number), size, offset)

    async def write(self, number: int, offset: int, data: bytes) -> int:
        """Write a file without a slot, and in the plain mode any.

        Raises OSError: EFBIG past the largest object; ENOSPC.
        """
        handle = self._handles[number]
        opened, drafts = handle.opened, self._view.drafts
        if opened is not None and opened.large is not None:
            count = await opened.large.write(offset, data)
            if handle.node.draft is opened:
                drafts.display.show_draft(handle.node, opened)
            return count
        if offset + len(data) > drafts.contents.largest_bytes:
            raise OSError(errno.EFBIG, "over the largest object")
        return os.pwrite(self._descriptor(number), data, offset)

    def _descriptor(self, number: int) -> int:
        backings = self._view.backings
        if not isinstance(backings, PlainBackings):
            raise Superseded("reads and writes are answered natively in this mode")
        return backings.descriptor(self._handles[number].node.nodeid)

    def flush(self, number: int) -> None:
        """Note whether a writer was killed, in the plain mode; `handle_flush` does that in the native loop."""
        handle, backings = self._handles[number], self._view.backings
        if handle.writable and isinstance(backings, PlainBackings):
            backings.note_flush(handle.node.nodeid, died_by_signal(handle.pid))

    async def persist(self, number: int) -> None:
        """Make the bytes that a handle's file holds now durable (fsync(2)). Raises NoSpace, DeviceFailed."""
        if number & NATIVE_HANDLE:
            await self._persist_sealed(self._view.nodes.get(number & ~NATIVE_HANDLE))
            return
        handle = self._handles[number]
        if handle.opened is None or handle.node.draft is not handle.opened:
            await self._persist_sealed(handle.node)
        else:
            await self._view.drafts.persistence.persist(handle.node, handle.opened)

    async def _persist_sealed(self, node: Node) -> None:
        if node.info is not None and node.linked:
            await self._view.store.journal.persist(node.info.object_id)

    async def settle_close(self, number: int) -> None:
        """Settle the close(2) of a process that wrote or made a file, unless it dies by a signal."""
        handle = self._handles[number]
        opened = handle.opened
        if not number & 1 or opened is None or opened.torn:
            return
        if self._view.backings.killed(handle.node.nodeid):
            return  # the bytes are half of something: what was durable before stays so
        await self._view.drafts.persistence.settle_change(handle.node, opened)

    def release(self, number: int) -> None:
        """End a handle; the last one of a draft publishes it."""
        handle = self._handles.pop(number)
        if handle.reader is not None:
            handle.reader.close()
            handle.node.handles -= 1
            self._view.drafts.end_cached(handle.node)
        elif handle.opened is not None:
            self._view.drafts.close(handle.node, handle.opened, writable=handle.writable)
        else:
            self.release_backing(handle.node)
        self._view.nodes.release(handle.node)

    def release_flushed(self) -> None:
        """Release the handles that were closed, where an unmount swallowed what the kernel had to say of their end."""
        for number, handle in list(self._handles.items()):
            if handle.opened is not None and self._view.backings.flushed(handle.node.nodeid):
                self.release(number)

    def release_backing(self, node: Node) -> None:
        """Count the end of a handle on a node's backing."""
        self._view.backings.release(node.nodeid)
        node.handles -= 1
        self._view.nodes.release(node)
