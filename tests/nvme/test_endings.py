"""The files that repeat what has ended, when more has ended than they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs import limits
from kvfs.formats import ENDINGS_PAGE_BYTES, EndingKind
from tiers.device.threads import thread_device
from tiers.log.ending_pages import PER_PAGE, Ending
from tiers.log.endings import Endings

FILE_HOLDS = limits.MIN_ENDINGS_BYTES // ENDINGS_PAGE_BYTES * PER_PAGE


async def test_more_endings_than_fit_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = thread_device(2)
    spans = [(1, 10 * FILE_HOLDS)]
    endings = Endings(device, tmp_path, bytes(16), lambda: spans)

    async def end(first: int, count: int) -> None:
        for number in range(first, first + count):
            endings.note(Ending(number, 1, 2 * FILE_HOLDS, EndingKind.OBJECT, 0))
        await endings.write()

    await endings.begin()
    for at in range(0, 4 * FILE_HOLDS, PER_PAGE):
        await end(at + 1, PER_PAGE)
    assert len(caplog.records) == 1
    assert f"{FILE_HOLDS // 2} fit" in caplog.text
    # Segments go, and with them what had to be repeated; later there is too much again.
    spans[:] = []
    for at in range(0, 2 * FILE_HOLDS, PER_PAGE):
        await end(at + 1, PER_PAGE)
    assert len(caplog.records) == 1
    spans[:] = [(1, 10 * FILE_HOLDS)]
    for at in range(0, 4 * FILE_HOLDS, PER_PAGE):
        await end(at + 1, PER_PAGE)
    assert len(caplog.records) == 2
    endings.close_files()
    await device.aclose()
