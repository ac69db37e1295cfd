"""Machines that put, evict and read while the directory's server is killed, started anew, stopped and emptied.

Whatever the server does meanwhile, a read ends, with the right bytes or a miss, and each machine has what it put and
read and nothing else. Once the faults are over, the directory says what the machines have. Nothing
stays behind: no draft, descriptor, connection or thread.

KVFS_TEST_SEED repeats what a run draws; one of a soak has more faults.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import trio

from kvfs import limits
from tests.support.directory_server import (
    DirectoryServer,
    directed_machines,
    directory_server,
    needs_server,
    until_directory_knows,
)
from tests.support.machines import Machine, digest_of, open_descriptors, payload_of, threads
from tests.support.seeds import SEED, rounds
from tests.support.waits import WAIT_S, until

MACHINES = 4
BLOCKS = 16
ROUNDS = rounds(2, 10)
"""Faults of each kind."""
STEPS_OF_FAULT = 60
"""Puts, evictions and reads of all machines within each fault."""


def size_of(number: int) -> int:
    return number * 4099


class Traffic:
    """What one machine does, over those blocks whose numbers leave a rest, so that two of them at one machine know what
    each has left there."""

    def __init__(self, machine: Machine, seed: int, rest: int) -> None:
        self._machine, self._random = machine, random.Random(seed)
        self.numbers = range(1 + rest, 1 + BLOCKS, 2)
        self.has: set[int] = set()
        self.steps = self.fetched = 0
        self.is_over = False

    async def run(self) -> None:
        """Go on until it is over: what a read that is cancelled has brought would not be known."""
        while not self.is_over:
            number = self._random.choice(self.numbers)
            draw = self._random.random()
            if draw < 0.15:
                self._put(number)
            elif draw < 0.4:
                self._evict(number)
            else:
                await self.read(self._random.sample(self.numbers, self._random.randint(1, 6)))
            self.steps += 1
            await trio.lowlevel.checkpoint()

    def _put(self, number: int) -> None:
        if number not in self.has:
            self._machine.put([number], size_of(number))
            self.has.add(number)

    def _evict(self, number: int) -> None:
        if number in self.has:
            self._machine.store.remove_block(digest_of(number))
            self.has.remove(number)

    async def read(self, numbers: Iterable[int]) -> None:
        """Fetch and read: what comes is right, what was here before still is, and nothing else has come."""
        wanted = list(numbers)
        with trio.fail_after(WAIT_S):
            await self._machine.fetch([digest_of(number) for number in wanted])
        for number in wanted:
            found = self._machine.read(digest_of(number))
            assert found in (None, payload_of(number, size_of(number)))
            assert found is not None or number not in self.has
            if found is not None and number not in self.has:
                self.has.add(number)
                self.fetched += 1
        self.check()

    def check(self) -> None:
        for number in self.numbers:
            assert (self._machine.read(digest_of(number)) is not None) == (number in self.has)


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


async def fail_often(server: DirectoryServer, running: list[Machine], traffic: list[Traffic]) -> None:
    """Let the server fail in each way, in any order."""
    drawn = random.Random(SEED)

    def lasted() -> Lasts:
        steps = sum(each.steps for each in traffic) + STEPS_OF_FAULT
        return lambda: sum(each.steps for each in traffic) >= steps

    def seen() -> bool:
        return not any(each.directory()["is_up"] for each in running)

    def found_again() -> Lasts:
        """Whether all are connected, and blocks of others were read since."""
        fetched = sum(each.fetched for each in traffic)
        return lambda: (
            all(each.directory()["is_up"] for each in running)
            and sum(each.fetched for each in traffic) > fetched
        )

    kinds = [kill, stop, stop_for_long, empty, break_off] * ROUNDS
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
        async with directed_machines(tmp_path, MACHINES, server.url, match_wait_s=0.1) as running:
            traffic = [
                Traffic(each, 2 * number + rest + MACHINES * 2 * SEED, rest)
                for number, each in enumerate(running)
                for rest in range(2)
            ]
            async with trio.open_nursery() as nursery:
                for each in traffic:
                    nursery.start_soon(each.run)
                await fail_often(server, running, traffic)
                for each in traffic:
                    each.is_over = True
            for each in traffic:
                each.check()
            assert all(each.drafts() == 0 for each in running)
            has = [traffic[n].has | traffic[n + 1].has for n in range(0, len(traffic), 2)]
            await until_directory_knows(running, has, range(1, 1 + BLOCKS))
            for each in traffic:  # what anybody has is found
                anywhere = set().union(*has) & set(each.numbers)
                with trio.fail_after(WAIT_S):
                    while each.has != anywhere:  # a slow look-up is a miss
                        await each.read(sorted(anywhere))
    await until(lambda: open_descriptors() <= before[0] and threads() <= before[1])
    gc.collect()  # no other test is to hear of those streams
