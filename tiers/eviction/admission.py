"""Which objects are worth writing to a device: pure policy.

Responsibility: a ghost queue, the keys that were sealed of late and not written. A key that is sealed again
while it is in the queue was wanted after its eviction, so it is written this time; so is whatever is read
while it is in DRAM. Of the public conversation trace three blocks in four are never read again: those cost no
write (S3-FIFO, SOSP'23, keeps such a queue for the same reason).

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import OrderedDict

from kvfs import limits


class GhostQueue:
    """Remembers keys, any 64-bit numbers, that were not admitted, and drops the oldest first."""

    def __init__(self, capacity: int = limits.GHOST_KEYS) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def admits(self, key: int) -> bool:
        """Return whether `key` was here before; it is then dropped, else remembered."""
        if key in self._keys:
            del self._keys[key]
            return True
        self._keys[key] = None
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return False
