"""Times of many directories: kept in memory up to a limit, and written with few transactions."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs import limits
from kvfs.index.environment import NameEnvironment
from kvfs.index.names import NameIndex
from tests.support.stores import BUCKET, small_store
from tiers.model.objects import Attributes, Name
from tiers.store.directory_times import DirectoryTimes

COUNT = 5_000


def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the transactions that write, from now on: in the last place of the list."""
    counts, write = [0], NameEnvironment.write

    def count(self: NameEnvironment, *arguments: object, **named: object) -> object:
        counts[0] += 1
        return write(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(NameEnvironment, "write", count)
    return counts


def names(count: int = COUNT) -> list[Name]:
    return [Name(BUCKET, b"directory-%05d/" % number) for number in range(count)]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """An index with the markers of COUNT directories."""
    with small_store(tmp_path / "data") as store:
        for name in names():
            store.make_directory(name, Attributes())
    return tmp_path / "data/index"


def test_a_stop_writes_the_times_of_many_directories_at_once(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NameIndex.open(index) as opened:
        times = DirectoryTimes(opened)
        for number, name in enumerate([*names(), Name(BUCKET, b"unmarked/"), Name(BUCKET, b"")]):
            times.set(name, 10**18 + number, 10**18)
        counts = written(monkeypatch)
        times.write()
        assert 1 < counts[0] <= COUNT // limits.MAX_LIST_ENTRIES + 3
        rows = [opened.get(name.bucket, name.key) for name in names()]
        assert [row and row.mtime_ns for row in rows] == [10**18 + number for number in range(COUNT)]
        assert opened.get(BUCKET, b"unmarked/") is None
        bucket = opened.get_bucket(BUCKET)
        assert bucket is not None
        assert bucket.mtime_ns == 10**18 + COUNT + 1


def test_with_more_than_are_kept_the_longest_unchanged_are_written(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_DIRECTORY_TIMES", 1_000)
    with NameIndex.open(index) as opened:
        times, counts = DirectoryTimes(opened), written(monkeypatch)
        for number, name in enumerate(names()):
            times.touch(name, 2 * 10**18 - COUNT + number)
            assert len(times._times) <= limits.MAX_DIRECTORY_TIMES
        assert counts[0] <= COUNT // limits.DIRECTORY_TIMES_AT_ONCE
        rows = [opened.get(name.bucket, name.key) for name in names()[: COUNT - 1_000]]
        assert [row and row.mtime_ns for row in rows] == [2 * 10**18 - COUNT + at for at in range(len(rows))]
        assert list(times._times) == names()[-len(times._times) :]
