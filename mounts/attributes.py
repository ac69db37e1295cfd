"""Attributes as the kernel wants them, from nodes, objects and drafts. Pure functions.

Sealed objects and directories are cached by the kernel and invalidated when they change; drafts are asked
for anew each time, since passthrough writes change them without a request.
"""

from __future__ import annotations

import os
import stat
from typing import Protocol

import pyfuse3

from kvfs.limits import KERNEL_CACHE_S
from mounts.nodes import Node, OpenDraft
from tiers.model import Directory, ObjectInfo

BLOCK_BYTES = 4096
ROOT_MODE = 0o755


def _entry(node: Node, mode: int, uid: int, gid: int, *, cache_s: float) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(node.nodeid)
    entry.generation = 0
    entry.entry_timeout = KERNEL_CACHE_S
    entry.attr_timeout = cache_s
    entry.st_mode = pyfuse3.ModeT(mode)
    entry.st_uid = uid
    entry.st_gid = gid
    entry.st_rdev = 0
    entry.st_blksize = BLOCK_BYTES
    entry.st_nlink = 1
    return entry


def _set_times(entry: pyfuse3.EntryAttributes, *, atime_ns: int, mtime_ns: int, ctime_ns: int) -> None:
    entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = atime_ns, mtime_ns, ctime_ns


def of_object(node: Node, info: ObjectInfo) -> pyfuse3.EntryAttributes:
    entry = _entry(node, stat.S_IFREG | info.mode, info.uid, info.gid, cache_s=KERNEL_CACHE_S)
    entry.st_size = info.size_bytes
    entry.st_blocks = (info.size_bytes + 511) // 512
    entry.st_nlink = 1 if node.linked else 0
    _set_times(entry, atime_ns=info.mtime_ns, mtime_ns=info.mtime_ns, ctime_ns=info.ctime_ns)
    return entry


class FileStatus(Protocol):
    """What is asked of an `os.stat_result`, or of a draft that is no file of its own."""

    @property
    def st_size(self) -> int: ...
    @property
    def st_blocks(self) -> int: ...
    @property
    def st_atime_ns(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...
    @property
    def st_ctime_ns(self) -> int: ...


def without_privileges(mode: int) -> int:
    """A file's mode after a write or a change of owner."""
    return mode & ~(stat.S_ISUID | stat.S_ISGID if mode & stat.S_IXGRP else stat.S_ISUID)


def mode_now(opened: OpenDraft, mtime_ns: int) -> int:
    """Of a draft whose bytes were last written then; passthrough writes are not seen otherwise."""
    return opened.mode if mtime_ns == opened.privileged_ns else without_privileges(opened.mode)


def of_draft(node: Node, opened: OpenDraft, status: FileStatus | None) -> pyfuse3.EntryAttributes:
    """`status` is that of the bytes so far; None for a draft that was made just now."""
    mode = opened.mode if status is None else mode_now(opened, status.st_mtime_ns)
    entry = _entry(node, stat.S_IFREG | mode, opened.uid, opened.gid, cache_s=0)
    if status is None:
        entry.st_size = entry.st_blocks = 0
        made_ns = opened.ctime_ns
        _set_times(entry, atime_ns=made_ns, mtime_ns=made_ns, ctime_ns=made_ns)
        return entry
    entry.st_size = status.st_size
    entry.st_blocks = status.st_blocks
    entry.st_nlink = 1 if node.linked else 0
    _set_times(
        entry,
        atime_ns=status.st_atime_ns,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=max(opened.ctime_ns, status.st_ctime_ns),
    )
    return entry


def of_name(ino: int, *, directory: bool) -> pyfuse3.EntryAttributes:
    """Of an entry in a listing of which the kernel learns no more than its name: `generation` says so to the loop."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(ino)
    entry.generation = 1
    entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR if directory else stat.S_IFREG)
    return entry


def of_nothing(node: Node) -> pyfuse3.EntryAttributes:
    """Of a file that was dropped, for who still has it open."""
    entry = _entry(node, stat.S_IFREG, 0, 0, cache_s=0)
    entry.st_size = entry.st_blocks = entry.st_nlink = 0
    _set_times(entry, atime_ns=0, mtime_ns=0, ctime_ns=0)
    return entry


# A directory's link count of 1 says that its subdirectories are not counted in it (find(1) relies on more).


def of_directory(node: Node, directory: Directory) -> pyfuse3.EntryAttributes:
    entry = _entry(node, stat.S_IFDIR | directory.mode, directory.uid, directory.gid, cache_s=KERNEL_CACHE_S)
    entry.st_size = 0
    entry.st_blocks = 0
    entry.st_nlink = 1 if node.linked else 0
    mtime_ns = directory.mtime_ns
    _set_times(entry, atime_ns=mtime_ns, mtime_ns=mtime_ns, ctime_ns=directory.ctime_ns or mtime_ns)
    return entry


def of_root(node: Node, changed_ns: int) -> pyfuse3.EntryAttributes:
    entry = _entry(node, stat.S_IFDIR | ROOT_MODE, os.geteuid(), os.getegid(), cache_s=KERNEL_CACHE_S)
    entry.st_size = 0
    entry.st_blocks = 0
    entry.st_nlink = 1
    _set_times(entry, atime_ns=changed_ns, mtime_ns=changed_ns, ctime_ns=changed_ns)
    return entry
