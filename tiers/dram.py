"""The DRAM tier: one file per object (a slot) on a private tmpfs, shared by every door as page cache.

Responsibility: allocate, seal, free and account slots. Who may read them, and which key leads to which slot,
is decided above; the index entries in the same table are written by the store.

Invariants:
- A slot's i_size is its object's size, and 0 while it is free. A free slot has no holder.
- A slot is reused only after its generation has moved *and* F_WRLCK on it was granted (slots_core.c), always
  by truncation. While somebody holds it, its name goes and its bytes stay charged: one descriptor each, at
  most MAX_HELD_SLOTS; above that it waits as a zombie, name and all.
- Generations: odd while draft or free, even while sealed; a generation is handed out once.
- Capacity is physical bytes. On a tmpfs the kernel knows (statvfs) and enforces it (`size=`); in a plain
  directory the tier adds up st_blocks, and a draft that went over is refused at the seal.

Concurrency: one thread (the service's) calls the tier. Beside it the checksum thread opens sealed slots for
reading; every probe for holders pauses it for that slot, so that it is never taken for a reader.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import trio

from kvfs import limits
from kvfs._native import slots as native
from kvfs._native.checksummer import Checksummer
from kvfs._native.sealer import Sealer
from kvfs.errors import DeadlinePassed, NoSpace, ObjectTooLarge, Superseded, Unsupported, WrongChecksum
from tiers import dram_layout, tmpfs
from tiers.adoption import Choose
from tiers.base import Extent, Kind, Sealed, SealHeader, StoreKey, Usage
from tiers.dram_books import Books, Held
from tiers.dram_layout import PAGE_BYTES, Layout

log = logging.getLogger("kvfs.dram")

_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK
_RECOUNT_SHARE = 16
"""In a directory, drafts are measured again every (drafts / this) reservations: 16 stats each."""


class DramLease:
    """A read-only descriptor of a sealed slot: while it is open, the slot is not recycled."""

    __slots__ = ("_fd", "size_bytes")

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes

    def fileno(self) -> int:
        return self._fd

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; the count read. Page cache only, so no thread is needed."""
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


class DramTier:
    """See `tiers.base.Tier`. Made by `open`."""

    name = "dram"

    def __init__(self, root: Path, capacity_bytes: int, layout: Layout, gid: int | None) -> None:
        self.root = root
        self.backing = layout.backing
        """"tmpfs" or "directory"."""
        self.table = layout.table
        self._capacity = capacity_bytes
        self.largest_object_bytes = capacity_bytes // limits.OBJECT_SHARE_OF_DRAM
        self._gid = -1 if gid is None else gid
        self._books = _books_of(layout)
        self.adopted = layout.estate.survivors
        """What was taken over from an earlier service; the store takes it out."""
        self.verify_s = layout.estate.verify_s
        """How long it took to verify that."""
        self._lockfd = layout.lockfd
        self._rootfd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._slotfd = os.open(root / "slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._checksummer = Checksummer(self.table, self._slotfd)
        self._draft_bytes = 0
        self._recount_in = 0
        self._is_wide = self.backing == "tmpfs" and tmpfs.size_bytes(root) > capacity_bytes
        """Whether holders kept the start from giving the tmpfs its capacity."""
        self._closed = False

    @property
    def directory(self) -> Path:
        """The folder of the slot files, named by `slots.slot_name`."""
        return self.root / "slots"

    @property
    def table_path(self) -> Path:
        return self.root / "table"

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
        choose: Choose | None = None,
        below: tuple[int, int] = (0, 0),
    ) -> DramTier:
        """A tier at `root`. Of what an earlier process left there, it takes over the sealed slots that are whole
        and that `choose` wants (see `tiers.adoption`; `adopted` lists them), and drops the rest. `below`:
        objects that lower tiers have and their capacity in bytes, for which the table has room, too.

        `mode`: "tmpfs" (raises DeviceMissing without the right to mount), "directory", or "auto": tmpfs if
        possible. Raises ConfigError for a size out of bounds, StoreLocked while another process has it open,
        Unsupported where the filesystem has no leases.
        """
        capacity_bytes = dram_layout.checked_capacity(capacity_bytes, max_slots, mode)
        # A page is the least that an object with bytes takes: more slots than that would cost table and hold nothing.
        slots = min(max_slots, capacity_bytes // PAGE_BYTES)
        layout = dram_layout.prepare(
            root,
            capacity_bytes,
            store_id=store_id,
            slots=slots,
            entries=dram_layout.entry_count(slots, capacity_bytes, *below),
            gid=gid,
            mode=mode,
            choose=choose,
        )
        tier = cls(root, capacity_bytes, layout, gid)
        try:
            tier._check_leases()
        except BaseException:
            tier.close(keep=bool(tier.adopted))
            raise
        return tier

    def _check_leases(self) -> None:
        if self.adopted:  # each was probed; and there may be no slot to spare
            return
        try:
            draft = self.reserve()
        except NoSpace:  # somebody holds all of it; a seal would say so
            return
        try:
            native.check_no_writer(self._slotfd, draft.slot)
        except Unsupported as error:
            raise Unsupported(
                f"{self.root}: file leases (F_SETLEASE) do not work here, so readers cannot be seen; "
                "use a tmpfs or a local filesystem, owned by the service's user"
            ) from error
        self.abort(draft)

    # --- capacity ------------------------------------------------------------------------------------------

    def _physical(self, slot: int) -> int:
        return os.stat(native.slot_name(slot), dir_fd=self._slotfd).st_blocks * 512

    def _used_bytes(self) -> int:
        """Exact on a tmpfs; in a directory, drafts count as they were when last measured."""
        if self.backing == "tmpfs":
            fs = os.fstatvfs(self._rootfd)
            return (fs.f_blocks - fs.f_bfree) * fs.f_bsize
        return self._books.sealed_total + self._books.held_total + self._draft_bytes

    def _measure_drafts(self) -> int:
        """Look at every draft; the bytes promised to drafts and not written yet."""
        books = self._books
        outstanding = self._draft_bytes = 0
        for slot, promised in books.drafts.items():
            if promised or self.backing == "directory":
                physical = self._physical(slot)
                self._draft_bytes += physical
                outstanding += max(0, promised - physical)
                if promised and physical >= promised:
                    books.fulfil(slot)
        self._recount_in = len(books.drafts) // _RECOUNT_SHARE
        return outstanding

    def _check_space(self, size_bytes: int) -> None:
        promised = self._books.promised_bytes
        if self.backing == "directory":
            self._recount_in -= 1
        if self._recount_in >= 0 and self._used_bytes() + promised + size_bytes <= self._capacity:
            return
        promised = self._measure_drafts()
        used = self._used_bytes()
        if used + promised + size_bytes > self._capacity:
            raise NoSpace(
                f"DRAM tier {self.root}: {used} bytes used and {promised} promised of {self._capacity}, "
                f"no room for {size_bytes}"
            )

    def usage(self) -> Usage:
        if self.backing == "directory":
            self._measure_drafts()
        books = self._books
        return Usage(
            capacity_bytes=self._capacity,
            used_bytes=self._used_bytes(),
            held_bytes=books.held_total,
            slots=books.max_slots - books.free_slots,
            max_slots=books.max_slots,
            largest_object_bytes=self.largest_object_bytes,
        )

    def charged_bytes(self, uid: int) -> int:
        return self._books.charged.get(uid, 0)

    @property
    def most_charged_bytes(self) -> int:
        """What the uid that is charged most is charged."""
        return max(self._books.charged.values(), default=0)

    # --- drafts --------------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int = 0) -> Extent:
        """An empty draft, `size_bytes` promised to it until it is sealed. Raises NoSpace, ObjectTooLarge."""
        self._check_size(size_bytes)
        promised = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._check_space(promised)
        slot = self._take_slot()
        try:
            draft = Extent(slot, self.table.begin(slot))
        except NoSpace:  # no page for the slot's header
            self._books.free.append(slot)
            raise
        self._books.open_draft(slot, promised)
        return draft

    def promise(self, draft: Extent, size_bytes: int) -> None:
        """Promise so many bytes in all to a draft. Raises NoSpace, ObjectTooLarge, Superseded."""
        self._check_draft(draft)
        self._check_size(size_bytes)
        promised = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        had = self._books.drafts[draft.slot] or self._physical(draft.slot)
        if promised > had:
            self._check_space(promised - had)
            self._books.promise(draft.slot, promised)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.largest_object_bytes:
            raise ObjectTooLarge(
                f"{size_bytes} bytes; the DRAM tier takes objects up to {self.largest_object_bytes}"
            )

    def _take_slot(self) -> int:
        books = self._books
        if books.free:
            return books.free.pop()
        if books.bare:
            slot = books.bare[-1]
        elif books.fresh < books.max_slots:
            slot = books.fresh
        else:
            raise NoSpace(f"DRAM tier {self.root}: all {books.max_slots} slots are in use")
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

    def draft_bytes(self, draft: Extent) -> int:
        """How long the draft is now. Raises Superseded."""
        self._check_draft(draft)
        return os.stat(native.slot_name(draft.slot), dir_fd=self._slotfd).st_size

    def _check_sealable(self, draft: Extent) -> tuple[int, int]:
        """(size, physical bytes) of a draft that may be sealed now."""
        size_bytes, physical_bytes = native.check_no_writer(self._slotfd, draft.slot)
        self._check_size(size_bytes)
        books = self._books
        over = books.sealed_total + books.held_total + physical_bytes - self._capacity
        if self.backing == "directory" and over > 0:
            raise NoSpace(f"DRAM tier {self.root}: the draft goes {over} bytes over its {self._capacity}")
        return size_bytes, physical_bytes

    def hole_bytes(self, draft: Extent) -> int:
        """How much of a draft nobody has written, as far as that takes no memory yet."""
        found = os.stat(native.slot_name(draft.slot), dir_fd=self._slotfd)
        return max(0, found.st_size - found.st_blocks * 512)

    def fill_holes(self, draft: Extent) -> None:
        """Give holes their memory before the seal: whoever maps one while the tier is full meets SIGBUS. Raises
        NoSpace."""
        self._check_draft(draft)
        descriptor = native.open_slot(self._slotfd, draft.slot, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
        except OSError as error:
            raise NoSpace(
                f"DRAM tier {self.root}: {error.strerror}, the holes of a draft need room"
            ) from None
        finally:
            os.close(descriptor)

    def seal(
        self, draft: Extent, header: SealHeader, checksum: int | None = None, *, verify: bool = False
    ) -> Sealed:
        """Make the draft immutable; `checksum` is the payload's XXH3-64 if the writer knows it.

        Raises WriterActive while anyone can still write it, Superseded, ObjectTooLarge, NoSpace, and with `verify`
        WrongChecksum where the payload has another one; the draft then stays as it is.
        """
        self._check_draft(draft)
        size_bytes, physical_bytes = self._check_sealable(draft)
        if verify and checksum is not None:
            self._check_payload(draft, checksum)
        sealed_at_ns = time.time_ns()
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
            bucket_id=header.bucket_id,
            sealed_at_ns=sealed_at_ns,
        )
        self._books.close_draft(draft.slot)
        self._books.add_sealed(draft.slot, physical_bytes)
        if checksum is None:
            self._queue_checksum(draft.slot, generation)
        return Sealed(Extent(draft.slot, generation), header, size_bytes, checksum, sealed_at_ns)

    def _check_payload(self, draft: Extent, checksum: int) -> None:
        descriptor = native.open_slot(self._slotfd, draft.slot, os.O_RDONLY)
        try:
            found = native.fd_xxh3_64(descriptor)
        finally:
            os.close(descriptor)
        if found != checksum:
            raise WrongChecksum(f"the draft has XXH3-64 {found:016x}, its writer gave {checksum:016x}")

    def make_sealer(self) -> Sealer:
        """A thread that seals drafts of blocks in this tier; `note_sealed` is told of each. Raises OSError."""
        return Sealer(self.table, self._slotfd, self.largest_object_bytes)

    def note_sealed(self, draft: Extent, physical_bytes: int, *, has_checksum: bool) -> Extent:
        """The sealing thread has made this draft immutable; its extent."""
        sealed = Extent(draft.slot, draft.generation + 1)
        self._books.close_draft(draft.slot)
        self._books.add_sealed(draft.slot, physical_bytes)
        if not has_checksum:
            self._queue_checksum(sealed.slot, sealed.generation)
        return sealed

    def abort(self, draft: Extent, *, charge_uid: int = 0) -> None:
        """Give the draft back, whoever has it open: its bytes are then held, charged to `charge_uid`."""
        self._check_draft(draft)
        self.table.retire(draft.slot, draft.generation)
        self._books.close_draft(draft.slot)
        self._give_back(draft.slot, charge_uid)

    # --- sealed extents ------------------------------------------------------------------------------------

    def _check_sealed(self, extent: Extent) -> None:
        live = extent.slot in self._books.sealed_bytes
        if not live or self.table.generation(extent.slot) != extent.generation:
            raise Superseded(f"slot {extent.slot} no longer holds generation {extent.generation}")

    def open_sealed(self, extent: Extent) -> int:
        """A read-only descriptor of the payload; the caller closes it. Raises Superseded."""
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
        """Give a sealed extent back. The bytes that stay held, charged to `charge_uid`; 0 if all are free."""
        self._check_sealed(extent)
        self.table.retire(extent.slot, extent.generation)
        self._books.drop_sealed(extent.slot)
        return self._give_back(extent.slot, charge_uid)

    def _give_back(self, slot: int, uid: int) -> int:
        """A retired slot becomes free, or its file held, or itself a zombie. The bytes that stay held."""
        books = self._books
        if not self._checksummer.pause(slot):
            return self._make_zombie(slot, uid)
        try:
            recycled = self._recycle(slot)
        finally:
            self._checksummer.resume()
        if recycled:
            books.free.append(slot)
            return 0
        if len(books.held) >= limits.MAX_HELD_SLOTS:
            return self._make_zombie(slot, uid)
        try:
            fd, physical_bytes = native.detach(self._slotfd, slot)
        except OSError:  # out of descriptors
            return self._make_zombie(slot, uid)
        books.add_held(Held(fd, physical_bytes, uid))
        books.bare.append(slot)
        return physical_bytes

    def _recycle(self, slot: int) -> bool:
        """Empty the slot, if nobody holds it."""
        try:
            return native.recycle(self._slotfd, slot)
        except (
            Unsupported,
            OSError,
        ):  # no leases any more, or no descriptors: then everybody may be a reader
            return False

    def _make_zombie(self, slot: int, uid: int) -> int:
        physical_bytes = self._physical(slot)
        self._books.add_zombie(slot, uid, physical_bytes)
        return physical_bytes

    def sweep(self) -> int:
        """Drop what holders have let go since; the bytes that became free."""
        books = self._books
        freed = 0
        still: list[Held] = []
        for held in books.held:
            if native.fd_is_held(held.fd):
                now_bytes = native.physical_bytes(held.fd)  # an aborted draft's writer may still write
                books.charge(held.uid, now_bytes - held.physical_bytes)
                held.physical_bytes = now_bytes
                still.append(held)
            else:
                os.close(held.fd)
                books.charge(held.uid, -held.physical_bytes)
                freed += held.physical_bytes
        books.held = still
        if self._is_wide and self._used_bytes() <= self._capacity:
            self._is_wide = not dram_layout.fit(self.root, self._capacity, books.max_slots)
        for slot, (_, physical_bytes) in list(books.zombies.items()):
            freed += physical_bytes - self._give_back(slot, books.drop_zombie(slot))
        self._retry_checksums()
        return max(0, freed)

    # --- checksums and iteration ---------------------------------------------------------------------------

    def _queue_checksum(self, slot: int, generation: int) -> None:
        if self._books.unsummed:
            self._retry_checksums()
        if not self._checksummer.push(slot, generation):
            self._books.unsummed[slot] = generation

    def _retry_checksums(self) -> None:
        waiting = self._books.unsummed
        for slot in list(waiting):
            if not self._checksummer.push(slot, waiting[slot]):
                return
            del waiting[slot]

    def checksum(self, extent: Extent) -> int | None:
        """The payload's XXH3-64; None while it is still being computed. Raises Superseded."""
        self._check_sealed(extent)
        value = self.table.read_header(extent.slot).checksum
        if value is None and self._checksummer.idle:  # it waited for room in the queue, or its read failed
            self._queue_checksum(extent.slot, extent.generation)
        return value

    def wait_checksums(self, timeout_s: float) -> None:
        """Block until what is sealed has its checksum. Raises DeadlinePassed."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._retry_checksums()
            self._checksummer.drain(max(0.0, deadline - time.monotonic()))
            if not self._books.unsummed:
                return

    @property
    def sealed_bytes(self) -> int:
        """Physical, of all sealed slots."""
        return self._books.sealed_total

    def sealed_slots(self) -> list[int]:
        return sorted(self._books.sealed_bytes)

    def sealed(self) -> Iterator[Sealed]:
        """Every sealed extent, in slot order."""
        for slot in self.sealed_slots():
            if (sealed := self.look(slot)) is not None:
                yield sealed

    def look(self, slot: int) -> Sealed | None:
        """What is sealed in a slot."""
        if slot not in self._books.sealed_bytes:
            return None
        raw = self.table.read_header(slot)
        header = SealHeader(
            key=StoreKey(Kind(raw.kind), raw.key),
            object_id=raw.object_id,
            sequence=raw.sequence,
            parent=raw.parent,
            flags=raw.flags,
            uid=raw.uid,
            bucket_id=raw.bucket_id,
        )
        extent = Extent(slot, raw.generation)
        return Sealed(extent, header, raw.size_bytes, raw.checksum, raw.sealed_at_ns)

    # --- the end -------------------------------------------------------------------------------------------

    def close(self, keep: bool = False) -> None:
        """Stop. Unless `keep`, files go and the tmpfs is unmounted (lazily, while somebody holds a file).

        With `keep`, what is sealed stays for the next `open`: waits KEEP_WAIT_S at most for its checksums.
        """
        if self._closed:
            return
        self._closed = True
        if keep:
            self._settle()
        self._checksummer.close()
        self.table.clean = keep
        self.table.close()
        for fd in (self._slotfd, self._rootfd, *(held.fd for held in self._books.held)):
            os.close(fd)
        if keep:
            os.close(self._lockfd)
        else:
            dram_layout.remove(self.root, self.backing, self._lockfd)

    def _settle(self) -> None:
        """Nothing that the next start would drop stays in memory: checksums are there, drafts are gone."""
        for slot in self._books.drafts:
            with suppress(OSError):
                os.unlink(native.slot_name(slot), dir_fd=self._slotfd)
        try:
            self.wait_checksums(limits.KEEP_WAIT_S)
        except DeadlinePassed:
            log.warning("%s: some objects have no checksum yet, and will not outlive this stop", self.root)


def _books_of(layout: Layout) -> Books:
    """The books of a tier that begins with what was taken over."""
    books, estate = Books(layout.table.slots), layout.estate
    for survivor in estate.survivors:
        books.add_sealed(survivor.sealed.extent.slot, survivor.physical_bytes)
    for held in estate.held:
        books.add_held(held)
    for slot, (uid, physical_bytes) in estate.zombies.items():
        books.add_zombie(slot, uid, physical_bytes)
    taken = books.sealed_bytes.keys() | books.zombies.keys()
    books.fresh = min(max(len(estate.generations), max(taken, default=-1) + 1), books.max_slots)
    books.bare = [slot for slot in reversed(range(books.fresh)) if slot not in taken]
    return books
