"""A machine that goes down while a store starts after a kill: what the killed one had not synced may be gone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.support.crash_harness import fast_directory
from tests.support.faulty_device import LossyDevice, PowerLost
from tests.support.one_store import DURABLE, abandon, fill, look, start
from tiers.device import ThreadDevice
from tiers.model import Attributes, Name
from tiers.store import TieredStore

TARGET: Final = Name(DURABLE, b"target")
BEFORE, AFTER = b"before" * 1_000, b"after" * 1_000
CHANGES: Final = 12
SEEDS: Final = 3


class StuckDevice(LossyDevice):
    """Its syncs do not end while it is stuck."""

    def __init__(self) -> None:
        super().__init__(ThreadDevice())
        self.is_stuck = False
        self.asked = trio.Event()

    async def sync(self, fd: int) -> None:
        if self.is_stuck:
            self.asked.set()
            await trio.sleep_forever()
        await super().sync(fd)


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvfs-power-", dir=fast_directory()))
    yield path
    shutil.rmtree(path)


def put(store: TieredStore, data: bytes) -> None:
    draft = store.reserve(len(data), uid=0)
    fill(store, draft, data)
    store.seal(draft, TARGET, Attributes())
    store.dram.wait_checksums(30)


async def killed_before_a_sync(path: Path, device: StuckDevice) -> None:
    """Replace a durable object; killed once all of the new one is written, and nothing of it synced."""
    store = await start(path, device)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
            put(store, BEFORE)
            await store.journal.settle()
            device.is_stuck = True
            put(store, AFTER)
            await device.asked.wait()
            nursery.cancel_scope.cancel()
    finally:
        abandon(store)
    device.is_stuck = False


async def started_until_the_cut(path: Path, device: StuckDevice) -> None:
    store = None
    try:
        store = await start(path, device)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            await store.journal.settle()
            nursery.cancel_scope.cancel()
    finally:
        if store is not None:
            abandon(store)
        with trio.CancelScope(shield=True):
            await device.inner.aclose()


@pytest.mark.parametrize("dram", ["dram", "no dram"])
@pytest.mark.parametrize("change", range(1, CHANGES))
async def test_what_was_answered_is_there(base: Path, change: int, dram: str) -> None:
    for seed in range(SEEDS):
        path, device = base / str(seed), StuckDevice()
        await killed_before_a_sync(path, device)
        if dram == "no dram":
            shutil.rmtree(path / "dram")
        device.cut_at(device.changes + change)
        with suppress(PowerLost, ExceptionGroup):
            await started_until_the_cut(path, device)
        cut = device.power_cut(seed, "writes")
        shutil.rmtree(path / "dram", ignore_errors=True)
        shutil.rmtree(path / "index")
        found = await look(path)
        assert found in ({TARGET: BEFORE}, {TARGET: AFTER}), f"{cut}: {found.keys()}"
