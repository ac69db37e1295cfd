"""The order of reads at one peer."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvfs import limits
from kvfs.errors import Busy
from tests.support.waits import until
from tiers.remote.read_queue import ReadQueue, Urgency


class Readers:
    """Reads that end when a test says so."""

    def __init__(self, queue: ReadQueue, nursery: trio.Nursery) -> None:
        self.queue, self._nursery = queue, nursery
        self.running: dict[str, trio.Event] = {}
        self.urgencies: dict[str, Urgency] = {}

    async def begin(self, name: str, size_bytes: int, *, urgent: bool = False) -> None:
        self.urgencies[name] = Urgency(urgent)
        self._nursery.start_soon(self._read, name, size_bytes)
        await trio.testing.wait_all_tasks_blocked()

    async def end(self, name: str) -> None:
        self.running.pop(name).set()
        await trio.testing.wait_all_tasks_blocked()

    async def _read(self, name: str, size_bytes: int) -> None:
        async with self.queue.entered(size_bytes, self.urgencies[name]):
            self.running[name] = done = trio.Event()
            await done.wait()


async def test_urgent_reads_go_first_and_bytes_are_bounded() -> None:
    async with trio.open_nursery() as nursery:
        readers = Readers(ReadQueue(4, most_bytes=100), nursery)
        await readers.begin("a", 40)
        await readers.begin("b", 40)  # over half of the bound
        await readers.begin("urgent", 60, urgent=True)
        await readers.begin("late", 30, urgent=True)
        assert set(readers.running) == {"a", "urgent"}
        assert readers.queue.under_way_bytes == 100
        await readers.end("a")
        assert set(readers.running) == {"urgent", "late"}
        await readers.end("urgent")
        assert set(readers.running) == {"late"}  # b would make 70 of 50
        await readers.end("late")
        assert set(readers.running) == {"b"}
        await readers.begin("huge", 1000, urgent=True)
        assert set(readers.running) == {"b"}
        await readers.end("b")
        assert set(readers.running) == {"huge"}
        nursery.cancel_scope.cancel()
    assert readers.queue.under_way_bytes == len(readers.queue) == 0


async def test_as_many_at_once_as_there_are_streams() -> None:
    async with trio.open_nursery() as nursery:
        readers = Readers(ReadQueue(2), nursery)
        for name in "abc":
            await readers.begin(name, 1)
        assert set(readers.running) == {"a", "b"}
        await readers.end("a")
        assert set(readers.running) == {"b", "c"}
        nursery.cancel_scope.cancel()


async def test_a_read_that_becomes_urgent_while_it_waits_passes_those_that_are_not() -> None:
    async with trio.open_nursery() as nursery:
        readers = Readers(ReadQueue(1), nursery)
        await readers.begin("running", 1)
        await readers.begin("other", 1)
        await readers.begin("wanted", 1)
        await readers.begin("urgent", 1, urgent=True)
        for name in ("wanted", "running", "wanted"):
            readers.urgencies[name].raise_()
        order = []
        while readers.running:
            [name] = readers.running
            order.append(name)
            await readers.end(name)
        assert order == ["running", "urgent", "wanted", "other"]
    assert len(readers.queue) == 0


async def test_a_read_that_is_cancelled_once_it_became_urgent_leaves_nothing() -> None:
    queue = ReadQueue(0)
    urgency = Urgency(False)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            async with queue.entered(1, urgency):
                pass

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        urgency.raise_()
        assert len(queue) == 1
        nursery.cancel_scope.cancel()
    assert len(queue) == 0


async def test_too_many_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REMOTE_WAITING", 1)
    async with trio.open_nursery() as nursery:
        readers = Readers(ReadQueue(1), nursery)
        await readers.begin("a", 1)
        await readers.begin("b", 1)
        await until(lambda: len(readers.queue) == 1)
        with pytest.raises(Busy):
            async with readers.queue.entered(1, Urgency(True)):
                pass
        nursery.cancel_scope.cancel()


async def test_as_many_are_let_in_as_the_queue_has_become_wide(nursery: trio.Nursery) -> None:
    readers = Readers(ReadQueue(2), nursery)
    for name in "abcdef":
        await readers.begin(name, 1)
    assert set(readers.running) == set("ab")
    readers.queue.resize(4)
    await trio.testing.wait_all_tasks_blocked()
    assert set(readers.running) == set("abcd")
    readers.queue.resize(1)
    for ended, left in (("a", "bcd"), ("b", "cd"), ("c", "d"), ("d", "e")):
        await readers.end(ended)
        assert set(readers.running) == set(left)
    readers.queue.resize(2)
    await trio.testing.wait_all_tasks_blocked()
    assert set(readers.running) == set("ef")
