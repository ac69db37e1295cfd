"""The seam between the store and the files of a storage device.

Responsibility: what every device does (`Device`), and open the one that this machine allows: io_uring, or
threads. `tests/conformance/device_suite.py` runs over every implementation.

Invariants (each has a conformance test):
- An operation moves all of its bytes or raises. A read that meets the end of the file raises `Corrupt`.
- A read never returns without the XXH3-64 of its payload, computed without the GIL.
- A cancelled caller waits, shielded, until the kernel is done with its buffer: an operation cannot be taken
  back, and a buffer that is reused under it would be written by the device.
- After `aclose` every call raises `DeviceFailed`.

Concurrency: one trio thread calls; `open_file`, `close_file` and `discard` hold it for as long as they take.
"""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol

from kvfs import limits
from kvfs.errors import DeviceMissing
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

    def open_file(self, path: Path, size_bytes: int, *, create: bool) -> int:
        """Open a file for reading and writing, direct where the filesystem allows it.

        create: makes the file, which must not exist, with all its `size_bytes` allocated, and syncs it and its
        directory; nothing stays of a failure. Raises NoSpace, NotFound, Exists, DeviceFailed.
        """

    def close_file(self, fd: int) -> None:
        """Close a descriptor of `open_file` that no operation uses. Raises InvalidRequest for another."""

    def discard(self, fd: int, offset: int, length: int) -> None:
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

        Raises Corrupt where the file ends before, or where `checksum` is given and differs; DeviceFailed.
        """

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        """Write all of `data`; durable after the next `sync`. Raises NoSpace, DeviceFailed."""

    async def sync(self, fd: int) -> None:
        """Make what was written before durable (fdatasync). Raises NoSpace, DeviceFailed.

        After a failure the kernel may have dropped what was written, and a second sync may succeed without it.
        """

    def buffer(self) -> AbstractAsyncContextManager[memoryview]:
        """Lend one of limits.DEVICE_BUFFERS buffers of limits.DEVICE_BUFFER_BYTES, aligned; waits until one is free.

        Its bytes are what the last user left there.
        """

    async def aclose(self) -> None:
        """Wait for the operations in flight, at most limits.DEVICE_CLOSE_WAIT_S; close what is still open.

        Callers whose operation has not ended by then get DeviceFailed, and its file and memory stay.
        """


def open_device(kind: Kind = "auto", depth: int = limits.DEVICE_DEPTH) -> Device:
    """Open the backend that this machine allows. Raises DeviceMissing for "io_uring" where it is not allowed."""
    if kind != "threads":
        try:
            return uring_device(depth)
        except DeviceMissing as error:
            if kind == "io_uring":
                raise
            _log.warning("%s; this device is driven by threads instead", error)
    return thread_device(depth)
