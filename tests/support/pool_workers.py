"""A worker of an engine that loads blocks into a paged cache on a device, with a place in the device's pool."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self

import kvfs
from kvfs._native.cuda.copies import DevicePlaces
from kvfs._native.cuda.driver import Context, open_driver
from kvfs.client.device_pool import DevicePool, Earlier
from kvfs.connectors.device.loads import DeviceLoads
from tests.support.gpu_memory import DeviceMemory
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually

BLOCK: Final = 8192
COUNT: Final = 6
CACHE_BYTES: Final = 2 << 20


def payload(key: bytes) -> bytes:
    return key * (BLOCK // 16)


class Cache(DeviceMemory):
    """A cache of pages, each a block of two runs that lie apart."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, context.device.create(CACHE_BYTES))
        self.write(bytes(CACHE_BYTES))

    def places(self) -> DevicePlaces:
        starts = [self.address + 2 * BLOCK * block for block in range(COUNT)]
        return DevicePlaces(starts, [0, BLOCK], BLOCK // 2, [(self.address, CACHE_BYTES)])

    def blocks(self) -> list[bytes]:
        pages = self.read(2 * BLOCK * COUNT)
        runs = [pages[at : at + BLOCK // 2] for at in range(0, len(pages), BLOCK)]
        return [first + second for first, second in zip(runs[::2], runs[1::2], strict=True)]


class Worker:
    """See the module's first line."""

    def __init__(self, address: Path, context: Context) -> None:
        self._context = context
        self.client = kvfs.connect(address, timeout_s=WAIT_S)
        self.blocks = self.client.blocks(NAMESPACE)
        compute = context.stream()
        self.loads = DeviceLoads(context, BLOCK, lambda: compute.handle)
        self.pooled = self.loads.pooled(self._attach)
        self.read: list[bytes] = []
        """Keys of parts that were read from below."""

    def _attach(self, context: Context, timeout_s: float, earlier: Earlier | None) -> DevicePool | None:
        return self.blocks.device_pool(open_driver(), context, timeout_s=timeout_s, earlier=earlier)

    def put(self) -> list[bytes]:
        """Store as many blocks as a cache has."""
        keys = [b"\1" + os.urandom(15) for _ in range(COUNT)]
        assert all(self.blocks.put(keys, [payload(key) for key in keys]))
        return keys

    def _read(self, keys: bytes, places: Any, left_s: float) -> list[int]:
        self.read.append(keys)
        return self.blocks.get_into(keys, places, timeout_s=left_s)

    def submit(self, keys: list[bytes], cache: Cache) -> Future[list[int]]:
        return self.loads.submit(
            self._read, b"".join(keys), cache.places(), timeout_s=WAIT_S, pooled=self.pooled
        )

    def load(self, keys: list[bytes]) -> int:
        """Load blocks, and compare their bytes; return how many were read from below."""
        self.read.clear()
        with Cache(self._context) as cache:
            assert self.submit(keys, cache).result(WAIT_S) == [BLOCK] * COUNT
            assert cache.blocks() == [payload(key) for key in keys]
        return sum(map(len, self.read)) // 16

    def wait_added(self) -> None:
        eventually(lambda: self.loads._is_idle._value == 1, "nothing is being added")

    def notice(self, keys: list[bytes]) -> None:
        """Have the worker hear that its service is gone, which loads of what it knows in the pool do not need."""
        assert self.load(keys) == 0
        self.wait_added()
        self.pooled.report()

    def fill(self, keys: list[bytes]) -> None:
        """Have all blocks in the pool."""
        before = self.pooled.counts.promoted

        def load() -> bool:
            self.load(keys)
            self.wait_added()
            return self.pooled.counts.promoted == before + COUNT

        eventually(load, "all were added")

    def close(self) -> None:
        self.loads.close()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
