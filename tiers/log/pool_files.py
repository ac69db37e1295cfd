"""Opens the segments of a pool: in a directory or on block devices, every one as its header says.

Responsibility: files are made where they are missing and removed past the wanted capacity; what cannot be read is set
aside. Where segments lie is `tiers.places`'.

Concurrency: the service's trio thread, at a start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import trio

from kvfs import formats, limits
from kvfs.errors import ConfigError, Corrupt, DeviceAway, FormatMismatch, KvfsError
from kvfs.formats import SEGMENT_DATA_START, SEGMENT_HEADER, SEGMENT_HEADER_COPIES, SegmentState
from tiers.device.device import Device
from tiers.log.pool import SegmentPool
from tiers.log.segments import PAGE_BYTES, Segment
from tiers.places.block_devices import open_block_devices
from tiers.places.geometry import Geometry, known_geometry, write_geometry
from tiers.places.place import Places
from tiers.places.segment_files import SegmentFiles

_log = logging.getLogger("kvfs.nvme")
_MADE_AT_ONCE: Final = 8
"""Syncs that run together share what the filesystem's journal writes: 64 files of 4 MiB take 0.04 s on ext4, and 0.3 s
one after the other."""


async def open_pool(
    device: Device,
    directory: Path,
    *,
    store_id: bytes,
    capacity_bytes: int,
    devices: Sequence[Path] = (),
    segment_bytes: int | None = None,
    trims: bool = False,
) -> SegmentPool:
    """Open the segments of `directory`, or of block `devices`, in the state that their headers say; make those that are
    missing.

    A tier that has segments keeps their size. Raises ConfigError for a capacity out of bounds and for devices that
    cannot be used, NoSpace when the filesystem cannot hold it, FormatMismatch for the segments of another store or a
    newer format, DeviceAway; no file is left of what was made until then.
    """
    with _whole_or_nothing(directory):
        wanted_bytes = segment_bytes or default_segment_bytes(capacity_bytes)
        known = known_geometry(directory, store_id)
        if known is None:
            _check_segment_bytes(wanted_bytes)
        places = await _open_places(device, directory, store_id, capacity_bytes, wanted_bytes, devices, known)
        return await _open_segments(SegmentPool(device, directory, places, store_id, trims=trims))


@contextmanager
def _whole_or_nothing(directory: Path) -> Iterator[None]:
    """Make the directory; remove what an opening that fails has made in it: files too large would stand in the way of a
    smaller pool."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    before = set(directory.glob("*"))
    try:
        yield
    except (KvfsError, OSError):
        for path in set(directory.glob("*")) - before:
            path.unlink()
        raise


async def _open_places(
    device: Device,
    directory: Path,
    store_id: bytes,
    capacity_bytes: int,
    segment_bytes: int,
    devices: Sequence[Path],
    known: Geometry | None,
) -> Places:
    """Take the places that the capacity asks for, and write down where they are."""
    if known is not None and bool(known.devices) != bool(devices):
        where = ", ".join(map(str, known.devices)) or f"files in {directory}"
        raise ConfigError(f"[nvme] device: the store's segments are {where}, which it cannot move from")
    if devices:
        places = await open_block_devices(
            device, devices, store_id=store_id, segment_bytes=segment_bytes, known=known
        )
        geometry = Geometry(store_id, places.segment_bytes, places.paths)
        try:
            if geometry != known:
                write_geometry(directory, geometry)
        except BaseException:
            places.close()
            raise
        return places
    segment_bytes = segment_bytes if known is None else known.segment_bytes
    count = capacity_bytes // segment_bytes
    if not limits.MIN_SEGMENTS <= count <= limits.MAX_SEGMENTS:
        raise ConfigError(
            f"NVMe capacity of {capacity_bytes} bytes makes {count} segments of {segment_bytes}: "
            f"{limits.MIN_SEGMENTS} to {limits.MAX_SEGMENTS} are possible"
        )
    if known is None:
        write_geometry(directory, Geometry(store_id, segment_bytes))
    return SegmentFiles(device, directory, segment_bytes, count)


async def _open_segments(pool: SegmentPool) -> SegmentPool:
    made: dict[int, int] = {}
    try:
        await _make_missing(pool.places, made)
        for number in pool.places.numbers():
            if number in made:
                pool.add(number, made.pop(number))
            else:
                await _open_segment(pool, number)
    except BaseException:
        for fd in made.values():
            pool.device.close_file(fd)
        pool.close_files()
        raise
    pool.begin()
    pool.endings.size_for(pool.capacity_bytes)
    return pool


async def _make_missing(places: Places, made: dict[int, int]) -> None:
    """Make the segments that are not there, a few at once; `made`: number -> descriptor.

    Raises NoSpace, DeviceFailed, DeviceAway.
    """
    missing = iter([number for number in places.numbers() if not places.exists(number)])
    failures: list[Exception] = []

    async def make() -> None:
        for number in missing:
            if failures:
                return
            try:
                made[number] = await places.create(number)
            except Exception as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(_MADE_AT_ONCE):
            nursery.start_soon(make)
    if failures:
        raise failures[0]


def default_segment_bytes(capacity_bytes: int) -> int:
    """Choose a 64th of the capacity, as a power of two within the limits."""
    share = max(1, capacity_bytes // limits.SEGMENTS_WANTED)
    return min(max(1 << share.bit_length() - 1, limits.MIN_SEGMENT_BYTES), limits.MAX_SEGMENT_BYTES)


def _check_segment_bytes(segment_bytes: int) -> None:
    if segment_bytes % PAGE_BYTES or not (
        limits.MIN_SEGMENT_BYTES <= segment_bytes <= limits.MAX_SEGMENT_BYTES
    ):
        raise ConfigError(
            f"segments of {segment_bytes} bytes: whole pages from {limits.MIN_SEGMENT_BYTES} to "
            f"{limits.MAX_SEGMENT_BYTES} are possible"
        )


async def _open_segment(pool: SegmentPool, number: int) -> None:
    """Add one segment that is there to the pool; one past the wanted capacity only where it is in use."""
    places = pool.places
    segment = pool.add(number, places.open(number))
    try:
        await places.lengthen(number)
        raw = await _read_header(pool, segment)
    except DeviceAway:
        raise
    except (OSError, KvfsError) as error:
        _log.error("segment %s is set aside: %s", places.place(number).name, error)
        segment.bad = True
        return
    if raw is not None:
        segment.sequence = raw["segment_sequence"]
        segment.state = SegmentState(raw["state"])
    if segment.state is SegmentState.FREE and not places.is_wanted(number):
        pool.segments.pop()
        pool.device.close_file(segment.fd)
        places.remove(number)


async def _read_header(pool: SegmentPool, segment: Segment) -> dict[str, Any] | None:
    """Read the newest copy of the header; return None for a file never used. Raises Corrupt, FormatMismatch,
    DeviceFailed."""
    data = await pool.reader.read_bytes(segment, 0, SEGMENT_DATA_START)
    if not any(data):
        return None
    good: list[dict[str, Any]] = []
    problem: KvfsError = Corrupt("no copy of its header is readable")
    for at in SEGMENT_HEADER_COPIES:
        try:
            raw = formats.decode_page(SEGMENT_HEADER, formats.SEGMENT_MAGIC, data[at : at + PAGE_BYTES])
        except (Corrupt, FormatMismatch) as error:
            problem = error
            continue
        if raw["store_id"] != pool.store_id:
            raise FormatMismatch(f"it belongs to store {raw['store_id'].hex()}")
        if raw["segment_bytes"] != pool.segment_bytes or raw["state"] not in (1, 2):
            raise Corrupt(f"its header says {raw['segment_bytes']} bytes, state {raw['state']}")
        good.append(raw)
    if not good:
        raise problem
    return max(good, key=lambda raw: (raw["segment_sequence"], -raw["state"]))
