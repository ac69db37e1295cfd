"""Loads into paged caches on a device: many at once through few small buffers, every byte of the caches compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from kvfs._native.cuda.driver import Context
from kvfs.connectors.device import buffers, loads
from kvfs.connectors.device.loads import DeviceLoads
from kvfs.keys import key_at
from tests.support.caches_on_device import CacheShape
from tests.support.gpu_memory import DeviceMemory, HostMemory
from tests.support.seeds import SEED
from tests.support.waits import WAIT_S

SHAPE = CacheShape(layers=3, blocks=200, runs=4, run_bytes=512)
BLOCKS, RUN_BYTES, BLOCK_BYTES = SHAPE.blocks, SHAPE.run_bytes, SHAPE.block_bytes
CACHE_BYTES = SHAPE.cache_bytes


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Blocks:
    """Blocks that are stored, some of them shorter than they should be."""

    def __init__(self, draw: random.Random) -> None:
        self.stored = {key_of(n): draw.randbytes(BLOCK_BYTES) for n in range(100) if n % 7}
        self.stored[key_of(33)] = bytes(BLOCK_BYTES - 1)

    def read(self, keys: bytes, places: Any, left_s: float) -> list[int]:
        assert left_s > 0
        sizes = []
        for row in range(len(keys) // 16):
            data = self.stored.get(key_at(keys, row))
            if data is not None:
                start = places.offsets[row]
                places.bases[0][start : start + len(data)] = data
            sizes.append(-1 if data is None else len(data))
        return sizes


def loaded(before: bytes, blocks: Blocks, keys: list[int], block_ids: list[int]) -> tuple[bytes, list[int]]:
    after, sizes = bytearray(before), []
    for number, block in zip(keys, block_ids, strict=True):
        data = blocks.stored.get(key_of(number), b"")
        sizes.append(len(data) or -1)
        for place, start in enumerate(SHAPE.runs_of(block) if len(data) == BLOCK_BYTES else []):
            after[start : start + RUN_BYTES] = data[place * RUN_BYTES : (place + 1) * RUN_BYTES]
    return bytes(after), sizes


@pytest.mark.seeded
def test_many_loads_share_few_buffers(
    context: Context,
    on_device: Callable[[int], DeviceMemory],
    ends: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "CONNECTOR_STAGING_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(loads, "CONNECTOR_STAGING_BUFFERS", 2)
    draw, cache, compute = random.Random(f"{SEED}.loads"), on_device(SHAPE.memory_bytes), context.stream()
    blocks, device_loads = Blocks(draw), loads.DeviceLoads(context, BLOCK_BYTES, lambda: compute.handle)
    ends.callback(device_loads.close)
    for _ in range(5):
        expected = draw.randbytes(CACHE_BYTES)
        cache.write(expected)
        free, begun = draw.sample(range(BLOCKS), BLOCKS), []
        for _ in range(10):
            block_ids, free = free[:20], free[20:]
            keys = [draw.randrange(100) for _ in block_ids]
            joined = b"".join(map(key_of, keys))
            future = device_loads.submit(
                blocks.read, joined, SHAPE.places_of(cache, block_ids), timeout_s=WAIT_S
            )
            expected, sizes = loaded(expected, blocks, keys, block_ids)
            begun.append((future, sizes))
        for future, sizes in begun:
            assert future.result(WAIT_S) == sizes
        assert cache.read(CACHE_BYTES) == expected


def test_a_load_comes_after_what_the_engine_has_started(
    context: Context,
    on_device: Callable[[int], DeviceMemory],
    on_host: Callable[[int], HostMemory],
    ends: ExitStack,
) -> None:
    draw, cache, host = random.Random(5), on_device(SHAPE.memory_bytes), on_host(64 << 20)
    other, compute = on_device(64 << 20), context.stream()
    blocks, device_loads = Blocks(draw), DeviceLoads(context, BLOCK_BYTES, lambda: compute.handle)
    ends.callback(device_loads.close)
    keys, block_ids = list(range(1, 7)), [5, 9, 100, 101, 199, 0]
    old = draw.randbytes(CACHE_BYTES)
    host.pages[:CACHE_BYTES] = old
    for _ in range(10):
        for _ in range(4):
            compute.copy(other.address, host.address, 64 << 20)
        compute.copy(cache.address, host.address, CACHE_BYTES)
        joined = b"".join(map(key_of, keys))
        future = device_loads.submit(blocks.read, joined, SHAPE.places_of(cache, block_ids), timeout_s=WAIT_S)
        expected, sizes = loaded(old, blocks, keys, block_ids)
        assert future.result(WAIT_S) == sizes
        assert cache.read(CACHE_BYTES) == expected
