"""What the DRAM tier keeps on disk or tmpfs, and how it comes and goes.

Responsibility: mount or directory, the lock, leftovers of an earlier process, the fresh layout
(`root/table`, `root/slots/`, `root/lock`).

Invariants: one process at a time has a root (flock). An old table is marked dead before its name goes, so
attached readers notice; what holders have open is unlinked, never truncated.
Concurrency: called while a tier opens or closes.
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvfs import limits
from kvfs._native.table import Table
from kvfs.errors import ConfigError, DeviceMissing, NotFound, StoreLocked
from tiers import tmpfs

PAGE_BYTES = 4096

_log = logging.getLogger("kvfs.dram")


@dataclass(frozen=True, slots=True)
class Layout:
    """What `prepare` made: everything is open, locked and empty."""

    backing: str
    lockfd: int
    table: Table


def prepare(
    root: Path, capacity_bytes: int, *, store_id: bytes, slots: int, gid: int | None, mode: str
) -> Layout:
    """An empty layout at `root`. Raises DeviceMissing (mode "tmpfs" without the right to mount), StoreLocked,
    ConfigError, NoSpace."""
    root.mkdir(parents=True, exist_ok=True, mode=0o750)
    was_mounted = mode != "directory" and tmpfs.is_mounted(root)
    mounted = was_mounted or (mode != "directory" and _try_mount(root, capacity_bytes, slots, gid, mode))
    lockfd = -1
    try:
        lockfd = _lock(root)
        drop_files(root)
        if was_mounted:
            tmpfs.resize(root, capacity_bytes, inodes=_inodes(slots))
        table = _new_files(root, store_id, slots, gid)
    except BaseException:
        if lockfd >= 0:
            os.close(lockfd)
        if mounted and not was_mounted:
            tmpfs.unmount(root)
        raise
    return Layout("tmpfs" if mounted else "directory", lockfd, table)


def remove(root: Path, backing: str, lockfd: int) -> None:
    """Undo `prepare`: files go, the tmpfs is unmounted (lazily, while somebody holds a file)."""
    drop_files(root)
    with suppress(OSError):
        (root / "slots").rmdir()
    (root / "lock").unlink(missing_ok=True)
    os.close(lockfd)
    if backing == "tmpfs":
        tmpfs.unmount(root)


def _inodes(slots: int) -> int:
    """Slots, unlinked slots, and the few files beside them."""
    return slots + limits.MAX_HELD_SLOTS + 64


def _try_mount(root: Path, capacity_bytes: int, slots: int, gid: int | None, mode: str) -> bool:
    try:
        tmpfs.mount(root, capacity_bytes, inodes=_inodes(slots), gid=gid)
    except DeviceMissing as error:
        if mode == "tmpfs":
            raise
        _log.warning(
            "DRAM tier in the plain directory %s, where no kernel limit holds writers to its capacity: %s",
            root,
            error,
        )
        return False
    return True


def _lock(root: Path) -> int:
    """An exclusive lock that ends with the process. A file that its owner has just unlinked is no lock."""
    while True:
        fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise StoreLocked(f"another service uses the DRAM tier at {root}") from None
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def drop_files(root: Path) -> None:
    """Unlink the table and every slot; whoever has them open keeps them, and readers see the table dead."""
    with suppress(NotFound):
        Table.mark_dead(root / "table")
    for name in ("table", "table.new"):
        (root / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError), os.scandir(root / "slots") as entries:
        for entry in entries:
            os.unlink(entry.path)


def _new_files(root: Path, store_id: bytes, slots: int, gid: int | None) -> Table:
    os.makedirs(root / "slots", mode=0o750, exist_ok=True)
    entries = 1 << (slots * limits.TABLE_ENTRIES_PER_SLOT - 1).bit_length()
    table = Table.create(root / "table", store_id, slots, entries)
    for path in (root, root / "slots"):
        os.chmod(path, 0o750)
    if gid is not None:
        for path in (root, root / "slots", root / "table"):
            os.chown(path, -1, gid)
    return table


def checked_capacity(capacity_bytes: int, max_slots: int, mode: str) -> int:
    """The capacity in whole pages. Raises ConfigError naming what is out of bounds."""
    if mode not in ("auto", "tmpfs", "directory"):
        raise ConfigError(f"DRAM mode {mode!r} is none of auto, tmpfs, directory")
    if capacity_bytes < limits.MIN_DRAM_BYTES:
        raise ConfigError(f"DRAM capacity {capacity_bytes} is below the least, {limits.MIN_DRAM_BYTES} bytes")
    if not 0 < max_slots <= limits.MAX_SLOTS:
        raise ConfigError(f"{max_slots} slots; between 1 and {limits.MAX_SLOTS} are possible")
    return capacity_bytes // PAGE_BYTES * PAGE_BYTES
