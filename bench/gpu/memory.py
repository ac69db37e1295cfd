"""Memory that is copied between: of the device, imported by a descriptor, and of the host, registered.

Concurrency: one thread.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kvfs._native.cuda.driver import Context, open_driver

MADV_POPULATE_WRITE = 23
"""linux/mman.h, since Linux 5.14."""


@dataclass(frozen=True, slots=True)
class Area:
    """A range of addresses that a device reaches."""

    address: int
    size_bytes: int
    ends: Sequence[Callable[[], object]]

    def close(self) -> None:
        for end in self.ends:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rounded(context: Context, size_bytes: int) -> int:
    unit = context.device.granularity_bytes
    return -(-size_bytes // unit) * unit


def device_area(context: Context, size_bytes: int) -> Area:
    """Allocate and map memory of the device."""
    allocation = context.device.create(rounded(context, size_bytes))
    mapping = context.device.map(allocation)
    return Area(mapping.address, mapping.size_bytes, (mapping.unmap, allocation.release))


def exported_area(context: Context, size_bytes: int) -> Area:
    """Map memory that is known by its descriptor alone, as a client has the pool's."""
    with context.device.create(rounded(context, size_bytes)) as made:
        fd = made.export()
    allocation = open_driver().import_allocation(fd, rounded(context, size_bytes))
    os.close(fd)
    mapping = context.device.map(allocation)
    return Area(mapping.address, mapping.size_bytes, (mapping.unmap, allocation.release))


def host_area(context: Context, size_bytes: int, content: bytes = b"") -> Area:
    """Register memory of a file in memory, as the DRAM tier's slots are."""
    fd = os.memfd_create("slots")
    os.ftruncate(fd, size_bytes)
    os.pwrite(fd, content, 0)
    pages = mmap.mmap(fd, size_bytes)
    os.close(fd)
    pages.madvise(MADV_POPULATE_WRITE)
    registration = context.register(ctypes.addressof(ctypes.c_char.from_buffer(pages)), size_bytes)
    return Area(registration.address, size_bytes, (registration.unregister, pages.close))


class Listed:
    """Numbers that a kernel reads and writes, in registered memory: pieces row by row, or whole columns."""

    def __init__(self, context: Context, numbers: Sequence[Sequence[int]], rows: int = 0) -> None:
        packed = array.array("Q", [number for each in numbers for number in each]).tobytes()
        self._area = host_area(context, -(-len(packed) // mmap.PAGESIZE) * mmap.PAGESIZE, packed)
        self.address = self._area.address
        self.rows = rows or len(numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._area.close()
