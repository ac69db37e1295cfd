"""Devices have the port of a device: over threads, and behind wrappers that fail on purpose."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest
import trio

from bench import nvme
from bench.measure import Result
from kvfs import limits
from kvfs.errors import DeviceAway, DeviceFailed, DeviceMissing, InvalidRequest, NoSpace, status_error
from tests.conformance.device_suite import KIB, PAGE, DeviceSuite, MakeDevice, get, put
from tests.support.faulty_device import SECTOR_BYTES, FailingDevice, LossyDevice, PowerLost, WrappedDevice
from tests.support.loop_devices import has_loop_devices
from tests.support.uring import needs_uring
from tests.support.waits import WAIT_S
from tiers.device import threads as threads_module
from tiers.device.device import Device, Kind, open_device
from tiers.device.threads import thread_device
from tiers.device.uring import uring_device

MAKERS: dict[str, Callable[[int], Device]] = {
    "threads": thread_device,
    "io_uring": uring_device,
    "lossy": lambda depth: LossyDevice(thread_device(depth)),
    "failing": lambda depth: FailingDevice(thread_device(depth)),
}


@pytest.fixture(params=["threads", pytest.param("io_uring", marks=needs_uring), "lossy", "failing"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def make_device(kind: str) -> AsyncIterator[MakeDevice]:
    devices: list[Device] = []

    def make(depth: int) -> Device:
        devices.append(MAKERS[kind](depth))
        return devices[-1]

    yield make
    for device in devices:
        await device.aclose()


class TestDevice(DeviceSuite):
    """Everything in the suite."""


@pytest.mark.parametrize(
    ("kind", "backends"),
    [
        ("threads", {"threads"}),
        ("auto", {"io_uring", "threads"}),
        pytest.param("io_uring", {"io_uring"}, marks=needs_uring),
        pytest.param("auto", {"io_uring"}, marks=needs_uring),
    ],
)
async def test_the_backend_is_chosen(kind: Kind, backends: set[str]) -> None:
    device = open_device(kind, 3)
    assert device.backend in backends
    assert device.depth == 3
    await device.aclose()


@pytest.mark.parametrize("make", [thread_device, pytest.param(uring_device, marks=needs_uring)])
async def test_the_end_of_a_device_is_no_full_filesystem(make: Callable[[int], Device]) -> None:
    """/dev/full answers as a block device does past its end."""
    device, fd = make(2), os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(DeviceFailed, match="the device ends before"):
        await device.write(fd, 0, memoryview(bytes(PAGE)))
    await device.aclose()
    os.close(fd)


@pytest.mark.parametrize("kind", [DeviceFailed, DeviceAway])
def test_what_a_device_fails_is_no_wrong_checksum_to_a_client(kind: type[DeviceFailed]) -> None:
    assert type(status_error(kind.errno, "a block")) is kind


# --- threads ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [0, -1, limits.DEVICE_DEPTH + 1])
def test_the_depth_is_bounded(depth: int) -> None:
    with pytest.raises(InvalidRequest, match="depth"):
        thread_device(depth)


async def test_a_cancelled_call_of_a_thread_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(fd: int, what: str) -> int:
        entered.set()
        assert leave.wait(WAIT_S)
        return 0

    monkeypatch.setattr(threads_module, "_sync_data", slow)
    device = thread_device(1)
    fd = await device.create_file(tmp_path / "f", PAGE)
    ended = trio.Event()
    scope = trio.CancelScope()

    async def sync() -> None:
        with scope:
            await device.sync(fd)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sync)
        await trio.to_thread.run_sync(entered.wait)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not ended.is_set()
        leave.set()
        await ended.wait()
    await device.aclose()


async def test_a_close_does_not_wait_for_a_stuck_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = threading.Event()

    def stuck(fd: int, what: str) -> int:
        assert leave.wait(WAIT_S)
        return 0

    monkeypatch.setattr(threads_module, "_sync_data", stuck)
    monkeypatch.setattr(limits, "DEVICE_CLOSE_WAIT_S", 0.05)
    device = thread_device(2)
    fd = await device.create_file(tmp_path / "f", PAGE)

    async def sync() -> None:
        with pytest.raises(DeviceFailed, match="closed"):
            await device.sync(fd)

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(sync)
        await trio.testing.wait_all_tasks_blocked()
        await device.aclose()
    os.fstat(fd)
    leave.set()
    os.close(fd)


# --- power -----------------------------------------------------------------------------------------------
SECTORS = 64
OLD, NEW = b"o", b"n"


@pytest.fixture
async def lossy(tmp_path: Path) -> AsyncIterator[tuple[LossyDevice, int]]:
    """A device and a file of SECTORS sectors of OLD, synced."""
    device = LossyDevice(thread_device(8))
    fd = await device.create_file(tmp_path / "f", SECTORS * SECTOR_BYTES)
    await put(device, fd, 0, OLD * (SECTORS * SECTOR_BYTES))
    await device.sync(fd)
    yield device, fd
    await device.aclose()


def sectors_of(path: Path) -> str:
    """One letter for each sector, which must be of one piece."""
    data = path.read_bytes()
    sectors = [data[at : at + SECTOR_BYTES] for at in range(0, len(data), SECTOR_BYTES)]
    assert all(len(set(sector)) == 1 for sector in sectors), "a torn sector"
    return "".join(chr(sector[0]) if sector[0] else "0" for sector in sectors)


async def test_a_cut_keeps_and_drops_sectors_that_were_not_synced(
    lossy: tuple[LossyDevice, int], tmp_path: Path
) -> None:
    device, fd = lossy
    await put(device, fd, 0, NEW * (SECTORS * SECTOR_BYTES))
    assert device.unsynced_bytes == SECTORS * SECTOR_BYTES
    cut = device.power_cut(1)
    found = sectors_of(tmp_path / "f")
    assert set(found) == {"o", "n"}
    assert (cut.sectors, cut.lost) == (SECTORS, found.count("o"))


async def test_a_cut_by_whole_writes(lossy: tuple[LossyDevice, int], tmp_path: Path) -> None:
    device, fd = lossy
    for at in range(0, SECTORS * SECTOR_BYTES, PAGE):
        await put(device, fd, at, NEW * PAGE)
    device.power_cut(2, "writes")
    found = sectors_of(tmp_path / "f")
    pages = {found[at : at + 8] for at in range(0, SECTORS, 8)}
    assert pages == {"o" * 8, "n" * 8}


async def test_what_was_synced_survives_and_only_that(lossy: tuple[LossyDevice, int], tmp_path: Path) -> None:
    device, fd = lossy
    await put(device, fd, 0, NEW * (2 * PAGE))
    await device.sync(fd)
    assert device.unsynced_bytes == 0
    await put(device, fd, PAGE, b"x" * PAGE)
    device.power_cut(3)
    found = sectors_of(tmp_path / "f")
    assert found[:8] == "n" * 8
    assert set(found[8:16]) == {"n", "x"}
    assert found[16:] == "o" * (SECTORS - 16)


async def test_any_of_several_versions_of_a_sector_may_be_found(
    lossy: tuple[LossyDevice, int], tmp_path: Path
) -> None:
    device, fd = lossy
    for letter in (b"1", b"2", b"3"):
        await put(device, fd, 0, letter * (SECTORS * SECTOR_BYTES))
    device.power_cut(4)
    assert set(sectors_of(tmp_path / "f")) == {"o", "1", "2", "3"}


async def test_a_cut_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    outcomes = []
    for run, seed in enumerate((7, 7, 8)):
        device = LossyDevice(thread_device(8))
        path = tmp_path / str(run)
        fd = await device.create_file(path, 64 * KIB)
        await put(device, fd, 0, NEW * (64 * KIB))
        device.power_cut(seed)
        outcomes.append(sectors_of(path))
        await device.aclose()
    assert outcomes[0] == outcomes[1] != outcomes[2]


async def test_a_cut_within_a_write_leaves_a_prefix(tmp_path: Path) -> None:
    prefixes = set()
    for seed in range(12):
        device = LossyDevice(thread_device(8))
        path = tmp_path / str(seed)
        fd = await device.create_file(path, 64 * KIB)
        device.cut_at(device.changes + 1)
        with pytest.raises(PowerLost):
            await put(device, fd, 0, NEW * (64 * KIB))
        with pytest.raises(PowerLost):
            await get(device, fd, 0, PAGE)
        with pytest.raises(PowerLost):
            await device.sync(fd)
        device.power_cut(seed, "writes")
        found = sectors_of(path)
        assert found.rstrip("0") == "n" * found.count("n")
        prefixes.add(found.count("n"))
        await device.aclose()
    assert len(prefixes) > 3


async def test_a_sync_that_loses_power_promises_nothing(
    lossy: tuple[LossyDevice, int], tmp_path: Path
) -> None:
    device, fd = lossy
    await put(device, fd, 0, NEW * (SECTORS * SECTOR_BYTES))
    device.cut_at(device.changes + 1)
    with pytest.raises(PowerLost):
        await device.sync(fd)
    device.power_cut(5)
    assert set(sectors_of(tmp_path / "f")) == {"o", "n"}


class Held(WrappedDevice):
    """Its writes land, and return when told to."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.landed, self.leave = trio.Event(), trio.Event()

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        await super().write(fd, offset, data)
        self.landed.set()
        await self.leave.wait()


async def test_a_sync_covers_only_writes_that_had_returned(tmp_path: Path) -> None:
    held = Held(thread_device(8))
    device = LossyDevice(held)
    fd = await device.create_file(tmp_path / "f", PAGE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(put, device, fd, 0, NEW * PAGE)
        await held.landed.wait()
        await device.sync(fd)
        held.leave.set()
    assert device.unsynced_bytes == PAGE
    await device.sync(fd)
    assert device.unsynced_bytes == 0
    await device.aclose()


async def test_a_creation_within_the_cut_has_three_outcomes(tmp_path: Path) -> None:
    found = set()
    for seed in range(16):
        device = LossyDevice(thread_device(8))
        path = tmp_path / str(seed)
        device.cut_at(1)
        with pytest.raises(PowerLost):
            await device.create_file(path, 64 * KIB)
        device.power_cut(seed)
        found.add(path.stat().st_size if path.exists() else None)
        await device.aclose()
    assert found == {None, 0, 64 * KIB}


async def test_a_discard_is_lost_like_a_write(lossy: tuple[LossyDevice, int], tmp_path: Path) -> None:
    device, fd = lossy
    await device.discard(fd, 0, SECTORS * SECTOR_BYTES)
    device.power_cut(6)
    assert set(sectors_of(tmp_path / "f")) == {"o", "0"}


# --- errors ----------------------------------------------------------------------------------------------
@pytest.fixture
async def failing(tmp_path: Path) -> AsyncIterator[tuple[FailingDevice, int]]:
    device = FailingDevice(thread_device(8))
    fd = await device.create_file(tmp_path / "f", 64 * KIB)
    yield device, fd
    await device.aclose()


async def test_an_error_comes_at_the_chosen_call(failing: tuple[FailingDevice, int]) -> None:
    device, fd = failing
    device.fail("write", DeviceFailed, at=3)
    await put(device, fd, 0, bytes(PAGE))
    await put(device, fd, 0, bytes(PAGE))
    await get(device, fd, 0, PAGE)
    with pytest.raises(DeviceFailed, match="injected"):
        await put(device, fd, 0, bytes(PAGE))
    await put(device, fd, 0, bytes(PAGE))
    assert device.counts == {"create_file": 1, "write": 4, "read": 1}
    assert device.raised == 1


async def test_space_stays_away_until_it_returns(failing: tuple[FailingDevice, int], tmp_path: Path) -> None:
    device, fd = failing
    device.fail("write", NoSpace, when=lambda call: call.offset >= 2 * PAGE, times=None)
    device.fail("create_file", NoSpace, when=lambda call: call.path == tmp_path / "g", times=None)
    for _ in range(3):
        await put(device, fd, PAGE, NEW * PAGE)
        with pytest.raises(NoSpace):
            await put(device, fd, 2 * PAGE, NEW * PAGE)
        with pytest.raises(NoSpace):
            await device.create_file(tmp_path / "g", PAGE)
    assert not (tmp_path / "g").exists()
    device.heal()
    await put(device, fd, 2 * PAGE, NEW * PAGE)
    device.close_file(await device.create_file(tmp_path / "g", PAGE))


async def test_part_of_a_failed_write_may_have_landed(
    failing: tuple[FailingDevice, int], tmp_path: Path
) -> None:
    device, fd = failing
    device.fail("write", DeviceFailed, landed=0.5)
    with pytest.raises(DeviceFailed):
        await put(device, fd, 0, NEW * (2 * PAGE))
    assert sectors_of(tmp_path / "f")[:16] == "n" * 8 + "0" * 8


async def test_a_sync_fails_and_a_discard_does_nothing(
    failing: tuple[FailingDevice, int], tmp_path: Path
) -> None:
    device, fd = failing
    await put(device, fd, 0, NEW * PAGE)
    device.fail("sync", DeviceFailed)
    with pytest.raises(DeviceFailed):
        await device.sync(fd)
    await device.sync(fd)
    device.fail("discard", DeviceFailed)
    await device.discard(fd, 0, PAGE)
    assert await get(device, fd, 0, PAGE) == NEW * PAGE
    await device.discard(fd, 0, PAGE)
    assert await get(device, fd, 0, PAGE) == bytes(PAGE)


async def test_the_wrappers_stack(tmp_path: Path) -> None:
    """A write whose half landed before it failed is as open to a cut as any other."""
    failing = FailingDevice(thread_device(8))
    device = LossyDevice(failing)
    fd = await device.create_file(tmp_path / "f", 64 * KIB)
    failing.fail("write", DeviceFailed, landed=0.5)
    with pytest.raises(DeviceFailed):
        await put(device, fd, 0, NEW * (64 * KIB))
    device.power_cut(Random(9).randrange(1000))
    assert set(sectors_of(tmp_path / "f")) == {"n", "0"}
    await device.aclose()


# --- the measurement -------------------------------------------------------------------------------------
@pytest.mark.parametrize("measure", [nvme.read_1m_qd8, nvme.device_read_1m])
def test_the_measurements_need_fio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Result]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceMissing, match="fio"):
        measure(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is missing")
@pytest.mark.parametrize("name", ["read_1m_qd8", "device_read_1m"])
def test_the_measurements_verify_and_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "device_read_1m" and not has_loop_devices():
        pytest.skip("needs root, /dev/loop-control and losetup")
    monkeypatch.setattr(nvme, "ROUND_S", 1)
    monkeypatch.setattr(nvme, "LEAST_ROUNDS", 1)
    result: Result = getattr(nvme, name)(tmp_path, 0, kind="threads", size_bytes=8 << 20)
    assert result.name == f"nvme.{name}"
    assert result.value > 0
    assert result.baseline is not None
    assert result.ratio == result.value / result.baseline
    assert list(tmp_path.iterdir()) == []
