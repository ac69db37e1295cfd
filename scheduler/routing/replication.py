"""Replication: which blocks are worth more than one copy.

Responsibility: `keeps_copy` for a block that was just loaded into an instance, where keeping it costs only room;
`replicate` for a sweep over hot blocks and those with copies, and `transfers` for what a store is to send of that. The
caches of all instances are one pool: a second copy takes the room of a block that nobody else has, and saves a
transfer, 25 times cheaper than the prefill of a missed block, and more where that lies deep in its prompt. So loads
have to earn a copy, as many as its room is worth, which `Misses` measures: nothing where evicted blocks are never
wanted again. `taker` keeps the pool in one order: a block that one instance evicts goes to the one with the oldest, as
N-chance forwarding does in cooperative caches (Dahlin and others, OSDI 1994).

Heat is the number of loads of a block over the network, halved every HALF_LIFE_S. Where copies are ordered ahead of
demand, it also has the uses that a copy saved a load: else copies that are used would cool, go, and be made again.

Invariants: no order takes the last copy of a block. Between a copy and its demotion lies a factor of two of heat,
so a block of steady heat is not copied and demoted in turns.

Concurrency: one thread; functions over explicit state and the caller's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

HALF_LIFE_S = 300.0
MISS_WEIGHT = 4.0
"""The cost of a second of prefill that a block with room had saved, to whoever waits meanwhile as well."""
LEAST_COPY_HEAT = 4.0
"""The heat that each copy beyond the first takes, whatever its room is worth: a session that moves once is loaded once,
and where each such session has copies, those fill the pool before the first misses show it."""


class Misses:
    """The blocks that the pool evicted last, as many as one instance holds, and the prefill time that missing them
    takes: what room is worth. `capacity` is that of one instance."""

    __slots__ = ("_at_s", "_capacity", "_evicted", "_missed_s")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._missed_s, self._at_s = 0.0, 0.0

    def __contains__(self, block: int) -> bool:
        return block in self._evicted

    def evicted(self, block: int) -> None:
        """Note that the pool evicted its last copy of a block."""
        self._evicted[block] = None
        if len(self._evicted) > self._capacity:
            self._evicted.popitem(last=False)

    def made(self, block: int, made_s: float, now_s: float) -> None:
        """Note that a block was made in so many seconds, maybe one that was evicted."""
        if block in self._evicted:
            del self._evicted[block]
            self._missed_s = self._faded_s(now_s) + made_s
            self._at_s = now_s

    def copy_heat(self, load_s: float, now_s: float) -> float:
        """Return the heat at which a copy is worth its room: as many loads, of `load_s` each, as take the time of the
        misses that the room would save."""
        missed_s = MISS_WEIGHT * self._faded_s(now_s) / max(self._capacity, 1)
        return max(missed_s / load_s, LEAST_COPY_HEAT)

    def _faded_s(self, now_s: float) -> float:
        return float(self._missed_s * 0.5 ** ((now_s - self._at_s) / HALF_LIFE_S))


class Heat:
    """The heat of blocks. Callers remove blocks that the cluster evicted, which bounds its size."""

    __slots__ = ("_heat",)

    def __init__(self) -> None:
        self._heat: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._heat)

    def of(self, block: int, now_s: float) -> float:
        """Return the heat of a block now: uses, each halved with every HALF_LIFE_S of its age."""
        heat, at_s = self._heat.get(block, (0.0, now_s))
        return heat * 0.5 ** ((now_s - at_s) / HALF_LIFE_S) if heat else 0.0

    def touched_s(self, block: int) -> float:
        """Return when a block's heat last grew; minus infinity for none."""
        return self._heat.get(block, (0.0, float("-inf")))[1]

    def loaded(self, block: int, now_s: float) -> float:
        """Count a load of a block, and return its heat with that."""
        heat = self.of(block, now_s) + 1.0
        self._heat[block] = heat, now_s
        return heat

    def used(self, block: int, copies: int, now_s: float) -> None:
        """Count a use in place of a block with so many copies: with one alone, all but one in `copies` of those were
        loads."""
        if copies > 1:
            self._heat[block] = self.of(block, now_s) + 1.0 - 1.0 / copies, now_s

    def remove(self, block: int) -> None:
        """Drop a block's heat."""
        self._heat.pop(block, None)

    def blocks(self) -> Iterator[int]:
        """Yield all blocks that have any heat."""
        return iter(tuple(self._heat))


class Copy(NamedTuple):
    """An order to send a block from one source to another."""

    block: int
    source: int
    target: int


class Demotion(NamedTuple):
    """An order to have `source` evict a block next."""

    block: int
    source: int


class Transfer(NamedTuple):
    """Copies from one source to one target, as a store can carry them out: one request for many blocks."""

    source: int
    target: int
    blocks: tuple[int, ...]


class BlockHeat(NamedTuple):
    """A block, how many instances hold it, and its heat."""

    block: int
    holders: int
    heat: float


def keeps_copy(heat: float, copies: int, copy_heat: float) -> bool:
    """Return whether a block of so many copies should stay where it was just loaded; `copy_heat`: what each takes."""
    return heat >= copy_heat * copies


def is_cold(heat: float, copies: int, copy_heat: float) -> bool:
    """Return whether one of so many copies should go: the heat is below half of what those beyond the first take."""
    return heat < copy_heat * (copies - 1) / 2


def taker(oldest: Sequence[int], used: int) -> int | None:
    """Return the source that takes a last copy that another evicts: the one whose own next victim was used the longest
    ago, and before that copy; None where there is none.

    `oldest`: the last use of each source's next victim, below all uses where there is room.
    """
    place = min(range(len(oldest)), key=oldest.__getitem__)
    return place if oldest[place] < used else None


def replicate(blocks: Iterable[BlockHeat], targets: Iterable[int], copy_heat: float) -> list[Copy | Demotion]:
    """Return at most one order for each block: copy it to the first target without it, or demote a cold copy.

    The copy that is demoted is that of the highest source. `targets` are sources that may take copies, the emptiest or
    least busy first; the first of them that has a block sends it.
    """
    places = list(targets)
    orders: list[Copy | Demotion] = []
    for block, holders, heat in blocks:
        copies = holders.bit_count()
        if not copies:
            continue
        if keeps_copy(heat, copies, copy_heat):
            target = next((place for place in places if not holders >> place & 1), None)
            if target is not None:
                lowest = (holders & -holders).bit_length() - 1
                source = next((place for place in places if holders >> place & 1), lowest)
                orders.append(Copy(block, source, target))
        elif is_cold(heat, copies, copy_heat):
            orders.append(Demotion(block, holders.bit_length() - 1))
    return orders


def transfers(orders: Iterable[Copy | Demotion], most_blocks: int) -> list[Transfer]:
    """Return the copies of a sweep by source and target, in order, `most_blocks` of them in all."""
    copies = [order for order in orders if isinstance(order, Copy)][:most_blocks]
    found: dict[tuple[int, int], list[int]] = {}
    for order in copies:
        found.setdefault((order.source, order.target), []).append(order.block)
    return [Transfer(source, target, tuple(blocks)) for (source, target), blocks in found.items()]
