"""Machines that put, evict and read, while the directory's server is killed, started anew, stopped and emptied, and
they themselves are stopped and started.

Whatever happens meanwhile, a read ends, with the right bytes or a miss, and each machine has what it put and read and
nothing else, also behind a start. Once the faults are over, the directory says what the machines have. Nothing stays
behind: no draft, descriptor, connection or thread.

KVFS_TEST_SEED repeats what a run draws; one of a soak has more faults.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from itertools import cycle
from pathlib import Path

import pytest
import trio

from kvfs import limits
from tests.support.directory_server import (
    DirectoryServer,
    directory_server,
    needs_server,
    until_directory_knows,
)
from tests.support.machines import digest_of, machine, open_descriptors, payload_of, threads
from tests.support.own_ports import own_port
from tests.support.seeds import SEED, rounds
from tests.support.waits import WAIT_S, until

MACHINES = 4
BLOCKS = 16
TRAFFICS = 2
"""Of each machine."""
ROUNDS = rounds(2, 10)
"""Faults of each kind."""
STEPS_OF_FAULT = 60
"""Puts, evictions and reads of all machines within each fault."""
STARTS = 2
"""Of machines, for each fault of a kind."""


def size_of(number: int) -> int:
    return number * 4099


class Node:
    """A machine that can be stopped and started in mid-traffic, at its address and with what it has."""

    def __init__(self, folder: Path, number: int, url: str) -> None:
        host = f"127.0.0.{number + 1}"
        self._folder, self._url, self._listen = folder / f"m{number}", url, f"{host}:{own_port()}"
        self.working = trio.Semaphore(TRAFFICS)
        """Whoever does something there has one."""
        self._stop, self._up = trio.Event(), trio.Event()
        self.starts = 0

    async def run(self) -> None:
        """Run the machine, again and again, until cancelled."""
        while True:
            self._stop = trio.Event()
            running = machine(
                self._folder,
                listen=self._listen,
                directory=self._url,
                match_wait_s=0.1,
                backing="directory",
                keep=True,
            )
            async with running as self.machine:
                self.starts += 1
                self._up.set()
                await self._stop.wait()

    async def started(self) -> None:
        """Wait until it runs."""
        await self._up.wait()

    async def restart(self) -> None:
        """Stop it once nobody does anything there, and start it."""
        async with AsyncExitStack() as stack:
            for _ in range(TRAFFICS):
                await stack.enter_async_context(self.working)
            self._up = trio.Event()
            self._stop.set()
            await self.started()


class Traffic:
    """What one machine does, over those blocks whose numbers leave a rest, so that two of them at one machine know what
    each has left there."""

    def __init__(self, node: Node, seed: int, rest: int) -> None:
        self._node, self._random = node, random.Random(seed)
        self.numbers = range(1 + rest, 1 + BLOCKS, 2)
        self.has: set[int] = set()
        self.steps = self.fetched = 0
        self.is_over = False

    async def run(self) -> None:
        """Go on until it is over: what a read that is cancelled has brought would not be known."""
        while not self.is_over:
            async with self._node.working:
                await self._step()
            self.steps += 1
            await trio.lowlevel.checkpoint()

    async def _step(self) -> None:
        number = self._random.choice(self.numbers)
        draw = self._random.random()
        if draw < 0.15:
            self._put(number)
        elif draw < 0.4:
            self._evict(number)
        else:
            await self.read(self._random.sample(self.numbers, self._random.randint(1, 6)))

    def _put(self, number: int) -> None:
        if number not in self.has:
            self._node.machine.put([number], size_of(number))
            self.has.add(number)

    def _evict(self, number: int) -> None:
        if number in self.has:
            self._node.machine.store.remove_block(digest_of(number))
            self.has.remove(number)

    async def read(self, numbers: Iterable[int]) -> None:
        """Fetch and read: what comes is right, what was here before still is, and nothing else has come."""
        wanted = list(numbers)
        with trio.fail_after(WAIT_S):
            await self._node.machine.fetch([digest_of(number) for number in wanted])
        for number in wanted:
            found = self._node.machine.read(digest_of(number))
            assert found in (None, payload_of(number, size_of(number)))
            assert found is not None or number not in self.has
            if found is not None and number not in self.has:
                self.has.add(number)
                self.fetched += 1
        self.check()

    def check(self) -> None:
        for number in self.numbers:
            assert (self._node.machine.read(digest_of(number)) is not None) == (number in self.has)


Lasts = Callable[[], bool]
"""Whether a fault has lasted long enough, and whether all machines have seen that the server is away."""


async def kill(server: DirectoryServer, lasted: Lasts, _: Lasts) -> None:
    server.kill()
    await until(lasted)
    server.start()  # empty; not beside the machines: a child has what they write open until it is another program


async def stop(server: DirectoryServer, lasted: Lasts, _: Lasts) -> None:
    with server.paused():
        await until(lasted)


async def stop_for_long(server: DirectoryServer, _: Lasts, seen: Lasts) -> None:
    with server.paused():
        await until(seen)


async def empty(server: DirectoryServer, lasted: Lasts, _: Lasts) -> None:
    server.empty()
    await until(lasted)


async def break_off(server: DirectoryServer, lasted: Lasts, _: Lasts) -> None:
    """End the machines' connections alone."""
    assert server.ask("CLIENT KILL TYPE normal SKIPME yes") not in (b":0\r\n", b"")
    await until(lasted)


async def fail_often(server: DirectoryServer, nodes: list[Node], traffic: list[Traffic]) -> None:
    """Let the server fail in each way, and each machine be started anew, in any order."""
    drawn = random.Random(SEED)
    next_one = cycle(nodes)

    async def start_one_anew(_: DirectoryServer, lasted: Lasts, __: Lasts) -> None:
        await next(next_one).restart()
        await until(lasted)

    def lasted() -> Lasts:
        steps = sum(each.steps for each in traffic) + STEPS_OF_FAULT
        return lambda: sum(each.steps for each in traffic) >= steps

    def seen() -> bool:
        return not any(each.machine.directory()["is_up"] for each in nodes)

    def found_again() -> Lasts:
        """Whether all are connected, and blocks of others were read since."""
        fetched = sum(each.fetched for each in traffic)
        return lambda: (
            all(each.machine.directory()["is_up"] for each in nodes)
            and sum(each.fetched for each in traffic) > fetched
        )

    kinds = [kill, stop, stop_for_long, empty, break_off, *[start_one_anew] * STARTS] * ROUNDS
    drawn.shuffle(kinds)
    for each in kinds:
        await until(found_again())
        await each(server, lasted(), seen)


# coredis does not close the streams of a connection that ends while it is made.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*MemoryObject:pytest.PytestUnraisableExceptionWarning"
)
@needs_server
@pytest.mark.seeded
async def test_whatever_the_server_does_reads_are_right_and_all_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DIRECTORY_BEAT_S", 0.05)
    monkeypatch.setattr(limits, "DIRECTORY_BACKOFF_S", 0.02)
    monkeypatch.setattr(limits, "MAX_DIRECTORY_BACKOFF_S", 0.1)
    before = open_descriptors(), threads()
    with directory_server(tmp_path) as server:
        nodes = [Node(tmp_path, number, server.url) for number in range(MACHINES)]
        async with trio.open_nursery() as machines:
            for node in nodes:
                machines.start_soon(node.run)
                await node.started()
            traffic = [
                Traffic(each, TRAFFICS * number + rest + MACHINES * TRAFFICS * SEED, rest)
                for number, each in enumerate(nodes)
                for rest in range(TRAFFICS)
            ]
            async with trio.open_nursery() as nursery:
                for each in traffic:
                    nursery.start_soon(each.run)
                await fail_often(server, nodes, traffic)
                for each in traffic:
                    each.is_over = True
            for each in traffic:
                each.check()
            running = [node.machine for node in nodes]
            assert all(each.drafts() == 0 for each in running)
            assert min(node.starts for node in nodes) == 1 + STARTS * ROUNDS // MACHINES
            has = [traffic[n].has | traffic[n + 1].has for n in range(0, len(traffic), TRAFFICS)]
            await until_directory_knows(running, has, range(1, 1 + BLOCKS))
            for each in traffic:  # what anybody has is found
                anywhere = set().union(*has) & set(each.numbers)
                with trio.fail_after(WAIT_S):
                    while each.has != anywhere:  # a slow look-up is a miss
                        await each.read(sorted(anywhere))
            machines.cancel_scope.cancel()
    await until(lambda: open_descriptors() <= before[0] and threads() <= before[1])
    gc.collect()  # no other test is to hear of those streams
