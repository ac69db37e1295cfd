"""The files of the DRAM tier's slots: made, opened, measured, leased.

Responsibility: system calls on one slot's file; what state the slot is in is known to `tiers.dram.accounting`.

Concurrency: the service's thread only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import trio

from kvfs._native.shared import slots as native
from kvfs.errors import NoSpace, Unsupported, WrongChecksum

_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK
_COPY_FLAGS = _READ_FLAGS | os.O_NOATIME


class SlotFiles:
    """Opens and measures the slot files under one root."""

    def __init__(self, root: Path, gid: int | None) -> None:
        self.fd = os.open(root / "slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        """Descriptor of the directory that has the files."""
        self.root = root
        self._gid = -1 if gid is None else gid

    def create(self, slot: int) -> None:
        """Make a slot's file, empty."""
        os.close(native.create(self.fd, slot, self._gid))

    def unlink(self, slot: int) -> None:
        """Unlink a slot's file. Raises OSError."""
        os.unlink(native.slot_name(slot), dir_fd=self.fd)

    def open_read(self, slot: int) -> int:
        """Open a slot read-only; negative while it is being recycled."""
        return native.open_slot(self.fd, slot, _READ_FLAGS)

    def open_copy(self, slot: int) -> int:
        """Open a slot for the service's own copying by `pread`, which leaves no reference to its pages and no mark of a
        read; negative while it is being recycled."""
        return native.open_slot(self.fd, slot, _COPY_FLAGS)

    def open_write(self, slot: int) -> int:
        """Open a slot for writing."""
        return native.open_slot(self.fd, slot, os.O_RDWR)

    def size_bytes(self, slot: int) -> int:
        """Return how long a slot is now."""
        return self._stat(slot).st_size

    def physical_bytes(self, slot: int) -> int:
        """Return what a slot's file takes."""
        return self._stat(slot).st_blocks * 512

    def hole_bytes(self, slot: int) -> int:
        """Return how many bytes of a slot are holes, which take no memory yet."""
        stat = self._stat(slot)
        return max(0, stat.st_size - stat.st_blocks * 512)

    def _stat(self, slot: int) -> os.stat_result:
        return os.stat(native.slot_name(slot), dir_fd=self.fd)

    def fill_holes(self, slot: int) -> None:
        """Allocate the holes of a slot without a writer, whose times stay: whoever maps one while the tier is full gets
        SIGBUS. Raises NoSpace."""
        descriptor = self.open_write(slot)
        try:
            before = os.fstat(descriptor)
            os.posix_fallocate(descriptor, 0, before.st_size)
            os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
        except OSError as error:
            raise NoSpace(
                f"DRAM tier {self.root}: {error.strerror}, the holes of a draft need room"
            ) from None
        finally:
            os.close(descriptor)

    def check_payload(self, slot: int, checksum: int) -> None:
        """Raise WrongChecksum where the payload has another XXH3-64."""
        descriptor = native.open_slot(self.fd, slot, os.O_RDONLY)
        try:
            actual = native.fd_xxh3_64(descriptor)
        finally:
            os.close(descriptor)
        if actual != checksum:
            raise WrongChecksum(f"the draft has XXH3-64 {actual:016x}, its writer gave {checksum:016x}")

    def check_leases(self, slot: int) -> None:
        """Raise Unsupported where the filesystem has no leases."""
        try:
            native.check_no_writer(self.fd, slot)
        except Unsupported as error:
            raise Unsupported(
                f"{self.root}: file leases (F_SETLEASE) do not work here, so readers cannot be seen; "
                "use a tmpfs or a local filesystem, owned by the service's user"
            ) from error

    def shows_reads(self) -> bool:
        """Return whether the kernel notes reads of slots, by which pages are seen that somebody may have references
        to."""
        return native.shows_reads(self.fd)

    def close(self) -> None:
        """Close the directory."""
        os.close(self.fd)


class DramLease:
    """Holds a read-only descriptor of a sealed slot: while it is open, the slot is not recycled."""

    __slots__ = ("_fd", "size_bytes")

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes

    def fileno(self) -> int:
        """Return the descriptor, which stays the lease's; -1 once it is closed."""
        return self._fd

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; return the count read. Page cache only, so no thread is needed."""
        await trio.lowlevel.checkpoint()
        return os.preadv(self._fd, [buffer], offset)

    def close(self) -> None:
        """Close the descriptor, which ends the lease. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
