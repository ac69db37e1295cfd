"""Mounts, finds, resizes and unmounts the DRAM tier's tmpfs.

Responsibility: the four mount calls that the tier needs, and nothing of the tier itself.

Invariants: only a tmpfs that this module mounted (its source is `SOURCE`) is ever resized or unmounted.
Concurrency: called while a tier opens or closes; no state.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
from pathlib import Path

from kvfs.errors import ConfigError, DeviceMissing

SOURCE = "kvfs-dram"
"""What /proc/self/mountinfo shows as the source of the tier's tmpfs."""

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_RELATIME = 2, 4, 8, 32, 1 << 21
_MNT_DETACH = 2
_FLAGS = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_RELATIME
"""With access times: a slot keeps its pages only where nobody has read it (`slots_core.c`)."""

_ESCAPED = re.compile(rb"\\([0-7]{3})")
"""Spaces and the like in /proc/self/mountinfo."""

_log = logging.getLogger("kvfs.dram")
_libc = ctypes.CDLL(None, use_errno=True)


def _mount(root: Path, flags: int, options: str) -> None:
    result = _libc.mount(
        SOURCE.encode(), os.fsencode(root), b"tmpfs", ctypes.c_ulong(flags), options.encode()
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(root))


def is_mounted(root: Path) -> bool:
    """Return whether the topmost mount at `root` is a tmpfs that a kvfs service mounted."""
    wanted = os.fsencode(os.path.realpath(root))
    top = False
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        mount, _, filesystem = line.partition(b" - ")
        point = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), mount.split(b" ")[4])
        if point == wanted:
            top = filesystem.split(b" ")[:2] == [b"tmpfs", SOURCE.encode()]
    return top


def mount(root: Path, capacity_bytes: int, *, inodes: int, gid: int | None) -> None:
    """Mount the tier's tmpfs over `root`. Raises DeviceMissing, saying which right is missing."""
    options = f"size={capacity_bytes},nr_inodes={inodes},mode=0750"
    if gid is not None:
        options += f",gid={gid}"
    try:
        try:
            _mount(root, _FLAGS, f"{options},huge=within_size")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _log.warning(
                "%s: this kernel has no huge pages on tmpfs; large reads run at a third of the speed", root
            )
            _mount(root, _FLAGS, options)
    except OSError as error:
        right = "CAP_SYS_ADMIN in this mount namespace" if error.errno in (errno.EPERM, errno.EACCES) else ""
        missing = f" (missing: {right})" if right else ""
        raise DeviceMissing(
            f"mount a tmpfs of {capacity_bytes} bytes at {root}: {error.strerror}{missing}"
        ) from error


def resize(root: Path, capacity_bytes: int, *, inodes: int) -> None:
    """Give a mounted tier another capacity. Raises ConfigError when more than that is still in use."""
    try:
        _mount(root, _FLAGS | _MS_REMOUNT, f"size={capacity_bytes},nr_inodes={inodes}")
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise DeviceMissing(
                f"resize the tmpfs at {root}: missing CAP_SYS_ADMIN in this mount namespace"
            ) from error
        raise ConfigError(
            f"resize the tmpfs at {root} to {capacity_bytes} bytes: {error.strerror}; "
            "readers of an earlier service may still hold more than that"
        ) from error


def size_bytes(root: Path) -> int:
    """Return the capacity of a mounted tier."""
    found = os.statvfs(root)
    return found.f_blocks * found.f_frsize


def unmount(root: Path) -> None:
    """Unmount; lazily where somebody still holds a file (the kernel then frees it with the last of them)."""
    for flags in (0, _MNT_DETACH):
        if _libc.umount2(os.fsencode(root), flags) == 0:
            return
        if ctypes.get_errno() != errno.EBUSY:
            break
    _log.warning("unmount %s: %s", root, os.strerror(ctypes.get_errno()))
