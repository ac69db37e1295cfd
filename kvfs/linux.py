"""mount(2) and umount2(2), which Python's standard library lacks, and what is mounted where.

Responsibility: the two system calls with errors as OSError, and mountinfo as values. No state.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 2, 4, 8, 32, 1024
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of /proc/self/mountinfo (proc_pid_mountinfo(5))."""

    point: str
    kind: str
    source: str


def mount(source: str, point: Path, kind: str, flags: int, options: str) -> None:
    """mount(2). Raises OSError."""
    done = _libc.mount(
        source.encode(), os.fsencode(point), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(done, point)


def unmount(point: Path, flags: int = 0) -> None:
    """umount2(2). Raises OSError."""
    _check(_libc.umount2(os.fsencode(point), flags), point)


def _check(result: int, point: Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(point))


def mounts() -> list[MountEntry]:
    """Every mount of this mount namespace, lowest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode().decode("unicode_escape")
        kind, source = after.split(" ")[:2]
        found.append(MountEntry(point, kind, source))
    return found


def top_mount(point: Path) -> MountEntry | None:
    """What is mounted exactly at `point`, the topmost where several are. Never looks into the mount itself."""
    wanted = os.path.join(os.path.realpath(point.parent), point.name)
    found = None
    for entry in mounts():
        if entry.point == wanted:
            found = entry
    return found
