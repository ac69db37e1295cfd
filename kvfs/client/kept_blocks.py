"""What a process knows of a pool of GPU memory: blocks that are leased without asking, and what brings segments back.

Responsibility: keep which blocks were sealed where, for leases and, by segment, for a restarted service; and what
brings a segment back to that.

Invariants: blocks are HBM_KEPT_BLOCKS at most, those heard of last; descriptors HBM_KEPT_SEGMENTS. What is known of a
block was true when it was heard of: who leases it looks at its slot's generation.
Concurrency: `KnownBlocks.add` and `get` from any thread; the rest belongs to the place (`kvfs.client.device_pool`).
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvfs import limits
from kvfs._native.cuda.driver import Mapping as DeviceMapping


class KnownBlock(NamedTuple):
    """Describes a block that was sealed at this address when it was last heard of."""

    key: bytes
    slot: int
    generation: int
    address: int
    size_bytes: int
    checksum: int
    """XXH3-64 with which it was sealed."""


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """Holds a segment that is mapped."""

    mapping: DeviceMapping
    token: str = ""
    descriptor: int = -1
    """What brings it back to a service, as what is imported cannot be exported again; -1 where it is not kept."""

    @classmethod
    def of(cls, mapping: DeviceMapping, token: str, descriptor: int, others: int) -> KeptSegment:
        """Keep a copy of a segment's descriptor, unless the service gave no token to bring it back by, too many others
        are kept, or the process has no room for one."""
        if token and others < limits.HBM_KEPT_SEGMENTS:
            with suppress(OSError):
                return cls(mapping, token, os.dup(descriptor))
        return cls(mapping)

    def close(self) -> None:
        """Unmap it, once no copy uses it any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.mapping.unmap()


class KnownBlocks:
    """See the module's header."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_slot: dict[int, KnownBlock] = {}
        """Those heard of last at the end."""
        self._by_key: dict[bytes, KnownBlock] = {}

    def add(self, blocks: Iterable[KnownBlock]) -> None:
        """Know these blocks, in place of what was in their slots before, and of those not heard of for longest."""
        with self._lock:
            for block in blocks:
                self._forget(block.slot)
                self._by_slot[block.slot] = self._by_key[block.key] = block
            while len(self._by_slot) > limits.HBM_KEPT_BLOCKS:
                self._forget(next(iter(self._by_slot)))

    def _forget(self, slot: int) -> None:
        block = self._by_slot.pop(slot, None)
        if block is not None and self._by_key.get(block.key) is block:
            del self._by_key[block.key]

    def get(self, key: bytes) -> KnownBlock | None:
        """Return what is known of a block."""
        return self._by_key.get(key)

    def in_segments(
        self, segments: Mapping[int, KeptSegment], is_sealed: Callable[[KnownBlock], bool]
    ) -> dict[int, list[KnownBlock]]:
        """Return by segment the blocks there that are sealed still, at most MAX_BATCH of each: one request."""
        kept = sorted(
            (each.mapping.address, number) for number, each in segments.items() if each.descriptor >= 0
        )
        starts, found = [address for address, _ in kept], dict[int, list[KnownBlock]]()
        for block in reversed(self._by_slot.values()):
            at = bisect_right(starts, block.address) - 1
            if at < 0 or block.address >= starts[at] + segments[kept[at][1]].mapping.size_bytes:
                continue  # in a segment that is not kept
            blocks = found.setdefault(kept[at][1], [])
            if len(blocks) < limits.MAX_BATCH and is_sealed(block):
                blocks.append(block)
        return {number: blocks for number, blocks in found.items() if blocks}
