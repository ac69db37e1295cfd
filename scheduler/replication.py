"""Which blocks deserve more than one copy.

Responsibility: `keeps_copy` for a block that was just loaded into an instance, where keeping it is free but for
the room; `replicate` for a sweep over what is hot and what has copies. The caches of all instances are one pool:
a second copy takes the room of a block that nobody else has, and saves a transfer, which is about 25 times
cheaper than the prefill of a lost block. So a copy has to be earned by loads.

Heat is the number of loads of a block over the network, halved every HALF_LIFE_S.

Invariants: no order leaves a block without a copy. Between a copy and its demotion lies a factor of two of heat,
so a block of steady heat is not copied and demoted in turns.

Concurrency: one thread; functions over explicit state and the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

HALF_LIFE_S = 300.0
COPY_HEAT = 4.0
"""Heat that each copy beyond the first has to show."""


class Heat:
    """Loads of blocks, with decay. Callers forget blocks that leave the cluster, which bounds it."""

    __slots__ = ("_heat",)

    def __init__(self) -> None:
        self._heat: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._heat)

    def of(self, block: int, now_s: float) -> float:
        heat, at_s = self._heat.get(block, (0.0, now_s))
        return heat * 0.5 ** ((now_s - at_s) / HALF_LIFE_S) if heat else 0.0

    def loaded(self, block: int, now_s: float) -> float:
        """Count a load; the heat with it."""
        heat = self.of(block, now_s) + 1.0
        self._heat[block] = heat, now_s
        return heat

    def forget(self, block: int) -> None:
        self._heat.pop(block, None)

    def blocks(self) -> Iterator[int]:
        return iter(tuple(self._heat))


class Copy(NamedTuple):
    """Send the block from one source to another."""

    block: int
    source: int
    target: int


class Demotion(NamedTuple):
    """Let `source` give the block up next."""

    block: int
    source: int


class BlockHeat(NamedTuple):
    block: int
    holders: int
    heat: float


def keeps_copy(heat: float, copies: int, *, room: bool = False) -> bool:
    """Whether a block of so many copies should stay where it was just loaded; with room to spare it always may."""
    return room or heat >= COPY_HEAT * copies


def replicate(blocks: Iterable[BlockHeat], targets: Iterable[int]) -> list[Copy | Demotion]:
    """One order at most for each block: a copy to the first target without one, or its newest-numbered copy demoted.

    `targets` are sources that may take copies, the emptiest or least busy first.
    """
    places = list(targets)
    orders: list[Copy | Demotion] = []
    for block, holders, heat in blocks:
        copies = holders.bit_count()
        if not copies:
            continue
        if keeps_copy(heat, copies):
            target = next((place for place in places if not holders >> place & 1), None)
            if target is not None:
                orders.append(Copy(block, (holders & -holders).bit_length() - 1, target))
        elif heat < COPY_HEAT * (copies - 1) / 2:
            orders.append(Demotion(block, holders.bit_length() - 1))
    return orders
