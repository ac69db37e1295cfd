"""Slot files: creation, probes for holders and writers, recycling under a lease, hashing."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from kvfs._native.shared import slots
from kvfs.errors import Exists, IsLink, NotFound, WriterActive
from tests.support.waits import WAIT_S


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def make(folder: int, slot: int, payload: bytes) -> None:
    fd = slots.create(folder, slot)
    os.pwrite(fd, payload, 0)
    os.close(fd)


def test_names_are_eight_hex_digits(folder: int) -> None:
    for slot, name in ((0, "00000000"), (0x1A2B, "00001a2b"), (2**32 - 1, "ffffffff")):
        assert slots.slot_name(slot) == name
        os.close(slots.create(folder, slot))
        os.stat(name, dir_fd=folder)


def test_a_new_slot_is_private_to_its_group(folder: int) -> None:
    before = os.umask(0o077)
    try:
        fd = slots.create(folder, 1)
    finally:
        os.umask(before)
    assert os.fstat(fd).st_mode & 0o7777 == 0o640
    assert not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(Exists):
        slots.create(folder, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_new_slot_has_the_given_group(folder: int) -> None:
    fd = slots.create(folder, 1, 12345)
    assert os.fstat(fd).st_gid == 12345
    os.close(fd)


def test_a_missing_slot_is_not_found(folder: int) -> None:
    for call in (slots.recycle, slots.detach, slots.is_held, slots.check_no_writer):
        with pytest.raises(NotFound):
            call(folder, 9)
    with pytest.raises(NotFound):
        slots.open_slot(folder, 9, os.O_RDONLY)


def test_a_symbolic_link_is_no_slot(folder: int) -> None:
    os.symlink("/etc/passwd", slots.slot_name(3), dir_fd=folder)
    with pytest.raises(IsLink, match="slot 3"):
        slots.open_slot(folder, 3, os.O_RDONLY)


def test_writers_are_seen(folder: int) -> None:
    make(folder, 1, b"x" * 5000)
    assert slots.check_no_writer(folder, 1)[0] == 5000
    writer = slots.open_slot(folder, 1, os.O_RDWR)
    with pytest.raises(WriterActive):
        slots.check_no_writer(folder, 1)
    mapping = mmap.mmap(writer, 4096)
    os.close(writer)
    with pytest.raises(WriterActive):
        slots.check_no_writer(folder, 1)
    mapping.close()
    reader = slots.open_slot(folder, 1, os.O_RDONLY)
    assert slots.check_no_writer(folder, 1)[0] == 5000
    assert not slots.fd_has_writer(reader)
    os.close(reader)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_holders_stop_recycling(folder: int, flags: int) -> None:
    make(folder, 1, b"bytes")
    holder = slots.open_slot(folder, 1, flags)
    assert slots.is_held(folder, 1)
    assert slots.recycle(folder, 1) is None
    assert os.pread(holder, 10, 0) == b"bytes"
    os.close(holder)
    assert not slots.is_held(folder, 1)
    assert slots.recycle(folder, 1) == 0
    assert os.stat("00000001", dir_fd=folder).st_size == 0


def test_a_mapping_is_a_holder(folder: int) -> None:
    make(folder, 1, b"bytes")
    fd = slots.open_slot(folder, 1, os.O_RDONLY)
    mapping = mmap.mmap(fd, 5, prot=mmap.PROT_READ)
    os.close(fd)
    assert slots.is_held(folder, 1)
    assert slots.recycle(folder, 1) is None
    mapping.close()
    assert slots.recycle(folder, 1) == 0


def test_a_detached_slot_lives_while_it_is_held(folder: int) -> None:
    make(folder, 1, b"x" * 10_000)
    holder = slots.open_slot(folder, 1, os.O_RDONLY)
    detached, physical_bytes = slots.detach(folder, 1)
    assert physical_bytes == slots.physical_bytes(detached) >= 10_000
    make(folder, 1, b"new")
    assert slots.fd_is_held(detached)
    assert os.pread(holder, 5, 0) == b"xxxxx"
    os.close(holder)
    assert not slots.fd_is_held(detached)
    os.close(detached)


@pytest.mark.parametrize("size_bytes", [0, 1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 3_000_001])
def test_the_file_hash_is_the_payloads(folder: int, size_bytes: int) -> None:
    payload = os.urandom(size_bytes)
    make(folder, 1, payload)
    fd = slots.open_slot(folder, 1, os.O_RDONLY)
    assert slots.fd_xxh3_64(fd) == slots.xxh3_64(payload) == xxhash.xxh3_64_intdigest(payload)
    os.close(fd)


def test_opening_a_slot_under_a_recyclers_lease_does_not_wait(folder: int) -> None:
    import fcntl

    make(folder, 1, b"x")
    fd = slots.open_slot(folder, 1, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    assert slots.open_slot(folder, 1, os.O_RDONLY | os.O_NONBLOCK) == -1
    assert slots.is_held(folder, 1)
    assert slots.recycle(folder, 1) is None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(fd)


def run_python(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, check=False).returncode


def test_a_broken_lease_does_not_end_the_process() -> None:
    """SIGIO, which the kernel sends to the holder of a lease, ends a process that has not been prepared."""
    default = (
        "import os, signal; signal.signal(signal.SIGIO, signal.SIG_DFL)\n"  # an ignored signal is inherited
    )
    raise_it = "os.kill(os.getpid(), signal.SIGIO)"
    assert run_python(default + raise_it) == -signal.SIGIO
    assert run_python(default + "from kvfs._native.shared import slots\n" + raise_it) == 0


def test_a_handler_of_the_application_stays() -> None:
    code = (
        "import signal\n"
        "signal.signal(signal.SIGIO, lambda *_: None); before = signal.getsignal(signal.SIGIO)\n"
        "from kvfs._native.shared import slots\n"
        "signal.raise_signal(signal.SIGIO)\n"
        "raise SystemExit(signal.getsignal(signal.SIGIO) is not before)"
    )
    assert run_python(code) == 0
