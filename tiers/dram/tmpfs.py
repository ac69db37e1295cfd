"""Mounts, finds, resizes and unmounts the DRAM tier's tmpfs.

Responsibility: the mount calls that the tier needs, and nothing of the tier itself.

Invariants: only a tmpfs that this module mounted (its source is `SOURCE`) is ever resized or unmounted.
Concurrency: called while a tier opens or closes; no state.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
from collections.abc import Sequence
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
    return _mounted_options(root) is not None


def _mounted_options(root: Path) -> bytes | None:
    """Return the options of the tmpfs that a kvfs service mounted at `root`; None where another mount is topmost."""
    wanted = os.fsencode(os.path.realpath(root))
    options = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        mount, _, filesystem = line.partition(b" - ")
        point = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), mount.split(b" ")[4])
        if point == wanted:
            kind, source, found = filesystem.split(b" ", 2)
            options = found if (kind, source) == (b"tmpfs", SOURCE.encode()) else None
    return options


def mount(
    root: Path, capacity_bytes: int, *, inodes: int, gid: int | None, numa_nodes: Sequence[int] = ()
) -> None:
    """Mount the tier's tmpfs over `root`. Raises DeviceMissing, saying which right is missing."""
    options = f"size={capacity_bytes},nr_inodes={inodes},mode=0750"
    if gid is not None:
        options += f",gid={gid}"
    if numa_nodes:
        options += f",mpol={_policy(numa_nodes)}"
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


def place(root: Path, numa_nodes: Sequence[int]) -> bool:
    """Have files that are made from now on in a mounted tier lie on other NUMA nodes; return whether these are others.
    What is there keeps its nodes, and what is written to it later has them. Raises ConfigError."""
    before = _mounted_options(root) or b""
    if numa_nodes or b"mpol=" in before:
        try:
            _mount(root, _FLAGS | _MS_REMOUNT, f"mpol={_policy(numa_nodes)}")
        except OSError as error:
            raise ConfigError(
                f"place the tmpfs at {root} on NUMA nodes {list(numa_nodes)}: {error.strerror}"
            ) from error
    return _mounted_options(root) != before


def _policy(numa_nodes: Sequence[int]) -> str:
    """Return the policy of a tmpfs (tmpfs(5), `mpol`): one that takes memory elsewhere where a node is full. `bind`
    would have the kernel kill a process there."""
    if len(numa_nodes) > 1:
        return f"interleave:{','.join(map(str, sorted({*numa_nodes})))}"
    return f"prefer:{numa_nodes[0]}" if numa_nodes else "local"


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
