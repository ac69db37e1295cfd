"""A tier that takes no record: what has ended in a cache is final all the same, also when the index is lost.

The kill leaves the store as it stands, with the records of the change still queued, once the log has tried to write
them. Nothing older than the change may be there afterwards; a miss may. What fails in a durable bucket has changed
nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.cli.offline.fsck_command import _check
from kvfs.errors import NoSpace
from tests.support.one_store import CACHE, DURABLE, abandon, fill, look, start
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.log.segments import Segment
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.reclaimer import Reclaimer
from tiers.nvme.write_behind import NvmeJournal
from tiers.store.store import Store

OLD, MOVED, NEW = (bytes([number]) * 5_000 for number in (1, 2, 3))
SOURCE, TARGET = b"d/source", b"d/target"
OTHER: Final = b"e/target"


def put(store: Store, name: Name, data: bytes) -> None:
    draft = store.reserve(len(data), uid=0)
    fill(store, draft, data)
    store.seal(draft, name, Attributes())


async def reach_tier(store: Store) -> None:
    """Everything is on the device."""
    store.dram.checksums.wait(WAIT_S)
    journal = store.journal
    assert isinstance(journal, NvmeJournal)
    with trio.fail_after(WAIT_S):
        while journal.usage()[0]["write_behind"]:  # noqa: ASYNC110 it notifies nobody
            await trio.sleep(0.001)
        await journal.nvme.log.settle()


async def put_both(store: Store, bucket: bytes) -> None:
    """Put both objects into a new bucket, and onto the device."""
    store.create_bucket(bucket, uid=0, gid=0, durable=bucket == DURABLE)
    put(store, Name(bucket, SOURCE), MOVED)
    put(store, Name(bucket, TARGET), OLD)
    await reach_tier(store)


async def refuse_records(store: Store, patch: pytest.MonkeyPatch) -> None:
    """From now on there is no room for any record."""

    async def no_segment() -> Segment | None:
        return None

    journal = store.journal
    assert isinstance(journal, NvmeJournal)
    log = journal.nvme.log
    assert log.writer.segment is not None
    await log.writer.close_segment(log.writer.segment)
    log.writer.reclaim = None
    patch.setattr(log.pool, "take", no_segment)


async def until_refused(store: Store) -> None:
    """The log has tried to write all that is queued, or has written it."""
    with suppress(NoSpace):
        await store.journal.settle_names()


@asynccontextmanager
async def full_store(path: Path, patch: pytest.MonkeyPatch, bucket: bytes) -> AsyncIterator[Store]:
    """With two objects on the device and no room; killed at the end."""
    device = thread_device()
    store = await start(path, device)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            await put_both(store, bucket)
            await refuse_records(store, patch)
            yield store
            nursery.cancel_scope.cancel()
    finally:
        abandon(store)
        with trio.CancelScope(shield=True):
            await device.aclose()


def rename(store: Store) -> None:
    store.rename(Name(CACHE, SOURCE), Name(CACHE, TARGET))


def rename_away(store: Store) -> None:
    store.rename(Name(CACHE, SOURCE), Name(CACHE, b"free"))


def rename_directory(store: Store) -> None:
    store.rename(Name(CACHE, b"d/"), Name(CACHE, b"e/"))


def replace(store: Store) -> None:
    put(store, Name(CACHE, TARGET), NEW)


def replace_and_move(store: Store) -> None:
    put(store, Name(CACHE, SOURCE), NEW)
    store.rename(Name(CACHE, SOURCE), Name(CACHE, TARGET))


def remove(store: Store) -> None:
    store.remove(Name(CACHE, TARGET))


def retire(store: Store) -> None:
    store.retire(Name(CACHE, TARGET))


def move_twice(store: Store) -> None:
    rename_away(store)
    store.rename(Name(CACHE, b"free"), Name(CACHE, TARGET))


CHANGES: Final[dict[Callable[[Store], None], dict[bytes, bytes]]] = {
    rename: {TARGET: MOVED},
    rename_away: {b"free": MOVED, TARGET: OLD},
    rename_directory: {b"e/source": MOVED, OTHER: OLD},
    replace: {SOURCE: MOVED, TARGET: NEW},
    replace_and_move: {TARGET: NEW},
    remove: {SOURCE: MOVED},
    retire: {SOURCE: MOVED},
    move_twice: {TARGET: MOVED},
}
"""What each may show afterwards, or miss."""


@pytest.mark.parametrize("kept", ["nothing", "index"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_what_ends_in_a_cache_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store], None], kept: str
) -> None:
    async with full_store(tmp_path, monkeypatch, CACHE) as store:
        change(store)
        await until_refused(store)
    monkeypatch.undo()
    if kept == "nothing":
        shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "dram")
    found = {name.key: value for name, value in (await look(tmp_path)).items()}
    assert found.items() <= CHANGES[change].items(), "something older came back"
    if kept == "index" and change is not replace_and_move:
        wanted = {key: value for key, value in CHANGES[change].items() if value != NEW}
        assert found == wanted, "what NVMe has is lost, though the index knows its name"


@pytest.mark.parametrize("change", [rename, replace, remove], ids=lambda change: change.__name__)
async def test_what_reclaim_let_go_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store], None]
) -> None:
    """Reclaim has let objects go, and cannot free their segment: their records are still there."""
    async with full_store(tmp_path, monkeypatch, CACHE) as store:
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        journal.nvme.log.writer.reclaim = Reclaimer(journal.nvme).reclaim
        journal.nvme.pool.free.clear()
        put(store, Name(CACHE, b"another"), NEW)
        store.dram.checksums.wait(WAIT_S)
        with trio.fail_after(WAIT_S):
            while journal.nvme.log.trouble is None:  # noqa: ASYNC110 it notifies nobody
                await trio.sleep(0.001)
        assert not journal.nvme.objects, "nothing was evicted"
        change(store)
        await until_refused(store)
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "dram")
    found = {name.key: value for name, value in (await look(tmp_path)).items()}
    assert found.items() <= CHANGES[change].items(), "something older came back"


@asynccontextmanager
async def stopped_in_reclaim(path: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """A store whose reclaim has let two objects go, and ended before it freed their segment; stopped at the end."""

    async def never(*_: object) -> None:
        await trio.sleep_forever()

    device = thread_device()
    store = await start(path, device)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            await put_both(store, CACHE)
            nursery.cancel_scope.cancel()
        journal = store.journal
        assert isinstance(journal, NvmeJournal)
        nvme, writer = journal.nvme, journal.nvme.log.writer
        assert writer.segment is not None
        await writer.close_segment(writer.segment)
        patch.setattr(Reclaimer, "_rewrite", never)
        patch.setattr("kvfs.limits.RESERVED_SEGMENTS", len(nvme.pool.free) + 1)
        with trio.fail_after(WAIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Reclaimer(nvme).reclaim)
                while any(nvme.holds(id_of(store, name)) for name in (SOURCE, TARGET)):  # noqa: ASYNC110 as above
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
        patch.undo()
        yield store
        await store.finish()
        store.close(keep=True)
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


def id_of(store: Store, key: bytes) -> int:
    info = store.lookup(Name(CACHE, key))
    assert isinstance(info, ObjectInfo)
    return info.object_id


async def test_what_is_written_again_outlives_the_end_of_what_reclaim_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object in DRAM whose copy was let go is written a second time before its first segment is freed."""
    async with stopped_in_reclaim(tmp_path, monkeypatch) as store, trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        for key in (SOURCE, TARGET):
            await store.journal.persist(id_of(store, key))
        nursery.cancel_scope.cancel()
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "dram")
    found = {name.key: value for name, value in (await look(tmp_path)).items()}
    assert found == {SOURCE: MOVED, TARGET: OLD}


async def test_a_stop_in_a_reclaim_leaves_nothing_to_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stopped_in_reclaim(tmp_path, monkeypatch):
        pass
    found = await trio.to_thread.run_sync(_check, tmp_path, tmp_path / "nvme", False)
    assert not found["problems"]


async def test_the_log_takes_up_what_it_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there is room, all of it has its new name, whatever was said of its end meanwhile."""
    async with full_store(tmp_path, monkeypatch, CACHE) as store:
        move_twice(store)
        await store.journal.settle()
        monkeypatch.undo()
        await store.journal.settle_names()
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "dram")
    assert await look(tmp_path) == {Name(CACHE, TARGET): MOVED}


async def test_what_fails_in_a_durable_bucket_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full_store(tmp_path, monkeypatch, DURABLE) as store:
        store.rename(Name(DURABLE, SOURCE), Name(DURABLE, TARGET))
        with pytest.raises(NoSpace):
            await store.journal.settle()
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "dram")
    found = {name.key: value for name, value in (await look(tmp_path)).items()}
    assert found == {SOURCE: MOVED, TARGET: OLD}
