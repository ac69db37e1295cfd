"""Eviction orders of the store in C, and the replay of request traces through them and through reference policies."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from typing_extensions import Buffer, disjoint_base

KINDS: Final[tuple[str, ...]]
"""The kinds of `Policy`."""
POLICIES: Final[tuple[str, ...]]
"""The policies of `replay`."""
MAX_RANK_BINS: Final[int]

@disjoint_base
class Policy:
    """`tiers.eviction.policy.EvictionPolicy` over keys of 16 bytes (groups: any bytes).

    `kind`: "lru-leaf" or "default". Neither uses `now`: their clock counts uses. Raises InvalidRequest for another
    kind, a key of another length, a size that is negative or of 2^40 bytes and more.
    """

    def __new__(cls, kind: str) -> Policy: ...
    def insert(
        self,
        key: bytes,
        *,
        size_bytes: int,
        parent: bytes | None,
        now: float,
        pinned: bool = ...,
        group: bytes | None = ...,
    ) -> None: ...
    def touch(self, key: bytes, now: float) -> None: ...
    def cool(self, key: bytes) -> None: ...
    def remove(self, key: bytes) -> None: ...
    def pin(self, key: bytes) -> None: ...
    def unpin(self, key: bytes) -> None: ...
    def victims(self, bytes_needed: int, now: float) -> Iterator[list[bytes]]: ...
    def __contains__(self, key: bytes, /) -> bool: ...
    def __len__(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def is_empty(self) -> bool:
        """Return whether there is no key, no awaited parent and no group."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes allocated now."""

    @property
    def follows_learned(self) -> bool:
        """Return whether victims are chosen by what was learned; else by last use."""

def replay(
    policy: str,
    start: Buffer,
    ids: Buffer,
    unique: int,
    capacity: int,
    prefix_hits: Buffer,
    victims: Buffer | None = ...,
    progress: Callable[[int, int], None] | None = ...,
) -> int:
    """Replay a trace through a cache of `capacity` blocks; return how many were evicted.

    Request r is the blocks ids[start[r]:start[r + 1]] (uint32 below `unique`; start: uint64, one more than there are
    requests). `prefix_hits` (uint32) gets each request's contiguous prefix, `victims` (uint32) the first evicted
    blocks, as many as fit. `progress` is called with the number of requests done, and of all. Raises InvalidRequest,
    MemoryError.
    """

def ranks(chance: Sequence[float], edges: Sequence[float]) -> list[float]:
    """Return, for each bin of age, the most hits per unit of time from its middle on (the Gittins index).

    `chance[b]`: that an item in the middle of bin b is used before the middle of the next; below 1. `edges`: of the
    bins, one more. Raises InvalidRequest.
    """
