"""The segments of a pool that no service uses: opened, with what their headers say and what is wrong with them.

Responsibility: both copies of each segment's header, the size of a segment, and which life each file is in. Records
are `tiers.fsck.segment_check`. It changes nothing.

Concurrency: blocking reads of a few pages a file.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tiers.log.segments import PAGE_BYTES, LoggedRecord, Segment
from tiers.places.block_devices import open_block_devices
from tiers.places.geometry import GEOMETRY, Geometry, read_geometry
from tiers.places.place import Place, Places
from tiers.places.segment_files import SegmentFiles


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
        """Return the record's type; None where its header is unreadable."""
        return None if self.header is None else RecordType(self.header["type"])


@dataclass(slots=True)
class SegmentCheck:
    """Collects what one segment holds, and what is wrong with it."""

    segment: Segment
    place: Place
    size_bytes: int
    """Of it that are there."""
    faults: list[str] = field(default_factory=list)
    """Of the segment as a whole: header copies, trailer, footer."""
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
        """Return whether nothing is wrong with the segment."""
        return not (self.faults or self.bad or self.hopeless)

    @property
    def has_holes(self) -> bool:
        """Return whether a record was lost of which nobody knows what it said."""
        return (
            self.hopeless
            or self.is_cut
            or any(bad.lost and bad.type is not RecordType.DATA for bad in self.bad)
        )


@dataclass(slots=True)
class PoolCheck:
    """Holds all segments of a tier, and their geometry."""

    pool: SegmentPool
    checks: list[SegmentCheck]
    geometry: Geometry
    """As `pool.json` should say it."""
    geometry_fault: str = ""
    """What is wrong with that file."""

    @property
    def bytes_to_verify(self) -> int:
        """Return the most bytes that an examination verifies."""
        used = sum(check.segment.state is SegmentState.IN_USE for check in self.checks)
        return used * self.pool.segment_bytes


async def look_at_pool(
    device: Device, directory: Path, store_id: bytes, devices: Sequence[Path] = ()
) -> PoolCheck | None:
    """Open the segments of a directory, or of block devices, with what their headers say; return None where there is no
    pool. `devices`: where `pool.json` does not name them rightly.

    Raises FormatMismatch for another store's pool, or where nothing says how large segments are; ConfigError for
    devices that cannot be used.
    """
    said, fault = _read_geometry(directory, store_id)
    devices = devices or (said.devices if said else ())
    if devices:
        look = await _look_at_devices(device, devices, store_id, said, fault)
    elif _has_files(directory):
        look = _look_at_files(device, directory, store_id, said, fault)
    else:
        return None
    places, geometry, fault, copies = look
    pool = SegmentPool(device, directory, places, store_id)
    checks = []
    try:
        for number in places.numbers():
            check = _open(pool, number)
            checks.append(check)
            _check_header(check, pool, copies[number])
    except BaseException:
        pool.close_files()
        raise
    pool.begin()
    return PoolCheck(pool, checks, geometry, fault)


def _open(pool: SegmentPool, number: int) -> SegmentCheck:
    segment = pool.add(number, pool.places.open(number))
    check = SegmentCheck(segment, pool.places.place(number), pool.places.size_bytes(number))
    if check.size_bytes != pool.segment_bytes:
        check.faults.append(f"has {check.size_bytes} bytes instead of {pool.segment_bytes}")
        check.worn = segment.bad = True
    return check


_Copy = dict[str, Any] | str | None
"""A copy of a segment's header, what is wrong with it, or None where there never was one."""
_Copies = dict[int, list[_Copy]]
_Look = tuple[Places, Geometry, str, _Copies]
"""Where segments are, what `pool.json` should say, what is wrong with it, and their headers."""


def _has_files(directory: Path) -> bool:
    return any(directory.glob("*.seg")) or (directory / GEOMETRY).exists()


def _copies(places: Places) -> _Copies:
    return {
        number: [_copy(places.place(number), at) for at in SEGMENT_HEADER_COPIES]
        for number in places.numbers()
    }


def _copy(place: Place, at: int) -> _Copy:
    try:
        data = place.read(at, PAGE_BYTES)
        if len(data) == PAGE_BYTES and not any(data):
            return None
        raw = formats.decode_page(SEGMENT_HEADER, formats.SEGMENT_MAGIC, data)
    except (KvfsError, OSError) as error:
        return str(error)
    return raw if raw["state"] in (1, 2) else f"{SEGMENT_HEADER.name}: state {raw['state']}"


def _read_geometry(directory: Path, store_id: bytes) -> tuple[Geometry | None, str]:
    """Return what `pool.json` says, and what is wrong with it."""
    try:
        said = read_geometry(directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"does not say what the segment files are: {error}"
    return said, "" if said.store_id == store_id else f"says store {said.store_id.hex()}"


async def _look_at_devices(
    device: Device, devices: Sequence[Path], store_id: bytes, said: Geometry | None, fault: str
) -> _Look:
    """Open block devices. Their labels outvote `pool.json`, which is the one to say how many there are."""
    known = None if fault else said
    places = await open_block_devices(
        device, devices, store_id=store_id, segment_bytes=0, known=known, takes=False
    )
    geometry = Geometry(store_id, places.segment_bytes, places.paths)
    return places, geometry, fault, _copies(places)


def _look_at_files(
    device: Device, directory: Path, store_id: bytes, said: Geometry | None, fault: str
) -> _Look:
    """Find the size of segment files. Headers outvote `pool.json`: they have checksums."""
    copies = _copies(SegmentFiles(device, directory, 0))
    raws = [raw for pair in copies.values() for raw in pair if isinstance(raw, dict)]
    if raws and not any(raw["store_id"] == store_id for raw in raws):
        raise FormatMismatch(
            f"{directory} holds the segments of store {raws[0]['store_id'].hex()}, not of {store_id.hex()}"
        )
    sizes = [raw["segment_bytes"] for raw in raws if raw["store_id"] == store_id]
    path = directory / GEOMETRY
    version, size = (said.version, said.segment_bytes) if said else (0, 0)
    if version > formats.SEGMENT_VERSION and not sizes:
        raise FormatMismatch(f"{path} says format {version}, this kvfs reads up to {formats.SEGMENT_VERSION}")
    if not fault and version != formats.SEGMENT_VERSION:
        fault = f"says format {version}"
    if sizes:
        voted = max(set(sizes), key=sizes.count)
        if not fault and voted != size:
            fault = f"says segments of {size} bytes, the segments themselves say {voted}"
        size = voted
    elif fault:
        raise FormatMismatch(f"{path} {fault}, and no segment is readable that could say it")
    return SegmentFiles(device, directory, size), Geometry(store_id, size), fault, copies


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
    elif check.faults or _begins_with_a_record(check.place):
        check.hopeless = segment.bad = True
        if not check.faults:
            check.faults.append("its header is empty, but records follow")


def _begins_with_a_record(place: Place) -> bool:
    return place.read(SEGMENT_DATA_START, len(RECORD_MAGIC)) == RECORD_MAGIC
