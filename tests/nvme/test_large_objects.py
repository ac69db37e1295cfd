"""Objects larger than DRAM takes, at the store: written extent by extent, read in place, held while they are open."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tiers.nvme.large_buffers
from kvfs import limits
from kvfs.cli.offline.fsck_command import _check as fsck
from kvfs.errors import DeviceMissing, NoSpace, NotFound, ObjectTooLarge, WriterActive
from kvfs.limits import MIB
from tests.support.nvme_stores import put, running
from tests.support.seeds import rounds
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.large_draft import LargeDraft
from tiers.nvme.stored import counted_bytes
from tiers.nvme.tier import NvmeTier
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, open_store, start_store
from tiers.store.store import Store

EXTENT = MIB // limits.EXTENT_SHARE_OF_SEGMENT
"""Of the segments of `running`."""
LARGEST_IN_DRAM = 4 * MIB
NAME = Name(b"b", b"file")


def nvme_of(store: Store) -> NvmeTier:
    assert isinstance(store.journal, NvmeJournal)
    return store.journal.nvme


def info_of(store: Store, name: Name = NAME) -> ObjectInfo:
    found = store.lookup(name)
    assert isinstance(found, ObjectInfo)
    return found


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


async def write(store: Store, name: Name, data: bytes) -> ObjectInfo:
    draft = store.begin_large(name.bucket, uid=0)
    try:
        for start in range(0, len(data), 100_000):
            await draft.write(start, data[start : start + 100_000])
        await draft.flush()
        return store.seal_large(draft, name, Attributes(mode=0o640))
    finally:
        draft.close()


async def write_apart(store: Store, name: Name, data: bytes) -> ObjectInfo:
    """As `write`, with an extent of something else that goes at once between every two: so that reclaim moves it."""
    draft, other = store.begin_large(name.bucket, uid=0), store.begin_large(name.bucket, uid=0)
    for start in range(0, len(data), EXTENT):
        for each in draft, other:
            await each.write(start, data[start : start + EXTENT])
    await other.flush()
    store.abort_large(other)
    await draft.flush()
    info = store.seal_large(draft, name, Attributes(mode=0o640))
    draft.close()
    return info


async def read(store: Store, name: Name = NAME, step: int = 70_001) -> bytes:
    reader = store.open_large(info_of(store, name))
    try:
        parts = [await reader.read(start, step) for start in range(0, reader.size_bytes + step, step)]
        return b"".join(parts)
    finally:
        reader.close()


def all_is_given_back(store: Store) -> None:
    """Nobody holds anything, and nothing is promised."""
    nvme = nvme_of(store)
    assert nvme.promised_bytes == 0
    assert all(stored.holders == 0 for stored in nvme.objects.values())
    pieces = [(piece, s) for s in nvme.objects.values() for piece in s.pieces if piece is not None]
    kept = sum(counted_bytes(piece.record_bytes, 0) for piece, s in pieces if s.kept)
    live = sum(counted_bytes(piece.record_bytes, 0) for piece, _ in pieces)
    metas = sum(s.meta[1] for s in nvme.objects.values() if s.meta is not None)
    buckets = sum(place.place[1] for place in nvme.buckets._buckets.values() if place.place is not None)
    assert nvme.pool.kept_bytes == kept + metas + buckets
    assert nvme.pool.live_bytes == live + metas + buckets
    assert nvme.pool.kept_bytes == sum(segment.kept_bytes for segment in nvme.pool.segments)
    assert nvme.pool.live_bytes == sum(segment.live_bytes for segment in nvme.pool.segments)


@asynccontextmanager
async def started(
    path: Path, *, dram_bytes: int = 16 * MIB, nvme_bytes: int = 64 * MIB
) -> AsyncIterator[Store]:
    async with running(path, dram_bytes=dram_bytes, nvme_bytes=nvme_bytes) as store:
        if NAME.bucket not in [bucket.name for bucket in store.buckets()]:
            store.create_bucket(b"b", uid=0, gid=0, large=True)
        yield store
        await store.journal.settle_names()
        all_is_given_back(store)


async def test_an_object_larger_than_dram_is_written_and_read(tmp_path: Path) -> None:
    data = content(1, 20 * MIB + 77)
    async with started(tmp_path, dram_bytes=16 * MIB, nvme_bytes=64 * MIB) as store:
        info = await write(store, NAME, data)
        assert (info.size_bytes, info.tier, info.mode) == (len(data), "nvme", 0o640)
        assert store.is_large(info)
        assert await read(store) == data
        with pytest.raises(ObjectTooLarge, match=str(LARGEST_IN_DRAM)):
            await store.load(info, uid=0)
    shutil.rmtree(tmp_path / "index")
    async with started(tmp_path, dram_bytes=16 * MIB, nvme_bytes=64 * MIB) as store:
        assert await read(store) == data
        assert info_of(store).mode == 0o640


async def test_a_small_one_comes_up_into_dram(tmp_path: Path) -> None:
    async with started(tmp_path) as store:
        await write(store, NAME, content(1, EXTENT + 5))
        found = await store.load(info_of(store), uid=0)
        assert found.extent is not None
        assert not store.is_large(found)


async def test_what_ends_in_a_hole_comes_up_into_dram_and_is_whole_to_fsck(tmp_path: Path) -> None:
    """Its record is shorter than the object, and so is what the record's checksum is of."""
    async with running(tmp_path, keep=True) as store:
        store.create_bucket(b"b", uid=0, gid=0, large=True)
        draft = store.begin_large(b"b", uid=0)
        await draft.write(0, b"bytes")
        await draft.truncate(5000)
        await draft.flush()
        info = store.seal_large(draft, NAME, Attributes())
        draft.close()
        await store.load(info, uid=0)
        store.dram.checksums.wait(WAIT_S)
    found = await trio.to_thread.run_sync(fsck, tmp_path, tmp_path / "nvme", False)
    assert found["problems"] == []
    async with running(tmp_path) as store:
        assert info_of(store).tier == "dram"
        descriptor = store.open_read(await store.load(info_of(store), uid=0), uid=0)
        assert os.pread(descriptor, 6000, 0) == b"bytes" + bytes(4995)
        os.close(descriptor)


async def test_small_reads_do_not_read_an_extent_each(tmp_path: Path) -> None:
    data = content(1, 6 * MIB)
    async with started(tmp_path) as store:
        await write(store, NAME, data)
        before = nvme_of(store).counts.reads
        assert await read(store, step=4096) == data
        assert nvme_of(store).counts.reads - before <= len(data) // EXTENT + 1


@pytest.mark.parametrize("how", ["removed", "replaced", "evicted"])
async def test_who_has_it_open_reads_it_whatever_happens_to_the_name(tmp_path: Path, how: str) -> None:
    """Law 4: leased bytes are never recycled. 30 MiB more than fill the tier several times over."""
    data = content(1, 5 * MIB)
    async with started(tmp_path, nvme_bytes=24 * MIB) as store:
        reader = store.open_large(await write_apart(store, NAME, data))
        if how == "removed":
            store.remove(NAME)
        elif how == "replaced":
            await write(store, NAME, content(2, 5 * MIB))
        for number in range(15):
            await write(store, Name(b"b", b"other%d" % number), content(number, 2 * MIB))
            assert await reader.read(number * 300_000, 5000) == data[number * 300_000 :][:5000]
        assert nvme_of(store).log.counts.rewritten_bytes > len(data)
        store.journal.large._buffers.cache.clear()
        assert await reader.read(0, len(data)) == data
        reader.close()
        if how == "evicted":  # it has stayed, since somebody had it open
            assert await read(store) == data
        else:
            assert len(nvme_of(store)._held) == 0
    shutil.rmtree(tmp_path / "index")
    async with started(tmp_path, nvme_bytes=24 * MIB) as store:
        if how == "removed":
            with pytest.raises(NotFound):
                store.lookup(NAME)


async def test_a_removed_block_that_was_moved_does_not_come_back(tmp_path: Path) -> None:
    """A block needs no META to count, so each move of a held one has its deletion behind it."""
    from tests.support.nvme_stores import put_block, until_written
    from tests.support.stores import NAMESPACE

    digest = b"\x07" * 16
    async with started(tmp_path, nvme_bytes=16 * MIB) as store:
        store.create_bucket(b"kv", uid=0, gid=0, namespace=NAMESPACE)
        info = put_block(store, b"kv", digest, None, EXTENT)  # of a segment so little that it is moved
        await until_written(store, 1)
        reader = store.open_large(info)
        store.remove_block(digest)
        for number in range(30):
            await write(store, Name(b"b", b"other%d" % number), content(number, 2 * MIB))
        store.journal.large._buffers.cache.clear()
        assert await reader.read(0, EXTENT) == digest * (EXTENT // 16)
        assert nvme_of(store).log.counts.segments_reclaimed > 40
        await store.journal.settle_names()
        del reader  # as a crash leaves it: nobody let go
        nvme_of(store).release(nvme_of(store)._held[info.object_id])
    shutil.rmtree(tmp_path / "index")
    async with started(tmp_path, nvme_bytes=16 * MIB) as store:
        assert store.block_bucket(digest) is None


async def test_a_full_tier_and_a_file_too_large_are_told_to_the_writer(tmp_path: Path) -> None:
    async with started(tmp_path, nvme_bytes=16 * MIB) as store:
        draft = store.begin_large(b"b", uid=0)
        with pytest.raises(ObjectTooLarge, match="half of the NVMe tier"):
            await draft.write(8 * MIB, b"x")
        with pytest.raises(ObjectTooLarge):
            await draft.truncate(8 * MIB + 1)
        drafts = [draft, store.begin_large(b"b", uid=0)]
        written = 0

        async def fill() -> None:
            nonlocal written
            for start in range(0, 8 * MIB, EXTENT):
                for each in drafts:
                    await each.write(start, content(start, EXTENT))
                    written += EXTENT

        with pytest.raises(NoSpace, match="has room for"):
            await fill()
        assert 7 * MIB < written < 12 * MIB
        drafts[1].close()
        await drafts[0].flush()
        store.seal_large(drafts[0], NAME, Attributes())
        drafts[0].close()
        assert (await read(store))[:EXTENT] == content(0, EXTENT)


async def test_more_open_drafts_than_buffers(tmp_path: Path) -> None:
    count = limits.LARGE_DIRTY_EXTENTS * 2 + 1
    async with started(tmp_path) as store:
        drafts = [store.begin_large(b"b", uid=0) for _ in range(count)]

        async def fill(number: int) -> None:
            for start in range(0, EXTENT * 2, 50_000):
                await drafts[number].write(start, content(number * 1000 + start, 50_000))

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(fill, number)
        assert store.journal.large._buffers._made <= limits.LARGE_DIRTY_EXTENTS
        for number, draft in enumerate(drafts):
            assert await draft.read(50_000, 50_000) == content(number * 1000 + 50_000, 50_000)
            draft.close()


async def test_nothing_is_sealed_before_it_is_written(tmp_path: Path) -> None:
    async with started(tmp_path) as store:
        draft = store.begin_large(b"b", uid=0)
        await draft.write(0, b"bytes")
        with pytest.raises(WriterActive):
            store.seal_large(draft, NAME, Attributes())
        draft.close()
        with pytest.raises(NotFound):
            store.lookup(NAME)


async def test_a_large_bucket_needs_the_tier(tmp_path: Path) -> None:
    with open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, backing="directory")) as store:
        with pytest.raises(DeviceMissing, match="need the NVMe tier"):
            store.create_bucket(b"b", uid=0, gid=0, large=True)
        store.create_bucket(b"c", uid=0, gid=0)
        with pytest.raises(DeviceMissing):
            store.set_bucket(b"c", large=True)


async def test_the_flag_of_a_bucket_outlives_the_index(tmp_path: Path) -> None:
    async with started(tmp_path) as store:
        store.create_bucket(b"c", uid=0, gid=0, admits_all=False)
        store.set_bucket(b"c", large=True)
        store.set_bucket(b"b", large=False)
        await store.journal.settle()
    shutil.rmtree(tmp_path / "index")
    async with started(tmp_path) as store:
        assert [(b.name, b.large, b.admits_all) for b in store.buckets()] == [
            (b"b", False, True),
            (b"c", True, False),
        ]


# --- against a bytearray ----------------------------------------------------------------------------------

LIMIT = EXTENT * 5
offsets = st.one_of(
    st.just(0),
    st.integers(0, LIMIT),
    st.builds(lambda n, d: max(n * EXTENT + d, 0), st.integers(0, 5), st.integers(-3, 3)),
)
writes = st.tuples(st.just("write"), offsets, st.one_of(st.integers(1, 5000), st.integers(1, EXTENT * 2)))
steps = st.one_of(
    writes,
    writes,
    st.tuples(st.just("truncate"), offsets, st.just(0)),
    st.tuples(st.just("read"), offsets, st.integers(0, EXTENT * 2)),
    st.tuples(
        st.sampled_from(["flush", "persist", "seal", "rewrite", "abort", "churn"]), st.just(0), st.just(0)
    ),
)


@dataclass
class Model:
    """What a draft and its name should hold."""

    store: Store
    seed: int
    draft: LargeDraft
    now: bytearray = field(default_factory=bytearray)
    sealed: bytes | None = None
    persisted: bytes | None = None
    step: int = 0

    async def run(self, what: str, offset: int, size: int) -> None:
        self.step += 1
        await getattr(self, "_" + what)(offset, size)

    async def _write(self, offset: int, size: int) -> None:
        data = content(self.seed + self.step, size)
        await self.draft.write(offset, data)
        if len(self.now) < offset:
            self.now += bytes(offset - len(self.now))
        self.now[offset : offset + size] = data

    async def _truncate(self, size_bytes: int, _: int) -> None:
        await self.draft.truncate(size_bytes)
        del self.now[size_bytes:]
        self.now += bytes(size_bytes - len(self.now))

    async def _read(self, offset: int, size: int) -> None:
        assert await self.draft.read(offset, size) == self.now[offset : offset + size]

    async def _flush(self, *_: int) -> None:
        await self.draft.flush()
        assert self.draft.is_written

    async def _persist(self, *_: int) -> None:
        await self.store.persist_large(self.draft, NAME, Attributes())
        self.persisted = bytes(self.now)

    async def _seal(self, *_: int) -> None:
        await self.draft.flush()
        assert self.store.seal_large(self.draft, NAME, Attributes()).size_bytes == len(self.now)
        self._close()
        self.sealed, self.persisted = bytes(self.now), None
        assert await read(self.store) == self.sealed
        self.draft, self.now = self.store.begin_large(b"b", uid=0), bytearray()

    async def _rewrite(self, *_: int) -> None:
        """A draft of what is sealed, which stays as it is."""
        await self._abort()
        if self.sealed is not None:
            self.draft.close()
            self.draft = self.store.begin_large(b"b", uid=0, base=info_of(self.store))
            self.now = bytearray(self.sealed)

    async def _abort(self, *_: int) -> None:
        self._close()
        self.persisted = None
        self.draft, self.now = self.store.begin_large(b"b", uid=0), bytearray()

    async def _churn(self, *_: int) -> None:
        """Have segments reclaimed."""
        for number in range(4):
            await write(self.store, Name(b"b", b"churn"), content(number, 2 * MIB))

    def _close(self) -> None:
        self.store.abort_large(self.draft)


@settings(
    max_examples=rounds(30, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(  # cut off and grown again over what is rewritten: zeros
    1,
    [
        ("write", 0, EXTENT * 2),
        ("seal", 0, 0),
        ("rewrite", 0, 0),
        ("truncate", 9, 0),
        ("truncate", EXTENT + 700, 0),
    ],
    False,
)
@example(  # cut off in the middle of what is in memory, and grown again: zeros
    3, [("write", 0, 5000), ("truncate", 9, 0), ("truncate", 5000, 0)], False
)
@example(  # the same of what is on the device
    4, [("write", 0, EXTENT), ("flush", 0, 0), ("truncate", 9, 0), ("truncate", EXTENT, 0)], False
)
@example(  # grown since it was made durable: as large as it was then
    2, [("write", 0, 5000), ("persist", 0, 0), ("write", 5000, EXTENT * 2), ("flush", 0, 0)], True
)
@given(seed=st.integers(0, 1000), plan=st.lists(steps, min_size=8, max_size=40), crash=st.booleans())
def test_a_draft_is_a_bytearray(
    tmp_path_factory: pytest.TempPathFactory, seed: int, plan: list[tuple[str, int, int]], crash: bool
) -> None:
    trio.run(_against_a_bytearray, tmp_path_factory.mktemp("store"), seed, plan, crash)


async def _against_a_bytearray(path: Path, seed: int, plan: list[tuple[str, int, int]], crash: bool) -> None:
    """With few buffers, which hold what somebody else has left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LARGE_DIRTY_EXTENTS", 3)
        patch.setattr(
            tiers.nvme.large_buffers, "extent_memory", lambda size: memoryview(bytearray(b"\xaa" * size))
        )
        await _run_plan(path, seed, plan, crash)


async def _run_plan(path: Path, seed: int, plan: list[tuple[str, int, int]], crash: bool) -> None:
    device = thread_device()
    store = await start_store(
        StoreOptions(
            path,
            dram_bytes=16 * MIB,
            backing="directory",
            nvme=NvmeOptions(device, 24 * MIB, segment_bytes=MIB),
        )
    )
    store.create_bucket(b"b", uid=0, gid=0, durable=True, large=True)
    model = Model(store, seed, store.begin_large(b"b", uid=0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for step in plan:
            await model.run(*step)
        await store.journal.settle()
        assert await model.draft.read(0, LIMIT * 2) == model.now
        if not crash:
            store.abort_large(model.draft)
            model.persisted = None
            await store.journal.settle()
            all_is_given_back(store)
        nursery.cancel_scope.cancel()
    store.close(keep=True)  # without `finish`: what was not written is lost, as in a crash
    await device.aclose()
    shutil.rmtree(path / "index")
    async with running(path, nvme_bytes=24 * MIB, dram_bytes=16 * MIB) as store:
        expected = model.sealed if model.persisted is None else model.persisted
        if expected is None:
            with pytest.raises(NotFound):
                store.lookup(NAME)
        elif model.persisted is None:
            assert await read(store) == expected
        else:  # written to since then: of what was not persisted any part may be there
            assert info_of(store).size_bytes == len(expected)
            assert len(await read(store)) == len(expected)
        all_is_given_back(store)
    shutil.rmtree(path)


async def test_an_object_sealed_into_dram_is_replaced(tmp_path: Path) -> None:
    async with started(tmp_path) as store:
        put(store, NAME, 70_000)
        data = content(3, 5 * MIB)
        await write(store, NAME, data)
        assert await read(store) == data
        put(store, NAME, 70_000)
        assert info_of(store).tier == "dram"


# --- what is durable of a draft ---------------------------------------------------------------------------
OTHER = Name(b"b", b"other")
SYNCED = content(1, EXTENT * 2 + 5)


@asynccontextmanager
async def crashing(
    path: Path, *, durable: bool = False, admits_all: bool = True
) -> AsyncIterator[tuple[Store, LargeDraft]]:
    """A store with a draft that is durable as NAME and was written to since, which ends without its clean stop."""
    device = thread_device()
    store = await start_store(
        StoreOptions(
            path,
            dram_bytes=16 * MIB,
            backing="directory",
            nvme=NvmeOptions(device, 24 * MIB, segment_bytes=MIB),
        )
    )
    store.create_bucket(b"b", uid=0, gid=0, durable=durable, admits_all=admits_all, large=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        draft = store.begin_large(b"b", uid=0)
        yield store, draft
        nursery.cancel_scope.cancel()
    store.close(keep=True)
    await device.aclose()


async def make_durable(store: Store, draft: LargeDraft) -> None:
    await draft.write(0, SYNCED)
    await store.persist_large(draft, NAME, Attributes())
    await draft.write(len(SYNCED), content(2, EXTENT))
    await draft.flush()


def lose_index(path: Path, lost: bool) -> None:
    if lost:
        shutil.rmtree(path / "index")


@pytest.mark.parametrize("lost", [False, True])
async def test_what_is_durable_of_a_draft_moves_with_its_name(tmp_path: Path, lost: bool) -> None:
    async with crashing(tmp_path) as (store, draft):
        await make_durable(store, draft)
        store.rename_large(draft, OTHER, Attributes())
        await store.journal.settle()
    lose_index(tmp_path, lost)
    async with running(tmp_path, nvme_bytes=24 * MIB) as store:
        assert await read(store, OTHER) == SYNCED
        with pytest.raises(NotFound):
            store.lookup(NAME)


@pytest.mark.parametrize("lost", [False, True])
async def test_what_is_durable_of_a_draft_ends_with_its_name(tmp_path: Path, lost: bool) -> None:
    async with crashing(tmp_path) as (store, draft):
        await make_durable(store, draft)
        store.journal.removed(draft.object_id)
        await store.journal.settle()
        await draft.write(0, b"x")  # it is open all the same
        await draft.flush()
        assert await draft.read(0, len(SYNCED)) == b"x" + SYNCED[1:]
    lose_index(tmp_path, lost)
    async with running(tmp_path, nvme_bytes=24 * MIB) as store:
        with pytest.raises(NotFound):
            store.lookup(NAME)
        all_is_given_back(store)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("bucket", [{}, {"durable": True}, {"admits_all": False}])
async def test_what_is_durable_of_a_draft_counts_before_what_came_under_its_name_earlier(
    tmp_path: Path, lost: bool, bucket: dict[str, bool]
) -> None:
    """Though the draft is older, and also where only DRAM and the index have what came."""
    async with crashing(tmp_path, **bucket) as (store, draft):
        if bucket.get("admits_all", True):
            await write(store, NAME, content(3, EXTENT))
        else:
            put(store, NAME, EXTENT)
        await store.journal.settle()
        await make_durable(store, draft)
    lose_index(tmp_path, lost)
    async with running(tmp_path, nvme_bytes=24 * MIB) as store:
        assert await read(store) == SYNCED
