"""Figures of the proxy in front of engines that take next to nothing (`bench.stub_engine`).

Responsibility: one function for each figure. CPU is that of the proxy's process, as the kernel counts it; its baseline
is that of a process which makes the same two legs with the same client and serves nobody. What the event loop and the
kernel take of it is that of a process which passes the bytes on unread (stderr). Times to the first token are those of
one client at a time; the baseline makes both legs itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import trio

from bench.measure import Plan, Result, Side, compare
from kvfs.http.server import listen
from scheduler.proxy.proxy import Proxy, ProxyOptions, calm_gc
from scheduler.proxy.routers.balance import LoadRouter
from scheduler.proxy.upstream.engines import EngineAddress, Engines

CONNECTIONS = 16
STREAMS = 16
STREAM_TOKENS = 250
TURNS = 3
_BODY = b'{"model":"m","messages":[{"role":"user","content":"%b"}],"max_tokens":%d,"stream":%b}'
_PATH = b"/v1/chat/completions"
_REQUEST = b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
LAST_CHUNK = b"0\r\n\r\n"
"""What a stream ends with."""


def body(tokens: int, *, stream: bool) -> bytes:
    """Make a request with a prompt of about 1,000 tokens."""
    return _BODY % (b"some words " * 400, tokens, b"true" if stream else b"false")


def request(data: bytes) -> bytes:
    return _REQUEST % (_PATH, len(data), data)


class Asker:
    """A client's connection, which takes as little as it can."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, data: bytes, end: bytes) -> None:
        """Send a request and read until its answer ends with `end`. Raises ConnectionError for a refusal, too."""
        self._socket.sendall(data)
        found = self._begin()
        while not found.endswith(end):
            piece = self._socket.recv(65536)
            if not piece:
                raise ConnectionError("the answer broke off")
            found = found[-64:] + piece

    def _begin(self) -> bytes:
        """Receive the begin of an answer. Raises ConnectionError."""
        found = self._socket.recv(65536)
        if not found.startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(f"the answer begins with {found[:64]!r}")
        return found

    def first_token(self, data: bytes) -> None:
        """Send a streamed request and read until its first token; the rest is read away untimed."""
        self._socket.sendall(data)
        self._tail = self._begin()
        while b"data: " not in self._tail:
            self._tail += self._socket.recv(65536)

    def rest(self) -> None:
        while not self._tail.endswith(LAST_CHUNK):
            self._tail = self._tail[-64:] + self._socket.recv(65536)

    def close(self) -> None:
        self._socket.close()


def cpu_us(pid: int) -> float:
    """Return the CPU time of a process: of all threads that it has now."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1000


@contextmanager
def child(*arguments: str) -> Iterator[tuple[int, int]]:
    """Run a module that prints a port; yield its process id and the port."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def _stand() -> Iterator[tuple[int, int, list[int]]]:
    """Run a proxy in front of two engines; yield its process id, its port and theirs."""
    with ExitStack() as stack:
        engines = [stack.enter_context(child("bench.stub_engine"))[1] for _ in range(2)]
        pid, port = stack.enter_context(child("bench.proxy", "serve", *map(str, engines)))
        yield pid, port, engines


def rate(ask: Callable[[Asker], None], port: int, count: int, seconds: float) -> int:
    """Have `count` connections ask for about `seconds`; return how often they did. Raises ConnectionError."""
    deadline = perf_counter() + seconds

    def run(_: int) -> int:
        done, asker = 0, Asker(port)
        try:
            while not done or perf_counter() < deadline:
                ask(asker)
                done += 1
        finally:
            asker.close()
        return done

    with ThreadPoolExecutor(count) as threads:
        return sum(threads.map(run, range(count)))


def cpu_per_ask(pid: int, ask: Callable[[Asker], None], port: int, count: int, seconds: float) -> float:
    """Return the CPU time of a process for one call of `ask`."""
    before_us = cpu_us(pid)
    done = rate(ask, port, count, seconds)
    return (cpu_us(pid) - before_us) / done


def cpu_per_request(seconds: float) -> Result:
    """Measure both legs of a request that is not streamed; the baseline is the legs alone."""
    data = request(body(8, stream=False))
    with _stand() as (pid, port, engines), child("bench.proxy", "pass", *map(str, engines)) as passing:
        ask = partial(Asker.ask, data=data, end=b"}")
        rate(ask, port, CONNECTIONS, 0.5)
        values, others, bare = [], [], []
        for _ in range(TURNS):
            values.append(cpu_per_ask(pid, ask, port, CONNECTIONS, seconds / TURNS))
            others.append(_legs_alone(engines, seconds / TURNS))
            bare.append(cpu_per_ask(passing[0], ask, passing[1], CONNECTIONS, seconds / TURNS))
    value, other = median(values), median(others)
    print(f"bench: proxy: bytes passed on unread take {median(bare):.0f} us a request", file=sys.stderr)
    return Result("proxy.cpu_per_request", value, "us", other, other / value)


def cpu_per_token(seconds: float) -> Result:
    """Measure long streams, each token by itself; what a request takes at its begin is in it."""
    data = request(body(STREAM_TOKENS, stream=True))
    with _stand() as (pid, port, _):
        ask = partial(Asker.ask, data=data, end=LAST_CHUNK)
        rate(ask, port, STREAMS, 0.5)
        values = [cpu_per_ask(pid, ask, port, STREAMS, seconds / TURNS) / STREAM_TOKENS for _ in range(TURNS)]
    return Result("proxy.cpu_per_token", median(values), "us")


def ttft_1k(seconds: float) -> Result:
    """Measure the time to the first token, tokenized, prefilled and decoded apart."""
    with _stand() as (_, port, engines), ExitStack() as stack:
        askers = [Asker(each) for each in (port, *engines)]
        for asker in askers:
            stack.callback(asker.close)
        proxy, prefill, decode = askers
        first, second = request(body(1, stream=False)), request(body(2, stream=True))
        # Another prompt each time, so that its tokens are not known.
        unknown = iter(range(1 << 30))

        def subject(_: int) -> None:
            proxy.first_token(request(body(2, stream=True).replace(b"some", b"%06d" % next(unknown), 1)))

        def baseline(_: int) -> None:
            prefill.ask(first, b"}")
            decode.first_token(second)

        plan = Plan(seconds, batch=1)
        return compare("proxy.ttft_1k", Side(subject, proxy.rest), Side(baseline, decode.rest), plan)


def _legs_alone(ports: list[int], seconds: float) -> float:
    """Return the CPU time of both legs, in a process that does nothing else."""
    command = [sys.executable, "-m", "bench.proxy", "legs", *map(str, ports), str(seconds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


# --- child processes -------------------------------------------------------------------------------------
def _addresses(ports: list[str]) -> list[EngineAddress]:
    first, second = (f"http://127.0.0.1:{port}" for port in ports)
    return [EngineAddress(first, "prefill"), EngineAddress(second, "decode")]


async def _serve(ports: list[str]) -> None:
    """Serve as `kvfs proxy` does, with a router that wants tokens and goes by load."""
    options = ProxyOptions(engines=_addresses(ports))
    engines = Proxy(options).engines
    proxy = Proxy(options, LoadRouter(engines))
    sockets = listen("127.0.0.1", 0, shared=False)
    print(sockets[0].getsockname()[1], flush=True)
    calm_gc()
    await proxy.serve(sockets)


async def _pass(ports: list[str]) -> None:
    """Serve by sockets and the event loop alone: the request goes to each engine, the last answer to the client."""
    [listener] = listen("127.0.0.1", 0, shared=False)
    print(listener.getsockname()[1], flush=True)
    into = memoryview(bytearray(65536))

    async def receive(sock: socket.socket) -> bytes:
        await trio.lowlevel.wait_readable(sock)
        return bytes(into[: sock.recv_into(into)])

    async def serve(client: socket.socket) -> None:
        engines = [socket.create_connection(("127.0.0.1", int(port))) for port in ports]
        for sock in (client, *engines):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := await receive(client):
            for engine in engines:
                engine.send(asked)
                answer = await receive(engine)
            client.send(answer)
        for sock in (client, *engines):
            sock.close()

    async with trio.open_nursery() as clients:
        while True:
            await trio.lowlevel.wait_readable(listener)
            clients.start_soon(serve, listener.accept()[0])


async def _make_legs(ports: list[str], seconds: float) -> None:
    engines = Engines(_addresses(ports), lambda name: None)
    pair = list(engines)
    data = body(8, stream=False)
    deadline, done = perf_counter() + seconds, 0

    async def run() -> None:
        nonlocal done
        while perf_counter() < deadline:
            for engine in pair:
                async with engine.ask("POST", _PATH, b"", data) as answer:
                    await answer.read_all()
            done += 1

    calm_gc()
    began_us = cpu_us(os.getpid())
    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(run)
    print((cpu_us(os.getpid()) - began_us) / done)


if __name__ == "__main__":
    if sys.argv[1] in ("serve", "pass"):
        trio.run(_serve if sys.argv[1] == "serve" else _pass, sys.argv[2:])
    else:
        trio.run(_make_legs, sys.argv[2:4], float(sys.argv[4]))
