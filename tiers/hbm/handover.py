"""What clients hand back to a restarted service: segments that outlived it in their mappings, and the blocks in these.

Responsibility: decide which blocks are taken over. The service cannot read a device: the client hashes each block
there, and the service compares with the checksum that its store has for the same key, in DRAM or on NVMe.

Invariants: a block is taken over whole, with the store's own checksum, or dropped; one slot has one block.
Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiers.hbm.size_classes import slot_bytes_for
from tiers.model.tier import SealHeader, StoreKey

ExpectedChecksum = Callable[[StoreKey], int | None]
"""Returns the XXH3-64 that the store has for a key, None where it has no copy."""


@dataclass(frozen=True, slots=True)
class HandedBlock:
    """Describes a block in a segment as a client has it."""

    offset_bytes: int
    size_bytes: int
    header: SealHeader
    checksum: int
    """XXH3-64 that the client has computed on the device since the restart."""


def is_adoptable(block: HandedBlock, slot_bytes: int, segment_bytes: int, expected: ExpectedChecksum) -> bool:
    """Return whether a block is in a slot of its segment, which has slots of one size, and has the store's checksum."""
    fits = block.size_bytes >= 0 and slot_bytes_for(block.size_bytes) == slot_bytes
    inside = 0 <= block.offset_bytes <= segment_bytes - slot_bytes and block.offset_bytes % slot_bytes == 0
    return fits and inside and expected(block.header.key) == block.checksum
