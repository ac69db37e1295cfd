"""Blocks of a store into a paged cache on a GPU: python -m bench.gpu.loads ADDRESS [--blocks N]

Responsibility: loads as the vLLM connector does them, from DRAM and, of a service with `[hbm]`, from the pool in the
GPU's own memory, beside PyTorch's copies through pageable memory, the read into memory of the CPU alone, and one copy
of the same bytes from pinned memory. ADDRESS is a service's; blocks are 2 MiB, in the shape of Llama 3.1 8B's: 32
layers of 64 KiB, each in a tensor of its own.

All ways take turns, the first one last in every other round; a figure is the median of the rounds, each until the
bytes are there. What was loaded is compared, byte by byte, in the first round.

Concurrency: one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

import kvfs
from bench.gpu.llama import BLOCK_BYTES, PagedCache, namespace_of
from kvfs._native.cuda.driver import open_driver
from kvfs.client.blocks import Blocks
from kvfs.connectors.device.pooled import PooledBlocks
from kvfs.keys import split_keys

ROUNDS = 7
FILLS = 200
"""Loads until the pool has all blocks: each adds 32 MiB at most."""
NAMESPACE = namespace_of("bench")
Way = Callable[[], object]


class Loads:
    """The blocks, the cache, and the ways from one to the other."""

    def __init__(self, blocks: Blocks, count: int) -> None:
        self._blocks = blocks
        self._cache = PagedCache(NAMESPACE, count)
        self.content, self._keys = self._cache.content, self._cache.keys
        split = split_keys(self._keys)
        for at in range(0, count, 16):
            blocks.put(split[at : at + 16], list(self.content[at : at + 16]))
        self._staging = torch.empty_like(self.content)
        self._pinned = self.content.pin_memory()
        self._target = torch.empty_like(self.content, device="cuda")
        self._loads = self._cache.copies().loads
        self._pooled = self._loads.pooled(
            lambda context, timeout_s, earlier: blocks.device_pool(
                open_driver(), context, timeout_s=timeout_s, earlier=earlier
            )
        )

    def ways(self) -> dict[str, Way]:
        pool = {"the connector's loads from the pool": self.from_pool} if self.fill_pool() else {}
        return {
            **pool,
            "the connector's loads": self.by_connector,
            "PyTorch's copies": self.by_pytorch,
            "into memory of the CPU": self.into_memory,
            "one copy from pinned memory": self.in_one_copy,
        }

    def fill_pool(self) -> bool:
        """Load until all blocks come from the pool; return whether they do."""
        return any(self._load_pooled() == len(self._cache.block_ids) for _ in range(FILLS))

    def _load_pooled(self) -> int:
        """Return how many blocks of a load came from the pool."""
        before = self._pooled.counts.verified
        self._load(self._pooled)
        return self._pooled.counts.verified - before

    def from_pool(self) -> None:
        assert self._load_pooled() == len(self._cache.block_ids)

    def by_connector(self) -> None:
        self._load(None)

    def _load(self, pooled: PooledBlocks | None) -> None:
        sizes = self._loads.submit(
            lambda keys, places, left_s: self._blocks.get_into(keys, places, timeout_s=left_s),
            self._keys,
            self._cache.layout.device_places(self._cache.block_ids),
            timeout_s=60,
            pooled=pooled,
        ).result()
        assert min(sizes) == BLOCK_BYTES

    def by_pytorch(self) -> None:
        self.into_memory()
        self._cache.layout.scatter(self._cache.block_ids, self._staging)
        torch.cuda.synchronize()

    def into_memory(self) -> None:
        assert min(self._blocks.get_into(self._keys, list(self._staging), timeout_s=60)) == BLOCK_BYTES

    def in_one_copy(self) -> None:
        self._target.copy_(self._pinned, non_blocking=True)
        torch.cuda.synchronize()

    def clear(self) -> None:
        self._cache.memory.zero_()
        torch.cuda.synchronize()

    def is_there(self) -> bool:
        return torch.equal(self._cache.layout.gather(self._cache.block_ids), self.content)


def measure(loads: Loads) -> dict[str, float]:
    """Return the GB/s of each way."""
    ways = loads.ways()
    for name in ways.keys() - {"into memory of the CPU", "one copy from pinned memory"}:
        loads.clear()
        ways[name]()
        assert loads.is_there(), name
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        for name in ways if turn % 2 else reversed(ways):
            began = perf_counter()
            ways[name]()
            seen[name].append(perf_counter() - began)
    moved = loads.content.nbytes
    return {name: moved / median(samples) / 1e9 for name, samples in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.loads", description=__doc__)
    parser.add_argument("address", help="a mount, a data directory or a socket")
    parser.add_argument("--blocks", type=int, default=256)
    options = parser.parse_args()
    with kvfs.connect(options.address) as client, client.blocks(NAMESPACE) as blocks:
        rates = measure(Loads(blocks, options.blocks))
    limit = list(rates.values())[-1]
    for name, rate in rates.items():
        print(f"{options.blocks} blocks of 2 MiB, {name:36} {rate:6.1f} GB/s  x {rate / limit:.2f}")


if __name__ == "__main__":
    main()
