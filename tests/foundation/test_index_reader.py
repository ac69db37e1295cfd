"""The name index, read by another process than the one that writes it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from kvfs.errors import BucketNotFound, Corrupt, KvfsError, LimitExceeded
from kvfs.index.environment import MAX_DATABASES, read_once
from kvfs.index.names import BucketRow, NameIndex, NameRow
from kvfs.index.reader import NameReader
from kvfs.index.tree import HEAD_BYTES, Txn
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


# --- slots of LMDB's table of readers ---------------------------------------------------------------------
ROUNDS = 1_000
"""Of each read; LMDB's table has 126 slots, and what is kept of the last 500 exceptions is of 45 rounds."""
DAMAGED, LONG_DAMAGED, LOST_NODE = b"damaged", b"l" * 1000, b"n" * 1000


def damaged_index(path: Path) -> Path:
    """Make an index with rows that are whole, rows that are not, and a node that is none."""
    with NameIndex.open(path, map_size_bytes=1 << 20) as names:
        names.put_bucket(bucket())
        for key in (b"whole", DAMAGED, LONG_DAMAGED, LOST_NODE):
            names.put(b"b", key, row(1))
    with lmdb.open(str(path), max_dbs=MAX_DATABASES) as env:
        heads, tails, buckets = (env.open_db(name) for name in (b"names", b"tails", b"buckets"))
        with env.begin(write=True) as txn:
            txn.put(b"b\0" + DAMAGED, b"?" * 100, db=heads)
            node = txn.get((b"b\0" + LONG_DAMAGED)[:HEAD_BYTES], db=heads)
            assert node is not None
            txn.put(node + LONG_DAMAGED[HEAD_BYTES - 2 :], b"?" * 100, db=tails)
            txn.put((b"b\0" + LOST_NODE)[:HEAD_BYTES], b"?", db=heads)
            txn.put(b"broken", b"?", db=buckets)
    return path


@contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def slots(env: lmdb.Environment) -> int:
    """The rows of LMDB's table of readers, below its heading."""
    return len([line for line in env.readers().splitlines() if line.split()[:1] == [str(os.getpid())]])


def refused(call: Callable[[], object], kind: type[KvfsError], kept: list[BaseException]) -> None:
    """Call what must fail, keep its exception, and have it lie in a cycle, as those of a task do."""
    with pytest.raises(kind) as caught:
        call()
    kept.append(caught.value)


def test_no_read_keeps_a_slot_of_the_reader(tmp_path: Path) -> None:
    kept: list[BaseException] = []
    with NameReader(damaged_index(tmp_path / "index")) as reader, collector_off():
        failing: list[tuple[Callable[[], object], type[KvfsError]]] = [
            (lambda: reader.bucket(b"missing"), BucketNotFound),
            (lambda: reader.bucket(b"broken"), Corrupt),
            (lambda: reader.buckets(), Corrupt),
            (lambda: reader.find(b"missing", b"k"), BucketNotFound),
            (lambda: reader.find(b"broken", b"k"), Corrupt),
            (lambda: reader.find(b"b", DAMAGED), Corrupt),
            (lambda: reader.peek(b"missing\0k"), BucketNotFound),
            (lambda: reader.list(b"b", limit=1 << 30), LimitExceeded),
            (lambda: reader.list(b"b", prefix=b"d"), Corrupt),
            (lambda: reader.list(b"b", prefix=LONG_DAMAGED), Corrupt),
            (lambda: reader.list(b"b", prefix=LOST_NODE), Corrupt),
        ]
        for _ in range(ROUNDS):
            for call, kind in failing:
                refused(call, kind, kept)
            assert reader.find(b"b", b"whole").row == row(1)
            assert reader.peek(b"b\0none") is None
            kept = kept[-500:]
        assert slots(reader._env) <= 2


def test_no_read_of_what_is_whole_keeps_a_slot(tmp_path: Path) -> None:
    with NameIndex.open(tmp_path / "index", map_size_bytes=1 << 20) as names:
        names.put_bucket(bucket())
        names.put(b"b", b"k", row(1))
    with NameReader(tmp_path / "index") as reader, collector_off():
        for _ in range(ROUNDS // 2):  # a listing takes longest
            assert reader.buckets() == [bucket()]
            assert [entry.name for entry in reader.list(b"b").entries] == [b"k"]
        assert slots(reader._env) <= 2


def test_no_read_keeps_a_slot_of_the_service(tmp_path: Path) -> None:
    kept: list[BaseException] = []
    with NameIndex.open(tmp_path / "index", map_size_bytes=1 << 20) as names, collector_off():
        names.put_bucket(bucket())
        names.put(b"b", b"k", row(1))
        with pytest.raises(Corrupt):
            names.environment.read(lambda _: fail(Corrupt("none")))
        for _ in range(ROUNDS):
            refused(lambda: names.list(b"b", limit=1 << 30), LimitExceeded, kept)
            refused(lambda: names.environment.read(lambda _: fail(Corrupt("none"))), Corrupt, kept)
            assert names.get(b"b", b"k") == row(1)
            names.put(b"b", b"k", row(1))
            kept = kept[-500:]
        assert slots(names.environment._env) <= 1


def fail(error: Exception) -> None:
    raise error


def test_an_exception_of_a_read_keeps_its_trace_and_what_the_caller_handles(tmp_path: Path) -> None:
    """The frames that ended inside the read let go of the transaction; those of what is handled outside stay."""

    def look(txn: Txn) -> None:
        try:
            inner(txn)
        except KeyError as error:
            raise Corrupt("inner") from error

    def inner(txn: Txn) -> None:
        cursor = txn.cursor()
        raise KeyError(cursor.key())

    def outer(mark: str) -> None:
        raise ValueError(mark)

    kept: list[BaseException] = []
    with lmdb.open(str(tmp_path / "index")) as env, collector_off():
        for _ in range(200):
            try:
                outer("mark")
            except ValueError as handled:
                with pytest.raises(Corrupt) as caught:
                    read_once(env, look)
                frames = [frame.f_locals for frame, _ in traceback.walk_tb(handled.__traceback__)]
            assert frames[1] == {"mark": "mark"}
            assert [frame.name for frame in caught.traceback][-1] == "look"
            assert isinstance(caught.value.__cause__, KeyError)
            kept.append(caught.value)
        assert slots(env) <= 1
