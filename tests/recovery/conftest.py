"""Fixtures of tests of what a start takes over from DRAM."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.door import need_mount
from tiers.dram import tmpfs


@pytest.fixture(params=[pytest.param("tmpfs", marks=pytest.mark.mount), "directory"])
def backing(request: pytest.FixtureRequest) -> str:
    if request.param == "tmpfs":
        need_mount()
    return str(request.param)


@pytest.fixture
def data() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-adoption-"))
    yield base / "data"
    while tmpfs.is_mounted(base / "data/dram"):
        tmpfs.unmount(base / "data/dram")
    shutil.rmtree(base)
