"""The bytes of files being written: a slot in DRAM, or the extents of a large file.

Responsibility: reserve and abort drafts of either kind, copy sealed bytes into them, and read and set their size and
times. Names and nodes are the keeper's.

Concurrency: the service's trio thread. Awaits: copying a large object, and changing the size of a large file.
"""

from __future__ import annotations

import errno
import os

import trio

from kvfs import limits
from kvfs.errors import ObjectTooLarge
from mounts.drafts.large import status_of
from mounts.kernel.attributes import FileStatus, ctime_now
from mounts.kernel.nodes import Node
from mounts.kernel.open_draft import OpenDraft
from tiers.model.objects import Attributes, Draft, ObjectInfo
from tiers.nvme.large_draft import LargeDraft
from tiers.store.store import Store

COPY_INLINE_BYTES = 4 * limits.MIB
"""The most that is copied on the event loop: 4 MiB take about 0.5 ms, a thread's round trip 0.1 ms."""


class DraftContents:
    """Bytes, sizes and times of drafts."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def largest_bytes(self) -> int:
        """Return the most bytes of a draft that is a slot."""
        return self._store.dram.largest_object_bytes

    def reserve(self, bucket: bytes, uid: int) -> Draft | LargeDraft:
        """Reserve an empty draft: in DRAM, or in a large bucket on NVMe."""
        if self._store.bucket(bucket).large:
            return self._store.begin_large(bucket, uid=uid)
        draft = self._store.reserve(0, uid=uid)
        self._set_slot_times(draft, None)
        return draft

    async def reserve_copy(self, info: ObjectInfo, uid: int) -> Draft:
        """Reserve a draft in DRAM with the bytes of an object there."""
        source = self._store.open_read(info, uid=uid)
        try:
            draft = self._store.reserve(info.size_bytes, uid=uid)
            try:
                await self._copy(source, self._store.open_draft(draft), info.size_bytes)
                self._set_slot_times(draft, (info.mtime_ns, info.mtime_ns))  # until something is written
            except BaseException:
                self._store.abort(draft)
                raise
        finally:
            os.close(source)
        return draft

    @staticmethod
    async def _copy(source: int, target: int, size_bytes: int) -> None:
        try:
            if size_bytes <= COPY_INLINE_BYTES:
                copy_bytes(source, target, size_bytes)
            else:
                await trio.to_thread.run_sync(copy_bytes, source, target, size_bytes)
        finally:
            os.close(target)

    def abort(self, draft: Draft | LargeDraft) -> None:
        """Abort a draft, and drop its bytes."""
        if isinstance(draft, LargeDraft):
            self._store.abort_large(draft)
        else:
            self._store.abort(draft)

    def _set_slot_times(self, draft: Draft, times_ns: tuple[int, int] | None) -> None:
        """Set the times of access and modification; None: now. The slot may have had another file before."""
        descriptor = self._store.open_draft(draft)
        try:
            os.utime(descriptor, ns=times_ns) if times_ns else os.utime(descriptor)
        finally:
            os.close(descriptor)

    def status(self, opened: OpenDraft) -> FileStatus:
        """Return the size and times of a draft; one in DRAM has its slot file's, which passthrough writes change."""
        if isinstance(opened.draft, LargeDraft):
            return status_of(opened.draft)
        descriptor = self._store.open_draft(opened.draft)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def truncate_slot(self, draft: Draft, size_bytes: int) -> None:
        """Set the size; growth is allocated at once: a hole mapped in a full tier is SIGBUS."""
        if size_bytes > self.largest_bytes:
            raise ObjectTooLarge(f"{size_bytes} bytes: the limit is {self.largest_bytes}")
        descriptor = self._store.open_draft(draft)
        try:
            grown = size_bytes - os.fstat(descriptor).st_size
            if grown > 0:
                self._store.make_room(grown)
                os.posix_fallocate(descriptor, size_bytes - grown, grown)
            else:
                os.ftruncate(descriptor, size_bytes)
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    def set_times(self, opened: OpenDraft, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times of access and modification; None keeps one as it is."""
        if isinstance(opened.draft, LargeDraft):
            times = opened.draft.times
            times.atime_ns = times.atime_ns if atime_ns is None else atime_ns
            times.mtime_ns = times.mtime_ns if mtime_ns is None else mtime_ns
            return
        descriptor = self._store.open_draft(opened.draft)
        try:
            now = os.fstat(descriptor)
            os.utime(
                descriptor,
                ns=(
                    now.st_atime_ns if atime_ns is None else atime_ns,
                    now.st_mtime_ns if mtime_ns is None else mtime_ns,
                ),
            )
        finally:
            os.close(descriptor)


def attributes_of(node: Node, opened: OpenDraft, status: FileStatus) -> Attributes:
    """Return the attributes that the object would have if it were sealed now."""
    return Attributes(
        mode=opened.mode,
        uid=opened.uid,
        gid=opened.gid,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=ctime_now(opened, status),
        ino=node.ino,
        pinned=opened.pinned,
    )


def copy_bytes(source: int, target: int, size_bytes: int) -> None:
    """Copy a whole file within the tier. Raises OSError, ENOSPC among them."""
    done = 0
    while done < size_bytes:
        count = os.sendfile(target, source, done, size_bytes - done)
        if count == 0:
            raise OSError(errno.EIO, "the object ended before its size")
        done += count
