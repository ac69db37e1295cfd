"""Slot files: create, open, probe for holders and writers, recycle, detach, hash. Slots count from 0."""

from typing_extensions import Buffer

def slot_name(slot: int) -> str:
    """Return the file name of a slot: eight hex digits."""

def create(dirfd: int, slot: int, gid: int = -1) -> int:
    """Make an empty slot file, mode 0640; return its read-write descriptor. Raises Exists, NoSpace."""

def open_slot(dirfd: int, slot: int, flags: int) -> int:
    """Return a descriptor (O_CLOEXEC), -1 where O_NONBLOCK met the recycler's lease. Raises NotFound."""

def check_no_writer(dirfd: int, slot: int) -> tuple[int, int]:
    """Return (size in bytes, physical bytes). Raises WriterActive while a writable descriptor or mapping lives,
    Unsupported where leases do not work."""

def is_held(dirfd: int, slot: int) -> bool:
    """Return whether anyone has the slot open or mapped."""

def recycle(dirfd: int, slot: int, keep_bytes: int = 0) -> int | None:
    """Free the slot under a lease; return None when somebody holds it. Raises Unsupported without leases.

    Return how many bytes it keeps: `keep_bytes` if it has exactly so many and nobody can have a reference to its pages;
    else 0, and it is empty.
    """

def shows_reads(dirfd: int) -> bool:
    """Return whether reads of files in this directory set their access times, as `recycle` wants it."""

def mark_read(fd: int) -> None:
    """Mark a slot as one of whose pages somebody may have references."""

def fill(dirfd: int, slots: list[int], size: int) -> None:
    """Fill empty slots with zeros, in pages as large as the size allows. Raises NoSpace; some are then filled."""

def detach(dirfd: int, slot: int) -> tuple[int, int]:
    """Unlink a held slot; return (read-only descriptor of the nameless file, its physical bytes)."""

def fd_is_held(fd: int) -> bool:
    """Return whether anyone but `fd` has this file open or mapped."""

def fd_has_writer(fd: int) -> bool:
    """Return whether a writable descriptor or mapping of this file lives; `fd` itself is read-only."""

def physical_bytes(fd: int) -> int:
    """Return the bytes of the file on its device (st_blocks x 512)."""

def fd_xxh3_64(fd: int) -> int:
    """Return XXH3-64 of the whole file."""

def xxh3_64(data: Buffer) -> int:
    """Return XXH3-64 of a buffer."""
