"""The cold tier over a bucket that is a directory: up, down, out, and there again after a restart."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs._native.shared.table import TIER_COLD, TIER_DRAM, TIER_NVME
from kvfs.errors import CrossDevice, NotFound
from kvfs.limits import MIB
from tests.support.cold import FolderBucket, options
from tests.support.stores import NAMESPACE, draft_of, put_block, read
from tests.support.stores import put as put_name
from tests.support.waits import WAIT_S, until
from tiers.cold.bucket import ColdOptions
from tiers.cold.tier import ColdTier
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, open_store, start_store
from tiers.store.store import Store

DRAM = 16 * MIB
NAME = Name(b"b", b"a")


@asynccontextmanager
async def running(
    path: Path, cold: ColdOptions, *, nvme: bool = False, keep: bool = False, up: bool = True
) -> AsyncIterator[Store]:
    """A store with a cold tier, and the buckets `b` and `bound`. `up`: once the endpoint was looked at."""
    device = thread_device() if nvme else None
    if device is None:
        store = open_store(StoreOptions(path, dram_bytes=DRAM, backing="directory", cold=cold))
    else:
        store = await start_store(
            StoreOptions(
                path,
                dram_bytes=DRAM,
                backing="directory",
                cold=cold,
                nvme=NvmeOptions(device, 64 * MIB, segment_bytes=MIB),
            )
        )
    for name in (b"b", b"bound"):
        if store.names.get_bucket(name) is None:
            store.create_bucket(name, uid=0, gid=0, namespace=NAMESPACE if name == b"bound" else None)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            if up:
                await until(lambda: tier_of(store).is_up and tier_of(store).index.is_complete)
            yield store
            nursery.cancel_scope.cancel()
        await store.finish()
    finally:
        store.close(keep=keep)
        if device is not None:
            with trio.CancelScope(shield=True):
                await device.aclose()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COLD_BACKOFF_S", 0.01)
    monkeypatch.setattr(limits, "MAX_COLD_BACKOFF_S", 0.05)
    monkeypatch.setattr(limits, "COLD_CHECK_S", 0.05)
    monkeypatch.setattr(limits, "WRITE_BEHIND_POLL_S", 0.001)


@pytest.fixture
def bucket(fast_path: Path) -> FolderBucket:
    return FolderBucket(fast_path / "bucket")


def tier_of(store: Store) -> ColdTier:
    assert isinstance(store.cold, ColdTier)
    return store.cold


async def uploaded(store: Store, count: int) -> None:
    await until(lambda: tier_of(store).counts.uploads >= count)


def bits(store: Store, info: ObjectInfo) -> int:
    entry = store.table.get(info.key.digest)
    return 0 if entry is None else entry.tiers


async def read_back(store: Store, name: Name) -> bytes:
    info = store.lookup(name)
    assert isinstance(info, ObjectInfo)
    return read(store, await store.load(info, uid=0))


def audit(store: Store, bucket: FolderBucket) -> None:
    """Table, rows, order and bucket say the same, once nothing is on its way."""
    tier = tier_of(store)
    assert (tier.writing, list(tier.deleting), tier.deleting_bytes) == ({}, [], 0)
    rows = {name for name, row in tier.index.rows() if row is not None}
    marked = {
        str(store.cold_name(digest)) for digest, entry in store.table.items() if entry.tiers & TIER_COLD
    }
    assert rows == marked == set(bucket.objects())
    assert tier.used_bytes == sum((bucket._file(name)).stat().st_size for name in rows)
    assert len(rows) == tier.usage()[0]["objects"]


async def test_what_left_dram_comes_back_from_the_bucket(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        data = os.urandom(MIB + 7)
        info = put_name(store, NAME.key, data)
        block = put_block(store, b"\1" * 16, b"block" * 100)
        empty = put_name(store, b"empty", b"")
        await uploaded(store, 3)
        assert bits(store, info) == bits(store, block) == TIER_DRAM | TIER_COLD
        store.evict(DRAM)
        found = store.lookup(NAME)
        assert isinstance(found, ObjectInfo)
        assert (found.tier, found.extent, bits(store, info)) == ("cold", None, TIER_COLD)
        assert await read_back(store, NAME) == data
        assert await read_back(store, Name(b"b", b"empty")) == b""
        assert read(store, await store.load(store.lookup_block(b"\1" * 16), uid=0)) == b"block" * 100
        assert bits(store, info) == TIER_DRAM | TIER_COLD
        assert store.usage()["promotions"] == 3
        assert bits(store, empty) == TIER_DRAM | TIER_COLD
        await until(lambda: not tier_of(store).deleting)
        audit(store, bucket)


async def test_only_what_was_read_goes_up(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket, admits_all=False)) as store:
        first, second = put_name(store, b"first", b"1"), put_name(store, b"second", b"2")
        assert read(store, second) == b"2"
        await uploaded(store, 1)
        assert (bits(store, first), bits(store, second)) == (TIER_DRAM, TIER_DRAM | TIER_COLD)


async def test_durable_objects_stay_here(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket), nvme=True) as store:
        store.create_bucket(b"dur", uid=0, gid=0, durable=True)
        kept = put_name(store, b"kept", b"1", bucket=b"dur")
        assert read(store, kept) == b"1"
        other = put_name(store, b"a", b"2")
        await uploaded(store, 1)
        assert not bits(store, kept) & TIER_COLD
        assert bits(store, other) & TIER_COLD
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        await until(lambda: bits(store, other) == TIER_DRAM | TIER_NVME | TIER_COLD)
        store.evict(names=[NAME])
        journal.nvme.evict(journal.nvme.objects[other.object_id], 0)
        assert bits(store, other) == TIER_COLD
        with pytest.raises(CrossDevice, match="cold"):
            store.rename(NAME, Name(b"dur", b"a"))
        store.rename(NAME, Name(b"b", b"else"))
        assert await read_back(store, Name(b"b", b"else")) == b"2"
        assert bits(store, other) == TIER_DRAM | TIER_COLD
        assert await read_back(store, Name(b"b", b"else")) == b"2"
        await until(lambda: bits(store, other) == TIER_DRAM | TIER_NVME | TIER_COLD)


async def test_an_object_that_nvme_lets_go_is_still_there(fast_path: Path, bucket: FolderBucket) -> None:
    written = {}
    async with running(fast_path / "data", options(bucket), nvme=True) as store:
        for number in range(120):
            name = Name(b"b", b"%d" % number)
            written[name] = os.urandom(MIB - number)
            put_name(store, name.key, written[name])
            await uploaded(store, number + 1)
            await until(lambda: not store.journal.usage()[0]["backlog"])
        tiers = [info.tier for info in map(store.lookup, written) if isinstance(info, ObjectInfo)]
        assert {"dram", "nvme", "cold"} == set(tiers), "120 MiB do not fit into 16 and 64"
        for name, data in written.items():
            assert await read_back(store, name) == data
    async with running(fast_path / "data", options(bucket), nvme=True) as store:
        assert store.usage()["objects"] == 120
        for name, data in written.items():
            assert await read_back(store, name) == data


@pytest.mark.parametrize("nvme", [False, True])
async def test_a_restart_finds_what_the_bucket_has(fast_path: Path, bucket: FolderBucket, nvme: bool) -> None:
    async with running(fast_path / "data", options(bucket), nvme=nvme) as store:
        put_name(store, NAME.key, b"named")
        store.set_attributes(NAME, mode=0o640)
        put_block(store, b"\1" * 16, b"block")
        put_block(store, b"\2" * 16, b"child", parent=b"\1" * 16)
        await uploaded(store, 3)
        store.rename(NAME, Name(b"b", b"moved"))
        if not nvme:
            store.evict(DRAM)
    async with running(fast_path / "data", options(bucket), nvme=nvme, up=False) as store:
        assert store.match(b"\1" * 16 + b"\2" * 16) == (2 if nvme else 0), "nobody looked at the endpoint yet"
        await until(lambda: tier_of(store).is_up)
        assert store.match(b"\1" * 16 + b"\2" * 16) == 2
        info = store.lookup(Name(b"b", b"moved"))
        assert isinstance(info, ObjectInfo)
        assert info.mode == 0o640
        assert await read_back(store, Name(b"b", b"moved")) == b"named"
        assert read(store, await store.load(store.lookup_block(b"\2" * 16), uid=0)) == b"child"
        audit(store, bucket)


async def test_removed_and_replaced_objects_leave_the_bucket(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        put_name(store, NAME.key, b"first")
        put_name(store, b"other", b"other")
        put_block(store, b"\1" * 16, b"block")
        await uploaded(store, 3)
        put_name(store, NAME.key, b"second")
        store.remove(Name(b"b", b"other"))
        store.remove_block(b"\1" * 16)
        await uploaded(store, 4)
        await until(lambda: not tier_of(store).deleting)
        assert len(bucket.objects()) == 1
        store.evict(DRAM)
        assert await read_back(store, NAME) == b"second"
        audit(store, bucket)


async def test_what_goes_while_it_is_sent_leaves_nothing(fast_path: Path, bucket: FolderBucket) -> None:
    bucket.gate = threading.Event()
    async with running(fast_path / "data", options(bucket)) as store:
        put_name(store, NAME.key, b"first")
        await trio.to_thread.run_sync(bucket.entered.acquire)
        put_name(store, NAME.key, b"second")
        bucket.gate.set()
        await uploaded(store, 1)
        await until(lambda: tier_of(store).counts.deleted == 1)
        audit(store, bucket)
        store.evict(DRAM)
        assert await read_back(store, NAME) == b"second"


async def test_a_dead_endpoint_costs_only_misses(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        put_name(store, NAME.key, b"named")
        put_block(store, b"\1" * 16, b"block")
        await uploaded(store, 2)
        store.evict(DRAM)
        assert store.match(b"\1" * 16) == 1
        bucket.down = True
        with pytest.raises(NotFound, match="does not answer"):
            await read_back(store, NAME)
        assert store.match(b"\1" * 16) == 0
        with pytest.raises(NotFound, match="cannot be read"):
            await read_back(store, NAME)
        put_name(store, b"new", b"new")
        assert tier_of(store).usage()[0]["trouble"]
        bucket.down = False
        await until(lambda: tier_of(store).is_up)
        assert store.match(b"\1" * 16) == 1
        assert await read_back(store, NAME) == b"named"
        await uploaded(store, 3)
        audit(store, bucket)


async def test_an_endpoint_that_died_is_found_out_without_a_reader(
    fast_path: Path, bucket: FolderBucket
) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        bucket.down = True
        await until(lambda: not tier_of(store).is_up)
        assert store.table.hidden_tiers == TIER_COLD


async def test_a_block_that_is_computed_again_while_only_the_bucket_has_it(
    fast_path: Path, bucket: FolderBucket
) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        put_block(store, b"\1" * 16, b"first")
        await uploaded(store, 1)
        store.evict(DRAM)
        bucket.down = True
        await until(lambda: not tier_of(store).is_up)
        again = put_block(store, b"\1" * 16, b"again")
        assert read(store, again) == b"again"
        assert store.match(b"\1" * 16) == 1
        bucket.down = False
        await uploaded(store, 2)
        await until(lambda: not tier_of(store).deleting)
        store.evict(DRAM)
        assert read(store, await store.load(store.lookup_block(b"\1" * 16), uid=0)) == b"again"
        audit(store, bucket)


@pytest.mark.parametrize("where", ["header", "payload", "short", "long", "swapped"])
async def test_other_bytes_than_were_sent_are_a_miss(
    fast_path: Path, bucket: FolderBucket, where: str
) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        info = put_name(store, NAME.key, b"some bytes")
        other = put_name(store, b"other", b"same size!")
        await uploaded(store, 2)
        store.evict(DRAM)
        file = bucket._file(str(store.cold_name(info.key.digest)))
        data = bytearray(file.read_bytes())
        if where == "header":
            data[40] ^= 1
        elif where == "payload":
            data[-1] ^= 1
        elif where == "swapped":
            data[:] = bucket._file(str(store.cold_name(other.key.digest))).read_bytes()
        else:
            data = data[:-1] if where == "short" else data + b"!"
        file.write_bytes(data)
        with pytest.raises(NotFound):
            await read_back(store, NAME)
        with pytest.raises(NotFound):
            store.lookup(NAME)
        assert tier_of(store).counts.corrupt == 1
        await until(lambda: not tier_of(store).deleting)
        audit(store, bucket)


async def test_an_object_that_somebody_else_deleted_is_a_miss(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        info = put_name(store, NAME.key, b"some bytes")
        await uploaded(store, 1)
        store.evict(DRAM)
        bucket.delete([str(store.cold_name(info.key.digest))])
        with pytest.raises(NotFound):
            await read_back(store, NAME)
        with pytest.raises(NotFound):
            store.lookup(NAME)


async def test_the_capacity_holds_at_every_moment(fast_path: Path, bucket: FolderBucket) -> None:
    capacity = 16 * MIB
    async with running(fast_path / "data", options(bucket, capacity_bytes=capacity)) as store:
        tier = tier_of(store)
        for number in range(64):
            put_name(store, b"%d" % number, os.urandom(MIB))
            await uploaded(store, number + 1)
            there = sum(bucket._size(name) or 0 for name in bucket.objects())
            assert there <= tier.used_bytes <= capacity
        assert tier.counts.evicted >= 40
        await until(lambda: not tier.deleting)
        audit(store, bucket)
        newest = Name(b"b", b"63")
        store.evict(DRAM)
        assert len(await read_back(store, newest)) == MIB


async def test_blocks_leave_the_bucket_leaf_first(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket, capacity_bytes=16 * MIB)) as store:
        chain = [bytes([number]) * 16 for number in range(1, 7)]
        for number, digest in enumerate(chain):
            put_block(store, digest, os.urandom(2 * MIB), parent=chain[number - 1] if number else None)
            await uploaded(store, number + 1)
        store.evict(DRAM)
        tier = tier_of(store)
        tier.evict(5 * MIB)
        assert store.match(b"".join(chain)) == 3
        await until(lambda: not tier.deleting)
        audit(store, bucket)


async def test_what_is_refused_is_not_tried_for_ever(fast_path: Path, bucket: FolderBucket) -> None:
    bucket.refused = {"objects/"}
    async with running(fast_path / "data", options(bucket)) as store:
        info = put_name(store, NAME.key, b"some bytes")
        await until(lambda: tier_of(store).counts.refused == 1)
        assert read(store, info) == b"some bytes"
        assert not tier_of(store).queue
        assert tier_of(store).is_up


async def test_a_start_tidies_up_after_a_kill(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        put_name(store, NAME.key, b"some bytes")
        await uploaded(store, 1)
        store.evict(DRAM)
    bucket.put("objects/00000000deadbeef", [b"x" * 200])
    bucket.put("blocks/ff/" + "f" * 32 + "-" + "0" * 32 + "-" + "1" * 16 + "-bound", [b"y" * 200])
    bucket.put("buckets/gone", [b"z"])
    bucket.put("objects/README.txt", [b"somebody else's"])
    async with running(fast_path / "data", options(bucket)) as store:
        await until(lambda: tier_of(store).counts.deleted == 3)
        assert await read_back(store, NAME) == b"some bytes"
        assert "objects/README.txt" in bucket.names()
        bucket.delete(["objects/README.txt"])
        audit(store, bucket)
        assert "buckets/gone" not in bucket.names()


async def test_blocks_outlive_the_index_and_the_machine(fast_path: Path, bucket: FolderBucket) -> None:
    bucket.page_size = 3
    chain = [bytes([number]) * 16 for number in range(1, 9)]
    async with running(fast_path / "data", options(bucket)) as store:
        for number, digest in enumerate(chain):
            put_block(store, digest, digest * 10, parent=chain[number - 1] if number else None)
        put_name(store, NAME.key, b"named")
        await uploaded(store, 9)
    shutil.rmtree(fast_path / "data")
    async with running(fast_path / "data", options(bucket), up=False) as store:
        await until(lambda: "another store" in tier_of(store).trouble)
        assert len(bucket.objects()) == 9
    shutil.rmtree(fast_path / "data")
    store = open_store(
        StoreOptions(
            fast_path / "data", dram_bytes=DRAM, backing="directory", cold=options(bucket, take_over=True)
        )
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        await until(lambda: tier_of(store).index.is_complete)
        assert store.bucket(b"bound").namespace == NAMESPACE.digest
        assert store.match(b"".join(chain)) == 8
        for digest in chain:
            assert read(store, await store.load(store.lookup_block(digest), uid=0)) == digest * 10
        await until(lambda: not tier_of(store).deleting)
        assert len(bucket.objects()) == 8, "a name's last version is not known there"
        audit(store, bucket)
        fresh = store.seal(draft_of(store, b"new"), Name(b"bound", b"new"), Attributes())
        assert fresh.object_id > max(store.lookup_block(digest).object_id for digest in chain)
        nursery.cancel_scope.cancel()
    store.close()


async def test_another_bucket_begins_empty(fast_path: Path, bucket: FolderBucket) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        put_name(store, NAME.key, b"some bytes")
        await uploaded(store, 1)
        store.evict(DRAM)
    other = FolderBucket(fast_path / "other")
    async with running(fast_path / "data", options(other)) as store:
        with pytest.raises(NotFound):
            store.lookup(NAME)
        assert not other.objects()
    assert len(bucket.objects()) == 1


async def test_a_full_index_lets_go_what_only_the_bucket_has(fast_path: Path, bucket: FolderBucket) -> None:
    cold = options(bucket, capacity_bytes=16 * MIB)
    store = open_store(
        StoreOptions(fast_path / "data", dram_bytes=DRAM, backing="directory", max_slots=64, cold=cold)
    )
    store.create_bucket(b"b", uid=0, gid=0)
    room = store.table.max_entries
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        await until(lambda: tier_of(store).index.is_complete)
        for number in range(room + 100):
            put_name(store, b"%06d" % number, b"x")
            await until(lambda: not tier_of(store).queue and not tier_of(store).writing)
        assert len(store.table) <= room
        assert len(await read_back(store, Name(b"b", b"%06d" % (room + 99)))) == 1
        with pytest.raises(NotFound):
            store.lookup(Name(b"b", b"000000"))
        await until(lambda: not tier_of(store).deleting)
        audit(store, bucket)
        nursery.cancel_scope.cancel()
    store.close()


async def test_a_block_that_was_removed_is_not_taken_for_a_lost_one(
    fast_path: Path, bucket: FolderBucket
) -> None:
    """The index is lost, the bucket still has a block; it is computed anew and removed before anybody has looked."""
    async with running(fast_path / "data", options(bucket)) as store:
        put_block(store, b"\1" * 16, b"removed")
        put_block(store, b"\2" * 16, b"lost")
        await uploaded(store, 2)
    shutil.rmtree(fast_path / "data")
    bucket.down = True
    for _ in range(2):  # a restart does not forget it
        async with running(fast_path / "data", options(bucket, take_over=True), up=False) as store:
            if store.object_id_of(b"\1" * 16) is None:
                put_block(store, b"\1" * 16, b"again")
            store.remove_block(b"\1" * 16)
    bucket.down = False
    async with running(fast_path / "data", options(bucket, take_over=True)) as store:
        assert store.match(b"\2" * 16) == 1
        assert store.match(b"\1" * 16) == 0
        await until(lambda: not tier_of(store).deleting)
        audit(store, bucket)


async def test_an_object_on_its_way_to_nvme_is_not_evicted_from_two_tiers(
    fast_path: Path, bucket: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(fast_path / "data", options(bucket)) as store:
        info = put_name(store, NAME.key, b"bytes")
        await uploaded(store, 1)
        monkeypatch.setattr(store.journal, "is_writing", lambda object_id: True)
        assert store.evict(DRAM) == store.evict(names=[NAME]) == 0
        assert bits(store, info) == TIER_DRAM | TIER_COLD
        monkeypatch.setattr(store._residency, "_spares_in_flight", False)
        assert store.evict(DRAM) > 0, "nothing else is left to evict"
        with pytest.raises(NotFound):
            store.lookup(NAME)
        await until(lambda: not tier_of(store).deleting)
        audit(store, bucket)


async def test_a_rename_into_a_durable_bucket_that_was_cut_off_promises_nothing(
    fast_path: Path, bucket: FolderBucket
) -> None:
    async with running(fast_path / "data", options(bucket), nvme=True) as store:
        store.create_bucket(b"dur", uid=0, gid=0, durable=True)
        store.create_bucket(b"ghost", uid=0, gid=0, admits_all=False)
        put_name(store, b"a", b"bytes", bucket=b"ghost")
        await uploaded(store, 1)
        store.evict(names=[Name(b"ghost", b"a")])
        store.names.rename(b"ghost", b"a", b"dur", b"a")
    async with running(fast_path / "data", options(bucket), nvme=True) as store:
        for name in (Name(b"ghost", b"a"), Name(b"dur", b"a")):
            with pytest.raises(NotFound):
                store.lookup(name)
        assert store.names.get(b"dur", b"a") is None
        await until(lambda: not bucket.objects())


async def test_what_came_while_the_bucket_was_listed_is_not_lost(
    fast_path: Path, bucket: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, go_on = threading.Event(), threading.Event()
    page = bucket.page

    def slow_page(prefix: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        found = page(prefix, after)
        if prefix == "objects/":
            listed.set()
            assert go_on.wait(WAIT_S)
        return found

    monkeypatch.setattr(bucket, "page", slow_page)
    async with running(fast_path / "data", options(bucket), up=False) as store:
        await trio.to_thread.run_sync(listed.wait)
        info = put_name(store, NAME.key, b"bytes")
        await uploaded(store, 1)
        go_on.set()
        await until(lambda: tier_of(store).index.is_complete)
        assert bits(store, info) == TIER_DRAM | TIER_COLD
        assert tier_of(store).counts.lost == 0
        audit(store, bucket)
