"""Fixtures that test modules of several layers share."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.crash_harness import fast_directory
from tests.support.door import door, mode_service

__all__ = ["door", "fast_path", "mode_service"]

# An example of 0.2 s, Hypothesis's own deadline, says how busy the machine is. What checks a change says the same
# twice: in CI the examples of a test are those of its text, elsewhere others in each run.
settings.register_profile("random", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "random")


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory where a sync costs little, that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir=fast_directory()))
    yield path
    shutil.rmtree(path)
