"""Loads onto a device whose copies are late, or fail: on the stand-in."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from kvfs._native.cuda.copies import DevicePlaces
from kvfs._native.cuda.driver import Context
from kvfs.connectors.device import buffers
from kvfs.connectors.device import loads as loads_module
from kvfs.errors import ContextLost, OutOfResources
from tests.support.cuda_standin import Standin
from tests.support.gpu_memory import address_of
from tests.support.waits import WAIT_S, eventually

BLOCK = 4096
KEYS = bytes(16 * 6)


class Cache:
    """A cache of pages, each a block of two runs."""

    def __init__(self, context: Context) -> None:
        self.pages = mmap.mmap(-1, 1 << 20)
        start = address_of(self.pages)
        self.region = (start, 1 << 20)
        self.starts = [start + block * 8192 for block in range(6)]

    def places(self) -> DevicePlaces:
        return DevicePlaces(self.starts, [0, 4096], BLOCK // 2, [self.region])

    def block(self, number: int) -> bytes:
        at = number * 8192
        return self.pages[at : at + BLOCK // 2] + self.pages[at + 4096 : at + 4096 + BLOCK // 2]


PARTS: list[bytes] = []
"""Keys of parts that were read."""


def read(keys: bytes, places: Any, left_s: float) -> list[int]:
    PARTS.append(keys)
    for start in places.offsets:
        places.bases[0][start : start + BLOCK] = b"n" * BLOCK
    return [BLOCK] * len(places.offsets)


@pytest.fixture
def device_loads(standin: Standin, context: Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two buffers of two blocks."""
    monkeypatch.setattr(buffers, "CONNECTOR_STAGING_BYTES", 2 * BLOCK)
    monkeypatch.setattr(loads_module, "CONNECTOR_STAGING_BUFFERS", 2)
    PARTS.clear()
    compute = context.stream()
    made = loads_module.DeviceLoads(context, BLOCK, lambda: compute.handle)
    yield made
    standin.hold(False)
    made.close()


@pytest.fixture
def loads(device_loads: Any) -> Callable[..., Future[list[int]]]:
    """Load six blocks."""
    return lambda cache, timeout_s=WAIT_S: device_loads.submit(
        read, KEYS, cache.places(), timeout_s=timeout_s
    )


def test_a_load_is_done_with_its_last_copy(
    standin: Standin, context: Context, loads: Callable[..., Future[list[int]]]
) -> None:
    cache, spins = Cache(context), standin.spins()
    standin.hold(True)
    future = loads(cache)
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert not any(cache.pages[: 6 * 8192])
    standin.hold(False)
    assert future.result(WAIT_S) == [BLOCK] * 6
    assert standin.spins() == spins
    assert all(cache.block(number) == b"n" * BLOCK for number in range(6))


def test_a_load_that_gets_no_buffer_in_time_is_a_miss(
    standin: Standin, context: Context, loads: Callable[..., Future[list[int]]]
) -> None:
    first, second = Cache(context), Cache(context)
    standin.hold(True)
    one = loads(first)
    eventually(lambda: len(PARTS) == 2, "the first load has both buffers")
    two = loads(second, timeout_s=0.2)
    assert two.result(WAIT_S) == [-1] * 6
    assert not any(second.pages[: 6 * 8192])
    standin.hold(False)
    assert one.result(WAIT_S) == [BLOCK] * 6


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("cuLaunchKernel:2:2", OutOfResources),
        ("sticky:719:8", ContextLost),
        ("cuEventSynchronize:719:5", ContextLost),  # the first that waits for a copy when all have begun
    ],
)
def test_a_load_that_fails_says_so_and_writes_no_more(
    fault: str,
    kind: type[Exception],
    standin: Standin,
    context: Context,
    loads: Callable[..., Future[list[int]]],
) -> None:
    cache = Cache(context)
    standin.set_faults(fault)
    future = loads(cache)
    with pytest.raises(kind):
        future.result(WAIT_S)
    standin.set_faults()
    before = bytes(cache.pages)
    if kind is OutOfResources:  # its buffers are there for the next
        assert loads(cache).result(WAIT_S) == [BLOCK] * 6
    else:
        assert cache.pages[:] == before


def test_closing_again_waits_for_no_buffer(
    context: Context, device_loads: Any, loads: Callable[..., Future[list[int]]]
) -> None:
    assert loads(Cache(context)).result(WAIT_S) == [BLOCK] * 6
    device_loads.close()
    device_loads._free = None  # where it would wait
    device_loads.close()


def test_a_borrowed_stream_is_its_owners(standin: Standin, context: Context) -> None:
    own, event = context.stream(), context.event()
    borrowed = context.borrow_stream(own.handle)
    assert borrowed.handle == own.handle
    event.record(borrowed)
    borrowed.destroy()
    del borrowed
    own.synchronize()
    assert event.query()
    assert context.borrow_stream(0).handle == 1
