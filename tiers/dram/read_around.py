"""Reads of objects for which DRAM has no slot: into memory beside the tier, handed out as a read-only descriptor.

Responsibility: that memory and its limits. While leases or durable objects fill DRAM, what lies below it is still
read, instead of being reported as missing.

Invariants:
- At most limits.READ_AROUND_BYTES are held, half of it for one uid: the kernel says when a reader has closed its own.
- A copy is sealed against writing before anybody else sees it, and holds verified bytes only.
- A read that finds no room waits limits.READ_AROUND_WAIT_S for it, and is then Busy: never a miss. One that
  is too large for it is Busy until DRAM has room.

Concurrency: the service's trio thread; `read` awaits.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from kvfs import limits
from kvfs._native.shared.slots import fd_is_held
from kvfs.errors import Busy

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


@dataclass(slots=True)
class _Copy:
    descriptor: int
    size_bytes: int
    uid: int
    complete: bool = False


def _reopen(descriptor: int) -> int:
    """Open the file of a descriptor for reading: unlike with a duplicate, the kernel then distinguishes the two."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class ReadAround:
    """Keeps copies of objects that have no slot, while somebody reads them."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self.reads = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes of all copies that somebody still reads."""
        return sum(copy.size_bytes for copy in self._copies)

    async def read(self, size_bytes: int, fill: Callable[[int], Awaitable[object]], *, uid: int) -> int:
        """Return a read-only descriptor of `size_bytes` that `fill` has written; the caller closes it.

        Raises Busy, at once of what is larger than may ever be held, and what `fill` raises.
        """
        if size_bytes > limits.READ_AROUND_BYTES // 2:
            raise Busy(
                f"DRAM has no room for {size_bytes} bytes; beside it {limits.READ_AROUND_BYTES // 2} are read at most"
            )
        copy = await self._reserve(size_bytes, uid)
        try:
            await fill(copy.descriptor)
            fcntl.fcntl(copy.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            writable, copy.descriptor = copy.descriptor, _reopen(copy.descriptor)
            os.close(writable)  # with a writable one open, every probe says that the copy is held
            copy.complete = True
            self.reads += 1
            return _reopen(copy.descriptor)
        except BaseException:
            self._drop(copy)
            raise

    async def _reserve(self, size_bytes: int, uid: int) -> _Copy:
        with trio.move_on_after(limits.READ_AROUND_WAIT_S):
            while not self._has_room(size_bytes, uid):
                await trio.sleep(limits.READ_AROUND_POLL_S)
                self.sweep()
            copy = _Copy(os.memfd_create("kvfs-read-around", os.MFD_ALLOW_SEALING), size_bytes, uid)
            self._copies.append(copy)
            return copy
        raise Busy(
            f"uid {uid} reads {size_bytes} bytes for which DRAM has no room, and readers hold {self.held_bytes} of "
            f"{limits.READ_AROUND_BYTES} beside it"
        )

    def _has_room(self, size_bytes: int, uid: int) -> bool:
        own_bytes = sum(copy.size_bytes for copy in self._copies if copy.uid == uid)
        return (
            self.held_bytes + size_bytes <= limits.READ_AROUND_BYTES
            and own_bytes + size_bytes <= limits.READ_AROUND_BYTES // 2
        )

    def sweep(self) -> None:
        """Free what nobody reads any more."""
        for copy in list(self._copies):
            if copy.complete and not fd_is_held(copy.descriptor):
                self._drop(copy)

    def _drop(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        os.close(copy.descriptor)

    def close(self) -> None:
        """Close all copies; readers keep theirs."""
        for copy in list(self._copies):
            self._drop(copy)
