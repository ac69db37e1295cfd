"""A paged cache in the shape of Llama 3.1 8B's, and blocks for it: 2 MiB each, 32 layers of 64 KiB.

Concurrency: no state.
"""

from __future__ import annotations

import random

import torch

from kvfs import Namespace, prefix_hashes
from kvfs.connectors.device.copies import DeviceCopies
from kvfs.connectors.device.torch_device import copies_of
from kvfs.connectors.vllm_layout import KVLayout
from kvfs.errors import DeviceMissing
from kvfs.limits import MIB

LAYERS, TOKENS, HEADS, ELEMENTS = 32, 16, 8, 128
BLOCK_BYTES = 2 * MIB
CACHE_BLOCKS = 1024


def namespace_of(revision: str) -> Namespace:
    """Describe the blocks of one benchmark, apart from those of others."""
    return Namespace.of_one_device(
        model="llama", revision=revision, dtype="bfloat16", layout="LHTKD", block_tokens=TOKENS
    )


class PagedCache:
    """The cache, some of its blocks in a drawn order, and what they are to hold."""

    def __init__(self, namespace: Namespace, count: int) -> None:
        self.memory = torch.zeros(
            LAYERS, CACHE_BLOCKS, HEADS, TOKENS, 2 * ELEMENTS, dtype=torch.bfloat16, device="cuda"
        )
        self.layout = KVLayout({f"layer {i}": self.memory[i] for i in range(LAYERS)}, CACHE_BLOCKS)
        assert self.layout.block_bytes == BLOCK_BYTES
        self.keys = prefix_hashes(namespace, list(range(count * TOKENS)))
        self.block_ids = random.Random(1).sample(range(CACHE_BLOCKS), count)
        torch.manual_seed(1)
        self.content = torch.randint(0, 256, (count, BLOCK_BYTES), dtype=torch.uint8)

    def copies(self) -> DeviceCopies:
        """Make the driver's copies for the cache. Raises DeviceMissing."""
        made = copies_of(self.layout.device, BLOCK_BYTES)
        if made is None:
            raise DeviceMissing("the CUDA driver has no device with the cache")
        return made
