"""What every device does, as tests: `class TestMyDevice(DeviceSuite)` with a fixture `make_device` runs them all.

`make_device(depth)` gives a fresh device, as often as asked, inside trio, and closes it after the test. Files
are made in `tmp_path`. The suite uses nothing but `tiers.device.device.Device`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import xxhash

from kvfs import limits
from kvfs.errors import Corrupt, DeviceFailed, Exists, InvalidRequest, NoSpace, NotFound
from tests.support.seeds import SEED
from tests.support.tmpfs import private_tmpfs
from tiers.device.device import Device

KIB, MIB = 1 << 10, 1 << 20
PAGE = limits.DEVICE_ALIGNMENT_BYTES
FILE_BYTES = 32 * MIB

MakeDevice = Callable[[int], Device]


@contextmanager
def aligned(size_bytes: int) -> Iterator[memoryview]:
    """Pages of the test's own. Closed here, so a device that kept a view of them after an error is found out."""
    with mmap.mmap(-1, size_bytes) as area, memoryview(area) as view:
        yield view


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


async def put(device: Device, fd: int, offset: int, data: bytes) -> None:
    with aligned(len(data)) as view:
        view[:] = data
        await device.write(fd, offset, view)


async def get(device: Device, fd: int, offset: int, size_bytes: int) -> bytes:
    with aligned(size_bytes) as view:
        found = await device.read(fd, offset, view)
        assert found == checksum(view)
        return bytes(view)


class DeviceSuite:
    """Inherit, and give a `make_device` fixture."""

    @pytest.fixture
    async def device(self, make_device: MakeDevice) -> Device:
        return make_device(8)

    @pytest.fixture
    async def fd(self, device: Device, tmp_path: Path) -> int:
        return await device.create_file(tmp_path / "segment", FILE_BYTES)

    # --- bytes -------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("size_bytes", [PAGE, 16 * PAGE, MIB, 8 * MIB + 64 * KIB, 24 * MIB])
    async def test_what_was_written_is_read(self, device: Device, fd: int, size_bytes: int) -> None:
        data = os.urandom(size_bytes)
        await put(device, fd, 5 * PAGE, data)
        assert await get(device, fd, 5 * PAGE, size_bytes) == data
        await device.sync(fd)
        assert (await get(device, fd, 4 * PAGE, PAGE)) == bytes(PAGE), "the neighbours are untouched"
        assert (await get(device, fd, 5 * PAGE + size_bytes, PAGE)) == bytes(PAGE)

    async def test_the_checksum_is_that_of_the_payload(self, device: Device, fd: int) -> None:
        data = os.urandom(MIB)
        await put(device, fd, 0, data)
        with aligned(MIB) as view:
            for payload in (0, 1, 239, 241, 300_001, MIB):
                found = await device.read(fd, 0, view, payload_bytes=payload)
                assert found == checksum(data[:payload])
                assert await device.read(fd, 0, view, payload_bytes=payload, checksum=found) == found

    async def test_a_wrong_checksum_is_corrupt(self, device: Device, fd: int) -> None:
        with aligned(PAGE) as view:
            right = await device.read(fd, 0, view)
            with pytest.raises(Corrupt, match="checksum"):
                await device.read(fd, 0, view, checksum=right ^ 1)
            with pytest.raises(Corrupt, match="checksum"):
                await device.read(fd, 0, view, checksum=0)

    @pytest.mark.parametrize("size_bytes", [0, 5000, 2 * PAGE, MIB + 512])
    async def test_a_read_past_the_end_is_corrupt(
        self, device: Device, tmp_path: Path, size_bytes: int
    ) -> None:
        path = tmp_path / "short"
        path.write_bytes(bytes(size_bytes))
        fd = device.open_file(path)
        with aligned(2 * MIB) as view, pytest.raises(Corrupt, match=f"ends at {size_bytes}$"):
            await device.read(fd, 0, view)

    async def test_nothing_is_moved_by_empty_calls(self, device: Device, fd: int) -> None:
        with aligned(PAGE) as view:
            assert await device.read(fd, 0, view[:0]) == checksum(b"")
            await device.write(fd, 0, view[:0])

    @pytest.mark.seeded
    async def test_many_at_once_do_not_mix(self, device: Device, fd: int) -> None:
        """Eight tasks, each with a region of its own, against a copy of what they wrote."""

        async def work(number: int) -> None:
            draw, base, region = random.Random(SEED + number), number * 4 * MIB, bytearray(4 * MIB)
            for _ in range(12):
                start = draw.randrange(0, 4 * MIB, PAGE)
                length = draw.randrange(PAGE, 4 * MIB - start + 1, PAGE)
                if draw.random() < 0.6:
                    data = draw.randbytes(length)
                    region[start : start + length] = data
                    await put(device, fd, base + start, data)
                else:
                    assert await get(device, fd, base + start, length) == region[start : start + length]
            assert await get(device, fd, base, 4 * MIB) == region

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(work, number)

    async def test_more_calls_than_depth_wait_their_turn(
        self, make_device: MakeDevice, tmp_path: Path
    ) -> None:
        device = make_device(2)
        fd = await device.create_file(tmp_path / "f", MIB)
        order: list[int] = []

        async def read(number: int) -> None:
            await get(device, fd, number * PAGE, PAGE)
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(read, number)
        assert sorted(order) == list(range(100))
        assert device.depth == 2

    # --- memory that is not the device's, descriptors that are not direct ----------------------------------
    async def test_a_slot_on_tmpfs_is_read_into_and_written_from(self, device: Device, fd: int) -> None:
        """Promotion: a direct read into a mapping of a tmpfs file. Demotion: from an ordinary descriptor of it."""
        payload = os.urandom(MIB - 77)
        await put(device, fd, 0, payload + bytes(77))
        slot = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(slot, 0, MIB)
            with mmap.mmap(slot, MIB) as area, memoryview(area) as view:
                await device.read(fd, 0, view, payload_bytes=len(payload), checksum=checksum(payload))
            os.ftruncate(slot, len(payload))
            assert os.pread(slot, MIB, 0) == payload
            async with device.buffer() as buffer:
                part = buffer[13 : 13 + len(payload) - 5]
                assert await device.read(slot, 5, part) == checksum(payload[5:])
                with pytest.raises(Corrupt, match="ends"):
                    await device.read(slot, 6, part)
            area_of_slot = mmap.mmap(slot, len(payload), prot=mmap.PROT_READ)
            with area_of_slot as area, memoryview(area) as view:
                await device.write(fd, 2 * MIB, view[: 4 * PAGE])
            assert await get(device, fd, 2 * MIB, 4 * PAGE) == payload[: 4 * PAGE]
        finally:
            os.close(slot)

    @pytest.mark.mount
    async def test_a_full_filesystem_is_no_space(self, device: Device, tmp_path: Path) -> None:
        with private_tmpfs(tmp_path / "full", 4 * MIB) as root:
            fd = await device.create_file(root / "sparse", 0)
            os.ftruncate(fd, 8 * MIB)
            with aligned(8 * MIB) as view, pytest.raises(NoSpace, match="sparse"):
                await device.write(fd, 0, view)
            with pytest.raises(NoSpace):
                await device.create_file(root / "large", 8 * MIB)
            assert not (root / "large").exists(), "nothing stays of a failed creation"
            device.close_file(fd)

    # --- files -------------------------------------------------------------------------------------------
    async def test_files_are_direct_allocated_and_private(
        self, device: Device, fd: int, tmp_path: Path
    ) -> None:
        status = os.fstat(fd)
        assert (status.st_size, status.st_mode & 0o777) == (FILE_BYTES, 0o600)
        assert status.st_blocks * 512 >= FILE_BYTES
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        assert bool(flags & os.O_DIRECT) == device.direct
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC

    async def test_files_are_made_once_and_found_again(self, device: Device, fd: int, tmp_path: Path) -> None:
        await put(device, fd, 0, b"k" * PAGE)
        device.close_file(fd)
        with pytest.raises(InvalidRequest, match="did not open"):
            device.close_file(fd)
        with pytest.raises(Exists):
            await device.create_file(tmp_path / "segment", PAGE)
        with pytest.raises(NotFound):
            device.open_file(tmp_path / "other")
        with pytest.raises(NotFound):
            await device.create_file(tmp_path / "no" / "folder", PAGE)
        again = device.open_file(tmp_path / "segment")
        assert await get(device, again, 0, PAGE) == b"k" * PAGE

    async def test_descriptors_may_be_reused_for_other_files(self, device: Device, tmp_path: Path) -> None:
        for number in range(40):
            path = tmp_path / str(number)
            fd = await device.create_file(path, PAGE)
            await put(device, fd, 0, bytes([number]) * PAGE)
            await device.sync(fd)
            device.close_file(fd)
            assert path.read_bytes() == bytes([number]) * PAGE

    async def test_discarded_bytes_are_zero_and_still_allocated(self, device: Device, fd: int) -> None:
        await put(device, fd, 0, b"x" * MIB)
        blocks = os.fstat(fd).st_blocks
        await device.discard(fd, PAGE, MIB - 2 * PAGE)
        assert await get(device, fd, 0, MIB) == b"x" * PAGE + bytes(MIB - 2 * PAGE) + b"x" * PAGE
        assert os.fstat(fd).st_blocks >= blocks

    # --- errors ------------------------------------------------------------------------------------------
    async def test_a_descriptor_that_cannot_is_device_failed(self, device: Device, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(PAGE))
        read_only = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            with aligned(PAGE) as view, pytest.raises(DeviceFailed):
                await device.write(read_only, 0, view)
        finally:
            os.close(read_only)
        with aligned(PAGE) as view:
            with pytest.raises(DeviceFailed):
                await device.read(read_only, 0, view)
            with pytest.raises(DeviceFailed):
                await device.sync(read_only)

    async def test_arguments_are_checked(self, device: Device, fd: int) -> None:
        with aligned(4 * PAGE) as view:
            with pytest.raises(InvalidRequest, match="read-only"):
                await device.read(fd, 0, view[:PAGE].toreadonly())
            with pytest.raises(InvalidRequest, match="payload"):
                await device.read(fd, 0, view[:PAGE], payload_bytes=PAGE + 1)
            with pytest.raises(InvalidRequest, match="payload"):
                await device.read(fd, 0, view[:PAGE], payload_bytes=-1)
            with pytest.raises(InvalidRequest, match="contiguous"):
                await device.read(fd, -PAGE, view[:PAGE])
            with pytest.raises(InvalidRequest, match="contiguous"):
                await device.write(fd, 0, view[::2])

    # --- buffers -----------------------------------------------------------------------------------------
    async def test_buffers_are_aligned_distinct_and_limited(self, device: Device, fd: int) -> None:
        taken: list[memoryview] = []
        full, release = trio.Event(), trio.Event()

        async def take(number: int) -> None:
            async with device.buffer() as view:
                taken.append(view)
                assert view.nbytes == limits.DEVICE_BUFFER_BYTES
                view[:PAGE] = bytes([number]) * PAGE
                await device.write(fd, number * PAGE, view[:PAGE])
                view[:PAGE] = bytes(PAGE)
                await device.read(fd, number * PAGE, view[:PAGE])
                assert view[:PAGE] == bytes([number]) * PAGE
                if len(taken) == limits.DEVICE_BUFFERS:
                    full.set()
                await release.wait()

        async with trio.open_nursery() as nursery:
            for number in range(limits.DEVICE_BUFFERS + 3):
                nursery.start_soon(take, number)
            await full.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert len(taken) == limits.DEVICE_BUFFERS
            release.set()
        assert len(taken) == limits.DEVICE_BUFFERS + 3

    async def test_a_buffer_comes_back_after_an_error(self, device: Device) -> None:
        async with device.buffer() as view:
            view[:4] = b"mark"

        async def use_and_fail() -> None:
            async with device.buffer() as view:
                assert bytes(view[:4]) == b"mark", "not the memory that was given back"
                raise ZeroDivisionError

        for _ in range(3 * limits.DEVICE_BUFFERS):
            with pytest.raises(ZeroDivisionError):
                await use_and_fail()

    # --- cancellation and the end --------------------------------------------------------------------------
    async def test_a_cancelled_read_has_ended(self, device: Device, fd: int) -> None:
        """Nothing is written to its memory afterwards: it holds all of the bytes, or never began."""
        data = os.urandom(24 * MIB)
        await put(device, fd, 0, data)
        began = 0
        with aligned(24 * MIB) as view:
            for rounds in range(20):
                view[:] = bytes(24 * MIB)
                with trio.move_on_after(0.0002 * rounds):
                    await device.read(fd, 0, view)
                found = bytes(view)
                assert found in (bytes(24 * MIB), data)
                began += found == data
        assert began, "no round met a read under way"

    async def test_a_cancelled_write_has_ended(self, device: Device, fd: int) -> None:
        with aligned(8 * MIB) as view, aligned(8 * MIB) as into:
            for rounds in range(20):
                view[:] = bytes([rounds + 1]) * (8 * MIB)
                with trio.move_on_after(0.0002 * rounds):
                    await device.write(fd, 0, view)
                view[:] = b"\xff" * (8 * MIB)
                await device.read(fd, 0, into)
                assert 0xFF not in into[:: 64 * KIB], "the device wrote what came after the cancellation"
                assert len(set(into[:: 64 * KIB])) == 1

    async def test_closing_waits_for_what_is_under_way(self, device: Device, fd: int) -> None:
        data, done = os.urandom(8 * MIB), 0
        await put(device, fd, 0, data)

        async def read() -> None:
            nonlocal done
            with aligned(8 * MIB) as view:
                await device.read(fd, 0, view)
                assert view == data
            done += 1

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            await device.aclose()
            await trio.testing.wait_all_tasks_blocked()  # whose operation has ended may run after the close
            assert done == 4

    async def test_a_closed_device_refuses(self, device: Device, fd: int, tmp_path: Path) -> None:
        await device.aclose()
        await device.aclose()
        with aligned(PAGE) as view:
            with pytest.raises(DeviceFailed, match="closed"):
                await device.read(fd, 0, view)
            with pytest.raises(DeviceFailed, match="closed"):
                await device.write(fd, 0, view)
        with pytest.raises(DeviceFailed, match="closed"):
            await device.sync(fd)
        with pytest.raises(DeviceFailed, match="closed"):
            await device.create_file(tmp_path / "late", PAGE)
        with pytest.raises(DeviceFailed, match="closed"):
            async with device.buffer():
                pass
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)
