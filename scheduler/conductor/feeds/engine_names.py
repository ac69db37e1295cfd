"""Engines by a name that DNS knows: each of its addresses is an engine that is asked what it is.

Responsibility: resolve each name again and again, and have the survey ask the addresses that come and no more those
that are gone.

Invariants:
- An answer that does not come, or is an error or empty, changes nothing; each trouble is logged once.
- An address is gone after limits.DNS_ABSENT_ANSWERS answers in a row without it: a server may answer with some of many,
  and in turns.
- One question for each name is under way, however late its answer is: it occupies a thread.

Concurrency: a trio task for each name. The system's resolver runs in a thread.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import trio

from kvfs.config.server_urls import BY_NAME
from kvfs.errors import LimitExceeded
from kvfs.http.server_place import place_of
from kvfs.limits import DNS_ABSENT_ANSWERS, DNS_INTERVAL_S, DNS_LATE_S
from scheduler.conductor.planning.planner import Role

log = logging.getLogger("kvfs.conductor")

Resolve = Callable[[str, int], Awaitable[Collection[str]]]
"""Returns the addresses of a host, for a port. Raises OSError, UnicodeError."""


async def system_addresses(host: str, port: int) -> list[str]:
    """Return the addresses (A and AAAA) that the system's resolver has. Raises OSError, UnicodeError."""
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Survey(Protocol):
    """Who asks engines what they are."""

    def follow(self, url: str, role: Role | None) -> bool:
        """Ask an engine from here on; return False where it is asked already. Raises LimitExceeded."""
        ...

    def drop(self, url: str) -> None:
        """Ask an engine no more, and remove its instances."""
        ...


@dataclass(slots=True)
class _Name:
    url: str
    role: Role | None
    host: str
    port: int
    absent: dict[str, int] = field(default_factory=dict)
    """By URL of each address that is followed, how many answers in a row lacked it."""
    trouble: str = ""


class EngineNames:
    """See the module's header."""

    def __init__(
        self,
        names: Mapping[str, Role | None],
        survey: Survey,
        resolved: Callable[[str], None],
        resolve: Resolve,
    ) -> None:
        """`names`: URLs that begin with BY_NAME, with their roles. `resolved` is called with one that has an answer."""
        self._survey, self._resolved, self._resolve = survey, resolved, resolve
        self._names = []
        for url, role in names.items():
            place = place_of(url.removeprefix(BY_NAME))
            self._names.append(_Name(url, role, place.host, place.port))

    async def run(self) -> None:
        """Resolve until cancelled."""
        async with trio.open_nursery() as nursery:
            for name in self._names:
                nursery.start_soon(self._follow, name)

    async def _follow(self, name: _Name) -> None:
        while True:
            await self._ask(name)
            await trio.sleep(DNS_INTERVAL_S)

    async def _ask(self, name: _Name) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._log_late, name)
            try:
                addresses = await self._resolve(name.host, name.port)
            except (OSError, UnicodeError) as error:
                self._log(name, f"it does not resolve: {error}")
            else:
                self._take(name, addresses)
            nursery.cancel_scope.cancel()

    async def _log_late(self, name: _Name) -> None:
        await trio.sleep(DNS_LATE_S)
        self._log(name, f"it does not resolve in {DNS_LATE_S:g} s, and is waited for")

    def _take(self, name: _Name, addresses: Collection[str]) -> None:
        """Follow who is named now, and drop who was not for a while."""
        if not addresses:
            self._log(name, "it has no address")
            return
        urls = [f"http://{f'[{each}]' if ':' in each else each}:{name.port}" for each in sorted(addresses)]
        trouble = ""
        for url in urls:
            try:
                if url in name.absent or self._survey.follow(url, name.role):
                    name.absent[url] = 0
            except LimitExceeded as error:
                trouble = f"{url} is left out: {error}"
        for url in [each for each in name.absent if each not in urls]:
            name.absent[url] += 1
            if name.absent[url] >= DNS_ABSENT_ANSWERS:
                del name.absent[url]
                log.warning("engines %s: %s is gone", name.url, url)
                self._survey.drop(url)
        self._resolved(name.url)
        self._log(name, trouble)

    def _log(self, name: _Name, trouble: str) -> None:
        """Log a trouble that is new; empty: there is none."""
        if trouble and trouble != name.trouble:
            log.warning("engines %s: %s; those that are known stay", name.url, trouble)
        name.trouble = trouble
