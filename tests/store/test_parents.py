"""Chains of blocks through several buckets of one namespace: a parent is a prefix hash, wherever its block lies.

What is durable or pinned goes with no other block: neither with its parent nor with the files of its unit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs._native.shared.table import TIER_NVME
from kvfs.cli.offline.fsck_command import Exit, _check
from kvfs.errors import NotFound
from kvfs.keys import block_name
from kvfs.limits import MIB
from tests.support.crash_load import audit
from tests.support.killed_stores import crash
from tests.support.nvme_stores import (
    data_of,
    flip,
    nvme_of,
    put,
    put_block,
    read,
    running,
    until_written,
)
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S
from tiers.model.objects import Name
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

ONE, TWO, KEPT, FILES = b"one", b"two", b"kept", b"files"
CHAIN: Final = [bytes([number]) * 16 for number in range(1, 5)]
WHERE: Final = [ONE, TWO, ONE, TWO]
"""The bucket of each block of the chain."""
ALL: Final = [True] * 4
NVME: Final = 16 * MIB


def open_caches(path: Path) -> Store:
    """A store without NVMe, with both buckets."""
    store = open_store(StoreOptions(path, dram_bytes=16 * MIB, max_slots=64, backing="directory"))
    if not list(store.buckets()):
        make_caches(store)
    return store


def make_caches(store: Store) -> None:
    for name in (ONE, TWO):
        store.create_bucket(name, uid=0, gid=0, namespace=NAMESPACE)


def make_others(store: Store) -> None:
    store.create_bucket(KEPT, uid=0, gid=0, namespace=NAMESPACE, durable=True)
    store.create_bucket(FILES, uid=0, gid=0)


def put_chain(store: Store, where: Sequence[bytes] = WHERE) -> None:
    for bucket, digest, parent in zip(where, CHAIN, [None, *CHAIN], strict=False):
        put_block(store, bucket, digest, parent, 4096)


async def demote(store: Store, names: Sequence[Name]) -> None:
    """Leave the copies on NVMe alone."""
    await until_written(store, len(names))
    await store.journal.settle()
    store.evict(names=names)
    assert all(entry.tiers == TIER_NVME for _, entry in store.table.items())


def chain_names(where: Sequence[bytes]) -> list[Name]:
    return [Name(bucket, block_name(digest)) for bucket, digest in zip(where, CHAIN, strict=True)]


def there(store: Store) -> list[bool]:
    return [store.block_bucket(digest) is not None for digest in CHAIN]


async def read_block(store: Store, digest: bytes) -> bytes:
    info = await store.load(store.lookup_block(digest), uid=0)
    descriptor = store.open_read(info, uid=0)
    try:
        return os.pread(descriptor, info.size_bytes + 1, 0)
    finally:
        os.close(descriptor)


# --- the order of eviction ----------------------------------------------------------------------------------
def leave(store: Store) -> list[int]:
    """How many blocks of the chain are there, from its beginning, as they leave one by one."""
    left = []
    for _ in CHAIN:
        store.evict(1)
        left.append(store.match(b"".join(CHAIN)))
        assert sum(there(store)) == left[-1], "one left from the middle"
    return left


def test_no_block_leaves_before_one_that_follows_it_in_another_bucket(tmp_path: Path) -> None:
    with open_caches(tmp_path) as store:
        put_chain(store)
        held = store.open_read(store.lookup_block(CHAIN[2]), uid=0)
        store.evict(1 << 30)
        assert there(store) == [True, True, True, False]
        os.close(held)
        put_chain(store)
        assert leave(store) == [3, 2, 1, 0]


@pytest.mark.parametrize("killed", [False, True])
def test_the_order_goes_on_after_a_restart(tmp_path: Path, killed: bool) -> None:
    with open_caches(tmp_path) as store:
        put_chain(store)
        crash(store) if killed else store.close(keep=True)
        with open_caches(tmp_path) as again:
            assert there(again) == ALL
            assert leave(again) == [3, 2, 1, 0]


def test_a_bucket_that_is_removed_leaves_what_follows_its_blocks(tmp_path: Path) -> None:
    with open_caches(tmp_path) as store:
        put_chain(store, [ONE, TWO, TWO, TWO])
        store.remove_block(CHAIN[0])
        store.remove_bucket(ONE)
        assert there(store) == [False, True, True, True]
        assert store.match(b"".join(CHAIN[1:])) == 3
        put_block(store, TWO, CHAIN[0], None, 4096)
        assert leave(store) == [3, 2, 1, 0]


# --- below DRAM ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lost", ["dram", "both"])
async def test_a_chain_through_buckets_is_whole_after_a_restart_and_a_check(
    tmp_path: Path, lost: str
) -> None:
    """And goes as one where its first block is damaged: what follows it is of no use without it."""
    async with running(tmp_path, nvme_bytes=NVME) as store:
        make_caches(store)
        put_chain(store)
        await until_written(store, 4)
    for part in ("dram", "index") if lost == "both" else ("dram",):
        shutil.rmtree(tmp_path / part)
    found = await trio.to_thread.run_sync(_check, tmp_path, tmp_path / "nvme", True)
    assert lost == "both" or found["exit_code"] == Exit.CLEAN, found["problems"]
    async with running(tmp_path, nvme_bytes=NVME) as store:
        assert store.match(b"".join(CHAIN)) == 4
        assert [store.block_bucket(digest) for digest in CHAIN] == WHERE
        flip(tmp_path / "nvme", CHAIN[0] * 256)
        with pytest.raises(NotFound):
            await read_block(store, CHAIN[0])
        assert there(store) == [False] * 4
        assert not audit(store)


async def damage(store: Store, path: Path) -> None:
    """Have the first block of the chain read from a damaged place."""
    flip(path / "nvme", CHAIN[0] * 256)
    with pytest.raises(NotFound):
        await read_block(store, CHAIN[0])


async def reclaim(store: Store, path: Path) -> None:
    """Write until NVMe has evicted the first block of the chain."""
    for number in range(3 * NVME // MIB):
        info = put(store, Name(FILES, b"%d" % number), MIB // 2)
        with trio.fail_after(WAIT_S):
            while not store.journal.holds(info.object_id):
                await nvme_of(store).log.queue.wait_popped()
        store.evict(names=[Name(FILES, b"%d" % number)])
        if store.block_bucket(CHAIN[0]) is None:
            return
    raise AssertionError("the first block is there still")


@pytest.mark.parametrize("kept", ["durable", "pinned"])
@pytest.mark.parametrize("lose", [damage, reclaim])
async def test_a_block_that_is_kept_does_not_go_with_its_parent(
    tmp_path: Path, lose: Callable[[Store, Path], object], kept: str
) -> None:
    where = [ONE, TWO, KEPT if kept == "durable" else TWO, TWO]
    async with running(tmp_path, nvme_bytes=NVME) as store:
        make_caches(store)
        make_others(store)
        put_chain(store, where)
        if kept == "pinned":
            await until_written(store, 4)
            store.set_attributes(chain_names(where)[2], pinned=True)
        await demote(store, chain_names(where))
        await lose(store, tmp_path)
        assert there(store)[0] is False
        assert await read_block(store, CHAIN[2]) == CHAIN[2] * 256
        assert not audit(store)
    for part in ("dram", "index"):
        shutil.rmtree(tmp_path / part)
    async with running(tmp_path, nvme_bytes=NVME) as store:
        assert await read_block(store, CHAIN[2]) == CHAIN[2] * 256


@pytest.mark.parametrize("kept", ["durable", "pinned"])
async def test_a_file_that_is_kept_does_not_go_with_its_unit(tmp_path: Path, kept: str) -> None:
    bucket = b"d" if kept == "durable" else FILES
    lost, stays = (Name(bucket, b"%032x/%d" % (7, number)) for number in range(2))
    async with running(tmp_path, nvme_bytes=NVME) as store:
        store.create_bucket(bucket, uid=0, gid=0, durable=kept == "durable")
        for name in (lost, stays):
            put(store, name, 50_000)
        if kept == "pinned":
            store.set_attributes(stays, pinned=True)
        await demote(store, [lost, stays])
        flip(tmp_path / "nvme", data_of(lost, 50_000))
        with pytest.raises(NotFound):
            await read(store, lost)
        assert await read(store, stays) == data_of(stays, 50_000)
        assert not audit(store)
