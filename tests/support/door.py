"""The `door` fixture: a fresh writable directory inside a bucket, on the mount or on a plain directory.

`KVFS_TEST_PATH=dir` runs the path tests on a plain tmpfs directory, which is the POSIX truth that the mount
is held to (an absolute path there uses that directory). Otherwise each test runs on the real service
in every mode that `KVFS_TEST_MODES` names (by default all): one service per test module and mode.

Import `door` and `mode_service` into a test module, or take them from `tests/conftest.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.support.service import MODES, Service

TEST_PATH: Final = os.environ.get("KVFS_TEST_PATH", "")
ON_DIRECTORY: Final = TEST_PATH != ""
TEST_MODES: Final = ["dir"] if ON_DIRECTORY else os.environ.get("KVFS_TEST_MODES", ",".join(MODES)).split(",")
BUCKET: Final = "bucket"
HANG_S: Final = 90.0
"""After this long in one test the service is killed, which ends every call that hangs on it; below
pytest's own timeout, whose signal does not reach a call that waits for a FUSE answer."""


@dataclass(frozen=True)
class Door:
    """Where a test works."""

    path: Path
    """A fresh directory in a bucket, mode 0755."""
    mode: str
    """passthrough, native or plain; `dir` for the plain directory."""
    service: Service | None

    def need_service(self) -> Service:
        """The service, or skip: for what a plain directory does not have."""
        if self.service is None:
            pytest.skip("only on the service")
        return self.service


def need_mount() -> None:
    """Skip where nothing can be mounted."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")


@pytest.fixture(scope="module", params=TEST_MODES)
def mode_service(request: pytest.FixtureRequest) -> Iterator[Service | None]:
    """One service per module and mode; None for the plain directory."""
    if ON_DIRECTORY:
        yield None
        return
    need_mount()
    with Service(mode=request.param) as service:
        (service.mount / BUCKET).mkdir(mode=0o755)
        yield service


@pytest.fixture
def door(mode_service: Service | None) -> Iterator[Door]:
    """A fresh directory. Fails the test when the service logged an exception or died meanwhile."""
    if mode_service is None:
        parent = "/dev/shm" if TEST_PATH == "dir" else TEST_PATH
        path = Path(tempfile.mkdtemp(prefix="door-", dir=parent))
        path.chmod(0o755)
        yield Door(path, "dir", None)
        shutil.rmtree(path)
        return
    if mode_service.running.poll() is not None:
        mode_service.restart()
    watchdog = threading.Timer(HANG_S, mode_service.kill)
    watchdog.daemon = True
    watchdog.start()
    known = mode_service.complaints()
    try:
        path = Path(tempfile.mkdtemp(prefix="door-", dir=mode_service.mount / BUCKET))
        path.chmod(0o755)
        yield Door(path, mode_service.mode, mode_service)
        shutil.rmtree(path)
    finally:
        watchdog.cancel()
        watchdog.join()
    assert mode_service.running.poll() is None, f"the service died\n{mode_service.log()}"
    assert mode_service.complaints() == known
