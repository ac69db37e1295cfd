"""A rename is one step for the next start, whatever instant the service is killed at.

The kill is an exception at a crash point, of whichever task reaches it; the store is then left as it stands.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.cli.offline.fsck_command import Exit, _check
from kvfs.index.rows import RETIRED
from kvfs.system import crashpoints
from mounts.kernel.backing import PlainBackings
from mounts.kernel.call_queue import NoCalls
from mounts.tree import name_ops
from mounts.tree.view import View
from tests.support.one_store import CACHE, DURABLE, Killed, abandon, fill, life, look, start, sync_draft
from tests.support.seeds import SEED
from tests.support.stores import draft_of
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Draft, Name
from tiers.store.store import Store

KILLS: Final = int(os.environ.get("KVFS_TEST_KILLS", "5"))
SIZE: Final = 5_000
BEFORE, SYNCED, SEALED = (bytes([number]) * SIZE for number in (1, 2, 3))


async def killed_life(path: Path, change: Callable[[Store], Awaitable[None]], instant: int) -> bool:
    """Do `change`, and kill at the instant-th crash point from then on; whether there were as many."""
    reached, armed, ended = 0, False, False

    def reach(name: str) -> None:
        nonlocal reached
        reached += armed
        if reached == instant:
            raise Killed

    device = thread_device()
    store = await start(path, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crashpoints, "reach", reach)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.run)
                armed = True
                await change(store)
                await store.journal.settle()
                nursery.cancel_scope.cancel()
                ended = True
        except* Killed:
            pass
        finally:
            armed = False
            abandon(store)
            with trio.CancelScope(shield=True):
                await device.aclose()
    return not ended


async def prepare(path: Path, bucket: bytes, target: Name) -> None:
    """A store with an object in the way of the rename, on the device."""
    device = thread_device()
    store = await start(path, device)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        store.create_bucket(bucket, uid=0, gid=0, durable=bucket == DURABLE)
        store.seal(draft_of(store, BEFORE), target, Attributes())
        store.dram.checksums.wait(WAIT_S)
        nursery.cancel_scope.cancel()
    await store.finish()
    store.close(keep=False)
    await device.aclose()


@pytest.mark.seeded
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("bucket", [CACHE, DURABLE])
async def test_a_synced_file_has_one_name(fast_path: Path, bucket: bytes, large: bool) -> None:
    chance = random.Random(f"{SEED}/{bucket!r}/{large}")
    source, target = Name(bucket, b"source"), Name(bucket, b"target")
    original, path = fast_path / "original", fast_path / "data"
    await prepare(original, bucket, target)
    kills = 0
    for number in range(KILLS):
        changed, dram = chance.random() < 0.5, chance.random() < 0.5
        instant = chance.randrange(4, 14)
        file = SyncedFile(source, target, SEALED if changed else SYNCED)
        shutil.copytree(original, path)
        kills += await killed_life(path, file.change_large if large else file.change, instant)
        if not dram:
            shutil.rmtree(path / "dram")
        found = await look(path)
        where = f"{number}: killed at {instant}, changed {changed}, DRAM kept {dram}"
        where += f": { {str(name): value[0] for name, value in found.items()} }"
        assert await look(path) == found, f"another start finds something else, {where}"
        assert not file.synced or found in file.allowed(), where
        shutil.rmtree(path)
    assert kills


@dataclass
class SyncedFile:
    """A file that is synced, written again, sealed and renamed over another one."""

    source: Name
    target: Name
    last: bytes
    synced: bool = False

    def allowed(self) -> list[dict[Name, bytes]]:
        """What a start may show once the sync was answered."""
        before = [{self.source: value, self.target: BEFORE} for value in (SYNCED, self.last)]
        return [*before, {self.target: SYNCED}, {self.target: self.last}]

    async def change(self, store: Store) -> None:
        draft = store.reserve(SIZE, uid=0)
        fill(store, draft, SYNCED)
        snapshot = await sync_draft(store, draft, self.source)
        self.synced = True
        fill(store, draft, self.last)
        store.seal(draft, self.source, Attributes(), snapshot=snapshot)
        store.rename(self.source, self.target)

    async def change_large(self, store: Store) -> None:
        draft = store.begin_large(self.source.bucket, uid=0)
        try:
            await draft.write(0, SYNCED)
            await store.persist_large(draft, self.source, Attributes())
            self.synced = True
            await draft.write(0, self.last)
            await draft.flush()
            store.seal_large(draft, self.source, Attributes())
            store.rename(self.source, self.target)
        finally:
            draft.close()


# --- a directory --------------------------------------------------------------------------------------------
FILES: Final = 40
OLD, NEW = b"old/", b"new/"


async def _fill_directory(path: Path, bucket: bytes) -> None:
    """A directory whose names take more than one write of the log, and half of whose objects were replaced."""
    device = thread_device()
    store = await start(path, device)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        store.create_bucket(bucket, uid=0, gid=0, durable=bucket == DURABLE)
        store.make_directory(Name(bucket, OLD), Attributes())
        store.make_directory(Name(bucket, NEW), Attributes())
        for number in [*range(FILES), *range(0, FILES, 2)]:
            name = Name(bucket, OLD + b"%02d" % number)
            attributes = Attributes(user_metadata=b"m" * 60_000)
            store.seal(
                draft_of(store, b"again" if store.names.get(bucket, name.key) else b"first"), name, attributes
            )
        store.dram.checksums.wait(WAIT_S)
        nursery.cancel_scope.cancel()
    await store.finish()
    store.close(keep=False)
    await device.aclose()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("bucket", [CACHE, DURABLE])
async def test_a_directory_has_one_name_without_the_index(
    fast_path: Path, bucket: bytes, checked: bool
) -> None:
    """`checked`: fsck comes before the next start."""
    original, path = fast_path / "original", fast_path / "data"
    await _fill_directory(original, bucket)

    def content(key: bytes) -> dict[Name, bytes]:
        values = ((number, b"first" if number % 2 else b"again") for number in range(FILES))
        return {Name(bucket, key + b"%02d" % number): value for number, value in values}

    async def change(store: Store) -> None:
        store.rename(Name(bucket, OLD), Name(bucket, NEW))
        await store.journal.settle_names()

    instant, places = 1, set[bool]()
    while True:
        shutil.copytree(original, path)
        killed = await killed_life(path, change, instant)
        shutil.rmtree(path / "index")
        shutil.rmtree(path / "dram", ignore_errors=True)
        if checked:
            for expected in ((Exit.CLEAN, Exit.REPAIRED), (Exit.CLEAN,)):
                report = await trio.to_thread.run_sync(_check, path, path / "nvme", True)
                assert report["exit_code"] in expected, f"killed at {instant}: {report}"
        for _ in range(2):
            found = await look(path)
            assert found in (content(OLD), content(NEW)), f"killed at {instant}: {sorted(map(str, found))}"
        places.add(found == content(NEW))
        shutil.rmtree(path)
        if not killed:
            break
        instant += 5
    assert places == {True, False}
    assert instant > 4, "it was written at once"


# --- a rename on the mount -----------------------------------------------------------------------------------
async def _renamed_on_the_mount(path: Path, bucket: bytes, *, settled: bool) -> None:
    """A life in which a file that was closed, and is not published yet, is renamed over another one."""
    device = thread_device()
    try:
        async with life(path, device) as store:
            backings = PlainBackings()
            backings.invalidate_entry = lambda parent, name: None  # type: ignore[method-assign]
            backings.invalidate_attr = lambda nodeid: None  # type: ignore[method-assign]
            view = View(store, backings, NoCalls())
            parent = view.need(view.nodes.root, bucket)
            node = view.drafts.create(parent, b"source", mode=0o644, uid=0, gid=0)
            opened = node.draft
            assert opened is not None
            assert isinstance(opened.draft, Draft)
            fill(store, opened.draft, SEALED)
            await view.drafts.persistence.settle_change(node, opened)
            name_ops.rename(view, parent, b"source", parent, b"target", 0)
            if settled:
                await store.journal.settle_names()
                view.drafts.persistence.retire_settled()
                row = store.names.get(bucket, b"target")
                assert row is not None
                assert row.flags & RETIRED, (
                    "what was replaced is still shown by those who look it up themselves"
                )
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


@pytest.mark.parametrize("index", ["index", "no index"])
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("bucket", [CACHE, DURABLE])
async def test_a_file_that_another_is_renamed_over_stays_until_that_is_durable(
    fast_path: Path, bucket: bytes, settled: bool, index: str
) -> None:
    path, source, target = fast_path / "data", Name(bucket, b"source"), Name(bucket, b"target")
    await prepare(path, bucket, target)
    await _renamed_on_the_mount(path, bucket, settled=settled)
    shutil.rmtree(path / "dram")
    if index == "no index":
        shutil.rmtree(path / "index")
    found = await look(path)
    if bucket == DURABLE:
        outcomes = [{target: SEALED}] if settled else [{target: SEALED}, {source: SEALED, target: BEFORE}]
        assert found in outcomes, {str(name): value[0] for name, value in found.items()}
    else:
        assert found in ([{}] if settled else [{}, {target: BEFORE}]), "something older came back"
