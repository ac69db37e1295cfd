"""A store with many objects starts with all of them there, and says what each phase took."""

from __future__ import annotations

import gc
import logging
import re
import shutil
from pathlib import Path

import pytest
import trio

from bench import start
from kvfs.index.names import DIRECTORY
from tiers.model.objects import Name, ObjectInfo
from tiers.nvme.write_behind import NvmeJournal
from tiers.store.store import Store

RECORDS = 20_000
SAMPLE = range(0, RECORDS, 997)


def look(store: Store, kind: str, number: int) -> ObjectInfo:
    if kind == "blocks":
        return store.lookup_block(start.digest_of(number))
    found = store.lookup(Name(start.BUCKET, start.key_of(number)))
    assert isinstance(found, ObjectInfo)
    return found


@pytest.fixture(scope="module")
def named(module_fast_path: Path) -> Path:
    """A store with many names, which was stopped."""
    trio.run(start.fill, module_fast_path, "names", RECORDS)
    return module_fast_path


@pytest.mark.parametrize("kind", start.KINDS)
async def test_many_objects_are_there_after_a_start(
    fast_path: Path, named: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = fast_path / "data"
    if kind == "blocks":
        await start.fill(data, kind, RECORDS)
    else:
        shutil.copytree(named, data)
        start.leave_index(data, kind)
    with caplog.at_level(logging.INFO, "kvfs.store"):
        async with start.opened(data, RECORDS) as store:
            await check(store, kind)
            assert gc.isenabled()
    how = f"{RECORDS} names rebuilt" if kind == "names-rebuilt" else "names from the index"
    records = RECORDS * (1 if kind == "blocks" else 2) + 1
    assert re.search(r"taken over: 0 objects, .*; index \d+\.\d+ s, adoption \d+\.\d+ s", caplog.text)
    assert re.search(
        rf"read back: {RECORDS} objects in \d+ segments, {records} records; {how}. log \d", caplog.text
    )
    assert "WARNING" not in caplog.text


async def check(store: Store, kind: str) -> None:
    """All objects are there, and a sample of them has its bytes."""
    assert store.object_count == len(store.table) == RECORDS
    for number in SAMPLE:
        found = look(store, kind, number)
        assert (found.tier, found.size_bytes) == ("nvme", start.PAYLOAD_BYTES)
        assert await read(store, found) == start.payload_of(number)
    digests = b"".join(start.digest_of(number) for number in range(start.CHAIN_BLOCKS))
    assert store.match(digests) == (start.CHAIN_BLOCKS if kind == "blocks" else 0)
    rows = sum(1 for _, _, row in store.names.rows() if row is not None and not row.flags & DIRECTORY)
    assert rows == (0 if kind == "blocks" else RECORDS)


async def read(store: Store, info: ObjectInfo) -> bytes:
    """The bytes on NVMe, verified."""
    assert isinstance(store.journal, NvmeJournal)
    into = bytearray(info.size_bytes)
    with memoryview(into) as view:
        await store.journal.reader.read(store.journal.nvme.objects[info.object_id], 0, view)
    return bytes(into)


async def test_a_start_of_many_is_of_what_the_last_one_left(fast_path: Path) -> None:
    """Names that were removed, renamed and replaced after the first start, over a second one."""
    await start.fill(fast_path, "names", 2_000)
    moved = {start.key_of(number): start.key_of(number) + b".moved" for number in range(0, 2_000, 7)}
    gone = {start.key_of(number) for number in range(1, 2_000, 7)}
    async with start.opened(fast_path, 2_000) as store, trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for old, new in moved.items():
            store.rename(Name(start.BUCKET, old), Name(start.BUCKET, new))
        for key in gone:
            store.remove(Name(start.BUCKET, key))
        await store.journal.settle()
        nursery.cancel_scope.cancel()
    expected = {moved.get(key, key) for key in map(start.key_of, range(2_000)) if key not in gone}
    async with start.opened(fast_path, 2_000) as store:
        assert {key for _, key, _ in store.names.rows()} == expected
        assert store.object_count == len(store.table) == len(expected)
