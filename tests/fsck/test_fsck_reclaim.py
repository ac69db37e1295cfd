"""A stop in the middle of a reclaim, whose room nobody wants any more: nothing is left for a start to mend."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import trio

from kvfs.cli.offline.fsck_command import _check
from kvfs.limits import MIB
from kvfs.system import crashpoints
from tests.support.nvme_stores import DRAM, nvme_of, put, running
from tests.support.waits import WAIT_S
from tiers.model.objects import Name, ObjectInfo
from tiers.store.store import Store

NVME_BYTES = 2 * DRAM


def test_a_stop_amid_a_reclaim_leaves_nothing_to_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        there = trio.run(stop_amid_a_reclaim, tmp_path, patch)
    assert _check(tmp_path, tmp_path / "nvme", False)["problems"] == []
    shutil.rmtree(tmp_path / "index")
    assert trio.run(restart, tmp_path) <= there


async def stop_amid_a_reclaim(path: Path, patch: pytest.MonkeyPatch) -> set[bytes]:
    """Stop when a reclaim has evicted something, without what it was to make room for; return the names there are."""
    evicted = trio.Event()

    def reach(point: str) -> None:
        if point == "reclaim.before_rewrite":
            evicted.set()

    patch.setattr(crashpoints, "reach", reach)
    async with running(path, nvme_bytes=NVME_BYTES) as store:
        store.create_bucket(b"b", uid=0, gid=0)
        for number in itertools.count():
            name = Name(b"b", b"%d" % number)
            put(store, name, MIB // 3)
            if await reclaims_before(store, name, evicted):
                break
        store.remove(name)
        assert any(nvme_of(store).log.evicted.values()), "nothing was evicted, or the segment is free already"
        return names(store)


async def reclaims_before(store: Store, name: Name, evicted: trio.Event) -> bool:
    """Wait until NVMe has an object; return whether a segment is being reclaimed for it."""
    info = store.lookup(name)
    assert isinstance(info, ObjectInfo)
    with trio.fail_after(WAIT_S):
        while not (evicted.is_set() or store.journal.holds(info.object_id)):
            await trio.lowlevel.checkpoint()
    return evicted.is_set()


async def restart(path: Path) -> set[bytes]:
    async with running(path, nvme_bytes=NVME_BYTES) as store:
        return names(store)


def names(store: Store) -> set[bytes]:
    return {entry for entry, _ in store.list(b"b", limit=1000).entries}
