"""The files that repeat what has ended: when more has ended than they hold, and when they have another size."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs import limits
from kvfs.formats import ENDINGS_PAGE_BYTES, EndingKind
from tiers.device.threads import thread_device
from tiers.log.ending_notes import EndingNotes
from tiers.log.ending_pages import PER_PAGE, Ending
from tiers.log.endings import FILES, Endings

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
    assert f"room for {FILE_HOLDS // 2} endings" in caplog.text
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


async def test_what_is_written_again_has_not_ended_and_may_end_once_more(tmp_path: Path) -> None:
    """Two objects were evicted whose segment is not freed; one of them is written again, and then refused."""
    device = thread_device(2)
    endings = Endings(device, tmp_path, bytes(16), lambda: [(1, 100)])
    await endings.begin()
    again = {7: 20}
    notes = EndingNotes(endings, again.get)
    notes.evicted[0] = [Ending(number, 5, 0, EndingKind.NAME) for number in (7, 8)]

    async def ended(next_sequence: int) -> dict[int, int]:
        await notes.write_unlogged([], next_sequence)
        return (await endings.load()).names

    assert await ended(30) == {7: 20, 8: 30}
    again.clear()
    assert await ended(40) == {7: 40, 8: 30}
    assert not any(notes.evicted.values())
    assert await ended(50) == {7: 40, 8: 30}
    await endings.finish()
    endings.close_files()
    await device.aclose()


async def _ended(directory: Path, count: int, capacity_bytes: int) -> int:
    """Start with a tier of this capacity and end so many objects more; how many had ended before."""
    device = thread_device(2)
    endings = Endings(device, directory, bytes(16), lambda: [(1, 1 << 30)])
    endings.size_for(capacity_bytes)
    known = len((await endings.load()).objects)
    await endings.begin()
    for number in range(known + 1, known + count + 1):
        endings.note(Ending(number, 1, 1 << 20, EndingKind.OBJECT, 0))
    while endings.has_pending:
        await endings.write()
    await endings.finish()
    endings.close_files()
    await device.aclose()
    return known


async def test_files_take_the_size_of_the_tier_and_keep_what_they_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def sizes() -> set[int]:
        return {(tmp_path / name).stat().st_size for name in FILES}

    small, large = 16 * limits.MIB, 64 * limits.MIB
    assert await _ended(tmp_path, FILE_HOLDS // 2, small) == 0
    assert sizes() == {limits.MIN_ENDINGS_BYTES}
    assert await _ended(tmp_path, FILE_HOLDS, large) == FILE_HOLDS // 2
    assert sizes() == {4 * limits.MIN_ENDINGS_BYTES}
    assert await _ended(tmp_path, 0, large) == FILE_HOLDS + FILE_HOLDS // 2
    assert not caplog.records
    assert await _ended(tmp_path, 0, small) == FILE_HOLDS + FILE_HOLDS // 2
    assert sizes() == {limits.MIN_ENDINGS_BYTES}
    assert await _ended(tmp_path, 0, small) == FILE_HOLDS // 2
