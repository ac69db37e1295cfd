"""Places for connections: how many there are, who has them, and who gives his up when they are all taken.

Responsibility: count connections in all and by address, and choose whom to close for a new one: who is silent, that is
between two requests or before the first; of these first whoever has never signed a request, then whoever has been
silent longest.

Invariants: there are never more places taken than `most`, nor more than its share by one address (of IPv6, one network
of 64 bits); a connection with a request under way keeps its place.

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

log = logging.getLogger("kvfs.gateway")


class Answering(Protocol):
    """A transport, whose requests may be answered without the connection's task."""

    @property
    def answered_s(self) -> float: ...


class Place:
    """One connection's. `silent_s`: since when nothing has come, None while a request is under way."""

    __slots__ = ("known", "network", "scope", "silent_s", "transport")

    def __init__(self, network: str) -> None:
        self.network = network
        self.silent_s: float | None = trio.current_time()
        self.known = False
        """Whether it has signed a request."""
        self.scope = trio.CancelScope()
        self.transport: Answering | None = None

    def rank(self) -> tuple[bool, float] | None:
        """The lowest goes first; None: it stays."""
        if self.silent_s is None:
            return None
        answered_s = 0.0 if self.transport is None else self.transport.answered_s
        return self.known or answered_s > 0, max(self.silent_s, answered_s)


class Places:
    """See the module's header."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._share = max(1, most * limits.ADDRESS_PERCENT // 100)
        self._taken: set[Place] = set()
        self._by_network: defaultdict[str, set[Place]] = defaultdict(set)
        self._freed = trio.Event()
        self._told_s = -limits.PLACES_LOG_S
        self.closed_silent = 0
        """Connections that were closed for others."""
        self.refused = 0
        """New ones of addresses with too many requests under way."""

    def __len__(self) -> int:
        return len(self._taken)

    async def wait(self) -> None:
        """Until there is a place for somebody, or somebody who is silent has one."""
        while len(self._taken) >= self._most and not self._close_silent(self._taken, self._most):
            self._freed = trio.Event()
            with trio.move_on_after(limits.PLACES_POLL_S):
                await self._freed.wait()

    def take(self, address: str) -> Place | None:
        """A place, after `wait`; None where its address has its share, with requests under way on all of them."""
        network = network_of(address)
        own = self._by_network[network]
        if len(own) >= self._share and not self._close_silent(own, self._share):
            self.refused += 1
            self._tell(network)
            return None
        place = Place(network)
        self._taken.add(place)
        self._by_network[network].add(place)
        return place

    def leave(self, place: Place) -> None:
        """Twice is harmless."""
        if place in self._taken:
            self._taken.remove(place)
            own = self._by_network[place.network]
            own.remove(place)
            if not own:
                del self._by_network[place.network]
            self._freed.set()

    def _close_silent(self, among: Iterable[Place], most: int) -> bool:
        """Whether anybody was."""
        silent = [(rank, place) for place in among if (rank := place.rank()) is not None]
        if not silent:
            return False
        silent.sort(key=itemgetter(0))
        several = 1 + most // limits.PLACES_AT_ONCE_SHARE
        chosen = [place for (known, _), place in silent[:several] if not known] or [silent[0][1]]
        self._tell(chosen[0].network)
        for place in chosen:
            self.closed_silent += 1
            self.leave(place)
            place.scope.cancel()
        return True

    def _tell(self, network: str) -> None:
        now_s = trio.current_time()
        if now_s - self._told_s >= limits.PLACES_LOG_S:
            self._told_s = now_s
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
    """Who has an IPv6 address has a network of them."""
    if ":" not in address:
        return address
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped) if mapped is not None else f"{found.exploded[:19]}::/64"
