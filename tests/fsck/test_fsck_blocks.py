"""What `kvfs fsck` says of durable objects that damage has cost, of blocks, which nothing but their records names, as
of names; and what it still says once a repair was killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvfs.cli.offline.fsck_command import Exit, _check
from kvfs.errors import NotFound
from kvfs.keys import block_name
from kvfs.limits import MIB
from kvfs.system import crashpoints
from tests.support.killed_kvfs import MODULE
from tests.support.nvme_stores import put, put_block, running
from tests.support.one_store import abandon
from tests.support.service import run_kvfs
from tests.support.stores import NAMESPACE
from tiers.device.threads import thread_device
from tiers.model.objects import Name
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

BLOCKS, NAMED = b"blocks", b"named"
DIGESTS: Final = [bytes([n + 1]) * 16 for n in range(60)]
NAMES: Final = [Name(NAMED, b"n%d" % n) for n in range(20)]
NVME: Final = 16 * MIB


async def fill(store: Store) -> None:
    store.create_bucket(BLOCKS, uid=0, gid=0, durable=True, namespace=NAMESPACE)
    store.create_bucket(NAMED, uid=0, gid=0, durable=True)
    for digest in DIGESTS:
        put_block(store, BLOCKS, digest, None, 40960)
    for name in NAMES:
        put(store, name, 40_000)
    await store.journal.settle()


async def live(path: Path, *, killed: bool) -> None:
    if not killed:
        async with running(path, nvme_bytes=NVME) as store:
            await fill(store)
        return
    device = thread_device()
    nvme = NvmeOptions(device, NVME, segment_bytes=MIB)
    store = await start_store(StoreOptions(path, dram_bytes=16 * MIB, backing="directory", nvme=nvme))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        await fill(store)
        nursery.cancel_scope.cancel()
    abandon(store)
    await device.aclose()


async def missing(path: Path) -> set[str]:
    """What a start without DRAM misses."""
    async with running(path, nvme_bytes=NVME) as store:
        gone = {
            f"{BLOCKS.decode()}/{block_name(d).decode()}" for d in DIGESTS if store.block_bucket(d) is None
        }
        for name in NAMES:
            try:
                store.lookup(name)
            except NotFound:
                gone.add(str(name))
        return gone


def both_headers(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(bytes(8192))


def cut(file: Path) -> None:
    os.truncate(file, MIB // 2 // 512 * 512)


def zero(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(200_000)
        opened.write(bytes(400_000))


def tail(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(600_000)
        opened.write(bytes(MIB - 600_000))


@pytest.fixture(scope="module")
def stores(module_fast_path: Path) -> dict[bool, Path]:
    """A store that was killed (True) and one that was stopped, both without what DRAM had."""
    found = {killed: module_fast_path / str(killed) for killed in (False, True)}
    for killed, path in found.items():
        trio.run(lambda path=path, killed=killed: live(path, killed=killed))
        shutil.rmtree(path / "dram", ignore_errors=True)
    return found


def damaged(store: Path, path: Path, damage: Callable[[Path], None], number: int) -> None:
    """Copy a store, and damage one of its segments."""
    shutil.copytree(store, path)
    files = [file for file in sorted((path / "nvme").glob("*.seg")) if file.stat().st_blocks > 64]
    damage(files[number])


def check(path: Path) -> dict[str, Any]:
    return _check(path, path / "nvme", True)


@pytest.mark.parametrize("number", [0, 2], ids=["blocks", "blocks-and-names"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("damage", [both_headers, cut, zero, tail])
def test_what_is_lost_of_durable_blocks_is_said(
    stores: dict[bool, Path], fast_path: Path, damage: Callable[[Path], None], killed: bool, number: int
) -> None:
    path = fast_path / "data"
    damaged(stores[killed], path, damage, number)
    found = check(path)
    gone = trio.run(lambda: missing(path))
    assert gone
    assert set(found["lost"]) <= gone
    assert found["exit_code"] == Exit.DURABLE_LOST
    if gone != set(found["lost"]):
        assert found["may_have_lost_more"]
        assert found["result"].endswith("durable objects may be lost, besides those that are named")
    again = check(path)
    assert (again["exit_code"], again["problems"]) == (Exit.CLEAN, [])


def test_a_whole_store_has_lost_nothing(stores: dict[bool, Path], fast_path: Path) -> None:
    for killed, store in stores.items():
        path = fast_path / str(killed)
        shutil.copytree(store, path)
        assert check(path)["exit_code"] == Exit.CLEAN


POINTS: Final = [
    *("log.before_write", "log.after_write", "log.before_sync", "log.after_sync", "log.after_endings"),
    *("reclaim.before_rewrite", "reclaim.after_rewrite"),
]


@pytest.mark.parametrize("point", POINTS)
def test_what_is_lost_is_said_after_a_killed_repair(
    stores: dict[bool, Path], fast_path: Path, point: str
) -> None:
    path = fast_path / "data"
    damaged(stores[False], path, zero, 2)
    before = _check(path, path / "nvme", False)
    assert before["lost"]
    done = run_kvfs(point, "fsck", "--data", str(path), module=MODULE)
    assert done.returncode == -signal.SIGKILL
    for repair in (False, True):
        found = _check(path, path / "nvme", repair)
        assert (found["exit_code"], found["lost"]) == (Exit.DURABLE_LOST, before["lost"])
        assert "durable objects are lost" in found["result"]
    assert check(path)["exit_code"] == Exit.CLEAN


def test_what_has_its_name_again_after_a_killed_repair_is_not_lost(
    stores: dict[bool, Path], fast_path: Path
) -> None:
    path = fast_path / "data"
    damaged(stores[False], path, zero, 2)
    done = run_kvfs("fsck", "--data", str(path), environment={crashpoints.VARIABLE: "log.after_sync:1"})
    assert done.returncode == -signal.SIGKILL

    async def put_again() -> None:
        async with running(path, nvme_bytes=NVME) as store:
            for digest in DIGESTS:
                if store.block_bucket(digest) is None:
                    put_block(store, BLOCKS, digest, None, 40960)
            for name in NAMES:
                put(store, name, 40_000)

    trio.run(put_again)
    found = check(path)
    assert (found["exit_code"], found["lost"]) == (Exit.DURABLE_LOST, [])
    assert check(path)["exit_code"] == Exit.CLEAN
