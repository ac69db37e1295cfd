"""A tier that is full and stays full: overwritten several times by writers, while readers hold leases on what goes.

KVFS_TEST_SEED repeats a run. Popularity is zipf's, so what is read often should stay, and reclaim should write little
of it again.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs import limits
from kvfs.errors import NoSpace, NotFound, Superseded
from kvfs.limits import MIB
from tests.support.crash_load import audit
from tests.support.posix import pattern
from tests.support.seeds import SEED, rounds
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.tier import NvmeTier
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

DRAM: Final = 16 * MIB
NVME: Final = 48 * MIB
FULL: Final = 0.9
"""Of the tier, what all keys together would take."""
OVERWRITES: Final = rounds(3, 5)
CLIENTS: Final = 4
LEASES: Final = 12
"""That each client holds at most: together a good part of DRAM."""
SIZES: Final = (4096, 30_000, 100_000, 256 * 1024, 700_000)
SKEW: Final = 0.9
PERSISTED: Final = 0.5
"""Of the writes, those that wait for the device: else most would be overwritten before the tier has them."""
STUCK_S: Final = 240


@dataclass
class Load:
    """Keys, their popularity, and what every name should hold."""

    durable_share: float
    versions: dict[Name, int] = field(default_factory=dict)
    names: list[Name] = field(default_factory=list)
    sizes: dict[Name, int] = field(default_factory=dict)
    reads: int = 0
    hits: int = 0
    short_of_slots: int = 0

    def __post_init__(self) -> None:
        chance = random.Random(SEED)
        total = 0
        while total < FULL * NVME:
            durable = chance.random() < self.durable_share
            name = Name(b"durable" if durable else b"cache", b"%d" % len(self.names))
            self.names.append(name)
            self.sizes[name] = chance.choice(SIZES)
            total += self.sizes[name]
        chance.shuffle(self.names)
        self.weights = list(itertools.accumulate((n + 1) ** -SKEW for n in range(len(self.names))))


class Client:
    """Reads and overwrites; a read keeps its descriptor, which is a lease, for a while."""

    def __init__(self, store: Store, load: Load, number: int) -> None:
        self.store, self.load = store, load
        self.chance = random.Random(f"{SEED}/{number}")
        self.leases: deque[tuple[int, int, int]] = deque()
        """(descriptor, version, size) of what was read."""

    async def run(self) -> None:
        try:
            counts = nvme_of(self.store).log.counts
            while counts.appended_bytes - counts.rewritten_bytes < OVERWRITES * NVME:
                name = self.chance.choices(self.load.names, cum_weights=self.load.weights)[0]
                if self.chance.random() < 0.5:
                    await self.read(name)
                else:
                    await self.write(name)
                await trio.lowlevel.checkpoint()
        finally:
            while self.leases:
                self.release()

    async def read(self, name: Name) -> None:
        if name not in self.load.versions:
            return await self.write(name)
        self.load.reads += 1
        try:
            info = self.store.lookup(name)
        except NotFound:
            assert name.bucket == b"cache", f"{name} is lost"
            return None
        assert isinstance(info, ObjectInfo)
        assert int(info.user_metadata) == self.load.versions[name]
        try:
            info = await self.store.load(info, uid=0)
            descriptor = self.store.open_read(info, uid=0)
        except (NotFound, Superseded):  # while it was read back from NVMe
            return None
        except NoSpace:
            self.load.short_of_slots += 1
            return self.release()
        self.load.hits += 1
        self.leases.append((descriptor, int(info.user_metadata), info.size_bytes))
        if len(self.leases) > self.chance.randint(1, LEASES):
            self.release()
        return None

    def release(self) -> None:
        """End the oldest lease; its bytes are what they were when it began."""
        if self.leases:
            descriptor, version, size = self.leases.popleft()
            data = os.pread(descriptor, size + 1, 0)
            os.close(descriptor)
            assert data == pattern(version, size)

    async def write(self, name: Name) -> None:
        size = self.load.sizes[name]
        try:
            draft = self.store.reserve(size, uid=0)
        except NoSpace:
            self.load.short_of_slots += 1
            return self.release()
        version = next(VERSIONS)
        descriptor = self.store.open_draft(draft)
        os.pwrite(descriptor, pattern(version, size), 0)
        os.close(descriptor)
        try:
            sealed = self.store.seal(draft, name, Attributes(user_metadata=b"%d" % version))
        except NoSpace:  # durable objects are at their bound
            self.store.abort(draft)
            assert name.bucket == b"durable"
            return None
        self.load.versions[name] = version
        if self.chance.random() < PERSISTED:
            with suppress(Superseded, NoSpace):  # it was replaced meanwhile
                await self.store.journal.persist(sealed.object_id)
        await self.store.journal.settle()
        return None


VERSIONS = itertools.count(1)


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[Store]:
    device = thread_device()
    store = await start_store(
        StoreOptions(
            path,
            dram_bytes=DRAM,
            backing="directory",
            quota_bytes=1 << 40,
            nvme=NvmeOptions(device, NVME, segment_bytes=MIB),
        )
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            yield store
            nursery.cancel_scope.cancel()
        await store.finish()
    finally:
        store.close()
        with trio.CancelScope(shield=True):
            await device.aclose()


async def read_back(store: Store, load: Load) -> int:
    """Every name that is there has its last version, every durable one is there; how many there are."""
    there = 0
    for name, version in load.versions.items():
        try:
            info = store.lookup(name)
            assert isinstance(info, ObjectInfo)
            info = await store.load(info, uid=0)
        except (NotFound, Superseded):
            assert name.bucket == b"cache", f"{name} is lost"
            continue
        descriptor = store.open_read(info, uid=0)
        data = os.pread(descriptor, info.size_bytes + 1, 0)
        os.close(descriptor)
        assert data == pattern(version, load.sizes[name]), f"{name} is not version {version}"
        there += 1
    return there


def nvme_of(store: Store) -> NvmeTier:
    assert isinstance(store.journal, NvmeJournal)
    return store.journal.nvme


@pytest.mark.seeded
@pytest.mark.parametrize("durable_share", [0.0, 0.4])
async def test_a_full_tier_goes_on(tmp_path: Path, durable_share: float) -> None:
    load = Load(durable_share)
    async with running(tmp_path) as store:
        store.create_bucket(b"cache", uid=0, gid=0)
        store.create_bucket(b"durable", uid=0, gid=0, durable=True)
        with trio.fail_after(STUCK_S):
            async with trio.open_nursery() as clients:
                for number in range(CLIENTS):
                    clients.start_soon(Client(store, load, number).run)
            await store.journal.settle()
        nvme = nvme_of(store)
        assert not audit(store)
        assert nvme.log.counts.segments_reclaimed > len(nvme.pool.segments)
        print(
            f"{OVERWRITES} times its capacity written, hit ratio {load.hits / load.reads:.3f}, "
            f"write amplification {nvme.write_amplification:.3f}, short of slots {load.short_of_slots} times"
        )
        assert nvme.write_amplification < 1.5
        assert len(nvme.pool.free) <= limits.RESERVED_SEGMENTS + 1
        await read_back(store, load)
    async with running(tmp_path) as store:
        assert await read_back(store, load)
