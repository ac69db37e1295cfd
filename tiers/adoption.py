"""DRAM slots that outlive the process: which of them a start takes over, and what becomes of the others.

Responsibility: read the table that an earlier service left, find the slots whose bytes are whole and nobody's
to change, verify their checksums, unlink the rest. Which objects are still wanted is asked of the caller, who
has the names.

Invariants:
- A slot is taken over only if its header matches its own checksum and says sealed, its file has the size that
  the header says, no writable descriptor or mapping of it lives (a killed service's writers may still write
  through FUSE passthrough), the header has the payload's checksum, and the payload has it too.
- The old table is only read: no writer of it is left that an odd sequence number could be waited for. Its
  slots' generations go on from where they were, so (slot, generation) never names two things.
- A start that runs short of memory or descriptors fails, and takes nothing for lost that it could not look at.
- What is taken over fits into the capacity, beside what holders keep of the rest.

Concurrency: called while a tier opens; payloads are hashed by a thread per processor, without the GIL.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfs import limits
from kvfs._native import slots as native
from kvfs._native.table import Table
from kvfs.errors import KvfsError, NotFound, is_shortage
from kvfs.formats import (
    INDEX_ENTRY,
    SLOT_HEADER,
    SLOT_VERSION,
    TABLE_HEADER,
    EntryState,
    SlotMark,
    SlotState,
    slot_header_checksum,
)
from kvfs.sizes import format_size
from tiers.base import Extent, Kind, Sealed, SealHeader, StoreKey, object_key
from tiers.dram_books import Held

ENTRY_PINNED = 1
"""`flags` of an index entry: the block is pinned (a named object's row says it of itself)."""

_KINDS = {int(kind): kind for kind in Kind}
_READ_BYTES = 64 << 10
_SHOWN_LOSSES = 20

log = logging.getLogger("kvfs.dram")


@dataclass(slots=True)
class Survivor:
    """A sealed slot of an earlier service, and what its table knew of the object's use. Filled in as it is sorted
    out: a copy for each step would be a fifth of the time that 100,000 objects take."""

    sealed: Sealed
    hits: int = 0
    last_access_s: int = 0
    pinned: bool = False
    physical_bytes: int = 0


Choose = Callable[[list[Survivor]], list[Survivor]]
"""Which of these objects are still wanted: those, the dearest first."""


@dataclass(slots=True)
class Estate:
    """What a tier begins with."""

    survivors: list[Survivor] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    """Of every slot that the old table used, as its successor must go on from."""
    held: list[Held] = field(default_factory=list)
    verify_s: float = 0.0
    """How long hashing the payloads took."""
    zombies: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Slots whose files are held but could not be detached -> (uid, physical bytes)."""

    def close(self) -> None:
        """Let go of everything, for a start that failed."""
        for held in self.held:
            os.close(held.fd)
        self.held.clear()


def take_over(
    root: Path, store_id: bytes, *, slots: int, capacity_bytes: int, table_bytes: int, choose: Choose | None
) -> Estate:
    """Sort out the slots under `root`. `table_bytes` is what the new table takes of `capacity_bytes`, 0 in a
    directory, whose table is not counted. Without `choose` nothing is taken over, and no table is looked at.

    REQUIRES the lock of `root`. Afterwards `slots/` holds the survivors' files, and zombies'.
    """
    adoption = _Adoption(root, slots)
    try:
        wanted: list[Survivor] = []
        if choose is not None:
            wanted = choose(adoption.whole(_read_table(root / "table", store_id, adoption.estate)))
        adoption.keep_only(wanted)
        wanted = adoption.fit(wanted, capacity_bytes, table_bytes)
        adoption.estate.survivors = adoption.verify(wanted)
        adoption.keep_only(adoption.estate.survivors)
    except BaseException:
        adoption.estate.close()
        raise
    finally:
        adoption.close()
    return adoption.estate


class _Adoption:
    """One start's work on the slot files of one root."""

    def __init__(self, root: Path, slots: int) -> None:
        self.estate = Estate()
        self._slots = slots
        self._root = root
        self._uids: dict[int, int] = {}
        self._slotfd = os.open(root / "slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._files = self._list_files()

    def close(self) -> None:
        os.close(self._slotfd)

    def _list_files(self) -> set[int]:
        """The slots that have a file; what else lies there goes."""
        found = set()
        with os.scandir(self._slotfd) as entries:
            for entry in entries:
                slot = int(entry.name, 16) if _is_slot_name(entry.name) else -1
                if slot >= 0 and entry.is_file(follow_symlinks=False):
                    found.add(slot)
                else:
                    os.unlink(entry.name, dir_fd=self._slotfd)
        return found

    def whole(self, survivors: list[Survivor]) -> list[Survivor]:
        """Those whose file is there, has the right size, and no writer."""
        found: dict[bytes, Survivor] = {}
        for survivor in sorted(survivors, key=lambda each: each.sealed.header.sequence):
            slot = survivor.sealed.extent.slot
            self._uids[slot] = survivor.sealed.header.uid
            if slot >= self._slots or slot not in self._files:
                continue
            try:
                size_bytes, physical_bytes = native.check_no_writer(self._slotfd, slot)
            except (KvfsError, OSError) as error:  # a writer; a file that is none of ours
                if is_shortage(error):
                    raise
                continue
            if size_bytes == survivor.sealed.size_bytes and survivor.sealed.checksum is not None:
                survivor.physical_bytes = physical_bytes
                found.setdefault(survivor.sealed.header.key.digest, survivor)
        return list(found.values())

    def keep_only(self, survivors: list[Survivor]) -> None:
        """Unlink every other file; what somebody holds of them stays charged."""
        kept = {survivor.sealed.extent.slot for survivor in survivors}
        for slot in self._files - kept:
            self._drop(slot)
        self._files &= kept

    def _drop(self, slot: int) -> None:
        uid = self._uids.get(slot, 0)
        if len(self.estate.held) >= limits.MAX_HELD_SLOTS:
            self._make_zombie(slot, uid)
            return
        try:
            fd, physical_bytes = native.detach(self._slotfd, slot)
        except (KvfsError, OSError):  # out of descriptors
            self._make_zombie(slot, uid)
            return
        if _fd_is_held(fd):
            self.estate.held.append(Held(fd, physical_bytes, uid))
        else:
            os.close(fd)

    def _make_zombie(self, slot: int, uid: int) -> None:
        """Leave the file to the tier's sweep. One behind the last slot goes, whoever holds it."""
        name = native.slot_name(slot)
        if slot < self._slots:
            self.estate.zombies[slot] = (uid, os.stat(name, dir_fd=self._slotfd).st_blocks * 512)
        else:
            os.unlink(name, dir_fd=self._slotfd)

    def fit(self, survivors: list[Survivor], capacity_bytes: int, table_bytes: int) -> list[Survivor]:
        """As many, from the first on, as fit beside the new table and what holders keep."""
        held = sum(each.physical_bytes for each in self.estate.held)
        held += sum(physical_bytes for _, physical_bytes in self.estate.zombies.values())
        room = capacity_bytes - table_bytes - held
        for count, survivor in enumerate(survivors):
            room -= survivor.physical_bytes
            if room < 0:
                log.warning(
                    "%s: %d of %d objects of the last service do not fit into %s any more",
                    self._root,
                    len(survivors) - count,
                    len(survivors),
                    format_size(capacity_bytes),
                )
                return survivors[:count]
        return survivors

    def verify(self, survivors: list[Survivor]) -> list[Survivor]:
        """Those whose payload has the header's checksum, in order."""
        if not survivors:
            return []
        began = time.monotonic()
        bad: set[int] = set()
        left = iter(survivors)

        def work(_: int) -> None:
            for survivor in left:  # the GIL makes each step of the shared iterator one
                if not self._matches(survivor.sealed):
                    bad.add(survivor.sealed.extent.slot)

        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads, "kvfs-verify") as pool:
            list(pool.map(work, range(threads)))
        self.estate.verify_s = time.monotonic() - began
        self._report(bad)
        return [survivor for survivor in survivors if survivor.sealed.extent.slot not in bad]

    def _matches(self, sealed: Sealed) -> bool:
        try:
            fd = native.open_slot(self._slotfd, sealed.extent.slot, os.O_RDONLY | os.O_NONBLOCK)
            if fd < 0:
                return False
            try:
                return native.fd_xxh3_64(fd) == sealed.checksum
            finally:
                os.close(fd)
        except (KvfsError, OSError) as error:
            if is_shortage(error):
                raise
            return False

    def _report(self, bad: set[int]) -> None:
        for slot in sorted(bad)[:_SHOWN_LOSSES]:
            log.error("%s: slot %d does not match its checksum: its object is lost", self._root, slot)
        if len(bad) > _SHOWN_LOSSES:
            log.error("%s: so do %d more slots", self._root, len(bad) - _SHOWN_LOSSES)


def _fd_is_held(fd: int) -> bool:
    try:
        return native.fd_is_held(fd)
    except (KvfsError, OSError):  # without leases nobody can tell
        return False


def _is_slot_name(name: str) -> bool:
    return len(name) == 8 and all(digit in "0123456789abcdef" for digit in name)


# --- the old table -----------------------------------------------------------------------------------------
def _read_table(path: Path, store_id: bytes, estate: Estate) -> list[Survivor]:
    """Every sealed slot of a table of this format and store; `estate.generations` becomes its slots'.

    Read, not mapped: on a full tmpfs a hole of the file would be a SIGBUS.
    """
    try:
        Table.attach(path, store_id).close()
        with path.open("rb", buffering=0) as file:
            head = TABLE_HEADER.decode(file.read(TABLE_HEADER.size))
            access = dict(_entries(file.fileno(), head))
            return list(_sealed(file.fileno(), head, access, estate))
    except NotFound:
        return []
    except (KvfsError, OSError) as error:
        if is_shortage(error):
            raise
        log.warning("nothing is taken over: %s", error)
        return []


def _pieces(fd: int, offset: int, size_bytes: int) -> Iterator[bytes]:
    """The bytes from `offset` on, in whole structures: every structure's size divides a piece's."""
    end = offset + size_bytes
    while offset < end:
        data = os.pread(fd, min(_READ_BYTES, end - offset), offset)
        if not data:
            return
        yield data
        offset += len(data)


def _entries(fd: int, head: dict[str, Any]) -> Iterator[tuple[bytes, tuple[int, int, int, int, int]]]:
    """(key, (slot, generation, hits, last access, flags)) of each entry that was not being written."""
    state_at = INDEX_ENTRY.offsets["state"][0]
    for data in _pieces(fd, head["entries_offset"], head["entry_count"] * INDEX_ENTRY.size):
        for at in range(0, len(data) - INDEX_ENTRY.size + 1, INDEX_ENTRY.size):
            if data[at + state_at] != EntryState.LIVE:
                continue
            raw = INDEX_ENTRY.decode(memoryview(data)[at:])
            if not raw["seq"] & 1:
                yield (
                    raw["key"],
                    (raw["slot"], raw["generation"], raw["hits"], raw["last_access_s"], raw["flags"]),
                )


def _sealed(
    fd: int, head: dict[str, Any], access: dict[bytes, tuple[int, int, int, int, int]], estate: Estate
) -> Iterator[Survivor]:
    damaged = []
    used = min(head["slots_used"], head["slot_count"])
    zeros = bytes(SLOT_HEADER.size)
    for data in _pieces(fd, head["slots_offset"], used * SLOT_HEADER.size):
        for at in range(0, len(data) - SLOT_HEADER.size + 1, SLOT_HEADER.size):
            slot = len(estate.generations)
            piece = data[at : at + SLOT_HEADER.size]
            raw = SLOT_HEADER.decode(piece)
            estate.generations.append(raw["generation"])
            if piece == zeros:
                continue
            if (
                raw["seq"] & 1
                or raw["version"] != SLOT_VERSION
                or raw["header_checksum"] != slot_header_checksum(piece)
            ):
                damaged.append(slot)
            elif raw["state"] == SlotState.SEALED and (survivor := _survivor(slot, raw, access)) is not None:
                yield survivor
    _skip_damaged(estate, damaged)


def _skip_damaged(estate: Estate, damaged: list[int]) -> None:
    """Generations that cannot be believed go on past all others."""
    for slot in damaged:
        log.warning("slot %d: its header was being written, or is damaged", slot)
        estate.generations[slot] = 0
    past = max(estate.generations, default=0) + 2
    for slot in damaged:
        estate.generations[slot] = past


def _survivor(
    slot: int, raw: dict[str, Any], access: dict[bytes, tuple[int, int, int, int, int]]
) -> Survivor | None:
    kind = _KINDS.get(raw["kind"])
    if kind is None or raw["generation"] & 1:
        return None
    key = StoreKey(kind, raw["key"])
    if key.kind is Kind.OBJECT and key != object_key(raw["object_id"]):
        return None
    header = SealHeader(
        key=key,
        object_id=raw["object_id"],
        sequence=raw["sequence"],
        parent=raw["parent"],
        flags=raw["flags"],
        uid=raw["uid"],
        bucket_id=raw["bucket_id"],
    )
    checksum = raw["checksum"] if raw["marks"] & SlotMark.HAS_CHECKSUM else None
    sealed = Sealed(Extent(slot, raw["generation"]), header, raw["size_bytes"], checksum, raw["sealed_at_ns"])
    entry_slot, generation, hits, last_access_s, flags = access.get(key.digest, (slot, 0, 0, 0, 0))
    if (entry_slot, generation) != (slot, raw["generation"]):
        hits = flags = 0
        last_access_s = min(max(raw["sealed_at_ns"] // 1_000_000_000, 0), 0xFFFF_FFFF)
    return Survivor(sealed, hits, last_access_s, bool(flags & ENTRY_PINNED))
