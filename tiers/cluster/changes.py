"""What is still to be written to the directory: the latest state of each changed block, and manifests.

Responsibility: two bounded structures without I/O. `PendingChanges` coalesces changes by block; past its bound it is
emptied, and a manifest heals what it had. `Manifest` is the list of what this machine holds, part by part.

Invariants: a part names what is held when it is taken, and a change after that is pending, so a part that is sent
before later changes makes nothing stale. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from kvfs import limits
from tiers.cluster.location_format import BUCKETS, bucket_of

_GROUP = 256
"""Hashes that share the first byte of their places."""
_FIRST_STEP = 32

Change = tuple[bytes, bool]


class PendingChanges:
    """Keeps changes until they are written."""

    def __init__(self, most: int = limits.MAX_DIRECTORY_CHANGES) -> None:
        self._most = most
        self._changes: dict[bytes, tuple[bool, float]] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._changes)

    def note(self, digest: bytes, held: bool, now_s: float) -> bool:
        """Keep whether a block is held; return False where there was no room, and all were dropped."""
        known = self._changes.get(digest)
        if known is None and len(self._changes) >= self._most:
            self.dropped += len(self._changes) + 1
            self.clear()
            return False
        self._changes[digest] = (held, now_s if known is None else known[1])
        return True

    def take(self, most: int = limits.DIRECTORY_BATCH) -> list[Change]:
        """Take the oldest changes out."""
        taken = [(digest, held) for digest, (held, _) in islice(self._changes.items(), most)]
        for digest, _ in taken:
            del self._changes[digest]
        return taken

    def clear(self) -> None:
        """Drop all changes."""
        self._changes.clear()

    def lag_s(self, now_s: float) -> float:
        """Return how old the oldest change is."""
        return now_s - next(iter(self._changes.values()))[1] if self._changes else 0.0


@dataclass(slots=True)
class Part:
    """Names the blocks held in some of the directory's hashes, the first and how many."""

    first: int
    count: int
    digests: list[bytes]


@dataclass(slots=True)
class Manifest:
    """Lists what this machine holds, in the order of the directory's hashes."""

    reach: range = range(BUCKETS // _GROUP)
    """The first bytes of the places that it lists."""
    _step: int = _FIRST_STEP
    first: int = field(init=False)
    _groups: list[set[bytes]] = field(default_factory=lambda: [set() for _ in range(BUCKETS // _GROUP)])

    def __post_init__(self) -> None:
        self.first = self.reach.start * _GROUP

    @property
    def is_sent(self) -> bool:
        """Return whether every part was taken."""
        return self.first >= self.reach.stop * _GROUP

    def note(self, digests: Iterable[bytes]) -> None:
        """Take up blocks that may be held when their part is taken."""
        for digest in digests:
            if digest[0] in self.reach:
                self._groups[digest[0]].add(digest)

    def take(self, holds: Callable[[bytes], bool]) -> Part:
        """Return the next part: what is held now."""
        group = self.first // _GROUP
        count = min(self._step, (group + 1) * _GROUP - self.first)
        reach = range(self.first, self.first + count)
        digests = [each for each in self._groups[group] if bucket_of(each) in reach and holds(each)]
        return Part(self.first, count, digests)

    def sent(self, part: Part, entries: int) -> None:
        """Go on after a part that was written; the next one looks at about limits.DIRECTORY_PART_BLOCKS."""
        self.first = part.first + part.count
        if entries < limits.DIRECTORY_PART_BLOCKS // 2:
            self._step = min(self._step * 2, _GROUP)
        elif entries > limits.DIRECTORY_PART_BLOCKS:
            self._step = max(self._step // 2, 1)
        if self.first % _GROUP == 0:
            self._groups[part.first // _GROUP].clear()
