"""Access rights: POSIX mode bits as a pure function.

Responsibility: the one check behind session and S3 requests; on the mount the kernel does the same
(`default_permissions`).
"""

from __future__ import annotations

from dataclasses import dataclass

READ = 4
WRITE = 2
SEARCH = 1


@dataclass(frozen=True, slots=True)
class Caller:
    """The credentials of a process, from the kernel."""

    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    pid: int = 0


def allows(caller: Caller, *, mode: int, uid: int, gid: int, want: int) -> bool:
    """Return whether `caller` has all of `want` (READ | WRITE | SEARCH) on something of this mode and owner."""
    if caller.uid == 0:
        return True
    if caller.uid == uid:
        granted = mode >> 6
    elif gid == caller.gid or gid in caller.groups:
        granted = mode >> 3
    else:
        granted = mode
    return granted & want == want
