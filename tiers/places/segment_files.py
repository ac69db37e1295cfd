"""Segments as preallocated files of one directory.

Invariants: a file that is made has all its bytes allocated. Concurrency: the service's trio thread; only the async
calls await the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from tiers.device.device import Device
from tiers.device.files import sync_directory
from tiers.places.place import Place

_log = logging.getLogger("kvfs.nvme")


class SegmentFiles:
    """Implements `Places` over files `<number, eight hex digits>.seg`."""

    first_sequence = 1

    def __init__(self, device: Device, directory: Path, segment_bytes: int, wanted: int = 0) -> None:
        """`wanted`: how many files the capacity has."""
        self.segment_bytes = segment_bytes
        self._device = device
        self._directory = directory
        self._wanted = wanted

    def numbers(self) -> Sequence[int]:
        there = {int(path.stem, 16) for path in self._directory.glob("*.seg") if path.is_file()}
        return sorted(there.union(range(self._wanted)))

    def exists(self, number: int) -> bool:
        return self.place(number).path.exists()

    def is_wanted(self, number: int) -> bool:
        return number < self._wanted

    def place(self, number: int) -> Place:
        return Place(self._directory / f"{number:08x}.seg")

    def size_bytes(self, number: int) -> int:
        return self.place(number).path.stat().st_size

    def open(self, number: int) -> int:
        return self._device.open_file(self.place(number).path)

    async def create(self, number: int) -> int:
        return await self._device.create_file(self.place(number).path, self.segment_bytes)

    async def lengthen(self, number: int) -> None:
        missing = self.segment_bytes - self.size_bytes(number)
        if missing > 0:
            path = self.place(number).path
            _log.error("segment file %s is %d bytes short: what they held is lost", path, missing)
            await self._device.allocate(path, self.segment_bytes)

    def remove(self, number: int) -> None:
        self.place(number).path.unlink()

    def set_aside(self, number: int) -> None:
        """Rename the file `*.bad`, kept for inspection; the next start makes another."""
        path = self.place(number).path
        target = path.with_name(path.name + ".bad")
        count = 1
        while target.exists():
            count += 1
            target = path.with_name(f"{path.name}.{count}.bad")
        path.rename(target)
        sync_directory(self._directory)

    def spare(self, taken: Sequence[int]) -> int:
        return 1 + max(taken, default=-1)

    def close(self) -> None:
        """Do nothing: files are held by their descriptors alone."""
