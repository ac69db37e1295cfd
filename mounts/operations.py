"""What the mount answers to the kernel: names and lifecycle, on trio through pyfuse3.

Responsibility: translate FUSE requests into steps of the store, the node table and the drafts. Bytes and
opens of sealed objects are answered natively before they come here (kvfs._native.fuse_loop); what comes
here is names, drafts, attributes, listings, and everything in the mode without the native loop.

Invariants: errors leave as the errno of `kvfs.errors`; nothing but FUSEError ever reaches pyfuse3, so no
request can end the mount. Lookup counts have one owner: the node table.

Concurrency: the service's trio thread. A handler is one step, and then may wait for the log before it answers.
`open` awaits before: it brings a sealed object up into DRAM, or copies a large one that is opened for writing in a
thread, and checks afterwards that nothing has moved. Reads and writes of what has no slot wait for the device.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import pyfuse3
import trio

from kvfs import limits
from kvfs.errors import (
    NotFound,
    NotPermitted,
    Superseded,
)
from mounts import attributes as attrs
from mounts import listings, names
from mounts.answers import answers_errno
from mounts.files import OpenFiles
from mounts.listings import FIRST_BARE, Listing
from mounts.nodes import Node
from mounts.view import View
from mounts.xattrs import LARGE_NAME
from tiers.model import Directory, ObjectInfo


class Operations(pyfuse3.Operations):
    """The handlers; see the module's header."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, view: View, files: OpenFiles) -> None:
        super().__init__()
        self.view = view
        self.files = files
        self.up = trio.Event()
        """The kernel's first request has come through."""

    def init(self) -> None:
        self.up.set()

    # --- attributes ---------------------------------------------------------------------------------------

    @answers_errno
    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        node = await self.files.look_again(self.view.directory(parent_inode), name, pid=ctx.pid)
        if node is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        entry = self.view.attributes(node)
        node.lookups += 1
        return entry

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        for nodeid, lookups in inode_list:
            node = self.view.nodes.find(nodeid)
            if node is not None:
                self.view.nodes.forget(node, lookups)

    @answers_errno
    async def getattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self.view.attributes(self.view.nodes.get(inode))

    @answers_errno
    async def setattr(
        self,
        inode: pyfuse3.InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: pyfuse3.FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = self.view.nodes.get(inode)
        mode = stat.S_IMODE(attr.st_mode) if fields.update_mode else None
        uid = attr.st_uid if fields.update_uid else None
        gid = attr.st_gid if fields.update_gid else None
        mtime_ns = attr.st_mtime_ns if fields.update_mtime else None
        if mode is None and (uid is not None or gid is not None) and not node.directory:
            owned = stat.S_IMODE(self.view.attributes(node).st_mode)
            mode = attrs.without_privileges(owned) if owned & (stat.S_ISUID | stat.S_ISGID) else None
        if fields.update_size and node.info is not None and attr.st_size != node.info.size_bytes:
            await self._open_size(node, keep_bytes=attr.st_size > 0, uid=ctx.uid, pid=ctx.pid)
        if node.draft is not None:
            opened = node.draft
            if fields.update_size:
                opened.awaited.add(ctx.pid)
                try:
                    await self.view.drafts.truncate(node, opened, attr.st_size)
                finally:
                    self.view.promises.end(ctx.pid)
                    self.view.drafts.come_back(node, opened, ctx.pid)
            if fields.update_mtime or fields.update_atime:
                self.view.drafts.set_times(
                    opened, attr.st_atime_ns if fields.update_atime else None, mtime_ns
                )
            if mode is not None:
                opened.mode = mode
                self.view.drafts.keep_privileges(opened)
            opened.uid = opened.uid if uid is None else uid
            opened.gid = opened.gid if gid is None else gid
            opened.ctime_ns = time.time_ns()
            self.view.drafts.show_draft(node, opened)
            try:
                if fields.update_size and fh is None:
                    await self.view.drafts.settle_change(node, opened)
                elif opened.writers == 0 and self.view.drafts.is_settled(opened):
                    self.view.drafts.rename_snapshot(node)
                    await self.view.store.journal.settle()
            finally:
                if node.draft is opened and opened.handles == 0:
                    self.view.drafts.settle(node, opened)
            return self.view.attributes(node)
        if node.parent is None:
            raise NotPermitted("the mount's root has the attributes that its configuration gives it")
        entry = self.view.set_sealed(node, mode, uid, gid, mtime_ns)
        await self.view.store.journal.settle()
        return entry

    async def _open_size(self, node: Node, *, keep_bytes: bool, uid: int, pid: int) -> None:
        """A draft in the place of a sealed file whose size is to change. Raises Superseded."""
        try:
            await self.files.begin_rewrite_of(node, uid=uid, pid=pid, keep_bytes=keep_bytes)
        except Superseded as error:
            flags = os.O_WRONLY | (0 if keep_bytes else os.O_TRUNC)
            self.files.promise(node, flags, error, uid=uid, pid=pid)
            raise

    @answers_errno
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        usage = self.view.store.dram.usage()
        capacity_bytes, used_bytes = self.view.store.capacity()
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = attrs.BLOCK_BYTES
        found.f_blocks = capacity_bytes // attrs.BLOCK_BYTES
        found.f_bfree = found.f_bavail = max(capacity_bytes - used_bytes, 0) // attrs.BLOCK_BYTES
        found.f_files = usage.max_slots
        found.f_ffree = found.f_favail = usage.max_slots - usage.slots
        found.f_namemax = limits.MAX_COMPONENT_BYTES
        return found

    # --- names --------------------------------------------------------------------------------------------

    @answers_errno
    async def mkdir(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = names.make_directory(
            self.view,
            self.view.directory(parent_inode),
            name,
            mode=stat.S_IMODE(mode),
            uid=ctx.uid,
            gid=ctx.gid,
        )
        node.lookups += 1
        entry = self.view.attributes(node)
        await self.view.store.journal.settle()
        return entry

    @answers_errno
    async def rmdir(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        names.remove_directory(self.view, self.view.directory(parent_inode), name)
        await self.view.store.journal.settle()

    @answers_errno
    async def unlink(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        names.remove_file(self.view, self.view.directory(parent_inode), name)
        await self.view.store.journal.settle()

    @answers_errno
    async def rename(
        self,
        parent_inode_old: pyfuse3.InodeT,
        name_old: pyfuse3.FileNameT,
        parent_inode_new: pyfuse3.InodeT,
        name_new: pyfuse3.FileNameT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        above, below = self.view.directory(parent_inode_old), self.view.directory(parent_inode_new)
        unsettled = names.draft_to_settle(self.view, above, name_old, below)
        if unsettled is not None and unsettled.draft is not None:
            await self.view.drafts.persist(unsettled, unsettled.draft)
        names.rename(self.view, above, name_old, below, name_new, flags)
        await self.view.store.journal.settle()
        self.view.drafts.retire_settled()

    @answers_errno
    async def mknod(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        rdev: int,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if not stat.S_ISREG(mode):
            raise NotPermitted("only regular files and directories exist here")
        parent = self.view.directory(parent_inode)
        node = self.files.create(parent, name, os.O_EXCL, stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid)
        node.lookups += 1
        assert node.draft is not None
        await self.view.drafts.settle_change(node, opened := node.draft)
        self.view.drafts.settle(node, opened)
        return self.view.attributes(node)

    @answers_errno
    async def link(
        self,
        inode: pyfuse3.InodeT,
        new_parent_inode: pyfuse3.InodeT,
        new_name: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        raise NotPermitted("hard links do not exist here: one name, one object")

    @answers_errno
    async def symlink(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        target: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        raise NotPermitted("symbolic links do not exist here")

    # --- files --------------------------------------------------------------------------------------------

    @answers_errno
    async def create(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        parent = self.view.directory(parent_inode)
        try:
            node = self.files.create(parent, name, flags, stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid)
        except Superseded:
            node, number = await self.files.open_existing(
                parent, name, flags, uid=ctx.uid, gid=ctx.gid, pid=ctx.pid
            )
        else:
            number = self.files.open_new(node, flags, pid=ctx.pid)
        node.lookups += 1
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(number)), self.view.attributes(node)

    @answers_errno
    async def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        number, sealed = await self.files.open(self.view.nodes.get(inode), flags, uid=ctx.uid, pid=ctx.pid)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(number), keep_cache=sealed)

    @answers_errno
    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        return await self.files.read(fh, off, size)

    @answers_errno
    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        return await self.files.write(fh, off, buf)

    @answers_errno
    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        self.files.flush(fh)
        await self.files.settle_close(fh)

    @answers_errno
    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        self.files.release(fh)

    @answers_errno
    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        await self.files.persist(fh)

    @answers_errno
    async def fsyncdir(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        """Names are in the index when the call that made them returns; on the device, when this does."""
        await self.view.store.journal.settle_names()

    # --- directories --------------------------------------------------------------------------------------

    @answers_errno
    async def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        return pyfuse3.FileHandleT(self.view.listings.open(self.view.directory(inode)))

    @answers_errno
    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """What comes with attributes; the rest the loop calls for (mounts.calls), unless it has too many calls."""
        listing, room = self.view.listings.get(fh), sys.maxsize
        if self.view.backings.lists_names:
            if start_id < FIRST_BARE:
                room = FIRST_BARE - start_id
            else:
                self.view.backings.listing_fill(fh, start_id, [], False)
        async with listing.walking:
            if not listing.begin_answer(start_id):
                await self.view.listings.skip(listing, start_id)
            while listing.node.linked and room > 0:
                found = listings.turn(self.view.store, self.view.nodes, listing, room)
                if not found or not all(self._list(listing, token, tail, what) for tail, what in found):
                    return
                room -= len(found)
                await trio.lowlevel.checkpoint()
                self.view.catch_up()

    def _list(
        self, listing: Listing, token: pyfuse3.ReaddirToken, tail: bytes, found: listings.Found
    ) -> bool:
        """Put one name into the answer; False where it has no room."""
        component = tail.removesuffix(b"/")
        node: Node | None = None
        if isinstance(found, listings.Named):
            entry = attrs.of_name(found.ino, directory=found.directory)
        elif isinstance(found, Node):
            node, entry = found, self.view.attributes(found)
        else:
            node = self.view.node_of(listing.node, component, found)
            entry = self._listed(node, found)
        has_room = pyfuse3.readdir_reply(token, pyfuse3.FileNameT(component), entry, listing.offset + 1)
        if node is not None and has_room:
            node.lookups += 1
        elif node is not None:
            self.view.nodes.release(node)
        if has_room:
            listing.step(tail)
        return bool(has_room)

    @staticmethod
    def _listed(node: Node, found: ObjectInfo | Directory) -> pyfuse3.EntryAttributes:
        return (
            attrs.of_object(node, found) if isinstance(found, ObjectInfo) else attrs.of_directory(node, found)
        )

    @answers_errno
    async def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        self.view.listings.close(fh)

    # --- extended attributes ------------------------------------------------------------------------------

    @answers_errno
    async def getxattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext
    ) -> bytes:
        self.view.drain_opens()
        return self.view.xattrs.get(self.view.nodes.get(inode), name)

    @answers_errno
    async def listxattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> Sequence[pyfuse3.XAttrNameT]:
        return [pyfuse3.XAttrNameT(name) for name in self.view.xattrs.list(self.view.nodes.get(inode))]

    @answers_errno
    async def setxattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        node = self.view.nodes.get(inode)
        # The kernel asks for the right to write only; pinning and binding take ownership, as at other doors.
        if ctx.uid not in (0, os.geteuid(), self.view.attributes(node).st_uid):
            raise NotPermitted(
                f"uid {ctx.uid} does not own what it would change {name.decode(errors='replace')} of"
            )
        self.view.xattrs.set(node, name, value)
        if node.directory and name == LARGE_NAME:
            self.view.unknow_names(node)  # files are made there by Python, from here on
        self.view.drafts.rename_snapshot(node)
        await self.view.store.journal.settle()
        if node.info is not None and node.linked:
            with suppress(NotFound):  # it was removed meanwhile, at another door
                found = self.view.store.lookup(self.view.nodes.name(node))
                if isinstance(found, ObjectInfo):
                    self.view.nodes.set_object(node, found)

    @answers_errno
    async def removexattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        self.view.xattrs.get(self.view.nodes.get(inode), name)
        raise NotPermitted("the attributes of kvfs are not removed; set user.kvfs.pin to 0")
