"""A damaged name index, or another one: names are missing, all of them if need be, and none is wrong."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvfs.errors import FormatMismatch
from kvfs.index import environment
from kvfs.index.names import NameIndex
from tests.support.damage import flip
from tests.support.killed_stores import crash, filled, names_of, open_again
from tests.support.seeds import SEED, rounds
from tests.support.stores import BUCKET, put


@pytest.mark.parametrize(
    "damage", ["gone", "empty", "truncated", "garbage", "another store's", "an older copy"]
)
def test_an_index_that_cannot_be_believed_is_dropped(
    data: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    if damage == "an older copy":
        filled(data)
        shutil.copytree(data / "index", data.parent / "copy")
    filled(data)
    index = data / "index/data.mdb"
    if damage == "gone":
        index.unlink()
    elif damage == "truncated":
        os.truncate(index, 8192)
    elif damage in ("another store's", "an older copy"):
        source = data.parent / "copy"
        if damage == "another store's":
            filled(data.parent / "second")
            source = data.parent / "second/index"
        shutil.copy(source / "data.mdb", index)
    else:
        index.write_bytes(b"" if damage == "empty" else b"no index" * 5000)
    with open_again(data) as store:
        assert names_of(store) == {}
        assert damage in ("gone", "empty") or "starting with an empty one" in caplog.text
        put(store, b"key", b"data")
        crash(store)
    with open_again(data) as store:
        assert names_of(store) == {b"key": b"data"}


@pytest.mark.parametrize("row", [b"\1\0\0\0\0\0\x10\0", b"\3" + bytes(7), b""])
def test_a_damaged_row_of_the_format_is_no_other_format(data: Path, row: bytes) -> None:
    contents = filled(data)
    with lmdb.open(str(data / "index"), max_dbs=8) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn=txn)
        stored = txn.get(b"format", db=meta)
        assert stored is not None
        txn.put(b"format", row + stored[len(row) :] if row else b"", db=meta)
    with open_again(data) as store:
        assert names_of(store) == contents


@pytest.mark.seeded
def test_flipped_bits_of_the_index_cost_names_and_never_make_wrong_ones(data: Path) -> None:
    """Not even a crash: LMDB reads wherever a damaged page points to."""
    chance = random.Random(SEED)
    contents = filled(data)
    index = data / "index/data.mdb"
    content = index.read_bytes().rstrip(b"\0")
    os.truncate(index, -(-len(content) // 4096) * 4096)  # it is a hole from there on, which a copy would fill
    shutil.copytree(data, data.parent / "good")
    kept = dropped = 0
    for _ in range(rounds(30, 60)):
        shutil.rmtree(data)
        shutil.copytree(data.parent / "good", data)
        for _ in range(chance.choice([1, 8, 200])):
            flip(index, chance.randrange(len(content)), chance)
        try:
            store = open_again(data)
        except FormatMismatch as error:
            assert "format" in str(error)  # noqa: PT017
            continue
        found = names_of(store)
        store.close()
        assert found.items() <= contents.items()
        kept, dropped = kept + len(found), dropped + len(contents) - len(found)
    assert kept
    assert dropped


def test_an_index_of_a_newer_version_is_left_alone(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FORMAT_VERSION", 2)
    contents = filled(data)
    monkeypatch.undo()
    with pytest.raises(FormatMismatch, match="format 2, this is format 1"):
        open_again(data)
    monkeypatch.setattr(environment, "FORMAT_VERSION", 2)
    with open_again(data) as store:
        assert names_of(store) == contents


def test_rows_that_changed_places_are_dropped(data: Path) -> None:
    """The bytes that they lead to are whole, but another object's."""
    contents = filled(data)
    index = NameIndex.open(data / "index")
    names = [BUCKET + b"\0" + key for key in (b"003", b"004")]

    def swap(txn: Any) -> None:
        first, second = [index._tree.get(txn, name) for name in names]
        assert first is not None
        assert second is not None
        index._tree.put(txn, names[0], second)
        index._tree.put(txn, names[1], first)

    index.environment.write(swap)
    index.close()
    del contents[b"003"], contents[b"004"]
    with open_again(data) as store:
        assert names_of(store) == contents


def test_pages_that_only_a_writer_would_trip_over_cost_nothing(data: Path) -> None:
    """Of every page, the place where its free room ends."""
    contents = filled(data)
    file = data / "index/data.mdb"
    pages = bytearray(file.read_bytes())
    for at in range(8192, len(pages), 4096):
        if pages[at + 10] == 2:
            pages[at + 14] ^= 64
    file.write_bytes(pages)
    with open_again(data) as store:
        assert names_of(store) == contents


def test_an_index_that_kills_its_reader_is_dropped(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(data)
    monkeypatch.setattr("tiers.recovery.index_check._walk", lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    with open_again(data) as store:
        assert names_of(store) == {}
