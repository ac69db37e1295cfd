"""Opens the NVMe tier: reads and replays all segments.

Responsibility: footers where there are any, else a scan; what was scanned is made durable, what has ended is repeated
beside the segments, and segments of which nothing counts are freed. Nothing else changes on the device.

Concurrency: the service's trio thread, before any door is open.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvfs.errors import DeviceAway, DeviceFailed, KvfsError, NoSpace
from tiers.device.device import Device
from tiers.log.pool import SegmentPool
from tiers.log.pool_files import open_pool
from tiers.nvme.reclaimer import Reclaimer
from tiers.nvme.tier import NvmeTier
from tiers.recovery.log_replay import Replay, Replayed

_log = logging.getLogger("kvfs.nvme")


@contextmanager
def _log_failures(what: str) -> Iterator[None]:
    """Log what the device does not take, and go on: reclaim or the log's next write tries again. Raises DeviceAway."""
    try:
        yield
    except DeviceAway:
        raise
    except (NoSpace, DeviceFailed) as error:
        _log.error("%s: %s", what, error)


async def _repeat_endings(pool: SegmentPool, replay: Replay) -> None:
    for name, faults in pool.endings.faults.items():
        _log.error("%s: %s; written again from the log", pool.directory / name, "; ".join(faults[:3]))
    pool.endings.durable_sequence = pool.last_sequence
    with _log_failures("what has ended is not repeated beside the segments"):
        await pool.endings.begin(list(replay.unrepeated()))


async def _take_segments(pool: SegmentPool, replay: Replay) -> None:
    """Read and replay each segment in use; one that cannot be is set aside."""
    for segment in pool.used():
        try:
            listing = await pool.reader.listing(segment)
            # What a killed service did not sync comes to the device before anything that it replaces is ended.
            if listing.offsets:
                with _log_failures(f"segment {segment.number}: what was found in it may not be durable"):
                    await pool.device.sync(segment.fd)
            replay.take(segment, listing)
        except DeviceAway:
            raise
        except KvfsError as error:
            _log.error("segment %d is set aside: %s", segment.number, error)
            segment.bad = True
        segment.closed = True


async def open_nvme(
    device: Device,
    directory: Path,
    *,
    store_id: bytes,
    capacity_bytes: int,
    devices: Sequence[Path] = (),
    segment_bytes: int | None = None,
    trim: bool = False,
) -> tuple[NvmeTier, Replayed]:
    """Open the tier in `directory`, or on block `devices`, with all that its records say. Raises what `open_pool` does.

    A segment that the device fails, or whose records make no sense, is set aside: its objects are misses. A drive that
    does not answer says nothing of them: the start fails.
    """
    started = time.monotonic()
    pool = await open_pool(
        device,
        directory,
        store_id=store_id,
        capacity_bytes=capacity_bytes,
        devices=devices,
        segment_bytes=segment_bytes,
        trims=trim,
    )
    try:
        tier = NvmeTier(pool)
        tier.log.writer.reclaim = Reclaimer(tier).reclaim
        replay = Replay(tier, await pool.endings.load())
        await _take_segments(pool, replay)
        replay.finish()
        with _log_failures("segments of which nothing counts are not freed"):
            for segment in replay.spent():
                await pool.release(segment)
        await _repeat_endings(pool, replay)
    except BaseException:
        pool.close_files()
        raise
    tier.log.writer.next_sequence = replay.next_sequence
    found = replay.found
    found.segments = len(pool.segments)
    found.seconds = time.monotonic() - started
    return tier, found
