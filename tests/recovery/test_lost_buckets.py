"""A segment with the records of buckets is damaged, and the index lost: the buckets, and all names that other segments
have, are there."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.formats import SEGMENT_DATA_START
from tests.support.one_store import CACHE, DURABLE, NVME_BYTES, abandon, fill, look, start
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.log.bucket_files import DIRECTORY
from tiers.model.objects import Attributes, Name
from tiers.nvme.write_behind import NvmeJournal
from tiers.store.store import Store

BALLAST: Final = 200_000
VALUES: Final = {Name(bucket, b"kept"): bucket * 1000 for bucket in (CACHE, DURABLE)}


def put(store: Store, name: Name, data: bytes) -> None:
    draft = store.reserve(len(data), uid=0)
    fill(store, draft, data)
    store.seal(draft, name, Attributes())


@asynccontextmanager
async def living(path: Path) -> AsyncIterator[Store]:
    """A store that is killed at the end, everything on the device."""
    device = thread_device()
    store = await start(path, device)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            yield store
            store.dram.checksums.wait(WAIT_S)
            journal = store.journal
            assert isinstance(journal, NvmeJournal)
            with trio.fail_after(WAIT_S):
                while journal.usage()[0]["write_behind"]:  # noqa: ASYNC110 it notifies nobody
                    await trio.sleep(0.001)
                await journal.nvme.log.settle()
            nursery.cancel_scope.cancel()
    finally:
        abandon(store)
        with trio.CancelScope(shield=True):
            await device.aclose()


def segments_of_buckets(store: Store) -> set[int]:
    journal = store.journal
    assert isinstance(journal, NvmeJournal)
    return {each.place[0][0] for each in journal.nvme.buckets._buckets.values() if each.place is not None}


def damage(path: Path, segments: set[int]) -> None:
    """Nothing of these segments can be read, and index and DRAM are gone."""
    for number in segments:
        with (path / f"nvme/{number:08x}.seg").open("r+b") as file:
            file.seek(SEGMENT_DATA_START)
            file.write(bytes((1 << 20) - SEGMENT_DATA_START))
    for lost in ("index", "dram"):
        shutil.rmtree(path / lost)


async def test_buckets_outlive_the_segment_of_their_records(tmp_path: Path) -> None:
    assert NVME_BYTES > 8 * BALLAST
    async with living(tmp_path) as store:
        for bucket in (CACHE, DURABLE, b"gone"):
            store.create_bucket(bucket, uid=0, gid=0, durable=bucket == DURABLE)
        store.set_bucket(CACHE, mode=0o700, uid=7)
        store.remove_bucket(b"gone")
        await store.journal.settle()
        lost = segments_of_buckets(store)
        assert lost
        for number in range(6):
            put(store, Name(DURABLE, b"ballast%d" % number), b"b" * BALLAST)
        await store.journal.settle()
        for name, value in VALUES.items():
            put(store, name, value)
        await store.journal.settle()
    damage(tmp_path, lost)
    found = await look(tmp_path)
    assert found.items() >= VALUES.items(), [str(name) for name in found]
    async with living(tmp_path) as store:
        assert [bucket.name for bucket in store.buckets()] == [CACHE, DURABLE]
        cache = store.bucket(CACHE)
        assert (cache.mode, cache.uid, store.bucket(DURABLE).durable) == (0o700, 7, True)
        assert store.create_bucket(b"new", uid=0, gid=0).bucket_id > cache.bucket_id
        assert segments_of_buckets(store), "the log does not have them again"


@pytest.mark.parametrize("how", ["removed", "cut", "another's", "as it was"])
async def test_a_damaged_file_is_passed_over(tmp_path: Path, how: str) -> None:
    """The log has the buckets, and only their files are damaged; or one is put back that has ended."""
    kept = tmp_path / "kept"
    async with living(tmp_path / "data") as store:
        store.create_bucket(b"gone", uid=0, gid=0)
        shutil.copytree(tmp_path / "data" / DIRECTORY, kept)
        store.remove_bucket(b"gone")
        for bucket in (CACHE, DURABLE):
            store.create_bucket(bucket, uid=0, gid=0, durable=bucket == DURABLE)
        for name, value in VALUES.items():
            put(store, name, value)
        await store.journal.settle()
    files = sorted((tmp_path / "data" / DIRECTORY).iterdir())
    assert len(files) == 2
    if how == "removed":
        shutil.rmtree(tmp_path / "data" / DIRECTORY)
    elif how == "cut":
        files[0].write_bytes(files[0].read_bytes()[:-1])
    elif how == "another's":
        shutil.copy(files[0], files[1])
    else:
        shutil.copytree(kept, tmp_path / "data" / DIRECTORY, dirs_exist_ok=True)
    damage(tmp_path / "data", set())
    assert await look(tmp_path / "data") == VALUES
    async with living(tmp_path / "data") as store:
        assert [bucket.name for bucket in store.buckets()] == [CACHE, DURABLE]
    assert len(list((tmp_path / "data" / DIRECTORY).iterdir())) == 2, "what a start knows is repeated"
