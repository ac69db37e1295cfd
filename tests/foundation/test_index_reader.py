"""The name index, read by another process than the one that writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.errors import BucketNotFound
from kvfs.index.names import BucketRow, NameIndex, NameRow
from kvfs.index.reader import NameReader
from tests.support.service import ROOT

READER = """
import sys
from pathlib import Path
from kvfs.index.reader import NameReader
from kvfs.errors import BucketNotFound
with NameReader(Path(sys.argv[1])) as reader:
    for line in sys.stdin:
        command, _, key = line.strip().partition(" ")
        try:
            if command == "find":
                row = reader.find(b"b", key.encode()).row
                print("none" if row is None else row.object_id, flush=True)
            elif command == "list":
                print(*(entry.name.decode() for entry in reader.list(b"b", prefix=key.encode()).entries), flush=True)
            elif command == "buckets":
                print(*(row.name.decode() for row in reader.buckets()), flush=True)
            else:
                print(reader.bucket(key.encode()).mode, flush=True)
        except BucketNotFound:
            print("no bucket", flush=True)
"""


def row(identity: int) -> NameRow:
    return NameRow(identity, identity, 1, 0o644, 0, 0, 0, 0, identity, 0, b"", b"meta")


def bucket(mode: int = 0o755) -> BucketRow:
    return BucketRow(b"b", 1, "cache", 0, 0, mode, 0, 0)


class Reader:
    """Another process."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def test_what_was_written_is_read_at_once(tmp_path: Path) -> None:
    with NameIndex.open(tmp_path / "index", map_size_bytes=1 << 20) as names:
        names.put_bucket(bucket())
        reader = Reader(tmp_path / "index")
        try:
            assert reader.ask("find k") == "none"
            for n in range(1, 200):
                names.put(b"b", b"k", row(n))
                assert reader.ask("find k") == str(n)
            long = b"x" * 1000
            names.put(b"b", long, row(7))
            assert reader.ask(f"find {long.decode()}") == "7"
            assert reader.ask("list k") == "k"
            names.remove(b"b", b"k")
            assert reader.ask("find k") == "none"
            names.put_bucket(bucket(0o700))
            assert (reader.ask("bucket b"), reader.ask("buckets")) == (str(0o700), "b")
            for n in range(20_000):  # past the first size of the map
                names.put(b"b", b"many/%d" % n, row(n + 1))
            assert reader.ask("find many/19999") == "20000"
            assert reader.ask("bucket none") == "no bucket"
        finally:
            reader.close()
        names.clear_dead_readers()


def test_an_index_that_cannot_be_read_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be read"):
        NameReader(tmp_path / "missing")
    with NameIndex.open(tmp_path / "index", map_size_bytes=1 << 20), pytest.raises(OSError, match="cannot"):
        NameReader(tmp_path / "index")
    with NameReader(tmp_path / "index") as reader, pytest.raises(BucketNotFound):
        reader.bucket(b"b")
