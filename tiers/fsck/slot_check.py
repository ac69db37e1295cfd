"""Slots of DRAM, verified while no service runs.

Responsibility: every slot that the next start could take over (`tiers.dram.recovery`): its header against its checksum,
its file's size, its payload. It changes nothing. Counters of use in the table have no checksum; they decide what is
evicted first, and never what is served.

Concurrency: while nobody else has the tier open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfs._native.shared import slots as native
from kvfs._native.shared.table import Table
from kvfs.errors import KvfsError, NotFound, WriterActive
from kvfs.formats import SLOT_HEADER, SLOT_VERSION, TABLE_HEADER, SlotMark, SlotState, slot_header_checksum
from tiers.model.tier import Kind, object_key

_READ_BYTES = 64 << 10
_KINDS = {int(kind) for kind in Kind}


@dataclass(frozen=True, slots=True)
class WholeSlot:
    """Describes a sealed slot whose bytes a start would take over."""

    slot: int
    object_id: int
    key: bytes
    is_block: bool
    bucket_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BadSlot:
    """Describes a slot that a start would not take over."""

    slot: int
    what: str
    whole: WholeSlot | None = None
    """What it would be; None where the header is damaged."""


@dataclass(slots=True)
class SlotsCheck:
    """Collects what the slots of one tier hold, and what is wrong with them."""

    table: Path
    table_fault: str = ""
    """Why no slot at all can be taken over."""
    hidden: int = 0
    """Slots in use past the number that the table's header says."""
    slots_offset: int = 0
    highest_generation: int = 0
    whole: dict[int, WholeSlot] = field(default_factory=dict)
    """By object id."""
    bad: list[BadSlot] = field(default_factory=list)

    def has(self, object_id: int, size_bytes: int) -> bool:
        """Return whether a whole slot has the object."""
        slot = self.whole.get(object_id)
        return slot is not None and slot.size_bytes == size_bytes


def check_slots(root: Path, store_id: bytes, tick: Callable[[int], None]) -> SlotsCheck:
    """Verify the slots under `root`."""
    check = SlotsCheck(root / "table")
    try:
        Table.attach(check.table, store_id).close()
        with check.table.open("rb", buffering=0) as file:
            head = TABLE_HEADER.decode(file.read(TABLE_HEADER.size))
            check.slots_offset = head["slots_offset"]
            slotfd = os.open(root / "slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for slot, data in _headers(file.fileno(), head):
                    _check_header(check, slot, data, slotfd, tick, head["slots_used"])
            finally:
                os.close(slotfd)
    except NotFound:
        pass
    except (KvfsError, OSError) as error:
        check.table_fault = str(error)
    return check


def _headers(fd: int, head: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
    """Yield every header that was ever written; the file is sparse elsewhere."""
    size = SLOT_HEADER.size
    per_read = _READ_BYTES // size
    zeros = bytes(_READ_BYTES)
    for first in range(0, head["slot_count"], per_read):
        count = min(per_read, head["slot_count"] - first)
        data = os.pread(fd, count * size, head["slots_offset"] + first * size)
        if data == zeros[: len(data)]:
            continue
        for at in range(0, len(data) - size + 1, size):
            piece = data[at : at + size]
            if piece != zeros[:size]:
                yield first + at // size, piece


def _check_header(
    check: SlotsCheck, slot: int, data: bytes, slotfd: int, tick: Callable[[int], None], used: int
) -> None:
    raw = SLOT_HEADER.decode(data)
    if raw["seq"] & 1:
        check.bad.append(BadSlot(slot, "its header was being written when the service ended"))
        return
    if raw["version"] != SLOT_VERSION or raw["header_checksum"] != slot_header_checksum(data):
        check.bad.append(BadSlot(slot, "its header does not match its checksum"))
        return
    check.highest_generation = max(check.highest_generation, raw["generation"])
    if raw["state"] != SlotState.SEALED:
        return
    check.hidden += slot >= used
    problem, of = _contradiction(raw), None
    if not problem and raw["marks"] & SlotMark.HAS_CHECKSUM:
        try:
            problem = _payload_problem(slotfd, slot, raw)
        except WriterActive:
            return  # a start does not take it over, either
        tick(raw["size_bytes"])
        is_block = raw["kind"] == Kind.BLOCK
        of = WholeSlot(slot, raw["object_id"], raw["key"], is_block, raw["bucket_id"], raw["size_bytes"])
        if not problem:
            check.whole[of.object_id] = of
    if problem:
        check.bad.append(BadSlot(slot, problem, of))


def _contradiction(raw: dict[str, Any]) -> str:
    if raw["kind"] not in _KINDS or raw["generation"] & 1:
        return "its header contradicts itself"
    if raw["kind"] == Kind.OBJECT and raw["key"] != object_key(raw["object_id"]).digest:
        return "its header names another object than its key"
    return ""


def _payload_problem(slotfd: int, slot: int, raw: dict[str, Any]) -> str:
    """Say what is wrong with a slot's payload. Raises WriterActive."""
    try:
        size_bytes, _ = native.check_no_writer(slotfd, slot)
        if size_bytes != raw["size_bytes"]:
            return f"has {size_bytes} bytes instead of {raw['size_bytes']}"
        fd = native.open_slot(slotfd, slot, os.O_RDONLY)
        try:
            return (
                "" if native.fd_xxh3_64(fd) == raw["checksum"] else "its payload does not match its checksum"
            )
        finally:
            os.close(fd)
    except NotFound:
        return "its file is not there"
    except WriterActive:
        raise
    except (KvfsError, OSError) as error:
        return f"cannot be read ({error})"


def free_slots(check: SlotsCheck) -> None:
    """Have the next start find the bad slots empty, and unlink their files. Raises OSError."""
    if check.table_fault:
        check.table.unlink(missing_ok=True)
        return
    if not (check.bad or check.hidden):
        return
    with check.table.open("r+b", buffering=0) as table:
        for bad in check.bad:
            past = (check.highest_generation + 3 | 1) & 0xFFFFFFFF
            data = SLOT_HEADER.encode(version=SLOT_VERSION, state=SlotState.FREE, generation=past)
            checksum = slot_header_checksum(data).to_bytes(8, "little")
            os.pwrite(table.fileno(), data[:-8] + checksum, check.slots_offset + bad.slot * SLOT_HEADER.size)
            (check.table.parent / "slots" / native.slot_name(bad.slot)).unlink(missing_ok=True)
        if check.hidden:  # the header is to say that every slot may be in use
            count_at, used_at = (TABLE_HEADER.offsets[name][0] for name in ("slot_count", "slots_used"))
            os.pwrite(table.fileno(), os.pread(table.fileno(), 4, count_at), used_at)
