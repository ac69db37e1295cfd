"""Slow, malformed and huge clients at the Conductor and the proxy, as processes: what is no request is refused, nothing
that was smuggled is served, memory and connections stay bounded, and others are served meanwhile.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.support.conductors import Answer, Asker
from tests.support.fleet import Fleet, Process
from tests.support.waits import WAIT_S

MIB: Final = 1 << 20
MOST_GROWTH_BYTES: Final = 96 * MIB
"""A few bodies at once, each as bytes and as Python's integers, which take about five times that."""
SLOW: Final = 150
"""Clients of each slow kind."""
STATUS: Final = re.compile(rb"HTTP/1\.1 \d\d\d ")
DOORS: Final = ("conductor", "proxy")


class Door:
    """A process that answers at a port, and how to ask it well."""

    def __init__(self, fleet: Fleet, process: Process, port: int, path: str) -> None:
        self.fleet, self._process, self.port, self.path = fleet, process, port, path

    def body(self, tokens: list[int]) -> dict[str, Any]:
        return {"model": "m", ("tokens" if self.path == "/v1/route" else "prompt"): tokens}

    def memory_bytes(self) -> int:
        assert self._process.running is not None
        status = Path(f"/proc/{self._process.running.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def descriptors(self) -> int:
        assert self._process.running is not None
        return len(list(Path(f"/proc/{self._process.running.pid}/fd").iterdir()))

    async def ask(self, tokens: list[int]) -> int:
        return (await self.fleet.call(self.port, "POST", self.path, self.body(tokens))).status

    async def answer_to(self, sent: bytes) -> bytes:
        """Send bytes on a connection of their own and end it; return all that comes back."""
        found = b""
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(sent)
                await stream.send_eof()
            with suppress(trio.BrokenResourceError), trio.fail_after(WAIT_S):
                while data := await stream.receive_some(1 << 16):
                    found += data
        return found

    async def answer_to_body(self, body: bytes) -> Answer:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(framed(self.path, body))
            return await Asker(stream).read()


@asynccontextmanager
async def door(kind: str, folder: Path) -> AsyncIterator[Door]:
    with Fleet(folder, engines=1, quick=False) as fleet:
        [engine] = fleet.engines
        port = fleet._port()
        arguments = ["--listen", f"127.0.0.1:{port}", "--engine", f"http://127.0.0.1:{engine.port}"]
        proxy = Process("kvfs", ["proxy", *arguments])
        try:
            if kind == "proxy":
                fleet.conductors.clear()
                proxy.start()
            await fleet.start()
            if kind == "proxy":
                await proxy.ready()
                yield Door(fleet, proxy, port, "/v1/completions")
            else:
                found = Door(fleet, fleet.conductors[0], fleet.ports[0], "/v1/route")
                with trio.fail_after(WAIT_S):
                    while await found.ask([1]) != 200:  # noqa: ASYNC110 (another process)
                        await trio.sleep(0.02)
                yield found
        finally:
            proxy.kill()


def request(path: str, *headers: str, body: bytes = b"", line: str = "") -> bytes:
    head = "\r\n".join([line or f"POST {path} HTTP/1.1", "Host: x", *headers, "\r\n"])
    return head.encode("latin-1") + body


def framed(path: str, body: bytes) -> bytes:
    return request(path, f"Content-Length: {len(body)}", body=body)


MALFORMED: Final = {
    "length and chunks": ("Content-Length: 5", "Transfer-Encoding: chunked"),
    "two lengths": ("Content-Length: 5", "Content-Length: 6"),
    "a list of lengths": ("Content-Length: 5, 6",),
    "a negative length": ("Content-Length: -5",),
    "a signed length": ("Content-Length: +5",),
    "a length in hexadecimal": ("Content-Length: 0x5",),
    "a huge length": ("Content-Length: " + "9" * 40,),
    "unknown coding": ("Transfer-Encoding: gzip, chunked",),
    "a space before the colon": ("Content-Length : 5",),
    "NUL in a header": ("X-A: a\0b",),
    "a folded header": ("X-A: a\r\n b",),
    "a huge header": ("X-A: " + "a" * 70_000,),
    "many headers": tuple(f"X-{n}: a" for n in range(1000)),
}
BODIES: Final = {
    "deep JSON": b"[" * 200_000,
    "deep JSON in a member": b'{"model": "m", "what": ' + b'{"a":' * 100_000,
    "NUL": b'{"model": "m\0"}',
    "invalid UTF-8": b'{"model": "\xff\xfe"}',
    "a lone surrogate": b'{"model": "\\ud800"}',
    "a number of a million digits": b'{"model": "m", "tokens": [' + b"9" * 1_000_000 + b"]}",
    "cut": b'{"model": "m", "tokens": [1, 2',
    "no JSON": bytes(range(256)),
    "a string": b'"' + b"x" * 1000 + b'"',
}


@pytest.mark.parametrize("kind", DOORS)
async def test_what_is_no_request_is_refused_and_what_it_hides_is_never_served(
    kind: str, tmp_path: Path
) -> None:
    hidden = request("/v1/instances/e0/drain", "Content-Length: 0") + framed(
        "/v1/completions", b'{"prompt": [7]}'
    )
    async with door(kind, tmp_path) as found:
        [engine] = found.fleet.engines
        for name, headers in MALFORMED.items():
            answer = await found.answer_to(request(found.path, *headers, body=b"0\r\n\r\n" + hidden))
            status = answer.split(b" ", 2)[1:2]
            assert not status or status[0][:1] == b"4" or status == [b"501"], f"{name}: {answer[:200]!r}"
            assert len(STATUS.findall(answer)) <= 1, f"{name}: {answer!r}"
        for name, body in BODIES.items():
            refused = await found.answer_to_body(body)
            assert refused.status in (400, 404), f"{name}: {refused}"
            assert refused.json["error"]["message"]
        chunked = request(found.path, "Transfer-Encoding: chunked")
        for chunk in (
            b"zz\r\nab\r\n",
            b"5;" + b"x" * 70_000,
            b"-1\r\n",
            b"fffffffffffffffff\r\nab",
            b"5\r\nabcdefgh\r\n",
        ):
            answer = await found.answer_to(chunked + chunk + hidden)
            assert len(STATUS.findall(answer)) <= 1, answer
            assert not answer.startswith(b"HTTP/1.1 2"), answer
        assert await found.fleet.held() == {engine.name: set()}
        assert await found.ask([1] * 20) == 200, "the instance was not drained, and takes requests"


@pytest.mark.parametrize("kind", DOORS)
async def test_pipelined_requests_are_answered_in_order(kind: str, tmp_path: Path) -> None:
    async with door(kind, tmp_path) as found, await trio.open_tcp_stream("127.0.0.1", found.port) as stream:
        bodies = [json.dumps(found.body([n] * 20)).encode() for n in range(200)]
        asker = Asker(stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, b"".join(framed(found.path, body) for body in bodies))
            for number in range(200):
                assert (await asker.read()).status == 200, number


async def dribble(port: int, sent: bytes, rest: bytes) -> None:
    """Send the rest one byte at a time, until the door or the test has enough."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(sent)
            for at in range(len(rest)):
                await stream.send_all(rest[at : at + 1])
                await trio.sleep(0.05)


async def flood(found: Door, sent: bytes) -> None:
    """Send the same again and again, each time on a connection of its own."""
    while True:
        with suppress(OSError):
            await found.answer_to(sent)


@pytest.mark.parametrize("kind", DOORS)
async def test_others_are_served_beside_slow_and_huge_clients(kind: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    async with door(kind, tmp_path) as found:
        assert await found.ask([1] * 20) == 200
        before, descriptors = found.memory_bytes(), found.descriptors()
        large = json.dumps(found.body([rng.randrange(30_000) for _ in range(20_000)])).encode()
        head = request(found.path, f"Content-Length: {8 * MIB}")
        async with trio.open_nursery() as nursery:
            for _ in range(SLOW):
                nursery.start_soon(dribble, found.port, b"", request(found.path, "X-Slow: yes" * 100))
                nursery.start_soon(dribble, found.port, head, b" " * 10_000)
            for _ in range(3):
                nursery.start_soon(flood, found, framed(found.path, large))
                nursery.start_soon(
                    flood, found, request(found.path, "Content-Length: 99999999", body=b"x" * 100_000)
                )
                nursery.start_soon(flood, found, framed(found.path, b"[" * MIB))
            with trio.fail_after(150):
                while found.descriptors() < descriptors + 2 * SLOW:  # noqa: ASYNC110 (another process)
                    await trio.sleep(0.02)
                for number in range(50):
                    assert await found.ask([number] * 20) == 200, number
            assert found.memory_bytes() < before + MOST_GROWTH_BYTES
            nursery.cancel_scope.cancel()
        with trio.fail_after(WAIT_S):
            while found.descriptors() > descriptors + 4:  # noqa: ASYNC110 (another process)
                await trio.sleep(0.02)
