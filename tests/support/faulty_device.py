"""Devices that fail on purpose, behind the same protocol: one that loses power, one that returns errors, one that does
not answer.

The lossy device follows the fault model of leveldb's fault injection: what was not synced may or may not be
there after the cut, sector by sector. It keeps every write since the last successful sync of its file, with
what the sectors held before, and a cut puts a random outcome of them into the real files.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal

from kvfs.errors import KvfsError
from tiers.device.device import Device
from tiers.device.drive import Drive
from tiers.device.files import FileDevice
from tiers.device.threads import ThreadOperations
from tiers.device.watched import Operation

SECTOR_BYTES = 512
"""What a drive writes whole or not at all."""


class PowerLost(Exception):
    """The machine is off. No KvfsError, so that nothing handles it."""


class WrappedDevice:
    """Passes everything on, and knows the path of each descriptor."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.paths: dict[int, Path] = {}
        self.starts: dict[int, int] = {}

    @property
    def backend(self) -> str:
        return self.inner.backend

    @property
    def depth(self) -> int:
        return self.inner.depth

    @property
    def direct(self) -> bool:
        return self.inner.direct

    @property
    def drive(self) -> Drive:
        return self.inner.drive

    @property
    def late_operations(self) -> int:
        return self.inner.late_operations

    def is_changing(self, fd: int) -> bool:
        return self.inner.is_changing(fd)

    def open_file(self, path: Path, start: int = 0, *, exclusive: bool = False) -> int:
        fd = self.inner.open_file(path, start, exclusive=exclusive)
        self.paths[fd], self.starts[fd] = path, start
        return fd

    async def create_file(self, path: Path, size_bytes: int) -> int:
        fd = await self.inner.create_file(path, size_bytes)
        self.paths[fd], self.starts[fd] = path, 0
        return fd

    async def allocate(self, path: Path, size_bytes: int) -> None:
        await self.inner.allocate(path, size_bytes)

    def close_file(self, fd: int) -> None:
        self.inner.close_file(fd)
        del self.paths[fd], self.starts[fd]

    async def discard(self, fd: int, offset: int, length: int) -> None:
        await self.inner.discard(fd, offset, length)

    async def read(
        self,
        fd: int,
        offset: int,
        into: memoryview,
        *,
        checksum: int | None = None,
        payload_bytes: int | None = None,
    ) -> int:
        return await self.inner.read(fd, offset, into, checksum=checksum, payload_bytes=payload_bytes)

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        await self.inner.write(fd, offset, data)

    async def sync(self, fd: int) -> None:
        await self.inner.sync(fd)

    def buffer(self) -> AbstractAsyncContextManager[memoryview]:
        return self.inner.buffer()

    async def aclose(self) -> None:
        await self.inner.aclose()
        self.paths.clear()


# --- power -----------------------------------------------------------------------------------------------
@dataclass(slots=True, eq=False)
class _Write:
    """One write that no sync covers yet; a discard is a write of zeros."""

    path: Path
    offset: int
    old: bytes
    new: bytes
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """What a power cut did, for the message of a failed test."""

    seed: int
    mode: str
    sectors: int
    """Sectors whose fate was open."""
    lost: int


class LossyDevice(WrappedDevice):
    """Loses power between two operations, or within the one that `cut_at` names.

    From then on every call raises PowerLost, operations in flight too. `power_cut` ends it: it writes into the
    files what a machine could find there after its reboot. Only files that were opened here take part, so the
    descriptor of a slot on a tmpfs passes through. Writes stay inside their files, as those are preallocated.
    """

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.changes = 0
        """Creations, writes, syncs and discards so far: the places where a cut makes a difference."""
        self._cut_at: int | None = None
        self._lost = False
        self._unsynced: list[_Write] = []
        self._created_in_cut: tuple[Path, int] | None = None
        self._in_flight = 0

    def cut_at(self, change: int) -> None:
        """Lose power within this change, counted from 1 over the device's life."""
        self._cut_at = change

    @property
    def unsynced_bytes(self) -> int:
        return sum(len(write.new) for write in self._unsynced)

    # --- changes -----------------------------------------------------------------------------------------
    def open_file(self, path: Path, start: int = 0, *, exclusive: bool = False) -> int:
        self._check_power()
        return super().open_file(path, start, exclusive=exclusive)

    async def create_file(self, path: Path, size_bytes: int) -> int:
        within_cut = self._count()
        fd = await super().create_file(path, size_bytes)
        if within_cut:
            self._created_in_cut = path, size_bytes
            raise PowerLost
        return fd

    async def discard(self, fd: int, offset: int, length: int) -> None:
        within_cut = self._count()
        buffered = os.open(self.paths[fd], os.O_RDONLY)
        at = self.starts[fd] + offset
        old = os.pread(buffered, length, at)
        os.close(buffered)
        self._unsynced.append(_Write(self.paths[fd], at, old, bytes(length), not within_cut))
        await super().discard(fd, offset, length)
        if within_cut:
            raise PowerLost

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        if fd not in self.paths:
            self._check_power()
            await super().write(fd, offset, data)
            return
        within_cut = self._count()
        self._in_flight += 1
        try:
            old = await self._read_sectors(fd, offset, data.nbytes)
            write = _Write(self.paths[fd], self.starts[fd] + offset, old, bytes(data))
            self._unsynced.append(write)
            await super().write(fd, offset, data)
        finally:
            self._in_flight -= 1
        if within_cut:
            raise PowerLost
        self._check_power()
        write.acknowledged = True

    async def sync(self, fd: int) -> None:
        within_cut = self._count()
        path = self.paths.get(fd)
        covered = {write for write in self._unsynced if write.path == path and write.acknowledged}
        self._in_flight += 1
        try:
            await super().sync(fd)
        finally:
            self._in_flight -= 1
        if within_cut:
            raise PowerLost
        self._check_power()
        self._unsynced = [write for write in self._unsynced if write not in covered]

    async def read(
        self,
        fd: int,
        offset: int,
        into: memoryview,
        *,
        checksum: int | None = None,
        payload_bytes: int | None = None,
    ) -> int:
        self._check_power()
        found = await super().read(fd, offset, into, checksum=checksum, payload_bytes=payload_bytes)
        self._check_power()
        return found

    def _count(self) -> bool:
        """Whether power is lost within this change."""
        self._check_power()
        self.changes += 1
        self._lost = self.changes == self._cut_at
        return self._lost

    def _check_power(self) -> None:
        if self._lost:
            raise PowerLost

    async def _read_sectors(self, fd: int, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        size_bytes = os.lseek(fd, 0, os.SEEK_END) - self.starts[fd]
        assert offset + length <= size_bytes, f"a write past the end of {self.paths[fd]}"
        first = offset // SECTOR_BYTES * SECTOR_BYTES
        end = min(-(-(offset + length) // SECTOR_BYTES) * SECTOR_BYTES, size_bytes)
        with mmap.mmap(-1, end - first) as area, memoryview(area) as view:
            await self.inner.read(fd, first, view)
            return bytes(view[offset - first : offset - first + length])

    # --- the cut -----------------------------------------------------------------------------------------
    def power_cut(self, seed: int, mode: Literal["sectors", "writes"] = "sectors") -> Cut:
        """Leave in the files one outcome of what was not synced. REQUIRES that no operation is in flight.

        May be repeated, for other outcomes, in files that are again as they were when the power went.
        "sectors": each sector of each write is there or not. "writes": each write is there or not, as a whole,
        but for those that had not returned: of them a prefix is there.
        """
        assert self._in_flight == 0, "power_cut while operations are in flight"
        self._lost = True
        random = Random(seed)
        if self._created_in_cut is not None:
            _cut_creation(*self._created_in_cut, random)
        paths = sorted({write.path for write in self._unsynced})
        sectors = lost = 0
        for path in paths:
            if not path.exists():
                continue
            with open(path, "r+b", buffering=0) as file:
                writes = [write for write in self._unsynced if write.path == path]
                for write in reversed(writes):
                    os.pwrite(file.fileno(), write.old, write.offset)
                for write in writes:
                    pieces = _sectors(write)
                    kept = _kept(write, len(pieces), mode, random)
                    for (start, end), keep in zip(pieces, kept, strict=True):
                        if keep:
                            os.pwrite(file.fileno(), write.new[start:end], write.offset + start)
                    sectors += len(kept)
                    lost += kept.count(False)
                os.fsync(file.fileno())
        return Cut(seed, mode, sectors, lost)


def _sectors(write: _Write) -> list[tuple[int, int]]:
    """The write cut at sector boundaries of its file, as ranges of its bytes."""
    first = SECTOR_BYTES - write.offset % SECTOR_BYTES
    edges = [0, *range(first, len(write.new), SECTOR_BYTES), len(write.new)]
    return list(pairwise(edges)) if write.new else []


def _kept(write: _Write, count: int, mode: str, random: Random) -> list[bool]:
    if mode == "sectors":
        return [random.random() < 0.5 for _ in range(count)]
    if write.acknowledged:
        return [random.random() < 0.5] * count
    prefix = random.randint(0, count)
    return [number < prefix for number in range(count)]


def _cut_creation(path: Path, size_bytes: int, random: Random) -> None:
    """A creation that had not returned leaves no file, an empty one or the whole one."""
    outcome = random.randrange(3)
    if outcome == 0:
        path.unlink()
    else:
        os.truncate(path, 0 if outcome == 1 else size_bytes)


# --- errors ----------------------------------------------------------------------------------------------
Op = Literal["open_file", "create_file", "discard", "read", "write", "sync"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation, as a predicate sees it."""

    op: Op
    number: int
    """Counts from 1 for each op."""
    path: Path | None
    """None for a descriptor that the device did not open."""
    offset: int
    length: int


@dataclass(slots=True)
class _Fault:
    op: Op | None
    error: type[KvfsError]
    when: Callable[[Call], bool]
    left: int | None
    landed: float


class FailingDevice(WrappedDevice):
    """Raises chosen errors at chosen calls; `counts` says how many calls of each op there were."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.counts: Counter[Op] = Counter()
        self.raised = 0
        self._faults: list[_Fault] = []

    def fail(
        self,
        op: Op | None,
        error: type[KvfsError],
        *,
        at: int | None = None,
        when: Callable[[Call], bool] = lambda call: True,
        times: int | None = 1,
        landed: float = 0.0,
    ) -> None:
        """Raise `error` in calls of `op` (None: any) that `when` chooses; `at`: from the at-th call of the op on.

        times: how often, or None until `heal`. landed: the share of a write's bytes that reach the file before
        it fails, in whole sectors.
        """

        def chosen(call: Call) -> bool:
            return (at is None or call.number >= at) and when(call)

        self._faults.append(_Fault(op, error, chosen, times, landed))

    def heal(self) -> None:
        """No more errors: space has returned, the cable is in again."""
        self._faults.clear()

    def open_file(self, path: Path, start: int = 0, *, exclusive: bool = False) -> int:
        self._raise("open_file", path, 0, 0)
        return super().open_file(path, start, exclusive=exclusive)

    async def create_file(self, path: Path, size_bytes: int) -> int:
        self._raise("create_file", path, 0, size_bytes)
        return await super().create_file(path, size_bytes)

    async def discard(self, fd: int, offset: int, length: int) -> None:
        """Best effort: an injected error is swallowed and the bytes stay."""
        if self._fault("discard", self.paths.get(fd), offset, length) is None:
            await super().discard(fd, offset, length)

    async def read(
        self,
        fd: int,
        offset: int,
        into: memoryview,
        *,
        checksum: int | None = None,
        payload_bytes: int | None = None,
    ) -> int:
        self._raise("read", self.paths.get(fd), offset, into.nbytes)
        return await super().read(fd, offset, into, checksum=checksum, payload_bytes=payload_bytes)

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        fault = self._fault("write", self.paths.get(fd), offset, data.nbytes)
        if fault is None:
            await super().write(fd, offset, data)
            return
        landed = int(data.nbytes * fault.landed) // SECTOR_BYTES * SECTOR_BYTES
        if landed:
            await super().write(fd, offset, data[:landed])
        raise fault.error(f"injected into a write at {offset}")

    async def sync(self, fd: int) -> None:
        self._raise("sync", self.paths.get(fd), 0, 0)
        await super().sync(fd)

    def _raise(self, op: Op, path: Path | None, offset: int, length: int) -> None:
        fault = self._fault(op, path, offset, length)
        if fault is not None:
            raise fault.error(f"injected into {op} of {path} at {offset}")

    def _fault(self, op: Op, path: Path | None, offset: int, length: int) -> _Fault | None:
        self.counts[op] += 1
        call = Call(op, self.counts[op], path, offset, length)
        for fault in self._faults:
            if fault.op in (None, op) and fault.left != 0 and fault.when(call):
                if fault.left is not None:
                    fault.left -= 1
                self.raised += 1
                return fault
        return None


# --- silence ---------------------------------------------------------------------------------------------
class SilentOperations:
    """Begins operations of another backend, or keeps those that `silence` chooses until `speak`, as a drive does that
    does not answer. Made by `silent_device`."""

    backend = "threads"

    def __init__(self, depth: int) -> None:
        self._inner = ThreadOperations(depth)
        self._silent: Callable[[Operation], bool] | None = None
        self.kept: list[tuple[Operation, Callable[[], None]]] = []
        """Operations without an answer, each with what begins it."""

    def silence(self, when: Callable[[Operation], bool] = lambda operation: True) -> None:
        """Answer none of these from here on."""
        self._silent = when

    def speak(self) -> None:
        """Answer again, what was kept as well."""
        self._silent = None
        kept, self.kept = self.kept, []
        for _, begin in kept:
            begin()

    def add_buffer(self, view: memoryview) -> None:
        self._inner.add_buffer(view)

    def begin_read(self, operation: Operation, payload_bytes: int) -> None:
        self._begin(operation, partial(self._inner.begin_read, operation, payload_bytes))

    def begin_write(self, operation: Operation) -> None:
        self._begin(operation, partial(self._inner.begin_write, operation))

    def begin_sync(self, operation: Operation) -> None:
        self._begin(operation, partial(self._inner.begin_sync, operation))

    def _begin(self, operation: Operation, begin: Callable[[], None]) -> None:
        if self._silent is not None and self._silent(operation):
            self.kept.append((operation, begin))
        else:
            begin()

    async def release(self) -> None:
        await self._inner.release()


def silent_device(depth: int = 8) -> tuple[FileDevice, SilentOperations]:
    """Make a device, and what it is made of."""
    made: list[SilentOperations] = []

    def make(operations: int) -> SilentOperations:
        made.append(SilentOperations(operations))
        return made[0]

    return FileDevice(make, depth), made[0]
