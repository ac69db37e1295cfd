"""Copies of drawn pieces in every direction, each byte compared: by the driver's batch, and by the kernel."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Literal

import pytest

from kvfs import limits
from kvfs._native.cuda.copies import Plan
from kvfs._native.cuda.driver import Context
from tests.support.gpu_memory import DeviceMemory, HostMemory, Kernels, Piece, numbers, run_plan
from tests.support.seeds import SEED

SIZE = 8 << 20
HALF = SIZE // 2
PART = 4096

MakeDevice = Callable[[int], DeviceMemory]
MakeHost = Callable[[int], HostMemory]
Way = Literal["batch", "kernel", "copier"]


def drawn_pieces(draw: random.Random, unit: int) -> list[Piece]:
    """Draw offsets (destination, source, bytes): destinations apart, sources anywhere, ends and sizes in units."""
    pieces: list[Piece] = []
    at = 0
    while at < HALF:
        size = min(draw.choice([unit, 3 * unit, 1000 * unit, 64 << 10, 300 << 10]) // unit * unit, HALF - at)
        source = draw.randrange(0, HALF - size + 1) // unit * unit
        pieces.append((at, source, size))
        at += size + draw.choice([0, 0, unit, 50 * unit])
    draw.shuffle(pieces)
    return pieces


def expected(before: bytes, source: bytes, pieces: list[Piece]) -> bytes:
    after = bytearray(before)
    for to, start, size in pieces:
        after[to : to + size] = source[start : start + size]
    return bytes(after)


def move(
    context: Context,
    kernels: Kernels,
    way: Way,
    to: DeviceMemory | HostMemory,
    source: DeviceMemory | HostMemory,
    pieces: list[Piece],
) -> None:
    placed = [(to.address + target, source.address + start, size) for target, start, size in pieces]
    if way == "kernel":
        kernels.copy(placed)
        return
    plan = Plan(numbers(placed), [(to.address, to.size_bytes)], [(source.address, source.size_bytes)])
    within = isinstance(to, DeviceMemory) and isinstance(source, DeviceMemory)
    kernels.run(plan, within_device=within) if way == "copier" else run_plan(context, plan)


@pytest.mark.seeded
@pytest.mark.parametrize("unit", [1, 4, 16, 4096])
@pytest.mark.parametrize("way", ["batch", "kernel", "copier"])
def test_drawn_pieces_arrive_in_every_direction(
    way: Way, unit: int, context: Context, kernels: Kernels, on_device: MakeDevice, on_host: MakeHost
) -> None:
    draw = random.Random(f"{SEED}.{way}.{unit}")
    host, first, second = on_host(SIZE), on_device(SIZE), on_device(SIZE)
    before, source = draw.randbytes(SIZE), draw.randbytes(SIZE)
    for memory in (first, second):
        memory.write(before)
    host.pages[:] = source
    up, across, down = (drawn_pieces(draw, unit) for _ in range(3))
    move(context, kernels, way, first, host, up)
    one = expected(before, source, up)
    assert first.read() == one
    move(context, kernels, way, second, first, across)
    two = expected(before, one, across)
    assert second.read() == two
    move(context, kernels, way, host, second, down)
    assert bytes(host.pages) == expected(source, two, down)


@pytest.mark.seeded
def test_one_copier_starts_many_plans_at_once(
    context: Context, kernels: Kernels, on_device: MakeDevice, on_host: MakeHost
) -> None:
    draw = random.Random(f"{SEED}.copier")
    host, memory = on_host(SIZE), on_device(SIZE)
    host.pages[:] = source = draw.randbytes(SIZE)
    streams = [context.stream() for _ in range(3)]
    begun = []
    order = draw.sample(range(0, SIZE, 64 << 10), SIZE >> 16)
    for number, at in enumerate(order):
        pieces = [
            (memory.address + at + part, host.address + at + part, 500) for part in range(0, 64 << 10, 512)
        ]
        plan = Plan(numbers(pieces), [(memory.address, SIZE)], [(host.address, SIZE)])
        kernels.copier.start(plan, streams[number % 3], done := context.event())
        begun.append(done)
    for done in begun:
        done.synchronize()
    got = memory.read()
    assert all(got[at : at + 500] == source[at : at + 500] for at in range(0, SIZE, 512))


@pytest.mark.parametrize("way", ["batch", "copier"])
def test_as_many_pieces_as_a_plan_takes(
    way: Way, context: Context, kernels: Kernels, on_device: MakeDevice, on_host: MakeHost
) -> None:
    count = limits.MAX_COPY_PIECES
    host, memory = on_host(64 * count), on_device(-(-64 * count // SIZE) * SIZE)
    data = random.Random(1).randbytes(64 * count)
    host.pages[:] = data
    memory.write(bytes(64 * count))
    pieces = [(memory.address + 64 * i, host.address + 64 * i, 32) for i in range(count)]
    plan = Plan(numbers(pieces), [(memory.address, memory.size_bytes)], [(host.address, host.size_bytes)])
    assert len(plan) == count
    kernels.run(plan) if way == "copier" else run_plan(context, plan)
    got = memory.read(64 * count)
    assert all(got[64 * i : 64 * i + 64] == data[64 * i : 64 * i + 32] + bytes(32) for i in range(count))


@pytest.mark.parametrize("way", ["batch", "copier"])
def test_a_plan_starts_behind_an_event_of_another_stream(
    way: Way, context: Context, kernels: Kernels, on_device: MakeDevice, on_host: MakeHost
) -> None:
    host, memory = on_host(SIZE), on_device(SIZE)
    slow, fast, ready, done = context.stream(), context.stream(), context.event(), context.event()
    for turn in range(20):
        host.pages[:HALF] = bytes([turn]) * HALF
        for _ in range(4):
            slow.copy(memory.address, host.address, HALF)
        slow.copy(memory.address + HALF, memory.address, HALF)
        ready.record(slow)
        pieces = [
            (host.address + HALF + at, memory.address + SIZE - PART - at, PART) for at in range(0, HALF, PART)
        ]
        plan = Plan(numbers(pieces), [(host.address, SIZE)], [(memory.address, SIZE)])
        assert len(plan) > 1
        start = kernels.copier.start if way == "copier" else Plan.start
        start(plan, fast, done, ready)
        done.synchronize()
        assert host.pages[HALF:] == bytes([turn]) * HALF
    for each in (ready, done, slow, fast):
        each.destroy()


def test_files_of_memory_are_registered_and_copied(context: Context, on_device: MakeDevice) -> None:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, data := random.Random(2).randbytes(SIZE), 0)
    memory = on_device(SIZE)
    with HostMemory(context, SIZE, fd) as host:
        pieces = [(memory.address, host.address, SIZE)]
        run_plan(context, Plan(numbers(pieces), [(memory.address, SIZE)], [(host.address, SIZE)]))
        assert memory.read() == data
        os.pwrite(fd, b"later", 100)
        back = [(host.address + HALF, memory.address, 50), (memory.address + 50, host.address + 100, 5)]
        run_plan(
            context,
            Plan(
                numbers(back),
                [(memory.address, SIZE), (host.address, SIZE)],
                [(memory.address, SIZE), (host.address, SIZE)],
            ),
        )
        assert memory.read(5, 50) == b"later"
        assert os.pread(fd, 50, HALF) == data[:50]
    os.close(fd)
