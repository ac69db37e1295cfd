"""How much room to keep free, and what one uid may hold: pure arithmetic over explicit state.

Responsibility: the headroom that background eviction keeps (writes through the mount do not ask the
service first, so room must be there before they come), the byte quota per uid, and its share of the slots.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvfs import limits
from kvfs.errors import QuotaExceeded

HEADROOM_SHARE = 8
"""An eighth of the capacity stays free in a small tier: at 10 GB/s into 1 GiB that is 12 ms of writing..."""
HEADROOM_LARGE_SHARE = 64
HEADROOM_ENOUGH_BYTES = 1 << 30
"""...and in a large one 1 GiB, or a 64th where that is more."""
HEADROOM_MOST_SHARE = 2
"""Never more than half: the tier is there to hold objects."""
RECENT_WEIGHT = 0.875
"""What the size of recent objects keeps of its weight with each seal."""


@dataclass(slots=True)
class SpaceBook:
    """Counts open drafts, the sizes seen of late, and what each uid has reserved."""

    capacity_bytes: int
    quota_bytes: int
    max_slots: int = limits.MAX_SLOTS
    open_drafts: int = 0
    recent_size_bytes: float = 0.0
    _reserved: dict[int, int] = field(default_factory=dict)
    _drafts: Counter[int] = field(default_factory=Counter)
    """uid -> its open drafts."""
    _near_share: set[int] = field(default_factory=set)
    """Uids whose share of the slots would be passed with as many more drafts as there may be spares."""

    @property
    def is_share_near(self) -> bool:
        """Return whether some uid is so near to its share of the slots that spare drafts could lead it past that."""
        return bool(self._near_share)

    @property
    def most_drafts(self) -> int:
        """Return one uid's share of the slots."""
        return max(1, self.max_slots // limits.DRAFT_SHARE_OF_SLOTS)

    @property
    def most_spares(self) -> int:
        """Return how many drafts may be made before anybody is charged for them."""
        return min(limits.SPARE_DRAFTS, self.max_slots // limits.SLOTS_PER_SPARE_DRAFT)

    def headroom_bytes(self) -> int:
        """Return the room to keep free: two objects of the recent size for every open draft, within the shares
        above."""
        wanted = 2.0 * self.recent_size_bytes * (self.open_drafts + 1)
        enough = max(HEADROOM_ENOUGH_BYTES, self.capacity_bytes // HEADROOM_LARGE_SHARE)
        least = min(self.capacity_bytes // HEADROOM_SHARE, enough)
        return int(min(max(wanted, least), self.capacity_bytes // HEADROOM_MOST_SHARE))

    def check_quota(self, uid: int, *, held_bytes: int, more_bytes: int = 0) -> None:
        """Raise QuotaExceeded when what `uid` holds and has reserved, with `more_bytes`, is over the quota."""
        total = held_bytes + self._reserved.get(uid, 0) + more_bytes
        if total > self.quota_bytes:
            raise QuotaExceeded(
                f"uid {uid} holds {held_bytes} bytes of replaced objects and has {self._reserved.get(uid, 0)} "
                f"reserved; {more_bytes} more would pass its quota of {self.quota_bytes}"
            )

    def check_drafts(self, uid: int) -> None:
        """Raise QuotaExceeded when one more draft of `uid` would take more than its share of the slots."""
        if self._drafts[uid] >= self.most_drafts:
            raise QuotaExceeded(
                f"uid {uid} has {self._drafts[uid]} drafts open: {self.most_drafts} is its share of the slots"
            )

    def opened(self, uid: int, size_bytes: int) -> None:
        """Note that a draft was granted."""
        self.open_drafts += 1
        self._drafts[uid] += 1
        if self._drafts[uid] >= self.most_drafts - self.most_spares:
            self._near_share.add(uid)
        self._reserved[uid] = self._reserved.get(uid, 0) + size_bytes

    def promised(self, uid: int, more_bytes: int) -> None:
        """Note that an open draft was promised more."""
        self._reserved[uid] = self._reserved.get(uid, 0) + more_bytes

    def closed(self, uid: int, size_hint_bytes: int, sealed_bytes: int | None) -> None:
        """Note that a draft ended; `sealed_bytes` is its size, None when it was aborted."""
        self.open_drafts -= 1
        self._drafts[uid] -= 1
        if self._drafts[uid] < self.most_drafts - self.most_spares:
            self._near_share.discard(uid)
        if not self._drafts[uid]:
            del self._drafts[uid]
        left = self._reserved.get(uid, 0) - size_hint_bytes
        if left > 0:
            self._reserved[uid] = left
        else:
            self._reserved.pop(uid, None)
        if sealed_bytes is not None:
            faded = self.recent_size_bytes * RECENT_WEIGHT
            self.recent_size_bytes = max(faded, float(sealed_bytes))
