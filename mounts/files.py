"""Open files that Python answers for: drafts, and sealed objects where no native loop does.

Responsibility: the handle table; create, open, close, and in the plain mode read and write.

Concurrency: the service's trio thread. `open` of a large sealed object for writing awaits a copy in a thread
(mounts.drafts); everything else runs to its end at once.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from kvfs._native.fuse_loop import died_by_signal
from kvfs.errors import Busy, Exists, IsDirectory, KvfsError, NoSpace, NotPermitted, Superseded
from mounts.backing import PlainBackings
from mounts.drafts import stale
from mounts.large import large_of
from mounts.nodes import Node, OpenDraft
from mounts.view import View
from tiers.large import LargeReader
from tiers.model import ObjectInfo


@dataclass(slots=True)
class Handle:
    """One open file; `opened` is None for a sealed object. `pid` opened it."""

    node: Node
    opened: OpenDraft | None
    writable: bool
    pid: int
    reader: LargeReader | None = None
    """Of a sealed object that DRAM cannot take."""


NATIVE_HANDLE = 1 << 63
"""A handle that the native loop gave out for a sealed file; the rest is its nodeid (fuse_loop_answers.c)."""


class OpenFiles:
    """All handles that Python gave out. Their numbers are odd where they write the file, or made it: the native loop
    looks."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._handles: dict[int, Handle] = {}
        self._next_handle = 0

    def create(self, parent: Node, component: bytes, flags: int, mode: int, *, uid: int, gid: int) -> Node:
        """A new draft. Raises Exists; Superseded when another door has made the name meanwhile."""
        view = self._view
        name = view.place(parent, component)
        known = view.find(parent, component)
        if known is not None and known.directory:
            raise IsDirectory(f"{name} is a directory")
        if known is not None and flags & os.O_EXCL:
            raise Exists(f"{name} exists")
        if known is not None and (known.draft is not None or not flags & os.O_TRUNC):
            raise Superseded(f"{name} has come into being: open it")
        if known is not None:
            view.backings.node_dead(known.nodeid)
        return view.drafts.create(parent, component, mode=mode, uid=uid, gid=gid)

    def open_new(self, node: Node, flags: int, *, pid: int) -> int:
        """Open what `create` made: the handle's number. When that fails, nothing is left of it."""
        assert node.draft is not None
        try:
            return self._open_draft(node, node.draft, flags, pid, made=True)
        except (KvfsError, OSError):
            self._view.drafts.discard(node)
            raise

    async def open(self, node: Node, flags: int, *, uid: int, pid: int) -> tuple[int, bool]:
        """Open a draft, or a sealed object for reading: the handle's number, and whether its bytes are sealed.

        A sealed object is not opened for writing: ESTALE leads the kernel to the draft that takes its place.
        """
        drafts = self._view.drafts
        opened = node.draft
        if opened is not None and not drafts.publish_if_closed(node, opened):
            if flags & os.O_TRUNC:
                await drafts.truncate(node, opened, 0)
            return self._open_draft(node, opened, flags, pid), False
        if _writes(flags) or flags & os.O_TRUNC:
            await self._rewrite(node, flags, uid)
            raise stale()
        info = _sealed_info(node)
        if self._view.store.is_large(info):
            return self._open_large(node, info, pid), True
        if info.extent is None:
            try:
                await self._view.store.load(info, uid=uid)
            except NoSpace:
                if self._view.store.journal.holds(info.object_id):
                    return self._open_large(node, _sealed_info(node), pid), True
                raise Busy(f"{info.name}: DRAM has no room to read it now") from None
            info = _sealed_info(node)
        descriptor = self._view.store.open_read(info, uid=uid)
        try:
            self._view.backings.acquire(node.nodeid, descriptor)
        finally:
            os.close(descriptor)
        node.handles += 1
        return self._handle(Handle(node, None, writable=False, pid=pid)), True

    def _open_large(self, node: Node, info: ObjectInfo, pid: int) -> int:
        """Read in place, where DRAM takes no slot for it."""
        reader = self._view.store.open_large(info)
        node.handles += 1
        return self._handle(Handle(node, None, writable=False, pid=pid, reader=reader))

    async def _rewrite(self, node: Node, flags: int, uid: int) -> None:
        """Put a draft in the place of what the node's name leads to now: the kernel asks only once more."""
        view, parent = self._view, node.parent
        current = view.find(parent, node.component) if parent is not None and parent.linked else None
        if current is None or current.info is None:
            return
        if current.info.name is None:
            raise NotPermitted("a block is immutable")
        await view.drafts.rewrite(current, current.info, uid=uid, keep_bytes=not flags & os.O_TRUNC)

    def _open_draft(self, node: Node, opened: OpenDraft, flags: int, pid: int, *, made: bool = False) -> int:
        self._view.drafts.open(node, opened, writable=_writes(flags))
        return self._handle(Handle(node, opened, writable=_writes(flags), pid=pid), made=made)

    def _handle(self, handle: Handle, *, made: bool = False) -> int:
        number = self.allot(changes=handle.writable or made)
        self._handles[number] = handle
        return number

    def allot(self, *, changes: bool) -> int:
        """A number for a handle to come; `changes`: it writes the file, or made it."""
        self._next_handle += 1
        return self._next_handle << 1 | changes

    def adopt(self, node: Node, number: int, *, pid: int) -> None:
        """A handle on a draft that the native loop gave out."""
        self._handles[number] = Handle(node, node.draft, writable=True, pid=pid)

    async def read(self, number: int, offset: int, size: int) -> bytes:
        """What has no slot, and in the plain mode everything."""
        handle = self._handles[number]
        source = handle.reader or large_of(handle.opened)
        if source is not None:
            return await source.read(offset, size)
        return os.pread(self._descriptor(number), size, offset)

    async def write(self, number: int, offset: int, data: bytes) -> int:
        """As `read`. Raises OSError, ObjectTooLarge: EFBIG past the largest object; ENOSPC."""
        handle = self._handles[number]
        large = large_of(handle.opened)
        if large is not None and handle.opened is not None:
            count = await large.write(offset, data)
            if handle.node.draft is handle.opened:
                self._view.drafts.show_draft(handle.node, handle.opened)
            return count
        if offset + len(data) > self._view.drafts.largest_bytes:
            raise OSError(errno.EFBIG, "over the largest object")
        return os.pwrite(self._descriptor(number), data, offset)

    def _descriptor(self, number: int) -> int:
        backings = self._view.backings
        if not isinstance(backings, PlainBackings):
            raise Superseded("reads and writes are answered natively in this mode")
        return backings.descriptor(self._handles[number].node.nodeid)

    def flush(self, number: int) -> None:
        """close() in the plain mode, as `handle_flush` of the native loop: remember a writer that was killed."""
        handle, backings = self._handles[number], self._view.backings
        if handle.writable and isinstance(backings, PlainBackings):
            backings.note_flush(handle.node.nodeid, died_by_signal(handle.pid))

    async def persist(self, number: int) -> None:
        """fsync(2): what the handle's file holds now is durable when this returns. Raises NoSpace, DeviceFailed."""
        if number & NATIVE_HANDLE:
            await self._persist_sealed(self._view.nodes.get(number & ~NATIVE_HANDLE))
            return
        handle = self._handles[number]
        if handle.opened is None or handle.node.draft is not handle.opened:
            await self._persist_sealed(handle.node)
        else:
            await self._view.drafts.persist(handle.node, handle.opened)

    async def _persist_sealed(self, node: Node) -> None:
        if node.info is not None and node.linked:
            await self._view.store.journal.persist(node.info.object_id)

    async def settle_close(self, number: int) -> None:
        """close(2) of whoever wrote or made a file: see `DraftKeeper.settle_change`."""
        handle, drafts = self._handles[number], self._view.drafts
        opened = handle.opened
        if not number & 1 or opened is None or opened.torn:
            return
        if self._view.backings.killed(handle.node.nodeid):
            return
        await drafts.settle_change(handle.node, opened)

    def release(self, number: int) -> None:
        handle = self._handles.pop(number)
        if handle.reader is not None:
            handle.reader.close()
            handle.node.handles -= 1
        elif handle.opened is not None:
            self._view.drafts.close(handle.node, handle.opened, writable=handle.writable)
        else:
            self._view.backings.release(handle.node.nodeid)
            handle.node.handles -= 1
        self._view.nodes.release(handle.node)


def _sealed_info(node: Node) -> ObjectInfo:
    """The object that the node shows. Raises Superseded."""
    if node.info is None or not node.linked:
        raise Superseded(f"node {node.nodeid} was replaced")
    return node.info


def _writes(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_RDONLY
