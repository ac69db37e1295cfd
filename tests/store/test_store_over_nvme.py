"""The store over both tiers: written behind, demoted, promoted, there again after a restart; a device that fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs.errors import ConfigError, DeviceFailed, NotFound
from kvfs.limits import MIB
from tests.support.crash_load import audit
from tests.support.faulty_device import FailingDevice
from tests.support.nvme_stores import DRAM, data_of, nvme_of, put, put_block, read, running, until_written
from tests.support.stores import NAMESPACE
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import StoreOptions, open_store


async def test_what_leaves_dram_comes_back_from_nvme(tmp_path: Path) -> None:
    sizes = [0, 1, 511, 4096, 70_001, 256 * 1024, MIB + 77, 3 * MIB]
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        names = [Name(b"b", b"dir/%d" % number) for number in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            put(store, name, size, mode=0o640)
        await until_written(store, len(names))
        store.evict(names=names)
        for name, size in zip(names, sizes, strict=True):
            found = store.lookup(name)
            assert isinstance(found, ObjectInfo)
            assert (found.tier, found.extent, found.size_bytes, found.mode) == ("nvme", None, size, 0o640)
        for name, size in zip(names, sizes, strict=True):
            assert await read(store, name) == data_of(name, size)
            found = store.lookup(name)
            assert isinstance(found, ObjectInfo)
            assert found.tier == "dram"


async def test_many_readers_cause_one_promotion(tmp_path: Path) -> None:
    name = Name(b"b", b"one")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, name, MIB)
        await until_written(store, 1)
        store.evict(names=[name])
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(read, store, name)
        assert store.usage()["promotions"] == 1


@pytest.mark.parametrize("lost", ["nothing", "dram", "index", "both"])
async def test_a_restart_has_everything_again(tmp_path: Path, lost: str) -> None:
    digests = [bytes([n]) * 16 for n in range(1, 6)]
    async with running(tmp_path, keep=True) as store:
        store.create_bucket(b"b", uid=3, gid=4, mode=0o711)
        store.create_bucket(b"kv", uid=0, gid=0, namespace=NAMESPACE)
        names = [Name(b"b", b"d/%d" % n) for n in range(20)]
        for name in names:
            put(store, name, 10_000, mode=0o600, uid=7, gid=8)
        store.make_directory(Name(b"b", b"empty/"), Attributes(mode=0o700))
        for parent, digest in zip([None, *digests], digests, strict=False):
            put_block(store, b"kv", digest, parent, 4096)
        await until_written(store, 25)
        store.remove(names[3])
        store.rename(names[4], Name(b"b", b"moved"))
        store.rename(names[5], names[6])
        store.rename(Name(b"b", b"empty/"), Name(b"b", b"bare/"))
        put(store, names[7], 20_000)
        store.set_attributes(names[8], mode=0o444, pinned=True)
        store.remove_block(digests[4])
        await store.journal.settle()
    if lost in ("dram", "both"):
        shutil.rmtree(tmp_path / "dram")
    if lost in ("index", "both"):
        shutil.rmtree(tmp_path / "index")
    async with running(tmp_path) as store:
        assert [bucket.name for bucket in store.buckets()] == [b"b", b"kv"]
        assert (store.bucket(b"b").mode, store.bucket(b"b").uid) == (0o711, 3)
        page = [key for key, _ in store.list(b"b").entries]
        gone = {names[3].key, names[4].key, names[5].key}
        assert page == sorted([*({n.key for n in names} - gone), b"moved", b"bare/"])
        assert await read(store, names[0]) == data_of(names[0], 10_000)
        assert await read(store, Name(b"b", b"moved")) == data_of(names[4], 10_000)
        assert await read(store, names[6]) == data_of(names[5], 10_000)
        assert await read(store, names[7]) == data_of(names[7], 20_000)
        found = store.lookup(names[8])
        assert isinstance(found, ObjectInfo)
        assert (found.mode, found.uid, found.gid, found.pinned) == (0o444, 7, 8, True)
        assert store.match(b"".join(digests)) == 4
        block = await store.load(store.lookup_block(digests[2]), uid=0)
        descriptor = store.open_read(block, uid=0)
        assert os.pread(descriptor, 5000, 0) == digests[2] * 256
        os.close(descriptor)


async def test_what_left_with_its_unit_does_not_come_back_under_a_name_given_away(tmp_path: Path) -> None:
    path, crashed = tmp_path / "data", tmp_path / "crashed"
    names = [Name(b"b", b"%032x/%d" % (7, number)) for number in range(3)]
    async with running(path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        for name in names:
            put(store, name, 50_000)
        await until_written(store, len(names))
        store.evict(names=names)
        await store.journal.settle()
        nvme = nvme_of(store)
        assert isinstance(store.journal, NvmeJournal)
        for object_id in store.journal.evicted(next(iter(nvme.objects.values()))):  # as reclaim does
            nvme.drop(object_id)
        assert not store.list(b"b").entries
        put(store, names[2], 70_000)
        await store.journal.settle_names()
        shutil.copytree(path, crashed)
    shutil.rmtree(crashed / "dram")
    shutil.rmtree(crashed / "index")
    async with running(crashed) as store:
        found = [info.size_bytes for _, info in store.list(b"b").entries if isinstance(info, ObjectInfo)]
        assert found in ([], [70_000])


async def test_a_full_index_gives_up_what_is_oldest(tmp_path: Path) -> None:
    async with running(tmp_path, max_slots=512, nvme_bytes=32 * MIB) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        store.create_bucket(b"kv", uid=0, gid=0, namespace=NAMESPACE)
        most = store.table.max_entries
        name = Name(b"b", b"")
        for number in range(most + 1_000):
            name = Name(b"b", b"%032x/%d" % (number // 2, number % 2))
            put(store, name, 100)
            if number % 100 == 0:  # before DRAM runs short of slots
                await until_written(store, len(store.table))
        put_block(store, b"kv", b"\1" * 16, None, 512)
        assert await read(store, name) == data_of(name, 100)
        units = {key.partition(b"/")[0] for key, _ in store.list(b"b", delimiter=b"/").entries}
        assert b"%032x" % 0 not in units
        assert not audit(store)
        with pytest.raises(NotFound):
            store.lookup(Name(b"b", b"%032x/0" % 0))


async def test_ghost_admission_writes_what_was_wanted_before(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0, admits_all=False)
        first, read_once = Name(b"b", b"first"), Name(b"b", b"read")
        put(store, first, 5_000)
        put(store, read_once, 5_000)
        await read(store, read_once)
        await until_written(store, 1)
        store.evict(names=[first])
        with pytest.raises(NotFound):
            store.lookup(first)
        put(store, first, 5_000)
        await until_written(store, 2)


async def test_a_start_without_the_tier_that_has_objects_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, Name(b"b", b"x"), 5_000)
    with pytest.raises(ConfigError, match="has an NVMe tier in"):
        open_store(StoreOptions(tmp_path, dram_bytes=DRAM, backing="directory"))
    async with running(tmp_path) as store:
        assert await read(store, Name(b"b", b"x")) == data_of(Name(b"b", b"x"), 5_000)


async def test_what_waits_for_a_failing_device_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs no record goes on; after the device has healed everything does, and what was refused is undone."""
    most, written, device = 64, Name(b"b", b"written"), FailingDevice(thread_device())
    monkeypatch.setattr(limits, "MAX_LOG_QUEUE", most)
    monkeypatch.setattr(limits, "DEVICE_RETRY_S", 0.01)
    async with running(tmp_path, device=device) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        store.create_bucket(b"durable", uid=0, gid=0, durable=True)
        put(store, written, 1000)
        await until_written(store, 1)
        device.fail("write", DeviceFailed, times=None)
        accepted = 0
        while nvme_of(store).log.backlog < most:
            accepted += 1
            store.set_attributes(written, mode=accepted)
        for change in (
            lambda: store.set_attributes(written, mode=0o777),
            lambda: store.rename(written, Name(b"b", b"other")),
            lambda: store.make_directory(Name(b"b", b"d/"), Attributes()),
            lambda: store.create_bucket(b"another", uid=0, gid=0),
            lambda: store.set_bucket(b"b", mode=0),
            lambda: put(store, Name(b"durable", b"k"), 10),
        ):
            with pytest.raises(DeviceFailed, match=f"limit {most}"):
                change()
        for number in range(2 * most):
            put(store, Name(b"b", b"new"), number)
        store.remove(Name(b"b", b"new"))
        assert nvme_of(store).log.backlog <= most + 2
        device.heal()
        await nvme_of(store).log.settle()
        put(store, Name(b"durable", b"k"), 10)
        await store.journal.settle()
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "dram", ignore_errors=True)
    async with running(tmp_path) as store:
        found = store.lookup(written)
        assert isinstance(found, ObjectInfo)
        assert found.mode == accepted
        assert [key for key, _ in store.list(b"b").entries] == [written.key]
        assert await read(store, Name(b"durable", b"k")) == data_of(Name(b"durable", b"k"), 10)
