"""The scrub: finds what lies damaged, repairs it where it can, and takes no more than its share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvfs import limits
from kvfs.errors import Corrupt, NotFound
from kvfs.limits import KIB, MIB
from tests.support import stores
from tests.support.block_batches import Block, open_blocks
from tests.support.door import need_mount
from tests.support.nvme_stores import data_of, flip, put, put_block, read, running, until_written
from tests.support.service import Service
from tests.support.small_store import checksums
from tests.support.stores import NAMESPACE, small_store
from tests.support.waits import WAIT_S, eventually, until
from tiers.fsck.scrub import Scrub
from tiers.model.objects import Name, ObjectInfo
from tiers.nvme.write_behind import NvmeJournal
from tiers.store.store import Store


async def one_pass(store: Store, rate_bytes_s: int = MIB << 10) -> Scrub:
    scrub = Scrub(store, rate_bytes_s)
    await scrub._pass()
    return scrub


async def test_a_pass_verifies_everything_and_nothing_is_wrong(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        store.create_bucket(b"kv", uid=0, gid=0, namespace=NAMESPACE)
        sizes = [0, 1, 5_000, 300_000, MIB + 7]
        for number, size in enumerate(sizes):
            put(store, Name(b"b", b"%d" % number), size)
        put_block(store, b"kv", b"\1" * 16, None, 4096)
        await until_written(store, len(sizes) + 1)
        store.dram.checksums.wait(WAIT_S)
        before = store.usage()
        scrub = await one_pass(store)
        assert scrub.status()["verified_bytes"] == 2 * (sum(sizes) + 4096)
        assert (scrub.status()["damaged_extents"], scrub.status()["damaged_slots"]) == (0, 0)
        assert store.usage() == before, "upkeep is no use"


async def test_a_damaged_extent_is_written_again_from_dram(tmp_path: Path) -> None:
    name = Name(b"b", b"x")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, name, 50_000)
        await until_written(store, 1)
        flip(tmp_path / "nvme", data_of(name, 50_000))
        scrub = await one_pass(store)
        assert scrub.status()["damaged_extents"] == 1
        await until_written(store, 1)
        assert (await one_pass(store)).status()["damaged_extents"] == 0
    shutil.rmtree(tmp_path / "index")
    async with running(tmp_path) as store:
        assert await read(store, name) == data_of(name, 50_000)


async def test_the_only_copy_of_a_durable_object_stays_in_dram(tmp_path: Path) -> None:
    name = Name(b"b", b"x")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0, durable=True)
        info = put(store, name, 50_000)
        await store.journal.settle()
        flip(tmp_path / "nvme", data_of(name, 50_000))
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        stored = journal.nvme.objects[info.object_id]
        async with journal.nvme.device.buffer() as view:
            with pytest.raises(Corrupt):
                await journal.reader.verify_extent(stored, 0, view)
        assert journal.is_needed(info.object_id)
        await journal.settle()
        assert not journal.is_needed(info.object_id)
        assert (await one_pass(store)).status()["damaged_extents"] == 0


async def test_a_damaged_extent_that_is_nowhere_else_is_a_miss(tmp_path: Path) -> None:
    name = Name(b"b", b"x")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, name, 50_000)
        put(store, Name(b"b", b"y"), 50_000)
        await until_written(store, 2)
        store.evict(names=[name])
        flip(tmp_path / "nvme", data_of(name, 50_000))
        await one_pass(store)
        with pytest.raises(NotFound):
            store.lookup(name)
        assert await read(store, Name(b"b", b"y")) == data_of(Name(b"b", b"y"), 50_000)


def flip_slot(store: Store, info: ObjectInfo) -> None:
    assert info.extent is not None
    path = store.dram.directory / f"{info.extent.slot:08x}"
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))


async def put_damaged(store: Store, name: Name) -> None:
    """An object on NVMe, whose slot in DRAM is damaged."""
    store.create_bucket(name.bucket, uid=0, gid=0)
    info = put(store, name, 50_000)
    await until_written(store, 1)
    store.dram.checksums.wait(WAIT_S)
    flip_slot(store, info)


async def test_a_damaged_slot_is_read_from_nvme_instead(tmp_path: Path) -> None:
    name = Name(b"b", b"x")
    async with running(tmp_path) as store:
        await put_damaged(store, name)
        scrub = await one_pass(store)
        assert scrub.status()["damaged_slots"] == 1
        found = store.lookup(name)
        assert isinstance(found, ObjectInfo)
        assert found.tier == "nvme"
        assert await read(store, name) == data_of(name, 50_000)


async def test_dram_is_read_before_nvme(tmp_path: Path) -> None:
    """At a byte a second, only the first that is read is read today."""
    name = Name(b"b", b"x")
    async with running(tmp_path) as store:
        await put_damaged(store, name)
        flip(tmp_path / "nvme", data_of(name, 50_000))
        scrub = Scrub(store, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scrub.run)
            await until(lambda: scrub.status()["verified_bytes"] > 0)
            nursery.cancel_scope.cancel()
        status = scrub.status()
        assert (status["damaged_slots"], status["damaged_extents"]) == (1, 0)


@pytest.mark.mount
def test_a_service_as_it_is_reads_dram_alone() -> None:
    need_mount()
    with Service(mode="off", nvme="0") as service:
        with service.client() as client:
            open_blocks(client, NAMESPACE).put([Block(b"\1" * 16, bytes(50_000))])
        eventually(lambda: all(checksums(service)), "every slot has its checksum")
        service.stop()
        service.restart()
        with service.client() as client:
            eventually(lambda: client.status()["scrub"]["passes"] == 1, "the first pass ends")
            scrub = client.status()["scrub"]
            assert scrub["rate_bytes_s"] == limits.DEFAULT_SCRUB_BYTES_S
            assert scrub["verified_bytes"] == 50_000


async def test_a_damaged_slot_without_another_copy_is_a_miss(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        info = stores.put(store, b"x", bytes(10_000))
        other = stores.put(store, b"y", bytes(10_000))
        store.dram.checksums.wait(WAIT_S)
        flip_slot(store, info)
        await one_pass(store)
        with pytest.raises(NotFound):
            store.lookup(Name(stores.BUCKET, b"x"))
        assert stores.read(store, other) == bytes(10_000)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps when all tasks are blocked does not see that a thread works for one of them."""

    async def run(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", run)


async def test_the_rate_is_kept_and_a_pass_an_hour(
    tmp_path: Path, autojump_clock: MockClock, no_threads: None
) -> None:
    """On a clock that jumps: 40 slots of 64 KiB at 256 KiB a second are 10 s less the last one's, of 3,600."""
    with small_store(tmp_path) as store:
        for number in range(40):
            stores.put(store, b"%d" % number, bytes(64 * KIB))
        store.dram.checksums.wait(WAIT_S)
        scrub = Scrub(store, 256 * KIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scrub.run)
            began = trio.current_time()
            await trio.sleep(5.1)
            status = scrub.status()
            assert (status["passes"], status["verified_bytes"]) == (0, 21 * 64 * KIB)
            assert status["progress"] == pytest.approx(21 / 40, abs=0.01)
            await trio.sleep_until(began + limits.SCRUB_INTERVAL_S - 1)
            assert (scrub.status()["passes"], scrub.status()["last_pass_s"]) == (1, pytest.approx(9.75))
            await trio.sleep_until(began + limits.SCRUB_INTERVAL_S + 1)
            assert scrub.status()["verified_bytes"] > 40 * 64 * KIB
            nursery.cancel_scope.cancel()


async def test_a_rate_of_nothing_reads_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    with small_store(tmp_path) as store:
        stores.put(store, b"x", bytes(10_000))
        scrub = Scrub(store, 0)
        with trio.move_on_after(100_000):
            await scrub.run()
        assert scrub.status()["verified_bytes"] == 0


async def test_what_goes_meanwhile_is_no_damage(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        names = [Name(b"b", b"%d" % number) for number in range(20)]
        for name in names:
            put(store, name, 20_000)
        await until_written(store, 20)
        store.dram.checksums.wait(WAIT_S)
        scrub = Scrub(store, MIB << 10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scrub._pass)
            for name in names:
                store.remove(name)
                await trio.lowlevel.checkpoint()
        status = scrub.status()
        assert (status["damaged_extents"], status["damaged_slots"], status["unreadable"]) == (0, 0, 0)
