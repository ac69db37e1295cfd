"""The NVMe tier has the port of a lower tier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from kvfs.limits import MIB
from tests.conformance.lower_suite import OBJECT_BYTES, Lower, LowerSuite
from tests.support.nvme_stores import nvme_of, put, running
from tests.support.waits import WAIT_S
from tiers.model.objects import Name


class TestNvmeTier(LowerSuite):
    """Everything in the suite."""

    @pytest.fixture
    async def lower(self, tmp_path: Path) -> AsyncIterator[Lower]:
        async with running(tmp_path, nvme_bytes=12 * MIB) as store:
            store.create_bucket(b"b", uid=0, gid=0)
            nvme = nvme_of(store)

            async def write(number: int) -> None:
                info = put(store, Name(b"b", b"%d" % number), OBJECT_BYTES)
                with trio.fail_after(WAIT_S):
                    while not nvme.holds(info.object_id):
                        await nvme.log.queue.wait_popped()

            yield Lower(nvme, write, lambda: sum(map(nvme.holds, list(nvme.objects))))
