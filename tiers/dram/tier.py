"""The DRAM tier: one file per object (a slot) on a private tmpfs, shared by every door as page cache.

Responsibility: allocate, seal, free and account slots. Who may read them, and which key leads to which slot,
is decided above; the index entries in the same table are written by the store.

Invariants:
- A slot's i_size is its object's size. A free slot has no holder; it is empty, or keeps its last object's bytes for a
  draft whose writer asks for that (`reserve` with `kept_bytes`).
- A slot is reused only after its generation has moved and it was freed (`tiers.dram.recycler`).
- Generations: odd while draft or free, even while sealed; a generation is handed out once.
- Capacity is physical bytes (`tiers.dram.space`); a draft that went over is refused at the seal.

Concurrency: one thread (the service's) calls the tier. Beside it the checksum thread opens sealed slots for
reading; every probe for holders pauses it for that slot, so that it is never taken for a reader.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import trio

from kvfs import limits
from kvfs._native.catalog.adoption import Adoption, slot_matches
from kvfs._native.seal.sealer import Sealer
from kvfs._native.shared import slots as native
from kvfs.errors import DeadlinePassed, NoSpace, ObjectTooLarge, Superseded
from tiers.dram import headers
from tiers.dram.accounting import PAGE_BYTES, whole_pages
from tiers.dram.checksums import ChecksumQueue
from tiers.dram.layout import (
    Layout,
    begin_accounting,
    checked_capacity,
    entry_count,
    prepare,
    remove,
)
from tiers.dram.page_filler import PageFiller
from tiers.dram.recycler import SlotRecycler
from tiers.dram.slot_files import DramLease, SlotFiles
from tiers.dram.space import DramSpace
from tiers.dram.survivors import Choose
from tiers.model.tier import Extent, Sealed, SealHeader, Usage

log = logging.getLogger("kvfs.dram")


class DramTier:
    """See the module's header. Made by `open`."""

    name = "dram"

    def __init__(self, root: Path, capacity_bytes: int, layout: Layout, gid: int | None) -> None:
        self.root = root
        self.directory = root / "slots"
        """Folder of the slot files, named by `slots.slot_name`."""
        self.backing = layout.backing
        """"tmpfs" or "directory"."""
        self.table = layout.table
        self.largest_object_bytes = capacity_bytes // limits.OBJECT_SHARE_OF_DRAM
        self._accounting = begin_accounting(layout)
        self._adoption: Adoption | None = layout.recovered.adoption
        self.verify_s = layout.recovered.verify_s
        """How long verifying them took."""
        self._lockfd = layout.lockfd
        self._files = SlotFiles(root, gid)
        self.keeps_pages = layout.backing == "tmpfs" and self._files.shows_reads()
        """Whether free slots may keep pages: the kernel notes who reads them."""
        self._accounting.kept.most_bytes = _most_kept_bytes(capacity_bytes) if self.keeps_pages else 0
        self._space = DramSpace(root, self.backing, capacity_bytes, self._files, self._accounting)
        self.checksums = ChecksumQueue(self.table, self._files.fd)
        moved = self._accounting.fresh if layout.is_moved else 0
        self._recycler = SlotRecycler(self._files, self._accounting, self.checksums, moved)
        self.filler = PageFiller(self._files, self._accounting, self._recycler, self._free_bytes)
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
        numa_nodes: Sequence[int] = (),
        choose: Choose | None = None,
        below: tuple[int, int] = (0, 0),
    ) -> DramTier:
        """Open a tier at `root`. Of what an earlier process kept there, it takes over the sealed slots that are whole
        and that `choose` wants (see `tiers.dram.recovery`; `take_adoption` returns them), and drops the rest. `below`:
        objects that lower tiers have and their capacity in bytes, for which the table has room, too.

        `mode`: "tmpfs" (raises DeviceMissing without the right to mount), "directory", or "auto": tmpfs if
        possible. `numa_nodes`: where a tmpfs takes its memory while it lasts there. Raises ConfigError for a size out
        of bounds, StoreLocked while another process has it open, Unsupported where the filesystem has no leases.
        """
        capacity_bytes = checked_capacity(capacity_bytes, max_slots, mode)
        # A page is the least that an object with bytes takes: more slots than that would cost table and hold nothing.
        slots = min(max_slots, capacity_bytes // PAGE_BYTES)
        layout = prepare(
            root,
            capacity_bytes,
            store_id=store_id,
            slots=slots,
            entries=entry_count(slots, capacity_bytes, *below),
            gid=gid,
            mode=mode,
            numa_nodes=numa_nodes,
            choose=choose,
        )
        tier = cls(root, capacity_bytes, layout, gid)
        try:
            tier._check_leases()
        except BaseException:
            tier.close(keep=bool(tier._adoption))
            raise
        return tier

    def take_adoption(self) -> Adoption:
        """Return what was taken over from an earlier service, once."""
        adoption, self._adoption = self._adoption, None
        assert adoption is not None
        return adoption

    def _check_leases(self) -> None:
        if self._adoption:  # each was probed; and there may be no slot to spare
            return
        try:
            draft = self.reserve()
        except NoSpace:  # somebody holds all of it; a seal would say so
            return
        self._files.check_leases(draft.slot)
        self.abort(draft)

    def usage(self) -> Usage:
        """Measure what is used."""
        accounting = self._accounting
        return Usage(
            capacity_bytes=self._space.capacity_bytes,
            used_bytes=self._space.used_bytes(exact=True) - accounting.kept.total,
            held_bytes=accounting.held_total,
            slots=accounting.max_slots - accounting.free_slots,
            max_slots=accounting.max_slots,
            largest_object_bytes=self.largest_object_bytes,
        )

    def charged_bytes(self, uid: int) -> int:
        """Return the held bytes that are charged to `uid`."""
        return self._accounting.charged.get(uid, 0)

    @property
    def most_charged_bytes(self) -> int:
        """Return the highest charge of any uid."""
        return max(self._accounting.charged.values(), default=0)

    def reserve(self, size_bytes: int = 0, *, kept_bytes: int = 0) -> Extent:
        """Reserve an empty draft, and `size_bytes` for it until it is sealed. Raises NoSpace, ObjectTooLarge.

        With `kept_bytes`, the draft may have so many bytes of an earlier object, as `kept` says, in pages that need not
        be allocated: its writer writes all of them, or truncates it to 0 first.
        """
        self._check_size(size_bytes)
        reserved = whole_pages(size_bytes)
        self._check_room(reserved)
        kept_bytes = kept_bytes if kept_bytes >= limits.MIN_KEPT_SLOT_BYTES else 0
        slot = self._recycler.take(kept_bytes)
        if kept_bytes and slot not in self._accounting.kept.drafts:
            self.filler.ask(kept_bytes)
        try:
            draft = Extent(slot, self.table.begin(slot))
        except NoSpace:  # no page for the slot's header
            self._accounting.kept.drop_draft(slot)
            self._recycler.recycle(slot, 0)
            raise
        self._accounting.open_draft(slot, reserved)
        return draft

    def kept(self, draft: Extent) -> int:
        """Return how many bytes of an earlier object a draft had when it was reserved."""
        return self._accounting.kept.drafts.get(draft.slot, 0)

    def _check_room(self, size_bytes: int) -> None:
        """Raise NoSpace where so many more bytes do not fit; free slots give up their pages for them."""
        try:
            self._space.check(size_bytes)
        except NoSpace:
            if not self._accounting.kept.total:
                raise
            self.drop_kept(size_bytes)
            self._space.check(size_bytes)

    def drop_kept(self, wanted_bytes: int) -> None:
        """Have free slots give up pages until so many bytes are free, or none keeps any."""
        free_bytes = self._free_bytes()
        if free_bytes < wanted_bytes:
            self._recycler.drop_kept(wanted_bytes - free_bytes)

    def _free_bytes(self) -> int:
        """Return what is neither used, kept nor reserved."""
        return self._space.capacity_bytes - self._space.used_bytes() - self._accounting.reserved_bytes

    def promise(self, draft: Extent, size_bytes: int) -> None:
        """Reserve so many bytes in all for a draft. Raises NoSpace, ObjectTooLarge, Superseded."""
        self._check_draft(draft)
        self._check_size(size_bytes)
        reserved = whole_pages(size_bytes)
        had = self._accounting.drafts[draft.slot] or self._files.physical_bytes(draft.slot)
        if reserved > had:
            self._check_room(reserved - had)
            self._accounting.reserve(draft.slot, reserved)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.largest_object_bytes:
            raise ObjectTooLarge(
                f"{size_bytes} bytes; the DRAM tier takes objects up to {self.largest_object_bytes}"
            )

    def _check_draft(self, draft: Extent) -> None:
        if draft.slot not in self._accounting.drafts or self.table.generation(draft.slot) != draft.generation:
            raise Superseded(f"slot {draft.slot} is no longer draft {draft.generation}")

    def open_draft(self, draft: Extent) -> int:
        """Open the draft's payload for writing; the caller closes the descriptor. Raises Superseded."""
        self._check_draft(draft)
        return self._files.open_write(draft.slot)

    def draft_bytes(self, draft: Extent) -> int:
        """Return how long the draft is now. Raises Superseded."""
        self._check_draft(draft)
        return self._files.size_bytes(draft.slot)

    def _check_sealable(self, draft: Extent) -> tuple[int, int]:
        """Return (size, physical bytes) of a draft that may be sealed now."""
        size_bytes, physical_bytes = native.check_no_writer(self._files.fd, draft.slot)
        self._check_size(size_bytes)
        self._space.check_sealed(physical_bytes)
        return size_bytes, physical_bytes

    def hole_bytes(self, draft: Extent) -> int:
        """Return how many bytes of a draft are holes, which take no memory yet."""
        return self._files.hole_bytes(draft.slot)

    def fill_holes(self, draft: Extent) -> None:
        """Allocate a draft's holes before the seal. Raises NoSpace, Superseded, and WriterActive while anyone can still
        write it: that would change its time of modification meanwhile."""
        self._check_draft(draft)
        native.check_no_writer(self._files.fd, draft.slot)
        self._files.fill_holes(draft.slot)

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
            self._files.check_payload(draft.slot, checksum)
        sealed_at_ns = time.time_ns()
        extent = headers.publish(self.table, draft, header, size_bytes, checksum, sealed_at_ns)
        self._note_sealed(extent, physical_bytes, has_checksum=checksum is not None)
        return Sealed(extent, header, size_bytes, checksum, sealed_at_ns)

    def make_sealer(self) -> Sealer:
        """Start a thread that seals drafts of blocks in this tier; report each to `note_sealed`. Raises OSError."""
        return Sealer(self.table, self._files.fd, self.largest_object_bytes)

    def note_sealed(self, draft: Extent, physical_bytes: int, *, has_checksum: bool) -> Extent:
        """Note that the sealing thread has made this draft immutable; return its extent."""
        sealed = Extent(draft.slot, draft.generation + 1)
        self._note_sealed(sealed, physical_bytes, has_checksum=has_checksum)
        return sealed

    def _note_sealed(self, extent: Extent, physical_bytes: int, *, has_checksum: bool) -> None:
        self._accounting.close_draft(extent.slot)
        self._accounting.add_sealed(extent.slot, physical_bytes)
        if not has_checksum:
            self.checksums.push(extent)

    def abort(self, draft: Extent, *, charge_uid: int = 0) -> None:
        """Free the draft, whoever has it open: its bytes are then held, charged to `charge_uid`."""
        self._check_draft(draft)
        self.table.retire(draft.slot, draft.generation)
        kept_bytes = self.kept(draft)
        self._accounting.close_draft(draft.slot)
        self._recycler.recycle(draft.slot, charge_uid, whole_pages(kept_bytes))

    def _check_sealed(self, extent: Extent) -> None:
        live = extent.slot in self._accounting.sealed
        if not live or self.table.generation(extent.slot) != extent.generation:
            raise Superseded(f"slot {extent.slot} no longer holds generation {extent.generation}")

    def open_sealed(self, extent: Extent) -> int:
        """Open the payload read-only; the caller closes the descriptor. Raises Superseded."""
        return self._open_checked(extent, self._files.open_read)

    def _open_checked(self, extent: Extent, open_slot: Callable[[int], int]) -> int:
        self._check_sealed(extent)
        fd = open_slot(extent.slot)
        if fd < 0 or self.table.generation(extent.slot) != extent.generation:
            if fd >= 0:
                os.close(fd)
            raise Superseded(f"slot {extent.slot} is being recycled")
        return fd

    def open_copy(self, extent: Extent) -> int:
        """Open the payload for a copy that the service makes by reading, as `open_sealed` does."""
        return self._open_checked(extent, self._files.open_copy)

    async def hash(self, extent: Extent) -> int:
        """Return the XXH3-64 of a payload, computed in a worker thread; the slot counts as held meanwhile. Raises
        Superseded."""
        descriptor = self.open_copy(extent)
        try:
            return await trio.to_thread.run_sync(native.fd_xxh3_64, descriptor)
        finally:
            os.close(descriptor)

    def matches(self, extent: Extent) -> bool:
        """Return whether a slot that was taken over has the payload of its header, hashed here and now; any thread.
        What it says counts while the slot has that generation."""
        header = self.table.read_header(extent.slot)
        return header.checksum is not None and slot_matches(
            self._files.fd, extent.slot, header.size_bytes, header.checksum
        )

    @property
    def slotfd(self) -> int:
        """Return the descriptor of the folder of slots."""
        return self._files.fd

    def lease(self, extent: Extent) -> DramLease:
        """Lease a sealed extent. Raises Superseded when it is no longer that object."""
        fd = self.open_sealed(extent)
        return DramLease(fd, os.fstat(fd).st_size)

    def held(self, extent: Extent) -> bool:
        """Return whether anyone but the service has the extent open or mapped now (or that is not known)."""
        self._check_sealed(extent)
        if not self.checksums.thread.pause(extent.slot):
            return True
        try:
            return native.is_held(self._files.fd, extent.slot)
        finally:
            self.checksums.thread.resume()

    def free(self, extent: Extent, *, charge_uid: int = 0) -> int:
        """Free a sealed extent; return the bytes that stay held, charged to `charge_uid`, 0 if all are free."""
        self._check_sealed(extent)
        self.table.retire(extent.slot, extent.generation)
        physical_bytes = self._accounting.drop_sealed(extent.slot)
        return self._recycler.recycle(extent.slot, charge_uid, physical_bytes)

    def sweep(self) -> int:
        """Free what holders have closed since; return the bytes that became free."""
        freed = self._recycler.sweep()
        self._space.shrink()
        self.checksums.retry()
        return freed

    def checksum(self, extent: Extent) -> int | None:
        """Return the payload's XXH3-64; None while it is still being computed. Raises Superseded."""
        self._check_sealed(extent)
        return self.checksums.get(extent)

    @property
    def sealed_bytes(self) -> int:
        """Return the physical bytes of all sealed slots."""
        return self._accounting.sealed_total

    def sealed_slots(self) -> Iterator[int]:
        """Yield the slots that are sealed when they are reached, in order."""
        return iter(self._accounting.sealed)

    def sealed(self) -> Iterator[Sealed]:
        """Yield every sealed extent, in slot order."""
        for slot in self.sealed_slots():
            if (sealed := self.look(slot)) is not None:
                yield sealed

    def look(self, slot: int) -> Sealed | None:
        """Look at what is sealed in a slot."""
        if slot not in self._accounting.sealed:
            return None
        return headers.read(self.table, slot)

    def close(self, keep: bool = False) -> None:
        """Stop. Unless `keep`, files go and the tmpfs is unmounted (lazily, while somebody holds a file).

        With `keep`, what is sealed stays for the next `open`: waits KEEP_WAIT_S at most for its checksums.
        """
        if self._closed:
            return
        self._closed = True
        if keep:
            self._prepare_keep()
        self.checksums.thread.close()
        self.table.clean = keep
        self.table.close()
        for held in self._accounting.held:
            os.close(held.fd)
        self._files.close()
        self._space.close()
        if keep:
            os.close(self._lockfd)
        else:
            remove(self.root, self.backing, self._lockfd)

    def _prepare_keep(self) -> None:
        """Drop drafts and wait for checksums: what the next start would drop takes no memory until then."""
        self._recycler.drop_kept(self._accounting.kept.total)
        for slot in self._accounting.drafts:
            with suppress(OSError):
                self._files.unlink(slot)
        try:
            self.checksums.wait(limits.KEEP_WAIT_S)
        except DeadlinePassed:
            log.warning("%s: some objects have no checksum yet, and will not outlive this stop", self.root)


def _most_kept_bytes(capacity_bytes: int) -> int:
    return min(capacity_bytes // limits.KEPT_PAGES_SHARE_OF_DRAM, limits.MAX_KEPT_PAGES_BYTES)
