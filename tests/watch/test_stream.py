"""The stream of events over plain sockets: what comes, who is dropped, how many there may be, how it ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from kvfs import limits
from kvfs.http.server import Server, listen
from kvfs.watch import hub as module
from kvfs.watch.hub import Hub
from kvfs.watch.panels import Panel, Snapshot
from kvfs.watch.window import Window
from tests.support.conductors import Answer, Asker, asking, instance, serving
from tests.support.waits import WAIT_S, until


class Stand:
    """A hub behind a port."""

    def __init__(self) -> None:
        self.looks = 0
        self.rows = 1
        self.failing = False
        self.held: trio.Event | None = None
        self.hub = Hub(self.look)
        self.server = Server(self.hub.serve, lambda status, message: ([], message.encode()))
        self.port = 0

    async def look(self, _: Window) -> Snapshot:
        self.looks += 1
        if self.held is not None:
            await self.held.wait()
        if self.failing:
            raise ValueError("a look that fails")
        rows = tuple((f"row {n} " + "x" * 90,) for n in range(self.rows))
        return Snapshot(
            kind="store", name=str(self.looks), at_s=0, window_s=0, panels=(Panel(title="t", rows=rows),)
        )


@asynccontextmanager
async def standing(monkeypatch: pytest.MonkeyPatch, interval_s: float = 0.01) -> AsyncIterator[Stand]:
    monkeypatch.setattr(module, "WATCH_INTERVAL_S", interval_s)
    stand = Stand()
    sockets = listen("127.0.0.1", 0, shared=False)
    stand.port = sockets[0].getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.hub.run)
        nursery.start_soon(stand.server.serve, sockets)
        with trio.fail_after(WAIT_S):
            yield stand
        nursery.cancel_scope.cancel()


class Listener:
    """One connection that reads events."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream, self._left = stream, b""

    async def ask(self, *headers: str) -> bytes:
        """Ask for the events; return the head of the answer."""
        lines = ["GET /v1/events HTTP/1.1", "Host: h", *headers, "\r\n"]
        await self.stream.send_all("\r\n".join(lines).encode())
        return await self._until(b"\r\n\r\n")

    async def _until(self, end: bytes) -> bytes:
        while end not in self._left:
            await self._more()
        found, _, self._left = self._left.partition(end)
        return found

    async def _more(self) -> None:
        data = await self.stream.receive_some(1 << 16)
        if not data:
            raise EOFError
        self._left += data

    async def part(self) -> bytes:
        """Return one chunk of the answer; b"" at its end."""
        count = int(await self._until(b"\r\n"), 16)
        while len(self._left) < count + 2:
            await self._more()
        found, self._left = self._left[:count], self._left[count + 2 :]
        return found

    async def to_the_end(self) -> None:
        """Read until the answer is over."""
        while await self.part():
            pass

    async def event(self) -> dict[str, Any]:
        """Return the next event, past comments."""
        while (part := await self.part()).startswith(b":"):
            pass
        first, second, *rest = part.decode().split("\n")
        assert (first, rest) == ("event: snapshot", ["", ""])
        found: dict[str, Any] = json.loads(second.removeprefix("data: "))
        return found


Listen = Callable[[int], Awaitable[Listener]]


@pytest.fixture
async def listener() -> AsyncIterator[Listen]:
    """Connects listeners, and closes them at the end."""
    async with AsyncExitStack() as stack:

        async def connect(port: int) -> Listener:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            return Listener(await stack.enter_async_context(stream))

        yield connect


async def test_events_come_to_everybody_and_nothing_is_looked_at_while_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, listener: Listen
) -> None:
    async with standing(monkeypatch) as stand:
        one, other = await listener(stand.port), await listener(stand.port)
        head = await one.ask()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nContent-Type: text/event-stream\r\n" in head
        await other.ask()
        first, then = await one.event(), await one.event()
        assert int(then["name"]) == int(first["name"]) + 1
        assert then["process"] == first["process"] != ""
        assert (await other.event())["process"] == first["process"]
        for each in (one, other):
            await each.stream.aclose()
        await until(lambda: not len(stand.hub))
        await trio.testing.wait_all_tasks_blocked(0.05)
        before = stand.looks
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert stand.looks == before
        again = await listener(stand.port)
        await again.ask()
        assert int((await again.event())["name"]) == before + 1


async def test_a_watcher_that_does_not_read_is_dropped_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, listener: Listen
) -> None:
    async with standing(monkeypatch) as stand:
        stand.rows = 2_000
        deaf, good = await listener(stand.port), await listener(stand.port)
        await deaf.ask()
        await good.ask()
        shown = 0
        while not stand.hub.dropped:
            await good.event()
            shown += 1
        # Two socket buffers and what waits: 200 KB an event, so that some tens are as many as it can be.
        assert shown < 100
        with pytest.raises((EOFError, trio.BrokenResourceError)):
            await deaf.to_the_end()
        await deaf.stream.aclose()  # else the end of its connection is waited for
        await good.event()
        assert (len(stand.hub), stand.hub.dropped) == (1, 1)


async def test_too_many_are_refused_and_there_is_room_again_once_one_goes(
    monkeypatch: pytest.MonkeyPatch, listener: Listen
) -> None:
    async with standing(monkeypatch) as stand:
        watching = [await listener(stand.port) for _ in range(limits.MAX_WATCHERS)]
        for each in watching:
            await each.ask()
        more = await listener(stand.port)
        head = await more.ask()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 5\r\n" in head
        await watching[0].stream.aclose()
        await until(lambda: len(stand.hub) < limits.MAX_WATCHERS)
        assert (await (await listener(stand.port)).ask()).startswith(b"HTTP/1.1 200 ")


async def test_comments_show_that_it_lives_while_a_look_takes_long(
    monkeypatch: pytest.MonkeyPatch, listener: Listen
) -> None:
    monkeypatch.setattr(module, "WATCH_HEARTBEAT_S", 0.01)
    async with standing(monkeypatch) as stand:
        stand.held = trio.Event()
        one = await listener(stand.port)
        await one.ask()
        assert [await one.part() for _ in range(5)] == [b":\n\n"] * 5
        stand.held.set()
        await one.event()


async def test_a_look_that_fails_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listener: Listen
) -> None:
    async with standing(monkeypatch) as stand:
        stand.failing = True
        one = await listener(stand.port)
        await one.ask()
        assert [await one.part() for _ in range(3)] == [b":\n\n"] * 3
        stand.failing = False
        await one.event()
    assert "a look that fails" in caplog.text


async def test_a_stop_ends_the_streams_and_the_answer_is_whole(
    monkeypatch: pytest.MonkeyPatch, listener: Listen
) -> None:
    async with standing(monkeypatch) as stand:
        one = await listener(stand.port)
        await one.ask()
        await one.event()
        stand.hub.stop()
        await one.to_the_end()
        assert await one.stream.receive_some() == b""
        await one.stream.aclose()  # else the end of its connection is waited for
        assert (await (await listener(stand.port)).ask()).startswith(b"HTTP/1.1 503 ")


# --- at the Conductor's door -----------------------------------------------------------------------------------
async def ended(listener: Listener, id_: str) -> dict[str, Any]:
    """The row of a decision once an event shows how it ended: one may come between two reports of it."""
    while True:
        shown = (await listener.event())["decisions"]
        columns = [column["title"] for column in shown["columns"]]
        for row in shown["rows"]:
            found = dict(zip(columns, row, strict=True))
            if found["id"] == id_ and found["outcome"]:
                return found


async def answered(port: int, path: str, *headers: str) -> Answer:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        return await Asker(stream).ask("GET", path, None, *headers)


async def test_a_conductor_shows_its_decisions_as_they_change(listener: Listen) -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        service.add(instance("a", url="http://127.0.0.1:1"))
        first = (await asker.ask("POST", "/v1/route", {"model": "m", "tokens": [1, 2, 3]})).json["id"]
        one = await listener(addresses.port)
        await one.ask()
        shown = await one.event()
        assert [row[0] for row in shown["decisions"]["rows"]] == [first]
        assert {panel["title"] for panel in shown["panels"]} >= {"Instances", "Cache", "Latency", "Refusals"}
        await asker.ask("POST", f"/v1/reservations/{first}/first_token")
        await asker.ask("POST", f"/v1/reservations/{first}/done", {"cached_tokens": 0, "output_tokens": 3})
        row = await ended(one, first)
        assert (row["outcome"], row["decode"], row["cached"]) == ("done", "a", 0)
        assert row["TTFT"] > 0
        assert row["TTFT limit"] is None, "infinite"
        service.stop()
        with trio.fail_after(limits.DRAIN_WAIT_S / 2):
            await one.to_the_end()
        await one.stream.aclose()  # else the end of its connection is waited for


async def test_without_a_token_there_is_the_page_alone(listener: Listen) -> None:
    token = "a token of the test"
    async with serving(tokens=[token]) as (_, addresses):
        for path in ("/", "/page.js", "/page.css", "/figures.js"):
            page = await answered(addresses.port, path)
            assert page.status == 200
            assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in ("/v1/events", "/v1/panels", "/v1/decisions", "/metrics"):
            assert (await answered(addresses.port, path)).status == 401
        given = f"Authorization: Bearer {token}"
        shown = (await answered(addresses.port, "/v1/panels", given)).json
        assert (shown["kind"], shown["problems"]) == ("conductor", ["no instance is registered"])
        one = await listener(addresses.port)
        assert (await one.ask(given)).startswith(b"HTTP/1.1 200 ")
        assert (await one.event())["kind"] == "conductor"
