"""A start after a kill is killed as well, or loses power: what was not synced, and DRAM, may be gone."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.support.faulty_device import LossyDevice, PowerLost, WrappedDevice
from tests.support.one_store import DURABLE, life, look
from tests.support.seeds import SEED
from tests.support.stores import put
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.model.objects import Name
from tiers.store.store import Store

TARGET: Final = Name(DURABLE, b"target")
BEFORE, AFTER = b"before" * 1_000, b"after" * 1_000
CHANGES: Final = 12
SEEDS: Final = 3


class StuckDevice(LossyDevice):
    """Its writes, or its syncs, do not end while they are `stuck`."""

    def __init__(self) -> None:
        super().__init__(thread_device())
        self.stuck = ""
        self.asked = trio.Event()

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        await self._wait("write")
        await super().write(fd, offset, data)

    async def sync(self, fd: int) -> None:
        await self._wait("sync")
        await super().sync(fd)

    async def _wait(self, operation: str) -> None:
        if self.stuck == operation:
            self.asked.set()
            await trio.sleep_forever()


class CopyingDevice(WrappedDevice):
    """Keeps the data directory as it was before and after each of its writes: what a kill there would leave."""

    def __init__(self, path: Path, copies: Path) -> None:
        super().__init__(thread_device())
        self.path, self.copies = path, copies
        self.count = 0

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        self._copy()
        await super().write(fd, offset, data)
        self._copy()

    def _copy(self) -> None:
        shutil.copytree(self.path, self.copies / str(self.count), ignore=shutil.ignore_patterns("dram"))
        self.count += 1


def put_durable(store: Store, data: bytes) -> None:
    put(store, TARGET.key, data, bucket=TARGET.bucket)
    store.dram.checksums.wait(WAIT_S)


async def killed_before(path: Path, device: StuckDevice, operation: str) -> None:
    """A life in which a durable object is replaced: killed before the first write of the new one, or its first sync."""
    async with life(path, device) as store:
        store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
        put_durable(store, BEFORE)
        await store.journal.settle()
        device.stuck = operation
        put_durable(store, AFTER)
        await device.asked.wait()
    device.stuck = ""


async def started(path: Path, device: WrappedDevice) -> None:
    """A life that does what a start has queued."""
    try:
        async with life(path, device) as store:
            await store.journal.settle()
    finally:
        with trio.CancelScope(shield=True):
            await device.inner.aclose()


@pytest.mark.seeded
@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("dram", ["dram", "no dram"])
@pytest.mark.parametrize("change", range(1, CHANGES))
async def test_what_was_answered_outlives_a_power_cut_in_the_start(
    fast_path: Path, change: int, dram: str, operation: str
) -> None:
    for seed in range(SEED, SEED + SEEDS):
        path, device = fast_path / str(seed), StuckDevice()
        await killed_before(path, device, operation)
        if dram == "no dram":
            shutil.rmtree(path / "dram")
        device.cut_at(device.changes + change)
        with suppress(PowerLost, ExceptionGroup):
            await started(path, device)
        cut = device.power_cut(seed, "writes")
        shutil.rmtree(path / "dram", ignore_errors=True)
        shutil.rmtree(path / "index")
        found = await look(path)
        assert found in ({TARGET: BEFORE}, {TARGET: AFTER}), f"{cut}: {found.keys()}"


@pytest.mark.parametrize("index", ["index", "no index"])
async def test_a_durable_object_stays_until_its_successor_is_on_the_device(
    fast_path: Path, index: str
) -> None:
    """The start took the successor over from DRAM, which is gone with the next failure."""
    path, copies, stuck = fast_path / "data", fast_path / "copies", StuckDevice()
    await killed_before(path, stuck, "write")
    await stuck.inner.aclose()
    device = CopyingDevice(path, copies)
    await started(path, device)
    seen = set()
    for number in range(device.count):
        if index == "no index":
            shutil.rmtree(copies / str(number) / "index")
        found = await look(copies / str(number))
        assert found in ({TARGET: BEFORE}, {TARGET: AFTER}), (
            f"killed at {number} of {device.count}: {found.keys()}"
        )
        seen.add(found[TARGET])
    assert seen == {BEFORE, AFTER}
