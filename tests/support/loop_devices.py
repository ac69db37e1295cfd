"""Block devices of a test: loop devices over files of its own, to be cut, grown, copied and damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class LoopDevice:
    """One loop device, and the file behind it."""

    path: Path
    file: Path

    def resize(self, size_bytes: int) -> None:
        """Have the device be so large."""
        os.truncate(self.file, size_bytes)
        _losetup("--set-capacity", str(self.path))

    def write(self, at: int, data: bytes) -> None:
        """Write past who uses the device, durably."""
        with self.path.open("r+b", buffering=0) as device:
            os.pwrite(device.fileno(), data, at)
            os.fsync(device.fileno())


MakeLoop = Callable[..., LoopDevice]
"""Takes the bytes of a new device, or the `file` that it is to show."""


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[MakeLoop]:
    """Make loop devices; skip where that is not allowed."""
    if not has_loop_devices():
        pytest.skip("needs root, /dev/loop-control and losetup")
    with ExitStack() as made:

        def make(size_bytes: int = 0, *, file: Path | None = None) -> LoopDevice:
            if file is None:
                file = tmp_path / f"disk{len(list(tmp_path.glob('disk*')))}"
                with file.open("xb") as new:
                    os.truncate(new.fileno(), size_bytes)
            path = _losetup("--find", "--show", "--direct-io=on", str(file))
            made.callback(_losetup, "--detach", path)
            return LoopDevice(Path(path), file)

        yield make


def has_loop_devices() -> bool:
    return os.geteuid() == 0 and os.path.exists("/dev/loop-control") and shutil.which("losetup") is not None


def _losetup(*arguments: str) -> str:
    done = subprocess.run(["losetup", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"losetup {arguments}: {done.stderr}"
    return done.stdout.strip()
