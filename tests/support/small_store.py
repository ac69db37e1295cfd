"""A service small enough that refilling it reuses every slot and page, and what the fault tests do to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvfs._native.shared.table import SEALED, Table
from tests.support.door import BUCKET, HANG_S, need_mount
from tests.support.posix import pattern
from tests.support.service import Service
from tests.support.waits import eventually

MIB: Final = 1 << 20
CAPACITY_BYTES: Final = 32 * MIB
FILE_BYTES: Final = MIB
MAX_OBJECT_BYTES: Final = CAPACITY_BYTES // 4
ARGUMENTS: Final = ("--slots", "4096")
"""Few slots, since their table counts as used: it must be small beside the capacity."""


@contextmanager
def small_service(mode: str) -> Iterator[Service]:
    """A running service with one bucket, whose log must not complain."""
    need_mount()
    with Service(mode=mode, dram=f"{CAPACITY_BYTES >> 20}MiB", arguments=ARGUMENTS) as service:
        with watched(service):
            (service.mount / BUCKET).mkdir()
            yield service
        complaints = service.complaints()
        assert not complaints, complaints


@contextmanager
def watched(service: Service) -> Iterator[None]:
    """Kill the service after HANG_S, which ends every call that hangs on it."""
    watchdog = threading.Timer(HANG_S, service.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        watchdog.join()


def state(path: Path) -> bytes:
    return os.getxattr(path, "user.kvfs.state")


def write_sealed(path: Path, data: bytes) -> None:
    """Write a file and wait until it is sealed."""
    path.write_bytes(data)
    eventually(lambda: state(path) == b"sealed", f"{path.name} is sealed")


def refill(bucket: Path, seed: int, times: float = 2.0) -> dict[Path, bytes]:
    """Write `times` the capacity in new files of other bytes; what was written, for `check`."""
    written = {}
    for i in range(int(CAPACITY_BYTES * times) // FILE_BYTES):
        path = bucket / f"refill-{seed}-{i}"
        written[path] = pattern(seed * 1000 + i, FILE_BYTES - i)
        path.write_bytes(written[path])
    return written


def check(expected: dict[Path, bytes]) -> int:
    """Each file holds what it should, or is a miss; how many are there."""
    right = 0
    for path, data in expected.items():
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            continue
        assert found == data, f"{path.name}: wrong bytes"
        right += 1
    return right


def checksums(service: Service) -> list[bool]:
    """Whether each sealed slot has its checksum, as the headers say."""
    table = Table.attach(service.data / "dram/table")
    try:
        headers = [table.read_header(slot) for slot in range(table.slots_used)]
    finally:
        table.close()
    return [header.checksum is not None for header in headers if header.state == SEALED]
