"""Attributes as the kernel wants them, from nodes, objects and drafts. Pure functions.

The kernel caches those of sealed objects and directories, which are invalidated when they change, and asks for a
draft's each time, since passthrough writes change them without a request.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

import pyfuse3

from kvfs.limits import KERNEL_CACHE_S
from mounts.kernel.nodes import Node
from mounts.kernel.open_draft import OpenDraft
from tiers.model.objects import Directory, ObjectInfo

BLOCK_BYTES = 4096
ROOT_MODE = 0o755


def _entry(node: Node, mode: int, uid: int, gid: int, *, cache_s: float) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()  # all zero
    entry.st_ino = pyfuse3.InodeT(node.nodeid)
    entry.entry_timeout = KERNEL_CACHE_S
    entry.attr_timeout = cache_s
    entry.st_mode = pyfuse3.ModeT(mode)
    entry.st_uid = uid
    entry.st_gid = gid
    entry.st_blksize = BLOCK_BYTES
    entry.st_nlink = 1
    return entry


def _set_times(entry: pyfuse3.EntryAttributes, *, atime_ns: int, mtime_ns: int, ctime_ns: int) -> None:
    entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = atime_ns, mtime_ns, ctime_ns


def of_object(node: Node, info: ObjectInfo) -> pyfuse3.EntryAttributes:
    """Describe a sealed object, or a symbolic link."""
    entry = _entry(node, file_type(info) | info.mode, info.uid, info.gid, cache_s=KERNEL_CACHE_S)
    entry.st_size = info.size_bytes
    entry.st_blocks = (info.size_bytes + 511) // 512
    entry.st_nlink = 1 if node.linked else 0
    _set_times(entry, atime_ns=info.mtime_ns, mtime_ns=info.mtime_ns, ctime_ns=info.ctime_ns)
    return entry


def file_type(info: ObjectInfo) -> int:
    """Return the type bits of an object's mode: a symbolic link or a regular file."""
    return stat.S_IFLNK if info.target else stat.S_IFREG


@dataclass(frozen=True, slots=True)
class LargeStatus:
    """Size and times of a draft that is no file of its own, as `os.stat_result` has them."""

    st_size: int
    st_blocks: int
    st_atime_ns: int
    st_mtime_ns: int
    st_ctime_ns: int


FileStatus = os.stat_result | LargeStatus


def ctime_now(opened: OpenDraft, status: FileStatus) -> int:
    """Return when a draft was changed last, which is its time of change once it is sealed, too."""
    return max(opened.ctime_ns, status.st_ctime_ns)


def of_draft(node: Node, opened: OpenDraft, status: FileStatus) -> pyfuse3.EntryAttributes:
    """Describe a draft; `status` is that of the bytes so far."""
    entry = _entry(node, stat.S_IFREG | opened.mode, opened.uid, opened.gid, cache_s=0)
    entry.st_size = status.st_size
    entry.st_blocks = status.st_blocks
    entry.st_nlink = 1 if node.linked else 0
    _set_times(
        entry,
        atime_ns=status.st_atime_ns,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=ctime_now(opened, status),
    )
    return entry


def of_name(ino: int, *, directory: bool) -> pyfuse3.EntryAttributes:
    """Describe an entry in a listing of which the kernel learns only the name, which `generation` says to the loop."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(ino)
    entry.generation = 1
    entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR if directory else stat.S_IFREG)
    return entry


def of_directory(node: Node, directory: Directory) -> pyfuse3.EntryAttributes:
    """Describe a directory; a link count of 1 says that its subdirectories are not counted (find(1) relies on more)."""
    entry = _entry(node, stat.S_IFDIR | directory.mode, directory.uid, directory.gid, cache_s=KERNEL_CACHE_S)
    entry.st_nlink = 1 if node.linked else 0
    mtime_ns = directory.mtime_ns
    _set_times(entry, atime_ns=mtime_ns, mtime_ns=mtime_ns, ctime_ns=directory.ctime_ns or mtime_ns)
    return entry
