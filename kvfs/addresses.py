"""Which mount a path lies on, and what it is called there.

Responsibility: find kvfs mounts and split `/mnt/kvfs/bucket/key` into the mount and `bucket/key`. It reads
the kernel's mount table only and never touches the file system under a path, so it answers for a mount whose
service is gone (there, every `stat` fails with ENOTCONN).

Concurrency: pure functions over one read of /proc/self/mountinfo.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvfs.errors import InvalidRequest, SessionClosed

FILESYSTEM_TYPE = "fuse.kvfs"
_ESCAPE = re.compile(r"\\([0-7]{3})")


def mounts(table: str | None = None) -> list[Path]:
    """Mount points of type fuse.kvfs, in the order in which they were mounted.

    `table` is text in the format of /proc/self/mountinfo, which is read where it is None.
    """
    if table is None:
        table = Path("/proc/self/mountinfo").read_text()
    found = []
    for line in table.splitlines():
        mount, _, source = line.partition(" - ")
        if source.split(" ", 1)[0] == FILESYSTEM_TYPE:
            # the kernel writes space, tab, newline and backslash as \ooo
            found.append(Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), mount.split(" ")[4])))
    return found


def locate(path: str, table: str | None = None) -> tuple[Path, str]:
    """(mount point, `bucket/key`) of a path on a kvfs mount; a trailing slash stays, the root is "".

    Raises InvalidRequest when it is on none.
    """
    absolute = Path(os.path.abspath(path))
    parents = [absolute, *absolute.parents]
    known = mounts(table)
    mount = next((parent for parent in parents if parent in known), None)
    if mount is None:
        raise InvalidRequest(
            f"{path}: on no kvfs mount; give a path below one, or bucket/key with --at MOUNT or KVFS_ADDRESS"
        )
    name = str(absolute.relative_to(mount)) if absolute != mount else ""
    return mount, name + "/" if name and path.endswith("/") else name


def only_mount() -> Path:
    """The mount meant when none is named. Raises SessionClosed for none, InvalidRequest for several."""
    found = mounts()
    if not found:
        raise SessionClosed("no kvfs mount on this machine: start one with `kvfs serve`, or give --at SOCKET")
    if len(found) > 1:
        raise InvalidRequest(f"several kvfs mounts ({', '.join(map(str, found))}): choose one with --at")
    return found[0]
