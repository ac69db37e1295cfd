"""Segments as parts of whole block devices: local drives, partitions, NVMe-oF namespaces.

Responsibility: have a device to oneself, look what it holds, label an empty one, and say which part of it is which
segment. The rules are `tiers.places.labels`'.

Invariants:
- A device is used by one process at a time, and never while it is mounted or part of another device (O_EXCL).
- Only a device whose first and last MiB are zeros is taken; any other holds somebody's bytes.
- The label is written last: until then a device counts as empty.

Concurrency: the service's trio thread, at a start; opening a device that does not answer blocks.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from kvfs import limits
from kvfs.config.capacities import block_device
from kvfs.config.sizes import format_size
from kvfs.errors import ConfigError, Corrupt, FormatMismatch, NoSpace
from kvfs.formats import (
    DEVICE_LABEL_COPIES,
    DEVICE_LABEL_MAGIC,
    DEVICE_NUMBER_SHIFT,
    DEVICE_SEGMENTS_START,
    SEGMENT_DATA_START,
)
from tiers.device.device import Device
from tiers.places.geometry import Geometry
from tiers.places.labels import (
    LABEL_BYTES,
    PAGE_BYTES,
    BlockDevice,
    Label,
    decode_label,
    in_order,
    new_labels,
)
from tiers.places.place import Place

_BLKSSZGET: Final = 0x1268
"""include/uapi/linux/fs.h: the logical block size."""
ENDS_BYTES: Final = DEVICE_SEGMENTS_START
"""Filesystems, partition tables, RAID and volume managers have their signatures in the first or last MiB."""
_HEAD_BYTES: Final = SEGMENT_DATA_START + PAGE_BYTES
"""Of a segment that was never used: zeros, up to where its first record's header would be."""

EMPTY: Final = "nothing"

_log = logging.getLogger("kvfs.nvme")


@contextmanager
def claimed(path: Path) -> Iterator[tuple[int, int]]:
    """Have a block device to oneself; yield its descriptor and its size in bytes.

    Raises ConfigError where it is none, cannot be opened or used, or is in use.
    """
    with block_device(path, os.O_RDWR | os.O_EXCL) as (fd, size_bytes):
        sector_bytes: int = struct.unpack("i", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))[0]
        if limits.DEVICE_ALIGNMENT_BYTES % sector_bytes:
            raise ConfigError(
                f"[nvme] device = '{path}': logical blocks of {sector_bytes} bytes, not up to "
                f"{limits.DEVICE_ALIGNMENT_BYTES}"
            )
        yield fd, size_bytes


class BlockDevices:
    """Implements `Places` over labelled devices. Made by `open_block_devices`."""

    def __init__(
        self,
        device: Device,
        labelled: Sequence[tuple[BlockDevice, Label]],
        claims: Sequence[int],
        segment_bytes: int,
    ) -> None:
        """`claims`: the device's descriptors by which nobody else may use these."""
        self.segment_bytes = segment_bytes
        self.first_sequence = max((label.first_sequence for _, label in labelled), default=1)
        self.paths = tuple(each.path for each, _ in labelled)
        self._device = device
        self._claims = claims
        every = [(index, label.number) for _, label in labelled for index in range(label.segments)]
        """By place first: what is written one after the other is spread over the devices."""
        self._numbers = [number << DEVICE_NUMBER_SHIFT | index for index, number in sorted(every)]
        self._spare = max(self._numbers, default=-1)

    def numbers(self) -> Sequence[int]:
        return self._numbers

    def exists(self, number: int) -> bool:
        return True

    def is_wanted(self, number: int) -> bool:
        return number != self._spare

    def place(self, number: int) -> Place:
        device, index = number >> DEVICE_NUMBER_SHIFT, number & (1 << DEVICE_NUMBER_SHIFT) - 1
        return Place(self.paths[device], DEVICE_SEGMENTS_START + index * self.segment_bytes)

    def size_bytes(self, number: int) -> int:
        return self.segment_bytes

    def open(self, number: int) -> int:
        place = self.place(number)
        return self._device.open_file(place.path, place.start)

    async def create(self, number: int) -> int:
        return self.open(number)

    async def lengthen(self, number: int) -> None:
        """Do nothing: the label says how many segments there are, and a device that is smaller is refused."""

    def remove(self, number: int) -> None:
        """Do nothing: the place stays."""

    def set_aside(self, number: int) -> None:
        """Have the segment be one that was never used: a block that a drive cannot read gets another place when it is
        written."""
        place = self.place(number)
        with place.path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes(_HEAD_BYTES), place.start)
            os.fsync(file.fileno())

    def spare(self, taken: Sequence[int]) -> int:
        if self._spare < 0 or self._spare in taken:
            raise NoSpace(f"{', '.join(map(str, self.paths))}: every segment is in use")
        return self._spare

    def close(self) -> None:
        for fd in self._claims:
            self._device.close_file(fd)
        self._claims = ()


async def open_block_devices(
    device: Device,
    paths: Sequence[Path],
    *,
    store_id: bytes,
    segment_bytes: int,
    known: Geometry | None,
    takes: bool = True,
) -> BlockDevices:
    """Open a store's devices; where it `takes` them, label empty ones, and what grew. `segment_bytes`: of a store that
    has none yet.

    Raises ConfigError, FormatMismatch, DeviceAway, DeviceFailed.
    """
    with ExitStack() as on_failure:
        found, claims = [], []
        for path in paths:
            real = path.resolve()
            with claimed(real) as (_, size_bytes):
                pass
            claims.append(device.open_file(real, exclusive=True))
            on_failure.callback(device.close_file, claims[-1])
            found.append(await _look(device, claims[-1], real, size_bytes))
        devices = in_order(found, store_id, known)
        labelled = [(each, each.label) for each in devices if each.label is not None]
        segment_bytes = labelled[0][1].segment_bytes if labelled else segment_bytes
        if takes:
            labelled = new_labels(devices, store_id, segment_bytes)
            _check_count(labelled)
            for each, label in labelled:
                if label != each.label:
                    await _take(device, claims[found.index(each)], each, label)
        on_failure.pop_all()
        return BlockDevices(device, labelled, claims, segment_bytes)


def _check_count(labelled: Sequence[tuple[BlockDevice, Label]]) -> None:
    count = sum(label.segments for _, label in labelled)
    if count <= limits.MIN_SEGMENTS:
        sizes = ", ".join(f"{each.path} with {format_size(each.size_bytes)}" for each, _ in labelled)
        raise ConfigError(
            f"[nvme] device: {sizes}: room for {count} segments of {labelled[0][1].segment_bytes} bytes, more than "
            f"{limits.MIN_SEGMENTS} are needed"
        )


async def _look(device: Device, fd: int, path: Path, size_bytes: int) -> BlockDevice:
    """Find whose a device is. Raises FormatMismatch where it is neither a store's nor empty."""
    if size_bytes < 2 * ENDS_BYTES:
        raise ConfigError(f"[nvme] device = '{path}': {format_size(size_bytes)} are no room for segments")
    first = await _read(device, fd, 0)
    if any(first.startswith(DEVICE_LABEL_MAGIC, at) for at in DEVICE_LABEL_COPIES):
        try:
            return BlockDevice(path, size_bytes, decode_label(first))
        except Corrupt as error:
            raise FormatMismatch(f"{path}: {error}, in both copies") from None
    if any(first) or any(await _read(device, fd, (size_bytes - ENDS_BYTES) // PAGE_BYTES * PAGE_BYTES)):
        raise FormatMismatch(
            f"{path} holds something that is not of kvfs; `kvfs device clear --force {path}` empties it"
        )
    return BlockDevice(path, size_bytes, None)


async def _read(device: Device, fd: int, start: int) -> bytes:
    async with device.buffer() as view:
        part = view[:ENDS_BYTES]
        await device.read(fd, start, part)
        return bytes(part)


async def _take(device: Device, fd: int, found: BlockDevice, label: Label) -> None:
    """Have segments that are new be ones that were never used, durably, then write the label."""
    async with device.buffer() as view:
        view[:_HEAD_BYTES] = bytes(_HEAD_BYTES)
        for index in range(0 if found.label is None else found.label.segments, label.segments):
            start = DEVICE_SEGMENTS_START + index * label.segment_bytes
            await device.write(fd, start, view[:_HEAD_BYTES])
        await device.sync(fd)
        view[:LABEL_BYTES] = label.encode()
        for at in DEVICE_LABEL_COPIES:
            await device.write(fd, at, view[at : at + PAGE_BYTES])
            await device.sync(fd)
    _log.warning(
        "%s is device %d of the store: %d segments of %s", found.path, label.number, label.segments,
        format_size(label.segment_bytes),
    )  # fmt: skip


def clear(path: Path, *, forced: bool) -> str:
    """Overwrite what begins and ends a block device, so that it counts as empty; return what it held.

    Raises ConfigError for a device in use, FormatMismatch for one that holds anything and is not `forced`, OSError.
    """
    with claimed(path) as (fd, size_bytes):
        what = _describe(fd, size_bytes)
        if what != EMPTY and not forced:
            raise FormatMismatch(f"{path} holds {what}: --force empties it all the same")
        for start in (0, max(size_bytes - ENDS_BYTES, 0)):
            os.pwrite(fd, bytes(min(ENDS_BYTES, size_bytes)), start)
        os.fsync(fd)
        return what


def describe(path: Path) -> tuple[int, str]:
    """Return the size of a block device in bytes, and what it holds, in words. Raises ConfigError, OSError."""
    with claimed(path) as (fd, size_bytes):
        return size_bytes, _describe(fd, size_bytes)


def _describe(fd: int, size_bytes: int) -> str:
    first = os.pread(fd, ENDS_BYTES, 0)
    try:
        label = decode_label(first)
    except (Corrupt, FormatMismatch):
        last = os.pread(fd, ENDS_BYTES, max(size_bytes - ENDS_BYTES, 0))
        return "something that is not of kvfs" if any(first) or any(last) else EMPTY
    return f"{label.segments} segments, device {label.number} of store {label.store_id.hex()}"
