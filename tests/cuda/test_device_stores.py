"""Stores from a device whose copies are late, or fail: on the stand-in."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvfs._native.cuda.copies import DevicePlaces
from kvfs._native.cuda.driver import Context, Stream
from kvfs.connectors.device import buffers
from kvfs.connectors.device import stores as device_stores
from kvfs.errors import ContextLost, InvalidRequest, OutOfResources
from tests.support.cuda_standin import Standin
from tests.support.gpu_memory import address_of
from tests.support.waits import WAIT_S

BLOCK = 1 << 20
BLOCKS = 8


class Cache:
    """A cache of blocks, each in two runs that lie apart; its blocks are full of their numbers."""

    def __init__(self) -> None:
        self.pages = mmap.mmap(-1, BLOCKS * BLOCK)
        self.address = address_of(self.pages)
        for number in range(BLOCKS):
            for at in self.starts(number):
                self.pages[at : at + BLOCK // 2] = self.content(number)[: BLOCK // 2]

    @staticmethod
    def starts(number: int) -> list[int]:
        return [(number + run * BLOCKS) * BLOCK // 2 for run in range(2)]

    @staticmethod
    def content(number: int) -> bytes:
        return bytes([1 + number]) * BLOCK

    def places(self, *numbers: int) -> DevicePlaces:
        starts = [number * BLOCK // 2 for number in numbers]
        runs = [self.address + at for at in self.starts(0)]
        return DevicePlaces(starts, runs, BLOCK // 2, [(self.address, BLOCKS * BLOCK)])


@pytest.fixture
def compute(context: Context) -> Stream:
    """What the engine computes on."""
    return context.stream()


@pytest.fixture
def stores(
    standin: Standin, context: Context, compute: Stream, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Registered memory for two blocks at first."""
    monkeypatch.setattr(buffers, "CONNECTOR_STAGING_BYTES", 2 * BLOCK)
    monkeypatch.setattr(device_stores, "CONNECTOR_STAGING_BUFFERS", 1)
    made = device_stores.DeviceStores(context, BLOCK, lambda: compute.handle)
    yield made
    standin.set_faults()
    standin.hold(False)
    made.close()


def test_copies_come_between_what_the_engine_has_started_and_what_it_starts_next(
    standin: Standin, compute: Stream, stores: Any
) -> None:
    cache, before, after = Cache(), mmap.mmap(-1, BLOCKS * BLOCK), mmap.mmap(-1, BLOCKS * BLOCK)
    before[:], after[:] = b"b" * len(before), b"a" * len(after)
    spins = standin.spins()
    standin.hold(True)
    compute.copy(cache.address, address_of(before), len(before))
    first = stores.copy(cache.places(*range(6)))
    second = stores.copy(cache.places(6, 7))
    for number in range(BLOCKS):  # no more than a page of each, which is there at once
        compute.copy(cache.address + number * BLOCK + BLOCK // 4, address_of(after), 4096)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.wait)
        with pytest.raises(TimeoutError):
            waits.result(0.05)
        standin.hold(False)
        rows = waits.result(WAIT_S) + second.wait()
    assert [bytes(row) for row in rows] == [b"b" * BLOCK] * BLOCKS
    assert standin.spins() == spins
    compute.synchronize()
    assert cache.pages[:].count(b"a") == BLOCKS * 4096


def test_memory_is_used_again_once_it_is_given_back(stores: Any) -> None:
    cache = Cache()
    first, second = stores.copy(cache.places(0, 1)), stores.copy(cache.places(2, 3))
    rows = first.wait() + second.wait()
    assert [bytes(row) for row in rows] == [cache.content(number) for number in range(4)]
    first.give_back()
    third = stores.copy(cache.places(4, 5))
    assert {address_of_row(row) for row in third.wait()} == {address_of_row(row) for row in rows[:2]}
    rows = third.wait() + second.wait()
    assert [bytes(row) for row in rows] == [cache.content(number) for number in (4, 5, 2, 3)]


def address_of_row(row: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(row))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("cuMemHostRegister:2:1", OutOfResources),
        ("cuEventCreate:2:1", OutOfResources),
        ("cuEventRecord:2:1", OutOfResources),
        ("cuLaunchKernel:2:1", OutOfResources),
        ("cuStreamWaitEvent:2:2", OutOfResources),
        ("sticky:719:4", ContextLost),
    ],
)
def test_copies_that_do_not_start_leave_nothing_under_way(
    fault: str, kind: type[Exception], standin: Standin, stores: Any
) -> None:
    cache = Cache()
    standin.set_faults(fault)
    with pytest.raises(kind):
        stores.copy(cache.places(0, 1, 2))
    assert kind is ContextLost or stores._stream.query()
    standin.set_faults()
    again = stores.copy(cache.places(3, 4, 5))
    assert [bytes(row) for row in again.wait()] == [cache.content(number) for number in (3, 4, 5)]
    assert len(stores._buffers) == 2


def test_closing_again_does_nothing(context: Context, stores: Any) -> None:
    cache = Cache()
    stores.copy(cache.places(0)).wait()
    stores.close()
    stores.close()
    with pytest.raises(InvalidRequest, match="was destroyed"):
        stores._stream.query()


def test_blocks_that_are_larger_than_their_memory_are_refused(stores: Any) -> None:
    places = DevicePlaces([0], [0] * 3, BLOCK // 2, [])
    with pytest.raises(InvalidRequest, match=f"{BLOCK * 3 // 2} bytes: there is room for {BLOCK}"):
        stores.copy(places)
