"""How many uploads an owner may have: counted without a look at all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import trio

from gateway.call.upload_counts import UploadCounts
from gateway.protocol.errors import S3Error
from kvfs import limits


@dataclass
class Upload:
    owner: str


@dataclass
class Records:
    """The uploads that there are, and how often they were looked at."""

    uploads: list[Upload] = field(default_factory=list)
    looks: int = 0

    async def all(self) -> list[Upload]:
        self.looks += 1
        await trio.lowlevel.checkpoint()
        return list(self.uploads)


async def test_beginning_looks_at_the_records_once(autojump_clock: trio.testing.MockClock) -> None:
    records = Records([Upload("main")] * 100)
    counts = UploadCounts(records.all)
    for _ in range(1000):
        await counts.begin("main")
    assert records.looks == 1


async def test_an_owner_at_the_limit_shuts_no_other_out(autojump_clock: trio.testing.MockClock) -> None:
    records = Records([Upload("main")] * (limits.MAX_UPLOADS - 1))
    counts = UploadCounts(records.all)
    await counts.begin("main")
    records.uploads.append(Upload("main"))
    for _ in range(50):
        with pytest.raises(S3Error, match="main has 10000 uploads"):
            await counts.begin("main")
    assert records.looks == 1
    await counts.begin("other")
    await trio.sleep(limits.UPLOADS_LOOK_S)
    del records.uploads[100:]
    await counts.begin("main")
    assert records.looks == 2
