"""A kill after a removal is repeated beside the log, and before the log has its record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from kvfs.cli.offline.fsck_command import _check
from kvfs.system import crashpoints
from tests.support.one_store import DURABLE, Killed, life
from tests.support.stores import draft_of
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name
from tiers.store.store import Store

FIRST, SECOND, THIRD = (Name(DURABLE, key) for key in (b"first", b"second", b"third"))


def seal(store: Store, name: Name) -> None:
    store.seal(draft_of(store, name.key), name, Attributes())
    store.dram.checksums.wait(WAIT_S)


async def remove_first_within_a_sync(path: Path) -> None:
    """Kill the service once the removal is repeated: the log's next record would have been its own."""
    device, removed = thread_device(), False
    with pytest.MonkeyPatch.context() as patch:
        try:
            async with life(path, device) as store:
                store.create_bucket(DURABLE, uid=0, gid=0, durable=True)
                seal(store, FIRST)
                await store.journal.settle()

                def reach(name: str) -> None:
                    nonlocal removed
                    if name == "log.before_sync" and not removed:
                        store.remove(FIRST)
                        removed = True
                    elif name == "log.after_endings" and removed:
                        raise Killed

                patch.setattr(crashpoints, "reach", reach)
                seal(store, SECOND)
                await store.journal.settle()
        except* Killed:
            pass
    assert removed
    await device.aclose()


async def test_no_record_is_missed_that_never_was(fast_path: Path) -> None:
    path = fast_path / "data"
    await remove_first_within_a_sync(path)
    device = thread_device()
    async with life(path, device) as store:
        seal(store, THIRD)
        await store.journal.settle()
        assert {entry for entry, _ in store.list(DURABLE).entries} == {SECOND.key, THIRD.key}
    await device.aclose()
    shutil.rmtree(path / "index")
    found = await trio.to_thread.run_sync(_check, path, path / "nvme", False)
    assert [each for each in found["problems"] if each["cost"] == "durable"] == []
