"""Removed by thousands stays removed, whatever is lost: a segment, the index, both.

All is removed within one sync, so that the deletions lie side by side in one or two segments.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.formats import RECORD_HEADER, SEGMENT_DATA_START, RecordType
from tests.support import one_store
from tests.support.one_store import CACHE, DURABLE, fill
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name
from tiers.nvme.write_behind import NvmeJournal
from tiers.store.store import Store

TIMES: Final = 4
"""Of the size of other tests' stores: the smallest ones have no room for as many objects as are removed."""
KEPT, REMOVED = 100, 10_000
"""Half of that is more than the smallest endings files hold."""


@asynccontextmanager
async def life(path: Path) -> AsyncIterator[Store]:
    device = thread_device()
    try:
        async with one_store.life(path, device, times=TIMES) as store:
            yield store
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


async def remove_most(path: Path, bucket: bytes) -> set[bytes]:
    """A life in which nearly all objects of a bucket are removed; the keys of the others."""
    async with life(path) as store:
        store.create_bucket(bucket, uid=0, gid=0, durable=bucket == DURABLE)
        keys = [b"%05d" % number for number in range(KEPT + REMOVED)]
        for key in keys:
            draft = store.reserve(1, uid=0)
            fill(store, draft, b"x")
            store.seal(draft, Name(bucket, key), Attributes())
        store.dram.checksums.wait(WAIT_S)
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        with trio.fail_after(120):
            while journal.usage()[0]["write_behind"]:  # noqa: ASYNC110 it notifies nobody
                await trio.sleep(0.001)
        await journal.settle_names()
        for key in keys[KEPT:]:
            store.remove(Name(bucket, key))
        await journal.settle_names()
    return set(keys[:KEPT])


async def find_keys(path: Path, bucket: bytes) -> set[bytes]:
    async with life(path) as store:
        return {key for named, key, row in store.names.rows() if named == bucket and row is not None}


def has_deletions(segment: Path) -> bool:
    data, at = segment.read_bytes(), SEGMENT_DATA_START
    while data[at : at + 4] == b"KVFR":
        raw = RECORD_HEADER.decode(data[at : at + RECORD_HEADER.size])
        if raw["type"] == RecordType.TOMBSTONE:
            return True
        at += raw["record_bytes"]
    return False


def erase(segment: Path) -> None:
    """Write zeros over all records of a segment."""
    with segment.open("r+b") as file:
        file.seek(SEGMENT_DATA_START)
        file.write(bytes(segment.stat().st_size - SEGMENT_DATA_START))


@pytest.mark.parametrize("bucket", [CACHE, DURABLE])
def test_what_was_removed_stays_so(fast_path: Path, bucket: bytes) -> None:
    original, path = fast_path / "original", fast_path / "data"
    kept = trio.run(remove_most, original, bucket)
    trio.run(find_keys, original, bucket)  # a start writes one of the endings files again
    shutil.rmtree(original / "dram")
    deletions = [file.name for file in (original / "nvme").glob("*.seg") if has_deletions(file)]
    assert deletions
    for lost in [None, *deletions]:
        for index in ("intact", "lost"):
            shutil.copytree(original, path)
            if lost is not None:
                erase(path / "nvme" / lost)
            if index == "lost":
                shutil.rmtree(path / "index")
            found = trio.run(find_keys, path, bucket)
            back = len(found - kept)
            assert not back, f"{back} are back, segment lost: {lost}, index {index}"
            assert lost or found == kept
            shutil.rmtree(path)
