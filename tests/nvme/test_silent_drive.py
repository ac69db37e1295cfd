"""A drive that does not answer costs a reader NVME_READ_S once, and nobody anything after that."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs import limits
from kvfs.errors import DeviceAway, DeviceFailed, NotFound
from kvfs.formats import SegmentState
from tests.conformance.device_suite import PAGE, checksum, put
from tests.support.faulty_device import SilentOperations, silent_device
from tests.support.nvme_stores import data_of, fill, nvme_of, read, running, until_written
from tests.support.nvme_stores import put as put_object
from tests.support.waits import WAIT_S, until
from tiers.device import files
from tiers.device.files import FileDevice
from tiers.device.watched import Operation
from tiers.model.objects import Name
from tiers.store.store import Store

PATIENCE_S = 0.1
DEPTH = 4


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NVME_READ_S", PATIENCE_S)
    monkeypatch.setattr(limits, "DEVICE_CLOSE_WAIT_S", 1.0)


@pytest.fixture
async def drive(tmp_path: Path) -> AsyncIterator[tuple[FileDevice, SilentOperations, int]]:
    """A device and a file of pages, each of its own number."""
    device, operations = silent_device(DEPTH)
    fd = await device.create_file(tmp_path / "f", 16 * PAGE)
    await put(device, fd, 0, b"".join(bytes([number]) * PAGE for number in range(16)))
    yield device, operations, fd
    operations.speak()
    await device.aclose()


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, PAGE))


def is_read(operation: Operation) -> bool:
    return operation.what.startswith("read")


async def test_a_read_without_an_answer_is_answered_as_away(
    drive: tuple[FileDevice, SilentOperations, int],
) -> None:
    device, operations, fd = drive
    operations.silence()
    first, second = page(), page()
    with pytest.raises(DeviceAway, match="no answer"):
        await device.read(fd, 0, first)
    assert device.drive.is_away
    assert device.late_operations == 1
    await until(lambda: len(operations.kept) == 2)  # the read, and one probe
    for _ in range(2 * DEPTH):
        with pytest.raises(DeviceAway, match="does not answer"):
            await device.read(fd, 3 * PAGE, second)
    assert len(operations.kept) == 2, "nothing else was begun"
    operations.speak()
    await until(lambda: not device.drive.is_away)
    assert await device.read(fd, 3 * PAGE, second) == checksum(b"\3" * PAGE)
    await until(lambda: device.late_operations == 0)


async def test_who_waits_for_a_turn_is_answered_with_the_first(
    drive: tuple[FileDevice, SilentOperations, int],
) -> None:
    device, operations, fd = drive
    operations.silence()
    away = 0

    async def one() -> None:
        nonlocal away
        with pytest.raises(DeviceAway):
            await device.read(fd, 0, page())
        away += 1

    async with trio.open_nursery() as nursery:
        for _ in range(3 * DEPTH):
            nursery.start_soon(one)
    assert away == 3 * DEPTH
    assert device.late_operations == DEPTH


async def test_the_drive_is_back_with_its_first_answer(
    drive: tuple[FileDevice, SilentOperations, int],
) -> None:
    """The probe hangs on, and the read that was late is answered."""
    device, operations, fd = drive
    operations.silence()
    with pytest.raises(DeviceAway):
        await device.read(fd, PAGE, page())
    await until(lambda: len(operations.kept) == 2)
    (late, begin), probe = operations.kept
    assert is_read(late)
    operations.kept = [probe]
    begin()
    await until(lambda: not device.drive.is_away)
    assert device.late_operations == 0


async def test_a_buffer_is_not_lent_while_the_drive_may_write_to_it(
    drive: tuple[FileDevice, SilentOperations, int],
) -> None:
    device, operations, fd = drive
    operations.silence(is_read)
    async with device.buffer() as view:
        view[:PAGE] = bytes(PAGE)
        with pytest.raises(DeviceAway):
            await device.read(fd, 7 * PAGE, view[:PAGE])
    await until(lambda: not device.drive.is_away)  # the probe was answered
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(device.buffer()) for _ in range(limits.DEVICE_BUFFERS - 1)]
        for other in others:
            other[:PAGE] = b"o" * PAGE
        operations.speak()
        last = await stack.enter_async_context(device.buffer())
        assert last[:PAGE] == b"\7" * PAGE, "the late read went where it was meant to"
        assert all(other[:PAGE] == b"o" * PAGE for other in others)


async def test_an_event_loop_that_stood_still_makes_no_drive_late(
    drive: tuple[FileDevice, SilentOperations, int],
) -> None:
    device, _, fd = drive
    reads = 0

    async def read_one() -> None:
        nonlocal reads
        await device.read(fd, 0, page())
        reads += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_one)
        await trio.testing.wait_all_tasks_blocked()
        stop = trio.current_time() + 2 * PATIENCE_S
        while trio.current_time() < stop:
            pass
    assert reads == 1
    assert device.drive.absences == 0


async def test_a_device_closes_over_a_silent_drive(tmp_path: Path) -> None:
    device, operations = silent_device(DEPTH)
    fd = await device.create_file(tmp_path / "f", PAGE)
    operations.silence()
    with pytest.raises(DeviceAway):
        await device.read(fd, 0, page())
    await device.aclose()
    with pytest.raises(DeviceFailed, match="closed"):
        await device.read(fd, 0, page())
    os.fstat(fd)  # stays, as an operation is still on it
    operations.speak()


# --- calls that may hang ---------------------------------------------------------------------------------
@pytest.fixture
def short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NVME_WRITE_S", 3 * PATIENCE_S)


@pytest.mark.usefixtures("short_writes")
async def test_a_discard_that_hangs_stops_nobody(
    drive: tuple[FileDevice, SilentOperations, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _, fd = drive
    entered, leave = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        entered.set()
        assert leave.wait(WAIT_S)

    monkeypatch.setattr(files, "_discard", hang)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.discard, fd, 0, PAGE)
        await until(entered.is_set)
        assert await device.read(fd, PAGE, page()) == checksum(b"\1" * PAGE)
        assert not leave.is_set()
    assert device.is_changing(fd), "it may come later"
    leave.set()
    await until(lambda: not device.is_changing(fd))


@pytest.mark.usefixtures("short_writes")
async def test_a_creation_that_hangs_stops_nobody(
    drive: tuple[FileDevice, SilentOperations, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _, fd = drive
    entered, leave = threading.Event(), threading.Event()
    create = files._create

    def hang(path: Path, size_bytes: int) -> None:
        entered.set()
        assert leave.wait(WAIT_S)
        create(path, size_bytes)

    async def make() -> None:
        with pytest.raises(DeviceAway, match=r"create .*/late"):
            await device.create_file(tmp_path / "late", PAGE)

    monkeypatch.setattr(files, "_create", hang)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(make)
        await until(entered.is_set)
        assert await device.read(fd, PAGE, page()) == checksum(b"\1" * PAGE)
        assert not leave.is_set()
    leave.set()
    await until(lambda: device.late_operations == 0)


# --- through the store -----------------------------------------------------------------------------------
CACHE, DURABLE = Name(b"cache", b"k"), Name(b"durable", b"k")
SIZE = 300_000


async def fill_tier(store: Store) -> None:
    """Put an object into each bucket, on the device alone."""
    store.create_bucket(b"cache", uid=0, gid=0)
    store.create_bucket(b"durable", uid=0, gid=0, durable=True)
    for name in (CACHE, DURABLE):
        put_object(store, name, SIZE)
    await until_written(store, 2)
    await store.journal.settle()
    await until(lambda: all(store.dram.checksum(info_of(store, name).extent) for name in (CACHE, DURABLE)))
    store.evict(names=[CACHE, DURABLE])
    for name in (CACHE, DURABLE):
        assert info_of(store, name).extent is None


def info_of(store: Store, name: Name) -> Any:
    return store.lookup(name)


async def test_what_a_silent_drive_has_is_a_miss_and_comes_back(tmp_path: Path) -> None:
    device, operations = silent_device()
    async with running(tmp_path, device=device) as store:
        await fill_tier(store)
        operations.silence(lambda operation: not operation.changes)
        with pytest.raises(NotFound, match="cannot be read now"):
            await read(store, CACHE)
        with pytest.raises(DeviceAway):
            await read(store, DURABLE)
        [nvme] = store.journal.usage()
        assert nvme["away_since_ns"] is not None
        assert nvme["late_operations"] == 3  # extents
        operations.speak()
        await until(lambda: not device.drive.is_away)
        for name in (CACHE, DURABLE):
            assert await read(store, name) == data_of(name, SIZE)
        assert nvme_of(store).counts.corrupt == 0


async def test_a_late_read_never_reaches_the_next_user_of_a_slot(tmp_path: Path) -> None:
    device, operations = silent_device()
    async with running(tmp_path, device=device) as store:
        await fill_tier(store)
        operations.silence(lambda operation: not operation.changes)
        with pytest.raises(NotFound):
            await read(store, CACHE)
        drafts = [store.reserve(SIZE, uid=0) for _ in range(24)]
        for draft in drafts:
            fill(store, draft, b"d" * SIZE)
        operations.speak()
        await until(lambda: device.late_operations == 0)
        for draft in drafts:
            descriptor = store.open_draft(draft)
            assert os.pread(descriptor, SIZE, 0) == b"d" * SIZE
            os.close(descriptor)
            store.abort(draft)


# --- writes ----------------------------------------------------------------------------------------------
def is_write(operation: Operation) -> bool:
    return operation.changes


@pytest.mark.usefixtures("short_writes")
@pytest.mark.parametrize("when", [is_write, lambda operation: True], ids=["writes", "all"])
async def test_durable_writers_are_told_and_caches_stay_in_dram(
    tmp_path: Path, when: Callable[[Operation], bool]
) -> None:
    """After a restart all of it is there: what was told as failed, too, since the drive took it in the end."""
    kept, cached = Name(b"durable", b"later"), Name(b"cache", b"later")
    device, operations = silent_device()
    async with running(tmp_path, device=device) as store:
        await fill_tier(store)
        operations.silence(when)
        put_object(store, kept, SIZE)
        put_object(store, cached, SIZE)
        with trio.fail_after(WAIT_S):
            with pytest.raises(DeviceAway):
                await store.journal.settle()
            with pytest.raises(DeviceAway):  # who comes later, as well
                await store.journal.settle()
        for name in (kept, cached):
            assert await read(store, name) == data_of(name, SIZE)
        operations.speak()
        await until_written(store, 4)
        with trio.fail_after(WAIT_S):
            await store.journal.settle()
        await until(lambda: device.late_operations == 0)
    async with running(tmp_path, keep=False) as store:
        for name in (CACHE, DURABLE, kept, cached):
            assert await read(store, name) == data_of(name, SIZE)


@pytest.mark.usefixtures("short_writes")
async def test_a_segment_that_a_late_write_may_change_is_not_used(tmp_path: Path) -> None:
    device, operations = silent_device()
    async with running(tmp_path, device=device) as store:
        await fill_tier(store)
        operations.silence(is_write)
        put_object(store, Name(b"durable", b"later"), SIZE)
        with trio.fail_after(WAIT_S), pytest.raises(DeviceAway):
            await store.journal.settle()
        late = {operation.fd for operation, _ in operations.kept}
        assert late
        operations.silence(lambda operation: False)
        await until(lambda: not device.drive.is_away)
        pool, names = nvme_of(store).pool, [Name(b"cache", b"%d" % number) for number in range(300)]
        for name in names:  # through the whole tier, once and a half
            await store.journal.persist(put_object(store, name, SIZE).object_id)
        changed = [segment for segment in pool.segments if segment.fd in late]
        assert all(segment.state is SegmentState.FREE or segment.closed for segment in changed)
        operations.speak()
        await until(lambda: device.late_operations == 0)
        found = 0
        for name in names:
            with suppress(NotFound):
                store.evict(names=[name])
                assert await read(store, name) == data_of(name, SIZE)
                found += 1
        assert found > 20
        assert nvme_of(store).counts.corrupt == 0
