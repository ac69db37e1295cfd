"""What the DRAM tier keeps on disk or tmpfs: made, resized and removed.

Responsibility: mount or directory, the lock, the layout (`root/table`, `root/slots/`, `root/lock`). What an
earlier process left in it is sorted out by `tiers.dram.recovery`.

Invariants:
- One process at a time has a root (flock).
- A start writes a table of its own, whole before it takes the old one's place: after a kill at any moment there is one
  or the other. The old one is marked dead before its name goes, so attached readers notice, and no slot is
  reused before that.
- What holders have open is unlinked, never truncated.

Concurrency: called while a tier opens or closes.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kvfs import limits
from kvfs._native.shared.table import MAX_LOAD_PERCENT, Table
from kvfs.errors import ConfigError, DeviceMissing, NotFound, StoreLocked
from kvfs.formats import INDEX_ENTRY, SLOT_HEADER, TABLE_HEADER_BYTES
from tiers.dram import recovery, tmpfs
from tiers.dram.accounting import PAGE_BYTES, Accounting
from tiers.dram.survivors import Choose, Recovered

_log = logging.getLogger("kvfs.dram")


@dataclass(frozen=True, slots=True)
class Layout:
    """Holds what `prepare` made: open, locked, and empty but for what was taken over."""

    backing: str
    lockfd: int
    table: Table
    recovered: Recovered
    is_moved: bool
    """Whether what was taken over lies on other NUMA nodes than what comes is to."""


def prepare(
    root: Path,
    capacity_bytes: int,
    *,
    store_id: bytes,
    slots: int,
    entries: int,
    gid: int | None,
    mode: str,
    numa_nodes: Sequence[int],
    choose: Choose | None,
) -> Layout:
    """Make a layout at `root`, with what `choose` chooses of an earlier one.

    Raises DeviceMissing (mode "tmpfs" without the right to mount), StoreLocked, ConfigError, NoSpace.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o750)
    was_mounted = _clear_other_backing(root, mode)
    mounted = was_mounted or _try_mount(root, capacity_bytes, slots, gid, mode, numa_nodes)
    with ExitStack() as undo:
        if mounted and not was_mounted:
            undo.callback(tmpfs.unmount, root)
        lockfd = _lock(root)
        undo.callback(os.close, lockfd)
        os.makedirs(root / "slots", mode=0o750, exist_ok=True)
        table_bytes = (
            TABLE_HEADER_BYTES + entries * INDEX_ENTRY.size + slots * SLOT_HEADER.size + 2 * PAGE_BYTES
        )
        before_bytes = tmpfs.size_bytes(root) if was_mounted else 0
        if was_mounted:  # whoever holds all of it, the new table has room beside the old one
            undo.callback(fit, root, before_bytes, slots)
            tmpfs.resize(root, max(capacity_bytes, before_bytes) + table_bytes, inodes=_inodes(slots))
        is_moved = was_mounted and tmpfs.place(root, numa_nodes)
        _drop(root, "table.new", "table.next", "table.next.new")
        recovered = recovery.take_over(
            root,
            store_id,
            slots=slots,
            capacity_bytes=capacity_bytes,
            table_bytes=table_bytes if mounted else 0,
            choose=choose,
        )
        undo.callback(recovered.close)
        table = _new_table(root, store_id, slots, entries, gid, recovered)
        if capacity_bytes < before_bytes - table_bytes:  # it was asked for less than holders may have
            tmpfs.resize(root, capacity_bytes, inodes=_inodes(slots))
        elif was_mounted:
            fit(root, capacity_bytes, slots)
        undo.pop_all()
    return Layout("tmpfs" if mounted else "directory", lockfd, table, recovered, is_moved)


def begin_accounting(layout: Layout) -> Accounting:
    """Account for what was taken over."""
    accounting, recovered = Accounting(layout.table.slots), layout.recovered
    accounting.fresh = min(recovered.adoption.slots_used, accounting.max_slots)
    accounting.sealed_total = recovered.adoption.fill_sealed(accounting.sealed.counts(accounting.fresh))
    for held in recovered.held:
        accounting.add_held(held)
    for slot, (uid, physical_bytes) in recovered.zombies.items():
        accounting.fresh = max(accounting.fresh, slot + 1)
        accounting.add_zombie(slot, uid, physical_bytes)
    free = accounting.sealed.free_below(accounting.fresh)
    accounting.bare.extend(slot for slot in free if slot not in accounting.zombies)
    accounting.bare.reverse()  # the lowest is taken first
    return accounting


def fit(root: Path, capacity_bytes: int, slots: int) -> bool:
    """Resize the tmpfs to its capacity; return False while holders keep more than that, and it stays larger."""
    try:
        tmpfs.resize(root, capacity_bytes, inodes=_inodes(slots))
    except ConfigError as error:
        _log.warning("%s", error)
        return False
    return True


def _clear_other_backing(root: Path, mode: str) -> bool:
    """Drop a tmpfs of an earlier service where a directory is wanted; return whether one is mounted, else."""
    was_mounted = tmpfs.is_mounted(root)
    if was_mounted and mode == "directory":
        _log.warning("%s: dropping the tmpfs of an earlier service, for a plain directory", root)
        remove_kept(root)
        return False
    return was_mounted


def remove_kept(root: Path) -> int:
    """Remove what a service kept in `root`; return the bytes of its slots. Raises StoreLocked while one runs."""
    if not root.is_dir():
        return 0
    lockfd = _lock(root)
    freed = 0
    with suppress(FileNotFoundError), os.scandir(root / "slots") as entries:
        freed = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
    remove(root, "tmpfs" if tmpfs.is_mounted(root) else "directory", lockfd)
    return freed


def remove(root: Path, backing: str, lockfd: int) -> None:
    """Undo `prepare`: files go, the tmpfs is unmounted (lazily, while somebody holds a file)."""
    _clear(root)
    os.close(lockfd)
    if backing == "tmpfs":
        tmpfs.unmount(root)


def _inodes(slots: int) -> int:
    """Count slots, unlinked slots, and the few files beside them."""
    return slots + limits.MAX_HELD_SLOTS + 64


def _try_mount(
    root: Path, capacity_bytes: int, slots: int, gid: int | None, mode: str, numa_nodes: Sequence[int]
) -> bool:
    if mode == "directory":
        return False
    below = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        tmpfs.mount(root, capacity_bytes, inodes=_inodes(slots), gid=gid, numa_nodes=numa_nodes)
        # Of a plain directory before: hidden, its files would lie there for good.
        _clear(Path(f"/proc/self/fd/{below}"))
    except DeviceMissing as error:
        if mode == "tmpfs":
            raise
        _log.warning(
            "DRAM tier in the plain directory %s, where no kernel limit holds writers to its capacity: %s",
            root,
            error,
        )
        return False
    finally:
        os.close(below)
    return True


def _lock(root: Path) -> int:
    """Take an exclusive lock that ends with the process. A file that its owner has just unlinked is no lock."""
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


def _clear(root: Path) -> None:
    """Unlink all files; whoever has them open keeps them, and readers see the table dead."""
    drop_table(root)
    with suppress(FileNotFoundError), os.scandir(root / "slots") as entries:
        for entry in entries:
            os.unlink(entry.path)
    with suppress(OSError):
        (root / "slots").rmdir()
    (root / "lock").unlink(missing_ok=True)


def drop_table(root: Path) -> None:
    """Unlink the table and unfinished ones; readers see it dead."""
    with suppress(NotFound):
        Table.mark_dead(root / "table")
    _drop(root, "table", "table.new", "table.next", "table.next.new")


def _drop(root: Path, *names: str) -> None:
    for name in names:
        (root / name).unlink(missing_ok=True)


def entry_count(slots: int, capacity_bytes: int, below: int, below_bytes: int) -> int:
    """Size a table for all slots, the `below` objects that lower tiers have, and those that they may get."""
    affordable = capacity_bytes // limits.TABLE_SHARE_OF_DRAM // INDEX_ENTRY.size
    below = max(below, min(below_bytes // limits.NVME_BYTES_PER_ENTRY, affordable))
    wanted = max(slots * limits.TABLE_ENTRIES_PER_SLOT, (slots + below) * 100 // MAX_LOAD_PERCENT + 1)
    return 1 << (wanted - 1).bit_length()


def _new_table(
    root: Path, store_id: bytes, slots: int, entries: int, gid: int | None, recovered: Recovered
) -> Table:
    if not len(recovered.adoption):  # nothing is lost with it, and on a full tmpfs its room is needed
        drop_table(root)
    table = Table.create(root / "table.next", store_id, slots, entries)
    try:
        recovered.adoption.write_headers(table)
        for path in (root, root / "slots"):
            os.chmod(path, 0o750)
        if gid is not None:
            for path in (root, root / "slots", root / "table.next"):
                os.chown(path, -1, gid)
        with suppress(NotFound):
            Table.mark_dead(root / "table")
        table.move(root / "table")
    except BaseException:
        table.close()
        raise
    return table


def checked_capacity(capacity_bytes: int, max_slots: int, mode: str) -> int:
    """Round the capacity to whole pages. Raises ConfigError naming what is out of bounds."""
    if mode not in ("auto", "tmpfs", "directory"):
        raise ConfigError(f"DRAM mode {mode!r} is none of auto, tmpfs, directory")
    if capacity_bytes < limits.MIN_DRAM_BYTES:
        raise ConfigError(f"DRAM capacity {capacity_bytes} is below the least, {limits.MIN_DRAM_BYTES} bytes")
    if not 0 < max_slots <= limits.MAX_SLOTS:
        raise ConfigError(f"{max_slots} slots; between 1 and {limits.MAX_SLOTS} are possible")
    return capacity_bytes // PAGE_BYTES * PAGE_BYTES
