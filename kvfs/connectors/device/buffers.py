"""Memory that a device copies to and from, and the places of blocks in a cache on it.

Responsibility: register memory of this process with a device; list the copies between blocks that lie whole in it and
blocks that lie in pieces on the device.

Concurrency: whoever has a buffer has it alone; places do not change.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import torch

from kvfs._native.cuda.driver import Context
from kvfs.limits import CONNECTOR_STAGING_BYTES


def buffer_bytes(block_bytes: int) -> int:
    """Return the bytes of a buffer for blocks of up to so many: CONNECTOR_STAGING_BYTES, or one larger block."""
    return -(-max(CONNECTOR_STAGING_BYTES, block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


class Buffer:
    """Registered memory."""

    def __init__(self, context: Context, size_bytes: int) -> None:
        """Raises what `kvfs.errors.from_cuda` does."""
        self.pages = mmap.mmap(-1, size_bytes)
        self._registration = context.register(
            ctypes.addressof(ctypes.c_char.from_buffer(self.pages)), size_bytes
        )
        self.region = (self._registration.address, size_bytes)
        """Where the device sees it, and its bytes."""

    def close(self) -> None:
        """Give the memory back; no copy may be under way."""
        self._registration.unregister()


@dataclass(frozen=True, slots=True)
class DevicePlaces:
    """Where blocks are on a device, or are to be."""

    addresses: torch.Tensor
    """int64 [blocks, pieces of a block], in the order of a block's bytes."""
    piece_bytes: int
    regions: list[tuple[int, int]]
    """Memory (address, bytes) that the cache is in."""

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block: of all its pieces."""
        return self.addresses.shape[1] * self.piece_bytes

    def pieces_at(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the addresses of the same pieces where each block lies whole from one of `starts` on."""
        return starts[:, None] + torch.arange(self.addresses.shape[1]) * self.piece_bytes


def listed(destinations: torch.Tensor, sources: torch.Tensor, piece_bytes: int) -> memoryview:
    """Return copies between addresses as a `Plan` takes them."""
    sizes = torch.full_like(destinations, piece_bytes)
    return torch.stack((destinations, sources, sizes), dim=-1).numpy().data
