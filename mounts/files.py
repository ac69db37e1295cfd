"""Open files that Python answers for: drafts, and sealed objects where no native loop does.

Responsibility: the handle table; create, open, close, and in the plain mode read and write.

Concurrency: the service's trio thread. `open` of a large sealed object for writing awaits a copy in a thread
(mounts.drafts); everything else runs to its end at once.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from functools import partial

import pyfuse3

from kvfs._native.fuse_loop import died_by_signal
from kvfs.errors import (
    Busy,
    Exists,
    IsDirectory,
    KvfsError,
    NoSpace,
    NotPermitted,
    Superseded,
    TextBusy,
)
from mounts.backing import PlainBackings
from mounts.large import large_of
from mounts.nodes import Node, OpenDraft
from mounts.promises import Promise
from mounts.view import View
from tiers.large import LargeReader
from tiers.model import ObjectInfo


class Elsewhere(Superseded):
    """The draft that takes a sealed object's place has another node."""

    def __init__(self, what: str, found: Node | None = None) -> None:
        super().__init__(what)
        self.found = found


@dataclass(slots=True)
class Handle:
    """One open file; `opened` is None for a sealed object. `pid` opened it."""

    node: Node
    opened: OpenDraft | None
    writable: bool
    pid: int
    reader: LargeReader | None = None
    """Of a sealed object that DRAM cannot take."""


REWRITE_ATTEMPTS = 16
"""Opens for writing of a name that is replaced meanwhile: only the copy of a large object takes so long."""
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
        if parent.heir_gid >= 0:
            mode = without_group_right(mode, uid, gid, parent.heir_gid)
            gid = parent.heir_gid
        node = view.drafts.create(parent, component, mode=mode, uid=uid, gid=gid)
        view.touch(parent)
        return node

    def open_new(self, node: Node, flags: int, *, pid: int) -> int:
        """Open what `create` made: the handle's number. When that fails, nothing is left of it."""
        assert node.draft is not None
        try:
            return self._open_draft(node, node.draft, flags, pid, made=True)
        except (KvfsError, OSError):
            self._view.drafts.discard(node)
            raise
        finally:
            self._view.promises.end(pid)

    async def open(self, node: Node, flags: int, *, uid: int, pid: int) -> tuple[int, bool]:
        """Open a draft, or a sealed object for reading: the handle's number, and whether its bytes are sealed.

        A sealed object is not opened for writing, but the draft that takes its place. Superseded where that, or what
        took the name, is another node: the kernel looks the name up again, and the thread has what it finds then.
        """
        promise = self._promise_for(flags, pid)
        try:
            if promise is None:
                opened = await self._open_current(node, flags, uid, pid)
            elif promise.node is node:
                opened = await self._open_kept(node, promise, flags, uid, pid)
            elif promise.told_of == node.nodeid and not promise.looked:
                opened = self._open_itself(node, flags, pid)
            else:
                opened = await self._open_current(node, flags, uid, pid)
        except Superseded as error:
            self.promise(node, flags, error, uid=uid, pid=pid)
            raise
        except BaseException:
            self._view.promises.end(pid)
            raise
        self._view.promises.end(pid)
        return opened

    async def _open_current(self, node: Node, flags: int, uid: int, pid: int) -> tuple[int, bool]:
        drafts = self._view.drafts
        empties = bool(flags & os.O_TRUNC)
        if node.draft is None or drafts.publish_if_closed(node, node.draft):
            if not _writes(flags) and not empties:
                return await self._open_sealed(node, uid, pid), True
            await self.begin_rewrite_of(node, uid=uid, pid=pid, keep_bytes=not empties)
        assert node.draft is not None
        return await self._open_written(node, node.draft, flags, pid)

    async def _open_written(self, node: Node, opened: OpenDraft, flags: int, pid: int) -> tuple[int, bool]:
        """Open a draft, empty it where that is asked for."""
        opened.awaited.add(pid)
        try:
            if flags & os.O_TRUNC:
                await self._view.drafts.truncate(node, opened, 0)
            return self._open_draft(node, opened, flags, pid), False
        finally:
            self._view.drafts.come_back(node, opened, pid)

    async def _open_sealed(self, node: Node, uid: int, pid: int) -> int:
        reader = await self._hold(node, uid)
        if reader is not None:
            return self._open_large(node, reader, pid)
        return self._handle(Handle(node, None, writable=False, pid=pid))

    async def _hold(self, node: Node, uid: int) -> LargeReader | None:
        """Make the sealed bytes the node's backing, in DRAM; `_let_go` ends it. A reader where DRAM has no room."""
        info = _sealed_info(node)
        if self._view.store.is_large(info):
            return self._view.store.open_large(info)
        if info.extent is None:
            try:
                await self._view.store.load(info, uid=uid)
            except NoSpace:
                if self._view.store.journal.holds(info.object_id):
                    return self._view.store.open_large(_sealed_info(node))
                raise Busy(f"{info.name}: DRAM has no room to read it now") from None
            info = _sealed_info(node)
        descriptor = self._view.store.open_read(info, uid=uid)
        try:
            self._view.backings.acquire(node.nodeid, descriptor)
        finally:
            os.close(descriptor)
        node.handles += 1
        return None

    def _let_go(self, node: Node) -> None:
        self._view.backings.release(node.nodeid)
        node.handles -= 1
        self._view.nodes.release(node)

    def _open_large(self, node: Node, reader: LargeReader, pid: int) -> int:
        node.handles += 1
        return self._handle(Handle(node, None, writable=False, pid=pid, reader=reader))

    async def begin_rewrite_of(self, node: Node, *, uid: int, pid: int, keep_bytes: bool) -> None:
        """As `begin_rewrite`. Raises Elsewhere where another node has the draft."""
        found = await self.begin_rewrite(node, uid=uid, pid=pid, keep_bytes=keep_bytes)
        if found is not node:
            raise Elsewhere(f"node {node.nodeid} was replaced by node {found.nodeid}", found)

    async def begin_rewrite(self, node: Node, *, uid: int, pid: int, keep_bytes: bool) -> Node:
        """Have the name that led to this node lead to a draft, which awaits the thread: the node that has it.

        Raises Superseded when the name is gone, or others replace it faster than a draft is made.
        """
        view = self._view
        for _ in range(REWRITE_ATTEMPTS):
            parent = node.parent
            current = view.find(parent, node.component) if parent is not None and parent.linked else None
            if current is None:
                break
            opened = current.draft
            if opened is not None and not view.drafts.publish_if_closed(current, opened):
                opened.awaited.add(pid)
                return current
            if current.info is None:
                break
            if current.info.name is None:
                raise NotPermitted("a block is immutable")
            made = await view.drafts.rewrite(
                current, current.info, uid=uid, keep_bytes=keep_bytes, thread=pid
            )
            if made is not None:
                return made
        raise Superseded(f"node {node.nodeid} was replaced")

    # --- after a race that was lost -----------------------------------------------------------------------

    def _promise_for(self, flags: int, pid: int) -> Promise | None:
        """What the thread was promised for this open; what it was for another one ends."""
        promise = self._view.promises.of(pid)
        empties = bool(flags & os.O_TRUNC)
        if promise is not None and (promise.writes, promise.empties) != (_writes(flags) or empties, empties):
            self._view.promises.end(pid)
            return None
        return promise

    def promise(
        self, node: Node | None, flags: int, error: Superseded | None = None, *, uid: int, pid: int
    ) -> None:
        """The thread is told to look again: what it finds then is kept until it opens it."""
        empties = bool(flags & os.O_TRUNC)
        promise = Promise(0 if node is None else node.nodeid, _writes(flags) or empties, empties, uid)
        if isinstance(error, Elsewhere) and error.found is not None and error.found.draft is not None:
            self._keep(promise, error.found, error.found.draft, pid)
        self._view.promises.make(pid, promise)

    def _keep(self, promise: Promise, node: Node, opened: OpenDraft, pid: int) -> None:
        opened.awaited.add(pid)
        promise.keep(node, partial(self._view.drafts.come_back, node, opened, pid))

    async def open_existing(
        self, parent: Node, component: bytes, flags: int, *, uid: int, gid: int, pid: int
    ) -> tuple[Node, int]:
        """CREATE of a name that has come into being since the kernel looked: the node and its handle.

        The kernel has not asked for the right to open it. So it looks again first (Superseded); who comes back and
        finds a file that was not there when he looked has it where its mode says so.
        """
        view = self._view
        promise = self._promise_for(flags, pid)
        node = view.find(parent, component)
        if promise is None or node is None or not _may_open(view.attributes(node), flags, uid, gid):
            self.promise(None, flags, uid=uid, pid=pid)
            raise Superseded(f"{component.decode(errors='replace')} has come into being: open it")
        node = await self.look_again(parent, component, pid=pid) or node
        number, _ = await self.open(node, flags, uid=uid, pid=pid)
        return node, number

    async def look_again(self, parent: Node, component: bytes, *, pid: int) -> Node | None:
        """`View.find` for a thread that has a promise: the node is kept for it, whatever becomes of its name."""
        view, promise = self._view, self._view.promises.of(pid)
        node = view.find(parent, component)
        if promise is None or node is None or node.directory:
            return node
        promise.looked = True
        if promise.node is node:
            return node
        try:
            if promise.writes:
                node = await self._keep_draft(node, promise, pid)
            else:
                await self._keep_bytes(node, promise, pid)
        except (KvfsError, OSError):
            return view.find(parent, component)  # its open meets the same and says so
        return node

    async def _keep_draft(self, node: Node, promise: Promise, pid: int) -> Node:
        found = await self.begin_rewrite(node, uid=promise.uid, pid=pid, keep_bytes=True)
        if found.draft is not None:
            self._keep(promise, found, found.draft, pid)
        return found

    async def _keep_bytes(self, node: Node, promise: Promise, pid: int) -> None:
        drafts, opened = self._view.drafts, node.draft
        if opened is not None and not drafts.publish_if_closed(node, opened):
            self._keep(promise, node, opened, pid)
            return
        reader = await self._hold(node, promise.uid)
        promise.keep(node, partial(self._let_go, node) if reader is None else promise.close_reader)
        promise.reader = reader

    async def _open_kept(
        self, node: Node, promise: Promise, flags: int, uid: int, pid: int
    ) -> tuple[int, bool]:
        """What the thread found when it looked again, also where it has lost its name since."""
        if node.draft is not None:
            return await self._open_written(node, node.draft, flags, pid)
        if promise.writes:
            return await self._open_current(node, flags, uid, pid)
        reader = promise.take_reader()
        if reader is not None:
            return self._open_large(node, reader, pid), True
        return self._open_again(node, pid), True

    def _open_again(self, node: Node, pid: int) -> int:
        """One more handle on a backing that is open."""
        self._view.backings.acquire(node.nodeid, -1)
        node.handles += 1
        return self._handle(Handle(node, None, writable=False, pid=pid))

    def _open_itself(self, node: Node, flags: int, pid: int) -> tuple[int, bool]:
        """A path that leads to a node without a look-up (/proc/self/fd), to one that has lost its name."""
        if self._view.backings.opens(node.nodeid) == 0:
            raise Superseded(f"node {node.nodeid} was replaced, and nobody has it open")
        if _writes(flags) or flags & os.O_TRUNC:
            raise TextBusy("the descriptor leads to sealed bytes, which are not written: open the name")
        return self._open_again(node, pid), True

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
        """Answer close(2) of whoever wrote or made a file, unless it dies by a signal: `DraftKeeper.settle_change`."""
        handle, drafts = self._handles[number], self._view.drafts
        opened = handle.opened
        if not number & 1 or opened is None or opened.torn:
            return
        if self._view.backings.killed(handle.node.nodeid):
            return  # half of something: what was durable before stays so
        await drafts.settle_change(handle.node, opened)

    def release(self, number: int) -> None:
        handle = self._handles.pop(number)
        if handle.reader is not None:
            handle.reader.close()
            handle.node.handles -= 1
        elif handle.opened is not None:
            self._view.drafts.close(handle.node, handle.opened, writable=handle.writable)
        else:
            self._let_go(handle.node)
        self._view.nodes.release(handle.node)


def _sealed_info(node: Node) -> ObjectInfo:
    """The object that the node shows. Raises Superseded."""
    if node.info is None or not node.linked:
        raise Superseded(f"node {node.nodeid} was replaced")
    return node.info


def _may_open(found: pyfuse3.EntryAttributes, flags: int, uid: int, gid: int) -> bool:
    """Whether the mode allows it; a caller's other groups are not known here."""
    shift = 6 if uid == found.st_uid else 3 if gid == found.st_gid else 0
    wanted = {os.O_RDONLY: 4, os.O_WRONLY: 2, os.O_RDWR: 6}.get(flags & os.O_ACCMODE, 6)
    wanted |= 2 if flags & os.O_TRUNC else 0
    return uid == 0 or found.st_mode >> shift & wanted == wanted


def without_group_right(mode: int, uid: int, gid: int, heir_gid: int) -> int:
    """Nobody makes a setgid program of a group that is not his. His other groups are not known here."""
    is_program = mode & (stat.S_ISGID | stat.S_IXGRP) == stat.S_ISGID | stat.S_IXGRP
    return mode & ~stat.S_ISGID if is_program and uid != 0 and gid != heir_gid else mode


def _writes(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_RDONLY
