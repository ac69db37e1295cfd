"""setuid and setgid of files: how they end with a change, as on a disk.

The kernel knows a writer's capabilities, and decides: before a write or fallocate(2) that ends privileges it asks for a
change of attributes that names none. So it does for a chown(2) that changes no owner. Of a truncation it says only who
asks for it; CAP_FSETID is taken for root's then.

Concurrency: any thread. Reads /proc of a thread that waits for an answer.
"""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path


def without_privileges(mode: int, gid: int, *, uid: int, pid: int) -> int:
    """Return a file's mode after a change by this caller that ends its privileges.

    setgid without the group's right to execute is none: members of the file's group `gid` keep it, and root.
    """
    keeps_group = not mode & stat.S_IXGRP and (uid == 0 or not mode & stat.S_ISGID or gid in groups_of(pid))
    return mode & ~(stat.S_ISUID if keeps_group else stat.S_ISUID | stat.S_ISGID)


def after_truncation(mode: int, gid: int, *, uid: int, pid: int) -> int:
    """Return a file's mode after this caller changed its size."""
    return mode if uid == 0 else without_privileges(mode, gid, uid=uid, pid=pid)


def groups_of(pid: int) -> set[int]:
    """Read the groups of a thread; none where it has ended, or cannot be seen from here."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        first, others = (status.partition(f"\n{name}:")[2].partition("\n")[0] for name in ("Gid", "Groups"))
        return {int(gid) for gid in (first.split()[3], *others.split())}
    return set()
