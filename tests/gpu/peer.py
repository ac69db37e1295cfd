"""A process that has a device's memory of another, and does as it is told: python -m tests.gpu.peer FD LIBRARY.

Each message on the socket is JSON, with a descriptor where memory is named; each gets one answer: `result`, or the
name and text of an `error`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from kvfs._native.cuda.driver import Context, open_driver
from kvfs._native.hash.hashing import xxh3_64
from kvfs.errors import KvfsError
from tests.support.gpu_memory import DeviceMemory, Kernels

MESSAGE_BYTES = 64 << 10


def pattern(seed: int, size_bytes: int) -> bytes:
    """Return bytes that differ with each seed and place."""
    line = b"".join((seed * 1_000_003 + place).to_bytes(8, "little") for place in range(512))
    return (line * (size_bytes // len(line) + 1))[:size_bytes]


class Orders:
    """What a peer can be told; a context is made by the first that needs one."""

    def __init__(self, library: str) -> None:
        self._driver = open_driver(library or None)
        self._device = self._driver.devices()[0]
        self._context: Context | None = None
        self._memory: dict[int, DeviceMemory] = {}
        self._kept: dict[int, int] = {}
        """Descriptors of what was imported, without which a restarted service could not have it again."""

    @property
    def context(self) -> Context:
        if self._context is None:
            self._context = self._device.retain_context()
            self._kernels = Kernels(self._context)
        return self._context

    def make(self, fds: list[int], size_bytes: int) -> int:
        """Allocate and export, without a context; the descriptor goes with the answer."""
        with self._device.create(size_bytes) as allocation:
            fds.append(allocation.export())
        return size_bytes

    def map(self, fds: list[int], number: int, size_bytes: int, writable: bool = True) -> int:
        allocation = self._driver.import_allocation(fds[0], size_bytes)
        self._kept[number] = fds.pop()
        self._memory[number] = DeviceMemory(self.context, allocation, writable=writable)
        return number

    def descriptor(self, fds: list[int], number: int) -> int:
        """Hand back the descriptor of what was imported."""
        fds.append(os.dup(self._kept[number]))
        return number

    def export(self, fds: list[int], number: int) -> int:
        """Export what was imported."""
        fds.append(self._memory[number].allocation.export())
        return number

    def open_handle(self, fds: list[int], number: int, handle: str, size_bytes: int) -> None:
        """Open what another process has of cuMemAlloc."""
        self._memory[number] = DeviceMemory(
            self.context, self.context.open_handle(bytes.fromhex(handle)), size_bytes
        )

    def unmap(self, fds: list[int], number: int) -> None:
        self._memory.pop(number).close()
        if number in self._kept:
            os.close(self._kept.pop(number))

    def write(self, fds: list[int], number: int, offset: int, seed: int, size_bytes: int) -> None:
        self._memory[number].write(pattern(seed, size_bytes), offset)

    def write_by_kernel(self, fds: list[int], number: int, size_bytes: int) -> None:
        """Copy the first half of so many bytes to the second."""
        start = self._memory[number].address
        self._kernels.copy([(start + size_bytes // 2, start, size_bytes // 2)])

    def checksums(self, fds: list[int], number: int, offset: int, size_bytes: int) -> list[int]:
        """Return the XXH3-64 of a range: of what a copy reads, and as the kernel has it."""
        memory = self._memory[number]
        copied = xxh3_64(memory.read(size_bytes, offset))
        return [copied, *self._kernels.checksums([(memory.address + offset, size_bytes)])]


def serve(door: socket.socket, orders: Orders) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(door, MESSAGE_BYTES, 1)
        if not message:
            return
        order: dict[str, Any] = json.loads(message)
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(orders, order.pop("order"))(fds, **order)}
        except KvfsError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        socket.send_fds(door, [json.dumps(answer).encode()], fds)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own:
        serve(own, Orders(sys.argv[2]))
