"""A Conductor in another process, over HTTP.

Responsibility: ask it for routes over kept connections, report to it, follow its instances, say from which bytes come
and who waits, and notice when it goes and when it is back.

Invariants:
- A route is waited for at most limits.CONDUCTOR_WAIT_S. One that comes later is cancelled there, so that no reservation
  is left behind; one that nobody waits for any more too.
- While the Conductor does not answer, no request waits for it. It is probed by asking for its instances.
- The reports of a request go out in their order. They wait while the Conductor is away, bounded: past
  limits.CONDUCTOR_REPORTS for each sender they are dropped and counted, and its deadlines end what was not reported.

Concurrency: one trio thread: a task that probes, limits.CONDUCTOR_SENDERS that report, one that says what
is seen here, one for each route.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import trio

from kvfs import limits
from kvfs.errors import InvalidRequest, NotFound, NotReady
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.values import NOTHING_SAID, Refused, Routed, RouteRequest, Usage
from scheduler.proxy.routers.fallback import RouterDown
from scheduler.proxy.upstream.connection import Dialer, EngineFailed
from scheduler.proxy.upstream.engines import Engine, EngineAddress, Engines

log = logging.getLogger("kvfs.proxy")

_encode = msgspec.json.Encoder(enc_hook=list).encode  # tokens may be an array
_routed = msgspec.json.Decoder(Routed).decode
_refused = msgspec.json.Decoder(Refused).decode


class _Known(msgspec.Struct):
    name: str
    url: str
    role: Role = "both"
    model: str = ""
    draining: bool = False
    routable: bool = True
    data_parallel_rank: int | None = None

    def as_address(self) -> EngineAddress:
        draining, rank = self.draining or not self.routable, self.data_parallel_rank
        return EngineAddress(self.url, self.role, self.name, draining=draining, model=self.model, rank=rank)


class _Status(msgspec.Struct):
    instances: list[_Known]
    awaited: list[str] = []


class _Problem(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Error(msgspec.Struct):
    error: _Problem = msgspec.field(default_factory=_Problem)


_status = msgspec.json.Decoder(_Status).decode
_error = msgspec.json.Decoder(_Error).decode


class _Report(NamedTuple):
    method: str
    path: str
    body: bytes = b""


class _Route:
    """A route that is asked for. `found`: what came of it, also when that was an error."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.found: Routed | Refused | Exception | None = None
        self.is_wanted = True
        self.done = trio.Event()


class RemoteRouter:
    """Implement `RequestRouter`; see the module's header."""

    def __init__(
        self,
        url: str,
        token: str,
        engines: Engines,
        authorities: Path | None = None,
        waiting: Callable[[], list[str]] = list,
    ) -> None:
        """Ask the Conductor at `url`; `authorities`: see Dialer; `waiting` returns the ids of what it deferred, while
        that waits here."""
        self._engines, self._waiting = engines, waiting
        self._dialer = Dialer(authorities)
        self._conductor = Engine(EngineAddress(url), self._dialer, lambda _: False)
        self._headers = b"Content-Type: application/json\r\n"
        if token:
            self._headers += b"Authorization: Bearer %b\r\n" % token.encode()
        self._nursery: trio.Nursery | None = None
        self._under_way = 0
        self._back, self._suspected = trio.Event(), trio.Event()
        channels = [
            trio.open_memory_channel[_Report](limits.CONDUCTOR_REPORTS)
            for _ in range(limits.CONDUCTOR_SENDERS)
        ]
        self._reports, self._to_send = [each[0] for each in channels], [each[1] for each in channels]
        self.down = "it was not asked yet"
        """Why requests go by load; empty while it answers."""
        self._was_up = False
        self._is_logged, self._logged_s = False, -limits.LOG_INTERVAL_S
        """Whether the log says that it is away, and since when."""
        self.counts: Counter[str] = Counter()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Probe, follow and report until cancelled; it has started after the first probe."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._dialer.sweeper.run)
                for channel in self._to_send:
                    self._nursery.start_soon(self._send, channel)
                self._nursery.start_soon(self._keep_saying)
                await self._look()
                task_status.started()
                await self._watch()
        finally:
            await self._conductor.pool.close()

    # --- whether it is there ------------------------------------------------------------------------------
    async def _watch(self) -> None:
        while True:
            with trio.move_on_after(limits.HEALTH_INTERVAL_S if self.down else limits.CONDUCTOR_LOOK_S):
                await self._suspected.wait()
            self._suspected = trio.Event()
            await self._look()

    async def _look(self) -> None:
        """Ask for the instances, which the engines follow from here on."""
        with trio.move_on_after(limits.HEALTH_TIMEOUT_S) as scope:
            try:
                status, data = await self._ask(_Report("GET", "/v1/instances"))
                if status != 200:
                    raise EngineFailed(f"it answers {status} to /v1/instances")
                found = _status(data)
            except (EngineFailed, msgspec.MsgspecError) as error:
                self._go_on_without(str(error))
                return
        if scope.cancelled_caught:
            self._go_on_without(f"no answer in {limits.HEALTH_TIMEOUT_S:g} s")
            return
        self._engines.awaited = found.awaited
        self._engines.follow(each.as_address() for each in found.instances)
        if self._is_logged or not self._was_up:
            log.warning("the Conductor at %s answers: it routes requests", self._conductor.address.url)
        self.down, self._is_logged, self._was_up = "", False, True
        self._back.set()

    def _go_on_without(self, reason: str) -> None:
        now_s = trio.current_time()
        if not self._is_logged and now_s - self._logged_s >= limits.LOG_INTERVAL_S:
            self._is_logged, self._logged_s = True, now_s
            log.warning(
                "the Conductor at %s is away, requests go by load: %s", self._conductor.address.url, reason
            )
        if self._back.is_set():
            self._back = trio.Event()
        self.down = reason

    def _suspect(self, reason: str) -> None:
        """Ask it for no route until it answers a probe, which is sent at once."""
        self._go_on_without(reason)
        self._suspected.set()

    async def _ask(self, asked: _Report) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises EngineFailed."""
        engine = self._conductor
        async with engine.ask(asked.method, asked.path.encode(), self._headers, asked.body) as answer:
            return answer.status, await answer.read_all()

    # --- routes -------------------------------------------------------------------------------------------
    async def route(self, request: RouteRequest) -> Routed | Refused:
        """Choose engines. Raises KvfsError for what the Conductor refuses, RouterDown where it does not answer."""
        if self.down or self._nursery is None:
            raise RouterDown(self.down)
        if self._under_way >= limits.CONDUCTOR_ROUTES:
            self.counts["late_routes"] += 1
            raise RouterDown(f"{limits.CONDUCTOR_ROUTES} routes are under way")
        wanted = _Route(_encode(request))
        self._nursery.start_soon(self._run, wanted)
        try:
            with trio.move_on_after(limits.CONDUCTOR_WAIT_S):
                await wanted.done.wait()
        except BaseException:
            self._abandon(wanted)
            raise
        found = wanted.found
        if found is None:
            self._abandon(wanted)
            self.counts["late_routes"] += 1
            reason = f"no route in {limits.CONDUCTOR_WAIT_S:g} s"
            self._suspect(reason)
            raise RouterDown(reason)
        if isinstance(found, Exception):
            raise found
        return found

    def _abandon(self, wanted: _Route) -> None:
        wanted.is_wanted = False
        if isinstance(wanted.found, Routed):
            self.cancel(wanted.found.id)

    async def _run(self, wanted: _Route) -> None:
        self._under_way += 1
        try:
            with trio.move_on_after(limits.CONDUCTOR_LATE_S):
                wanted.found = _answer(*await self._ask(_Report("POST", "/v1/route", wanted.body)))
        except (EngineFailed, msgspec.MsgspecError) as error:
            wanted.found = RouterDown(str(error))
            self._suspect(str(error))
        finally:
            self._under_way -= 1
        wanted.done.set()
        if not wanted.is_wanted:
            self._abandon(wanted)

    # --- reports ------------------------------------------------------------------------------------------
    def prefilled(self, id: str) -> None:
        self._report(id, "POST", "/prefilled")

    def prefill_failed(self, id: str) -> None:
        self._report(id, "POST", "/prefill_failed")

    def first_token(self, id: str) -> None:
        self._report(id, "POST", "/first_token")

    def done(self, id: str, usage: Usage = NOTHING_SAID) -> None:
        self._report(id, "POST", "/done", _encode(usage))

    def cancel(self, id: str) -> None:
        self._report(id, "DELETE", "")

    def unreachable(self, instance: str) -> None:
        self._put(instance, _Report("POST", f"/v1/instances/{quote(instance, safe='')}/unreachable"))

    def _report(self, id: str, method: str, what: str, body: bytes = b"") -> None:
        self._put(id, _Report(method, f"/v1/reservations/{quote(id, safe='')}{what}", body))

    def _put(self, id: str, report: _Report) -> None:
        try:
            self._reports[hash(id) % len(self._reports)].send_nowait(report)
        except trio.WouldBlock:
            self.counts["dropped_reports"] += 1

    async def _send(self, reports: trio.MemoryReceiveChannel[_Report]) -> None:
        """Send reports one after the other; one that fails goes out again when the Conductor is back."""
        async for report in reports:
            while not await self._sent(report):
                await self._back.wait()

    async def _keep_saying(self) -> None:
        """Say what is seen here, while there is anything."""
        while True:
            await trio.sleep(limits.HEALTH_INTERVAL_S)
            seen = {"instances": self._engines.take_heard(), "waiting": self._waiting()}
            if any(seen.values()) and not self.down:
                await self._sent(_Report("POST", "/v1/heard", _encode(seen)))

    async def _sent(self, report: _Report) -> bool:
        with trio.move_on_after(limits.HEALTH_TIMEOUT_S):
            try:
                status, _ = await self._ask(report)
            except EngineFailed as error:
                self._suspect(str(error))
                return False
            self.counts["refused_reports"] += status >= 300
            return True
        self._suspect(f"no answer to a report in {limits.HEALTH_TIMEOUT_S:g} s")
        return False


def _answer(status: int, data: bytes) -> Any:
    """Return what an answer to a route says, or the error that it is. Raises EngineFailed, msgspec.MsgspecError."""
    if status == 200:
        return _routed(data)
    if status == 429:
        return _refused(data)
    if status in (400, 404, 413):
        return (NotFound if status == 404 else InvalidRequest)(_error(data).error.message)
    if status == 503 and _error(data).error.code == NotReady.__name__:
        return NotReady(_error(data).error.message)
    raise EngineFailed(f"it answers {status} to /v1/route")
