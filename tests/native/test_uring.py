"""The ring of the native device: whole transfers, memory that stays, ends that are bounded, and where it is refused.

Pipes stand for devices that take their time: what the kernel does with one is the same, and a test decides when.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import select
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import xxhash

from kvfs import limits
from kvfs._native.device.uring import Ring
from kvfs.errors import Corrupt, DeviceFailed
from tests.support import hammers
from tests.support.uring import needs_uring
from tests.support.waits import WAIT_S
from tiers.device.files import FileDevice
from tiers.device.uring import RingOperations, uring_device

DEPTH = 4
PAGE = 4096
MIB = 1 << 20

Ended = tuple[int, int, int, int]


pytestmark = needs_uring


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(DEPTH, 2)
    yield ring
    ring.close(5)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    yield read_end, write_end
    for end in (read_end, write_end):
        with suppress(OSError):
            os.close(end)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def waiting_bytes(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), "little")


def reap(ring: Ring, count: int = 1) -> list[Ended]:
    found: list[Ended] = []
    while len(found) < count:
        assert select.select([ring.fileno()], [], [], 10)[0], "nothing ended"
        found += ring.reap()
    assert len(found) == count
    return found


# --- whole transfers -------------------------------------------------------------------------------------
def test_a_read_that_comes_in_pieces_is_continued(ring: Ring, pipe: tuple[int, int]) -> None:
    into, payload = bytearray(3 * PAGE), os.urandom(3 * PAGE)
    request = ring.submit_read(pipe[0], 0, into, 2 * PAGE)
    for start, end in ((0, 1), (1, PAGE + 7), (PAGE + 7, 3 * PAGE)):
        os.write(pipe[1], payload[start:end])
        deadline = time.monotonic() + WAIT_S
        while waiting_bytes(pipe[0]):
            assert time.monotonic() < deadline, "the ring does not read"
    assert reap(ring) == [(request, 0, 3 * PAGE, xxhash.xxh3_64_intdigest(payload[: 2 * PAGE]))]
    assert into == payload


def test_a_write_that_goes_in_pieces_is_continued(ring: Ring, pipe: tuple[int, int]) -> None:
    payload = os.urandom(MIB)
    assert fcntl.fcntl(pipe[1], fcntl.F_GETPIPE_SZ) < MIB
    request = ring.submit_write(pipe[1], 0, payload)
    found = b""
    while len(found) < MIB:
        found += os.read(pipe[0], MIB)
    assert reap(ring) == [(request, 0, MIB, 0)]
    assert found == payload


def test_the_end_of_a_file_says_how_far_it_came(ring: Ring, pipe: tuple[int, int]) -> None:
    request = ring.submit_read(pipe[0], 0, bytearray(PAGE), PAGE)
    os.write(pipe[1], bytes(100))
    os.close(pipe[1])
    assert reap(ring)[0][:3] == (request, errno.ENODATA, 100)


def test_a_mapping_without_pages_is_an_error_and_no_crash(ring: Ring, tmp_path: Path) -> None:
    """Its file was truncated: touching it is SIGBUS, so nothing may be hashed either."""
    (tmp_path / "data").write_bytes(os.urandom(4 * PAGE))
    with open(tmp_path / "data", "rb") as data, open("/dev/shm/kvfs-test-24", "w+b") as slot:
        os.unlink(slot.name)
        os.ftruncate(slot.fileno(), 4 * PAGE)
        with mmap.mmap(slot.fileno(), 4 * PAGE) as area:
            os.ftruncate(slot.fileno(), 0)
            request = ring.submit_read(data.fileno(), 0, area, 4 * PAGE)
            assert reap(ring)[0][:2] == (request, errno.EFAULT)


def test_registered_buffers_are_found_by_address(ring: Ring, tmp_path: Path) -> None:
    """Inside one, across its end, and beside it: the same bytes."""
    payload = os.urandom(8 * PAGE)
    (tmp_path / "data").write_bytes(payload)
    area = mmap.mmap(-1, 16 * PAGE)
    ring.add_buffer(memoryview(area)[2 * PAGE : 8 * PAGE])
    with open(tmp_path / "data", "r+b") as data:
        for start in (2 * PAGE, 3 * PAGE, 4 * PAGE + 1, 6 * PAGE, 8 * PAGE, 0):
            into = memoryview(area)[start : start + 4 * PAGE]
            request = ring.submit_read(data.fileno(), PAGE, into, 4 * PAGE)
            expected = payload[PAGE : 5 * PAGE]
            assert reap(ring) == [(request, 0, 4 * PAGE, xxhash.xxh3_64_intdigest(expected))]
            assert into == expected
            request = ring.submit_write(data.fileno(), 5 * PAGE, into[: 3 * PAGE])
            assert reap(ring) == [(request, 0, 3 * PAGE, 0)]
            assert (tmp_path / "data").read_bytes()[5 * PAGE :] == expected[: 3 * PAGE]
            into[:] = bytes(4 * PAGE)
    assert ring.registered_buffers == 1
    ring.add_buffer(bytearray(PAGE))
    with pytest.raises(DeviceFailed, match="another buffer beside 2"):
        ring.add_buffer(bytearray(PAGE))


# --- memory and bounds -----------------------------------------------------------------------------------
def test_no_more_requests_than_depth(ring: Ring, pipe: tuple[int, int]) -> None:
    for _ in range(DEPTH):
        ring.submit_read(pipe[0], 0, bytearray(8), 8)
    with pytest.raises(DeviceFailed, match="4 requests are in flight"):
        ring.submit_read(pipe[0], 0, bytearray(8), 8)
    os.write(pipe[1], bytes(8 * DEPTH))
    numbers = [ended[0] for ended in reap(ring, DEPTH)]
    assert sorted(numbers) == list(range(DEPTH))
    ring.submit_sync(pipe[0])
    assert reap(ring)[0][1] == errno.EINVAL


def test_memory_stays_until_its_request_is_reaped(ring: Ring, pipe: tuple[int, int]) -> None:
    area = mmap.mmap(-1, PAGE)
    ring.submit_read(pipe[0], 0, area, 8)
    with pytest.raises(BufferError):
        area.close()
    os.write(pipe[1], bytes(PAGE))
    assert select.select([ring.fileno()], [], [], 10)[0]
    with pytest.raises(BufferError):
        area.close()
    reap(ring)
    area.close()


def test_read_only_memory_is_refused(ring: Ring, pipe: tuple[int, int]) -> None:
    with pytest.raises(BufferError):
        ring.submit_read(pipe[0], 0, b"read-only", 1)


# --- ends ------------------------------------------------------------------------------------------------
def test_a_close_cancels_what_is_in_flight(pipe: tuple[int, int]) -> None:
    before = threads()
    ring = Ring(DEPTH, 2)
    areas = [mmap.mmap(-1, PAGE) for _ in range(DEPTH - 1)]
    requests = [ring.submit_read(pipe[0], 0, area, 1) for area in areas]
    last = ring.submit_sync(pipe[0])
    assert reap(ring)[0][0] == last, "which shows that those before it are in the kernel"
    ended = ring.close(5)
    assert sorted(ended) == [(request, errno.ECANCELED, 0, 0) for request in sorted(requests)]
    for area in areas:
        area.close()
    assert threads() <= before
    assert ring.close(5) == []
    assert (ring.fileno(), ring.reap(), ring.registered_buffers) == (-1, [], 0)
    for call in (lambda: ring.submit_sync(0), lambda: ring.add_buffer(bytearray(1))):
        with pytest.raises(DeviceFailed, match="closed"):
            call()


def test_a_close_that_cannot_wait_keeps_the_memory(pipe: tuple[int, int]) -> None:
    """With no time at all; what the kernel then still holds must not be unmapped."""
    ring, area = Ring(DEPTH, 2), mmap.mmap(-1, PAGE)
    ring.submit_read(pipe[0], 0, area, 1)
    ended = ring.close(0)
    if ended:
        area.close()
    else:
        with pytest.raises(BufferError):
            area.close()


def test_a_forgotten_ring_ends(pipe: tuple[int, int]) -> None:
    before, area = threads(), mmap.mmap(-1, PAGE)
    ring = Ring(DEPTH, 2)
    ring.submit_read(pipe[0], 0, area, 1)
    del ring
    gc.collect()
    assert threads() <= before
    area.close()


# --- under trio ------------------------------------------------------------------------------------------
async def test_a_cancelled_caller_waits_for_the_kernel(pipe: tuple[int, int]) -> None:
    device, into = uring_device(DEPTH), bytearray(8)
    scope, ended = trio.CancelScope(), trio.Event()

    async def read() -> None:
        with scope:
            await device.read(pipe[0], 0, memoryview(into))
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not ended.is_set()
        os.write(pipe[1], b"12345678")
        await ended.wait()
    assert into == b"12345678"
    await device.aclose()


async def test_the_calls_beyond_depth_are_first_come_first_served(pipe: tuple[int, int]) -> None:
    device, order = uring_device(1), list[int]()

    async def read(number: int) -> None:
        await device.read(pipe[0], 0, memoryview(bytearray(8)))
        order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(read, number)
            await trio.testing.wait_all_tasks_blocked()
        os.write(pipe[1], bytes(80))
    assert order == list(range(10))
    await device.aclose()


async def test_a_device_closes_over_reads_that_never_end(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DEVICE_CLOSE_WAIT_S", 0.05)
    device = uring_device(DEPTH)

    async def read() -> None:
        with pytest.raises(DeviceFailed, match=r"cancel|closed"):
            await device.read(pipe[0], 0, memoryview(bytearray(8)))

    async with trio.open_nursery() as nursery:
        for _ in range(2 * DEPTH):
            nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await device.aclose()


async def test_callers_of_what_the_kernel_keeps_are_told(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a drive that never answers would have it: files and memory stay, the callers get an error."""
    monkeypatch.setattr(limits, "DEVICE_CLOSE_WAIT_S", 0.05)
    operations = RingOperations(DEPTH)
    device = FileDevice(lambda _: operations, DEPTH)
    fd = await device.create_file(tmp_path / "f", PAGE)
    ring = operations._ring

    class Stuck:
        def close(self, timeout_s: float) -> list[Ended]:
            return []

        def __getattr__(self, name: str) -> object:
            return getattr(ring, name)

    monkeypatch.setattr(operations, "_ring", Stuck())
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(DeviceFailed, match="closed before"):
                await device.read(pipe[0], 0, memoryview(bytearray(8)))

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await device.aclose()
    os.close(fd)
    ring.close(5)


async def test_errors_say_what_and_where(tmp_path: Path) -> None:
    device = uring_device(DEPTH)
    (tmp_path / "short").write_bytes(bytes(PAGE))
    fd = device.open_file(tmp_path / "short")
    with pytest.raises(Corrupt, match=r"read 8192 bytes of .*/short at 0: the file ends at 4096"):
        await device.read(fd, 0, memoryview(mmap.mmap(-1, 2 * PAGE)))
    os.close(fd)
    with pytest.raises(DeviceFailed, match=r"sync .*/short: Bad file descriptor"):
        await device.sync(fd)
    device._paths.clear()
    await device.aclose()


# --- at full speed ---------------------------------------------------------------------------------------
PROGRAM, SOURCES, FLAGS = "uring_hammer.c", ["device/uring_core.c"], ("-DKVFS_HAVE_URING", "-luring")


def test_every_request_ends_and_a_stop_ends_the_rest(tmp_path: Path) -> None:
    word, cancelled = hammers.run(hammers.build(tmp_path, PROGRAM, SOURCES, *FLAGS), 20_000)
    assert word == "done"
    assert int(cancelled) > 0, "no stop came in the middle"


def test_no_data_race(tmp_path: Path) -> None:
    """ThreadSanitizer sees what either thread hashes ordered before the caller's next use of that memory."""
    hammers.run_for_races(tmp_path, PROGRAM, SOURCES, 2000, *FLAGS)


# --- where it is refused ---------------------------------------------------------------------------------
def run(program: str, *arguments: str | Path) -> str:
    source = textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_without_the_right_the_device_runs_in_threads() -> None:
    """A seccomp filter as containers have it: io_uring_setup(2) is EPERM."""
    found = run(
        """
        import ctypes, errno, logging, struct
        from kvfs.errors import DeviceMissing
        from tiers.device.device import open_device

        logging.basicConfig(format="%(levelname)s %(message)s")
        IO_URING_SETUP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 425, 38, 22, 2
        load_number, if_equal, give = 0x20, 0x15, 0x06
        allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
        code = [(load_number, 0, 0, 0), (if_equal, 0, 1, IO_URING_SETUP), (give, 0, 0, refuse), (give, 0, 0, allow)]
        filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0, ctypes.get_errno()
        print(open_device("auto").backend)
        try:
            open_device("io_uring")
        except DeviceMissing as error:
            print("missing:", error)
        """
    )
    assert found.splitlines()[0] == "threads"
    assert "missing: io_uring: Operation not permitted (seccomp" in found
    assert found.count("WARNING") == 1
    assert "is driven by threads instead" in found


def test_without_memory_to_pin_buffers_work_unregistered(tmp_path: Path) -> None:
    found = run(
        """
        import os, resource, sys
        import trio
        from tiers.device.device import open_device

        fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)

        async def main():
            device = open_device("io_uring")
            async with device.buffer() as view:
                view[: 1 << 20] = bytes(range(256)) * 4096
                await device.write(fd, 0, view[: 1 << 20])
                view[: 1 << 20] = bytes(1 << 20)
                await device.read(fd, 0, view[: 1 << 20])
                assert view[: 1 << 20] == bytes(range(256)) * 4096
            print("registered", device.operations.registered_buffers)
            await device.aclose()

        trio.run(main)
        """,
        tmp_path / "f",
    )
    assert found == "registered 0\n"


async def test_buffers_of_the_pool_are_registered(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("RLIMIT_MEMLOCK may forbid it")
    operations = RingOperations(DEPTH)
    device = FileDevice(lambda _: operations, DEPTH)
    fd = await device.create_file(tmp_path / "f", PAGE)
    async with device.buffer() as first, device.buffer() as second:
        await device.write(fd, 0, first[:PAGE])
        await device.write(fd, 0, second[:PAGE])
    async with device.buffer() as again:
        await device.write(fd, 0, again[:PAGE])
    assert operations.registered_buffers == 2
    await device.aclose()
