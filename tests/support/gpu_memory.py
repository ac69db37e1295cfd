"""Memory of a device and of this process, written and read by copies alone, as a GPU has it."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Iterable, Sequence
from typing import Self

from kvfs._native.cuda.copies import Copier, Plan
from kvfs._native.cuda.driver import Allocation, Context, LegacyMemory
from kvfs._native.cuda.images import CHECKSUM_THREADS, COPY_THREADS, kernel_image

Piece = tuple[int, int, int]
"""Destination, source, bytes."""


def numbers(pieces: Iterable[Piece]) -> array.array[int]:
    """Return pieces as a plan takes them."""
    return array.array("Q", [number for piece in pieces for number in piece])


def address_of(buffer: bytearray | mmap.mmap | array.array[int]) -> int:
    """Return where a writable buffer lies, which must stay the same size from now on."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class DeviceMemory:
    """Memory of the device at an address: an allocation, mapped, or what a legacy handle opened."""

    def __init__(
        self, context: Context, held: Allocation | LegacyMemory, size_bytes: int = 0, *, writable: bool = True
    ) -> None:
        self._stream = context.stream()
        if isinstance(held, LegacyMemory):
            self.address, self.size_bytes = held.address, size_bytes
            self._ends = [self._stream.destroy, held.free]
            return
        self.allocation = held
        mapping = context.device.map(held, writable=writable)
        self.address, self.size_bytes = mapping.address, mapping.size_bytes
        self._ends = [self._stream.destroy, mapping.unmap, held.release]

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy bytes there, and wait until they are."""
        assert offset + len(data) <= self.size_bytes
        buffer = bytearray(data)
        self._stream.copy(self.address + offset, address_of(buffer), len(data))
        self._stream.synchronize()

    def read(self, size_bytes: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes from there."""
        buffer = bytearray(self.size_bytes - offset if size_bytes is None else size_bytes)
        assert offset + len(buffer) <= self.size_bytes
        self._stream.copy(address_of(buffer), self.address + offset, len(buffer))
        self._stream.synchronize()
        return bytes(buffer)

    def close(self) -> None:
        for end in self._ends:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostMemory:
    """Memory of this process, registered with the device."""

    def __init__(self, context: Context, size_bytes: int, fd: int = -1) -> None:
        self.pages = mmap.mmap(fd, size_bytes)
        self.host_address = address_of(self.pages)
        self._registration = context.register(self.host_address, size_bytes)
        self.address = self._registration.address
        self.size_bytes = size_bytes

    def close(self) -> None:
        self._registration.unregister()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_plan(context: Context, plan: Plan) -> None:
    """Copy, and wait until that is done."""
    stream, done = context.stream(), context.event()
    plan.start(stream, done)
    done.synchronize()
    done.destroy()
    stream.destroy()


class Kernels:
    """The package's kernels, one call at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stream, self._done = context.stream(), context.event()
        self._checksums = context.load_module(kernel_image("xxh3"))
        self._copies = context.load_module(kernel_image("copy"))
        self.copier = Copier(context, kernel_image("copy"))

    def run(self, plan: Plan, *, within_device: bool = False) -> None:
        """Copy by the copier, and wait until that is done."""
        self.copier.start(plan, self._stream, self._done, within_device=within_device)
        self._done.synchronize()

    def checksums(self, objects: Sequence[tuple[int, int]]) -> list[int]:
        """Return the XXH3-64 of objects (address, bytes) of more than 240 bytes."""
        columns = [[address for address, _ in objects], [size for _, size in objects], [0] * len(objects)]
        with Columns(self._context, columns) as held:
            self._checksums.launch("kvfs_xxh3", self._stream, len(objects), CHECKSUM_THREADS, held.addresses)
            self._stream.synchronize()
            return held.column(2)

    def copy(self, pieces: Sequence[Piece], grid: int = 8) -> None:
        """Copy pieces, and wait until that is done."""
        with Columns(self._context, pieces) as held:
            self._copies.launch(
                "kvfs_copy", self._stream, grid, COPY_THREADS, [held.addresses[0], len(pieces)]
            )
            self._stream.synchronize()


class Columns:
    """Numbers that a kernel reads and writes, in registered memory."""

    def __init__(self, context: Context, columns: Sequence[Sequence[int]]) -> None:
        self._rows = len(columns[0])
        self._memory = HostMemory(context, 8 * self._rows * len(columns))
        packed = array.array("Q", [number for column in columns for number in column])
        self._memory.pages[:] = packed.tobytes()
        self.addresses = [self._memory.address + 8 * self._rows * index for index in range(len(columns))]

    def column(self, index: int) -> list[int]:
        start = 8 * self._rows * index
        return array.array("Q", self._memory.pages[start : start + 8 * self._rows]).tolist()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()
