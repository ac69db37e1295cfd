"""Leases, other doors and recycled pages: a read gives the right bytes, a miss or an error, never others.

One small service per mode; each test leaves it usable for the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import subprocess
import time
from pathlib import Path

import pytest

import kvfs
from kvfs.keys import block_name
from tests.support.door import ON_DIRECTORY
from tests.support.holder import RIGHT, Holder, Kind
from tests.support.posix import expect_errno, mapped_pages, opened, pattern, write_all
from tests.support.service import Service
from tests.support.small_store import (
    CAPACITY_BYTES,
    FILE_BYTES,
    MAX_OBJECT_BYTES,
    MIB,
    check,
    refill,
    write_sealed,
)
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

PROMPT_S = 15.0
"""No call may take longer, whatever others hold: the longest wait that the service names is 2 s."""


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
    expected = refill(bucket, 5, times=1)
    assert check(expected) >= len(expected) // 2


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
            assert client.get(service.name(bucket / "file")) == expected


def test_what_another_door_does_is_at_once_on_the_path(service: Service, bucket: Path) -> None:
    path = bucket / "directory/file"
    with service.client() as client:
        assert not path.exists()
        client.put(service.name(path), b"one")
        assert path.read_bytes() == b"one"
        with opened(path, os.O_RDONLY) as fd:
            client.put(service.name(path), b"another")
            assert os.pread(fd, 100, 0) == b"one"
        eventually(lambda: path.stat().st_size == 7, "attributes of the new object")
        assert path.read_bytes() == b"another"
        client.rename(service.name(path), service.name(bucket / "moved"))
        eventually(lambda: not path.exists(), "the old name is gone")
        assert (bucket / "moved").read_bytes() == b"another"
        client.remove(service.name(bucket / "moved"))
        eventually(lambda: not (bucket / "moved").exists(), "the object is gone")


def test_a_draft_is_at_no_other_door(service: Service, bucket: Path) -> None:
    from kvfs.errors import NotFound

    with service.client() as client, opened(bucket / "draft", os.O_WRONLY | os.O_CREAT) as fd:
        write_all(fd, b"half")
        with pytest.raises(NotFound):
            client.get(service.name(bucket / "draft"))
        prefix = service.name(bucket) + "/"
        assert [entry.name for entry in client.list(prefix) if entry.name != prefix] == []
        os.fsync(fd)
        with pytest.raises(NotFound):
            client.get(service.name(bucket / "draft"))


def test_the_old_object_stays_at_other_doors_until_its_draft_is_done(service: Service, bucket: Path) -> None:
    path = bucket / "file"
    write_sealed(path, b"old")
    with service.client() as client:
        with opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
            write_all(fd, b"ne")
            assert client.get(service.name(path)) == b"old"
            assert path.read_bytes() == b"ne"
            write_all(fd, b"w")
        assert path.read_bytes() == b"new"
        eventually(lambda: client.get(service.name(path)) == b"new", "the new object is published")


# --- recycled pages ----------------------------------------------------------------------------------------
def test_sparse_files_in_recycled_slots_read_zeros(bucket: Path) -> None:
    for path in refill(bucket, 1, times=1.2):
        path.unlink(missing_ok=True)
    for i in range(8):
        path = bucket / f"sparse-{i}"
        with opened(path, os.O_RDWR | os.O_CREAT) as fd:
            os.ftruncate(fd, FILE_BYTES)
            os.pwrite(fd, b"middle", FILE_BYTES // 2 + i)
            if i % 2:
                os.posix_fallocate(fd, FILE_BYTES, FILE_BYTES)
            else:
                os.pwrite(fd, b"\0", 2 * FILE_BYTES - 1)
            expected = bytearray(2 * FILE_BYTES)
            expected[FILE_BYTES // 2 + i : FILE_BYTES // 2 + i + 6] = b"middle"
            with mmap.mmap(fd, 2 * FILE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                assert mapping[:] == expected
        assert path.read_bytes() == expected


def test_the_page_after_the_end_is_zeros(bucket: Path) -> None:
    """A mapping shows whole pages: past the end they must not show what the slot held before."""
    for path in refill(bucket, 1, times=1.2):
        path.unlink(missing_ok=True)
    for i in range(16):
        path = bucket / f"short-{i}"
        path.write_bytes(b"x" * (100 + i))
        with opened(path, os.O_RDONLY) as fd, mapped_pages(fd, 4096) as address:
            assert ctypes.string_at(address, 4096) == (b"x" * (100 + i)).ljust(4096, b"\0")
            assert os.pread(fd, 10_000, 0) == b"x" * (100 + i)


# --- full --------------------------------------------------------------------------------------------------
def test_a_store_full_of_held_bytes_says_so_and_recovers(service: Service, bucket: Path) -> None:
    """Each file is open for reading before its writer closes it: it cannot be evicted in between."""
    held: list[tuple[int, bytes]] = []
    started = time.monotonic()
    try:
        with expect_errno(errno.ENOSPC):
            for i in range(2 * CAPACITY_BYTES // (2 * MIB)):
                path, data = bucket / f"held-{i}", pattern(i, 2 * MIB)
                with path.open("wb") as writer:
                    writer.write(data)
                    writer.flush()
                    held.append((os.open(path, os.O_RDONLY), data))
        assert len(held) * 2 * MIB >= CAPACITY_BYTES // 2, "half the store can be held"
        assert time.monotonic() - started < PROMPT_S
        for fd, data in held:
            assert os.pread(fd, 4 * MIB, 0) == data
    finally:
        for fd, _ in held:
            os.close(fd)
    # The service learns of close() a moment later.
    eventually(lambda: has_room(bucket / "first"), "there is room again")
    expected = refill(bucket, 9)
    assert check(expected) >= len(expected) // 4


def test_allocation_makes_room(service: Service, bucket: Path) -> None:
    """posix_fallocate() in a store full of what may be evicted, as the file itself may be once it is closed."""
    refill(bucket, 11)
    with opened(bucket / "allocated", os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, 0, MAX_OBJECT_BYTES)
        assert os.fstat(fd).st_size == MAX_OBJECT_BYTES


def test_a_file_over_the_largest_size_is_refused(service: Service, bucket: Path) -> None:
    """The largest object is a quarter of the tier."""
    write_sealed(bucket / "small", b"content")
    path = bucket / "large"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with expect_errno(errno.EFBIG):
        os.ftruncate(fd, MAX_OBJECT_BYTES + 4096)
    with expect_errno(errno.EFBIG):
        os.posix_fallocate(fd, 0, MAX_OBJECT_BYTES + 4096)
    # Writes through passthrough do not ask the service: they end at the tmpfs's size, or close() says it.
    if fill(fd, 2 * CAPACITY_BYTES) == 0:
        with expect_errno(errno.EFBIG):
            os.close(fd)
    else:
        with contextlib.suppress(OSError):
            os.close(fd)
    eventually(lambda: size_of(path) <= MAX_OBJECT_BYTES, "nothing is kept that is too large")
    path.unlink(missing_ok=True)
    assert check(refill(bucket, 2)) > 0


def size_of(path: Path) -> int:
    """0 when it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def has_room(path: Path) -> bool:
    try:
        path.write_bytes(bytes(4 * MIB))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


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


@pytest.mark.parametrize("flags", [0, os.O_NOATIME])
def test_a_block_read_through_the_mount_stays_in_flight(service: Service, flags: int) -> None:
    """With O_NOATIME the kernel notes no read of the slot: the mount has marked it when it was opened."""
    inlet = end = -1
    with kvfs.connect(service.mount) as client, client.blocks(NAMESPACE) as blocks:
        for _ in range(3):  # until slots of this size keep their pages
            blocks.put([b"\1" * 16], [b"old!" * (16 << 10)])
            blocks.remove([b"\1" * 16])
        blocks.put([b"\1" * 16], [b"old!" * (16 << 10)])
        path = service.mount / blocks.bucket / block_name(b"\1" * 16).decode()
        with opened(path, os.O_RDONLY | flags) as descriptor:
            end, inlet = os.pipe()
            assert os.splice(descriptor, inlet, 4096, offset_src=0) == 4096
        os.listdir(path.parent)  # behind the RELEASE, which would keep the slot from being reused
        blocks.remove([b"\1" * 16])
        others = [bytes([number]) * 16 for number in range(2, 130)]
        for key in others:  # more than there are slots that keep their pages
            blocks.put([key], [b"new!" * (16 << 10)])
        blocks.remove(others)
        client.remove_bucket(blocks.bucket)
    assert os.read(end, 4096) == b"old!" * 1024
    os.close(inlet)
    os.close(end)
