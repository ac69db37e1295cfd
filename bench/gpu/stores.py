"""Blocks of a paged cache on a GPU into a store: python -m bench.gpu.stores ADDRESS [--blocks N]

Responsibility: stores as the vLLM connector does them, by the driver's copies and by PyTorch's through pageable memory,
beside the put from memory of the CPU alone and one copy of the same bytes to pinned memory. ADDRESS is a service's;
blocks are 2 MiB, in the shape of Llama 3.1 8B's: 32 layers of 64 KiB, each in a tensor of its own.

All ways take turns, the first one last in every other round; a figure is the median of the rounds, each until the
blocks are stored, which are removed after it. How long the worker's thread is held is measured as well, by itself and
at the end of a step that the GPU still computes: products of matrices, some 30 ms of them. The first step of each way,
in which memory is registered, is shown by itself. What was stored is compared, byte by byte, in the first round, though
the cache is written again at once.

Concurrency: one thread, besides the connector's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

import kvfs
from bench.gpu.llama import BLOCK_BYTES, PagedCache, namespace_of
from kvfs.client.blocks import Blocks
from kvfs.connectors.common import Link
from kvfs.connectors.device.stores import DeviceStores
from kvfs.connectors.vllm_layout import Shard
from kvfs.connectors.vllm_stores import Part, Stores
from kvfs.keys import split_keys
from kvfs.limits import CONNECTOR_STORE_BYTES

ROUNDS = 7
WAIT_S = 60.0
NAMESPACE = namespace_of("bench-stores")
Way = Callable[[], float]
"""Stores or copies the blocks; returns the seconds that the thread of an engine's worker was held."""


def stores_of(address: str, device: DeviceStores | None) -> Stores:
    link = Link(address, name="bench", timeout_s=WAIT_S)
    link.open(NAMESPACE)
    return Stores(link, {"stored_blocks": 0, "dropped_blocks": 0, "late_blocks": 0}, device)


class Step:
    """The blocks of a step, and the ways out of the cache."""

    def __init__(self, blocks: Blocks, address: str, count: int) -> None:
        self._blocks = blocks
        self.cache = PagedCache(NAMESPACE, count)
        made = self.cache.copies()
        made.loads.close()
        self._stores = {"driver": stores_of(address, made.stores), "torch": stores_of(address, None)}
        self._keys, self.content = split_keys(self.cache.keys), self.cache.content
        self._shard = Shard(NAMESPACE, self.cache.layout)
        self._pinned = torch.empty_like(self.content).pin_memory()
        self._on_device = self.content.to("cuda")
        self._matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        self._product = torch.empty_like(self._matrix)

    def close(self) -> None:
        for stores in self._stores.values():
            stores.close()

    def ways(self) -> dict[str, Way]:
        return {
            "the connector's stores": lambda: self._by_connector("driver"),
            "PyTorch's copies": lambda: self._by_connector("torch"),
            "from memory of the CPU": self._from_memory,
            "one copy to pinned memory": self._in_one_copy,
        }

    def fill(self) -> None:
        """Write the content into the cache's blocks."""
        self._shard.layout.scatter(self.cache.block_ids, self._on_device)
        torch.cuda.synchronize()

    def compute(self) -> None:
        """Give the GPU work as a step does, without waiting for it."""
        for _ in range(20):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def end(self, way: str) -> float:
        """End a step as a worker does; return the seconds that this took."""
        stores, count = self._stores[way], CONNECTOR_STORE_BYTES // BLOCK_BYTES
        parents = [None, *self._keys[:-1]]
        step = Part(self._shard, self._keys, parents, self.cache.block_ids)
        began = perf_counter()
        for part in step.split(count):
            stores.finish(part)
        return perf_counter() - began

    def wait(self, way: str) -> None:
        last = self._stores[way].last
        assert last is not None
        last.result(WAIT_S)

    def _by_connector(self, way: str) -> float:
        held = self.end(way)
        self.wait(way)
        return held

    def _from_memory(self) -> float:
        self._blocks.put(self._keys, list(self.content), [None, *self._keys[:-1]], timeout_s=WAIT_S)
        return 0.0

    def _in_one_copy(self) -> float:
        self._pinned.copy_(self._on_device, non_blocking=True)
        torch.cuda.synchronize()
        return 0.0

    def remove(self) -> None:
        self._blocks.remove(self._keys, timeout_s=WAIT_S)

    def is_stored(self) -> bool:
        """Return whether the store has the content."""
        found = torch.empty_like(self.content)
        sizes = self._blocks.get_into(self._keys, list(found), timeout_s=WAIT_S)
        return min(sizes) == BLOCK_BYTES and torch.equal(found, self.content)


def check(step: Step, way: str) -> float:
    """Store blocks of a cache that is written again at once; return the seconds that the first step was held."""
    step.fill()
    held = step.end(way)
    step.cache.memory.zero_()
    step.wait(way)
    assert step.is_stored(), way
    step.remove()
    step.fill()
    return held


def rates(step: Step) -> dict[str, tuple[float, float]]:
    """Return the GB/s of each way, and the seconds that the worker's thread is held."""
    ways = step.ways()
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        for name in ways if turn % 2 else reversed(ways):
            began = perf_counter()
            held = ways[name]()
            seen[name].append((perf_counter() - began, held))
            step.remove()
    return {
        name: (step.content.nbytes / median(took for took, _ in each) / 1e9, median(held for _, held in each))
        for name, each in seen.items()
    }


def held_by_step(step: Step, way: str) -> float:
    """Return the median of the seconds that a worker is held at the end of a step that the GPU still computes."""
    seen = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        step.compute()
        seen.append(step.end(way))
        step.wait(way)
        step.remove()
    return median(seen)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.stores", description=__doc__)
    parser.add_argument("address", help="a mount, a data directory or a socket")
    parser.add_argument("--blocks", type=int, default=256)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu.stores needs a GPU: PyTorch finds no CUDA device here")
    with kvfs.connect(options.address) as client, client.blocks(NAMESPACE) as blocks:
        step = Step(blocks, options.address, options.blocks)
        step.remove()
        first = {way: check(step, way) for way in ("driver", "torch")}
        for name, (rate, held) in rates(step).items():
            shown = f", held {held * 1e3:7.2f} ms" if held else ""
            print(f"{options.blocks} blocks of 2 MiB, {name:26} {rate:6.1f} GB/s{shown}")
        for way, held in first.items():
            under_way = held_by_step(step, way)
            print(
                f"by {way:6}: held {under_way * 1e3:7.2f} ms beside a step, {held * 1e3:7.2f} ms by the first"
            )
        step.close()


if __name__ == "__main__":
    main()
