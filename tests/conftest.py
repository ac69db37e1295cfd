"""Fixtures that test modules of several layers share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_harness import fast_directory
from tests.support.door import door, mode_service

__all__ = ["door", "fast_path", "mode_service"]


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory where a sync costs little, that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir=fast_directory()))
    yield path
    shutil.rmtree(path)
