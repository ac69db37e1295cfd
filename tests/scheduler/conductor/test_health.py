"""Who is there: instances that are killed, stopped or answer 503 are out within 2 s and come back by themselves, and a
Conductor that stood still asks again first. On a virtual clock; then the same on real sockets, where no time is judged.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvfs import limits
from kvfs.http.bounded_get import GetFailed, KeptConnection
from kvfs.limits import HEALTH_BUSY_S
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.feeds import health, listener
from scheduler.conductor.feeds.health import HealthWatch
from scheduler.conductor.values import EngineMetrics
from tests.support.conductors import Clock, conductor, instance, routed, serving, tokens
from tests.support.stub_engines import PROMPT, StubEngine, proxy_stand
from tests.support.waits import until


# --- on a virtual clock --------------------------------------------------------------------------------------
class Server:
    """An instance that answers as it is set to, after a while."""

    def __init__(self) -> None:
        self.status_is, self.takes_s = 200, 0.01
        self.refuses = self.stopped = False
        self.asked_s: list[float] = []
        self.open = 0

    def well(self) -> None:
        self.status_is, self.takes_s = 200, 0.01
        self.refuses = self.stopped = False

    async def status(self, path: str) -> int:
        assert path == "/health"
        began_s = trio.current_time()
        self.asked_s.append(began_s)
        await trio.sleep(self.takes_s)
        if self.refuses or trio.current_time() - began_s > 3:
            raise GetFailed("it takes no connection, or closed this one")
        while self.stopped:  # noqa: ASYNC110 (what a stopped server was asked, it answers when it goes on)
            await trio.sleep(0.05)
        return self.status_is

    async def close(self) -> None:
        self.open -= 1


class Stand:
    def __init__(self, made: Conductor) -> None:
        self.made = made
        self.servers: dict[str, Server] = {}

    def connect(self, url: str) -> Server:
        server = self.servers.setdefault(url.removeprefix("http://").removesuffix(".test"), Server())
        server.open += 1
        return server

    def up(self) -> set[str]:
        return {each["name"] for each in self.made.status()["instances"] if each["reachable"]}

    @property
    def outs(self) -> int:
        """How often an instance was put out."""
        return self.made.counts["unreachable"]


@asynccontextmanager
async def watching(*names: str) -> AsyncIterator[Stand]:
    made = conductor(trio.current_time, *(instance(name) for name in names))  # type: ignore[arg-type]
    stand = Stand(made)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(HealthWatch(made.registry, stand.connect).run)
        await trio.sleep(3)
        yield stand
        nursery.cancel_scope.cancel()


def killed(server: Server) -> None:
    server.refuses = True


def stopped(server: Server) -> None:
    server.stopped = True


def unhealthy(server: Server) -> None:
    server.status_is = 503


def too_slow(server: Server) -> None:
    server.takes_s = 1.2


@pytest.mark.parametrize("fault", [killed, stopped, unhealthy, too_slow])
@pytest.mark.parametrize("phase_s", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
async def test_one_that_does_not_answer_is_out_within_two_seconds_and_back_when_it_does(
    fault: Callable[[Server], None],
    phase_s: float,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watching("a", "b") as stand:
        await trio.sleep(phase_s)
        assert stand.up() == {"a", "b"}
        fault(stand.servers["a"])
        await trio.sleep(2)
        assert stand.up() == {"b"}
        assert {routed(stand.made, tokens(n, 100)).decode for n in range(4)} == {"b"}
        await trio.sleep(60)
        assert (stand.up(), stand.outs) == ({"b"}, 1), "it is neither tried nor logged again and again"
        assert len(stand.servers["a"].asked_s) < 70 / 0.5
        stand.servers["a"].well()
        await trio.sleep(2)
        assert stand.up() == {"a", "b"}
        assert "a" in {routed(stand.made, tokens(n, 100)).decode for n in range(4, 8)}
    said = [each.getMessage() for each in caplog.records]
    assert [text.startswith("instance a is out: ") for text in said] == [True, False], said
    assert said[1] == "instance a answers again"


@asynccontextmanager
async def streaming(made: Conductor, name: str) -> AsyncIterator[None]:
    """Have a proxy say that bytes of an instance's answers come."""

    async def say() -> None:
        while True:
            made.heard([name, "nobody"], ())
            await trio.sleep(0.4)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(say)
        yield
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("takes_s", [1.2, 2.0, 2.9])
@pytest.mark.parametrize("phase_s", [0.0, 0.15, 0.35, 0.55])
async def test_one_that_is_late_while_its_answers_come_is_busy_and_out_within_two_seconds_of_the_last(
    takes_s: float, phase_s: float, autojump_clock: MockClock
) -> None:
    async with watching("a", "b") as stand:
        server = stand.servers["a"]
        async with streaming(stand.made, "a"):
            server.takes_s = takes_s
            await trio.sleep(60 + phase_s)
            assert (stand.up(), stand.outs) == ({"a", "b"}, 0)
        stopped(server)
        await trio.sleep(2)
        assert stand.up() == {"b"}
        server.well()
        server.takes_s = takes_s
        await trio.sleep(10)
        assert stand.up() == {"b"}, "it is late and sends nothing"
        async with streaming(stand.made, "a"):
            await trio.sleep(2 * takes_s + 0.5)
            assert stand.up() == {"a", "b"}, "late answers of one that sends are in time"


@pytest.mark.parametrize("fault", [killed, unhealthy])
async def test_one_that_refuses_or_says_that_it_is_ill_is_out_though_its_answers_come(
    fault: Callable[[Server], None], autojump_clock: MockClock
) -> None:
    async with watching("a", "b") as stand, streaming(stand.made, "a"):
        fault(stand.servers["a"])
        await trio.sleep(2)
        assert stand.up() == {"b"}


async def test_one_that_never_answers_is_out_in_the_end_though_its_answers_come(
    autojump_clock: MockClock,
) -> None:
    async with watching("a", "b") as stand, streaming(stand.made, "a"):
        stopped(stand.servers["a"])
        await trio.sleep(HEALTH_BUSY_S - 1)
        assert stand.up() == {"a", "b"}
        await trio.sleep(3)
        assert stand.up() == {"b"}
        await trio.sleep(60)
        assert (stand.up(), stand.outs) == ({"b"}, 1)


@pytest.mark.parametrize("at_s", [0.0, 0.13, 0.25, 0.31, 0.44])
@pytest.mark.parametrize("stood_s", [0.45, 0.6, 1.0, 4.0, 60.0])
async def test_a_conductor_that_stood_still_asks_again_before_it_puts_anyone_out(
    at_s: float, stood_s: float, autojump_clock: MockClock
) -> None:
    """Answers to what it asked before are late, and connections are closed, for its own standing still alone."""
    async with watching(*(f"i{n}" for n in range(32))) as stand:
        for server in stand.servers.values():
            server.takes_s = 0.8
        await trio.sleep(2 + at_s)
        for _ in range(3):
            autojump_clock.jump(stood_s)
            await trio.sleep(0.2)
        await trio.sleep(5)
        assert stand.outs == 0
        stopped(stand.servers["i7"])
        autojump_clock.jump(stood_s)
        await trio.sleep(2.1)
        assert stand.up() == {f"i{n}" for n in range(32)} - {"i7"}


async def test_an_answer_that_has_come_counts_before_the_look_that_misses_it(
    autojump_clock: MockClock,
) -> None:
    async with watching(*(f"i{n}" for n in range(32))) as stand:
        for n, server in enumerate(stand.servers.values()):
            server.takes_s = 0.9 + 0.003 * n
        for n in range(100):
            await trio.sleep(1.5 + n * 0.0137 % 0.5)
            autojump_clock.jump(0.3)
        assert stand.outs == 0


async def test_one_that_is_always_late_still_finds_who_is_silent(autojump_clock: MockClock) -> None:
    async with watching("a", "b") as stand:
        stopped(stand.servers["a"])
        for _ in range(30):
            autojump_clock.jump(1.0)
            await trio.sleep(0.05)
        assert (stand.up(), stand.outs) == ({"b"}, 1)


async def test_questions_to_many_are_spread_and_each_is_asked_twice_a_second(
    autojump_clock: MockClock,
) -> None:
    async with watching(*(f"i{n}" for n in range(256))) as stand:
        begin_s = trio.current_time()
        await trio.sleep(4)
        for server in stand.servers.values():
            times = [at_s for at_s in server.asked_s if at_s > begin_s]
            assert 7 <= len(times) <= 8
        at = Counter(int(at_s * 10) for each in stand.servers.values() for at_s in each.asked_s)
        even = 256 * 0.1 / 0.51
        assert max(at.values()) < 1.3 * even


async def test_only_those_that_requests_are_sent_to_are_asked_and_none_that_is_removed(
    autojump_clock: MockClock,
) -> None:
    async with watching("a", "b") as stand:
        stand.made.registry.add(instance("c", routable=False))
        await trio.sleep(1)
        assert set(stand.servers) == {"a", "b"}
        killed(stand.servers["b"])
        await trio.sleep(1)
        stand.made.remove("b")
        await trio.sleep(0.2)
        assert (stand.servers["a"].open, stand.servers["b"].open) == (1, 0)
        asked = len(stand.servers["b"].asked_s)
        await trio.sleep(1)
        assert len(stand.servers["b"].asked_s) == asked
        stand.servers["b"].well()
        stand.made.registry.add(instance("b"))
        await trio.sleep(1)
        assert (stand.up(), stand.servers["b"].open) == ({"a", "b", "c"}, 1)


async def test_ranks_behind_one_address_are_asked_once_and_are_out_and_back_together(
    autojump_clock: MockClock,
) -> None:
    async with watching("a") as stand:
        for rank in range(4):
            stand.made.registry.add(instance(f"r{rank}", url="http://ranks.test", data_parallel_rank=rank))
        await trio.sleep(2)
        assert (stand.up(), stand.servers["ranks"].open) == ({"a", "r0", "r1", "r2", "r3"}, 1)
        assert len(stand.servers["ranks"].asked_s) <= 4
        stopped(stand.servers["ranks"])
        await trio.sleep(2)
        assert (stand.up(), stand.outs) == ({"a"}, 4)
        stand.servers["ranks"].well()
        stand.made.remove("r0")
        await trio.sleep(2)
        assert (stand.up(), stand.servers["ranks"].open) == ({"a", "r1", "r2", "r3"}, 1)
        for rank in range(1, 4):
            stand.made.remove(f"r{rank}")
        await trio.sleep(1)
        assert stand.servers["ranks"].open == 0


async def test_one_that_is_registered_anew_is_asked_at_its_new_address(autojump_clock: MockClock) -> None:
    async with watching("a", "b") as stand:
        stand.made.remove("b")
        stand.made.registry.add(instance("b", url="http://elsewhere.test"))
        await trio.sleep(1)
        killed(stand.servers["elsewhere"])
        await trio.sleep(2)
        assert (stand.up(), stand.servers["b"].open) == ({"a"}, 0)


def test_what_is_found_of_one_that_was_removed_meanwhile_changes_nothing() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    pool, member = made.registry.member("b")
    made.registry.set_down(pool, member, "silent")
    made.remove("b")
    made.registry.set_down(pool, member, "")
    assert {routed(made, tokens(n, 100)).decode for n in range(8)} == {"a"}
    made.registry.add(instance("c"))
    made.registry.set_down(pool, member, "silent")
    assert "c" in {routed(made, tokens(n, 100)).decode for n in range(8, 20)}


async def test_an_answer_does_not_end_what_a_client_reported(autojump_clock: MockClock) -> None:
    """An engine may answer there and still break requests: its metrics, which are read more slowly, end that."""
    async with watching("a", "b") as stand:
        stand.made.unreachable("a")
        await trio.sleep(3)
        assert stand.up() == {"b"}
        stand.made.registry.observed("a", EngineMetrics())
        assert stand.up() == {"a", "b"}
        killed(stand.servers["a"])
        await trio.sleep(2)
        stand.made.registry.observed("a", EngineMetrics())
        assert stand.up() == {"b"}, "and its metrics do not bring back one that is out"


# --- on real sockets -----------------------------------------------------------------------------------------
@asynccontextmanager
async def two_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Conductor, list[StubEngine], trio.Nursery]]:
    """A Conductor's service and two engines; metrics are looked at once."""
    monkeypatch.setattr(health, "HEALTH_ASK_INTERVAL_S", 0.05)
    monkeypatch.setattr(listener, "PROBE_INTERVAL_S", 1e6)
    engines = [StubEngine(), StubEngine()]
    async with trio.open_nursery() as nursery:
        for engine in engines:
            await nursery.start(engine.run)
        async with serving(health=True) as (service, _):
            for engine in engines:
                service.add(instance(str(engine.port), url=engine.url))
            await until(lambda: all(engine.health_asked > 3 for engine in engines))
            yield service.conductor, engines, nursery
        nursery.cancel_scope.cancel()


def chosen(made: Conductor) -> set[str]:
    found = [routed(made, tokens(n, 100)) for n in range(6)]
    for each in found:
        made.cancel(each.id)
    return {each.decode_url for each in found}


async def test_engines_on_sockets_are_out_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_engines(monkeypatch) as (made, (one, other), nursery):
        await until(lambda: len({each["reachable"] for each in made.status()["instances"]}) == 1)

        def is_out(engine: StubEngine) -> bool:
            down = {each["name"]: each["down"] for each in made.status()["instances"]}
            return bool(down[str(engine.port)])

        one.die()
        await until(lambda: is_out(one) and not is_out(other))
        assert chosen(made) == {other.url}
        await nursery.start(one.run)
        await until(lambda: not is_out(one))

        one.healthy = False
        await until(lambda: is_out(one) and not is_out(other))
        assert chosen(made) == {other.url}
        one.healthy = True
        await until(lambda: not is_out(one))

        other.frozen = True
        await until(lambda: is_out(other) and not is_out(one))
        assert chosen(made) == {one.url}
        other.die()
        other.frozen = False
        await nursery.start(other.run)
        await until(lambda: not is_out(other) and not is_out(one))


async def test_an_engine_that_streams_through_a_proxy_is_in_until_its_stream_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HEALTH_INTERVAL_S", 0.02)
    for name, value in (("HEALTH_LOOK_S", 0.02), ("MOST_MISSED", 2), ("MOST_WAITED", 3), ("MOST_QUIET", 20)):
        monkeypatch.setattr(health, name, value)
    async with two_engines(monkeypatch) as (made, (one, other), _), proxy_stand(router=made) as stand:
        await until(lambda: {str(one.port), str(other.port)} <= {each.name for each in stand.proxy.engines})
        one.behaviour = other.behaviour = "trickle"
        asker = await stand.asker()
        async with asker.stream:
            await asker.send("/v1/completions", {"model": "m", "prompt": PROMPT, "stream": True})
            first = await asker.first_bytes()
            [busy] = [engine for engine in (one, other) if engine.completions]
            busy.health_late = True
            asked = busy.health_asked
            await until(lambda: busy.health_asked > asked + 20)
            member = made.registry.member(str(busy.port))[1]
            assert (member.down, made.counts["unreachable"]) == ("", 0)
            busy.go.set()
            await asker.rest(first)
        await until(lambda: bool(member.down))


async def test_connections_are_kept_and_one_that_the_engine_closed_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_engines(monkeypatch) as (made, (one, other), _):
        asked = one.health_asked
        await until(lambda: one.health_asked > asked + 10)
        assert one.accepted <= 1 + 1, "one is that of its metrics"
        other.closes_second = True
        asked = other.health_asked
        await until(lambda: other.health_asked > asked + 10)
        assert made.counts["unreachable"] == 0
        assert chosen(made) == {one.url, other.url}


async def test_a_loop_that_is_blocked_puts_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_engines(monkeypatch) as (made, engines, _):
        for _ in range(3):
            time.sleep(1.2)  # noqa: ASYNC251 (it is to stand still)
            asked = [each.health_asked for each in engines]
            await until(
                lambda asked=asked: all(
                    each.health_asked > before + 2 for each, before in zip(engines, asked, strict=True)
                )
            )
        assert made.counts["unreachable"] == 0


async def test_urls_that_are_none_put_out_their_instances_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever registers an instance may name anything that begins like a URL."""
    async with two_engines(monkeypatch) as (made, (one, other), _):
        for n, url in enumerate(("http://h:99999", "http://[", "http://h:x", "http://\u00e9.\udc80")):
            made.registry.add(instance(f"wrong-{n}", url=url))
        await until(lambda: sum(bool(each["down"]) for each in made.status()["instances"]) == 4)
        asked = one.health_asked
        await until(lambda: one.health_asked > asked + 2)
        assert chosen(made) == {one.url, other.url}


ANSWERS: dict[str, tuple[bytes, int | str, bool]] = {
    "nothing in it": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, True),
    "no content": (b"HTTP/1.1 204 No\r\n\r\n", 204, True),
    "chunked": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, True),
    "an error": (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno", 503, True),
    "closed": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 200, False),
    "of before": (b"HTTP/1.0 200 OK\r\n\r\nok", 200, False),
    "more than one": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 500 X\r\n\r\n", 200, False),
    "none": (b"", "without an answer", False),
    "no HTTP": (b"\x00\x01\r\n\r\n", "Expected HTTP", False),
    "too much": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + b"x" * 99999, "000 bytes of", False),
}


@pytest.mark.parametrize(("raw", "found", "kept"), ANSWERS.values(), ids=ANSWERS)
async def test_a_kept_connection_is_used_again_after_a_whole_answer_alone(
    raw: bytes, found: int | str, kept: bool
) -> None:
    accepted = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal accepted
        accepted += 1
        with suppress(trio.BrokenResourceError):
            while head := await stream.receive_some(4096):
                assert head.startswith(b"GET /base/health HTTP/1.1\r\nHost: 127.0.0.1:")
                if raw:
                    await stream.send_all(raw)
                if not kept:
                    return

    async with trio.open_nursery() as nursery:
        listeners: Any = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        connection = KeptConnection(
            f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/base/", most_bytes=1000
        )
        for _ in range(3):
            if isinstance(found, int):
                assert await connection.status("/health") == found
            else:
                with pytest.raises(GetFailed, match=found):
                    await connection.status("/health")
        await connection.close()
        nursery.cancel_scope.cancel()
    assert accepted == (1 if kept else 3)
