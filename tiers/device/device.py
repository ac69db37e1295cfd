"""The seam between the store and the files of a storage device.

Responsibility: what every device does (`Device`), and open the one that this machine allows: io_uring, or
threads. `tests/conformance/device_suite.py` runs over every implementation.

Invariants (each has a conformance test):
- An operation moves all of its bytes or raises. A read that meets the end of the file raises `Corrupt`.
- A read never returns without the XXH3-64 of its payload, computed without the GIL.
- A cancelled caller waits, shielded, until the kernel is done with its buffer: an operation cannot be taken
  back, and a buffer that is reused under it would be written by the device.
- A read that takes longer than limits.NVME_READ_S, a write or sync longer than NVME_WRITE_S, raises DeviceAway, and the
  drive is away until it answers again: meanwhile every operation raises DeviceAway at once. The memory of a read that
  raised it is the device's until that is done with it: it must not be used again, but may be forgotten, since the
  device refers to it. What `buffer` lent is returned as ever.
- After `aclose` every call raises `DeviceFailed`.

Concurrency: one trio thread calls; `open_file` and `close_file` hold it for as long as they take.
"""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol

from kvfs import limits
from kvfs.errors import DeviceMissing
from tiers.device.drive import Drive
from tiers.device.threads import thread_device
from tiers.device.uring import uring_device

Kind = Literal["auto", "io_uring", "threads"]

_log = logging.getLogger("kvfs.device")


class Device(Protocol):
    """Reads and writes files of one storage device, around the page cache.

    Offsets, lengths and addresses on a direct descriptor are multiples of limits.DEVICE_ALIGNMENT_BYTES; others
    raise InvalidRequest or pass, as the device has it. Any descriptor will do for `read` and `write`, such as one
    of a slot on a tmpfs; on ordinary ones every alignment works. Memory that is a mapping has its pages (a sparse
    mapping of a full tmpfs fails the read with DeviceFailed).
    """

    @property
    def backend(self) -> str:
        """Return "io_uring" or "threads"."""

    @property
    def depth(self) -> int:
        """Return how many operations run at once; further ones wait, first come first served."""

    @property
    def direct(self) -> bool:
        """Return False once a file was opened whose filesystem has no O_DIRECT."""

    @property
    def drive(self) -> Drive:
        """Return whether the drive is here or away."""

    @property
    def late_operations(self) -> int:
        """Return how many operations are unanswered that nobody waits for any more; at most `depth`."""

    def is_changing(self, fd: int) -> bool:
        """Return whether a write or discard that nobody waits for any more may still change the file: nothing written
        there counts until it cannot."""

    def open_file(self, path: Path, start: int = 0, *, exclusive: bool = False) -> int:
        """Open a file for reading and writing, direct where the filesystem allows it. Offsets count from its byte
        `start`, a multiple of limits.DEVICE_ALIGNMENT_BYTES. `exclusive`: a block device, which nobody else may use
        until this descriptor is closed. Raises NotFound, DeviceFailed."""

    async def create_file(self, path: Path, size_bytes: int) -> int:
        """Make a file, which must not exist, with all its bytes allocated, durable with its name; open it.

        Nothing stays of a failure, but what is late may come to be. Raises NoSpace, NotFound, Exists, DeviceAway,
        DeviceFailed.
        """

    async def allocate(self, path: Path, size_bytes: int) -> None:
        """Extend a file with zeros to so many bytes, durably. Raises NoSpace, NotFound, DeviceAway, DeviceFailed."""

    def close_file(self, fd: int) -> None:
        """Close a descriptor of `open_file` that no operation uses. Raises InvalidRequest for another."""

    async def discard(self, fd: int, offset: int, length: int) -> None:
        """Trim bytes that are not needed; they read as zeros and stay allocated. Best effort."""

    async def read(
        self,
        fd: int,
        offset: int,
        into: memoryview,
        *,
        checksum: int | None = None,
        payload_bytes: int | None = None,
    ) -> int:
        """Fill `into` and return the XXH3-64 of its first `payload_bytes` (default: of all).

        Raises Corrupt where the file ends before, or where `checksum` is given and differs; DeviceAway, DeviceFailed.
        """

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        """Write all of `data`; durable after the next `sync`. Raises NoSpace where the filesystem is full, DeviceAway,
        DeviceFailed, also past the end of a block device."""

    async def sync(self, fd: int) -> None:
        """Make what was written before durable (fdatasync). Raises NoSpace, DeviceAway, DeviceFailed.

        After a failure the kernel may have dropped what was written, and a second sync may succeed without it.
        """

    def buffer(self) -> AbstractAsyncContextManager[memoryview]:
        """Lend one of limits.DEVICE_BUFFERS buffers of limits.DEVICE_BUFFER_BYTES, aligned; waits until one is free.

        Its bytes are what the last user left there. Raises DeviceAway where the drive is away and none is free.
        """

    async def aclose(self) -> None:
        """Wait for the operations in flight, at most limits.DEVICE_CLOSE_WAIT_S; close what is still open.

        Callers whose operation has not ended by then get DeviceFailed, and its file and memory stay.
        """


def open_device(
    kind: Kind = "auto", depth: int = limits.DEVICE_DEPTH, *, has_deadlines: bool = True
) -> Device:
    """Open the backend that this machine allows. Without deadlines a drive is never away, and waited for.

    Raises DeviceMissing for "io_uring" where it is not allowed.
    """
    if kind != "threads":
        try:
            return uring_device(depth, has_deadlines=has_deadlines)
        except DeviceMissing as error:
            if kind == "io_uring":
                raise
            _log.warning("%s; this device is driven by threads instead", error)
    return thread_device(depth, has_deadlines=has_deadlines)
