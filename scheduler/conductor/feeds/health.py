"""Whether instances are there: the server of each that requests are sent to is asked at `/health`; it is out until that
answers.

Responsibility: ask each server over a connection that is kept, and tell the registry which instances are out and which
are back: data-parallel ranks are out and back together.

Invariants:
- A server that answers 5xx, takes no connection, or is silent for limits.HEALTH_TIMEOUT_S is out within 2 s of its
  last answer, and back with the next one that comes in time.
- One whose answers to requests send bytes, as proxies say, is not silent: its loop is busy. It is out within 2 s of the
  last of them, and after limits.HEALTH_BUSY_S without an answer. Its late answers are in time.
- Silence counts in looks, one each limits.HEALTH_LOOK_S: time in which this process itself stood still is none, and
  what failed while it did, for limits.HEALTH_LATE_S or longer, is asked again.
- One question at a time goes to each server; those of many are spread over HEALTH_ASK_INTERVAL_S.

Concurrency: a trio task for each server, and `run`, which alone judges silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio

from kvfs.http.bounded_get import GetFailed, KeptConnection
from kvfs.limits import (
    HEALTH_ASK_INTERVAL_S,
    HEALTH_BUSY_S,
    HEALTH_HEARD_S,
    HEALTH_LATE_S,
    HEALTH_LOOK_S,
    HEALTH_TIMEOUT_S,
    HEALTH_WAIT_S,
    MAX_HEALTH_BYTES,
)
from scheduler.conductor.pool import Member, Pool
from scheduler.conductor.registry import Registry

MOST_MISSED, MOST_WAITED = round(HEALTH_TIMEOUT_S / HEALTH_LOOK_S), round(HEALTH_WAIT_S / HEALTH_LOOK_S)
MOST_QUIET, MOST_UNANSWERED = round(HEALTH_HEARD_S / HEALTH_LOOK_S), round(HEALTH_BUSY_S / HEALTH_LOOK_S)
SPREAD = 0.618034
"""Multiples of the golden ratio, without their whole parts, lie as far apart as can be, however many there are."""


class Connection(Protocol):
    """Where one server is asked."""

    async def status(self, path: str) -> int:
        """Return the status of the answer. Raises GetFailed."""
        ...

    async def close(self) -> None:
        """Close it; it may be asked again."""
        ...


def connection_to(url: str, authorities: Path | None = None) -> Connection:
    """Return where a server is asked; `authorities`: see `client_context`."""
    return KeptConnection(url, MAX_HEALTH_BYTES, authorities)


@dataclass(slots=True, eq=False)
class _Asked:
    """A server that is asked."""

    instances: list[tuple[Pool, Member]]
    """Who is out while it does not answer."""
    connection: Connection
    first_s: float
    """How long to wait before it is first asked."""
    missed: int | None = None
    """Looks since it was asked; None while it owes no answer."""
    unanswered: int = 0
    """Looks since its last answer, those alone in which it owed one."""
    quiet: int = MOST_QUIET + 1
    """Looks since bytes of its answers to requests came."""
    waiting: trio.CancelScope = field(default_factory=trio.CancelScope)
    gone: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def is_busy(self) -> bool:
        """Return whether it sends bytes, so that it may be late with its answer."""
        return self.quiet <= MOST_QUIET and self.unanswered <= MOST_UNANSWERED

    def look(self) -> None:
        """Count a look."""
        self.quiet = 0 if any(member.was_heard for _, member in self.instances) else self.quiet + 1
        for _, member in self.instances:
            member.was_heard = False
        if self.missed is not None:
            self.missed += 1
            self.unanswered += 1


class HealthWatch:
    """See the module's header."""

    def __init__(self, registry: Registry, connect: Callable[[str], Connection] = connection_to) -> None:
        self._registry, self._connect = registry, connect
        self._asked: dict[tuple[str, str], _Asked] = {}
        """By name and URL: a name may be registered anew, with another one."""
        self._started = 0

    async def run(self) -> None:
        """Watch until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._follow(nursery)
                await trio.sleep(HEALTH_LOOK_S)
                await trio.lowlevel.checkpoint()  # answers that have come are read first
                self._look()

    def _follow(self, nursery: trio.Nursery) -> None:
        """Ask the servers of the instances that are registered, and no others."""
        found: dict[tuple[str, str], list[tuple[Pool, Member]]] = {}
        for pool, member in self._registry.members():
            instance = member.instance
            if instance.routable:
                found.setdefault((instance.server, instance.url), []).append((pool, member))
        for server in [each for each in self._asked if each not in found]:
            self._asked.pop(server).gone.cancel()
        for server, instances in found.items():
            if server in self._asked:
                self._asked[server].instances = instances
                continue
            self._started += 1
            first_s = self._started * SPREAD % 1 * HEALTH_ASK_INTERVAL_S
            asked = _Asked(instances, self._connect(server[1]), first_s)
            self._asked[server] = asked
            nursery.start_soon(self._keep_asking, asked)

    def _look(self) -> None:
        """Put out who has owed an answer for too long."""
        for asked in self._asked.values():
            asked.look()
            if asked.missed is None:
                continue
            if asked.missed > MOST_MISSED and not asked.is_busy:
                self._note(asked, f"it does not answer /health in {HEALTH_TIMEOUT_S:g} s")
            if asked.missed > MOST_WAITED:
                asked.waiting.cancel()

    async def _keep_asking(self, asked: _Asked) -> None:
        try:
            with asked.gone:
                await trio.sleep(asked.first_s)
                while True:
                    if await self._ask(asked):
                        await trio.sleep(HEALTH_ASK_INTERVAL_S)
        finally:
            await asked.connection.close()

    async def _ask(self, asked: _Asked) -> bool:
        """Ask once, and return whether that says anything."""
        began_s = trio.current_time()
        asked.missed, asked.waiting = 0, trio.CancelScope()
        fault: str | None = None
        with asked.waiting:
            try:
                status = await asked.connection.status("/health")
                if status >= 500:
                    fault = f"its /health is {status}"
                elif asked.missed <= MOST_MISSED or asked.is_busy:
                    fault = ""
                asked.unanswered = 0
            except GetFailed as error:
                if trio.current_time() - began_s - asked.missed * HEALTH_LOOK_S < HEALTH_LATE_S:
                    fault = str(error)
        asked.missed = None
        if fault is not None:
            self._note(asked, fault)
        return fault is not None

    def _note(self, asked: _Asked, fault: str) -> None:
        for pool, member in asked.instances:
            if member.down != fault:
                self._registry.set_down(pool, member, fault)
