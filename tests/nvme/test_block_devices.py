"""The NVMe tier on whole block devices: what a store takes, what it refuses, and that it lives there as in files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvfs import formats, limits
from kvfs.errors import ConfigError, DeviceAway, FormatMismatch, KvfsError, NoSpace
from kvfs.limits import MIB
from tests.conformance.device_suite import PAGE, get, put
from tests.support.faulty_device import SilentOperations, silent_device
from tests.support.loop_devices import LoopDevice, MakeLoop
from tests.support.loop_devices import make_loop as make_loop
from tests.support.one_store import Life, look
from tests.support.waits import until
from tiers.device.device import Device
from tiers.device.threads import thread_device
from tiers.fsck.pool_check import look_at_pool
from tiers.log.pool import SegmentPool
from tiers.log.pool_files import open_pool
from tiers.places.block_devices import clear, describe
from tiers.places.geometry import Geometry, read_geometry
from tiers.places.labels import BlockDevice, Label, in_order, new_labels

STORE, OTHER = b"a store's own id", b"another store id"
DISK = 17 * MIB
"""Room for 16 segments of 1 MiB behind the label."""


def label(number: int = 0, segments: int = 16, store: bytes = STORE) -> Label:
    return Label(store, number, MIB, segments, 1 << 41)


def found(name: str, label: Label | None, size_bytes: int = DISK) -> BlockDevice:
    return BlockDevice(Path(f"/dev/{name}"), size_bytes, label)


def known(*names: str) -> Geometry:
    return Geometry(STORE, MIB, tuple(Path(f"/dev/{name}") for name in names))


async def opened(
    device: Device, path: Path, devices: Sequence[LoopDevice], store_id: bytes = STORE
) -> SegmentPool:
    return await open_pool(
        device,
        path,
        store_id=store_id,
        capacity_bytes=sum(os.stat(each.file).st_size for each in devices),
        devices=[each.path for each in devices],
        segment_bytes=MIB,
    )


async def refused(path: Path, devices: Sequence[LoopDevice], store_id: bytes = STORE) -> str:
    """What an opening says; it leaves everything as it was."""
    device = thread_device()
    before = [each.file.read_bytes() for each in devices]
    files = names_in(path)
    with pytest.raises(KvfsError) as caught:
        await opened(device, path, devices, store_id)
    await device.aclose()
    assert isinstance(caught.value, ConfigError | FormatMismatch)
    assert [each.file.read_bytes() for each in devices] == before
    assert names_in(path) == files
    return str(caught.value)


def names_in(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.exists() else []


async def numbers_of(path: Path, devices: Sequence[LoopDevice]) -> list[int]:
    device = thread_device()
    pool = await opened(device, path, devices)
    pool.close_files()
    await device.aclose()
    return sorted(segment.number for segment in pool.segments)


# --- which devices ---------------------------------------------------------------------------------------
def test_devices_come_in_the_order_of_their_labels() -> None:
    first, second, empty = found("b", label(0)), found("a", label(1)), found("c", None)
    assert in_order([empty, second, first], STORE, known("a", "b")) == [first, second, empty]
    assert in_order([first, second], STORE, None) == [first, second]


@pytest.mark.parametrize(
    ("devices", "known_devices", "message"),
    [
        ([found("a", label(store=OTHER))], None, "/dev/a holds segments of store"),
        ([found("a", label()), found("b", label())], None, "/dev/a and /dev/b are both device 0 of the store"),
        ([found("a", label(segments=17))], None, "/dev/a has 17 MiB, of 18 MiB that the store has on it: it shrank"),
        ([found("a", label(1))], None, "device 0 of the store is not among"),
        ([found("a", label())], known("a", "b"), "device 1 of the store, /dev/b when it was last used, is not among"),
        ([found("b", None)], known("a"), "/dev/b is empty: it lost what it held, or is another one"),
        ([found("a", replace(label(), segment_bytes=2 * MIB, segments=8))], known("a"), "of different sizes"),
        ([found("a", label(16))], None, "device 16 of 16 that a store can have"),
    ],
)  # fmt: skip
def test_other_devices_are_refused(
    devices: list[BlockDevice], known_devices: Geometry | None, message: str
) -> None:
    with pytest.raises(FormatMismatch, match=message):
        in_order(devices, STORE, known_devices)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=8), st.integers(0, 8))
def test_a_device_that_is_taken_has_lives_of_its_own(sizes: list[int], labelled: int) -> None:
    """What it held for another store, or for this one before, has other lives and is not read."""
    devices = [found(f"d{at}", None, size * MIB) for at, size in enumerate(sizes)]
    first = new_labels(devices[:labelled], STORE, MIB)
    again = [replace(each, label=given) for each, given in first] + devices[labelled:]
    labels = [given for _, given in new_labels(again, STORE, MIB)]
    assert [each.number for each in labels] == list(range(len(devices)))
    assert [each.segments for each in labels] == [size - 1 for size in sizes]
    assert labels[: len(first)] == [given for _, given in first]
    for older, newer in pairwise(labels):
        assert newer.first_sequence - older.first_sequence >= 1 << 40
    assert 0 < labels[0].first_sequence <= labels[-1].first_sequence < 1 << 62


def test_a_store_has_no_more_segments_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has stays, whatever is added."""
    monkeypatch.setattr(limits, "MAX_SEGMENTS", 40)
    devices = [
        found("a", label(0, 10)),
        found("b", label(1, 16)),
        found("c", None, 30 * MIB),
        found("d", None),
    ]
    labels = [given for _, given in new_labels(devices, STORE, MIB)]
    assert [each.segments for each in labels] == [16, 16, 8, 0]
    devices = [replace(each, label=given) for each, given in zip(devices, labels, strict=True)]
    assert [given for _, given in new_labels(devices, STORE, MIB)] == labels


# --- on loop devices -------------------------------------------------------------------------------------
async def test_offsets_count_from_where_a_segment_begins(make_loop: MakeLoop) -> None:
    loop, device = make_loop(DISK), thread_device()
    near, far = device.open_file(loop.path, MIB), device.open_file(loop.path, 2 * MIB)
    await put(device, near, 0, b"n" * PAGE)
    await put(device, far, PAGE, b"f" * PAGE)
    await device.sync(far)
    assert await get(device, near, MIB + PAGE, PAGE) == b"f" * PAGE
    assert loop.file.read_bytes()[MIB : MIB + PAGE] == b"n" * PAGE
    await device.discard(far, PAGE, PAGE)
    assert await get(device, far, PAGE, PAGE) == bytes(PAGE)
    await device.aclose()


async def test_an_empty_device_is_taken_and_one_segment_is_spare(tmp_path: Path, make_loop: MakeLoop) -> None:
    loop, device, path = make_loop(DISK), thread_device(), tmp_path / "nvme"
    pool = await opened(device, path, [loop])
    assert [segment.number for segment in pool.segments] == list(range(15))
    assert pool.next_sequence == pool.places.first_sequence > 1 << 40
    assert read_geometry(path) == Geometry(STORE, MIB, (loop.path,))
    assert (await pool.grow()).number == 15
    with pytest.raises(NoSpace, match="every segment is in use"):
        await pool.grow()
    pool.close_files()
    assert await numbers_of(path, [loop]) == list(range(15))
    await device.aclose()


async def test_devices_are_added_and_grow(tmp_path: Path, make_loop: MakeLoop) -> None:
    first, second, path = make_loop(DISK), make_loop(12 * MIB), tmp_path / "nvme"
    other = 1 << formats.DEVICE_NUMBER_SHIFT
    assert await numbers_of(path, [first]) == list(range(15))
    assert await numbers_of(path, [second, first]) == [*range(16), *range(other, other + 10)]
    first.resize(20 * MIB)
    assert await numbers_of(path, [first, second]) == [*range(19), *range(other, other + 10)]
    device = thread_device()
    pool = await opened(device, path, [first, second])
    taken = []
    for _ in range(4):
        segment = await pool.take()
        assert segment is not None
        taken.append(segment.number)
    assert taken == [0, other, 1, other + 1], "consecutive segments are spread over the devices"
    pool.close_files()
    await device.aclose()


async def test_what_a_store_has_lost_is_named(tmp_path: Path, make_loop: MakeLoop) -> None:
    first, second, path = make_loop(DISK), make_loop(DISK), tmp_path / "nvme"
    await numbers_of(path, [first, second])
    assert "device 1 of the store" in await refused(path, [first])
    assert "another store" not in await refused(path, [first, second], OTHER)
    copy = tmp_path / "copy"
    shutil.copy(second.file, copy)
    assert "one is a copy" in await refused(path, [first, second, make_loop(file=copy)])
    second.resize(16 * MIB)
    assert "it shrank, or is not the whole device" in await refused(path, [first, second])
    second.resize(DISK)
    assert len(await numbers_of(path, [first, second])) == 31
    clear(second.path, forced=True)
    assert f"{second.path} is empty: it lost what it held" in await refused(path, [first, second])
    assert "cannot move from" in await refused_without_devices(path)


async def refused_without_devices(path: Path) -> str:
    device = thread_device()
    with pytest.raises(ConfigError) as caught:
        await open_pool(device, path, store_id=STORE, capacity_bytes=16 * MIB, segment_bytes=MIB)
    await device.aclose()
    return str(caught.value)


async def test_one_copy_of_a_label_is_enough(tmp_path: Path, make_loop: MakeLoop) -> None:
    loop, path = make_loop(DISK), tmp_path / "nvme"
    await numbers_of(path, [loop])
    for at in formats.DEVICE_LABEL_COPIES:
        kept = loop.file.read_bytes()
        loop.write(at, b"\xff" * 64)
        assert await numbers_of(path, [loop]) == list(range(15))
        loop.write(0, kept[:8192])
    for at in formats.DEVICE_LABEL_COPIES:
        loop.write(at + 20, b"\xff")
    assert "in both copies" in await refused(path, [loop])


@pytest.mark.parametrize("at", [1080, DISK - 4096])
async def test_what_is_somebody_elses_is_not_touched(tmp_path: Path, make_loop: MakeLoop, at: int) -> None:
    loop, path = make_loop(DISK), tmp_path / "nvme"
    loop.write(at, b"theirs")
    assert "holds something that is not of kvfs" in await refused(path, [loop])
    with pytest.raises(FormatMismatch, match="--force empties it"):
        clear(loop.path, forced=False)
    assert clear(loop.path, forced=True) == "something that is not of kvfs"
    assert describe(loop.path) == (DISK, "nothing")
    assert await numbers_of(path, [loop]) == list(range(15))
    assert describe(loop.path)[1] == f"16 segments, device 0 of store {STORE.hex()}"


async def test_a_device_of_another_store_is_empty_once_it_is_cleared(
    tmp_path: Path, make_loop: MakeLoop
) -> None:
    loop, device = make_loop(DISK), thread_device()
    theirs = await opened(device, tmp_path / "theirs", [loop], OTHER)
    for _ in range(3):
        segment = await theirs.take()
        assert segment is not None
        await put(device, segment.fd, formats.SEGMENT_DATA_START, formats.RECORD_MAGIC.ljust(PAGE))
    theirs.close_files()
    assert f"holds segments of store {OTHER.hex()}" in await refused(tmp_path / "nvme", [loop])
    clear(loop.path, forced=True)
    ours = await opened(device, tmp_path / "nvme", [loop])
    assert len(ours.free) == 15
    assert not any(segment.bad for segment in ours.segments)
    ours.close_files()
    check = await look_at_pool(device, tmp_path / "nvme", STORE)
    assert check is not None
    assert all(each.is_clean for each in check.checks)
    check.pool.close_files()
    await device.aclose()


async def test_a_device_in_use_is_refused(tmp_path: Path, make_loop: MakeLoop) -> None:
    loop, path, mounted = make_loop(DISK), tmp_path / "nvme", tmp_path / "mounted"
    await trio.run_process(["mkfs.ext4", "-q", loop.path])
    mounted.mkdir()
    await trio.run_process(["mount", loop.path, mounted])
    try:
        assert "it is mounted, part of another device, or used" in await refused(path, [loop])
        with pytest.raises(ConfigError, match="it is mounted"):
            clear(loop.path, forced=True)
    finally:
        await trio.run_process(["umount", mounted])
    clear(loop.path, forced=True)
    device = thread_device()
    pool = await opened(device, path, [loop])
    assert "used by another process" in await refused(tmp_path / "second", [loop], OTHER)
    pool.close_files()
    await device.aclose()


async def test_what_is_no_device_is_named(tmp_path: Path, make_loop: MakeLoop) -> None:
    device, small = thread_device(), make_loop(6 * MIB)
    (tmp_path / "file").write_bytes(bytes(MIB))
    for path, message in [
        (tmp_path / "file", "no block device"),
        (tmp_path / "none", "No such file"),
        (small.path, f"room for 5 segments of {MIB} bytes, more than {limits.MIN_SEGMENTS} are needed"),
    ]:
        with pytest.raises(ConfigError, match=message):
            await open_pool(
                device,
                tmp_path / "nvme",
                store_id=STORE,
                capacity_bytes=DISK,
                devices=[path],
                segment_bytes=MIB,
            )
    assert describe(small.path)[1] == "nothing"
    await device.aclose()


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("lost", ["nothing", "DRAM", "DRAM and index"])
def test_a_store_lives_on_devices(tmp_path: Path, make_loop: MakeLoop, killed: bool, lost: str) -> None:
    disks = (make_loop(DISK).path, make_loop(DISK).path)
    path = tmp_path / "data"
    life = Life(path, 7, disks)
    for _ in range(3):
        trio.run(lambda: life.run(25, killed=killed, settled=killed or lost != "nothing"))
        for folder in lost.replace("nothing", "").split(" and "):
            shutil.rmtree(path / (folder.lower() or "none"), ignore_errors=True)
        shown = trio.run(look, path, disks)
        assert not life.expected.judge(shown), life.history
        if lost != "nothing":
            assert shown.keys() == life.expected.values.keys(), life.history


def test_what_another_store_left_behind_is_never_shown(tmp_path: Path, make_loop: MakeLoop) -> None:
    """Segments of a killed store have no footer: a scan reads whatever a segment holds."""
    loop = make_loop(DISK)
    first = Life(tmp_path / "first", 3, (loop.path,))
    trio.run(lambda: first.run(60, killed=True, settled=True))
    clear(loop.path, forced=True)
    second = Life(tmp_path / "second", 4, (loop.path,))
    second._count = 1_000_000
    trio.run(lambda: second.run(10, killed=True, settled=True))
    for folder in ("dram", "index"):
        shutil.rmtree(tmp_path / "second" / folder)
    shown = trio.run(look, tmp_path / "second", (loop.path,))
    assert shown == second.expected.values
    assert not set(shown.values()) & set(first.expected.values.values())


@pytest.mark.parametrize("seed", range(3))
def test_damage_costs_what_it_hits(tmp_path: Path, make_loop: MakeLoop, seed: int) -> None:
    loops = [make_loop(DISK), make_loop(DISK)]
    disks = tuple(loop.path for loop in loops)
    life = Life(tmp_path / "data", seed, disks)
    trio.run(lambda: life.run(60, killed=seed % 2 == 0, settled=True))
    shutil.rmtree(tmp_path / "data" / "dram")
    chance = random.Random(seed)
    loop = chance.choice(loops)
    held = loop.file.read_bytes()
    used = [at for at in range(MIB, DISK, PAGE) if any(held[at : at + PAGE])]
    loop.write(chance.choice(used), chance.randbytes(PAGE))
    for _ in range(2):
        shown = trio.run(look, tmp_path / "data", disks)
        assert not life.expected.judge(shown, damaged=True), life.history
    assert len(shown) >= len(life.expected.values) // 2


# --- a device that does not answer -----------------------------------------------------------------------
async def test_the_drive_is_away_while_one_of_its_devices_is(
    tmp_path: Path, make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe asks the device that was silent, not the one that answers."""
    monkeypatch.setattr(limits, "NVME_READ_S", 0.1)
    device, operations = silent_device(4)
    path, loops = tmp_path / "nvme", [make_loop(DISK), make_loop(DISK)]
    pool = await opened(device, path, loops)
    first, second = pool.segments[0], pool.segments[1]
    assert first.number >> formats.DEVICE_NUMBER_SHIFT != second.number >> formats.DEVICE_NUMBER_SHIFT
    await silent(device, operations, second.fd)
    assert (await get(device, second.fd, 0, PAGE)) == (await get(device, first.fd, 0, PAGE))
    pool.close_files()
    await device.aclose()


async def silent(device: Device, operations: SilentOperations, fd: int) -> None:
    operations.silence(lambda operation: operation.fd == fd)
    with pytest.raises(DeviceAway):
        await get(device, fd, 0, PAGE)
    await until(lambda: len(operations.kept) == 2)  # the read and the probe
    assert device.drive.is_away
    operations.speak()
    await until(lambda: not device.drive.is_away)
