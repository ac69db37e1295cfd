"""Symbolic links in the store: rows without bytes, durable or not, in units, and there again after a start."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs.cli.offline.fsck_command import Exit
from kvfs.errors import (
    Exists,
    InvalidRequest,
    NameTooLong,
    NoSpace,
    NotFound,
    NotPermitted,
    Superseded,
    Unsupported,
)
from kvfs.keys import block_name
from kvfs.limits import MIB
from tests.support.checked_stores import fsck
from tests.support.nvme_stores import DRAM, nvme_of, put, read, running, until_written
from tests.support.one_store import abandon
from tests.support.stores import BOUND, BUCKET, CAPACITY_BYTES, SLOTS, small_store
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Change, ChangeKind, Name, ObjectInfo
from tiers.recovery.start import NvmeOptions, StoreOptions, open_store, start_store
from tiers.store.store import Store

UNIT = b"0123456789abcdef0123456789abcdef/"


def link(store: Store, name: Name) -> bytes:
    info = store.lookup(name)
    assert isinstance(info, ObjectInfo)
    return info.target


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (b"", InvalidRequest),
        (b"a\0b", InvalidRequest),
        (b"n" * (limits.MAX_LINK_TARGET_BYTES + 1), NameTooLong),
    ],
)
def test_targets_that_no_link_has(tmp_path: Path, target: bytes, error: type[Exception]) -> None:
    with small_store(tmp_path) as store:
        with pytest.raises(error, match="symbolic link"):
            store.make_link(Name(BUCKET, b"a"), target, Attributes())
        assert store.list(BUCKET).entries == []


def test_a_link_has_no_bytes_to_open_and_no_mode(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        name = Name(BUCKET, b"a")
        made = store.make_link(name, b"x" * limits.MAX_LINK_TARGET_BYTES, Attributes(mode=0o600, pinned=True))
        assert (made.mode, made.pinned, made.tier, made.size_bytes) == (0o777, False, "index", 4095)
        with pytest.raises(Superseded):
            store.open_read(made, uid=0)
        for change in ({"mode": 0o600}, {"pinned": True}):
            with pytest.raises(Unsupported, match="symbolic link"):
                store.set_attributes(name, **change)
        with pytest.raises(NotPermitted):
            store.make_link(Name(BOUND, block_name(bytes(16))), b"x", Attributes())
        with pytest.raises(Exists):
            store.make_link(name, b"y", Attributes())
        with pytest.raises(Exists):
            store.make_link(name, b"y", Attributes(), replace=True, expected_id=made.object_id + 1)
        with pytest.raises(NotFound):
            store.make_link(Name(BUCKET, b"b"), b"y", Attributes(), replace=True, expected_id=1)
        assert store.usage()["objects"] == 0


def test_a_unit_is_evicted_with_its_links_and_not_for_them(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        heard: list[Change] = []
        left: list[int] = []
        store.make_directory(Name(BUCKET, UNIT), Attributes())
        names = [Name(BUCKET, UNIT + b"link%d" % number) for number in range(3)]
        for name in names:
            store.make_link(name, b"file", Attributes())
        store.evict(1 << 30)
        assert len(store.list(BUCKET).entries) == 4, "links alone make no unit that is evicted"
        put(store, Name(BUCKET, UNIT + b"file"), 4096)
        store.listeners.append(heard.append)
        store.listeners.append(lambda _: left.append(len(store.list(BUCKET).entries)))
        assert store.evict(1 << 30) == 4096
        assert store.list(BUCKET).entries == []
        gone = {change.name for change in heard if change.kind is ChangeKind.REMOVED and change.evicted}
        assert gone >= {*names, Name(BUCKET, UNIT)}
        assert set(left) == {0}, "a kill between two of these leaves a part, which reads as a hit"


def test_a_unit_whose_last_file_is_evicted_by_name_goes_with_its_links(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        for number in range(2):
            put(store, Name(BUCKET, UNIT + b"%d" % number), 10)
        store.make_link(Name(BUCKET, UNIT + b"link"), b"0", Attributes())
        store.evict(names=[Name(BUCKET, UNIT + b"0")])
        assert [key for key, _ in store.list(BUCKET).entries] == [UNIT + b"1", UNIT + b"link"]
        store.evict(names=[Name(BUCKET, UNIT + b"1")])
        assert store.list(BUCKET).entries == []


async def checked(path: Path) -> int:
    """The exit code of fsck, which runs trio itself."""
    found: dict[str, int] = await trio.to_thread.run_sync(fsck, path)
    return found["exit_code"]


# --- over NVMe, and after a start --------------------------------------------------------------------------
def make_some(store: Store, bucket: bytes) -> dict[bytes, bytes]:
    """Make, replace, rename and remove links; return what is left, with object bytes of others."""

    def make(key: bytes, target: bytes, **options: bool) -> None:
        store.make_link(Name(bucket, key), target, Attributes(uid=7, gid=8, user_metadata=b"meta"), **options)

    make(b"stays", b"../there")
    make(b"replaced", b"first")
    make(b"replaced", b"second", replace=True)
    make(b"moves", b"\xff" * 4095)
    store.rename(Name(bucket, b"moves"), Name(bucket, b"d/moved"))
    make(b"removed", b"x")
    store.remove(Name(bucket, b"removed"))
    put(store, Name(bucket, b"was-file"), 5_000)
    make(b"was-file", b"now-link", replace=True)
    make(b"was-link", b"then-file")
    put(store, Name(bucket, b"was-link"), 5_000)
    make(b"over", b"renamed-over")
    put(store, Name(bucket, b"under"), 5_000)
    store.rename(Name(bucket, b"over"), Name(bucket, b"under"))
    store.set_attributes(Name(bucket, b"stays"), mtime_ns=5)
    return {
        b"stays": b"../there",
        b"replaced": b"second",
        b"d/moved": b"\xff" * 4095,
        b"was-file": b"now-link",
        b"under": b"renamed-over",
    }


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("lost", ["nothing", "dram", "index", "both"])
@pytest.mark.parametrize("killed", [False, True])
async def test_links_are_there_again(tmp_path: Path, durable: bool, lost: str, killed: bool) -> None:
    device = thread_device()
    options = StoreOptions(
        tmp_path, dram_bytes=DRAM, backing="directory", nvme=NvmeOptions(device, 64 * MIB, segment_bytes=MIB)
    )
    store = await start_store(options)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        store.create_bucket(b"b", uid=0, gid=0, durable=durable)
        links = make_some(store, b"b")
        await store.journal.settle_names()
        nursery.cancel_scope.cancel()
    if killed:
        abandon(store)
    else:
        await store.finish()
        store.close(keep=True)
    await device.aclose()
    if lost in ("dram", "both"):
        shutil.rmtree(tmp_path / "dram")
    if lost in ("index", "both"):
        shutil.rmtree(tmp_path / "index")
    for _ in range(2):  # what the start decided is there at the next one, too
        async with running(tmp_path) as again:
            there = {key: info for key, info in again.list(b"b").entries if isinstance(info, ObjectInfo)}
            assert {key: info.target for key, info in there.items() if info.target} == links
            assert (there[b"stays"].uid, there[b"stays"].mtime_ns) == (7, 5)
            assert there[b"stays"].user_metadata == b"meta"
            assert set(there) - set(links) <= {b"was-link"}
            if durable:
                assert len(await read(again, Name(b"b", b"was-link"))) == 5_000
            again.remove(Name(b"b", b"stays"))
            again.make_link(Name(b"b", b"stays"), b"../there", Attributes(uid=7, user_metadata=b"meta"))
            again.set_attributes(Name(b"b", b"stays"), mtime_ns=5)
    assert await checked(tmp_path) == Exit.CLEAN


async def test_what_was_removed_or_replaced_stays_so_without_the_index(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, Name(b"b", b"a"), 5_000)
        await until_written(store, 1)
        store.make_link(Name(b"b", b"a"), b"x", Attributes(), replace=True)
        store.make_link(Name(b"b", b"gone"), b"x", Attributes())
        store.remove(Name(b"b", b"gone"))
        await store.journal.settle()
    shutil.rmtree(tmp_path / "index")
    async with running(tmp_path) as store:
        assert [key for key, _ in store.list(b"b").entries] == [b"a"]
        assert link(store, Name(b"b", b"a")) == b"x"


async def test_reclaim_keeps_links(tmp_path: Path) -> None:
    """Whatever else the tier is written over with."""
    async with running(tmp_path, nvme_bytes=16 * MIB) as store:
        for bucket, durable in ((b"c", False), (b"d", True)):
            store.create_bucket(bucket, uid=0, gid=0, durable=durable)
            for number in range(50):
                store.make_link(Name(bucket, b"link%d" % number), b"to-%d" % number, Attributes())
        for number in range(60):
            put(store, Name(b"c", b"f%d" % number), MIB // 2)
            await until_held(store, Name(b"c", b"f%d" % number))
        assert nvme_of(store).log.counts.segments_reclaimed > 3
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "dram")
    async with running(tmp_path, nvme_bytes=16 * MIB) as store:
        for bucket in (b"c", b"d"):
            for number in range(50):
                assert link(store, Name(bucket, b"link%d" % number)) == b"to-%d" % number


async def until_held(store: Store, name: Name) -> None:
    """Until NVMe has an object."""
    info = store.lookup(name)
    assert isinstance(info, ObjectInfo)
    with trio.fail_after(WAIT_S):
        while not store.journal.holds(info.object_id):  # noqa: ASYNC110 it tells nobody
            await trio.sleep(0.001)


async def test_links_are_counted_against_the_room_for_what_stays(tmp_path: Path) -> None:
    """Each keeps a record that reclaim always moves: without room for it there is no link, and what it was to take the
    place of stays."""
    async with running(tmp_path, nvme_bytes=8 * MIB) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        put(store, Name(b"b", b"file"), 10)
        nvme = nvme_of(store)
        nvme.promised_bytes += nvme.durable_capacity_bytes
        with pytest.raises(NoSpace):
            store.make_link(Name(b"b", b"file"), b"x", Attributes(), replace=True)
        nvme.promised_bytes -= nvme.durable_capacity_bytes
        assert await read(store, Name(b"b", b"file"))
        store.make_link(Name(b"b", b"file"), b"x", Attributes(), replace=True)


async def test_links_move_between_buckets_of_both_classes(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        store.create_bucket(b"c", uid=0, gid=0)
        store.create_bucket(b"d", uid=0, gid=0, durable=True)
        store.make_link(Name(b"c", b"l"), b"x", Attributes())
        store.rename(Name(b"c", b"l"), Name(b"d", b"l"))
        store.make_link(Name(b"c", b"dir/l"), b"y", Attributes())
        store.rename(Name(b"c", b"dir/"), Name(b"d", b"dir/"))
        await store.journal.settle()
        assert store.usage()["objects"] == 0
        assert all(stored.kept for stored in nvme_of(store).objects.values())
    shutil.rmtree(tmp_path / "index")
    async with running(tmp_path) as store:
        assert store.list(b"c").entries == []
        assert link(store, Name(b"d", b"l")) == b"x"
        assert link(store, Name(b"d", b"dir/l")) == b"y"


async def test_a_start_without_nvme_keeps_links(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        links = make_some(store, BUCKET)
    with open_store(
        StoreOptions(tmp_path, dram_bytes=CAPACITY_BYTES, max_slots=SLOTS, backing="directory")
    ) as store:
        for key, target in links.items():
            assert link(store, Name(BUCKET, key)) == target


@pytest.mark.parametrize("index", ["there", "lost"])
async def test_a_damaged_record_of_a_link_is_told_and_mended(tmp_path: Path, index: str) -> None:
    """With the index, which has all of it; without, the link is lost and said to be."""
    async with running(tmp_path, nvme_bytes=16 * MIB) as store:
        store.create_bucket(b"d", uid=0, gid=0, durable=True)
        store.make_link(Name(b"d", b"l"), b"leads-there", Attributes())
        await store.journal.settle()
    flipped = 0
    for segment in (tmp_path / "nvme").glob("*.seg"):
        data = bytearray(segment.read_bytes())
        at = data.find(b"leads-there")
        while at >= 0:
            data[at] ^= 1
            flipped += 1
            at = data.find(b"leads-there", at + 1)
        segment.write_bytes(data)
    assert flipped
    if index == "lost":
        shutil.rmtree(tmp_path / "index")
    assert await checked(tmp_path) == (Exit.REPAIRED if index == "there" else Exit.DURABLE_LOST)
    for lost in (False, True):
        if lost:
            shutil.rmtree(tmp_path / "index")
        async with running(tmp_path, nvme_bytes=16 * MIB) as store:
            if index == "there":
                assert link(store, Name(b"d", b"l")) == b"leads-there"
            else:
                assert store.list(b"d").entries == []
    assert await checked(tmp_path) == Exit.CLEAN
