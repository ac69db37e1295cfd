"""Fixtures of tests that share one small service for each module and mode."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.door import BUCKET, TEST_MODES
from tests.support.service import Service
from tests.support.small_store import small_service, watched


@pytest.fixture(scope="module", params=TEST_MODES)
def small(request: pytest.FixtureRequest) -> Iterator[Service]:
    with small_service(request.param) as running:
        yield running


@pytest.fixture
def service(small: Service) -> Iterator[Service]:
    """The module's service, that must live and not complain."""
    known = small.complaints()
    with watched(small):
        yield small
    assert small.running.poll() is None, f"the service died\n{small.log()}"
    assert small.complaints() == known


@pytest.fixture
def bucket(service: Service) -> Iterator[Path]:
    """A directory of the bucket, for one test."""
    path = Path(tempfile.mkdtemp(dir=service.mount / BUCKET))
    yield path
    # Unlike shutil.rmtree, rm passes over what the tier has evicted since it was listed.
    subprocess.run(["rm", "-rf", "--", path], check=True)
