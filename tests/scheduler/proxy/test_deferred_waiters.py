"""Requests that wait in the proxy for room in a batch: the line's order, its bounds, and who leaves it.

Rounds are asked for by the tests, but where the clock is one that jumps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvfs import limits
from kvfs.errors import NotFound
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.values import Refused, Routed, RouteRequest
from scheduler.proxy.proxy_metrics import Counts
from scheduler.proxy.routers.fallback import RequestRouter
from scheduler.proxy.waiting_line import WaitingLine
from scheduler.routing.admission import DEFER_S, RESERVE_AFTER_S
from tests.scheduler.conductor.test_deferred_requests import COSTS, LONG, SHORT
from tests.scheduler.proxy.test_proxy_metrics import metrics
from tests.scheduler.proxy.test_router_port import NotingRouter
from tests.support.conductors import Clock, conductor, instance, over, serving
from tests.support.stub_engines import Asker, Message, Stand, proxy_stand
from tests.support.waits import WAIT_S, until

NO_ROOM = "no room"
TOKENS = 100


class DeferringRouter(NotingRouter):
    """Defer what has no room."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 0
        """How many requests more it routes."""
        self.most_tokens = 1 << 20
        """Of those."""

    @property
    def asked(self) -> list[int]:
        """Return the first token of each question, and forget them."""
        found = [request.tokens[0] for request in self.requests if request.tokens]
        self.requests.clear()
        return found

    @property
    def cancelled(self) -> list[str]:
        return [id for name, id, *_ in self.reports if name == "cancel"]

    def route(self, request: RouteRequest) -> Routed | Refused:
        assert request.tokens
        has_room = self.room > 0 and len(request.tokens) <= self.most_tokens
        if self.answer is not None or has_room:
            self.room -= has_room
            return super().route(request)
        self.requests.append(request)
        return Refused(
            id=request.deferred_id or f"of {request.tokens[0]}",
            reason=NO_ROOM,
            retry_after_s=DEFER_S,
            deferred=True,
        )


async def never(line: WaitingLine) -> None:
    await trio.sleep_forever()


@asynccontextmanager
async def stand_of(router: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[Stand]:
    """Run a proxy whose line is asked for by the test alone."""
    monkeypatch.setattr(WaitingLine, "run", never)
    async with proxy_stand("both", "both", router=router, **options) as stand:
        if isinstance(router, NotingRouter):
            router.stand = stand
        yield stand


class Clients:
    """Requests of which each is told by the first token of its prompt."""

    def __init__(self, stand: Stand, nursery: trio.Nursery) -> None:
        self._stand, self._nursery = stand, nursery
        self.answers: dict[int, Message] = {}
        self.askers: dict[int, Asker] = {}

    async def ask(self, first: int, count: int = TOKENS, **more: Any) -> None:
        """Send a request, which waits."""
        line = self._stand.proxy.line
        before = len(line)
        self.askers[first] = asker = await self._stand.asker()
        body = {"model": "m", "prompt": [first, *range(1, count)], "max_tokens": 3, **more}
        await asker.send("/v1/completions", body)
        self._nursery.start_soon(self._answered, first, asker)
        await until(lambda: len(line) > before or first in self.answers)

    async def _answered(self, first: int, asker: Asker) -> None:
        async with asker.stream:
            with suppress(trio.ClosedResourceError):  # the test closes some
                self.answers[first] = await asker.answer()

    async def got(self, *firsts: int) -> list[int]:
        """Return the statuses of answers, once they are there."""
        await until(lambda: set(firsts) <= set(self.answers))
        return [self.answers[first].status for first in firsts]


async def test_requests_that_wait_are_routed_in_the_order_of_their_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = DeferringRouter()
    async with stand_of(router, monkeypatch) as stand, trio.open_nursery() as nursery:
        clients, line = Clients(stand, nursery), stand.proxy.line
        for first in (1, 2, 3):
            await clients.ask(first)
        assert router.asked == [1], "those behind it are asked for in the next round"
        await line.look()
        assert router.asked == [1, 2, 3]
        await line.look()
        assert router.asked == [1], "what is no shorter than one that has no room has none"
        router.room = 1
        await line.look()
        assert router.asked == [1, 2]
        assert await clients.got(1) == [200]
        assert not clients.answers.keys() & {2, 3}
        router.room = 1
        await clients.ask(4)
        assert router.asked == [], "nobody overtakes who waits"
        router.room = 3
        await line.look()
        assert router.asked == [2, 3, 4]
        assert await clients.got(2, 3, 4) == [200] * 3
        assert len(line) == 0
        assert router.cancelled == []
        found = await metrics(stand)
        assert found["kvfs_proxy_deferred_total", ""] == 4
        assert found["kvfs_proxy_waiting", ""] == 0
        assert found["kvfs_proxy_waited_seconds_count", "routed"] == 4


async def test_a_shorter_request_takes_the_room_that_a_longer_one_cannot_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = DeferringRouter()
    async with stand_of(router, monkeypatch) as stand, trio.open_nursery() as nursery:
        clients, line = Clients(stand, nursery), stand.proxy.line
        for first, count in ((1, 300), (2, 200), (3, 250), (4, 100)):
            await clients.ask(first, count)
        await line.look()
        assert set(router.asked) == {1, 2, 3, 4}
        router.room, router.most_tokens = 1, 150
        await line.look()
        assert router.asked == [1, 2, 4], "3 is longer than 2, which has no room"
        assert await clients.got(4) == [200]
        await clients.ask(5, 400, model="n")
        assert router.asked == [5], "of another model these say nothing"
        nursery.cancel_scope.cancel()


async def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROXY_WAITERS", 2)
    router = DeferringRouter()
    async with stand_of(router, monkeypatch) as stand, trio.open_nursery() as nursery:
        clients = Clients(stand, nursery)
        for first, count in ((1, 300), (2, 200), (3, 100), (4, 300)):
            await clients.ask(first, count)
        assert len(stand.proxy.line) == 2
        for first in (3, 4):
            answer = clients.answers[first]
            assert (answer.status, answer.headers[b"retry-after"]) == (429, b"1")
            assert answer.json()["error"]["code"] == "no_capacity"
        assert router.cancelled == ["of 3"], "its router keeps nothing for it"
        assert not any(engine.completions for engine in stand.engines)
        found = await metrics(stand)
        assert found["kvfs_proxy_line_full_total", ""] == 2
        assert found["kvfs_proxy_waiting", ""] == 2
        nursery.cancel_scope.cancel()


async def test_a_client_that_goes_away_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    router = DeferringRouter()
    async with stand_of(router, monkeypatch) as stand, trio.open_nursery() as nursery:
        clients, line = Clients(stand, nursery), stand.proxy.line
        await clients.ask(1)
        await clients.ask(2)
        await trio.aclose_forcefully(clients.askers[1].stream)
        await until(lambda: len(line) == 1)
        assert router.cancelled == ["of 1"]
        router.room = 2
        await line.look()
        assert router.asked[-1] == 2
        assert await clients.got(2) == [200]
        assert all(asked.body["prompt"][0] == 2 for engine in stand.engines for asked in engine.completions)
        assert (await metrics(stand))["kvfs_proxy_waited_seconds_count", "gone"] == 1


async def test_what_the_router_says_of_a_request_that_waits_is_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = DeferringRouter()
    async with stand_of(router, monkeypatch) as stand, trio.open_nursery() as nursery:
        clients, line = Clients(stand, nursery), stand.proxy.line
        await clients.ask(1)
        router.answer = Refused(reason="its first token would be late", retry_after_s=2.5)
        await line.look()
        assert await clients.got(1) == [429]
        answer = clients.answers[1]
        assert answer.headers[b"retry-after"] == b"3"
        assert answer.json()["error"]["message"] == "its first token would be late"
        router.answer = None
        await clients.ask(2)
        router.answer = NotFound("model 'm': gone")
        await line.look()
        assert await clients.got(2) == [404]
        assert router.cancelled == []
        assert not any(engine.completions for engine in stand.engines)
        assert (await metrics(stand))["kvfs_proxy_waited_seconds_count", "refused"] == 2


# --- the line alone ------------------------------------------------------------------------------------------
class SlowRouter:
    """Answer when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str]] = []
        """When, and with which id."""
        self.until_s: dict[int, float] = {}
        """Until when waiting helps, by the length of a prompt."""
        self.routes = False
        self.go, self.began = trio.Event(), trio.Event()
        self.go.set()
        self.cancelled: list[str] = []

    async def route(self, request: RouteRequest) -> Routed | Refused:
        self.asked.append((trio.current_time(), request.deferred_id))
        self.began.set()
        await self.go.wait()
        if self.routes:
            return Routed(id="routed", decode="d", decode_url="http://d")
        until_s = self.until_s.get(len(request.tokens or ()))
        give_up_s = None if until_s is None else until_s - trio.current_time()
        return Refused(id="w", reason=NO_ROOM, retry_after_s=DEFER_S, deferred=True, give_up_s=give_up_s)

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)


def line_of(router: SlowRouter) -> WaitingLine:
    as_router: Any = router
    port: RequestRouter = as_router
    return WaitingLine(port, Counts())


def question(deferred_id: str, count: int = TOKENS, waited_s: float = 0.0) -> RouteRequest:
    return RouteRequest(model="m", tokens=[1] * count, waited_s=waited_s, deferred_id=deferred_id)


@pytest.mark.parametrize("routes", [False, True])
async def test_who_leaves_while_its_router_is_asked_is_cancelled_there(routes: bool) -> None:
    router, scope = SlowRouter(), trio.CancelScope()
    line = line_of(router)

    async def client() -> None:
        with scope:
            await line.route(question)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client)
        await until(lambda: len(line) == 1)
        router.go, router.began, router.routes = trio.Event(), trio.Event(), routes
        nursery.start_soon(line.look)
        await router.began.wait()
        scope.cancel()
        await until(lambda: len(line) == 0)
        router.go.set()
    assert router.cancelled == ["w", "routed" if routes else "w"]


@pytest.mark.parametrize(("helps_s", "waits_s"), [(None, limits.PROXY_DEFERRED_S), (1.1, 1.25)])
async def test_a_deadline_ends_the_wait(
    helps_s: float | None, waits_s: float, autojump_clock: MockClock
) -> None:
    router = SlowRouter()
    line, began_s = line_of(router), trio.current_time()
    if helps_s is not None:
        router.until_s = {TOKENS: began_s + helps_s}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        with trio.fail_after(2 * waits_s):
            found = await line.route(question)
        nursery.cancel_scope.cancel()
    assert isinstance(found, Refused)
    assert found.reason == NO_ROOM
    assert trio.current_time() - began_s == pytest.approx(waits_s)
    assert {id for _, id in router.asked[1:]} == {"w"}
    assert len(router.asked) == 1 + round(waits_s / DEFER_S), "every DEFER_S"
    assert router.cancelled == ["w"], "nothing is kept for it"
    assert len(line) == 0


async def test_a_long_prompt_s_deadline_may_come_before_that_of_who_is_before_it(
    autojump_clock: MockClock,
) -> None:
    router = SlowRouter()
    line, began_s = line_of(router), trio.current_time()
    router.until_s = {TOKENS: began_s + 30.0, 3 * TOKENS: began_s + 1.1}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        nursery.start_soon(line.route, question)
        await until(lambda: len(line) == 1)
        with trio.fail_after(20.0):
            await line.route(partial(question, count=3 * TOKENS))
        assert len(line) == 1
        assert trio.current_time() - began_s == pytest.approx(1.25)
        nursery.cancel_scope.cancel()


async def test_who_came_first_is_first_however_late_it_was_asked_for(autojump_clock: MockClock) -> None:
    """Its tokens took their time."""
    router = SlowRouter()
    line = line_of(router)
    order: list[str] = []

    async def client(name: str, waited_s: float) -> None:
        await line.route(partial(question, waited_s=waited_s))
        order.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client, "late", 0.0)
        await until(lambda: len(line) == 1)
        nursery.start_soon(client, "early", 2.0)
        await until(lambda: len(line) == 2)
        router.routes = True
        await line.look()
    assert order == ["early", "late"]


# --- with a Conductor ----------------------------------------------------------------------------------------
async def batch_of(stand: Stand, clients: list[Asker], count: int) -> None:
    """Put a request into a batch: its first token has come."""
    asker = await stand.asker()
    clients.append(asker)
    body = {"model": "m", "prompt": [count] * count, "max_tokens": 3, "stream": True}
    await asker.send("/v1/completions", body)
    await asker.first_bytes()


def rounds(made: Conductor, clock: Clock, line: WaitingLine) -> Callable[[float], Any]:
    async def pass_s(s: float) -> None:
        for _ in range(round(s / DEFER_S)):
            clock.now_s += DEFER_S
            await line.look()
            made.tick()

    return pass_s


async def test_a_conductor_keeps_a_batch_for_who_waits_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    made = conductor(clock, costs=COSTS, fitted=False)
    async with stand_of(made, monkeypatch) as stand, trio.open_nursery() as nursery:
        line, engines = stand.proxy.line, dict(zip("ab", stand.engines, strict=True))
        askers: list[Asker] = []
        for name, engine in engines.items():
            engine.behaviour = "pause_inside"
            made.registry.add(instance(name, url=engine.url))
        for count in (2_500, 2_600):
            await batch_of(stand, askers, count)
        await until(lambda: sum(each["active_requests"] for each in made.status()["instances"]) == 2)
        clients = Clients(stand, nursery)
        await clients.ask(1, LONG)
        pass_s = rounds(made, clock, line)
        await pass_s(RESERVE_AFTER_S)
        assert len(line) == 1
        [kept] = [each["name"] for each in made.status()["instances"] if each["kept"]]
        other = engines["ab".replace(kept, "")]
        await batch_of(stand, askers, SHORT)
        assert len(other.completions) == 2, "there is room for it beside who is kept a batch for"
        await clients.ask(2, SHORT)
        await pass_s(DEFER_S)
        assert len(line) == 2, "who came later has no part in what is kept"
        engines[kept].go.set()
        await until(lambda: made.counts["done"] == 1)
        await pass_s(DEFER_S)
        assert await clients.got(1, 2) == [200, 200]
        lengths = [each.tokens for each in made.log.all() if each.decode == kept]
        assert lengths[1:] == [LONG, SHORT]
        other.go.set()
        await until(lambda: made.counts["done"] == 5)
        assert (made.counts["deferred"], made.counts["refused"]) == (2, 0)
        over(made)
        for asker in askers:
            await asker.stream.aclose()


async def test_a_conductor_elsewhere_is_told_who_waits_and_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONDUCTOR_WAIT_S", WAIT_S)
    async with serving(fitted=False) as (service, addresses):
        made = service.conductor
        async with (
            stand_of(None, monkeypatch, conductor=addresses.http) as stand,
            trio.open_nursery() as nursery,
        ):
            engine = stand.engines[0]
            engine.behaviour = "pause_inside"
            made.registry.add(instance("a", url=engine.url))
            [pool] = made.registry.pools()
            pool.planner.set_costs(COSTS)
            pool.costs = COSTS
            askers: list[Asker] = []
            await batch_of(stand, askers, 2_500)
            await until(lambda: made.status()["instances"][0]["active_requests"] == 1)
            clients = Clients(stand, nursery)
            await clients.ask(1, LONG)
            await clients.ask(2, LONG - SHORT)
            assert (made.status()["waiting"], made.counts["deferred"]) == (2, 2)
            await stand.proxy.line.look()
            assert (made.status()["waiting"], made.counts["deferred"]) == (2, 2), "each keeps its place"
            await trio.aclose_forcefully(clients.askers[1].stream)
            await until(lambda: made.counts["left"] == 1)
            engine.go.set()
            await until(lambda: made.counts["done"] == 1)
            await stand.proxy.line.look()
            assert await clients.got(2) == [200]
            await until(lambda: made.counts["done"] == 2)
            assert made.status()["waiting"] == 0
            await askers[0].stream.aclose()


async def test_a_conductor_hears_who_waits_though_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONDUCTOR_WAIT_S", WAIT_S)
    monkeypatch.setattr(limits, "HEALTH_INTERVAL_S", 0.02)
    async with serving(fitted=False) as (service, addresses):
        made = service.conductor
        made.registry.add(instance("a"))
        [pool] = made.registry.pools()
        pool.planner.set_costs(COSTS)
        pool.costs = COSTS
        for options in ({"router": made}, {"router": None, "conductor": addresses.http}):
            async with stand_of(**options, monkeypatch=monkeypatch) as stand, trio.open_nursery() as nursery:
                taken = made.route(RouteRequest(model="m", length=2_500))
                assert isinstance(taken, Routed)
                clients = Clients(stand, nursery)
                await clients.ask(1, LONG)
                [waiter] = made._waiters._by_id.values()
                await until(lambda waiter=waiter: waiter.heard_s > waiter.asked_s)
                assert made._waiters.contexts(pool, waiter.heard_s) == (LONG, 1)
                await trio.aclose_forcefully(clients.askers[1].stream)
                await until(lambda: not made.status()["waiting"])
                assert made._waiters.contexts(pool, waiter.heard_s) == (0, 0)
                made.cancel(taken.id)
