"""Objects of a bucket of large ones, at a store over DRAM and NVMe in this process.

Responsibility: a store that runs while a test has it, objects of drawn bytes written through drafts and read in place,
and the check that nobody holds anything in the end.

Concurrency: the test's trio task, beside the store's own.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvfs import limits
from kvfs.limits import MIB
from tests.support.nvme_stores import nvme_of, running
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.nvme.stored import counted_bytes
from tiers.store.store import Store

EXTENT = MIB // limits.EXTENT_SHARE_OF_SEGMENT
"""Of the segments of `running`."""
NAME = Name(b"b", b"file")


def info_of(store: Store, name: Name = NAME) -> ObjectInfo:
    found = store.lookup(name)
    assert isinstance(found, ObjectInfo)
    return found


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


async def write(store: Store, name: Name, data: bytes) -> ObjectInfo:
    draft = store.begin_large(name.bucket, uid=0)
    try:
        for start in range(0, len(data), 100_000):
            await draft.write(start, data[start : start + 100_000])
        await draft.flush()
        return store.seal_large(draft, name, Attributes(mode=0o640))
    finally:
        draft.close()


async def write_apart(store: Store, name: Name, data: bytes) -> ObjectInfo:
    """As `write`, with an extent of something else that goes at once between every two: so that reclaim moves it."""
    draft, other = store.begin_large(name.bucket, uid=0), store.begin_large(name.bucket, uid=0)
    for start in range(0, len(data), EXTENT):
        for each in draft, other:
            await each.write(start, data[start : start + EXTENT])
    await other.flush()
    store.abort_large(other)
    await draft.flush()
    info = store.seal_large(draft, name, Attributes(mode=0o640))
    draft.close()
    return info


async def read(store: Store, name: Name = NAME, step: int = 70_001) -> bytes:
    reader = store.open_large(info_of(store, name))
    try:
        parts = [await reader.read(start, step) for start in range(0, reader.size_bytes + step, step)]
        return b"".join(parts)
    finally:
        reader.close()


def all_is_given_back(store: Store) -> None:
    """Nobody holds anything, and nothing is promised."""
    nvme = nvme_of(store)
    assert nvme.promised_bytes == 0
    assert all(stored.holders == 0 for stored in nvme.objects.values())
    pieces = [(piece, s) for s in nvme.objects.values() for piece in s.pieces if piece is not None]
    kept = sum(counted_bytes(piece.record_bytes, 0) for piece, s in pieces if s.kept)
    live = sum(counted_bytes(piece.record_bytes, 0) for piece, _ in pieces)
    metas = sum(s.meta[1] for s in nvme.objects.values() if s.meta is not None)
    buckets = sum(place.place[1] for place in nvme.buckets._buckets.values() if place.place is not None)
    assert nvme.pool.kept_bytes == kept + metas + buckets
    assert nvme.pool.live_bytes == live + metas + buckets
    assert nvme.pool.kept_bytes == sum(segment.kept_bytes for segment in nvme.pool.segments)
    assert nvme.pool.live_bytes == sum(segment.live_bytes for segment in nvme.pool.segments)


@asynccontextmanager
async def started(
    path: Path, *, dram_bytes: int = 16 * MIB, nvme_bytes: int = 64 * MIB
) -> AsyncIterator[Store]:
    async with running(path, dram_bytes=dram_bytes, nvme_bytes=nvme_bytes) as store:
        if NAME.bucket not in [bucket.name for bucket in store.buckets()]:
            store.create_bucket(b"b", uid=0, gid=0, large=True)
        yield store
        await store.journal.settle_names()
        all_is_given_back(store)
