"""The shape of a paged cache on a device whose blocks lie in runs apart."""

from __future__ import annotations

from dataclasses import dataclass

from kvfs._native.cuda.copies import DevicePlaces
from tests.support.gpu_memory import DeviceMemory


@dataclass(frozen=True)
class CacheShape:
    """A cache of layers, in each of which a run of a block has the same runs of all blocks beside it."""

    layers: int
    blocks: int
    runs: int
    run_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.runs * self.run_bytes

    @property
    def cache_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def memory_bytes(self) -> int:
        """What an allocation of the device has for it."""
        return -(-self.cache_bytes // (2 << 20)) * (2 << 20)

    def runs_of(self, block: int) -> list[int]:
        """Where a block's runs begin in the cache, by layers."""
        places = (layer * self.runs + run for layer in range(self.layers) for run in range(self.runs))
        return [(place * self.blocks + block) * self.run_bytes for place in places]

    def places_of(self, cache: DeviceMemory, block_ids: list[int]) -> DevicePlaces:
        """The places of blocks in a cache."""
        starts = [block * self.run_bytes for block in block_ids]
        runs = [cache.address + start for start in self.runs_of(0)]
        return DevicePlaces(starts, runs, self.run_bytes, [(cache.address, self.cache_bytes)])
