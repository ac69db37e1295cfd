"""Which mount a path lies on, and what it is called there.

Responsibility: find kvfs mounts and split `/mnt/kvfs/bucket/key` into the mount and `bucket/key`. It reads
the kernel's mount table only and never touches the file system under a path, so it answers for a mount whose
service is gone (there, every `stat` fails with ENOTCONN).

Concurrency: pure functions over one read of /proc/self/mountinfo.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvfs import linux
from kvfs.errors import InvalidRequest, SessionClosed

FILESYSTEM_TYPE = "fuse.kvfs"


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


def only_mount() -> Path:
    """The mount meant when none is named. Raises SessionClosed for none, InvalidRequest for several."""
    found = mounts()
    if not found:
        raise SessionClosed("no kvfs mount on this machine: start one with `kvfs serve`, or give --at SOCKET")
    if len(found) > 1:
        raise InvalidRequest(f"several kvfs mounts ({', '.join(map(str, found))}): choose one with --at")
    return found[0]
