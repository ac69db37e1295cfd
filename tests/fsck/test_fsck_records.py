"""Damaged records that only a killed store needs: no name, deletion or bucket of an earlier state comes back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from kvfs.cli.offline.fsck_command import Exit
from kvfs.formats import RECORD_HEADER, RecordType
from kvfs.limits import MIB
from tests.support.checked_stores import DURABLE, NVME, find_record, flip, fsck
from tests.support.nvme_stores import data_of, put, read, running
from tests.support.one_store import abandon
from tiers.device.threads import thread_device
from tiers.model.objects import Name
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store


async def _killed(path: Path) -> dict[bytes, int]:
    """A store whose segments have no footer, with a rename and a removal in the log."""
    device = thread_device()
    store = await start_store(
        StoreOptions(
            path, dram_bytes=16 * MIB, backing="directory", nvme=NvmeOptions(device, NVME, segment_bytes=MIB)
        )
    )
    ids = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
        for key in (b"a", b"b", b"c"):
            ids[key] = put(store, Name(DURABLE, key), 5_000).object_id
        await store.journal.settle()
        store.rename(Name(DURABLE, b"a"), Name(DURABLE, b"renamed"))
        store.remove(Name(DURABLE, b"b"))
        await store.journal.settle()
        nursery.cancel_scope.cancel()
    abandon(store)
    await device.aclose()
    return ids


async def _clean_life(path: Path) -> None:
    async with running(path, nvme_bytes=NVME) as store:
        assert len(store.list(DURABLE).entries) == 2


@pytest.mark.parametrize("kind", ["META", "TOMBSTONE", "BUCKET"])
@pytest.mark.parametrize("index", ["there", "lost"])
@pytest.mark.parametrize("where", [0, 45, RECORD_HEADER.size + 3])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_damaged_name_deletion_or_bucket_brings_nothing_back(
    fast_path: Path, kind: str, index: str, where: int, stopped: bool
) -> None:
    """`stopped`: a later service stopped cleanly."""
    ids = trio.run(_killed, fast_path)
    shutil.rmtree(fast_path / "dram")
    if stopped:
        trio.run(_clean_life, fast_path)
    file, at = find_record(fast_path, RecordType[kind], ids[b"a"] if kind == "META" else None)
    flip(file, at + where)
    if index == "lost":
        shutil.rmtree(fast_path / "index")
    found = fsck(fast_path)
    assert found["exit_code"] in (Exit.REPAIRED, Exit.DURABLE_LOST)
    assert fsck(fast_path)["exit_code"] == Exit.CLEAN

    async def look() -> dict[bytes, bytes]:
        there = {}
        async with running(fast_path, nvme_bytes=NVME) as store:
            for bucket in store.buckets():
                for key, _ in store.list(bucket.name).entries:
                    there[key] = await read(store, Name(bucket.name, key))
        return there

    there = trio.run(look)
    if index == "there":
        assert there.keys() == {b"renamed", b"c"}
        assert found["exit_code"] == Exit.REPAIRED
    elif kind == "META" and where > 190:
        assert there.keys() == {b"c"}
        assert found["exit_code"] == Exit.DURABLE_LOST
    for key, content in there.items():
        assert content == data_of(Name(DURABLE, b"a" if key == b"renamed" else key), 5_000)
