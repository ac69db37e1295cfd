"""Places for connections: how many there are, who has them, and which connection is closed when all are taken.

Responsibility: count connections in all and by address, and choose which to close for a new one among the silent ones
(between two requests, or before the first): first those that never signed a request, then the longest silent.

Invariants: never more places than `most` are taken, nor more than its share by one address (of IPv6, one network of 64
bits); a connection with a request under way keeps its place.

Concurrency: one trio thread. Choosing looks at every connection, so silent strangers go several at a time.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from ipaddress import ip_address
from operator import itemgetter
from typing import Protocol

import trio

from kvfs import limits

log = logging.getLogger("kvfs.http")


class Answering(Protocol):
    """A transport whose requests may be answered without the connection's task."""

    @property
    def answered_s(self) -> float:
        """Return when a request was last answered here without the connection's task."""


class Place:
    """The place of one connection. `silent_s`: since when nothing has come; None while a request is under way."""

    __slots__ = ("known", "network", "scope", "silent_s", "transport")

    def __init__(self, network: str) -> None:
        self.network = network
        self.silent_s: float | None = trio.current_time()
        self.known = False
        """Whether it has signed a request."""
        self.scope = trio.CancelScope()
        self.transport: Answering | None = None

    def rank(self) -> tuple[bool, float] | None:
        """Return the rank of the place: the lowest is closed first; None keeps it."""
        if self.silent_s is None:
            return None
        answered_s = 0.0 if self.transport is None else self.transport.answered_s
        return self.known or answered_s > 0, max(self.silent_s, answered_s)


class Places:
    """Assign at most `most` places."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._share = max(1, most * limits.ADDRESS_PERCENT // 100)
        self._taken: set[Place] = set()
        self._by_network: defaultdict[str, set[Place]] = defaultdict(set)
        self._freed = trio.Event()
        self._logged_s = -limits.LOG_INTERVAL_S
        self.closed_silent = 0
        """Connections that were closed for new ones."""
        self.refused = 0
        """New connections of addresses with too many requests under way."""

    def __len__(self) -> int:
        return len(self._taken)

    async def wait(self) -> None:
        """Wait until a place is free, or was freed by closing a silent connection."""
        while len(self._taken) >= self._most and not self._close_silent(self._taken, self._most):
            self._freed = trio.Event()
            with trio.move_on_after(limits.PLACES_POLL_S):
                await self._freed.wait()

    def take(self, address: str) -> Place | None:
        """Take a place, after `wait`; None where the address has its share, each with a request under way."""
        network = network_of(address)
        own = self._by_network[network]
        if len(own) >= self._share and not self._close_silent(own, self._share):
            self.refused += 1
            self._log_full(network)
            return None
        place = Place(network)
        self._taken.add(place)
        self._by_network[network].add(place)
        return place

    def release(self, place: Place) -> None:
        """Free the place; doing so twice is harmless."""
        if place in self._taken:
            self._taken.remove(place)
            own = self._by_network[place.network]
            own.remove(place)
            if not own:
                del self._by_network[place.network]
            self._freed.set()

    def _close_silent(self, among: Iterable[Place], most: int) -> bool:
        """Close the lowest in rank of these; return whether one is closed."""
        silent = [(rank, place) for place in among if (rank := place.rank()) is not None]
        if not silent:
            return False
        silent.sort(key=itemgetter(0))
        several = 1 + most // limits.PLACES_AT_ONCE_SHARE
        chosen = [place for (known, _), place in silent[:several] if not known] or [silent[0][1]]
        self._log_full(chosen[0].network)
        for place in chosen:
            self.closed_silent += 1
            self.release(place)
            place.scope.cancel()
        return True

    def _log_full(self, network: str) -> None:
        now_s = trio.current_time()
        if now_s - self._logged_s >= limits.LOG_INTERVAL_S:
            self._logged_s = now_s
            log.warning(
                "all connections are taken, %d of %d: silent ones are closed for new ones, the first of %s; so far %d "
                "were closed and %d refused",
                len(self._taken),
                self._most,
                network,
                self.closed_silent,
                self.refused,
            )


def network_of(address: str) -> str:
    """Return the network of an address: of IPv6, everyone has 64 bits of addresses."""
    if ":" not in address:
        return address
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped) if mapped is not None else f"{found.exploded[:19]}::/64"
