"""The HBM tier has the ports of a tier as far as they need no descriptors: its bytes are in its clients' mappings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.conformance.tier_suite import ExtentSuite, MakeTier
from tests.support.device_pools import MappedPool, pool


@pytest.fixture
def make_tier() -> Iterator[MakeTier]:
    with ExitStack() as stack:

        def make(capacity_bytes: int, max_slots: int) -> MappedPool:
            return stack.enter_context(pool(capacity_bytes, max_slots=max_slots))

        yield make


class TestHbmTier(ExtentSuite):
    """What needs no descriptors."""
