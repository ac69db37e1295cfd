"""The DRAM tier: one file per object (a slot) on a private tmpfs, shared by every door as page cache.

Responsibility: allocate, seal, free and account slots. Who may read them, and which key leads to which slot, is
decided above; the index entries in the same table are written by the store.

Invariants:
- A slot's i_size is its object's size, and 0 while it is free. A free slot has no holder.
- A slot is reused only after its generation has moved *and* F_WRLCK on it was granted (slots_core.c), always by
  truncation. While somebody holds it, its name goes and its bytes stay charged: `_held`, one descriptor each, at
  most MAX_HELD_SLOTS; above that it waits as a zombie, name and all.
- Generations: odd while draft or free, even while sealed; a generation is handed out once.
- Capacity is physical bytes. On a tmpfs the kernel knows (statvfs) and enforces it (`size=`); in a plain directory
  the tier adds up st_blocks, and a draft that went over is refused at the seal.

Concurrency: one thread (the service's) calls the tier. Beside it the checksum thread opens sealed slots for reading;
every probe for holders pauses it for that slot, so that it is never taken for a reader.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import trio

from kvfs import limits
from kvfs._native import slots as native
from kvfs._native.checksummer import Checksummer
from kvfs._native.table import DRAFT, FREE, SEALED, Table
from kvfs.errors import (
    ConfigError,
    DeviceMissing,
    NoSpace,
    NotFound,
    ObjectTooLarge,
    StoreLocked,
    Superseded,
    Unsupported,
)
from tiers import tmpfs
from tiers.base import Extent, Kind, Sealed, SealHeader, StoreKey, Usage

_log = logging.getLogger(__name__)

_PAGE = 4096
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK


@dataclass(slots=True)
class _Held:
    """An unlinked file that somebody still has: our descriptor of it, and who pays."""

    fd: int
    physical_bytes: int
    uid: int


class DramLease:
    """A read-only descriptor of a sealed slot: while it is open, the slot is not recycled."""

    __slots__ = ("_fd", "size_bytes")

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes

    def fileno(self) -> int:
        return self._fd

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        """Page cache only: the read itself never waits for a device."""
        await trio.lowlevel.checkpoint()
        return os.preadv(self._fd, [buffer], offset)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class _Books:
    """Which slot is what, and who is charged. Slots not named anywhere here are sealed."""

    free: list[int] = field(default_factory=list)
    """Empty files, the latest freed last: its pages table and inode are still warm."""
    bare: list[int] = field(default_factory=list)
    """Free slots without a file."""
    fresh: int = 0
    """Slots from this one on were never used."""
    drafts: dict[int, int] = field(default_factory=dict)
    """Draft slot -> bytes promised to it and not seen written yet."""
    promised_bytes: int = 0
    sealed_bytes: dict[int, int] = field(default_factory=dict)
    """Physical bytes of each sealed slot."""
    sealed_total: int = 0
    held: list[_Held] = field(default_factory=list)
    zombies: dict[int, int] = field(default_factory=dict)
    """Retired slots that could be neither recycled nor detached yet -> uid."""
    zombie_bytes: dict[int, int] = field(default_factory=dict)
    charged: dict[int, int] = field(default_factory=dict)
    held_total: int = 0
    unsummed: list[Extent] = field(default_factory=list)
    """Sealed while the checksum queue was full."""

    def charge(self, uid: int, change_bytes: int) -> None:
        self.held_total += change_bytes
        left = self.charged.get(uid, 0) + change_bytes
        if left:
            self.charged[uid] = left
        else:
            self.charged.pop(uid, None)


class DramTier:
    """See `tiers.base.Tier`. Made by `open`."""

    name = "dram"

    def __init__(self, root: Path, capacity_bytes: int, backing: str, table: Table, gid: int | None) -> None:
        self.root = root
        self.backing = backing
        """"tmpfs" or "directory"."""
        self.table = table
        self._capacity = capacity_bytes
        self._largest = capacity_bytes // limits.OBJECT_SHARE_OF_DRAM
        self._gid = -1 if gid is None else gid
        self._max_slots = table.slots
        self._books = _Books()
        self._rootfd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._lockfd = -1
        self._slotfd = os.open(root / "slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._checksummer = Checksummer(table, self._slotfd)
        self._closed = False

    @classmethod
    def open(
        cls,
        root: Path,
        capacity_bytes: int,
        *,
        store_id: bytes,
        max_slots: int = limits.DEFAULT_SLOTS,
        gid: int | None = None,
        mode: str = "auto",
    ) -> DramTier:
        """A fresh tier at `root`; what an earlier process left there is dropped.

        `mode`: "tmpfs" (raises DeviceMissing without the right to mount), "directory", or "auto": tmpfs if
        possible. Raises ConfigError for a size out of bounds, StoreLocked while another process has it open,
        Unsupported where the filesystem has no leases.
        """
        capacity_bytes = _checked_capacity(capacity_bytes, max_slots, mode)
        # A page is the least that an object with bytes takes: more slots than that could not be filled.
        slots = min(max_slots, capacity_bytes // _PAGE)
        root.mkdir(parents=True, exist_ok=True, mode=0o750)
        mounted = mode != "directory" and _mount_if_possible(root, capacity_bytes, slots, gid, mode)
        lockfd = _lock(root)
        try:
            _drop_leftovers(root)
            if mounted:
                tmpfs.resize(root, capacity_bytes, inodes=_inodes(slots))
            table = _new_layout(root, store_id, slots, gid)
            tier = cls(root, capacity_bytes, "tmpfs" if mounted else "directory", table, gid)
        except BaseException:
            os.close(lockfd)
            raise
        tier._lockfd = lockfd
        try:
            tier._check_leases()
        except BaseException:
            tier.close()
            raise
        return tier

    def _check_leases(self) -> None:
        draft = self.reserve()
        os.close(self.open_draft(draft))
        try:
            native.check_no_writer(self._slotfd, draft.slot)
            self.abort(draft)
        except Unsupported as error:
            raise Unsupported(
                f"{self.root}: file leases (F_SETLEASE) do not work on this filesystem, so a slot's readers cannot be "
                "seen; use a tmpfs or a local filesystem owned by the service's user"
            ) from error

    # --- capacity ------------------------------------------------------------------------------------------

    def _used_bytes(self) -> int:
        if self.backing == "tmpfs":
            fs = os.fstatvfs(self._rootfd)
            return (fs.f_blocks - fs.f_bfree) * fs.f_bsize
        books = self._books
        drafts = sum(self._physical(slot) for slot in books.drafts)
        return books.sealed_total + books.held_total + drafts

    def _physical(self, slot: int) -> int:
        return os.stat(native.slot_name(slot), dir_fd=self._slotfd).st_blocks * 512

    def _settle_promises(self) -> None:
        """Count what drafts have written against what was promised to them."""
        books = self._books
        for slot, promised in books.drafts.items():
            if promised:
                left = max(0, promised - self._physical(slot))
                if left == 0:
                    books.promised_bytes -= promised
                    books.drafts[slot] = 0

    def _check_space(self, size_bytes: int) -> None:
        books = self._books
        if self._used_bytes() + books.promised_bytes + size_bytes <= self._capacity:
            return
        self._settle_promises()
        used = self._used_bytes()
        if used + books.promised_bytes + size_bytes > self._capacity:
            raise NoSpace(
                f"DRAM tier {self.root}: {used} bytes used and {books.promised_bytes} promised of {self._capacity}, "
                f"no room for {size_bytes}"
            )

    def usage(self) -> Usage:
        books = self._books
        free = len(books.free) + len(books.bare) + self._max_slots - books.fresh
        return Usage(
            capacity_bytes=self._capacity,
            used_bytes=self._used_bytes(),
            held_bytes=books.held_total,
            slots=self._max_slots - free,
            max_slots=self._max_slots,
            largest_object_bytes=self._largest,
        )

    def charged_bytes(self, uid: int) -> int:
        return self._books.charged.get(uid, 0)

    # --- drafts --------------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int = 0) -> Extent:
        """An empty draft. Raises NoSpace, ObjectTooLarge."""
        if size_bytes > self._largest:
            raise ObjectTooLarge(f"{size_bytes} bytes; the DRAM tier takes objects up to {self._largest}")
        promised = -(-size_bytes // _PAGE) * _PAGE
        self._check_space(promised)
        slot = self._take_slot()
        draft = Extent(slot, self.table.begin(slot))
        self._books.drafts[slot] = promised
        self._books.promised_bytes += promised
        return draft

    def _take_slot(self) -> int:
        books = self._books
        if books.free:
            return books.free.pop()
        if books.bare:
            slot = books.bare[-1]
        elif books.fresh < self._max_slots:
            slot = books.fresh
        else:
            raise NoSpace(f"DRAM tier {self.root}: all {self._max_slots} slots are in use")
        os.close(native.create(self._slotfd, slot, self._gid))
        if books.bare:
            books.bare.pop()
        else:
            books.fresh += 1
        return slot

    def _check_draft(self, draft: Extent) -> None:
        if draft.slot not in self._books.drafts or self.table.generation(draft.slot) != draft.generation:
            raise Superseded(f"slot {draft.slot} is no longer draft {draft.generation}")

    def open_draft(self, draft: Extent) -> int:
        """A read-write descriptor of the draft's payload; the caller closes it. Raises Superseded."""
        self._check_draft(draft)
        return native.open_slot(self._slotfd, draft.slot, os.O_RDWR)

    def seal(self, draft: Extent, header: SealHeader, checksum: int | None = None) -> Sealed:
        """Make the draft immutable; `checksum` is the payload's XXH3-64 if the writer knows it.

        Raises WriterActive while anyone can still write it, Superseded, ObjectTooLarge, NoSpace (the last two leave
        the draft as it is).
        """
        self._check_draft(draft)
        size_bytes, physical_bytes = native.check_no_writer(self._slotfd, draft.slot)
        if size_bytes > self._largest:
            raise ObjectTooLarge(f"{size_bytes} bytes; the DRAM tier takes objects up to {self._largest}")
        if self.backing == "directory" and self._used_bytes() > self._capacity:
            raise NoSpace(f"DRAM tier {self.root}: {physical_bytes} bytes were written over its {self._capacity}")
        generation = self.table.publish(
            draft.slot,
            draft.generation,
            kind=header.key.kind,
            key=header.key.digest,
            size=size_bytes,
            object_id=header.object_id,
            sequence=header.sequence,
            flags=header.flags,
            checksum=checksum,
            parent=header.parent,
            uid=header.uid,
            sealed_at_ns=time.time_ns(),
        )
        books = self._books
        books.promised_bytes -= books.drafts.pop(draft.slot)
        books.sealed_bytes[draft.slot] = physical_bytes
        books.sealed_total += physical_bytes
        extent = Extent(draft.slot, generation)
        if checksum is None and not self._checksummer.push(draft.slot, generation):
            books.unsummed.append(extent)
        return Sealed(extent, header, size_bytes, checksum)

    def abort(self, draft: Extent, *, charge_uid: int = 0) -> None:
        """Give the draft back, whoever still has it open (then its bytes are held, charged to `charge_uid`)."""
        self._check_draft(draft)
        self.table.retire(draft.slot, draft.generation)
        self._books.promised_bytes -= self._books.drafts.pop(draft.slot)
        self._give_back(draft.slot, charge_uid)

    # --- sealed extents ------------------------------------------------------------------------------------

    def _check_sealed(self, extent: Extent) -> None:
        if (
            extent.slot not in self._books.sealed_bytes
            or self.table.generation(extent.slot) != extent.generation
        ):
            raise Superseded(f"slot {extent.slot} no longer holds generation {extent.generation}")

    def open_sealed(self, extent: Extent) -> int:
        """A read-only descriptor of the payload; the caller closes it. Raises Superseded."""
        if extent.generation & 1:
            raise Superseded(f"slot {extent.slot} generation {extent.generation} is a draft")
        self._check_sealed(extent)
        fd = native.open_slot(self._slotfd, extent.slot, _READ_FLAGS)
        if fd < 0 or self.table.generation(extent.slot) != extent.generation:
            if fd >= 0:
                os.close(fd)
            raise Superseded(f"slot {extent.slot} is being recycled")
        return fd

    def lease(self, extent: Extent) -> DramLease:
        """Raises Superseded when the extent is no longer that object."""
        fd = self.open_sealed(extent)
        return DramLease(fd, os.fstat(fd).st_size)

    def held(self, extent: Extent) -> bool:
        """Whether anyone but the service has the extent open or mapped now (or that cannot be told)."""
        self._check_sealed(extent)
        if not self._checksummer.pause(extent.slot):
            return True
        try:
            return native.is_held(self._slotfd, extent.slot)
        finally:
            self._checksummer.resume()

    def free(self, extent: Extent, *, charge_uid: int = 0) -> int:
        """Give a sealed extent back. The bytes that stay held, charged to `charge_uid`; 0 when all are free."""
        self._check_sealed(extent)
        self.table.retire(extent.slot, extent.generation)
        self._books.sealed_total -= self._books.sealed_bytes.pop(extent.slot)
        return self._give_back(extent.slot, charge_uid)

    def _recycled(self, slot: int) -> bool:
        """Empty the slot, if nobody holds it."""
        try:
            return native.recycle(self._slotfd, slot)
        except Unsupported:  # leases stopped working: then everybody may be a reader
            return False

    def _give_back(self, slot: int, uid: int) -> int:
        """A retired slot becomes free, or its file held, or itself a zombie. The bytes that stay held."""
        books = self._books
        if not self._checksummer.pause(slot):
            return self._make_zombie(slot, uid)
        try:
            if self._recycled(slot):
                books.free.append(slot)
                return 0
        finally:
            self._checksummer.resume()
        if len(books.held) >= limits.MAX_HELD_SLOTS:
            return self._make_zombie(slot, uid)
        fd, physical_bytes = native.detach(self._slotfd, slot)
        books.held.append(_Held(fd, physical_bytes, uid))
        books.bare.append(slot)
        books.charge(uid, physical_bytes)
        return physical_bytes

    def _make_zombie(self, slot: int, uid: int) -> int:
        physical_bytes = self._physical(slot)
        self._books.zombies[slot] = uid
        self._books.zombie_bytes[slot] = physical_bytes
        self._books.charge(uid, physical_bytes)
        return physical_bytes

    def sweep(self) -> int:
        """Drop what holders have let go since; the bytes that became free."""
        books = self._books
        before = books.held_total
        still: list[_Held] = []
        for held in books.held:
            now_bytes = native.physical_bytes(held.fd)  # an aborted draft's writer may still write
            books.charge(held.uid, now_bytes - held.physical_bytes)
            before += now_bytes - held.physical_bytes
            held.physical_bytes = now_bytes
            if native.fd_is_held(held.fd):
                still.append(held)
            else:
                os.close(held.fd)
                books.charge(held.uid, -held.physical_bytes)
        books.held = still
        for slot in list(books.zombies):
            uid = books.zombies.pop(slot)
            books.charge(uid, -books.zombie_bytes.pop(slot))
            self._give_back(slot, uid)
        self._retry_checksums()
        return max(0, before - books.held_total)

    # --- checksums and iteration ---------------------------------------------------------------------------

    def _retry_checksums(self) -> None:
        waiting = self._books.unsummed
        while waiting and self._checksummer.push(waiting[-1].slot, waiting[-1].generation):
            waiting.pop()

    def checksum(self, extent: Extent) -> int | None:
        """The payload's XXH3-64; None while it is still being computed. Raises Superseded."""
        self._check_sealed(extent)
        value = self.table.read_header(extent.slot).checksum
        if value is None and self._checksummer.idle:  # it never came into the queue, or its read failed
            self._retry_checksums()
            self._checksummer.push(extent.slot, extent.generation)
        return value

    def wait_checksums(self, timeout_s: float) -> None:
        """Block until every sealed slot so far has its checksum. Raises DeadlinePassed."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._retry_checksums()
            self._checksummer.drain(max(0.0, deadline - time.monotonic()))
            if not self._books.unsummed:
                return

    def sealed(self) -> Iterator[Sealed]:
        """Every sealed extent, in slot order."""
        for slot in sorted(self._books.sealed_bytes):
            raw = self.table.read_header(slot)
            if raw.state != SEALED:
                continue
            header = SealHeader(
                key=StoreKey(Kind(raw.kind), raw.key),
                object_id=raw.object_id,
                sequence=raw.sequence,
                parent=raw.parent,
                flags=raw.flags,
                uid=raw.uid,
            )
            yield Sealed(Extent(slot, raw.generation), header, raw.size_bytes, raw.checksum)

    # --- the end -------------------------------------------------------------------------------------------

    def close(self, keep: bool = False) -> None:
        """Stop. Unless `keep`, files go and the tmpfs is unmounted (lazily, while somebody holds a file)."""
        if self._closed:
            return
        self._closed = True
        self._checksummer.close()
        if keep:
            self.table.clean = True
        else:
            self.table.set_dead()
        self.table.close()
        for held in self._books.held:
            os.close(held.fd)
        if not keep:
            _drop_leftovers(self.root)
        for fd in (self._slotfd, self._rootfd, self._lockfd):
            if fd >= 0:
                os.close(fd)
        if not keep and self.backing == "tmpfs":
            tmpfs.unmount(self.root)


def _checked_capacity(capacity_bytes: int, max_slots: int, mode: str) -> int:
    if mode not in ("auto", "tmpfs", "directory"):
        raise ConfigError(f"DRAM mode {mode!r} is none of auto, tmpfs, directory")
    if capacity_bytes < limits.MIN_DRAM_BYTES:
        raise ConfigError(f"DRAM capacity {capacity_bytes} is below the least, {limits.MIN_DRAM_BYTES} bytes")
    if not 0 < max_slots <= limits.MAX_SLOTS:
        raise ConfigError(f"{max_slots} slots; between 1 and {limits.MAX_SLOTS} are possible")
    return capacity_bytes // _PAGE * _PAGE


def _inodes(slots: int) -> int:
    """Slots, unlinked slots, and the few files beside them."""
    return slots + limits.MAX_HELD_SLOTS + 64


def _mount_if_possible(root: Path, capacity_bytes: int, slots: int, gid: int | None, mode: str) -> bool:
    if tmpfs.is_mounted(root):
        return True
    try:
        tmpfs.mount(root, capacity_bytes, inodes=_inodes(slots), gid=gid)
    except DeviceMissing as error:
        if mode == "tmpfs":
            raise
        _log.warning("DRAM tier in the plain directory %s: %s. Nothing but the tier itself bounds its size.", root, error)
        return False
    return True


def _lock(root: Path) -> int:
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreLocked(f"another service uses the DRAM tier at {root}") from None
    return fd


def _drop_leftovers(root: Path) -> None:
    """Unlink what an earlier process left; whoever has it open keeps it, and its readers see that it is dead."""
    with suppress(NotFound):
        Table.mark_dead(root / "table")
    for name in ("table", "table.new"):
        (root / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError), os.scandir(root / "slots") as entries:
        for entry in entries:
            os.unlink(entry.path)


def _new_layout(root: Path, store_id: bytes, slots: int, gid: int | None) -> Table:
    os.makedirs(root / "slots", mode=0o750, exist_ok=True)
    entries = 1 << (slots * limits.TABLE_ENTRIES_PER_SLOT - 1).bit_length()
    table = Table.create(root / "table", store_id, slots, entries)
    for path in (root, root / "slots"):
        os.chmod(path, 0o750)
    if gid is not None:
        for path in (root, root / "slots", root / "table"):
            os.chown(path, -1, gid)
    return table


__all__ = ["DRAFT", "FREE", "SEALED", "DramLease", "DramTier"]
