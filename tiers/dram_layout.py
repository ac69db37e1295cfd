"""What the DRAM tier keeps on disk or tmpfs, and how it comes and goes.

Responsibility: mount or directory, the lock, the layout (`root/table`, `root/slots/`, `root/lock`). What an
earlier process left in it is sorted out by `tiers.adoption`.

Invariants:
- One process at a time has a root (flock).
- A start writes a table of its own, whole before it takes the old one's place: a kill at any moment leaves one
  or the other. The old one is marked dead before its name goes, so attached readers notice, and no slot is
  reused before that.
- What holders have open is unlinked, never truncated.

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
from kvfs._native.table import MAX_LOAD_PERCENT, SEALED, Table
from kvfs.errors import ConfigError, DeviceMissing, NotFound, StoreLocked
from kvfs.formats import INDEX_ENTRY, SLOT_HEADER, TABLE_HEADER_BYTES
from tiers import adoption, tmpfs
from tiers.adoption import Choose, Estate

PAGE_BYTES = 4096

_log = logging.getLogger("kvfs.dram")


@dataclass(frozen=True, slots=True)
class Layout:
    """What `prepare` made: open, locked, and empty but for what was taken over."""

    backing: str
    lockfd: int
    table: Table
    estate: Estate


def prepare(
    root: Path,
    capacity_bytes: int,
    *,
    store_id: bytes,
    slots: int,
    entries: int,
    gid: int | None,
    mode: str,
    choose: Choose | None,
) -> Layout:
    """A layout at `root`, with what `choose` wants of an earlier one; nothing without it.

    Raises DeviceMissing (mode "tmpfs" without the right to mount), StoreLocked, ConfigError, NoSpace.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o750)
    was_mounted = _clear_other_backing(root, mode)
    mounted = was_mounted or (mode != "directory" and _try_mount(root, capacity_bytes, slots, gid, mode))
    lockfd, estate = -1, Estate()
    before_bytes = 0
    try:
        lockfd = _lock(root)
        os.makedirs(root / "slots", mode=0o750, exist_ok=True)
        before_bytes = tmpfs.size_bytes(root) if was_mounted else 0
        table_bytes = _new_table_bytes(slots, entries)
        if was_mounted:  # whoever holds all of it, the new table has room beside the old one
            room_bytes = max(capacity_bytes, before_bytes) + table_bytes
            tmpfs.resize(root, room_bytes, inodes=_inodes(slots))
        _drop(root, "table.new", "table.next", "table.next.new")
        estate = adoption.take_over(
            root,
            store_id,
            slots=slots,
            capacity_bytes=capacity_bytes,
            table_bytes=table_bytes if mounted else 0,
            choose=choose,
        )
        table = _new_table(root, store_id, slots, entries, gid, estate)
        if capacity_bytes < before_bytes - table_bytes:  # it was asked for less than holders may have
            tmpfs.resize(root, capacity_bytes, inodes=_inodes(slots))
        elif was_mounted:
            fit(root, capacity_bytes, slots)
    except BaseException:
        estate.close()
        if lockfd >= 0:
            os.close(lockfd)
        if mounted and not was_mounted:
            tmpfs.unmount(root)
        elif before_bytes:
            fit(root, before_bytes, slots)
        raise
    return Layout("tmpfs" if mounted else "directory", lockfd, table, estate)


def fit(root: Path, capacity_bytes: int, slots: int) -> bool:
    """Give the tmpfs its capacity; False while holders keep more than that, and then it stays larger."""
    try:
        tmpfs.resize(root, capacity_bytes, inodes=_inodes(slots))
    except ConfigError as error:
        _log.warning("%s", error)
        return False
    return True


def _clear_other_backing(root: Path, mode: str) -> bool:
    """Drop what lies there in another backing than the one to use; whether the tmpfs of this one is mounted."""
    was_mounted = tmpfs.is_mounted(root)
    if was_mounted and mode == "directory":
        _log.warning("%s: dropping the tmpfs of an earlier service, for a plain directory", root)
        discard(root)
        return False
    return was_mounted


def discard(root: Path) -> int:
    """Give back what a service kept in `root`; the bytes of its slots. Raises StoreLocked while one runs."""
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
    """Slots, unlinked slots, and the few files beside them."""
    return slots + limits.MAX_HELD_SLOTS + 64


def _try_mount(root: Path, capacity_bytes: int, slots: int, gid: int | None, mode: str) -> bool:
    below = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        tmpfs.mount(root, capacity_bytes, inodes=_inodes(slots), gid=gid)
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


def _clear(root: Path) -> None:
    drop_files(root)
    with suppress(OSError):
        (root / "slots").rmdir()
    (root / "lock").unlink(missing_ok=True)


def drop_table(root: Path) -> None:
    with suppress(NotFound):
        Table.mark_dead(root / "table")
    _drop(root, "table", "table.new", "table.next", "table.next.new")


def drop_files(root: Path) -> None:
    """Unlink the table and every slot; whoever has them open keeps them, and readers see the table dead."""
    drop_table(root)
    with suppress(FileNotFoundError), os.scandir(root / "slots") as entries:
        for entry in entries:
            os.unlink(entry.path)


def _drop(root: Path, *names: str) -> None:
    for name in names:
        (root / name).unlink(missing_ok=True)


def entry_count(slots: int, capacity_bytes: int, below: int, below_bytes: int) -> int:
    """Of a table for all slots, the `below` objects that lower tiers have, and those that they may get."""
    affordable = capacity_bytes // limits.TABLE_SHARE_OF_DRAM // INDEX_ENTRY.size
    below = max(below, min(below_bytes // limits.NVME_BYTES_PER_ENTRY, affordable))
    wanted = max(slots * limits.TABLE_ENTRIES_PER_SLOT, (slots + below) * 100 // MAX_LOAD_PERCENT + 1)
    return 1 << (wanted - 1).bit_length()


def _new_table_bytes(slots: int, entries: int) -> int:
    """What a table may take at most."""
    return TABLE_HEADER_BYTES + entries * INDEX_ENTRY.size + slots * SLOT_HEADER.size + 2 * PAGE_BYTES


def _new_table(
    root: Path, store_id: bytes, slots: int, entries: int, gid: int | None, estate: Estate
) -> Table:
    if not estate.survivors:  # nothing is lost with it, and on a full tmpfs its room is needed
        drop_table(root)
    table = Table.create(root / "table.next", store_id, slots, entries)
    try:
        _write_headers(table, estate)
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


def _write_headers(table: Table, estate: Estate) -> None:
    survivors = {survivor.sealed.extent.slot: survivor for survivor in estate.survivors}
    for slot, generation in enumerate(estate.generations[: table.slots]):
        survivor = survivors.get(slot)
        if survivor is not None:
            sealed, header = survivor.sealed, survivor.sealed.header
            table.write_header(
                slot,
                state=SEALED,
                generation=generation,
                kind=header.key.kind,
                key=header.key.digest,
                size=sealed.size_bytes,
                object_id=header.object_id,
                sequence=header.sequence,
                flags=header.flags,
                checksum=sealed.checksum,
                parent=header.parent,
                uid=header.uid,
                bucket_id=header.bucket_id,
                sealed_at_ns=sealed.sealed_at_ns,
            )
        elif generation:
            table.set_generation(slot, (generation + 1 | 1) & 0xFFFFFFFF)


def checked_capacity(capacity_bytes: int, max_slots: int, mode: str) -> int:
    """The capacity in whole pages. Raises ConfigError naming what is out of bounds."""
    if mode not in ("auto", "tmpfs", "directory"):
        raise ConfigError(f"DRAM mode {mode!r} is none of auto, tmpfs, directory")
    if capacity_bytes < limits.MIN_DRAM_BYTES:
        raise ConfigError(f"DRAM capacity {capacity_bytes} is below the least, {limits.MIN_DRAM_BYTES} bytes")
    if not 0 < max_slots <= limits.MAX_SLOTS:
        raise ConfigError(f"{max_slots} slots; between 1 and {limits.MAX_SLOTS} are possible")
    return capacity_bytes // PAGE_BYTES * PAGE_BYTES
