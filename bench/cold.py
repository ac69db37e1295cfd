"""Figures of the cold tier: objects read back into DRAM, against boto3's own GET of the same bytes.

Responsibility: one function for each size. A gateway on loopback is the bucket elsewhere; a store in this process
has its objects there only. One side is the store's promotion, verified and sealed; the other is `get_object` and
`read` in a worker thread, into memory of its own, verifying nothing. Single operations, in turns.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import trio

from bench import s3
from bench.measure import Result
from kvfs.config.settings import ColdSettings
from kvfs.limits import MIB
from tiers.cold.bucket import ColdOptions, S3Bucket
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

OBJECTS = 8
BUCKET = b"bench"


def fetch_1m(seconds: float) -> Result:
    """Measure the microseconds of one promotion of 1 MiB."""
    return _measure("cold.fetch_1m", MIB, seconds)


def fetch_16m(seconds: float) -> Result:
    """Measure the microseconds of one promotion of 16 MiB."""
    return _measure("cold.fetch_16m", 16 * MIB, seconds)


def _measure(name: str, size_bytes: int, seconds: float) -> Result:
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-bench-cold-") as folder,
        s3.gateway(Path(folder), {}) as url,
    ):
        settings = ColdSettings.model_validate(
            {"bucket": s3.BUCKET, "endpoint": url, "access_key": s3.ACCESS, "secret_key": s3.SECRET}
        )
        value, baseline = trio.run(_in_turns, Path(folder), S3Bucket(settings), size_bytes, seconds)
    return Result(name, value, "us", baseline, baseline / value)


async def _in_turns(folder: Path, bucket: S3Bucket, size_bytes: int, seconds: float) -> tuple[float, float]:
    options = ColdOptions(bucket, capacity_bytes=1 << 40, admits_all=True)
    store = open_store(StoreOptions(folder / "store", dram_bytes=4 * OBJECTS * size_bytes, cold=options))
    store.create_bucket(BUCKET, uid=0, gid=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        names = [_put(store, number, size_bytes) for number in range(OBJECTS)]
        while store.usage()["tiers"][-1]["uploads"] < OBJECTS:  # noqa: ASYNC110 its counters notify nobody
            await trio.sleep(0.01)
        values: list[float] = []
        others: list[float] = []
        turn = 0
        deadline = trio.current_time() + seconds
        while trio.current_time() < deadline or turn < 2 * OBJECTS:
            name = names[turn % OBJECTS]
            for ours in (True, False) if turn % 2 else (False, True):
                (values if ours else others).append(await (_promote if ours else _get)(store, bucket, name))
            turn += 1
        nursery.cancel_scope.cancel()
    store.close()
    return median(values), median(others)


def _put(store: Store, number: int, size_bytes: int) -> Name:
    draft = store.reserve(size_bytes, uid=0)
    descriptor = store.open_draft(draft)
    try:
        os.pwrite(descriptor, os.urandom(size_bytes), 0)
    finally:
        os.close(descriptor)
    name = Name(BUCKET, b"%d" % number)
    store.seal(draft, name, Attributes())
    return name


async def _promote(store: Store, bucket: S3Bucket, name: Name) -> float:
    info = _evicted(store, name)
    began = perf_counter_ns()
    await store.load(info, uid=0)
    return (perf_counter_ns() - began) / 1000


async def _get(store: Store, bucket: S3Bucket, name: Name) -> float:
    remote = str(store.cold_name(_evicted(store, name).key.digest))
    began = perf_counter_ns()
    await trio.to_thread.run_sync(partial(bucket.read, remote, 1 << 40))
    return (perf_counter_ns() - began) / 1000


def _evicted(store: Store, name: Name) -> ObjectInfo:
    """Evict an object from all tiers but the bucket; return it."""
    store.evict(names=[name])
    info = store.lookup(name)
    assert isinstance(info, ObjectInfo)
    assert info.tier == "cold"
    return info
