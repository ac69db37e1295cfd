"""What the mount answers to the kernel: names and lifecycle, on trio through pyfuse3.

Responsibility: translate FUSE requests into steps of the store, the node table and the drafts. Bytes and
opens of sealed objects are answered natively before they come here (kvfs._native.fuse.loop); what comes
here is names, drafts, attributes, listings, and everything in the mode without the native loop.

Invariants: errors become the errno of `kvfs.errors`; nothing but FUSEError ever reaches pyfuse3, so no request can end
the mount. Lookup counts have one owner: the node table.

Concurrency: the service's trio thread. A handler is one step, and then may wait for the log before it answers.
`open` awaits before: it promotes a sealed object, or copies a large one that is opened for writing in a thread, and
checks afterwards that nothing has moved. Reads and writes of a file without a slot wait for the device.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Sequence

import pyfuse3
import trio

from kvfs import limits
from kvfs.errors import InvalidRequest, NotPermitted, Superseded
from kvfs.system.latencies import Latencies
from mounts.kernel import attributes as attrs
from mounts.kernel.errnos import answers_errno
from mounts.kernel.nodes import Node
from mounts.tree import name_ops, readdir
from mounts.tree.handles import OpenFiles
from mounts.tree.opener import FileOpener
from mounts.tree.readdir import FIRST_BARE, Entry, Listing, Named
from mounts.tree.set_attributes import AttributeChanges, set_attributes, set_extended
from mounts.tree.view import View
from tiers.model.objects import Directory


class Operations(pyfuse3.Operations):
    """The handlers; see the module's header."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, view: View, files: OpenFiles, opener: FileOpener, latencies: Latencies) -> None:
        super().__init__()
        self.view = view
        self.calls = view.calls
        self.files = files
        self.opener = opener
        self.latencies = latencies
        self.up = trio.Event()
        """Set when the kernel's first request has come."""

    def init(self) -> None:
        self.up.set()

    # --- attributes ---------------------------------------------------------------------------------------

    @answers_errno
    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self.view.directory(parent_inode)
        node = await self.opener.look_again(parent, name, pid=ctx.pid)
        if node is None:
            asked = self.view.fetches.ask(parent, name, uid=ctx.uid, gid=ctx.gid, pid=ctx.pid)
            if asked is not None:
                await asked.wait()
                node = await self.opener.look_again(self.view.directory(parent_inode), name, pid=ctx.pid)
        if node is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        entry = self.view.attributes(node)
        node.lookups += 1
        return entry

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        for nodeid, lookups in inode_list:
            node = self.view.nodes.find(nodeid)
            if node is not None:
                self.view.nodes.drop_lookups(node, lookups)

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
        changes = AttributeChanges.from_request(attr, fields)
        node, by_path = self.view.nodes.get(inode), fh is None
        return await set_attributes(
            self.view, self.opener, node, changes, by_path=by_path, uid=ctx.uid, pid=ctx.pid
        )

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
        async with self.view.store.journal.settling():
            node = name_ops.make_directory(
                self.view,
                self.view.directory(parent_inode),
                name,
                mode=stat.S_IMODE(mode),
                uid=ctx.uid,
                gid=ctx.gid,
            )
            node.lookups += 1
            return self.view.attributes(node)

    @answers_errno
    async def rmdir(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        async with self.view.store.journal.settling():
            name_ops.remove_directory(self.view, self.view.directory(parent_inode), name)

    @answers_errno
    async def unlink(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        async with self.view.store.journal.settling():
            name_ops.remove_file(self.view, self.view.directory(parent_inode), name)

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
        unsettled = name_ops.draft_to_settle(self.view, above, name_old, below)
        if unsettled is not None and unsettled.draft is not None:
            await self.view.drafts.persistence.persist(unsettled, unsettled.draft)
        async with self.view.store.journal.settling():
            name_ops.rename(self.view, above, name_old, below, name_new, flags)
        self.view.drafts.persistence.retire_settled()

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
            raise NotPermitted("only regular files, directories and symbolic links exist here")
        parent = self.view.directory(parent_inode)
        node = self.opener.create(parent, name, os.O_EXCL, stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid)
        node.lookups += 1
        assert node.draft is not None
        await self.view.drafts.persistence.settle_change(node, opened := node.draft)
        self.view.drafts.publisher.end_writing(node, opened)
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
        async with self.view.store.journal.settling():
            node = name_ops.make_link(
                self.view, self.view.directory(parent_inode), name, target, uid=ctx.uid, gid=ctx.gid
            )
            node.lookups += 1
            return self.view.attributes(node)

    @answers_errno
    async def readlink(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileNameT:
        """Read where a link leads, which never changes for one node: the kernel remembers it."""
        target = self.view.nodes.get(inode).target
        if not target:
            raise InvalidRequest(f"node {inode} is no symbolic link")
        return pyfuse3.FileNameT(target)

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
            node = self.opener.create(parent, name, flags, stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid)
        except Superseded:
            node, number = await self.opener.open_existing(
                parent, name, flags, stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid, pid=ctx.pid
            )
        else:
            number = self.opener.open_new(node, flags, pid=ctx.pid)
        node.lookups += 1
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(number)), self.view.attributes(node)

    @answers_errno
    async def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        number, sealed = await self.opener.open(self.view.nodes.get(inode), flags, uid=ctx.uid, pid=ctx.pid)
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
        """Settle names, which are in the index already when the call that makes them returns."""
        await self.view.store.journal.settle_names()

    # --- directories --------------------------------------------------------------------------------------

    @answers_errno
    async def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        return pyfuse3.FileHandleT(self.view.listings.open(self.view.directory(inode)))

    @answers_errno
    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """List the entries that come with attributes, and all of them where the loop has too many calls.

        Otherwise the loop calls for the names behind them (mounts.upcalls).
        """
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
                found = readdir.turn(self.view.store, self.view.nodes, listing, room)
                if not found or not all(self._list(listing, token, tail, what) for tail, what in found):
                    return
                room -= len(found)
                await trio.lowlevel.checkpoint()
                self.calls.catch_up()

    def _list(self, listing: Listing, token: pyfuse3.ReaddirToken, tail: bytes, found: Entry) -> bool:
        """Add one name to the answer; return False where that has no room."""
        component = tail.removesuffix(b"/")
        node: Node | None = None
        if isinstance(found, Named):
            entry = attrs.of_name(found.ino, directory=found.directory)
        elif isinstance(found, Node):
            node, entry = found, self.view.attributes(found)
        else:
            node = self.view.node_of(listing.node, component, found)
            entry = (
                attrs.of_directory(node, found)
                if isinstance(found, Directory)
                else attrs.of_object(node, found)
            )
        has_room = pyfuse3.readdir_reply(token, pyfuse3.FileNameT(component), entry, listing.offset + 1)
        if node is not None and has_room:
            node.lookups += 1
        elif node is not None:
            self.view.nodes.release(node)
        if has_room:
            listing.step(tail)
        return bool(has_room)

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
        await set_extended(self.view, self.view.nodes.get(inode), name, value, uid=ctx.uid)

    @answers_errno
    async def removexattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        self.view.xattrs.get(self.view.nodes.get(inode), name)
        raise NotPermitted("the attributes of kvfs are not removed; set user.kvfs.pin to 0")
