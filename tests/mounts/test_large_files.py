"""Files larger than DRAM on the mount: written to NVMe as they come, read in place, whole or not there at all."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.door import ON_DIRECTORY, TEST_MODES, need_mount
from tests.support.posix import NOBODY, opened, pattern, run_as, write_all
from tests.support.seeds import SEED, rounds
from tests.support.service import Service
from tests.support.waits import eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

MIB = 1 << 20
DRAM = 16 * MIB
NVME = 256 * MIB
HANG_S = 90.0


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Serve a large bucket `big`."""
    need_mount()
    with Service(mode=request.param, dram="16MiB", nvme="256MiB") as running:
        watchdog = threading.Timer(HANG_S, running.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            running.create_bucket("big", large=True)
            yield running
        finally:
            watchdog.cancel()
            watchdog.join()
        assert not running.complaints()


def make_source(path: Path, size: int, seed: int = 0) -> Path:
    """A file on an ordinary disk."""
    path.write_bytes(np.random.default_rng(seed).bytes(size))
    return path


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(path: Path) -> None:
    eventually(lambda: os.getxattr(path, "user.kvfs.state") == b"sealed", f"{path.name} is sealed")


def nvme_usage(service: Service) -> dict[str, int]:
    with service.client() as client:
        found: dict[str, int] = client.status()["tiers"][1]
    return found


def dram_used(service: Service) -> int:
    with service.client() as client:
        return int(client.status()["tiers"][0]["used_bytes"])


@pytest.mark.parametrize("uid", [NOBODY, 0], ids=["nobody", "root"])
def test_privileges_end_with_a_write(service: Service, uid: int) -> None:
    """But for root's: files that have no slot as well."""
    path = service.mount / "big" / "file"
    path.write_bytes(b"program")
    path.chmod(0o6777)

    def write() -> None:
        with opened(path, os.O_WRONLY) as fd:
            os.write(fd, b"P")
            assert os.fstat(fd).st_mode & 0o7777 == (0o777 if uid else 0o6777)

    run_as(uid, write)
    sealed(path)
    assert path.stat().st_mode & 0o7777 == (0o777 if uid else 0o6777)


# --- whole files ------------------------------------------------------------------------------------------


def test_40_gb_through_10_gb(service: Service, tmp_path: Path) -> None:
    """A file four times the DRAM capacity and more, by the programs that people use; sizes as CI has them."""
    source = make_source(tmp_path / "source", 6 * DRAM + 12_345)
    target = service.mount / "big" / "d" / "model.safetensors"
    target.parent.mkdir()
    subprocess.run(["cp", source, target], check=True)
    sealed(target)
    assert target.stat().st_size == source.stat().st_size
    assert os.getxattr(target, "user.kvfs.tier") == b"nvme"
    subprocess.run(["cmp", source, target], check=True)
    assert dram_used(service) <= DRAM // 2
    again = tmp_path / "again"
    subprocess.run(["cp", "--sparse=always", target, again], check=True)
    assert digest(again) == digest(source)
    again.unlink()
    service.signal(signal.SIGKILL)
    shutil.rmtree(service.data / "index")
    service.restart()
    assert digest(target) == digest(source)


def test_dd_and_rsync(service: Service, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", 2 * DRAM + 77)
    first, second = service.mount / "big" / "dd", service.mount / "big" / "rsync"
    dd = ["dd", "bs=128k", "conv=fsync", "status=none"]
    subprocess.run([*dd, f"if={source}", f"of={first}"], check=True)
    subprocess.run([*dd, f"if={first}", f"of={tmp_path / 'back'}"], check=True)
    assert digest(tmp_path / "back") == digest(source)
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not here")
    subprocess.run(["rsync", "-a", source, second], check=True)
    assert digest(second) == digest(source)
    with source.open("r+b") as file:
        file.seek(DRAM + 5)
        file.write(b"changed in the middle")
    os.utime(source, (1, 1))  # rsync compares whole seconds
    subprocess.run(["rsync", "-a", "--no-whole-file", source, second], check=True)
    assert digest(second) == digest(source)
    subprocess.run(["rsync", "-a", "--inplace", "--no-whole-file", source, first], check=True)
    sealed(first)
    assert digest(first) == digest(source)


def test_a_small_file_is_read_from_dram(service: Service) -> None:
    path = service.mount / "big" / "small"
    path.write_bytes(b"small")
    assert path.read_bytes() == b"small"
    sealed(path)
    assert path.read_bytes() == b"small"
    assert os.getxattr(path, "user.kvfs.tier") == b"dram"
    with path.open("ab") as file:
        file.write(b" and more")
    assert path.read_bytes() == b"small and more"


def test_a_small_file_is_read_again_while_its_writers_reader_has_it_open(service: Service) -> None:
    """Through the page cache and through passthrough: the kernel refuses both on one inode."""
    path = service.mount / "big" / "small"
    with path.open("w+b") as file:
        file.write(b"before")
        file.flush()
        with path.open("rb") as reader:
            assert reader.read() == b"before"
            file.close()
            sealed(path)
            for _ in range(3):
                assert path.read_bytes() == b"before"
            reader.seek(0)
            assert reader.read() == b"before"
            assert os.fstat(reader.fileno()).st_size == 6


# --- anywhere in a file -----------------------------------------------------------------------------------


@pytest.mark.seeded
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_random_writes_are_those_of_a_disk(service: Service, tmp_path: Path, seed: int) -> None:
    """Writes, reads, truncations, appends, fsync, several handles, close and open again: beside a file on a disk."""
    generator = random.Random(seed)
    paths = [service.mount / "big" / "file", tmp_path / "file"]
    handles = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
    for _ in range(rounds(60, 120)):
        kind = generator.choices(
            ["write", "read", "truncate", "append", "fsync", "again"], [8, 6, 2, 3, 1, 1]
        )[0]
        offset = generator.choice([0, generator.randrange(6 * MIB), generator.randrange(1, 6) * MIB - 2])
        size = generator.choice([1, generator.randrange(1, 5000), generator.randrange(1, 2 * MIB)])
        data = generator.randbytes(size)
        if kind == "write":
            assert [os.pwrite(handle, data, offset) for handle in handles] == [size, size]
        elif kind == "read":
            found = [os.pread(handle, size, offset) for handle in handles]
            assert found[0] == found[1], (seed, offset, size)
        elif kind == "truncate":
            for handle in handles:
                os.ftruncate(handle, offset)
        elif kind == "append":
            for path in paths:
                with path.open("ab") as file:
                    file.write(data)
        elif kind == "fsync":
            for handle in handles:
                os.fsync(handle)
        else:
            for handle in handles:
                os.close(handle)
            handles = [os.open(path, os.O_RDWR) for path in paths]
        assert os.fstat(handles[0]).st_size == os.fstat(handles[1]).st_size, (seed, kind, offset)
    for handle in handles:
        os.close(handle)
    sealed(paths[0])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_sealed_large_file_is_changed_in_place(service: Service, tmp_path: Path) -> None:
    path, source = service.mount / "big" / "file", make_source(tmp_path / "source", 2 * DRAM)
    shutil.copyfile(source, path)
    sealed(path)
    ino = path.stat().st_ino
    with path.open("rb") as reader:
        with path.open("r+b") as file:
            file.seek(DRAM - 3)
            file.write(b"another")
        with source.open("r+b") as file:
            file.seek(DRAM - 3)
            before = file.read(7)
            file.seek(DRAM - 3)
            file.write(b"another")
        sealed(path)
        assert digest(path) == digest(source)
        reader.seek(DRAM - 3)
        assert reader.read(7) == before, "a reader keeps what it opened"
    assert path.stat().st_ino != ino, "so that nobody takes it for the file that the reader has"
    os.truncate(path, DRAM + 1)
    os.truncate(source, DRAM + 1)
    eventually(lambda: digest(path) == digest(source), "the shorter file is there")


def test_holes_are_zeros(service: Service) -> None:
    path = service.mount / "big" / "sparse"
    with path.open("wb") as file:
        file.truncate(100 * MIB)
        file.seek(50 * MIB)
        file.write(b"x")
    sealed(path)
    with path.open("rb") as file:
        file.seek(50 * MIB - 5)
        assert file.read(11) == b"\0\0\0\0\0x\0\0\0\0\0"
        file.seek(100 * MIB - 3)
        assert file.read() == b"\0\0\0"
    assert nvme_usage(service)["live_bytes"] < 10 * MIB


def test_mappings(service: Service, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", 2 * DRAM)
    path = service.mount / "big" / "mapped"
    shutil.copyfile(source, path)
    sealed(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert hashlib.sha256(mapping).hexdigest() == digest(source)
        path.unlink()
        assert mapping[DRAM : DRAM + 5] == source.read_bytes()[DRAM : DRAM + 5]
    with path.open("w+b") as written:
        written.truncate(2 * DRAM)
        with mmap.mmap(written.fileno(), 0) as mapping:
            mapping[DRAM : DRAM + 6] = b"mapped"
            mapping.flush()
    sealed(path)
    with path.open("rb") as file:
        file.seek(DRAM)
        assert file.read(6) == b"mapped"


# --- opened again while it is published --------------------------------------------------------------------

PAUSES_S = (0, 0.0005, 0.001, 0.002, 0.003)
"""After a close: the file is published a millisecond later, when its extents are written."""


def created_for_reading(bucket: Path) -> dict[Path, bytes]:
    expected = {bucket / f"created{number}": pattern(number, 100 + number) for number in range(30)}
    for number, (path, data) in enumerate(expected.items()):
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY))
        time.sleep(PAUSES_S[number % len(PAUSES_S)])
        with opened(path, os.O_RDWR) as fd:
            os.pwrite(fd, data, 0)
            os.fsync(fd)
        assert path.stat().st_size == len(data)
    return expected


def truncated_and_written(bucket: Path) -> dict[Path, bytes]:
    expected = {}
    for number in range(30):
        path, data = bucket / f"written{number}", pattern(number, 9056)
        path.write_bytes(data)
        if number % 2:
            sealed(path)
        os.truncate(path, 100)
        time.sleep(PAUSES_S[number % len(PAUSES_S)])
        with opened(path, os.O_RDWR) as fd:
            os.pwrite(fd, b"another", 50)
        expected[path] = data[:50] + b"another" + data[57:100]
        assert path.read_bytes() == expected[path]
    return expected


def truncated_after_the_close(bucket: Path) -> dict[Path, bytes]:
    expected = {}
    for number in range(60):
        path, data = bucket / f"cut{number}", pattern(number, 3000)
        path.write_bytes(data)
        time.sleep(PAUSES_S[number % len(PAUSES_S)])
        os.truncate(path, 100)
        assert path.stat().st_size == 100
        with opened(path, os.O_RDONLY) as fd, mmap.mmap(fd, 100, prot=mmap.PROT_READ) as mapping:
            assert mapping[:] == data[:100]
        expected[path] = data[:100]
    return expected


def truncated_while_somebody_writes_it(bucket: Path) -> dict[Path, bytes]:
    path = bucket / "truncated"
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        write_all(fd, pattern(1, 3000))
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
        assert os.fstat(fd).st_size == path.stat().st_size == 0
        assert os.pread(fd, 10, 0) == b""
        os.pwrite(fd, b"x", 4)
        assert os.pread(fd, 10, 0) == b"\0\0\0\0x"
    return {path: b"\0\0\0\0x"}


def seal_and_sync(path: Path) -> None:
    sealed(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def test_what_is_opened_again_within_milliseconds_keeps_every_write(service: Service) -> None:
    expected: dict[Path, bytes] = {}
    for work in (
        truncated_and_written,
        truncated_after_the_close,
        truncated_while_somebody_writes_it,
        created_for_reading,
    ):
        expected |= work(service.mount / "big")
    assert {path: path.read_bytes() for path in expected} == expected
    with ThreadPoolExecutor(16) as syncing:  # their syncs share what the device writes
        list(syncing.map(seal_and_sync, expected))
    service.signal(signal.SIGKILL)
    service.restart()
    assert {path: path.read_bytes() for path in expected} == expected


# --- names and leases -------------------------------------------------------------------------------------


def test_who_has_it_open_keeps_it(service: Service, tmp_path: Path) -> None:
    sources = [make_source(tmp_path / f"source{number}", 2 * DRAM, number) for number in range(2)]
    expected = [digest(source) for source in sources]
    path = service.mount / "big" / "file"
    shutil.copyfile(sources[0], path)
    sealed(path)
    with path.open("rb") as first:
        os.posix_fadvise(first.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        shutil.copyfile(sources[1], path)
        sealed(path)
        with path.open("rb") as second:
            path.unlink()
            assert not path.exists()
            for number in range(6):  # the tier is gone through more than once
                shutil.copyfile(sources[0], service.mount / "big" / f"other{number}")
            assert hashlib.file_digest(first, "sha256").hexdigest() == expected[0]
            assert hashlib.file_digest(second, "sha256").hexdigest() == expected[1]


def test_unlinked_while_it_is_written(service: Service) -> None:
    path = service.mount / "big" / "gone"
    before = nvme_usage(service)["durable_bytes"]
    with path.open("w+b") as file:
        file.write(b"x" * (DRAM * 2))
        path.unlink()
        file.write(b"y")
        file.seek(DRAM * 2 - 1)
        assert file.read() == b"xy"
    eventually(lambda: nvme_usage(service)["durable_bytes"] < before + MIB, "its space is free")
    assert os.listdir(service.mount / "big") == []


def test_renamed_while_it_is_written_and_between_buckets(service: Service, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", 2 * DRAM)
    (service.mount / "plain").mkdir()
    part, path = service.mount / "big" / "file.part", service.mount / "plain" / "file"
    with part.open("wb") as file:
        file.write(source.read_bytes())
        part.rename(service.mount / "big" / "file")
    (service.mount / "big" / "file").rename(path)
    sealed(path)
    assert digest(path) == digest(source)
    with pytest.raises(OSError, match="File too large"):
        path.open("r+b")
    assert os.listdir(service.mount / "big") == []


WRITER = """
import os, signal, sys
descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for _ in range(40):
    os.write(descriptor, os.urandom(1 << 20))
if sys.argv[2] == "fsync":
    os.fsync(descriptor)
print("written", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("how", ["plain", "fsync"])
def test_a_killed_writer_leaves_nothing(service: Service, how: str) -> None:
    path = service.mount / "big" / "killed"
    path.write_bytes(b"as it was")
    sealed(path)
    before = nvme_usage(service)["durable_bytes"]
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), how], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        writer.kill()
    eventually(lambda: nvme_usage(service)["durable_bytes"] < before + MIB, "its space is free")
    if how == "plain":
        eventually(lambda: path.exists() and path.read_bytes() == b"as it was", "the old file is there")


@pytest.mark.parametrize("keep_index", [True, False])
def test_a_killed_service_has_what_was_synced_and_nothing_of_the_rest(
    service: Service, keep_index: bool
) -> None:
    bucket = service.create_bucket("safe", durable=True, large=True)
    data = np.random.default_rng(5).bytes(2 * DRAM)
    closed, synced, unsynced = (bucket / name for name in ("closed", "synced", "unsynced"))
    closed.write_bytes(data)
    handles = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in (synced, unsynced)]
    for handle in handles:
        os.write(handle, data[:DRAM])
    os.fsync(handles[0])
    service.signal(signal.SIGKILL)
    for handle in handles:
        with pytest.raises(OSError, match=r"not connected|aborted"):
            os.close(handle)
    if not keep_index:
        shutil.rmtree(service.data / "index")
    service.restart()
    assert closed.read_bytes() == data
    assert synced.read_bytes() == data[:DRAM]
    assert not unsynced.exists()
    assert nvme_usage(service)["live_bytes"] < 4 * DRAM


# --- limits and attributes --------------------------------------------------------------------------------


def test_too_large_and_too_full(service: Service) -> None:
    path = service.mount / "big" / "file"
    with path.open("wb") as file:
        with pytest.raises(OSError, match="File too large"):
            os.pwrite(file.fileno(), b"x", NVME // 2)
        with pytest.raises(OSError, match="File too large"):
            os.ftruncate(file.fileno(), NVME // 2 + 1)
    handles = [
        os.open(service.mount / "big" / f"part{number}", os.O_WRONLY | os.O_CREAT) for number in range(3)
    ]
    block = os.urandom(MIB)

    def fill() -> None:
        for _ in range(120):
            for handle in handles:
                os.write(handle, block)

    with pytest.raises(OSError, match="No space left"):
        fill()
    for handle in handles:
        os.close(handle)


def test_the_flag_of_a_bucket(service: Service) -> None:
    (service.mount / "b").mkdir()
    bucket = service.mount / "b"
    (bucket / "made").write_bytes(b"x")
    assert os.getxattr(bucket, "user.kvfs.large") == b"0"
    assert os.getxattr(service.mount / "big", "user.kvfs.large") == b"1"
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(bucket, "user.kvfs.large", b"yes")
    os.setxattr(bucket, "user.kvfs.large", b"1")
    for number in range(20):  # a burst, in which the native loop would take to making files by itself
        (bucket / f"small{number}").write_bytes(b"x")
    (bucket / "large").write_bytes(bytes(DRAM))
    sealed(bucket / "large")
    assert (bucket / "large").stat().st_size == DRAM
    listed = service.cli("bucket", "list", "--at", str(service.mount)).stdout.splitlines()
    assert [line.split()[-2:] for line in listed if "large" in line] == [["b", "large"], ["big", "large"]]
    os.setxattr(bucket, "user.kvfs.large", b"0")
    with pytest.raises(OSError, match="File too large"):
        (bucket / "refused").write_bytes(bytes(DRAM))
    assert (bucket / "large").read_bytes() == bytes(DRAM)


def test_the_client_says_that_it_is_too_large(service: Service) -> None:
    from kvfs.errors import ObjectTooLarge

    path = service.mount / "big" / "file"
    path.write_bytes(bytes(DRAM))
    sealed(path)
    with service.client() as client, pytest.raises(ObjectTooLarge, match="big/file: larger than DRAM takes"):
        client.get("big/file")
