"""The cold tier has the port of a lower tier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvfs.limits import MIB
from tests.cold.test_cold_tier import running, short_waits, tier_of
from tests.conformance.lower_suite import OBJECT_BYTES, Lower, LowerSuite
from tests.support.cold import FolderBucket, options
from tests.support.nvme_stores import put
from tests.support.waits import until
from tiers.model.objects import Name

__all__ = ["short_waits"]


class TestColdTier(LowerSuite):
    """Everything in the suite."""

    @pytest.fixture
    async def lower(self, tmp_path: Path) -> AsyncIterator[Lower]:
        remote = options(FolderBucket(tmp_path / "bucket"), capacity_bytes=2 * MIB)
        async with running(tmp_path / "data", remote) as store:
            tier = tier_of(store)

            async def write(number: int) -> None:
                info = put(store, Name(b"b", b"%d" % number), OBJECT_BYTES)
                await until(lambda: info.key.digest in tier)

            yield Lower(tier, write, lambda: len(list(tier.expendable())))
