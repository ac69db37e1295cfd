"""Bytes that are not those of their checksum, on their way to NVMe or on it: a miss, refused, or written again."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import trio

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, NotFound, WrongChecksum
from kvfs.formats import RECORD_MAGIC, RecordType
from kvfs.limits import MIB
from tests.support.nvme_stores import data_of, fill, flip, put, read, running, until_written
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S
from tiers.dram.tier import DramTier
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.model.tier import Extent
from tiers.nvme.write_behind import NvmeJournal


# --- bytes that changed on NVMe -----------------------------------------------------------------------------
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
