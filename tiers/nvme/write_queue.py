"""Objects of caches that wait to be written to NVMe.

Responsibility: which objects are written at all (admission, promotion from the cold tier), and in which order.

Invariants: an object is queued only while it is in DRAM: it is taken out when it is evicted. At most
limits.RETURNED_KEYS promoted ones are remembered.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio
import xxhash

from kvfs import limits
from tiers.eviction.admission import GhostQueue
from tiers.nvme.journal import Resident
from tiers.nvme.tier import NvmeTier


class WriteQueue:
    """See the module's header."""

    def __init__(self, nvme: NvmeTier) -> None:
        self._nvme = nvme
        self._ghosts = GhostQueue()
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._returned: OrderedDict[bytes, int] = OrderedDict()
        """Keys of objects that came back from below NVMe, with their reads since: the one that brought them counts."""
        self._more = trio.Event()
        self._skipped = self._in_hand = 0

    def usage(self) -> dict[str, int]:
        """Return what status shows."""
        return {"write_behind": len(self._keys) + self._in_hand, "not_admitted": self._skipped}

    def admit(self, found: Resident) -> None:
        """Queue a sealed object, if its bucket admits all or it was wanted before."""
        if not found.bucket.admits_all and not self._ghosts.admits(_ghost_key(found)):
            self._skipped += 1
        else:
            self.put(found.key.digest)

    def put(self, digest: bytes) -> None:
        """Queue an object, behind all others."""
        self._keys[digest] = None
        self._more.set()

    def pop(self) -> bytes | None:
        """Take the next object."""
        return self._keys.popitem(last=False)[0] if self._keys else None

    @contextmanager
    def in_hand(self) -> Iterator[None]:
        """Count an object that was taken and whose records the log does not have yet: a large one is hashed first."""
        self._in_hand += 1
        try:
            yield
        finally:
            self._in_hand -= 1

    def remove(self, digest: bytes) -> None:
        """Take an object out of the queue, if it is there."""
        self._keys.pop(digest, None)

    async def wait(self) -> None:
        """Wait until something is queued."""
        if not self._keys:
            self._more = trio.Event()
            await self._more.wait()

    def promoted(self, digest: bytes) -> None:
        """Note an object that was promoted from below NVMe."""
        self._returned[digest] = 0
        if len(self._returned) > limits.RETURNED_KEYS:
            self._returned.popitem(last=False)

    def touched(self, digest: bytes, object_id_of: Callable[[bytes], int | None]) -> None:
        """Note a read of an object in DRAM; queue one that was not admitted, or was promoted and read before."""
        if self._returned:
            self._touch_returned(digest)
        if self._skipped and digest not in self._keys:
            object_id = object_id_of(digest)
            if object_id is not None and object_id not in self._nvme.objects:
                self.put(digest)

    def _touch_returned(self, digest: bytes) -> None:
        """Queue what was promoted when it is read once more: most of it never is."""
        reads = self._returned.pop(digest, None)
        if reads == 0:
            self._returned[digest] = 1
        elif reads is not None:
            self.put(digest)


def _ghost_key(found: Resident) -> int:
    """Return what stays the same when an object is computed again: its prefix hash, or its name."""
    if found.named is None:
        return int.from_bytes(found.key.digest[:8], "little")
    name, _ = found.named
    return xxhash.xxh3_64_intdigest(name.bucket + b"\0" + name.key)
