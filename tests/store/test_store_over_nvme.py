"""The store over both tiers: written behind, demoted, promoted, durable, and there again after a restart."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import (
    ConfigError,
    Corrupt,
    DeviceFailed,
    DeviceMissing,
    KvfsError,
    NoSpace,
    NotFound,
    WrongChecksum,
)
from kvfs.formats import RECORD_MAGIC, RecordType
from kvfs.limits import MIB
from mounts.kernel.errnos import errno_of
from tests.support.crash_load import audit
from tests.support.faulty_device import FailingDevice
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S
from tiers.cold.bucket import ColdOptions
from tiers.device.device import Device
from tiers.device.threads import thread_device
from tiers.dram.tier import DramTier
from tiers.log.writer import TierFull
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.model.tier import Extent
from tiers.nvme.tier import NvmeTier
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, open_store, start_store
from tiers.store.store import Store

DRAM = 16 * MIB


@asynccontextmanager
async def running(
    path: Path,
    *,
    dram_bytes: int = DRAM,
    max_slots: int = limits.DEFAULT_SLOTS,
    nvme_bytes: int = 64 * MIB,
    keep: bool = False,
    cold: ColdOptions | None = None,
    device: Device | None = None,
) -> AsyncIterator[Store]:
    device = device or thread_device()
    store = await start_store(
        StoreOptions(
            path,
            dram_bytes=dram_bytes,
            max_slots=max_slots,
            backing="directory",
            cold=cold,
            nvme=NvmeOptions(device, nvme_bytes, segment_bytes=MIB),
        )
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            yield store
            nursery.cancel_scope.cancel()
        await store.finish()
    finally:
        store.close(keep=keep)
        with trio.CancelScope(shield=True):
            await device.aclose()


def data_of(name: Name, size: int) -> bytes:
    return random.Random(str(name)).randbytes(size)


def put(store: Store, name: Name, size: int, **attributes: int) -> ObjectInfo:
    draft = store.reserve(size, uid=0)
    fill(store, draft, data_of(name, size))
    return store.seal(draft, name, Attributes(**attributes))  # type: ignore[arg-type]


def fill(store: Store, draft: object, data: bytes) -> None:
    descriptor = store.open_draft(draft)  # type: ignore[arg-type]
    os.pwrite(descriptor, data, 0)
    os.close(descriptor)


def put_block(store: Store, bucket: bytes, digest: bytes, parent: bytes | None, size: int) -> ObjectInfo:
    draft = store.reserve(size, uid=0)
    fill(store, draft, digest * (size // 16))
    return store.seal_block(draft, bucket, digest, parent=parent, uid=0)


async def read(store: Store, name: Name) -> bytes:
    info = store.lookup(name)
    assert isinstance(info, ObjectInfo)
    if info.target:
        return info.target
    info = await store.load(info, uid=0)
    descriptor = store.open_read(info, uid=0)
    try:
        return os.pread(descriptor, info.size_bytes + 1, 0)
    finally:
        os.close(descriptor)


def nvme_of(store: Store) -> NvmeTier:
    assert isinstance(store.journal, NvmeJournal)
    return store.journal.nvme


async def until_written(store: Store, count: int) -> None:
    """Until so many objects have a copy on NVMe."""
    with trio.fail_after(WAIT_S):
        while sum(entry.tiers >> 2 & 1 for _, entry in store.table.items()) < count:
            await nvme_of(store).log.queue.wait_popped()


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


async def test_damaged_bytes_are_a_miss(tmp_path: Path) -> None:
    name = Name(b"b", b"x")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, name, 300_000)
        await until_written(store, 1)
        store.evict(names=[name])
        for segment in (tmp_path / "nvme").glob("*.seg"):
            data = bytearray(segment.read_bytes())
            at = data.find(data_of(name, 300_000)[:64])
            if at >= 0:
                with segment.open("r+b") as file:
                    file.seek(at + 1000)
                    file.write(bytes([data[at + 1000] ^ 1]))
        found = store.lookup(name)
        assert isinstance(found, ObjectInfo)
        with pytest.raises(NotFound):
            await store.load(found, uid=0)
        with pytest.raises(NotFound):
            store.lookup(name)
        assert store.usage()["tiers"][1]["corrupt"] == 1


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


def flip(directory: Path, content: bytes) -> None:
    """Change one byte of `content` wherever a segment holds it."""
    for segment in directory.glob("*.seg"):
        data = segment.read_bytes()
        at = data.find(content[:64])
        if at >= 0:
            with segment.open("r+b") as file:
                file.seek(at + 40)
                file.write(bytes([data[at + 40] ^ 1]))


async def test_a_damaged_copy_is_written_again_from_dram_and_outlives_it(tmp_path: Path) -> None:
    name = Name(b"b", b"x")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        info = put(store, name, 50_000)
        await until_written(store, 1)
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        flip(tmp_path / "nvme", data_of(name, 50_000))
        with pytest.raises(Corrupt):
            await journal.reader.read(journal.nvme.objects[info.object_id], 0, memoryview(bytearray(50_000)))
        await until_written(store, 1)
    shutil.rmtree(tmp_path / "index")
    async with running(tmp_path) as store:
        assert await read(store, name) == data_of(name, 50_000)


async def test_a_start_without_the_tier_that_has_objects_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, Name(b"b", b"x"), 5_000)
    with pytest.raises(ConfigError, match="has an NVMe tier in"):
        open_store(StoreOptions(tmp_path, dram_bytes=DRAM, backing="directory"))
    async with running(tmp_path) as store:
        assert await read(store, Name(b"b", b"x")) == data_of(Name(b"b", b"x"), 5_000)


async def test_a_damaged_record_of_a_bucket_costs_nothing_while_the_index_knows_it(tmp_path: Path) -> None:
    name = Name(b"b", b"x")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0, durable=True)
        put(store, name, 5_000)
        await store.journal.settle()
    for segment in (tmp_path / "nvme").glob("*.seg"):
        data = segment.read_bytes()
        for match in re.finditer(re.escape(RECORD_MAGIC + b"\1\0" + bytes([RecordType.BUCKET])), data):
            with segment.open("r+b") as file:
                file.seek(match.start() + 200)
                file.write(b"\xff")
        with segment.open("r+b") as file:  # the footer's copy, too
            file.seek(-4096, os.SEEK_END)
            file.write(bytes(4096))
    async with running(tmp_path) as store:
        assert await read(store, name) == data_of(name, 5_000)
    shutil.rmtree(tmp_path / "index")
    async with running(tmp_path) as store:  # the start before has logged the bucket again
        assert await read(store, name) == data_of(name, 5_000)


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


# --- bytes that are not those of their checksum -------------------------------------------------------------
async def test_a_durable_seal_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    """And what had the name keeps it; the draft may be sealed with the right one."""
    name, digest = Name(b"b", b"k"), b"\x01" * 16
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0, durable=True)
        store.create_bucket(b"kv", uid=0, gid=0, namespace=NAMESPACE, durable=True)
        put(store, name, 1000)
        draft = store.reserve(5, uid=0)
        fill(store, draft, b"newer")
        with pytest.raises(WrongChecksum):
            store.seal(draft, name, Attributes(), checksum=1)
        with pytest.raises(WrongChecksum):
            store.seal_block(draft, b"kv", digest, parent=None, uid=0, checksum=1)
        assert await read(store, name) == data_of(name, 1000)
        assert store.match(digest) == 0
        store.seal(draft, name, Attributes(), checksum=xxh3_64(b"newer"))
        await store.journal.settle()
        assert await read(store, name) == b"newer"


@pytest.mark.parametrize("size", [5000, 3 * MIB], ids=["one extent", "several extents"])
async def test_a_cached_object_with_a_wrong_checksum_goes_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    wrong, right = Name(b"b", b"wrong"), Name(b"b", b"right")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        draft = store.reserve(size, uid=0)
        fill(store, draft, data_of(wrong, size))
        store.seal(draft, wrong, Attributes(), checksum=1)
        put(store, right, size)
        await until_written(store, 1)
        await store.journal.settle()
        with pytest.raises(NotFound):
            store.lookup(wrong)
        assert await read(store, right) == data_of(right, size)
        assert store.usage()["objects"] == 1
    assert len(caplog.records) == 1


async def test_an_object_that_is_hashed_before_it_is_written_waits_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, hashed = trio.Event(), trio.Event(), DramTier.hash

    async def late(tier: DramTier, extent: Extent) -> int:
        begun.set()
        await go_on.wait()
        return await hashed(tier, extent)

    monkeypatch.setattr(DramTier, "hash", late)
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, Name(b"b", b"large"), 3 * MIB)
        with trio.fail_after(WAIT_S):
            await begun.wait()
        assert store.journal.usage()[0]["write_behind"] == 1
        go_on.set()
        await until_written(store, 1)
        assert store.journal.usage()[0]["write_behind"] == 0


async def test_a_durable_object_whose_bytes_change_before_they_are_written_is_told(tmp_path: Path) -> None:
    name = Name(b"b", b"k")
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0, durable=True)
        draft = store.reserve(1000, uid=0)
        fill(store, draft, data_of(name, 1000))
        info = store.seal(draft, name, Attributes(), checksum=xxh3_64(data_of(name, 1000)))
        assert info.extent is not None
        slots = [
            path for path in (tmp_path / "dram").rglob("*") if path.is_file() and path.stat().st_size == 1000
        ]
        slots[0].write_bytes(bytes(1000))
        await store.journal.settle()
        assert store.journal.durable_losses == 1
        with pytest.raises(NotFound):
            store.lookup(name)


# --- a device that refuses writes for long ------------------------------------------------------------------
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
