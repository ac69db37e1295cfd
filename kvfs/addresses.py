"""Which mount a path lies on, and what it is called there.

Responsibility: find kvfs mounts, split `/mnt/kvfs/bucket/key` into the mount and `bucket/key`, and say what a mount
would hide. It reads the kernel's mount table only and never touches the file system under a path, so it answers for a
mount whose service is gone (there, every `stat` fails with ENOTCONN).

Concurrency: pure functions over one read of /proc/self/mountinfo.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvfs import linux
from kvfs.errors import InvalidRequest, SessionClosed

FILESYSTEM_TYPE = "fuse.kvfs"
_MOST_COMPONENTS = 40 * 128
"""Of a path and of the 40 links in it that Linux follows: what goes round in circles ends."""


def mounts(table: str | None = None) -> list[Path]:
    """Mount points of kvfs, in the order in which they were mounted; `table` as for `kvfs.linux.mounts`."""
    return [Path(entry.point) for entry in linux.mounts(table) if entry.kind == FILESYSTEM_TYPE]


def locate(path: str, table: str | None = None) -> tuple[Path, str]:
    """(mount point, `bucket/key`) of a path on a kvfs mount; a trailing slash stays, the root is "".

    Raises InvalidRequest when it is on none.
    """
    known = mounts(table)
    # As it is written first: resolving symbolic links asks the service, where the path is on a mount.
    for absolute in (os.path.abspath(path), os.path.realpath(path)):
        for parent in [Path(absolute), *Path(absolute).parents]:
            if parent in known:
                name = os.path.relpath(absolute, parent) if Path(absolute) != parent else ""
                return parent, name + "/" if name and path.endswith("/") else name
    raise InvalidRequest(
        f"{path}: on no kvfs mount; give a path below one, or bucket/key with --at MOUNT or KVFS_ADDRESS"
    )


def leads_under(path: Path, mount: Path) -> bool:
    """Whether a path leads to a mount point or under it, symbolic links followed, without a look into it."""
    roots = {os.fspath(mount), os.path.join(os.path.realpath(mount.parent), mount.name)}
    at, left = "/", list(reversed(path.absolute().parts[1:]))
    for _ in range(_MOST_COMPONENTS):
        if not left:
            break
        component = left.pop()
        at = os.path.normpath(os.path.join(at, component))
        if at in roots:
            return True
        with suppress(OSError):  # no link
            target = os.readlink(at)
            at = os.path.dirname(at)
            left += reversed(Path(target).parts)
    return False


def only_mount() -> Path:
    """The mount meant when none is named. Raises SessionClosed for none, InvalidRequest for several."""
    found = mounts()
    if not found:
        raise SessionClosed("no kvfs mount on this machine: start one with `kvfs serve`, or give --at SOCKET")
    if len(found) > 1:
        raise InvalidRequest(f"several kvfs mounts ({', '.join(map(str, found))}): choose one with --at")
    return found[0]
