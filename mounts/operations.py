"""What the mount answers to the kernel: names and lifecycle, on trio through pyfuse3.

Responsibility: translate FUSE requests into steps of the store, the node table and the drafts. Bytes and
opens of sealed objects are answered natively before they come here (kvfs._native.fuse_loop); what comes
here is names, drafts, attributes, listings, and everything in the mode without the native loop.

Invariants: errors leave as the errno of `kvfs.errors`; nothing but FUSEError ever reaches pyfuse3, so no
request can end the mount. Lookup counts have one owner: the node table.

Concurrency: the service's trio thread. Handlers run to their end without awaiting, except for `open` of a
large sealed object for writing, which copies in a thread and checks afterwards that nothing has moved.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import pyfuse3

from kvfs import limits, paths
from kvfs._native.fuse_loop import died_by_signal
from kvfs.errors import (
    CrossDevice,
    Exists,
    InvalidRequest,
    IsDirectory,
    KvfsError,
    LimitExceeded,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    Superseded,
)
from mounts import attributes as attrs
from mounts import listings
from mounts.backing import Backings, PlainBackings
from mounts.drafts import DraftKeeper, stale
from mounts.listings import Listing
from mounts.nodes import Node, NodeTable, OpenDraft
from mounts.xattrs import ExtendedAttributes
from tiers.model import Attributes, Change, ChangeKind, Directory, Name, ObjectInfo
from tiers.store import TieredStore

log = logging.getLogger("kvfs.mount")

P = ParamSpec("P")
R = TypeVar("R")


def answers_errno(
    method: Callable[Concatenate[Operations, P], Awaitable[R]],
) -> Callable[Concatenate[Operations, P], Awaitable[R]]:
    """Turn what a handler raises into the errno that the caller sees."""

    @functools.wraps(method)
    async def answer(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(self, *args, **kwargs)
        except KvfsError as error:
            log.log(min(error.log_level, logging.INFO), "%s: %s", method.__name__, error)
            raise pyfuse3.FUSEError(error.errno) from None
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
        except pyfuse3.FUSEError:
            raise
        except Exception:
            log.exception("%s failed", method.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return answer


@dataclass(slots=True)
class Handle:
    """An open file of Python's own; `opened` is None for a sealed object."""

    node: Node
    opened: OpenDraft | None
    writable: bool
    pid: int


class Operations(pyfuse3.Operations):
    """The handlers; see the module's header."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, store: TieredStore, backings: Backings, socket: Path | None) -> None:
        super().__init__()
        self.store = store
        self.backings = backings
        self.nodes = NodeTable(backings)
        self.drafts = DraftKeeper(store, self.nodes, backings)
        self.xattrs = ExtendedAttributes(store, self.nodes, socket)
        self._started_ns = time.time_ns()
        self._handles: dict[int, Handle] = {}
        self._listings: dict[int, Listing] = {}
        self._next_handle = 1
        self._own_changes = 0
        root = self.nodes.root
        backings.node_directory(
            root.nodeid,
            root.ino,
            mode=stat.S_IFDIR | attrs.ROOT_MODE,
            uid=os.geteuid(),
            gid=os.getegid(),
            mtime_ns=self._started_ns,
        )

    # --- attributes ---------------------------------------------------------------------------------------

    def _attributes(self, node: Node) -> pyfuse3.EntryAttributes:
        if node.parent is None:
            return attrs.of_root(node, self._started_ns)
        if node.draft is not None:
            return attrs.of_draft(node, node.draft, self.drafts.status(node.draft))
        if node.directory:
            if not node.linked:
                name = Name(node.component, b"")
                return attrs.of_directory(node, Directory(name, node.ino, 0o755, 0, 0, self._started_ns))
            found = self.store.lookup(self.nodes.name(node))
            if not isinstance(found, Directory):
                raise NotDirectory(f"{found.name} is a file now")
            return attrs.of_directory(node, found)
        if node.info is None:
            raise Superseded(f"node {node.nodeid} is gone")
        return attrs.of_object(node, node.info)

    def _node_of(self, parent: Node, component: bytes, found: ObjectInfo | Directory) -> Node:
        """The node that shows `found` under this name: the one known, or a new one."""
        node = self.nodes.child(parent, component)
        if isinstance(found, Directory):
            if node is None or not node.directory:
                node = self._replace(node, parent, component, directory=True, ino=found.ino)
                self._show_directory(node, found)
            return node
        if node is None or node.info is None or node.info.key != found.key:
            node = self._replace(node, parent, component, directory=False, ino=found.ino)
            self.drafts.show_sealed(node, found)
        elif node.info != found:
            self.drafts.show_sealed(node, found)
        self.nodes.set_object(node, found)
        return node

    def _show_directory(self, node: Node, found: Directory) -> None:
        self.backings.node_directory(
            node.nodeid,
            node.ino,
            mode=stat.S_IFDIR | found.mode,
            uid=found.uid,
            gid=found.gid,
            mtime_ns=found.mtime_ns,
        )

    def _replace(
        self, old: Node | None, parent: Node, component: bytes, *, directory: bool, ino: int
    ) -> Node:
        if old is not None:
            self.backings.node_dead(old.nodeid)
        node = self.nodes.add(parent, component, directory=directory, ino=ino)
        if old is not None:
            self.nodes.release(old)
        return node

    def _find(self, parent: Node, component: bytes) -> Node | None:
        """The node of a name, None where there is nothing. Raises NameTooLong."""
        paths.check_component(component)
        known = self.nodes.child(parent, component)
        if known is not None and (known.draft is not None or self._is_current(known)):
            return known
        found = self._find_sealed(parent, component)
        if found is not None:
            return self._node_of(parent, component, found)
        if known is not None:
            self._forget_name(known)
        return None

    def _is_current(self, node: Node) -> bool:
        """Whether a sealed node still shows what the store has: its object is where it was."""
        info = node.info
        if info is None:
            return False
        entry = self.store.table.get(info.key.digest)
        return (
            entry is not None
            and entry.generation == info.extent.generation
            and entry.slot == info.extent.slot
        )

    def _find_sealed(self, parent: Node, component: bytes) -> ObjectInfo | Directory | None:
        if parent.parent is not None:
            return self.store.find_path(self.nodes.child_name(parent, component))
        try:
            return self.store.lookup(Name(component, b""))
        except NotFound:
            return None

    def _need(self, parent: Node, component: bytes) -> Node:
        """The node of a name. Raises NotFound."""
        node = self._find(parent, component)
        if node is None:
            raise NotFound(f"no {component.decode(errors='replace')} there")
        return node

    def _directory(self, nodeid: int) -> Node:
        node = self.nodes.get(nodeid)
        if not node.directory:
            raise NotDirectory(f"node {nodeid} is a file")
        if not node.linked:
            raise NotFound(f"directory {node.component.decode(errors='replace')} was removed")
        return node

    @answers_errno
    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        node = self._find(self._directory(parent_inode), name)
        if node is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        entry = self._attributes(node)
        node.lookups += 1
        return entry

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        for nodeid, lookups in inode_list:
            node = self.nodes.find(nodeid)
            if node is not None:
                self.nodes.forget(node, lookups)

    @answers_errno
    async def getattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._attributes(self.nodes.get(inode))

    @answers_errno
    async def setattr(
        self,
        inode: pyfuse3.InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: pyfuse3.FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = self.nodes.get(inode)
        mode = stat.S_IMODE(attr.st_mode) if fields.update_mode else None
        uid = attr.st_uid if fields.update_uid else None
        gid = attr.st_gid if fields.update_gid else None
        mtime_ns = attr.st_mtime_ns if fields.update_mtime else None
        if node.draft is not None:
            opened = node.draft
            if fields.update_size:
                self.drafts.truncate(opened, attr.st_size)
            if fields.update_mtime or fields.update_atime:
                self.drafts.set_times(opened, attr.st_atime_ns if fields.update_atime else None, mtime_ns)
            opened.mode = opened.mode if mode is None else mode
            opened.uid = opened.uid if uid is None else uid
            opened.gid = opened.gid if gid is None else gid
            opened.ctime_ns = time.time_ns()
            self.drafts.show_draft(node, opened)
            if opened.handles == 0:
                self.drafts.settle(node, opened)
            return self._attributes(node)
        if node.parent is None:
            raise NotPermitted("the mount's root has the attributes that its configuration gives it")
        if fields.update_size and node.info is not None and attr.st_size != node.info.size_bytes:
            await self.drafts.rewrite(node, node.info, uid=ctx.uid, keep_bytes=attr.st_size > 0)
            raise stale()
        return self._set_sealed(node, mode, uid, gid, mtime_ns)

    def _set_sealed(
        self, node: Node, mode: int | None, uid: int | None, gid: int | None, mtime_ns: int | None
    ) -> pyfuse3.EntryAttributes:
        changes = (mode, uid, gid, mtime_ns)
        if node.linked and any(value is not None for value in changes):
            name = self.nodes.name(node)
            if node.directory and name.key:
                self._keep_directory(name)
            with self._own_change():
                found = self.store.set_attributes(name, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
            if isinstance(found, ObjectInfo):
                self.nodes.set_object(node, found)
                self.drafts.show_sealed(node, found)
            else:
                self._show_directory(node, found)
        return self._attributes(node)

    def _keep_directory(self, name: Name) -> None:
        """Give a directory that is only a common prefix a marker of its own."""
        if self.store.names.get(name.bucket, name.key) is None:
            found = self.store.lookup(name)
            self.store.mark_directory(name, Attributes(mode=found.mode, uid=found.uid, gid=found.gid))

    @answers_errno
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        usage = self.store.dram.usage()
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = attrs.BLOCK_BYTES
        found.f_blocks = usage.capacity_bytes // attrs.BLOCK_BYTES
        found.f_bfree = found.f_bavail = max(usage.capacity_bytes - usage.used_bytes, 0) // attrs.BLOCK_BYTES
        found.f_files = usage.max_slots
        found.f_ffree = found.f_favail = usage.max_slots - usage.slots
        found.f_namemax = limits.MAX_COMPONENT_BYTES
        return found

    # --- names --------------------------------------------------------------------------------------------

    def _place(self, parent: Node, component: bytes) -> Name:
        """Where a new file of this name would be. Raises NotPermitted on the root, NameTooLong."""
        paths.check_component(component)
        if parent.parent is None:
            raise NotPermitted("the mount's root holds buckets only: make a directory there, and files in it")
        name = self.nodes.child_name(parent, component)
        paths.check_key(name.key)
        return name

    @answers_errno
    async def mkdir(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        parent = self._directory(parent_inode)
        permissions = stat.S_IMODE(mode)
        if parent.parent is None:
            self.store.create_bucket(name, uid=ctx.uid, gid=ctx.gid, mode=permissions)
        else:
            place = self._place(parent, name)
            known = self.nodes.child(parent, name)
            if known is not None and known.draft is not None:
                raise Exists(f"{place} is being written")
            where = Name(place.bucket, place.key + b"/")
            self.store.make_directory(where, Attributes(mode=permissions, uid=ctx.uid, gid=ctx.gid))
        node = self._need(parent, name)
        node.lookups += 1
        return self._attributes(node)

    @answers_errno
    async def rmdir(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        parent = self._directory(parent_inode)
        node = self._need(parent, name)
        if not node.directory:
            raise NotDirectory(f"{name.decode(errors='replace')} is a file")
        if self.nodes.has_drafts_below(node):
            raise NotEmpty(f"files below {name.decode(errors='replace')} are being written")
        if parent.parent is None:
            self.store.remove_bucket(name)
        else:
            self.store.remove_directory(self.nodes.name(node))
        self._gone(node)

    @answers_errno
    async def unlink(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        parent = self._directory(parent_inode)
        node = self._need(parent, name)
        if node.directory:
            raise IsDirectory(f"{name.decode(errors='replace')} is a directory")
        self._remove_sealed(self.nodes.name(node))
        self._gone(node)

    def _remove_sealed(self, name: Name) -> None:
        """Remove what other doors see under this name, if anything."""
        with self._own_change(), suppress(NotFound):
            self.store.remove(name)

    def _gone(self, node: Node) -> None:
        """The node's name no longer leads to it; a draft that nobody has open goes with it."""
        self.nodes.unlink(node)
        opened = node.draft
        if opened is None:
            self.backings.node_dead(node.nodeid)
        elif opened.handles == 0:
            self.drafts.discard(node)
        self.nodes.release(node)

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
        if flags & pyfuse3.RENAME_EXCHANGE:
            raise InvalidRequest("RENAME_EXCHANGE: two names cannot be exchanged in one step here")
        above, below = self._directory(parent_inode_old), self._directory(parent_inode_new)
        node = self._need(above, name_old)
        if above.parent is None or (below.parent is None and node.directory):
            raise CrossDevice("a bucket is not renamed, and a directory becomes one by copying")
        target = self._place(below, name_new)
        known = self._find(below, name_new)
        if known is node:
            return
        if known is not None:
            self._check_replaceable(node, known, replace=not flags & pyfuse3.RENAME_NOREPLACE)
        source = self.nodes.name(node)
        with self._own_change():
            if node.draft is not None:
                self._remove_sealed(source)
            elif node.directory:
                self.store.rename(source, Name(target.bucket, target.key + b"/"))
            else:
                self.store.rename(source, target)
        if known is not None:
            self._gone(known)
        self.nodes.move(node, below, name_new)
        if node.info is not None:
            found = self.store.lookup(target)
            if isinstance(found, ObjectInfo):
                self.nodes.set_object(node, found)

    def _check_replaceable(self, node: Node, known: Node, *, replace: bool) -> None:
        name = known.component.decode(errors="replace")
        if not replace:
            raise Exists(f"{name} exists")
        if known.directory and not node.directory:
            raise IsDirectory(f"{name} is a directory")
        if node.directory and not known.directory:
            raise NotDirectory(f"{name} is a file")
        if known.directory and self.nodes.has_drafts_below(known):
            raise NotEmpty(f"files below {name} are being written")

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
        parent = self._directory(parent_inode)
        node = self._create(parent, name, os.O_EXCL, stat.S_IMODE(mode), ctx)
        assert node.draft is not None
        self.drafts.settle(node, node.draft)
        node.lookups += 1
        return self._attributes(node)

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

    def _create(
        self, parent: Node, component: bytes, flags: int, mode: int, ctx: pyfuse3.RequestContext
    ) -> Node:
        name = self._place(parent, component)
        known = self._find(parent, component)
        if known is not None and known.directory:
            raise IsDirectory(f"{name} is a directory")
        if known is not None and (flags & os.O_EXCL or known.draft is not None or not flags & os.O_TRUNC):
            if flags & os.O_EXCL:
                raise Exists(f"{name} exists")
            raise Superseded(f"{name} has come into being: open it")
        if self.store.bucket(name.bucket).namespace is not None and name.key.startswith(b"kv/"):
            raise NotPermitted(f"{name}: blocks of a bound bucket are sealed by prefix hash, not by name")
        if known is not None:
            self.backings.node_dead(known.nodeid)
        return self.drafts.create(parent, component, mode=mode, uid=ctx.uid, gid=ctx.gid)

    @answers_errno
    async def create(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        mode: pyfuse3.ModeT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        node = self._create(self._directory(parent_inode), name, flags, stat.S_IMODE(mode), ctx)
        assert node.draft is not None
        try:
            info = self._open_draft(node, node.draft, flags, ctx)
        except (KvfsError, OSError):
            self.drafts.discard(node)
            raise
        node.lookups += 1
        return info, attrs.of_draft(node, node.draft, None)

    @answers_errno
    async def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        node = self.nodes.get(inode)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if node.draft is not None and not self.drafts.publish_if_closed(node, node.draft):
            if flags & os.O_TRUNC:
                self.drafts.truncate(node.draft, 0)
            return self._open_draft(node, node.draft, flags, ctx)
        if node.info is None or not node.linked:
            raise Superseded(f"node {inode} was replaced")
        if writes or flags & os.O_TRUNC:
            if node.info.name is None:
                raise NotPermitted("a block is immutable")
            await self.drafts.rewrite(node, node.info, uid=ctx.uid, keep_bytes=not flags & os.O_TRUNC)
            raise stale()
        descriptor = self.store.open_read(node.info, uid=ctx.uid)
        try:
            self.backings.acquire(node.nodeid, descriptor)
        finally:
            os.close(descriptor)
        node.handles += 1
        return self._handle(Handle(node, None, writable=False, pid=ctx.pid), keep_cache=True)

    def _open_draft(
        self, node: Node, opened: OpenDraft, flags: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        self.drafts.open(node, opened, writable=writable)
        return self._handle(Handle(node, opened, writable=writable, pid=ctx.pid), keep_cache=False)

    def _handle(self, handle: Handle, *, keep_cache: bool) -> pyfuse3.FileInfo:
        number = self._next_handle
        self._next_handle += 1
        self._handles[number] = handle
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(number), keep_cache=keep_cache)

    @answers_errno
    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        return os.pread(self._descriptor(fh), size, off)

    @answers_errno
    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        if off + len(buf) > self.drafts.largest_bytes:
            raise OSError(errno.EFBIG, "over the largest object")
        return os.pwrite(self._descriptor(fh), buf, off)

    def _descriptor(self, fh: int) -> int:
        if not isinstance(self.backings, PlainBackings):
            raise Superseded("reads and writes are answered natively in this mode")
        return self.backings.descriptor(self._handles[fh].node.nodeid)

    @answers_errno
    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        """close(): an object over the limit is refused here, where the writer can still be told."""
        handle = self._handles[fh]
        if handle.opened is None or not handle.writable:
            return
        if isinstance(self.backings, PlainBackings):
            self.backings.note_flush(handle.node.nodeid, died_by_signal(handle.pid))
        size_bytes = self.drafts.status(handle.opened).st_size
        if size_bytes > self.drafts.largest_bytes:
            raise OSError(errno.EFBIG, "over the largest object")

    @answers_errno
    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        handle = self._handles.pop(fh)
        if handle.opened is not None:
            self.drafts.close(handle.node, handle.opened, writable=handle.writable)
        else:
            self.backings.release(handle.node.nodeid)
            handle.node.handles -= 1
        self.nodes.release(handle.node)

    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        """Nothing to do: a cache bucket promises nothing about a power cut."""

    async def fsyncdir(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        """Nothing to do: names are in the index when the call that made them returns."""

    # --- directories --------------------------------------------------------------------------------------

    @answers_errno
    async def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        if len(self._listings) >= limits.MAX_OPEN_LISTINGS:
            raise LimitExceeded(f"{limits.MAX_OPEN_LISTINGS} directories are open, which is the limit")
        number = self._next_handle
        self._next_handle += 1
        self._listings[number] = Listing(self._directory(inode))
        return pyfuse3.FileHandleT(number)

    @answers_errno
    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._listings[fh]
        if not listing.node.linked:
            return
        if start_id != listing.offset:
            self._seek(listing, start_id)
        for tail, found in listings.entries(self.store, self.nodes, listing.node, listing.last):
            component = tail.removesuffix(b"/")
            node = found if isinstance(found, Node) else self._node_of(listing.node, component, found)
            entry = self._attributes(node) if isinstance(found, Node) else self._listed(node, found)
            offset = listing.offset + 1
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(component), entry, offset):
                self.nodes.release(node)
                return
            node.lookups += 1
            listing.offset, listing.last = offset, tail

    @staticmethod
    def _listed(node: Node, found: ObjectInfo | Directory) -> pyfuse3.EntryAttributes:
        return (
            attrs.of_object(node, found) if isinstance(found, ObjectInfo) else attrs.of_directory(node, found)
        )

    def _seek(self, listing: Listing, offset: int) -> None:
        """seekdir or rewinddir, or the kernel asking again for what its page had no room for."""
        listing.rewind()
        for tail, _ in listings.entries(self.store, self.nodes, listing.node, b""):
            if listing.offset >= offset:
                return
            listing.offset, listing.last = listing.offset + 1, tail

    @answers_errno
    async def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        self._listings.pop(fh, None)

    # --- extended attributes ------------------------------------------------------------------------------

    @answers_errno
    async def getxattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext
    ) -> bytes:
        self.drain_opens()
        return self.xattrs.get(self.nodes.get(inode), name)

    @answers_errno
    async def listxattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> Sequence[pyfuse3.XAttrNameT]:
        return [pyfuse3.XAttrNameT(name) for name in self.xattrs.list(self.nodes.get(inode))]

    @answers_errno
    async def setxattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        node = self.nodes.get(inode)
        self.xattrs.set(node, name, value)
        if node.info is not None and node.linked:
            found = self.store.lookup(self.nodes.name(node))
            if isinstance(found, ObjectInfo):
                self.nodes.set_object(node, found)

    @answers_errno
    async def removexattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext
    ) -> None:
        self.xattrs.get(self.nodes.get(inode), name)
        raise NotPermitted("the attributes of kvfs are not removed; set user.kvfs.pin to 0")

    # --- what other doors do ------------------------------------------------------------------------------

    def drain_opens(self) -> None:
        """Tell the store of opens that were answered natively: hits, and who reads which slot."""
        for nodeid, uid, _ in self.backings.drain_opens():
            node = self.nodes.find(nodeid)
            if node is not None and node.info is not None:
                self.store.note_reader(node.info.extent.slot, uid)
                self.store.touch(node.info.key)

    @contextmanager
    def _own_change(self) -> Iterator[None]:
        """The kernel knows what it has asked for itself: no invalidation for that."""
        self._own_changes += 1
        try:
            yield
        finally:
            self._own_changes -= 1

    def on_change(self, change: Change) -> None:
        """A name or object changed, by this door or another: what the kernel caches of it goes."""
        if self._own_changes and not change.evicted:
            return
        if change.key is not None and change.kind is ChangeKind.REMOVED:
            node = self.nodes.of_object(change.key.digest)
        elif change.name is not None:
            node = self.nodes.resolve(change.name)
        else:
            node = None
        if node is None or node.draft is not None or node.parent is None:
            return
        if change.kind is ChangeKind.ATTRIBUTES:
            self._refresh(node)
        elif change.kind is not ChangeKind.SEALED or node.info is None or node.info.key != change.key:
            self._forget_name(node)
        if change.new_name is not None:
            target = self.nodes.resolve(change.new_name)
            if target is not None and target.draft is None:
                self._forget_name(target)

    def _refresh(self, node: Node) -> None:
        found = self.store.lookup(self.nodes.name(node))
        if isinstance(found, Directory):
            self._show_directory(node, found)
        else:
            self.nodes.set_object(node, found)
            self.drafts.show_sealed(node, found)
        self.backings.invalidate_attr(node.nodeid)

    def _forget_name(self, node: Node) -> None:
        assert node.parent is not None
        self.backings.invalidate_entry(node.parent.nodeid, node.component)
        if not node.directory:
            self.backings.node_dead(node.nodeid)
            self.nodes.unlink(node)
            self.nodes.release(node)
