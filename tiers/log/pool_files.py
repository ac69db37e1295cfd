"""Opens the directory of a segment pool: its geometry, and every file as its header says.

Responsibility: files are made where they are missing and removed past the wanted capacity; what cannot be read is set
aside. `pool.json` says whose the segments are, and how large.

Concurrency: the service's trio thread, at a start.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvfs import formats, limits
from kvfs.errors import ConfigError, Corrupt, DeviceAway, FormatMismatch, KvfsError
from kvfs.formats import SEGMENT_DATA_START, SEGMENT_HEADER, SEGMENT_HEADER_COPIES, SegmentState
from tiers.device.device import Device
from tiers.log.pool import SegmentPool
from tiers.log.segments import PAGE_BYTES, Segment

_log = logging.getLogger("kvfs.nvme")

GEOMETRY = "pool.json"


async def open_pool(
    device: Device,
    directory: Path,
    *,
    store_id: bytes,
    capacity_bytes: int,
    segment_bytes: int | None = None,
    trims: bool = False,
) -> SegmentPool:
    """Open the segment files of `directory` in the state that their headers say; make those that are missing.

    A directory that has files keeps their size. Raises ConfigError for a capacity out of bounds, NoSpace when the
    filesystem cannot hold it, FormatMismatch for the files of another store or a newer format, DeviceAway; nothing is
    left of what was made until then.
    """
    with _whole_or_nothing(directory):
        return await _open_files(device, directory, store_id, capacity_bytes, segment_bytes, trims)


@contextmanager
def _whole_or_nothing(directory: Path) -> Iterator[None]:
    """Remove what an opening that fails has made: files too large would stand in the way of a smaller pool."""
    before = set(directory.glob("*"))
    try:
        yield
    except (KvfsError, OSError):
        for path in set(directory.glob("*")) - before:
            path.unlink()
        raise


async def _open_files(
    device: Device,
    directory: Path,
    store_id: bytes,
    capacity_bytes: int,
    segment_bytes: int | None,
    trims: bool,
) -> SegmentPool:
    wanted_bytes = segment_bytes or default_segment_bytes(capacity_bytes)
    segment_bytes, highest = _look(directory, store_id, wanted_bytes)
    count = capacity_bytes // segment_bytes
    if not limits.MIN_SEGMENTS <= count <= limits.MAX_SEGMENTS:
        raise ConfigError(
            f"NVMe capacity of {capacity_bytes} bytes makes {count} segments of {segment_bytes}: "
            f"{limits.MIN_SEGMENTS} to {limits.MAX_SEGMENTS} are possible"
        )
    pool = SegmentPool(device, directory, store_id, segment_bytes, trims=trims)
    try:
        for number in range(max(count, highest + 1)):
            await _open_segment(pool, number, wanted=number < count)
    except BaseException:
        pool.close_files()
        raise
    pool.next_sequence = 1 + max((s.sequence for s in pool.segments), default=0)
    pool.free = deque(s for s in pool.segments if s.state is SegmentState.FREE and not s.bad)
    pool.endings.size_for(pool.capacity_bytes)
    return pool


def default_segment_bytes(capacity_bytes: int) -> int:
    """Choose a 64th of the capacity, as a power of two within the limits."""
    share = max(1, capacity_bytes // limits.SEGMENTS_WANTED)
    return min(max(1 << share.bit_length() - 1, limits.MIN_SEGMENT_BYTES), limits.MAX_SEGMENT_BYTES)


def _look(directory: Path, store_id: bytes, segment_bytes: int) -> tuple[int, int]:
    """Return (bytes of a segment, highest file number) of the directory, which is made where it is missing."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    size = _geometry(directory, store_id, segment_bytes)
    return size, max((int(path.stem, 16) for path in directory.glob("*.seg")), default=-1)


def _geometry(directory: Path, store_id: bytes, segment_bytes: int) -> int:
    """Return the size of the files there, or write the wanted one down. Raises ConfigError, FormatMismatch."""
    path = directory / GEOMETRY
    try:
        version, owner, size = read_geometry(directory)
    except FileNotFoundError:
        if segment_bytes % PAGE_BYTES or not (
            limits.MIN_SEGMENT_BYTES <= segment_bytes <= limits.MAX_SEGMENT_BYTES
        ):
            raise ConfigError(
                f"segments of {segment_bytes} bytes: whole pages from {limits.MIN_SEGMENT_BYTES} to "
                f"{limits.MAX_SEGMENT_BYTES} are possible"
            ) from None
        if any(directory.glob("*.seg")):
            raise FormatMismatch(f"{directory} holds segment files, but no {GEOMETRY}") from None
        write_geometry(directory, store_id, segment_bytes)
        return segment_bytes
    except (ValueError, KeyError, TypeError) as error:
        raise FormatMismatch(f"{path} does not say what the segment files are: {error}") from None
    if version > formats.SEGMENT_VERSION:
        raise FormatMismatch(f"{path} says format {version}, this kvfs reads up to {formats.SEGMENT_VERSION}")
    if owner != store_id:
        raise FormatMismatch(
            f"{directory} holds the segments of store {owner.hex()}, not of {store_id.hex()}"
        )
    return size


def read_geometry(directory: Path) -> tuple[int, bytes, int]:
    """Return (format version, store id, bytes of a segment). Raises OSError, ValueError, KeyError, TypeError."""
    said = json.loads((directory / GEOMETRY).read_text())
    return int(said["format"]), bytes.fromhex(said["store_id"]), int(said["segment_bytes"])


def write_geometry(directory: Path, store_id: bytes, segment_bytes: int) -> None:
    """Write down whose the segments are, and how large."""
    text = json.dumps(
        {"format": formats.SEGMENT_VERSION, "store_id": store_id.hex(), "segment_bytes": segment_bytes}
    )
    temporary = directory / (GEOMETRY + ".new")
    temporary.write_text(text + "\n")
    with temporary.open() as file:
        os.fsync(file.fileno())
    temporary.rename(directory / GEOMETRY)


async def _open_segment(pool: SegmentPool, number: int, *, wanted: bool) -> None:
    """Add one file to the pool; one past the wanted capacity only where it is in use."""
    path = pool.directory / f"{number:08x}.seg"
    exists = path.exists()
    if not exists and not wanted:
        return
    fd = pool.device.open_file(path) if exists else await pool.device.create_file(path, pool.segment_bytes)
    segment = Segment(number, fd)
    pool.segments.append(segment)
    if not exists:
        return
    try:
        await _lengthen(pool, path)
        raw = await _read_header(pool, segment)
    except DeviceAway:
        raise
    except (OSError, KvfsError) as error:
        _log.error("segment file %s is set aside: %s", path, error)
        segment.bad = True
        return
    if raw is not None:
        segment.sequence = raw["segment_sequence"]
        segment.state = SegmentState(raw["state"])
    if not wanted and segment.state is SegmentState.FREE:
        pool.segments.pop()
        pool.device.close_file(fd)
        path.unlink()


async def _lengthen(pool: SegmentPool, path: Path) -> None:
    """Extend a file that was cut, so that the rest of it can be read: zeros are no records."""
    missing = pool.segment_bytes - os.stat(path).st_size
    if missing > 0:
        _log.error("segment file %s is %d bytes short: what they held is lost", path, missing)
        await pool.device.allocate(path, pool.segment_bytes)


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
