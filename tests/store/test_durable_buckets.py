"""Durable buckets of a store over both tiers: synced, promised room, refused in time, and there whatever is written."""

from __future__ import annotations

import errno
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trio

from kvfs.errors import Corrupt, DeviceFailed, DeviceMissing, KvfsError, NoSpace
from kvfs.limits import MIB
from mounts.kernel.errnos import errno_of
from tests.support.faulty_device import FailingDevice
from tests.support.nvme_stores import DRAM, data_of, fill, nvme_of, put, read, running, until_written
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.log.writer import TierFull
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store


async def fill_up(store: Store, bucket: bytes) -> AsyncIterator[Name]:
    """Durable objects until the tier takes no more."""
    for number in range(100):
        name = Name(bucket, b"%d" % number)
        try:
            put(store, name, 300_000)
        except NoSpace:
            return
        await store.journal.settle()
        yield name


async def test_changes_of_a_cache_wait_for_no_sync_and_durable_ones_share_theirs(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        names = {}
        for bucket in (b"c", b"d"):
            store.create_bucket(bucket, uid=0, gid=0, durable=bucket == b"d")
            names[bucket] = [Name(bucket, b"%d" % number) for number in range(20)]
            for name in names[bucket]:
                put(store, name, 5_000)
        await until_written(store, 40)
        await store.journal.settle_names()
        log = nvme_of(store).log
        syncs = log.counts.syncs
        for name in names[b"c"]:
            store.rename(name, Name(b"c", b"new-" + name.key))
            store.remove(Name(b"c", b"new-" + name.key))
        await store.journal.settle()
        assert log.counts.syncs == syncs

        async def change(name: Name) -> None:
            before = store.journal.awaited_ticket
            if name.key.startswith(b"1"):
                store.remove(name)
            else:
                store.rename(name, Name(b"d", b"new-" + name.key))
            await store.journal.settle(before)

        await change(names[b"d"][0])
        assert log.counts.syncs == syncs + 1
        async with trio.open_nursery() as nursery:
            for name in names[b"d"][2:10]:
                nursery.start_soon(change, name)
        assert log.counts.syncs <= syncs + 3
        async with trio.open_nursery() as nursery:
            for name in names[b"d"][10:]:
                nursery.start_soon(change, name)
        assert log.counts.syncs <= syncs + 5


async def test_durable_objects_stay_whatever_is_written(tmp_path: Path) -> None:
    async with running(tmp_path, nvme_bytes=16 * MIB) as store:
        store.create_bucket(b"d", uid=0, gid=0, durable=True)
        store.create_bucket(b"c", uid=0, gid=0)
        kept = [name async for name in fill_up(store, b"d")]
        assert 10 < len(kept) < 100
        for number in range(200):
            put(store, Name(b"c", b"%d" % number), 200_000)
            await trio.lowlevel.checkpoint()
            store.maintain()
        for name in kept:
            assert await read(store, name) == data_of(name, 300_000)
    shutil.rmtree(tmp_path / "index")
    async with running(tmp_path, nvme_bytes=16 * MIB) as store:
        for name in kept:
            assert await read(store, name) == data_of(name, 300_000)


async def test_a_durable_bucket_needs_the_tier(tmp_path: Path) -> None:
    with (
        open_store(StoreOptions(tmp_path, dram_bytes=DRAM, backing="directory")) as store,
        pytest.raises(DeviceMissing, match="needs the NVMe tier"),
    ):
        store.create_bucket(b"d", uid=0, gid=0, durable=True)


@pytest.mark.parametrize("lost", ["nothing", "dram", "index", "both"])
async def test_what_was_made_durable_of_a_draft_counts_before_what_it_replaces(
    tmp_path: Path, lost: str
) -> None:
    """Also where that was written behind only afterwards: its records are the later ones."""
    name = Name(b"b", b"x")
    async with running(tmp_path, keep=True) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        sealed = put(store, name, 5_000)
        journal.detached(sealed.key)  # its turn to be written has not come
        draft = store.reserve(100, uid=0)
        fill(store, draft, b"draft" * 20)
        snapshot = store.put_snapshot(draft, name, Attributes())
        assert snapshot is not None
        await store.settle_snapshot(snapshot, None)
        await journal.persist(sealed.object_id)
        store.abort(draft)
    if lost in ("dram", "both"):
        shutil.rmtree(tmp_path / "dram")
    if lost in ("index", "both"):
        shutil.rmtree(tmp_path / "index")
    for _ in range(2):
        async with running(tmp_path, keep=True) as store:
            assert await read(store, name) == b"draft" * 20
            store.evict(names=[name])
            assert await read(store, name) == b"draft" * 20
            assert store.object_count == 1


@pytest.mark.parametrize("error", [DeviceFailed, Corrupt])
@pytest.mark.parametrize("what", ["a draft", "a file"])
async def test_a_failed_read_of_what_is_to_be_durable_is_no_lack_of_room(
    tmp_path: Path, what: str, error: type[KvfsError]
) -> None:
    """fsync(2) says EREMOTEIO; who reads ENOSPC makes room, for nothing."""
    device, name = FailingDevice(thread_device()), Name(b"b", b"x")
    async with running(tmp_path, device=device) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        device.fail("read", error, when=lambda call: call.path is None, times=None)  # of a slot
        if what == "a draft":
            draft = store.reserve(100, uid=0)
            fill(store, draft, b"draft" * 20)
            snapshot = store.put_snapshot(draft, name, Attributes())
            assert snapshot is not None
            settle = partial(store.settle_snapshot, snapshot, None)
        else:
            settle = partial(journal.persist, put(store, name, 5_000).object_id)
        with pytest.raises(DeviceFailed) as caught, trio.fail_after(WAIT_S):
            await settle()
        assert device.raised
        assert errno_of(caught.value, "fsync") in (errno.EIO, errno.EREMOTEIO)
        device.heal()


async def test_room_for_durable_objects_is_promised_when_they_are_queued(tmp_path: Path) -> None:
    """What one writer was told is his, the next is not told is free, though nothing is written yet."""
    size = 700_000
    async with running(tmp_path, dram_bytes=4 * DRAM, nvme_bytes=16 * MIB) as store:
        store.create_bucket(b"c", uid=0, gid=0)
        store.create_bucket(b"d", uid=0, gid=0, durable=True)
        kept = [Name(b"d", b"%d" % number) for number in range(40)]
        refused = None
        for number, name in enumerate(kept):
            try:
                put(store, name, size)
            except NoSpace:
                refused = number
                break
        assert refused is not None
        with trio.fail_after(WAIT_S):
            await store.journal.settle()
        assert nvme_of(store).log.trouble is None
        assert nvme_of(store).promised_bytes == 0
        for name in kept[:refused]:
            assert nvme_of(store).holds(row_id(store, name))

        source, directory = Name(b"c", b"dir/x"), Name(b"c", b"dir/")
        put(store, source, size)
        with pytest.raises(NoSpace):
            store.rename(source, Name(b"d", b"x"))
        with pytest.raises(NoSpace):
            store.rename(directory, Name(b"d", b"dir/"))
        assert await read(store, source) == data_of(source, size)
        store.rename(kept[0], Name(b"d", b"moved"))


def row_id(store: Store, name: Name) -> int:
    found = store.lookup(name)
    assert isinstance(found, ObjectInfo)
    return found.object_id


async def test_what_is_renamed_into_a_durable_bucket_while_it_is_queued_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as store:
        store.create_bucket(b"cache", uid=0, gid=0)
        store.create_bucket(b"durable", uid=0, gid=0, durable=True)
        await store.journal.settle()
        nvme, journal = nvme_of(store), store.journal
        assert isinstance(journal, NvmeJournal)

        async def full() -> None:
            raise TierFull("full")

        with monkeypatch.context() as patch:
            patch.setattr(nvme.log, "_write_batch", full)
            name = Name(b"durable", b"a")
            info = put(store, Name(b"cache", b"a"), 5_000)
            await journal._write_one(info.key.digest)
            assert nvme.promised_bytes == 0
            store.rename(Name(b"cache", b"a"), name)
            assert nvme.promised_bytes == nvme.record_bytes(5_000)
            with pytest.raises(NoSpace):
                await journal.settle()
            assert info.object_id in nvme.objects
        with trio.fail_after(WAIT_S):
            await journal.settle()
        assert nvme.holds(info.object_id)
        assert nvme.promised_bytes == 0
