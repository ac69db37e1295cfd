"""The places of measurements: private tmpfs mounts, and a service of their own or one that runs.

Responsibility: make these places and leave nothing behind, also after a failure. Concurrency: one thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from kvfs.config.sizes import format_size
from kvfs.errors import DeviceMissing, InvalidRequest, KvfsError
from kvfs.limits import MIB, STOP_WAIT_S

T = TypeVar("T")
SIZE_BYTES = 768 * MIB
"""The size of each tmpfs and of the service's DRAM tier."""
LEAST_BYTES = 256 * MIB
"""The least size of a measured service: twice the working set."""


@dataclass(frozen=True, slots=True)
class Places:
    """Directories to measure in."""

    mount: Path
    """A bucket on the mount."""
    mode: str
    """The mode of that mount."""
    backing: Path
    """A tmpfs of the kind that lies under the mount (`huge=within_size`)."""
    plain: Path
    """A tmpfs with default pages."""


class Once(Generic[T]):
    """A place that is opened when it is first asked for, and closed with `stack`."""

    def __init__(self, opened: Callable[[], AbstractContextManager[T]], stack: ExitStack) -> None:
        self._opened, self._stack = opened, stack
        self._place: T | None = None
        self._error: Exception | None = None

    def get(self) -> T:
        """Return the place. Raises what opening it raised, also when it is asked for again."""
        if self._error is not None:
            raise self._error
        if self._place is None:
            try:
                self._place = self._stack.enter_context(self._opened())
            except Exception as error:
                self._error = error
                raise
        return self._place


@contextmanager
def open_places(at: str | None) -> Iterator[Places]:
    """Make the places on the mount `at` of a running service; None starts a service, and stops it at the end."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfs-bench-")))
        backing = stack.enter_context(tmpfs(home / "backing", "within_size"))
        plain = stack.enter_context(tmpfs(home / "plain", "never"))
        if at is None:
            # The measurements here are of memory; the device has its own.
            mount, mode = stack.enter_context(serve(home, "--dram", str(SIZE_BYTES)))
        else:
            mount, mode = Path(at), "a running service"
        yield Places(stack.enter_context(_bucket(mount)), mode, backing, plain)


@contextmanager
def tmpfs(where: Path, huge: str, size_bytes: int = SIZE_BYTES) -> Iterator[Path]:
    where.mkdir()
    options = f"size={size_bytes},huge={huge},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "kvfs-bench", str(where)], capture_output=True, text=True
    )
    if done.returncode:
        raise DeviceMissing(
            f"bench: the baseline needs a tmpfs of its own, and mounting it failed: {done.stderr.strip()}"
        )
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@contextmanager
def serve(home: Path, *options: str) -> Iterator[tuple[Path, str]]:
    """Run a service in `home`, without NVMe unless `options` say so; yield its mount and the mode of that."""
    mount = home / "mnt"
    command = [sys.executable, "-m", "kvfs", "serve", "--mount", str(mount), "--data", str(home / "data")]
    command += ["--no-keep", "--nvme", "0", "--log-level", "warning", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield mount, wait_ready(process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(2 * STOP_WAIT_S)


def wait_ready(process: subprocess.Popen[str]) -> str:
    """Wait until the service is ready; return the mode of its mount, which it prints. Raises KvfsError."""
    assert process.stdout is not None
    mode = "unknown"
    for line in process.stdout:
        if line.startswith("mount "):
            mode = line.rpartition(",")[2].strip()
        if line.startswith("missing "):
            print(f"bench: {line.strip()}", file=sys.stderr)
        if line.strip() == "ready":
            return mode
    raise KvfsError(f"bench: the service ended with code {process.wait()} before it was ready")


@contextmanager
def _bucket(mount: Path) -> Iterator[Path]:
    found = os.statvfs(mount)
    capacity_bytes = found.f_blocks * found.f_frsize
    if capacity_bytes < LEAST_BYTES:
        raise InvalidRequest(
            f"bench: the service at {mount} has {format_size(capacity_bytes)}, less than the "
            f"{format_size(LEAST_BYTES)} that keep the working set from being evicted"
        )
    bucket = mount / f"bench-{os.getpid()}"
    bucket.mkdir()
    try:
        yield bucket
    finally:
        for file in list(bucket.iterdir()):
            file.unlink()
        bucket.rmdir()
