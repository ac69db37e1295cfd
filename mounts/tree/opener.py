"""How files are opened: made, read, rewritten, and opened again after a race.

Responsibility: which node and which bytes an open gets. Instead of a sealed object the draft that takes its place is
opened for writing; where a name leads elsewhere by now, the kernel looks it up again, and the thread gets the file that
it finds then (`mounts.kernel.stale_retries`).

Concurrency: the service's trio thread. `open` of a large sealed object for writing awaits a copy in a thread
(mounts.drafts.keeper), and of one that DRAM has not, its load; everything else runs to its end at once.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import partial

import pyfuse3

from kvfs.errors import (
    Busy,
    Exists,
    IsDirectory,
    IsLink,
    KvfsError,
    NoSpace,
    NotPermitted,
    Superseded,
    TextBusy,
)
from mounts.kernel.nodes import Node
from mounts.kernel.open_draft import OpenDraft
from mounts.kernel.privileges import after_truncation
from mounts.kernel.stale_retries import StaleRetry
from mounts.tree.handles import Handle, OpenFiles
from mounts.tree.view import View
from tiers.model.objects import ObjectInfo
from tiers.nvme.large_objects import LargeReader

REWRITE_ATTEMPTS = 16
"""Attempts to take a name that others replace meanwhile."""


class Elsewhere(Superseded):
    """The draft that takes a sealed object's place has another node."""

    def __init__(self, what: str, found: Node | None = None) -> None:
        super().__init__(what)
        self.found = found


@dataclass(eq=False)
class FileOpener:
    """Opens the files of one mount."""

    _view: View
    _files: OpenFiles

    def create(self, parent: Node, component: bytes, flags: int, mode: int, *, uid: int, gid: int) -> Node:
        """Make a draft. Raises Exists; Superseded when another door has made the name meanwhile."""
        view = self._view
        name = view.place(parent, component)
        known = view.find(parent, component)
        if known is not None and known.directory:
            raise IsDirectory(f"{name} is a directory")
        if known is not None and flags & os.O_EXCL:
            raise Exists(f"{name} exists")
        if known is not None and (known.draft is not None or known.target or not flags & os.O_TRUNC):
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
        """Open what `create` made, and return the handle's number; abort the draft when that fails."""
        assert node.draft is not None
        try:
            return self._open_draft(node, node.draft, flags, pid, made=True)
        except (KvfsError, OSError):
            self._view.drafts.publisher.abort(node)
            raise
        finally:
            self._view.retries.end(pid)

    async def open(self, node: Node, flags: int, *, uid: int, pid: int) -> tuple[int, bool]:
        """Open a file, and return the handle's number and whether its bytes are sealed.

        Instead of a sealed object the draft that takes its place is opened for writing. Raises Superseded where that
        draft, or what took the name, has another node: the kernel looks the name up again, and the thread gets the file
        that it finds then.
        """
        retry = self._retry_of(flags, pid)
        try:
            if retry is None:
                opened = await self._open_current(node, flags, uid, pid)
            elif retry.node is node:
                opened = await self._open_kept(node, retry, flags, uid, pid)
            elif retry.stale_id == node.nodeid and not retry.looked_up:
                opened = self._open_itself(node, flags, pid)
            else:
                opened = await self._open_current(node, flags, uid, pid)
        except Superseded as error:
            self.expect_retry(node, flags, error, uid=uid, pid=pid)
            raise
        except BaseException:
            self._view.retries.end(pid)
            raise
        self._view.retries.end(pid)
        return opened

    async def _open_current(self, node: Node, flags: int, uid: int, pid: int) -> tuple[int, bool]:
        drafts = self._view.drafts
        empties = bool(flags & os.O_TRUNC)
        if node.draft is None or drafts.publisher.publish_if_closed(node, node.draft):
            if not _writes(flags) and not empties:
                return await self._open_sealed(node, uid, pid), True
            await self.begin_rewrite_of(node, uid=uid, pid=pid, keep_bytes=not empties)
        assert node.draft is not None
        return await self._open_written(node, node.draft, flags, uid, pid)

    async def _open_written(
        self, node: Node, opened: OpenDraft, flags: int, uid: int, pid: int
    ) -> tuple[int, bool]:
        """Open a draft, after emptying it for O_TRUNC."""
        drafts = self._view.drafts
        opened.awaited.add(pid)
        try:
            if flags & os.O_TRUNC:
                await drafts.truncate(node, opened, 0)
                opened.mode = after_truncation(opened.mode, opened.gid, uid=uid, pid=pid)
                drafts.display.show_draft(node, opened)
            return self._open_draft(node, opened, flags, pid), False
        finally:
            drafts.end_wait(node, opened, pid)

    async def _open_sealed(self, node: Node, uid: int, pid: int) -> int:
        reader = await self._hold(node, uid)
        if reader is not None:
            return self._open_large(node, reader, pid)
        return self._files.add(Handle(node, None, writable=False, pid=pid))

    async def _hold(self, node: Node, uid: int) -> LargeReader | None:
        """Make the sealed bytes the node's backing, in DRAM until `OpenFiles.release_backing`, or return a reader."""
        info = _sealed_info(node)
        if node.cached_handles or self._view.store.is_large(info):
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

    def _open_large(self, node: Node, reader: LargeReader, pid: int) -> int:
        node.handles += 1
        node.cached_handles += 1
        return self._files.add(Handle(node, None, writable=False, pid=pid, reader=reader))

    async def begin_rewrite_of(self, node: Node, *, uid: int, pid: int, keep_bytes: bool) -> None:
        """Begin a rewrite of this very node. Raises Elsewhere where another node has the draft."""
        found = await self.begin_rewrite(node, uid=uid, pid=pid, keep_bytes=keep_bytes)
        if found is not node:
            raise Elsewhere(f"node {node.nodeid} was replaced by node {found.nodeid}", found)

    async def begin_rewrite(self, node: Node, *, uid: int, pid: int, keep_bytes: bool) -> Node:
        """Make the name of this node lead to a draft, which awaits the thread, and return the draft's node.

        Raises Superseded when the name is gone, or others replace it faster than a draft is made.
        """
        view = self._view
        for _ in range(REWRITE_ATTEMPTS):
            parent = node.parent
            current = view.find(parent, node.component) if parent is not None and parent.linked else None
            if current is None:
                break
            opened = current.draft
            if opened is not None and not view.drafts.publisher.publish_if_closed(current, opened):
                opened.awaited.add(pid)
                return current
            if current.info is None or current.target:
                break
            if current.info.name is None:
                raise NotPermitted("a block is immutable")
            made = await view.drafts.rewrite(
                current, current.info, uid=uid, keep_bytes=keep_bytes, thread=pid
            )
            if made is not None:
                return made
        raise Superseded(f"node {node.nodeid} was replaced")

    # --- after a race -----------------------------------------------------------------------

    def _retry_of(self, flags: int, pid: int) -> StaleRetry | None:
        """Return the retry that this open belongs to; end one of other flags."""
        retry = self._view.retries.get(pid)
        empties = bool(flags & os.O_TRUNC)
        if retry is not None and (retry.writes, retry.empties) != (_writes(flags) or empties, empties):
            self._view.retries.end(pid)
            return None
        return retry

    def expect_retry(
        self, node: Node | None, flags: int, error: Superseded | None = None, *, uid: int, pid: int
    ) -> None:
        """Expect the thread to look the name up again; the file that it finds then is kept until it opens it."""
        empties = bool(flags & os.O_TRUNC)
        retry = StaleRetry(0 if node is None else node.nodeid, _writes(flags) or empties, empties, uid)
        if isinstance(error, Elsewhere) and error.found is not None and error.found.draft is not None:
            self._keep(retry, error.found, error.found.draft, pid)
        self._view.retries.begin(pid, retry)

    def _keep(self, retry: StaleRetry, node: Node, opened: OpenDraft, pid: int) -> None:
        opened.awaited.add(pid)
        retry.keep(node, partial(self._view.drafts.end_wait, node, opened, pid))

    async def open_existing(
        self, parent: Node, component: bytes, flags: int, mode: int, *, uid: int, gid: int, pid: int
    ) -> tuple[Node, int]:
        """Open, for CREATE, a name that was made since the kernel looked; return the node and its handle.

        The kernel has not checked the right to open it. So it looks again first (Superseded); a thread that comes back
        gets a file that it did not see before where the file's mode allows it. A name that is free by now is made.
        """
        view = self._view
        retry = self._retry_of(flags, pid)
        node = view.find(parent, component)
        if node is not None and (retry is None or not _may_open(view.attributes(node), flags, uid, gid)):
            self.expect_retry(None, flags, uid=uid, pid=pid)
            raise Superseded(f"{component.decode(errors='replace')} has come into being: open it")
        if node is not None:
            node = await self.look_again(parent, component, pid=pid)
        if node is None:
            node = self.create(parent, component, flags, mode, uid=uid, gid=gid)
            return node, self.open_new(node, flags, pid=pid)
        number, _ = await self.open(node, flags, uid=uid, pid=pid)
        return node, number

    async def look_again(self, parent: Node, component: bytes, *, pid: int) -> Node | None:
        """Find a node, and keep it for the thread if that is expected back, whatever becomes of its name.

        Where the name leads elsewhere before its node is kept, that one is kept instead.
        """
        view = self._view
        for _ in range(REWRITE_ATTEMPTS):
            retry, node = view.retries.get(pid), view.find(parent, component)
            if retry is None or node is None or node.directory or node.target:
                return node
            retry.looked_up = True
            if retry.node is node:
                return node
            try:
                return await (self._keep_draft if retry.writes else self._keep_bytes)(node, retry, pid)
            except Superseded:
                continue
            except (KvfsError, OSError):
                break
        return view.find(parent, component)  # its open meets the same and says so

    async def _keep_draft(self, node: Node, retry: StaleRetry, pid: int) -> Node:
        found = await self.begin_rewrite(node, uid=retry.uid, pid=pid, keep_bytes=True)
        if found.draft is not None:
            self._keep(retry, found, found.draft, pid)
        return found

    async def _keep_bytes(self, node: Node, retry: StaleRetry, pid: int) -> Node:
        drafts, opened = self._view.drafts, node.draft
        if opened is not None and not drafts.publisher.publish_if_closed(node, opened):
            self._keep(retry, node, opened, pid)
            return node
        reader = await self._hold(node, retry.uid)
        if reader is None:
            retry.keep(node, partial(self._files.release_backing, node))
        else:
            retry.keep(node, retry.close_reader, reader)
        return node

    async def _open_kept(
        self, node: Node, retry: StaleRetry, flags: int, uid: int, pid: int
    ) -> tuple[int, bool]:
        """Open the node that was kept for the thread, also where it has no name any more."""
        if node.draft is not None:
            return await self._open_written(node, node.draft, flags, uid, pid)
        if retry.writes:
            return await self._open_current(node, flags, uid, pid)
        reader = retry.take_reader()
        if reader is not None:
            return self._open_large(node, reader, pid), True
        return self._open_again(node, pid), True

    def _open_again(self, node: Node, pid: int) -> int:
        """Open one more handle on a backing that is open."""
        self._view.backings.acquire(node.nodeid, -1)
        node.handles += 1
        return self._files.add(Handle(node, None, writable=False, pid=pid))

    def _open_itself(self, node: Node, flags: int, pid: int) -> tuple[int, bool]:
        """Open a node without a name, to which a path leads without a look-up (/proc/self/fd)."""
        if self._view.backings.opens(node.nodeid) == 0:
            raise Superseded(f"node {node.nodeid} was replaced, and nobody has it open")
        if _writes(flags) or flags & os.O_TRUNC:
            raise TextBusy("the descriptor leads to sealed bytes, which are not written: open the name")
        return self._open_again(node, pid), True

    def _open_draft(self, node: Node, opened: OpenDraft, flags: int, pid: int, *, made: bool = False) -> int:
        self._view.drafts.open(node, opened, writable=_writes(flags))
        return self._files.add(Handle(node, opened, writable=_writes(flags), pid=pid), made=made)


def _sealed_info(node: Node) -> ObjectInfo:
    """Return the object that the node shows. Raises Superseded, IsLink."""
    if node.target:
        raise IsLink(f"node {node.nodeid} is a symbolic link")
    if node.info is None or not node.linked:
        raise Superseded(f"node {node.nodeid} was replaced")
    return node.info


def _may_open(found: pyfuse3.EntryAttributes, flags: int, uid: int, gid: int) -> bool:
    """Return whether a file's mode allows an open; a caller's other groups are not known here."""
    shift = 6 if uid == found.st_uid else 3 if gid == found.st_gid else 0
    wanted = {os.O_RDONLY: 4, os.O_WRONLY: 2, os.O_RDWR: 6}.get(flags & os.O_ACCMODE, 6)
    wanted |= 2 if flags & os.O_TRUNC else 0
    return uid == 0 or found.st_mode >> shift & wanted == wanted


def without_group_right(mode: int, uid: int, gid: int, heir_gid: int) -> int:
    """Drop setgid of a program whose maker is not of the group; the maker's other groups are not known here."""
    is_program = mode & (stat.S_ISGID | stat.S_IXGRP) == stat.S_ISGID | stat.S_IXGRP
    return mode & ~stat.S_ISGID if is_program and uid != 0 and gid != heir_gid else mode


def _writes(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_RDONLY
