"""The files of a pool that no service uses: opened, with what their headers say and what is wrong with them.

Responsibility: both copies of each segment's header, the size of a segment, and which life each file is in. Records
are `tiers.fsck.segment_check`. It changes nothing.

Concurrency: blocking reads of a few pages a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfs import formats
from kvfs.errors import FormatMismatch, KvfsError
from kvfs.formats import (
    RECORD_MAGIC,
    SEGMENT_DATA_START,
    SEGMENT_HEADER,
    SEGMENT_HEADER_COPIES,
    RecordType,
    SegmentState,
)
from tiers.device.device import Device
from tiers.log.pool import SegmentPool
from tiers.log.pool_files import GEOMETRY, read_geometry
from tiers.log.segments import PAGE_BYTES, LoggedRecord, Segment


@dataclass(frozen=True, slots=True)
class BadRecord:
    """Describes a record that is not what was written."""

    offset: int
    what: str
    header: dict[str, Any] | None = None
    """None where it is not known what the record was."""
    lost: bool = True
    """False where all that counts of it is there nevertheless, from the footer."""

    @property
    def type(self) -> RecordType | None:
        return None if self.header is None else RecordType(self.header["type"])


@dataclass(slots=True)
class SegmentCheck:
    """Collects what one file holds, and what is wrong with it."""

    segment: Segment
    path: Path
    faults: list[str] = field(default_factory=list)
    """Of the file as a whole: header copies, trailer, footer."""
    records: list[LoggedRecord] = field(default_factory=list)
    """Those whose header is known, in order; also those whose payload is damaged."""
    bad: list[BadRecord] = field(default_factory=list)
    worn: bool = False
    """The file is short, or the device fails to read it: it is not to be used again."""
    hopeless: bool = False
    """No header: nothing in the file can be trusted to be of its present life."""
    has_footer: bool = False
    is_cut: bool = False
    """The end of the file is gone, and no footer says what was there."""

    @property
    def is_clean(self) -> bool:
        return not (self.faults or self.bad or self.hopeless)

    @property
    def has_holes(self) -> bool:
        """Whether a record was lost of which nobody knows what it said."""
        return (
            self.hopeless
            or self.is_cut
            or any(bad.lost and bad.type is not RecordType.DATA for bad in self.bad)
        )


@dataclass(slots=True)
class PoolCheck:
    """Holds all files of a directory, and its geometry."""

    pool: SegmentPool
    checks: list[SegmentCheck]
    geometry_fault: str = ""
    """What is wrong with the file that says the segments' size."""

    @property
    def bytes_to_verify(self) -> int:
        """Return the most bytes that an examination verifies."""
        used = sum(check.segment.state is SegmentState.IN_USE for check in self.checks)
        return used * self.pool.segment_bytes


def look_at_pool(device: Device, directory: Path, store_id: bytes) -> PoolCheck | None:
    """Open the files of a directory, with what their headers say; return None where there is no pool.

    Raises FormatMismatch for another store's pool, or where nothing says how large segments are.
    """
    paths = sorted(path for path in directory.glob("*.seg") if path.is_file())
    if not paths and not (directory / GEOMETRY).exists():
        return None
    copies = {path: [_copy(path, at) for at in SEGMENT_HEADER_COPIES] for path in paths}
    segment_bytes, fault = _geometry(directory, store_id, [raw for raws in copies.values() for raw in raws])
    pool = SegmentPool(device, directory, store_id, segment_bytes)
    checks = []
    try:
        for path in paths:
            check = _open(pool, path, store_id)
            checks.append(check)
            _check_header(check, pool, copies[path])
    except BaseException:
        pool.close_files()
        raise
    pool.next_sequence = 1 + max((segment.sequence for segment in pool.segments), default=0)
    pool.free.extend(s for s in pool.segments if s.state is SegmentState.FREE and not s.bad)
    return PoolCheck(pool, checks, fault)


def _open(pool: SegmentPool, path: Path, store_id: bytes) -> SegmentCheck:
    fd = pool.device.open_file(path)
    segment = Segment(int(path.stem, 16), fd)
    pool.segments.append(segment)
    check = SegmentCheck(segment, path)
    if path.stat().st_size != pool.segment_bytes:
        check.faults.append(f"has {path.stat().st_size} bytes instead of {pool.segment_bytes}")
        check.worn = segment.bad = True
    return check


_Copy = dict[str, Any] | str | None
"""A copy of a segment's header, what is wrong with it, or None where there never was one."""


def _copy(path: Path, at: int) -> _Copy:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            data = file.read(PAGE_BYTES)
        if len(data) == PAGE_BYTES and not any(data):
            return None
        raw = formats.decode_page(SEGMENT_HEADER, formats.SEGMENT_MAGIC, data)
    except (KvfsError, OSError) as error:
        return str(error)
    return raw if raw["state"] in (1, 2) else f"{SEGMENT_HEADER.name}: state {raw['state']}"


def _geometry(directory: Path, store_id: bytes, copies: list[_Copy]) -> tuple[int, str]:
    """Return (bytes of a segment, the fault of the file that says it). Headers outvote it: they have checksums."""
    raws = [raw for raw in copies if isinstance(raw, dict)]
    if raws and not any(raw["store_id"] == store_id for raw in raws):
        raise FormatMismatch(
            f"{directory} holds the segments of store {raws[0]['store_id'].hex()}, not of {store_id.hex()}"
        )
    sizes = [raw["segment_bytes"] for raw in raws if raw["store_id"] == store_id]
    path = directory / GEOMETRY
    try:
        version, owner, size = read_geometry(directory)
        fault = "" if owner == store_id else f"says store {owner.hex()}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        version, size, fault = 0, 0, f"does not say what the segment files are: {error}"
    if version > formats.SEGMENT_VERSION and not sizes:
        raise FormatMismatch(f"{path} says format {version}, this kvfs reads up to {formats.SEGMENT_VERSION}")
    if not fault and version != formats.SEGMENT_VERSION:
        fault = f"says format {version}"
    if sizes:
        voted = max(set(sizes), key=sizes.count)
        if not fault and voted != size:
            fault = f"says segments of {size} bytes, the segments themselves say {voted}"
        return voted, fault
    if fault:
        raise FormatMismatch(f"{path} {fault}, and no segment is readable that could say it")
    return size, ""


def _check_header(check: SegmentCheck, pool: SegmentPool, copies: list[_Copy]) -> None:
    """Find which life the file is in."""
    segment = check.segment
    good = []
    for number, raw in enumerate(copies):
        if isinstance(raw, dict):
            if raw["store_id"] == pool.store_id and raw["segment_bytes"] == pool.segment_bytes:
                good.append(raw)
            else:
                check.faults.append(f"copy {number} of its header is of another store or size")
        elif raw is not None:
            check.faults.append(f"copy {number} of its header is damaged ({raw})")
    if good:
        if None in copies:
            check.faults.append("a copy of its header is empty")
        raw = max(good, key=lambda raw: (raw["segment_sequence"], -raw["state"]))
        segment.sequence, segment.state = raw["segment_sequence"], SegmentState(raw["state"])
    elif check.faults or _begins_with_a_record(check.path):
        check.hopeless = segment.bad = True
        if not check.faults:
            check.faults.append("its header is empty, but records follow")


def _begins_with_a_record(path: Path) -> bool:
    with path.open("rb", buffering=0) as file:
        file.seek(SEGMENT_DATA_START)
        return file.read(len(RECORD_MAGIC)) == RECORD_MAGIC
