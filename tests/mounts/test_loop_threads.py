"""How many of the mount's requests wait for bytes at once: by what the probe found, not by what was asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.limits import MAX_FUSE_THREADS
from tests.support.door import BUCKET, need_mount
from tests.support.held_files import HeldFiles, held_files
from tests.support.service import ROOT, Service
from tests.support.waits import WAIT_S, eventually

pytestmark = pytest.mark.mount


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HeldFiles]:
    need_mount()
    with held_files(tmp_path) as made:
        yield made
        made.let_go()


def hold(service: Service, path: Path, held: Path, size_bytes: int) -> None:
    """Make the bytes of a sealed file those of a held one; it has a size of its own, by which its slot is found."""
    slots = [slot for slot in service.data.rglob("slots/????????") if slot.stat().st_size == size_bytes]
    assert len(slots) == 1, f"{path} has the slots {slots}"
    slots[0].rename(slots[0].with_name(f"aside-{slots[0].name}"))
    slots[0].symlink_to(held)


def read(path: Path, found: list[int]) -> None:
    """Past the page cache, where the bytes may be."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    found.append(len(os.pread(descriptor, 100, 0)))
    os.close(descriptor)


@pytest.mark.parametrize("asked", ["auto", "passthrough", "native"])
def test_reads_are_copied_side_by_side_where_there_is_no_passthrough(asked: str, files: HeldFiles) -> None:
    """While MAX_FUSE_THREADS - 1 readers wait for their bytes, others are answered."""
    service = Service(mode=asked)
    refused = f"{ROOT / 'tests/support/refused'}{os.pathsep}{ROOT}"
    service.environment = {} if asked == "native" else {"PYTHONPATH": refused}
    readers: list[threading.Thread] = []
    found: list[int] = []
    try:
        service.start()
        assert ", native" in service.log(), service.log()
        bucket = service.mount / BUCKET
        bucket.mkdir()
        for number in range(1, MAX_FUSE_THREADS):
            path, size_bytes = bucket / str(number), 100_000 + number
            path.write_bytes(bytes(size_bytes))
            eventually(lambda path=path: os.getxattr(path, "user.kvfs.state") == b"sealed", "sealed")
            hold(service, path, files.path(number), size_bytes)
            readers.append(threading.Thread(target=read, args=(path, found), daemon=True))
            readers[-1].start()
            files.held(number)
            other = threading.Thread(target=os.path.exists, args=(bucket / f"other-{number}",), daemon=True)
            other.start()
            other.join(WAIT_S)
            assert not other.is_alive(), f"{number} readers wait, and a lookup with them"
        files.let_go()
        for reader in readers:
            reader.join(WAIT_S)
        assert found == [100] * len(readers)
    finally:
        files.let_go()
        service.close()
