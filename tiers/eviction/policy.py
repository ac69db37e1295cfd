"""Which objects a full tier evicts: the interface of an eviction policy.

Responsibility: the interface of an order over keys; pure state, no I/O, no clock of its own, no idea of tiers or slots.
`policy_named` gives one: both orders of the store are native (`kvfs._native.evict.policy`, docs/policies.md). The tests
hold them to a reference in Python (`tests/support/lru_leaf_first.py`), which says what the calls mean.

Words: a *unit* is what is evicted at once: one key, or all keys of an eviction group (the files of a directory
that an engine takes as one). A unit is a *leaf* while no cached key outside it has one of its keys as parent.
The victim is always the leaf without pinned keys whose last use, as any of its keys, is the oldest. So a
pinned key protects its ancestors too, by standing on them.

Concurrency: one thread. Between two victims the caller may change the policy in any way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol, TypeVar

from kvfs._native.evict.policy import KINDS, Policy

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Orders keys for eviction. `now` is in seconds of any clock that does not go back."""

    def insert(
        self,
        key: K,
        *,
        size_bytes: int,
        parent: K | None,
        now: float,
        pinned: bool = False,
        group: K | None = None,
    ) -> None:
        """Start to count `key`, as used now, in the place of an equal key.

        Raises InvalidRequest for a negative size, or for a parent and a group at once.
        """
        ...

    def touch(self, key: K, now: float) -> None:
        """Note a use. Raises NotFound."""
        ...

    def cool(self, key: K) -> None:
        """Have `key` go next, as if its last use were before all others, until it is used. Raises NotFound."""
        ...

    def remove(self, key: K) -> None:
        """Stop counting `key`. Raises NotFound."""
        ...

    def pin(self, key: K) -> None:
        """Keep `key` and its ancestors until `unpin`; twice is once. Raises NotFound."""
        ...

    def unpin(self, key: K) -> None:
        """Undo `pin`. Raises NotFound."""
        ...

    def victims(self, bytes_needed: int, now: float) -> Iterator[list[K]]:
        """Yield groups of keys to evict, until they add up to `bytes_needed` or nothing else may be evicted.

        The caller removes the keys that it evicted, at once or later; the others keep their place.
        """
        ...

    def __contains__(self, key: K) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all keys that are counted."""


POLICY_NAMES = KINDS
"""What `policy_named` takes: "lru-leaf", and "default", which learns."""


def policy_named(name: str) -> EvictionPolicy[bytes]:
    """Return an empty policy over keys of 16 bytes. Raises InvalidRequest for a name that is not in POLICY_NAMES."""
    return Policy(name)
