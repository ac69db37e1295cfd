"""A request's router: another one asked first, and load while that fails.

Responsibility: `RequestRouter`, what the legs of a request ask and report to; `LocalRouter`, a router in the process;
`FallbackRouter`, which goes by load while its router fails, or passes over every instance.

Invariants: reports never fail a request, and go to the router that routed it: one that raises is as good as gone.

Concurrency: one trio thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import trio

from kvfs import limits
from kvfs.errors import KvfsError
from scheduler.conductor.values import NOTHING_SAID, Refused, Routed, Router, RouteRequest, Usage
from scheduler.proxy.upstream.engines import EngineAddress, Engines
from scheduler.routing.admission import Reason

log = logging.getLogger("kvfs.proxy")


class RouterDown(Exception):
    """The router does not answer, and has logged that."""


class RequestRouter(Protocol):
    """Implement `Router`, but for a route, which may take its time."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        ...

    async def route(self, request: RouteRequest) -> Routed | Refused:
        """Choose engines. Raises what a malformed request is refused with."""
        ...

    def prefilled(self, id: str) -> None: ...

    def prefill_failed(self, id: str) -> None: ...

    def first_token(self, id: str) -> None: ...

    def done(self, id: str, usage: Usage = NOTHING_SAID) -> None: ...

    def cancel(self, id: str) -> None: ...

    def unreachable(self, instance: str) -> None: ...


class LocalRouter:
    """Implement `RequestRouter`: ask a router in the process, and know the engines that it chooses among."""

    def __init__(
        self,
        router: Router,
        engines: Engines,
        addresses: Callable[[], Iterable[EngineAddress]] | None = None,
        say: Callable[[], None] = lambda: None,
    ) -> None:
        """`addresses` returns the router's engines; None: those that the proxy was started with. `say` tells the router
        what is seen here, every limits.HEALTH_INTERVAL_S."""
        self._router, self._engines, self._addresses, self._say = router, engines, addresses, say
        self.prefilled, self.prefill_failed = router.prefilled, router.prefill_failed
        self.first_token = router.first_token
        self.done, self.cancel, self.unreachable = router.done, router.cancel, router.unreachable

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the router's engines until cancelled."""
        task_status.started()
        while self._addresses is not None:
            self._engines.follow(self._addresses())
            self._say()
            await trio.sleep(limits.HEALTH_INTERVAL_S)
        await trio.sleep_forever()

    async def route(self, request: RouteRequest) -> Routed | Refused:
        found = self._router.route(request)
        if self._addresses is not None and names_nobody(found):
            self._engines.follow(self._addresses())  # load may decide next, by what they are at this moment
        return found


def names_nobody(found: Routed | Refused) -> bool:
    """Return whether a router passes over every instance."""
    return isinstance(found, Refused) and found.reason == Reason.NO_INSTANCE.value


class FallbackRouter:
    """Implement `RequestRouter`: ask `router`, and `load` while it fails."""

    def __init__(self, router: RequestRouter, load: Router) -> None:
        self._router, self._load = router, load
        self._by_load: set[str] = set()
        """Ids of requests under way that `load` routed."""
        self._logged_s = -limits.LOG_INTERVAL_S
        self.counts: Counter[str] = Counter()
        self.run = router.run

    async def route(self, request: RouteRequest) -> Routed | Refused:
        """Choose engines. Raises what the router refuses a malformed request with."""
        try:
            found = await self._router.route(request)
        except KvfsError:
            raise
        except Exception as error:
            self._log(error)
        else:
            # A router that has just passed over an engine, or not probed it yet, knows less than the connections to it.
            if not names_nobody(found):
                return found
        self.counts["by_load"] += 1
        found = self._load.route(request)
        if not isinstance(found, Refused):
            self._by_load.add(found.id)
        return found

    def prefilled(self, id: str) -> None:
        self._report(self._of(id).prefilled, id)

    def prefill_failed(self, id: str) -> None:
        self._report(self._of(id).prefill_failed, id)

    def first_token(self, id: str) -> None:
        self._report(self._of(id).first_token, id)

    def done(self, id: str, usage: Usage = NOTHING_SAID) -> None:
        self._report(self._of(id).done, id, usage)
        self._by_load.discard(id)

    def cancel(self, id: str) -> None:
        self._report(self._of(id).cancel, id)
        self._by_load.discard(id)

    def unreachable(self, instance: str) -> None:
        self._report(self._router.unreachable, instance)

    def _of(self, id: str) -> Router | RequestRouter:
        """Return the router of a request."""
        return self._load if id in self._by_load else self._router

    def _report(self, report: Callable[..., None], *values: str | Usage) -> None:
        try:
            report(*values)
        except Exception as error:
            self._log(error)

    def _log(self, error: Exception) -> None:
        now_s = trio.current_time()
        if not isinstance(error, RouterDown) and now_s - self._logged_s >= limits.LOG_INTERVAL_S:
            self._logged_s = now_s
            log.error("the router fails, requests go by load: %r", error)
