"""A file larger than DRAM takes, and power that goes while it is cut or written again after it was synced.

Every change of the device from then on is cut at, with several outcomes of what was not synced.
KVFS_TEST_SEED repeats a run.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.limits import MIB
from mounts.drafts.keeper import DraftKeeper
from mounts.kernel.backing import PlainBackings
from mounts.kernel.call_queue import NoCalls
from mounts.kernel.nodes import Node, NodeTable
from mounts.kernel.open_draft import OpenDraft
from tests.support.crash_power import forget
from tests.support.faulty_device import LossyDevice, PowerLost
from tests.support.one_store import DURABLE, look, start
from tests.support.seeds import SEED
from tiers.device.threads import thread_device
from tiers.model.objects import Name
from tiers.nvme.large_draft import LargeDraft

OUTCOMES: Final = 6
"""Of what was not synced at each cut."""
EXTENT: Final = MIB // 8
SYNCED: Final = b"".join(bytes([number]) * EXTENT for number in range(1, 6))
CUT_BYTES: Final = 2 * EXTENT + 1000
NAME: Final = Name(DURABLE, b"file")

Change = Callable[[DraftKeeper, Node, OpenDraft], Awaitable[None]]


async def _life(path: Path, device: LossyDevice, change: Change, cut_at: int) -> None:
    """Sync a file, and lose power at the cut_at-th change of the device from then on."""
    store = await start(path, device)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            store.create_bucket(DURABLE, uid=0, gid=0, durable=True, large=True)
            backings = PlainBackings()
            nodes = NodeTable(backings)
            keeper = DraftKeeper(store, nodes, backings, NoCalls())
            bucket = nodes.add(nodes.root, DURABLE, directory=True, ino=2)
            node = keeper.create(bucket, NAME.key, mode=0o644, uid=0, gid=0)
            opened = node.draft
            assert opened is not None
            await _draft(opened).write(0, SYNCED)
            await keeper.persistence.persist(node, opened)
            await store.journal.settle_names()
            device.cut_at(device.changes + cut_at)
            await change(keeper, node, opened)
            nursery.cancel_scope.cancel()
    finally:
        forget(store)
        with trio.CancelScope(shield=True):
            await device.inner.aclose()


def _draft(opened: OpenDraft) -> LargeDraft:
    assert isinstance(opened.draft, LargeDraft)
    return opened.draft


def found_after_cuts(path: Path, change: Change) -> set[bytes]:
    """What starts find, the index lost, whenever the power goes and whatever of it is on the device."""
    chance, found, cut_at, was_cut = random.Random(SEED), set(), 0, True
    life, left = path / "life", path / "left"
    while was_cut:
        cut_at += 1
        device, was_cut = LossyDevice(thread_device()), False
        try:
            trio.run(partial(_life, life, device, change, cut_at))
        except* PowerLost:
            was_cut = True
        shutil.rmtree(life / "dram")
        shutil.rmtree(life / "index")
        life.rename(left)
        for _ in range(OUTCOMES):
            shutil.copytree(left, life)
            device.power_cut(chance.randrange(1 << 30), chance.choice(["sectors", "writes"]))
            names = trio.run(look, life)
            assert names.keys() == {NAME}, f"cut at {cut_at}: {names.keys()}"
            found.add(names[NAME])
            shutil.rmtree(life)
        shutil.rmtree(left)
    assert cut_at > 4, "there was nothing to cut"
    return found


@pytest.mark.seeded
def test_a_file_is_cut_or_not(fast_path: Path) -> None:
    async def cut(keeper: DraftKeeper, node: Node, opened: OpenDraft) -> None:
        await keeper.truncate(node, opened, CUT_BYTES)

    found = found_after_cuts(fast_path, cut)
    assert found <= {SYNCED, SYNCED[:CUT_BYTES]}, [_described(data) for data in found]
    assert SYNCED[:CUT_BYTES] in found


@pytest.mark.seeded
def test_what_is_appended_after_a_sync_changes_nothing_of_it(fast_path: Path) -> None:
    async def append(keeper: DraftKeeper, node: Node, opened: OpenDraft) -> None:
        draft = _draft(opened)
        await draft.write(draft.size_bytes, b"more" * EXTENT)
        await draft.flush()

    assert found_after_cuts(fast_path, append) == {SYNCED}


@pytest.mark.seeded
@pytest.mark.parametrize("at", [0, EXTENT // 2])
def test_what_is_written_again_after_a_sync_is_old_or_new_by_the_extent(fast_path: Path, at: int) -> None:
    new = b"".join(bytes([number]) * EXTENT for number in range(101, 104))

    async def write(keeper: DraftKeeper, node: Node, opened: OpenDraft) -> None:
        draft = _draft(opened)
        await draft.write(at, new)
        await draft.flush()

    whole = SYNCED[:at] + new + SYNCED[at + len(new) :]
    for data in found_after_cuts(fast_path, write):
        assert len(data) == len(SYNCED)
        for first in range(0, len(data), EXTENT):
            part = slice(first, first + EXTENT)
            assert data[part] in (SYNCED[part], whole[part]), (
                f"extent {first // EXTENT} of {_described(data)}"
            )


def _described(data: bytes) -> str:
    """Runs of one byte."""
    runs, start = [], 0
    for at in range(1, len(data) + 1):
        if at == len(data) or data[at] != data[start]:
            runs.append(f"{data[start]}*{at - start}")
            start = at
    return " ".join(runs)
