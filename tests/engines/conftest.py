"""What the tests with real engines share: the engines' python and a bucket on the mount."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.door import BUCKET, ON_DIRECTORY, TEST_PATH, need_mount
from tests.support.service import ROOT, Service


@pytest.fixture(scope="module")
def engine_python() -> str:
    python = os.environ.get("KVFS_ENGINES_PYTHON", str(ROOT / ".venv-engines/bin/python"))
    if not os.path.exists(python):
        pytest.skip("no engines' environment: make test-engines")
    return python


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvfs-engines-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def bucket(work: Path) -> Iterator[Path]:
    """A bucket on the mount."""
    if ON_DIRECTORY:
        plain = Path(tempfile.mkdtemp(dir="/dev/shm" if TEST_PATH == "dir" else TEST_PATH))
        yield plain
        shutil.rmtree(plain)
        return
    need_mount()
    with Service() as service:
        path = service.mount / BUCKET
        path.mkdir()
        yield path
