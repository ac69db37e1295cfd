"""What all tests of the gateway share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_sockets_left() -> Iterator[None]:
    """Collect the sockets that botocore left: a later module's test may take their warnings for errors of its own."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
