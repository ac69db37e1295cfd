"""Linux: system calls that Python's standard library lacks, mounts, the boot's id, the limit of open files.

Responsibility: mount(2), umount2(2) and renameat2(2) with errors as OSError, and files of /proc as values. No state.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 2, 4, 8, 32, 1024
MNT_FORCE, MNT_DETACH = 1, 2
_RENAME_EXCHANGE = 2
_CAP_SYS_ADMIN = 21
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_TYPE = 0x1000, 0x4000, 1
_STATX_BYTES, _STATX_MODE_AT = 256, 28
"""Of struct statx, and where stx_mode is in it: statx(2)."""

_OCTAL = re.compile(r"\\([0-7]{3})")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of /proc/self/mountinfo (proc_pid_mountinfo(5))."""

    point: str
    kind: str
    source: str


def mount(source: str, point: Path, kind: str, flags: int, options: str) -> None:
    """Call mount(2). Raises OSError."""
    done = _libc.mount(
        source.encode(), os.fsencode(point), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(done, point)


def unmount(point: Path, flags: int = 0) -> None:
    """Call umount2(2). Raises OSError."""
    _check(_libc.umount2(os.fsencode(point), flags), point)


def may_mount() -> bool:
    """Return whether this process has the right to mount (CAP_SYS_ADMIN)."""
    status = Path("/proc/self/status").read_text(errors="replace")
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> _CAP_SYS_ADMIN & 1)


def replace_by(new: Path, path: Path) -> None:
    """Rename `new` to `path`; where the filesystem can, exchange the two, so that the old file keeps its room."""
    there = -100  # AT_FDCWD
    exchanged = _libc.renameat2(there, os.fsencode(new), there, os.fsencode(path), _RENAME_EXCHANGE) == 0
    if not exchanged:  # there was no old file, or kernel or filesystem cannot exchange
        new.rename(path)


def known_mode(descriptor: int) -> int:
    """Return the type and mode of an open file as the kernel knows them now: no file system is asked, so nothing waits.
    Raises OSError."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    done = _libc.statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_TYPE, found)
    _check(done, Path(f"/proc/self/fd/{descriptor}"))
    return int.from_bytes(found.raw[_STATX_MODE_AT : _STATX_MODE_AT + 2], sys.byteorder)


def _check(result: int, point: Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(point))


def mounts(table: str | None = None) -> list[MountEntry]:
    """Return every mount of this mount namespace, lowest first.

    `table` is text in the format of /proc/self/mountinfo; None reads that file.
    """
    if table is None:
        table = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    found = []
    for line in table.rstrip("\n").split("\n"):
        before, _, after = line.partition(" - ")
        kind, source = after.split(" ")[:2]
        found.append(MountEntry(_unescape(before.split(" ")[4]), kind, _unescape(source)))
    return found


def _unescape(text: str) -> str:
    """Decode a path: the kernel writes space, tab, newline and backslash as `\\ooo`, and everything else as it is."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def hides_reads(directory: str) -> bool:
    """Return whether files that are read through this process's mount of a directory keep their access times."""
    return bool(os.statvfs(directory).f_flag & (os.ST_RDONLY | os.ST_NOATIME))


def boot_id() -> str:
    """Return the random id of this boot of the machine (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def top_mount(point: Path) -> MountEntry | None:
    """Return the topmost mount at exactly `point`; None without one. Never looks into the mount."""
    wanted = os.path.join(os.path.realpath(point.parent), point.name)
    found = None
    for entry in mounts():
        if entry.point == wanted:
            found = entry
    return found


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit: sessions, drafts, held slots and segments each keep one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_going(thread: int) -> bool:
    """Return whether a thread of any process is there, and neither stopped nor ended."""
    try:
        state = Path(f"/proc/{thread}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "TtZX"
