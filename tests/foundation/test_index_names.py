"""Listings and renames of the name index one by one, and the names that it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvfs.errors import CrossDevice, InvalidRequest, LimitExceeded, NameTooLong, NotEmpty
from kvfs.index.names import ListEntry, NameIndex
from kvfs.index.tree import NameScan
from kvfs.limits import MAX_LIST_ENTRIES
from tests.support.small_index import index, row

__all__ = ["index"]


class Steps:
    """Counts how often a listing moves its cursor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("seek", "step"):
            monkeypatch.setattr(NameScan, name, self._counted(getattr(NameScan, name)))

    def _counted(self, method: Callable[..., bool]) -> Callable[..., bool]:
        def move(*args: object) -> bool:
            self.count += 1
            return method(*args)

        return move


def test_a_listing_costs_its_entries_and_not_its_keys(
    index: NameIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in range(20):
        for file in range(100):
            index.put(b"b", b"d%02d/%03d" % (directory, file), row())
    steps = Steps(monkeypatch)
    page = index.list(b"b", delimiter=b"/", limit=10)
    assert page.entries == [ListEntry(b"d%02d/" % number, None) for number in range(10)]
    assert page.truncated
    assert steps.count <= 11


def test_a_prefix_inside_a_common_prefix_is_skipped(index: NameIndex) -> None:
    for key in (b"a/b", b"a/d", b"b"):
        index.put(b"b", key, row())
    assert [e.name for e in index.list(b"b", after=b"a/c", delimiter=b"/").entries] == [b"b"]
    assert [e.name for e in index.list(b"b", after=b"a", delimiter=b"/").entries] == [b"a/", b"b"]
    assert [e.name for e in index.list(b"b", after=b"a/c").entries] == [b"a/d", b"b"]


def test_a_delimiter_of_the_highest_byte_is_skipped(index: NameIndex) -> None:
    for key in (b"a\xff\xffb", b"a\xff\xffc", b"b", b"\xff\xff", b"\xff\xffz"):
        index.put(b"b", key, row())
    index.put(b"c", b"k", row())
    listed = [entry.name for entry in index.list(b"b", delimiter=b"\xff\xff").entries]
    assert listed == [b"a\xff\xff", b"b", b"\xff\xff"]


def test_buckets_that_are_prefixes_of_each_other_stay_apart(index: NameIndex) -> None:
    index.put(b"a", b"z", row(1))
    index.put(b"ab", b"a", row(2))
    assert [entry.name for entry in index.list(b"a").entries] == [b"z"]
    assert not index.has_prefix(b"a", b"a")


def test_rename_onto_itself_keeps_the_row(index: NameIndex) -> None:
    index.put(b"b", b"k", row(3))
    assert index.rename(b"b", b"k", b"b", b"k") == (row(3), None)
    assert index.get(b"b", b"k") == row(3)
    assert [entry.name for entry in index.list(b"b").entries] == [b"k"]


def test_a_failed_rename_moves_nothing(index: NameIndex) -> None:
    index.put(b"b", b"from/a", row(1))
    index.put(b"b", b"from/b", row(2))
    index.put(b"b", b"to/b", row(3))
    with pytest.raises(NotEmpty, match="to/b"):
        index.rename_prefix(b"b", b"from/", b"b", b"to/", limit=10)
    with pytest.raises(CrossDevice, match="more than 1 keys"):
        index.rename_prefix(b"b", b"from/", b"b", b"elsewhere/", limit=1)
    with pytest.raises(NameTooLong, match="1024"):
        index.rename_prefix(b"b", b"from/", b"b", b"x" * 1024, limit=10)
    assert [entry.name for entry in index.list(b"b").entries] == [b"from/a", b"from/b", b"to/b"]


def test_a_directory_may_move_into_its_own_name(index: NameIndex) -> None:
    """Flat names allow what paths do not; the rows must not overwrite each other on the way."""
    for key in (b"a/a/x", b"a/x"):
        index.put(b"b", key, row(len(key)))
    assert index.rename_prefix(b"b", b"a/", b"b", b"", limit=10) == [(b"a/a/x", b"a/x"), (b"a/x", b"x")]
    assert index.get(b"b", b"a/x") == row(5)


@pytest.mark.parametrize(
    ("bucket", "key", "error", "words"),
    [
        (b"", b"k", InvalidRequest, "bucket name is empty"),
        (b"b" * 64, b"k", NameTooLong, "64 bytes, the limit is 63"),
        (b"b\0", b"k", InvalidRequest, "NUL"),
        (b"b", b"", InvalidRequest, "empty"),
        (b"b", b"k" * 1025, NameTooLong, "1025 bytes, the limit is 1024"),
        (b"b", b"k\0", InvalidRequest, "NUL"),
    ],
)
def test_bad_names_are_named(
    index: NameIndex, bucket: bytes, key: bytes, error: type[Exception], words: str
) -> None:
    for call in (index.get, index.remove, lambda b, k: index.put(b, k, row())):
        with pytest.raises(error, match=words):
            call(bucket, key)


def test_a_page_over_the_limit_is_refused(index: NameIndex) -> None:
    with pytest.raises(LimitExceeded, match=str(MAX_LIST_ENTRIES)):
        index.list(b"b", limit=MAX_LIST_ENTRIES + 1)
