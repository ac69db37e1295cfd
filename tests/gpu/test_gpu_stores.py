"""Stores out of paged caches on a device, which is written again at once: every byte of what comes out compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from kvfs._native.cuda.driver import Context
from kvfs.connectors.device import buffers, stores
from kvfs.connectors.device.stores import DeviceStores
from tests.support.caches_on_device import CacheShape
from tests.support.gpu_memory import DeviceMemory, HostMemory
from tests.support.seeds import SEED

SHAPE = CacheShape(layers=3, blocks=200, runs=4, run_bytes=4096)
BLOCKS, RUN_BYTES, BLOCK_BYTES = SHAPE.blocks, SHAPE.run_bytes, SHAPE.block_bytes
CACHE_BYTES = SHAPE.cache_bytes

MakeMemory = Callable[[int], DeviceMemory]
MakeHost = Callable[[int], HostMemory]


def blocks_of(content: bytes, block_ids: list[int]) -> list[bytes]:
    return [
        b"".join(content[start : start + RUN_BYTES] for start in SHAPE.runs_of(block)) for block in block_ids
    ]


@pytest.mark.seeded
def test_a_cache_that_each_step_writes_anew_comes_out_as_it_was(
    context: Context,
    on_device: MakeMemory,
    on_host: MakeHost,
    ends: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of several parts, whose memory is given back some steps later, in another order."""
    monkeypatch.setattr(buffers, "CONNECTOR_STAGING_BYTES", 16 * BLOCK_BYTES)
    monkeypatch.setattr(stores, "CONNECTOR_STAGING_BUFFERS", 2)
    draw, cache, compute = random.Random(f"{SEED}.stores"), on_device(SHAPE.memory_bytes), context.stream()
    device_stores = stores.DeviceStores(context, BLOCK_BYTES, lambda: compute.handle)
    ends.callback(device_stores.close)
    steps = []
    for _ in range(4):
        steps.append((on_host(SHAPE.memory_bytes), draw.randbytes(CACHE_BYTES)))
        steps[-1][0].pages[:CACHE_BYTES] = steps[-1][1]
    ends.callback(compute.synchronize)
    under_way: list[tuple[Any, list[bytes]]] = []
    for _ in range(8):
        host, content = draw.choice(steps)
        compute.copy(cache.address, host.address, CACHE_BYTES)
        free = draw.sample(range(BLOCKS), BLOCKS)
        for _ in range(3):
            count = draw.randrange(1, 25)
            block_ids, free = free[:count], free[count:]
            outgoing = device_stores.copy(SHAPE.places_of(cache, block_ids))
            under_way.append((outgoing, blocks_of(content, block_ids)))
        while len(under_way) > 4:
            outgoing, expected = under_way.pop(draw.randrange(len(under_way)))
            assert [bytes(row) for row in outgoing.wait()] == expected
            outgoing.give_back()
    for outgoing, expected in under_way:
        assert [bytes(row) for row in outgoing.wait()] == expected


def test_stores_come_after_what_the_engine_has_started_and_before_what_it_starts_next(
    context: Context, on_device: MakeMemory, on_host: MakeHost, ends: ExitStack
) -> None:
    draw, cache, other = random.Random(7), on_device(SHAPE.memory_bytes), on_device(64 << 20)
    old, new, long = on_host(SHAPE.memory_bytes), on_host(SHAPE.memory_bytes), on_host(64 << 20)
    content = draw.randbytes(CACHE_BYTES)
    old.pages[:CACHE_BYTES] = content
    new.pages[:CACHE_BYTES] = draw.randbytes(CACHE_BYTES)
    compute, block_ids = context.stream(), draw.sample(range(BLOCKS), BLOCKS)
    device_stores = DeviceStores(context, BLOCK_BYTES, lambda: compute.handle)
    ends.callback(device_stores.close)
    ends.callback(compute.synchronize)
    expected = blocks_of(content, block_ids)
    for _ in range(3):
        for _ in range(2):
            compute.copy(other.address, long.address, 64 << 20)
        compute.copy(cache.address, old.address, CACHE_BYTES)
        outgoing = device_stores.copy(SHAPE.places_of(cache, block_ids))
        for start in range(
            0, CACHE_BYTES, RUN_BYTES * BLOCKS
        ):  # a part of each run, sooner than all are copied
            compute.copy(cache.address + start, new.address + start, RUN_BYTES)
        compute.copy(cache.address, new.address, CACHE_BYTES)
        assert [bytes(row) for row in outgoing.wait()] == expected
        compute.synchronize()
        assert cache.read(CACHE_BYTES) == new.pages[:CACHE_BYTES]
        outgoing.give_back()
