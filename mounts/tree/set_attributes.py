"""Changes by setattr and setxattr: of a file being written, of a sealed one, of a directory.

Concurrency: the service's trio thread. Awaits a draft in the place of a sealed file whose size changes, and the log.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import pyfuse3

from kvfs.errors import NotFound, NotPermitted, Superseded
from mounts.kernel.nodes import Node
from mounts.kernel.open_draft import OpenDraft
from mounts.kernel.privileges import after_truncation, without_privileges
from mounts.tree.opener import FileOpener
from mounts.tree.view import View
from mounts.tree.xattrs import LARGE_NAME
from tiers.model.objects import ObjectInfo


@dataclass(frozen=True, slots=True)
class AttributeChanges:
    """Attributes to change; None stays as it is."""

    mode: int | None
    uid: int | None
    gid: int | None
    size_bytes: int | None
    atime_ns: int | None
    mtime_ns: int | None

    @classmethod
    def from_request(cls, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> AttributeChanges:
        """Read the changes that the kernel asks for."""
        return cls(
            mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size_bytes=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )

    @property
    def is_none(self) -> bool:
        """Return whether nothing changes, which is how the kernel ends privileges."""
        times = self.atime_ns is None and self.mtime_ns is None
        return times and self.mode is self.uid is self.gid is self.size_bytes is None

    @property
    def is_any(self) -> bool:
        """Return whether anything changes that a sealed file keeps."""
        return any(value is not None for value in (self.mode, self.uid, self.gid, self.mtime_ns))

    def of_version(self, info: ObjectInfo) -> ObjectInfo:
        """Change what the descriptors of an earlier version show, or those of a file that was removed."""
        return replace(
            info,
            mode=info.mode if self.mode is None else self.mode,
            uid=info.uid if self.uid is None else self.uid,
            gid=info.gid if self.gid is None else self.gid,
            mtime_ns=info.mtime_ns if self.mtime_ns is None else self.mtime_ns,
            ctime_ns=time.time_ns() if self.is_any else info.ctime_ns,
        )


async def set_attributes(
    view: View,
    opener: FileOpener,
    node: Node,
    changes: AttributeChanges,
    *,
    by_path: bool,
    uid: int,
    pid: int,
) -> pyfuse3.EntryAttributes:
    """Set attributes for a caller; `by_path`: through no handle. Raises NotPermitted, Superseded."""
    newest = view.newest(node) if changes.size_bytes is None else node
    size_bytes = changes.size_bytes
    if size_bytes is not None and by_path and node.draft is not None:
        # Once it is sealed its bytes stay as they are where the change is refused.
        view.drafts.publisher.publish_if_closed(node, node.draft)
    if size_bytes is not None and node.info is not None and size_bytes != node.info.size_bytes:
        await _begin_resize(opener, node, keep_bytes=size_bytes > 0, uid=uid, pid=pid)
    held = newest.draft or newest.info
    if changes.mode is None and held is not None:
        changes = replace(changes, mode=_mode_after(changes, held.mode, held.gid, uid=uid, pid=pid))
    if newest.parent is None:
        raise NotPermitted("the mount's root has the attributes that its configuration gives it")
    if newest.draft is not None:
        await _change_draft(view, newest, newest.draft, changes, by_path=by_path, pid=pid)
    elif changes.is_any:
        async with view.store.journal.settling():
            view.set_sealed(newest, changes.mode, changes.uid, changes.gid, changes.mtime_ns)
    if newest is not node:
        view.backings.invalidate_attr(newest.nodeid)
    if node.info is not None and not node.linked:
        view.nodes.set_object(node, changes.of_version(node.info))
    return view.attributes(node)


def _mode_after(changes: AttributeChanges, mode: int, gid: int, *, uid: int, pid: int) -> int | None:
    """Return a file's new mode where these changes, by this caller, end privileges that it has; else None."""
    left = mode
    if changes.is_none or changes.uid is not None or changes.gid is not None:
        left = without_privileges(mode, gid, uid=uid, pid=pid)
    elif changes.size_bytes is not None:
        left = after_truncation(mode, gid, uid=uid, pid=pid)
    return None if left == mode else left


async def _begin_resize(opener: FileOpener, node: Node, *, keep_bytes: bool, uid: int, pid: int) -> None:
    """Begin a draft in the place of a sealed file whose size is to change. Raises Superseded."""
    try:
        await opener.begin_rewrite_of(node, uid=uid, pid=pid, keep_bytes=keep_bytes)
    except Superseded as error:
        flags = os.O_WRONLY | (0 if keep_bytes else os.O_TRUNC)
        opener.expect_retry(node, flags, error, uid=uid, pid=pid)
        raise


async def _change_draft(
    view: View, node: Node, opened: OpenDraft, changes: AttributeChanges, *, by_path: bool, pid: int
) -> None:
    drafts = view.drafts
    if changes.size_bytes is not None:
        opened.awaited.add(pid)
        try:
            await drafts.truncate(node, opened, changes.size_bytes)
        finally:
            view.retries.end(pid)
            drafts.end_wait(node, opened, pid)
    if changes.mtime_ns is not None or changes.atime_ns is not None:
        drafts.contents.set_times(opened, changes.atime_ns, changes.mtime_ns)
    if changes.mode is not None:
        opened.mode = changes.mode
    opened.uid = opened.uid if changes.uid is None else changes.uid
    opened.gid = opened.gid if changes.gid is None else changes.gid
    opened.ctime_ns = time.time_ns()
    drafts.display.show_draft(node, opened)
    try:
        if changes.size_bytes is not None and by_path:
            await drafts.persistence.settle_change(node, opened)
        elif opened.writers == 0 and opened.is_settled:
            drafts.persistence.rename_snapshot(node)
            await view.store.journal.settle()
    finally:
        if node.draft is opened and opened.handles == 0:
            drafts.publisher.end_writing(node, opened)


async def set_extended(view: View, node: Node, name: bytes, value: bytes, *, uid: int) -> None:
    """Set an extended attribute for a caller. Raises NotPermitted, and what the attribute raises."""
    node = view.newest(node)
    # The kernel asks for the right to write only; pinning and binding take ownership, as at other doors.
    if uid not in (0, os.geteuid(), view.attributes(node).st_uid):
        raise NotPermitted(f"uid {uid} does not own what it would change {name.decode(errors='replace')} of")
    async with view.store.journal.settling():
        view.xattrs.set(node, name, value)
        if node.directory and name == LARGE_NAME:
            view.names.unlearn(node)  # files are made there by Python, from here on
        view.drafts.persistence.rename_snapshot(node)
    if node.info is not None and node.linked:
        with suppress(NotFound):  # it was removed meanwhile, at another door
            found = view.store.lookup(view.nodes.name(node))
            if isinstance(found, ObjectInfo):
                view.nodes.set_object(node, found)
