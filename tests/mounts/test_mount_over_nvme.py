"""The mount over both tiers: files that left DRAM, durable buckets, fsync, and a service that comes back."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvfs.system import linux
from tests.support.door import ON_DIRECTORY, TEST_MODES
from tests.support.posix import opened, pattern, start_child, wait_child
from tests.support.seeds import SEED, rounds
from tests.support.service import Service, has_written
from tests.support.waits import eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

MIB = 1 << 20
SIZES = (0, 1, 4095, 4096, 70_001, 3 * MIB + 5)


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with Service(mode=request.param, dram="64MiB", nvme="128MiB") as running:
        yield running
        assert not running.complaints()


def data_of(path: Path, size: int) -> bytes:
    return random.Random(path.name).randbytes(size)


def write_all(directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"file{number}" for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(data_of(path, size))
    return paths


def check_all(paths: list[Path]) -> None:
    for path, size in zip(paths, SIZES, strict=True):
        assert path.stat().st_size == size
        assert path.read_bytes() == data_of(path, size)


def tier(path: Path) -> bytes:
    return os.getxattr(path, "user.kvfs.tier")


def until_written(service: Service, count: int) -> None:
    def is_written() -> bool:
        with service.client() as client:
            return has_written(client, count)

    eventually(is_written, "everything is on NVMe")


def sync_directory(directory: Path) -> None:
    """Make the changes of its names durable."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def wipe_dram(service: Service) -> None:
    """What a power cut does to memory: the slots are gone, whoever had them open."""
    linux.unmount(service.data / "dram", linux.MNT_DETACH)
    shutil.rmtree(service.data / "dram")


def wipe_index(service: Service) -> None:
    shutil.rmtree(service.data / "index")


def test_files_that_left_dram_are_read_again(service: Service) -> None:
    paths = write_all(service.mount / "b" / "d")
    until_written(service, len(paths))
    with service.client() as client:
        client.evict(*(service.name(path) for path in paths))
    assert all(tier(path) == b"nvme" for path in paths)
    check_all(paths)
    assert all(tier(path) == b"dram" for path in paths)
    with service.client() as client:
        client.evict(*(service.name(path) for path in paths))
        assert client.get(service.name(paths[4])) == data_of(paths[4], SIZES[4])
    paths[3].write_bytes(b"new")
    with paths[4].open("r+b") as file:
        file.seek(100)
        file.write(b"in the middle")
    expected = bytearray(data_of(paths[4], SIZES[4]))
    expected[100:113] = b"in the middle"
    eventually(lambda: paths[4].read_bytes() == expected, "the rewritten file is there")
    assert paths[3].read_bytes() == b"new"


def test_the_capacity_is_that_of_the_larger_tier(service: Service) -> None:
    found = os.statvfs(service.mount)
    assert found.f_blocks * found.f_frsize == 128 * MIB


@pytest.mark.parametrize("wipe", [None, wipe_dram, wipe_index])
def test_a_killed_service_comes_back_with_its_files(
    service: Service, wipe: Callable[[Service], None] | None
) -> None:
    paths = write_all(service.mount / "b" / "d")
    (service.mount / "b" / "empty").mkdir()
    until_written(service, len(paths))
    paths[0].unlink()
    paths[1].rename(paths[0])
    if wipe is wipe_index:
        sync_directory(paths[0].parent)
    service.signal(signal.SIGKILL)
    if wipe is not None:
        wipe(service)
    service.restart()
    assert not paths[1].exists()
    assert paths[0].read_bytes() == data_of(paths[1], SIZES[1])
    for path, size in list(zip(paths, SIZES, strict=True))[2:]:
        assert path.read_bytes() == data_of(path, size)
    assert (service.mount / "b" / "empty").is_dir()


def test_a_durable_bucket_has_what_was_closed(service: Service) -> None:
    assert os.getxattr(service.create_bucket("d", durable=True), "user.kvfs.class") == b"durable"
    paths = write_all(service.mount / "d" / "deep")
    (service.mount / "d" / "deep" / "tmp").write_bytes(b"over")
    (service.mount / "d" / "deep" / "tmp").rename(paths[5])
    paths[2].unlink()
    service.signal(signal.SIGKILL)
    wipe_dram(service)
    wipe_index(service)
    service.restart()
    assert paths[5].read_bytes() == b"over"
    assert not paths[2].exists()
    for number in (0, 1, 3, 4):
        assert paths[number].read_bytes() == data_of(paths[number], SIZES[number])
    assert sorted(os.listdir(service.mount / "d" / "deep")) == ["file0", "file1", "file3", "file4", "file5"]


@pytest.mark.parametrize("wipe", [None, wipe_index])
def test_fsync_keeps_a_file_that_is_still_being_written(
    service: Service, wipe: Callable[[Service], None] | None
) -> None:
    (service.mount / "b").mkdir()
    path = service.mount / "b" / "log"
    path.write_bytes(b"old")
    descriptor = os.open(path, os.O_RDWR)
    os.write(descriptor, b"first")
    os.fsync(descriptor)
    os.write(descriptor, b" second")
    os.fsync(descriptor)
    os.write(descriptor, b" kept or not")
    service.signal(signal.SIGKILL)
    wipe_dram(service)
    if wipe is not None:
        wipe(service)
    service.restart()
    assert path.read_bytes() == b"first second"
    with suppress(OSError):  # of a mount that is gone
        os.close(descriptor)


@pytest.mark.parametrize("large", [False, True])
def test_what_was_synced_ends_with_its_name_though_somebody_has_it_open(
    service: Service, large: bool
) -> None:
    bucket = service.mount / "b"
    bucket.mkdir()
    os.setxattr(bucket, "user.kvfs.large", b"1" if large else b"0")
    descriptors = []
    for path in [bucket / name for name in ("removed", "replaced", "moved", "above", "below")]:
        descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT))
        os.write(descriptors[-1], path.name.encode())
        os.fsync(descriptors[-1])
    (bucket / "removed").unlink()
    (bucket / "moved").rename(bucket / "replaced")
    (bucket / "above").rename(bucket / "below")
    (bucket / "below").unlink()
    sync_directory(bucket)
    service.signal(signal.SIGKILL)
    wipe_dram(service)
    wipe_index(service)
    service.restart()
    assert {path.name: path.read_bytes() for path in bucket.iterdir()} == {"replaced": b"moved"}
    for descriptor in descriptors:
        with suppress(OSError):  # of a mount that is gone
            os.close(descriptor)


def test_fsync_of_a_sealed_file_and_of_a_directory(service: Service) -> None:
    (service.mount / "b").mkdir()
    path = service.mount / "b" / "file"
    path.write_bytes(b"sealed")
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_directory(service.mount / "b")
    moved, renamed = service.mount / "b" / "moved", service.mount / "b" / "renamed"
    moved.write_bytes(b"moved")
    until_written(service, 2)
    moved.rename(renamed)
    with renamed.open("rb") as file:
        os.fsync(file.fileno())
    service.signal(signal.SIGKILL)
    wipe_dram(service)
    wipe_index(service)
    service.restart()
    assert path.read_bytes() == b"sealed"
    assert renamed.read_bytes() == b"moved"
    assert not moved.exists()


def put_or_refuse(path: Path, data: bytes) -> tuple[bytes, int] | None:
    """Write and close a file: what it is to hold, and how much of that at least; None where close was refused. Both
    may be refused with ENOSPC, and a file whose write was refused has what was written before."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    written = 0
    try:
        while written < len(data):
            written += os.pwrite(descriptor, data[written : written + MIB], written)
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017
    try:
        os.close(descriptor)
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017
        return None
    return data, written


@pytest.mark.parametrize("large", [False, True])
def test_a_full_tier_says_so_at_the_close(service: Service, large: bool) -> None:
    """Several writers at once, files of one extent and of many: what was answered is there, what was refused is not."""
    bucket = service.create_bucket("full", durable=True, large=large)
    sizes = [70_000, MIB, 5 * MIB + 3]

    def write(writer: int) -> dict[Path, tuple[bytes, int] | None]:
        found: dict[Path, tuple[bytes, int] | None] = {}
        refused = 0
        for number in range(200):
            path = bucket / f"{writer}-{number}"
            data = pattern(1000 * writer + number, sizes[number % len(sizes)])
            found[path] = put_or_refuse(path, data)
            refused += found[path] != (data, len(data))
            if refused == 4:
                break
        return found

    with ThreadPoolExecutor(4) as writers:
        expected = {path: each for found in writers.map(write, range(4)) for path, each in found.items()}
    assert any(each != (each[0], len(each[0])) if each else True for each in expected.values())
    for number, path in enumerate([path for path, each in expected.items() if each is not None][:10]):
        expected[path] = put_or_refuse(path, pattern(number, sizes[2])) or expected[path]

    def check() -> None:
        for path, each in expected.items():
            assert path.exists() == (each is not None), path
            if each is not None:
                found = path.read_bytes()
                assert len(found) >= each[1]
                assert found == each[0][: len(found)], path

    check()
    service.signal(signal.SIGKILL)
    wipe_dram(service)
    wipe_index(service)
    service.restart()
    check()


def fill_up(bucket: Path, size_bytes: int) -> list[Path]:
    """Files of this size, until there is no room for another one."""
    made: list[Path] = []
    while put_or_refuse(path := bucket / f"{len(made)}", pattern(len(made), size_bytes)) is not None:
        made.append(path)
    return made


def test_a_truncation_that_is_refused_changes_nothing(service: Service) -> None:
    """Right after the close, too, when the file is not sealed yet: there is room for the file and not for a second.
    What records are written at once is padded once, so that the room which files leave differs by some 100 KB."""
    bucket = service.create_bucket("full", durable=True)
    made = []
    for size_bytes in (3_000_000, 300_000, 30_000):
        (bucket / str(size_bytes)).mkdir()
        made.append(fill_up(bucket / str(size_bytes), size_bytes))
    assert all(made[:2])
    made[1][0].unlink()
    for path in made[2][:1]:
        path.unlink()
    path, refused = bucket / "file", 0
    for number in range(12):
        data = pattern(number, 280_000)
        path.write_bytes(data)
        try:
            os.truncate(path, 200_000)
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017
            refused += 1
        else:
            data = data[:200_000]
        assert path.read_bytes() == data
        path.unlink()
    assert refused


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("lost", ["nothing", "dram", "all"])
def test_links_outlive_a_kill(service: Service, durable: bool, lost: str) -> None:
    """Right after the call that made them: without DRAM, and in a durable bucket without the index. Of a cache without
    both, a name may be missing, or what it was before."""
    bucket = service.create_bucket("full", durable=True) if durable else service.mount / "b"
    bucket.mkdir(exist_ok=True)
    os.symlink("first", bucket / "link")
    os.symlink("second", bucket / "beside")
    os.rename(bucket / "beside", bucket / "link")
    (bucket / "file").write_bytes(b"bytes")
    os.symlink("file", bucket / "over")
    os.symlink("x", bucket / "gone")
    os.unlink(bucket / "gone")
    service.kill()
    if lost != "nothing":
        wipe_dram(service)
    if lost == "all":
        wipe_index(service)
    service.restart()
    there = list(bucket.iterdir()) if bucket.exists() else []
    found = {path.name: os.readlink(path) for path in there if path.is_symlink()}
    kept = {"link": "second", "over": "file"}
    if durable or lost != "all":
        assert found == kept
    else:
        before = {("link", "first"), ("beside", "second"), ("gone", "x")}
        assert found.items() <= kept.items() | before
    if durable:
        assert (bucket / "over").read_bytes() == b"bytes"


@pytest.mark.parametrize("large", [False, True], ids=["", "large"])
def test_what_a_killed_writer_wrote_is_not_made_durable(service: Service, large: bool) -> None:
    """Nor does it take the place of what was there, though somebody else has the file open when the service dies."""
    bucket = service.create_bucket("full", durable=True, large=large)
    path = bucket / "file"
    path.write_bytes(b"whole")
    with path.open("r+b", buffering=0) as other:
        ready, child_ready = os.pipe()

        def write() -> None:
            other.close()  # inherited; the plain mode takes its end in a killed process for a close
            with path.open("r+b", buffering=0) as file:
                file.write(b"ha")
                os.write(child_ready, b".")
                signal.pause()

        pid = start_child(write)
        assert os.read(ready, 1) == b"."
        os.kill(pid, signal.SIGKILL)
        assert wait_child(pid) == -signal.SIGKILL  # and its close was answered
        service.kill()
        with suppress(OSError):
            other.close()
    for end in (ready, child_ready):
        os.close(end)
    service.restart()
    assert path.read_bytes() == b"whole"


def test_a_stop_in_the_middle_of_a_synced_rewrite_is_no_damage(service: Service) -> None:
    path = service.create_bucket("kept", durable=True) / "file"
    path.write_bytes(b"first ")
    eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", "it is published")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"second")
    os.fsync(fd)
    service.stop()
    with suppress(OSError):
        os.close(fd)
    wipe_dram(service)
    checked = service.cli("fsck", "--data", str(service.data), "--check-only")
    assert checked.returncode == 0, checked.stdout
    service.restart()
    assert path.read_bytes() == b"first second"


@pytest.mark.seeded
def test_attributes_can_be_set_just_after_a_close(service: Service) -> None:
    """Whatever is becoming of the file then: a draft, being published, on its way to NVMe, or replaced once more."""
    directory = service.mount / "bucket/pinned"
    directory.mkdir(parents=True)
    order = random.Random(SEED)
    for number in range(rounds(200, 400)):
        path = directory / f"{order.randrange(8)}"
        if order.random() < 0.3:
            (directory / "aside").write_bytes(order.randbytes(order.randrange(20_000)))
            os.rename(directory / "aside", path)
        else:
            path.write_bytes(order.randbytes(order.randrange(20_000)))
        for _ in range(order.choice((0, 0, 1, 5, 20))):
            os.stat(path)
        os.setxattr(path, "user.kvfs.pin", b"%d" % (number % 2))
        assert os.getxattr(path, "user.kvfs.pin") == b"%d" % (number % 2)


def test_a_pin_that_is_set_before_the_close_keeps_a_file_from_being_evicted_after_it(
    service: Service,
) -> None:
    """A file of a cache bucket may be evicted before who closed it comes back to pin it."""
    directory = service.mount / "bucket/flood"
    directory.mkdir(parents=True)
    with (service.mount / "bucket/kept").open("wb") as file:
        file.write(b"kept")
        file.flush()
        os.setxattr(file.fileno(), "user.kvfs.pin", b"1")
    for number in range(40):
        (directory / f"{number}").write_bytes(bytes(3 * MIB))
    assert (service.mount / "bucket/kept").read_bytes() == b"kept"
    assert os.getxattr(service.mount / "bucket/kept", "user.kvfs.pin") == b"1"
