"""A store over DRAM and NVMe in this process, without any door, and the calls that tests of it make most.

Responsibility: a store that runs while a test has it, objects and blocks whose bytes follow from their names, the wait
until they are written behind, and a flipped byte of one in its segments.

Concurrency: the test's trio task, beside the store's own.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from kvfs import limits
from kvfs.limits import MIB
from tests.support.waits import WAIT_S
from tiers.cold.bucket import ColdOptions
from tiers.device.device import Device
from tiers.device.threads import thread_device
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.tier import NvmeTier
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

DRAM = 16 * MIB


@asynccontextmanager
async def running(
    path: Path,
    *,
    dram_bytes: int = DRAM,
    max_slots: int = limits.DEFAULT_SLOTS,
    nvme_bytes: int = 64 * MIB,
    keep: bool = False,
    cold: ColdOptions | None = None,
    device: Device | None = None,
) -> AsyncIterator[Store]:
    device = device or thread_device()
    store = await start_store(
        StoreOptions(
            path,
            dram_bytes=dram_bytes,
            max_slots=max_slots,
            backing="directory",
            cold=cold,
            nvme=NvmeOptions(device, nvme_bytes, segment_bytes=MIB),
        )
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run)
            yield store
            nursery.cancel_scope.cancel()
        await store.finish()
    finally:
        store.close(keep=keep)
        with trio.CancelScope(shield=True):
            await device.aclose()


def data_of(name: Name, size: int) -> bytes:
    return random.Random(str(name)).randbytes(size)


def put(store: Store, name: Name, size: int, **attributes: int) -> ObjectInfo:
    draft = store.reserve(size, uid=0)
    fill(store, draft, data_of(name, size))
    return store.seal(draft, name, Attributes(**attributes))  # type: ignore[arg-type]


def fill(store: Store, draft: object, data: bytes) -> None:
    descriptor = store.open_draft(draft)  # type: ignore[arg-type]
    os.pwrite(descriptor, data, 0)
    os.close(descriptor)


def put_block(store: Store, bucket: bytes, digest: bytes, parent: bytes | None, size: int) -> ObjectInfo:
    draft = store.reserve(size, uid=0)
    fill(store, draft, digest * (size // 16))
    return store.seal_block(draft, bucket, digest, parent=parent, uid=0)


async def read(store: Store, name: Name) -> bytes:
    info = store.lookup(name)
    assert isinstance(info, ObjectInfo)
    if info.target:
        return info.target
    info = await store.load(info, uid=0)
    descriptor = store.open_read(info, uid=0)
    try:
        return os.pread(descriptor, info.size_bytes + 1, 0)
    finally:
        os.close(descriptor)


def nvme_of(store: Store) -> NvmeTier:
    assert isinstance(store.journal, NvmeJournal)
    return store.journal.nvme


async def until_written(store: Store, count: int) -> None:
    """Until so many objects have a copy on NVMe."""
    with trio.fail_after(WAIT_S):
        while sum(entry.tiers >> 2 & 1 for _, entry in store.table.items()) < count:
            await nvme_of(store).log.queue.wait_popped()


def flip(directory: Path, content: bytes) -> None:
    """Change one byte of `content` wherever a segment holds it."""
    for segment in directory.glob("*.seg"):
        data = segment.read_bytes()
        at = data.find(content[:64])
        if at >= 0:
            with segment.open("r+b") as file:
                file.seek(at + 40)
                file.write(bytes([data[at + 40] ^ 1]))
