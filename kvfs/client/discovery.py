"""The kvfs mounts of this machine, and the names of paths on them.

Responsibility: find kvfs mounts, split `/mnt/kvfs/bucket/key` into the mount and `bucket/key`, and find paths that a
mount would hide. It reads the kernel's mount table, not the file system under a path, so it works for a mount whose
service is gone (there every `stat` fails with ENOTCONN).

Concurrency: pure functions over one read of /proc/self/mountinfo.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvfs.errors import InvalidRequest, SessionClosed
from kvfs.system import linux

FILESYSTEM_TYPE = "fuse.kvfs"
_MOST_COMPONENTS = 40 * 128
"""Parts of a path and of the 40 links in it that Linux follows: bounds a walk over links in a circle."""


def mounts(table: str | None = None) -> list[Path]:
    """Return the mount points of kvfs in the order of mounting; `table` as for `kvfs.system.linux.mounts`."""
    return [Path(entry.point) for entry in linux.mounts(table) if entry.kind == FILESYSTEM_TYPE]


def locate(path: str, table: str | None = None) -> tuple[Path, str]:
    """Return (mount point, `bucket/key`) of a path on a kvfs mount; a trailing slash stays, the root is "".

    Raises InvalidRequest when it is on none.
    """
    known = mounts(table)
    # The path as written comes first: to resolve symbolic links on a mount asks its service.
    for absolute in (os.path.abspath(path), os.path.realpath(path)):
        for parent in [Path(absolute), *Path(absolute).parents]:
            if parent in known:
                name = os.path.relpath(absolute, parent) if Path(absolute) != parent else ""
                return parent, name + "/" if name and path.endswith("/") else name
    raise InvalidRequest(
        f"{path}: on no kvfs mount; give a path below one, or bucket/key with --at MOUNT or KVFS_ADDRESS"
    )


def leads_under(path: Path, mount: Path) -> bool:
    """Return whether a path leads to a mount point or below it, over symbolic links too, without a look into it."""
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


def mount_here() -> Path | None:
    """Return the mount that holds the working directory; None where none does."""
    try:
        return locate(".")[0]
    except (InvalidRequest, FileNotFoundError):
        return None


def default_mount() -> Path:
    """Return the mount that holds the working directory, else the only one. Raises SessionClosed, InvalidRequest."""
    if (here := mount_here()) is not None:
        return here
    found = mounts()
    if not found:
        raise SessionClosed("no kvfs mount on this machine: start one with `kvfs serve`, or give --at SOCKET")
    if len(found) > 1:
        raise InvalidRequest(f"several kvfs mounts ({', '.join(map(str, found))}): choose one with --at")
    return found[0]


def address(at: str | None) -> str | Path:
    """Return where to begin a session: `at`, or the default mount where it is None. Raises as `default_mount`."""
    return default_mount() if at is None else at
