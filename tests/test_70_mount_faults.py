"""Faults and traps at the path door. The law: a read gives the right bytes, a miss or an error, never others.

Each test has a service of its own, small enough that refilling it reuses every slot and page.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.door import BUCKET, HANG_S, ON_DIRECTORY, TEST_MODES, eventually, need_mount
from tests.support.holder import DIED, ERROR, RIGHT, Holder, Kind
from tests.support.posix import expect_errno, opened, pattern, start_child, wait_child, write_all
from tests.support.service import Service

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

MIB = 1 << 20
CAPACITY_BYTES = 32 * MIB
BLOCK_BYTES = MIB
PROMPT_S = 15.0
"""No call may take longer, whatever the fault: the longest wait that the service names is 2 s."""


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A small service with one bucket, for one test; killed where the test hangs on it."""
    need_mount()
    # Few slots, since their table counts: it must be small beside the capacity.
    arguments = ["--slots", "4096"]
    with Service(mode=request.param, dram=f"{CAPACITY_BYTES >> 20}MiB", arguments=arguments) as running:
        watchdog = threading.Timer(HANG_S, running.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            (running.mount / BUCKET).mkdir()
            yield running
            assert running.tracebacks() == ""
        finally:
            watchdog.cancel()
            watchdog.join()


@pytest.fixture
def bucket(service: Service) -> Path:
    return service.mount / BUCKET


def state(path: Path) -> bytes:
    return os.getxattr(path, "user.kvfs.state")


def write_sealed(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    eventually(lambda: state(path) == b"sealed", f"{path.name} is sealed")


def refill(bucket: Path, seed: int, times: float = 2.0) -> dict[Path, bytes]:
    """Write `times` the capacity in new files of other bytes; what was written, for `check`."""
    written = {}
    for i in range(int(CAPACITY_BYTES * times) // BLOCK_BYTES):
        path = bucket / f"refill-{seed}-{i}"
        written[path] = pattern(seed * 1000 + i, BLOCK_BYTES - i)
        path.write_bytes(written[path])
    return written


def check(expected: dict[Path, bytes]) -> int:
    """Every one is right or a miss; how many are right."""
    right = 0
    for path, data in expected.items():
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            continue
        assert found == data, f"{path.name}: wrong bytes"
        right += 1
    return right


# --- leases ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["descriptor", "mapping", "populated mapping"])
@pytest.mark.parametrize("loss", ["evict", "unlink", "replace", "overwrite"])
def test_a_held_object_outlives_its_name(service: Service, bucket: Path, kind: Kind, loss: str) -> None:
    """mmap and close leaves no handle at the service, only pages mapped: its slot must not be reused."""
    path, data = bucket / "held", pattern(1, 3 * MIB + 5)
    write_sealed(path, data)
    with Holder(path, data, kind) as holder:
        assert holder.look() == RIGHT
        if loss == "evict":
            service.evict(path)
        elif loss == "unlink":
            path.unlink()
        elif loss == "replace":
            (bucket / "new").write_bytes(pattern(2, 4 * MIB))
            os.rename(bucket / "new", path)
        else:
            path.write_bytes(pattern(2, 4 * MIB))
        if loss in ("evict", "unlink"):
            eventually(lambda: not path.exists(), "the name is gone")
        assert holder.look() == RIGHT
        assert check(refill(bucket, 3)) > 0
        assert holder.look() == RIGHT
        path.write_bytes(pattern(4, 3 * MIB + 5))
        assert holder.look() == RIGHT
        assert path.read_bytes() == pattern(4, 3 * MIB + 5)
    # What it held comes back.
    expected = refill(bucket, 5)
    assert check(expected) >= len(expected) // 4


@pytest.mark.parametrize("kind", ["descriptor", "mapping"])
def test_a_stopped_holder_stops_nobody_else(service: Service, bucket: Path, kind: Kind) -> None:
    path, data = bucket / "held", pattern(1, 2 * MIB)
    write_sealed(path, data)
    with Holder(path, data, kind) as holder:
        holder.suspend()
        started = time.monotonic()
        service.evict(path)
        expected = refill(bucket, 2, times=1.5)
        assert check(expected) > 0
        path.write_bytes(pattern(3, 2 * MIB))
        assert path.read_bytes() == pattern(3, 2 * MIB)
        assert time.monotonic() - started < 2 * PROMPT_S
        holder.resume()
        assert holder.look() == RIGHT


def test_an_object_is_overwritten_while_readers_hold_it(service: Service, bucket: Path) -> None:
    path = bucket / "file"
    version = 0
    write_sealed(path, pattern(version, 300_000))
    for _ in range(8):
        for how in ("truncate", "in place", "rename", "append", "mapping"):
            size = path.stat().st_size
            expected = path.read_bytes()
            with opened(path, os.O_RDONLY) as fd:
                reader = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
                version += 1
                new = pattern(version, 300_000 + 1000 * version)
                if how == "truncate":
                    path.write_bytes(new)
                elif how == "rename":
                    (bucket / "new").write_bytes(new)
                    os.rename(bucket / "new", path)
                elif how == "append":
                    with opened(path, os.O_WRONLY | os.O_APPEND) as writer:
                        write_all(writer, new)
                    new = expected + new
                else:
                    with opened(path, os.O_RDWR) as writer:
                        os.ftruncate(writer, len(new))
                        if how == "in place":
                            os.pwrite(writer, new, 0)
                        else:
                            with mmap.mmap(writer, len(new)) as writable:
                                writable[:] = new
                assert reader[:] == expected, how
                assert os.pread(fd, size + 10_000_000, 0) == expected, how
                reader.close()
            assert path.read_bytes() == new, how
            if len(new) > 2 * MIB:
                path.write_bytes(b"small again")


# --- other doors -------------------------------------------------------------------------------------------
def test_a_redirected_file_is_at_once_at_another_door(service: Service, bucket: Path) -> None:
    """The shell's `>` sends FLUSH before the first byte, and the last RELEASE follows close()."""
    with service.client() as client:
        for i in range(20):
            subprocess.run(["sh", "-c", f"seq {i * 100} > file"], cwd=bucket, check=True)
            expected = "".join(f"{n}\n" for n in range(1, i * 100 + 1)).encode()
            assert client.get(f"{BUCKET}/file") == expected


def test_what_another_door_does_is_at_once_on_the_path(service: Service, bucket: Path) -> None:
    path = bucket / "directory/file"
    with service.client() as client:
        assert not path.exists()
        client.put(f"{BUCKET}/directory/file", b"one")
        assert path.read_bytes() == b"one"
        with opened(path, os.O_RDONLY) as fd:
            client.put(f"{BUCKET}/directory/file", b"another")
            assert os.pread(fd, 100, 0) == b"one"
        eventually(lambda: path.stat().st_size == 7, "attributes of the new object")
        assert path.read_bytes() == b"another"
        client.rename(f"{BUCKET}/directory/file", f"{BUCKET}/moved")
        eventually(lambda: not path.exists(), "the old name is gone")
        assert (bucket / "moved").read_bytes() == b"another"
        client.remove(f"{BUCKET}/moved")
        eventually(lambda: not (bucket / "moved").exists(), "the object is gone")


def test_a_draft_is_at_no_other_door(service: Service, bucket: Path) -> None:
    from kvfs.errors import NotFound

    with service.client() as client, opened(bucket / "draft", os.O_WRONLY | os.O_CREAT) as fd:
        write_all(fd, b"half")
        with pytest.raises(NotFound):
            client.get(f"{BUCKET}/draft")
        assert [entry.name for entry in client.list(f"{BUCKET}/")] == []
        os.fsync(fd)
        with pytest.raises(NotFound):
            client.get(f"{BUCKET}/draft")


def test_the_old_object_stays_at_other_doors_until_its_draft_is_done(service: Service, bucket: Path) -> None:
    path = bucket / "file"
    write_sealed(path, b"old")
    with service.client() as client:
        with opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
            write_all(fd, b"ne")
            assert client.get(f"{BUCKET}/file") == b"old"
            assert path.read_bytes() == b"ne"
            write_all(fd, b"w")
        assert path.read_bytes() == b"new"
        eventually(lambda: client.get(f"{BUCKET}/file") == b"new", "the new object is published")


# --- recycled pages ----------------------------------------------------------------------------------------
def test_sparse_files_in_recycled_slots_read_zeros(bucket: Path) -> None:
    for path in refill(bucket, 1, times=1.2):
        path.unlink(missing_ok=True)
    for i in range(8):
        path = bucket / f"sparse-{i}"
        with opened(path, os.O_RDWR | os.O_CREAT) as fd:
            os.ftruncate(fd, BLOCK_BYTES)
            os.pwrite(fd, b"middle", BLOCK_BYTES // 2 + i)
            if i % 2:
                os.posix_fallocate(fd, BLOCK_BYTES, BLOCK_BYTES)
            else:
                os.pwrite(fd, b"\0", 2 * BLOCK_BYTES - 1)
            expected = bytearray(2 * BLOCK_BYTES)
            expected[BLOCK_BYTES // 2 + i : BLOCK_BYTES // 2 + i + 6] = b"middle"
            with mmap.mmap(fd, 2 * BLOCK_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                assert mapping[:] == expected
        assert path.read_bytes() == expected


def test_the_page_after_the_end_is_zeros(bucket: Path) -> None:
    """A mapping shows whole pages: past the end they must not show what the slot held before."""
    import ctypes

    from tests.support.posix import mapped_pages

    for path in refill(bucket, 1, times=1.2):
        path.unlink(missing_ok=True)
    for i in range(16):
        path = bucket / f"short-{i}"
        path.write_bytes(b"x" * (100 + i))
        with opened(path, os.O_RDONLY) as fd, mapped_pages(fd, 4096) as address:
            assert ctypes.string_at(address, 4096) == (b"x" * (100 + i)).ljust(4096, b"\0")
            assert os.pread(fd, 10_000, 0) == b"x" * (100 + i)


# --- the service dies --------------------------------------------------------------------------------------
def test_kill_and_restart_with_readers_and_writers(service: Service, bucket: Path) -> None:
    kept = {bucket / f"kept-{i}": pattern(i, 200_000 + i) for i in range(20)}
    for path, data in kept.items():
        write_sealed(path, data)
    path, data = next(iter(kept.items()))
    with Holder(path, data, "descriptor") as reader, Holder(path, data, "populated mapping") as mapped:
        writer = os.open(bucket / "draft", os.O_RDWR | os.O_CREAT)
        write_all(writer, pattern(99, 500_000))
        service.kill()
        assert reader.look() in (RIGHT, ERROR)
        assert mapped.look() in (RIGHT, DIED)
        with expect_errno(errno.ENOTCONN):
            os.stat(bucket / "draft")

        service.restart()
        assert not (bucket / "draft").exists()
        survivors = check(kept)
        assert survivors >= len(kept) - 1, "sealed and checksummed objects are adopted"
        # Old descriptors still reach their slots through passthrough: nobody else may get those.
        scribble(writer)
        expected = refill(bucket, 7)
        scribble(writer)
        assert check(expected) >= len(expected) // 4
        assert reader.look() in (RIGHT, ERROR)
        assert mapped.look() in (RIGHT, DIED)
        try:
            os.close(writer)
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED)  # noqa: PT017
        assert check(expected) >= len(expected) // 4
    assert not (bucket / "draft").exists()


def scribble(fd: int) -> None:
    """Write through a descriptor of the dead service; an error is as good."""
    for offset in range(0, 4 * MIB, 65_536):
        try:
            os.pwrite(fd, b"\xee" * 65_536, offset)
        except OSError:
            return


def test_kill_and_restart_many_times(service: Service, bucket: Path) -> None:
    expected: dict[Path, bytes] = {}
    for round_number in range(4):
        for i in range(10):
            path = bucket / f"file-{i}"
            data = pattern(100 * round_number + i, 50_000 * (i + 1))
            # A name is at one of its two contents until the restart shows which.
            (bucket / ".tmp").write_bytes(data)
            os.rename(bucket / ".tmp", path)
            expected[path] = data
        for path in expected:
            eventually(lambda path=path: state(path) == b"sealed", "sealed")
        service.kill()
        service.restart()
        assert check(expected) >= len(expected) - 1


def test_a_clean_stop_with_open_files_keeps_what_is_sealed(service: Service, bucket: Path) -> None:
    kept = {bucket / f"kept-{i}": pattern(i, 100_000) for i in range(10)}
    for path, data in kept.items():
        write_sealed(path, data)
    path, data = next(iter(kept.items()))
    with Holder(path, data, "descriptor") as reader, Holder(path, data, "populated mapping") as mapped:
        writer = os.open(bucket / "draft", os.O_RDWR | os.O_CREAT)
        write_all(writer, b"half")
        # Files are open, so the mount is busy: the service detaches it and still ends in time.
        service.stop()
        assert reader.look() in (RIGHT, ERROR)
        assert mapped.look() in (RIGHT, DIED)
        service.restart()
        assert check(kept) == len(kept)
        assert not (bucket / "draft").exists()
        expected = refill(bucket, 3)
        assert check(expected) > 0
        assert reader.look() in (RIGHT, ERROR)
        assert mapped.look() in (RIGHT, DIED)
        try:
            os.close(writer)
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED)  # noqa: PT017


# --- a client dies or is interrupted -----------------------------------------------------------------------
def test_a_killed_writer_leaves_nothing(service: Service, bucket: Path) -> None:
    """Half a file under its final name, from a process that was killed: nobody may take it for whole."""
    ready, child_ready = os.pipe()

    def writer() -> None:
        fd = os.open(bucket / "half", os.O_RDWR | os.O_CREAT)
        write_all(fd, pattern(1, 600_000))
        mapping = mmap.mmap(fd, 600_000)
        mapping[:4] = b"gone"
        os.write(child_ready, b".")
        signal.pause()

    pid = start_child(writer)
    assert os.read(ready, 1) == b"."
    assert (bucket / "half").stat().st_size == 600_000
    os.kill(pid, signal.SIGKILL)
    assert wait_child(pid) == -signal.SIGKILL
    for end in (ready, child_ready):
        os.close(end)
    eventually(lambda: not (bucket / "half").exists(), "the draft of the killed writer is gone")
    with service.client() as client:
        assert list(client.list(f"{BUCKET}/")) == []
    assert check(expected := refill(bucket, 2)) >= len(expected) // 4


def test_calls_under_a_storm_of_signals(bucket: Path) -> None:
    """Each signal sends INTERRUPT for the call in flight; the call is retried and must have happened once."""

    def work() -> None:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        for i in range(150):
            directory = bucket / f"directory-{i}"
            directory.mkdir()
            path = directory / "file"
            with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                write_all(fd, pattern(i, 100_000))
                os.fsync(fd)
            os.rename(path, directory / "moved")
            assert (directory / "moved").read_bytes() == pattern(i, 100_000)
            assert os.listdir(directory) == ["moved"]
            (directory / "moved").unlink()
            directory.rmdir()
        signal.setitimer(signal.ITIMER_REAL, 0)

    children = [start_child(work)]
    assert [wait_child(child) for child in children] == [0]
    assert os.listdir(bucket) == []


def test_a_process_that_waits_for_a_stopped_service_can_be_interrupted(
    service: Service, bucket: Path
) -> None:
    """SIGINT and SIGKILL end a call that nobody answers; the service, when it goes on, is unharmed."""
    write_sealed(bucket / "file", b"content")
    # Of their own: the kernel holds a directory's lock while it waits for a name in it.
    parents = {name: bucket / f"of-{name}" for name in ("interrupted", "killed")}
    for parent in parents.values():
        parent.mkdir()
    started, child_started = os.pipe()

    def wait_for_service(name: str) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            os.write(child_started, b".")
            (parents[name] / "made").mkdir()
        except KeyboardInterrupt:
            os._exit(42)

    os.kill(service.pid, signal.SIGSTOP)
    eventually(lambda: stopped(service.pid), "every thread of the service is stopped")
    try:
        interrupted = start_child(lambda: wait_for_service("interrupted"))
        killed = start_child(lambda: wait_for_service("killed"))
        assert os.read(started, 1) + os.read(started, 1) == b".."
        for child in (interrupted, killed):
            eventually(lambda child=child: sleeps(child), "the child waits for the service")
        os.kill(interrupted, signal.SIGINT)
        os.kill(killed, signal.SIGKILL)
        # A request that nobody has read yet is taken back at once; one that was read waits for its answer,
        # unless its process is killed.
        assert wait_child(killed) == -signal.SIGKILL
    finally:
        os.kill(service.pid, signal.SIGCONT)
        os.close(started)
        os.close(child_started)
    # Its mkdir was made, or was interrupted before it was.
    assert wait_child(interrupted) in (0, 42)
    assert (bucket / "file").read_bytes() == b"content"
    for parent in parents.values():
        (parent / "made").mkdir(exist_ok=True)
        assert os.listdir(parent) == ["made"]


def task_state(task: Path) -> str:
    return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]


def sleeps(pid: int) -> bool:
    """Whether the process waits for something in the kernel."""
    return task_state(Path(f"/proc/{pid}")) in "SD"


def stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached each thread: one that is still in read() would take a request along."""
    return {task_state(task) for task in Path(f"/proc/{pid}/task").iterdir()} == {"T"}


# --- full --------------------------------------------------------------------------------------------------
def test_a_store_full_of_held_bytes_says_so_and_recovers(service: Service, bucket: Path) -> None:
    holders: list[Holder] = []
    try:
        for i in range(CAPACITY_BYTES // (2 * MIB)):
            path, data = bucket / f"held-{i}", pattern(i, 2 * MIB)
            try:
                path.write_bytes(data)
                holders.append(Holder(path, data, "mapping"))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
                break
            except LookupError:  # evicted before it was held
                break
        assert len(holders) >= CAPACITY_BYTES // (2 * MIB) // 2, "half the store can be held"
        started = time.monotonic()
        refused = 0
        for i in range(6):
            try:
                (bucket / f"more-{i}").write_bytes(pattern(100 + i, 4 * MIB))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
                refused += 1
        assert refused > 0
        assert time.monotonic() - started < 6 * PROMPT_S / 2
        assert {holder.look() for holder in holders} == {RIGHT}
        assert os.statvfs(bucket).f_bfree <= os.statvfs(bucket).f_blocks
    finally:
        for holder in holders:
            holder.close()
    expected = refill(bucket, 9)
    assert check(expected) >= len(expected) // 4


def test_a_file_over_the_largest_size_is_refused(service: Service, bucket: Path) -> None:
    """The largest object is a quarter of the tier."""
    write_sealed(bucket / "small", b"content")
    path = bucket / "large"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with expect_errno(errno.EFBIG):
        os.ftruncate(fd, CAPACITY_BYTES // 4 + 4096)
    with expect_errno(errno.EFBIG):
        os.posix_fallocate(fd, 0, CAPACITY_BYTES // 4 + 4096)
    # Writes through passthrough do not ask the service: they end at the tmpfs's size, or close() says it.
    if fill(fd, 2 * CAPACITY_BYTES) == 0:
        with expect_errno(errno.EFBIG):
            os.close(fd)
    else:
        with contextlib.suppress(OSError):
            os.close(fd)
    eventually(lambda: not path.exists(), "what is too large is gone")
    assert check(refill(bucket, 2)) > 0


def fill(fd: int, size: int) -> int:
    """The errno that ends writing `size` bytes, EFBIG or ENOSPC; 0 for none."""
    try:
        for offset in range(0, size, MIB):
            os.pwrite(fd, bytes(MIB), offset)
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.ENOSPC):
            raise
        return error.errno
    return 0


# --- everything at once ------------------------------------------------------------------------------------
KEYS = 300
WORKERS = 4
OPERATIONS = 600
LOST_CONNECTION = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EIO, errno.ENODEV)


def content(key: int) -> bytes:
    """What the key must hold, wherever it is found."""
    return pattern(key + 1, 1000 + key * 7919 % 300_000)


class Worker:
    """Puts, reads, evicts and removes keys in a random order; raises AssertionError for wrong bytes."""

    def __init__(self, service: Service, seed: int, progress: int, *, restarts: bool) -> None:
        self.service, self.bucket = service, service.mount / BUCKET
        self.random = random.Random(seed)
        self.temporary = self.bucket / f".tmp-{seed}"
        self.progress, self.restarts = progress, restarts
        self.right = 0

    def run(self) -> None:
        actions = (
            [self.put] * 4 + [self.read, self.map, self.direct] * 3 + [self.evict, self.unlink, self.look]
        )
        for _ in range(OPERATIONS):
            key = int(self.random.triangular(0, KEYS, 0))
            try:
                self.random.choice(actions)(key, self.bucket / f"key-{key}")
            except FileNotFoundError:
                pass
            except OSError as error:
                if not (self.restarts and error.errno in LOST_CONNECTION):
                    raise
                self.wait_for_service()
            os.write(self.progress, b".")
        assert self.right > 0, "nothing was ever read"

    def wait_for_service(self) -> None:
        def back() -> bool:
            try:
                os.stat(self.bucket)
            except OSError:
                return False
            return True

        eventually(back, "the service is back", timeout_s=60)

    def put(self, key: int, path: Path) -> None:
        data = content(key)
        try:
            with opened(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
                if self.random.random() < 0.3:
                    os.ftruncate(fd, len(data))
                    with mmap.mmap(fd, len(data)) as mapping:
                        mapping[:] = data
                else:
                    cut = self.random.randrange(len(data))
                    write_all(fd, data[:cut])
                    write_all(fd, data[cut:])
            os.rename(self.temporary, path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.temporary.unlink(missing_ok=True)

    def compare(self, key: int, found: bytes) -> None:
        assert found == content(key), f"key {key}: wrong bytes ({len(found)} of {len(content(key))})"
        self.right += 1

    def read(self, key: int, path: Path) -> None:
        with opened(path, os.O_RDONLY) as fd:
            self.compare(key, os.pread(fd, MIB, 0))

    def map(self, key: int, path: Path) -> None:
        with opened(path, os.O_RDONLY) as fd:
            mapping = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        if self.restarts:
            mapping.close()  # a lost mapping is SIGBUS, which is honest but ends the worker
            return
        self.compare(key, mapping[:])
        mapping.close()

    def direct(self, key: int, path: Path) -> None:
        with mmap.mmap(-1, MIB) as memory, opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
            size = os.readv(fd, [memory])
            self.compare(key, memory[:size])

    def evict(self, key: int, path: Path) -> None:
        from kvfs.errors import DeadlinePassed, NotFound, SessionClosed

        try:
            self.service.evict(path)
        except NotFound:
            return
        except (SessionClosed, DeadlinePassed):
            if not self.restarts:
                raise
            self.wait_for_service()

    def unlink(self, key: int, path: Path) -> None:
        path.unlink()

    def look(self, key: int, path: Path) -> None:
        assert path.stat().st_size == len(content(key))
        listed = [name for name in os.listdir(self.bucket) if not name.startswith(".tmp-")]
        assert len(set(listed)) == len(listed)
        assert set(listed) <= {f"key-{i}" for i in range(KEYS)}


@pytest.mark.parametrize("restarts", [False, True], ids=["", "with restarts"])
def test_every_read_is_right_or_a_miss(service: Service, bucket: Path, restarts: bool) -> None:
    seed = int(os.environ.get("KVFS_TEST_SEED", random.randrange(1 << 20)))
    sys.stderr.write(f"KVFS_TEST_SEED={seed}\n")
    progress, child_progress = os.pipe()
    children = [
        start_child(Worker(service, seed + i, child_progress, restarts=restarts).run) for i in range(WORKERS)
    ]
    os.close(child_progress)
    done = 0
    while part := os.read(progress, 65_536):
        before, done = done, done + len(part)
        quarter = WORKERS * OPERATIONS // 4
        if restarts and before // quarter != done // quarter and done < 3.5 * quarter:
            service.kill()
            service.restart()
    os.close(progress)
    assert [wait_child(child) for child in children] == [0] * WORKERS, f"seed {seed}"
    assert done == WORKERS * OPERATIONS
    expected = {bucket / f"key-{key}": content(key) for key in range(KEYS)}
    assert check(expected) > 0
