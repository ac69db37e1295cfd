"""Objects larger than DRAM takes, at the store: written extent by extent, read in place, held while they are open."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs.cli.offline.fsck_command import _check as fsck
from kvfs.errors import DeviceMissing, NoSpace, NotFound, ObjectTooLarge, WriterActive
from kvfs.limits import MIB
from tests.support.large_objects import EXTENT, NAME, content, info_of, read, started, write, write_apart
from tests.support.nvme_stores import nvme_of, put, running
from tests.support.waits import WAIT_S
from tiers.model.objects import Attributes, Name
from tiers.recovery.start import StoreOptions, open_store

LARGEST_IN_DRAM = 4 * MIB


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


async def test_an_object_sealed_into_dram_is_replaced(tmp_path: Path) -> None:
    async with started(tmp_path) as store:
        put(store, NAME, 70_000)
        data = content(3, 5 * MIB)
        await write(store, NAME, data)
        assert await read(store) == data
        put(store, NAME, 70_000)
        assert info_of(store).tier == "dram"
