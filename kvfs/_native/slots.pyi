"""Slot files: create, open, probe for holders and writers, recycle, detach, hash. Slots count from 0."""

from typing_extensions import Buffer

def slot_name(slot: int) -> str:
    """The file name of a slot: eight hex digits."""

def create(dirfd: int, slot: int, gid: int = -1) -> int:
    """A new empty slot file, mode 0640; its read-write descriptor. Raises Exists, NoSpace."""

def open_slot(dirfd: int, slot: int, flags: int) -> int:
    """A descriptor (O_CLOEXEC), or -1 where O_NONBLOCK met the recycler's lease. Raises NotFound."""

def check_no_writer(dirfd: int, slot: int) -> tuple[int, int]:
    """(size in bytes, physical bytes). Raises WriterActive while a writable descriptor or mapping lives,
    Unsupported where leases do not work."""

def is_held(dirfd: int, slot: int) -> bool:
    """Whether anyone has the slot open or mapped."""

def recycle(dirfd: int, slot: int) -> bool:
    """Truncate the slot under a lease; False when somebody holds it. Raises Unsupported without leases."""

def detach(dirfd: int, slot: int) -> tuple[int, int]:
    """Unlink a held slot: (read-only descriptor of the nameless file, its physical bytes)."""

def fd_is_held(fd: int) -> bool:
    """Whether anyone but `fd` has this file open or mapped."""

def fd_has_writer(fd: int) -> bool:
    """Whether a writable descriptor or mapping of this file lives; `fd` itself is read-only."""

def physical_bytes(fd: int) -> int:
    """What the file takes on its device (st_blocks x 512)."""

def fd_xxh3_64(fd: int) -> int:
    """XXH3-64 of the whole file."""

def xxh3_64(data: Buffer) -> int:
    """XXH3-64 of a buffer."""
