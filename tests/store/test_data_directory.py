"""The data directory: one process at a time, how it was left, and formats that are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.errors import ConfigError, FormatMismatch, StoreLocked
from tests.support.stores import keys, small_store
from tiers.data_dir import FORMAT_VERSION, open_home

OPENER = (
    "import sys; from pathlib import Path; from tiers.data_dir import open_home; open_home(Path(sys.argv[1]))"
)


def test_a_second_process_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    home = open_home(tmp_path / "data")
    ran = subprocess.run(
        [sys.executable, "-c", OPENER, str(tmp_path / "data")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "StoreLocked" in ran.stderr
    assert f"{tmp_path / 'data'} is in use" in ran.stderr
    assert f"process {os.getpid()})" in ran.stderr
    home.close()
    subprocess.run([sys.executable, "-c", OPENER, str(tmp_path / "data")], check=True)


def test_a_directory_knows_its_store_and_how_it_was_left(tmp_path: Path) -> None:
    first = open_home(tmp_path)
    assert first.clean
    with pytest.raises(StoreLocked):
        open_home(tmp_path)
    first.begin("")
    first.close(clean=False)
    second = open_home(tmp_path)
    assert not second.clean
    assert second.store_id == first.store_id
    second.begin(first.start)
    second.close()
    third = open_home(tmp_path)
    assert third.clean
    third.begin(second.start)
    assert json.loads((tmp_path / "format.json").read_text())["clean"] is False  # while it is in use
    third.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            json.dumps({"format": FORMAT_VERSION + 1, "store_id": "00" * 16, "clean": True}),
            f"says data format {FORMAT_VERSION + 1}.* reads up to {FORMAT_VERSION}",
        ),
        (json.dumps({"format": 1, "store_id": "00" * 15, "clean": True}), "15 bytes: it must be 16"),
        (json.dumps({"format": 1, "store_id": "zz", "clean": True}), "not a kvfs format file"),
        (json.dumps({"format": 1, "store_id": 5, "clean": True}), "not a kvfs format file"),
        ('{"format": Infinity, "store_id": "00", "clean": true}', "not a kvfs format file"),
        (json.dumps({"format": 1}), "not a kvfs format file"),
        ("[]", "not a kvfs format file"),
        ("", "not a kvfs format file"),
        ("\udcff", "not a kvfs format file"),
    ],
)
def test_a_foreign_format_is_refused_and_left_as_it_is(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "format.json"
    file.write_text(content, errors="surrogateescape")
    before = file.read_bytes()
    for _ in range(2):  # the lock is free again
        with pytest.raises(FormatMismatch, match=message) as caught:
            open_home(tmp_path)
        assert str(file) in str(caught.value)
    assert file.read_bytes() == before


def test_a_store_that_did_not_open_leaves_its_directory_free(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError):
            small_store(tmp_path / "data", backing="paper")
    with small_store(tmp_path / "data") as store:
        assert keys(store) == []
