"""The file of the name index: full, of another format, foreign, cut off from its writer."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import pytest

from kvfs.errors import Corrupt, FormatMismatch, InvalidRequest, NoSpace
from kvfs.index import environment
from kvfs.index.names import NameIndex
from kvfs.limits import KIB
from tests.support.small_index import index, row

__all__ = ["index"]


def test_a_full_map_grows_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "MAX_NAME_MAP_BYTES", 512 * KIB)
    with NameIndex.open(tmp_path, map_size_bytes=64 * KIB) as index:
        large = row(user_metadata=bytes(4 * KIB))

        def fill() -> None:
            for number in range(1000):
                index.put(b"b", b"%04d" % number, large)

        with pytest.raises(NoSpace, match=str(512 * KIB)):
            fill()
        stored = len(list(index.encoded_rows()))
        assert 64 * KIB // len(large.encode()) < stored < 1000
        assert index.get(b"b", b"%04d" % (stored - 1)) == large


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FORMAT_VERSION", 2)
    NameIndex.open(tmp_path).close()
    monkeypatch.undo()
    with pytest.raises(FormatMismatch, match="format 2, this is format 1"):
        NameIndex.open(tmp_path)


def test_a_foreign_file_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not an index" * 1000)
    with pytest.raises(Corrupt, match=str(tmp_path)):
        NameIndex.open(tmp_path)


def test_the_index_survives_an_abrupt_end(tmp_path: Path) -> None:
    index = NameIndex.open(tmp_path)
    index.put(b"b", b"k", row(9))
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    with NameIndex.open(tmp_path / "copy") as copy:
        assert copy.get(b"b", b"k") == row(9)
    index.close()
    index.close()


def test_bad_map_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a map of 0 bytes"):
        NameIndex.open(tmp_path, map_size_bytes=0)


def test_lmdb_keys_are_as_long_as_the_format_says(index: NameIndex) -> None:
    assert index.environment._env.max_key_size() >= 511
    assert lmdb.version()[0] in (0, 1)
