"""Reads, writes and syncs of files through one io_uring, with the checksums of reads."""

from typing import Final

from typing_extensions import Buffer, disjoint_base

BUILT: Final[bool]
"""False where liburing's header (2.3 or newer) was missing at build time: a Ring cannot be made."""

@disjoint_base
class Ring:
    """Run at most `depth` requests, each named by a number below `depth` until it is reaped.

    Raises DeviceMissing where io_uring is not built in or not allowed.
    """

    def __init__(self, depth: int, max_buffers: int) -> None: ...
    def submit_read(self, fd: int, offset: int, into: Buffer, payload_bytes: int) -> int:
        """Read into `into`; hash `payload_bytes` of it. Raises DeviceFailed: closed, or `depth` are in flight."""

    def submit_write(self, fd: int, offset: int, data: Buffer) -> int: ...
    def submit_sync(self, fd: int) -> int:
        """Sync as fdatasync(2) does."""

    def add_buffer(self, data: Buffer) -> None:
        """Register memory that stays until `close`; without effect where RLIMIT_MEMLOCK forbids it."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to reap."""

    def reap(self) -> list[tuple[int, int, int, int]]:
        """Return what has ended: (request, errno or 0, bytes moved, XXH3-64 of a read's payload).

        ENODATA: a read met the end of the file, after the bytes moved.
        """

    def close(self, timeout_s: float) -> list[tuple[int, int, int, int]]:
        """Cancel what is in flight and end the threads; return what ended, as `reap`.

        Requests that the kernel does not return in time are missing there; their memory is never freed.
        """

    @property
    def registered_buffers(self) -> int: ...
    @property
    def deferred(self) -> bool:
        """Return whether the kernel has SINGLE_ISSUER and DEFER_TASKRUN (6.1)."""
