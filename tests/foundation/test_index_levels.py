"""One level of a path in the name index, walked natively, against the same from plain listings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import paths
from kvfs.errors import Corrupt
from kvfs.index.levels import unmarked_ino
from kvfs.index.names import NameIndex
from kvfs.index.rows import DIRECTORY, LINK, NameRow
from kvfs.limits import MIB
from tests.support.seeds import SEED

BUCKET = b"b"
PIECES = (
    b"a",
    b"b",
    b"c",
    b"-",
    b".",
    b"..",
    b"a-",
    b"a.b",
    b"",
    b"\xc3\xa9",
    b"l" * 255,
    b"l" * 256,
    b"p" * 200,
)


def row(number: int, *, directory: bool = False) -> NameRow:
    """The row of a directory, or where the number is odd of a symbolic link."""
    link = number % 2 == 1 and not directory
    flags = DIRECTORY if directory else LINK if link else 0
    target = b"there" if link else b""
    return NameRow(number, 10_000 + number, 5, 0o644, 0, 0, 1, 1, number, flags, target=target)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[NameIndex]:
    with NameIndex.open(tmp_path / "names", map_size_bytes=4 * MIB) as opened:
        yield opened


def expected(index: NameIndex, prefix: bytes) -> dict[bytes, tuple[int, int]]:
    """Tail -> (inode number, object id), from whole keys."""
    found: dict[bytes, tuple[int, int]] = {}
    for _, key, each in index.rows():
        assert each is not None
        if not key.startswith(prefix) or key == prefix:
            continue
        tail = key[len(prefix) :]
        directory, slash, below = tail.partition(b"/")
        if not directory or not paths.is_path(prefix + directory):
            continue
        if not slash:
            found[tail] = (each.ino, each.object_id)
        elif below:
            found.setdefault(directory + b"/", (unmarked_ino(BUCKET, prefix + directory + b"/"), 0))
        else:
            found[directory + b"/"] = (each.ino, 0)
    return {tail: value for tail, value in found.items() if tail + b"/" not in found}


def walked(index: NameIndex, prefix: bytes, limit: int) -> dict[bytes, tuple[int, int]]:
    found: dict[bytes, tuple[int, int]] = {}
    after: bytes | None = b""
    while after is not None:
        page = index.level(BUCKET, prefix=prefix, after=after, limit=limit)
        assert len(page.entries) <= limit
        assert page.last is None or page.last > after
        for tail, ino, object_id, doubtful, is_link in page.entries:
            assert tail not in found
            assert is_link == (object_id % 2 == 1)
            if not (doubtful and index.has_prefix(BUCKET, prefix + tail + b"/")):
                found[tail] = (ino, object_id)
        after = page.last
    assert list(found) == sorted(found)
    return found


@pytest.mark.seeded
@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_a_level_is_what_whole_keys_say(index: NameIndex, seed: int) -> None:
    """With names beyond LMDB's keys, keys that are no path, and files behind directories of their name."""
    order = random.Random(seed)
    for number in range(1, 300):
        key = b"/".join(order.choices(PIECES, k=order.randint(1, 5))) + b"/" * order.randint(0, 1)
        if key and len(key) <= 1024:
            index.put(BUCKET, key, row(number, directory=key.endswith(b"/")))
    prefixes = [b"", b"a/", b"b/", b"a/b/", b"l" * 255 + b"/", b"p" * 200 + b"/" + b"p" * 200 + b"/", b"no/"]
    for prefix in prefixes:
        for limit in (1, 2, 7, 1000):
            assert walked(index, prefix, limit) == expected(index, prefix), (seed, prefix, limit)


def test_a_page_is_bounded_by_the_names_looked_at(index: NameIndex) -> None:
    """Also where none of them is shown: all of these have directories behind them, or are no path."""
    for number in range(100):
        index.put(BUCKET, b"%03d" % number, row(number))
        index.put(BUCKET, b"%03d/x" % number, row(number))
    page = index.level(BUCKET, prefix=b"", after=b"", limit=10)
    assert [tail for tail, *_ in page.entries] == [b"%03d/" % number for number in range(5)]
    assert page.last == b"004/"


def test_a_subdirectory_is_passed_with_one_look(index: NameIndex) -> None:
    for number in range(1000):
        index.put(BUCKET, b"d/%04d" % number, row(number))
    index.put(BUCKET, b"e", row(2000))
    page = index.level(BUCKET, prefix=b"", after=b"", limit=2)
    assert [tail for tail, *_ in page.entries] == [b"d/", b"e"]
    assert page.last is None


def test_a_damaged_row_is_an_error(index: NameIndex) -> None:
    index.put(BUCKET, b"a", row(1))
    index.put(BUCKET, b"b", row(2))
    stored = index.environment.read(lambda txn: txn.get(b"b\0b", db=index._tree.heads))
    assert stored is not None
    damages = (
        stored[:-1] + bytes([stored[-1] ^ 1]),
        stored[:20],
        b"",
        b"\2" + stored[1:],
        stored[:40] + b"x" + stored[41:],
    )
    for damaged in damages:
        index.environment.write(lambda txn, data=damaged: txn.put(b"b\0b", data, db=index._tree.heads))
        with pytest.raises(Corrupt):
            index.level(BUCKET, prefix=b"", after=b"", limit=10)
    index.environment.write(lambda txn: txn.put(b"b\0b", stored, db=index._tree.heads))
    assert len(index.level(BUCKET, prefix=b"", after=b"", limit=10).entries) == 2


def test_a_row_with_much_metadata_is_checked_whole(index: NameIndex) -> None:
    big = NameRow(1, 2, 5, 0o644, 0, 0, 1, 1, 1, 0, user_metadata=b"m" * 8000)
    index.put(BUCKET, b"a", big)
    assert index.level(BUCKET, prefix=b"", after=b"", limit=10).entries == [(b"a", 2, 1, False, False)]
