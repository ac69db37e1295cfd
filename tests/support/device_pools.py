"""A pool of device memory where the device is memory files: the maker of segments, and a client with these mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import trio

from kvfs._native.hbm.hazards import ClientHazards
from kvfs.errors import NoSpace
from tiers.hbm.clients import PoolClient
from tiers.hbm.driver_ports import Listing
from tiers.hbm.tier import HbmTier
from tiers.model.tier import Extent, Sealed, SealHeader, Usage

MIB = 1 << 20


@dataclass
class MemorySegments:
    """Makes segments of memory files."""

    device: str = "GPU-00000000-0000-0000-0000-000000000000"
    device_bytes: int = 1 << 40
    """Above which the device is out of memory."""
    made: list[int] = field(default_factory=list)
    """Inodes."""

    def make(self, size_bytes: int) -> int:
        if (len(self.made) + 1) * size_bytes > self.device_bytes:
            raise NoSpace(f"device {self.device} is out of memory")
        fd = os.memfd_create("segment")
        os.ftruncate(fd, size_bytes)
        self.made.append(os.fstat(fd).st_ino)
        return fd


class Clock:
    """Seconds that a test sets; each look is a little later than the one before."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


class Holders:
    """Says who is on a device, as it was at the last question; nobody does where `pids` is None."""

    def __init__(self, clock: Clock, pids: set[int]) -> None:
        self.pids: set[int] | None = pids
        self.is_ours = True
        self.asked = 0
        self._clock = clock
        self._listing: Listing | None = None

    def listing(self, device: str) -> Listing | None:
        return None if self.pids is None else self._listing

    def ask(self, device: str) -> None:
        self.asked += 1
        if self.pids is not None:
            self._listing = Listing(frozenset(self.pids), self._clock(), is_ours=self.is_ours)

    def missing(self) -> list[str]:
        return []


class MappedPool:
    """A client of a tier in the same process, as a tier: what is the client's it does through its mappings."""

    def __init__(self, tier: HbmTier, pid: int | None = None) -> None:
        self.tier = tier
        pid = os.getpid() if pid is None else pid
        self.client: PoolClient = tier.attach(pid, os.pidfd_open(pid))
        self.leases = ClientHazards(tier.generations.fd, self.client.hazards.fd)
        self.maps: dict[int, mmap.mmap] = {}

    def map(self, number: int) -> mmap.mmap:
        if number not in self.maps:
            fd, _ = self.tier.map_segment(self.client, number)
            self.maps[number] = mmap.mmap(fd, 0)
        return self.maps[number]

    def unmap(self, number: int) -> None:
        self.maps.pop(number).close()
        self.tier.unmapped(self.client, number)

    # --- the ports --------------------------------------------------------------------------------------
    def usage(self) -> Usage:
        return self.tier.usage()

    def reserve(self, size_bytes: int = 0) -> Extent:
        return self.tier.reserve(size_bytes, self.client)

    def open_draft(self, draft: Extent) -> int:
        raise NotImplementedError

    def write(self, draft: Extent, payload: bytes) -> None:
        place = self.tier.place(draft)
        assert len(payload) <= place.slot_bytes
        self.map(place.segment)[place.offset_bytes : place.offset_bytes + len(payload)] = payload

    def seal(self, draft: Extent, header: SealHeader) -> Sealed:
        return self.tier.seal(draft, self.client, header, checksum=header.sequence)

    def abort(self, draft: Extent) -> None:
        self.tier.abort(draft, self.client)

    def lease(self, extent: Extent) -> MappedLease:
        place = self.leases.publish(extent.slot, extent.generation)
        try:
            return MappedLease(self, extent, place)
        except BaseException:
            self.leases.clear(place)
            raise

    def held(self, extent: Extent) -> bool:
        return self.tier.held(extent)

    def free(self, extent: Extent, *, charge_uid: int = 0) -> int:
        return self.tier.free(extent, charge_uid=charge_uid)

    def charged_bytes(self, uid: int) -> int:
        return self.tier.charged_bytes(uid)

    def sweep(self) -> int:
        return self.tier.sweep()

    def checksum(self, extent: Extent) -> int | None:
        return self.tier.checksum(extent)

    def sealed(self) -> Iterator[Sealed]:
        return self.tier.sealed()

    def close(self) -> None:
        for mapping in self.maps.values():
            mapping.close()
        self.maps.clear()
        self.tier.close()


class MappedLease:
    """A leased extent, read through the client's mapping."""

    def __init__(self, pool: MappedPool, extent: Extent, lease: int) -> None:
        self._pool = pool
        self._lease: int | None = lease
        place = pool.tier.place(extent)
        self.size_bytes = next(s.size_bytes for s in pool.tier.sealed() if s.extent == extent)
        self._map = pool.map(place.segment)
        self._start = place.offset_bytes

    def fileno(self) -> int:
        raise NotImplementedError

    def bytes(self, offset: int = 0) -> bytes:
        return self._map[self._start + offset : self._start + self.size_bytes]

    async def read_into(self, offset: int, buffer: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        payload = self.bytes(offset)[: len(buffer)]
        buffer[: len(payload)] = payload
        return len(payload)

    def close(self) -> None:
        if self._lease is not None:
            self._pool.leases.clear(self._lease)
            self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def pool(capacity_bytes: int = 16 * MIB, **options: object) -> Iterator[MappedPool]:
    """A tier with segments of 2 MiB, and one client."""
    made = MappedPool(HbmTier(MemorySegments(), capacity_bytes, segment_bytes=2 * MIB, **options))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()
