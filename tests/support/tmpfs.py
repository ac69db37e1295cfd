"""A tmpfs of one test, with its own size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfs.system import linux


@contextmanager
def private_tmpfs(point: Path, size_bytes: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    point.mkdir()
    linux.mount("kvfs-test", point, "tmpfs", 0, f"size={size_bytes}")
    try:
        yield point
    finally:
        linux.unmount(point, linux.MNT_DETACH)
