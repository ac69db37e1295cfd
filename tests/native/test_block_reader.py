"""Blocks read in place, on a table and slots by hand: what is no longer the block that was looked up is a miss."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from kvfs import limits
from kvfs._native.blocks.pieces import Pieces
from kvfs._native.blocks.reader import BELOW, MISS, NO_ROOM, Reader, View
from kvfs._native.shared import slots
from kvfs._native.shared.table import TIER_DRAM, TIER_NVME, Table
from kvfs.errors import FormatMismatch
from tests.support.crash_harness import fast_directory
from tests.support.seeds import SEED, rounds
from tests.support.service import ROOT
from tests.support.waits import WAIT_S

BLOCK, OBJECT = 2, 1
KEY = b"\1" * 16
STREAMED = 128 << 10
"""Of this size on, blocks of a large batch go past the caches."""
LARGE = 2 << 20
"""Of this size on a batch does."""


@dataclass
class Bench:
    """A writer's table, and a reader of it."""

    path: Path
    table: Table
    folder: int
    reader: Reader

    def seal(self, slot: int, key: bytes, data: bytes, *, kind: int = BLOCK) -> int:
        fd = slots.create(self.folder, slot)
        os.pwrite(fd, data, 0)
        os.close(fd)
        generation = self.table.publish(slot, self.table.begin(slot), kind=kind, key=key, size=len(data))
        self.table.put(key, kind, slot, generation, len(data))
        return generation

    def read(self, key: bytes, size: int = 64) -> tuple[int, bytes]:
        into = bytearray(size)
        [result] = self.reader.read(key, Pieces([into], 1, True))
        return result, bytes(into[: max(result, 0)])


@contextmanager
def made(path: Path) -> Iterator[Bench]:
    table = Table.create(path / "table", bytes(16), 512, 1024)
    (path / "slots").mkdir()
    folder = os.open(path / "slots", os.O_RDONLY)
    reader = Reader(Table.attach(path / "table"), path / "slots", LARGE)
    yield Bench(path, table, folder, reader)
    table.close()
    os.close(folder)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with made(tmp_path) as found:
        yield found


def test_a_block_is_read_and_mapped(bench: Bench) -> None:
    bench.seal(3, KEY, b"a block")
    assert bench.read(KEY) == (7, b"a block")
    assert bench.read(KEY, 6) == (NO_ROOM, b"")
    [view] = bench.reader.map(KEY)
    assert isinstance(view, View)
    assert bytes(view) == b"a block"
    assert bench.reader.match(KEY + bytes(16)) == 1
    assert bench.reader.find(KEY + bytes(16)) == bytes([TIER_DRAM, 0])


def test_another_generation_is_a_miss(bench: Bench) -> None:
    """The slot was retired after the entry was read, which a reader sees as an entry that is behind."""
    generation = bench.seal(3, KEY, b"a block")
    bench.table.retire(3, generation)
    assert bench.read(KEY)[0] == MISS
    assert bench.reader.map(KEY) == [MISS]


def test_a_dead_table_is_all_misses(bench: Bench) -> None:
    """From there on its slots may be another's, while its generations stand still."""
    bench.seal(3, KEY, b"a block")
    assert Table.mark_dead(bench.path / "table")
    assert not bench.reader.alive
    assert bench.read(KEY)[0] == MISS
    assert bench.reader.read_into([KEY], [bytearray(7)]) is None


def test_a_slot_that_is_shorter_or_gone_is_a_miss(bench: Bench) -> None:
    bench.seal(3, KEY, b"a block")
    os.truncate(bench.path / "slots" / slots.slot_name(3), 6)
    assert bench.read(KEY)[0] == MISS
    assert bench.reader.map(KEY) == [MISS]
    os.unlink(bench.path / "slots" / slots.slot_name(3))
    assert bench.read(KEY)[0] == MISS


def test_what_is_below_dram_and_what_is_no_block(bench: Bench) -> None:
    below, named = b"\2" * 16, bytes(8) + b"\3" * 8
    bench.table.put(below, BLOCK, 0xFFFFFFFF, 0, 7, tiers=TIER_NVME)
    bench.seal(3, named, b"an object", kind=OBJECT)
    assert bench.read(below)[0] == BELOW
    assert bench.read(named)[0] == MISS
    assert bench.reader.find(below + named) == bytes([TIER_NVME, 0])
    assert bench.reader.map(below + named) == [BELOW, MISS]


def test_hits_are_remembered_up_to_a_limit(bench: Bench) -> None:
    bench.seal(3, KEY, b"a block")
    bench.read(bytes(15) + b"\4")
    assert bench.reader.take_hits(10) == b""
    for _ in range(limits.CLIENT_UNREPORTED_HITS + 10):
        bench.read(KEY, 7)
    assert bench.reader.unreported == limits.CLIENT_UNREPORTED_HITS
    assert bench.reader.take_hits(3) == KEY * 3
    assert bench.reader.unreported == limits.CLIENT_UNREPORTED_HITS - 3


def test_a_large_batch_is_shared_out_and_right(bench: Bench) -> None:
    """More than 2 MiB: the crew helps, whoever of it comes in time."""
    data = {bytes([7, number]) * 8: os.urandom(200_000 + number) for number in range(40)}
    for slot, (key, each) in enumerate(data.items()):
        bench.seal(slot, key, each)
    keys = [*data, bytes(16)]
    for _ in range(20):
        into = [bytearray(200_100) for _ in keys]
        results = bench.reader.read(b"".join(keys), Pieces(into, len(keys), True))
        assert results == [*(len(each) for each in data.values()), MISS]
        for each, found in zip(data.values(), into, strict=False):
            assert found[: len(each)] == each


@pytest.fixture
def fast() -> Iterator[Bench]:
    """A bench whose slots are on a tmpfs, as a service's."""
    with tempfile.TemporaryDirectory(dir=fast_directory()) as path, made(Path(path)) as found:
        yield found


@pytest.mark.seeded
def test_blocks_that_go_past_the_caches_are_right_in_any_pieces(fast: Bench) -> None:
    draw = random.Random(f"{SEED}.streams")
    for turn in range(rounds(3, 30)):
        sizes = [draw.choice([STREAMED - 1, STREAMED, STREAMED + 1, 300_001, 1 << 20, 64]) for _ in range(16)]
        keys = [bytes([turn + 1, number]) * 8 for number in range(16)]
        contents = [draw.randbytes(size) for size in sizes]
        for slot, (key, content) in enumerate(zip(keys, contents, strict=True)):
            fast.seal(turn * 16 + slot, key, content)
        starts = [draw.randrange(100) for _ in sizes]
        memory = [bytearray(b"#" * (size + 200)) for size in sizes]
        pieces = [
            cut(draw, memoryview(into)[start : start + size])
            for into, start, size in zip(memory, starts, sizes, strict=True)
        ]
        assert fast.reader.read(b"".join(keys), Pieces(pieces, 16, True)) == sizes
        for into, start, content in zip(memory, starts, contents, strict=True):
            assert into == b"#" * start + content + b"#" * (200 - start)


def cut(draw: random.Random, into: memoryview) -> list[memoryview]:
    """Return memory in pieces of any length."""
    edges = sorted(draw.sample(range(len(into)), draw.randrange(4)))
    return [into[first:last] for first, last in pairwise([0, *edges, len(into)])]


def test_a_hole_takes_no_page_when_it_is_read(fast: Bench) -> None:
    keys = [bytes([number + 1]) * 16 for number in range(16)]
    for slot, key in enumerate(keys):
        fast.seal(slot, key, b"x" * STREAMED if slot else b"")
    hole = fast.path / "slots" / slots.slot_name(0)
    os.truncate(hole, STREAMED)
    fast.table.put(keys[0], BLOCK, 0, fast.table.generation(0), STREAMED)
    memory = [bytearray(b"#" * STREAMED) for _ in keys]
    assert fast.reader.read(b"".join(keys), Pieces(memory, 16, True)) == [STREAMED] * 16
    assert memory == [bytes(STREAMED)] + [b"x" * STREAMED] * 15
    assert hole.stat().st_blocks == 0


def test_another_store_is_refused(bench: Bench) -> None:
    with pytest.raises(FormatMismatch):
        Table.attach(bench.path / "table", b"\1" * 16)


EMPTY = bytearray(0)


@pytest.mark.parametrize(
    "lengths",
    [
        [0] * 128 + [100],
        [0] * 1000 + [100],
        [1] + [0] * 127 + [99],
        [0] * 127 + [1] + [0] * 300 + [99] + [0] * 200,
        [0, 50] * 2,
    ],
    ids=["128 before", "1000 before", "between", "all over", "by turns"],
)
def test_empty_pieces_hold_nothing_up(bench: Bench, lengths: list[int]) -> None:
    data = bytes(range(100))
    bench.seal(3, KEY, data)
    pieces = [bytearray(length) for length in lengths]
    assert bench.reader.read(KEY, Pieces([pieces], 1, True)) == [100]
    assert b"".join(pieces) == data


def test_a_block_without_bytes_needs_no_piece(bench: Bench) -> None:
    bench.seal(3, KEY, b"")
    for pieces in ([], EMPTY, [EMPTY] * 200):
        assert bench.reader.read(KEY, Pieces([pieces], 1, True)) == [0]


FORKS = """
import os, signal, sys
from pathlib import Path
from kvfs._native.shared import slots
from kvfs._native.blocks.pieces import Pieces
from kvfs._native.blocks.reader import Reader
from kvfs._native.shared.table import Table

KEYS, SIZE = [bytes([i]) * 16 for i in range(1, 9)], 1 << 20
base = Path(sys.argv[1])
table = Table.create(base / "table", bytes(16), 64, 128)
(base / "slots").mkdir()
folder = os.open(base / "slots", os.O_RDONLY)
for slot, key in enumerate(KEYS):
    fd = slots.create(folder, slot)
    os.pwrite(fd, key * (SIZE // 16), 0)
    os.close(fd)
    table.put(key, 2, slot, table.publish(slot, table.begin(slot), kind=2, key=key, size=SIZE), SIZE)
reader = Reader(Table.attach(base / "table"), base / "slots", 1 << 20)

def read() -> None:
    places = [bytearray(SIZE) for _ in KEYS]
    assert reader.read(b"".join(KEYS), Pieces(places, len(KEYS), True)) == [SIZE] * len(KEYS)
    assert all(place[:16] == key for place, key in zip(places, KEYS))

def descend(reads: str) -> None:
    # Each generation reads or does not, and forks.
    signal.alarm(20)
    if reads[0] == "r":
        read()
    if len(reads) > 1:
        child = os.fork()
        if child == 0:
            descend(reads[1:])
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    read()

descend(sys.argv[2])
"""


@pytest.mark.parametrize("reads", ["r-rrr", "r--rr", "-r-r-r"])
def test_the_pool_lives_through_forks(tmp_path: Path, reads: str) -> None:
    """Of children that do not read before they fork, too: the handlers are registered once."""
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path), reads], timeout=WAIT_S, cwd=ROOT)
    assert done.returncode == 0


def test_a_reader_may_outlive_the_names_of_its_module(bench: Bench) -> None:
    """The interpreter clears modules at its end, later ones first: the one that holds this reader after the reader's
    own, as PyTorch's modules have it."""
    program = (
        "import ctypes, sys, types\n"
        "holder = sys.modules['holder'] = types.ModuleType('holder')\n"
        "from kvfs._native.blocks import reader\n"
        "from kvfs._native.shared.table import Table\n"
        "for module in (holder, reader):\n"
        "    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))\n"
        "holder.reader = reader.Reader(Table.attach(sys.argv[1]), sys.argv[2], 1 << 20)\n"
    )
    arguments = [str(bench.path / "table"), str(bench.path / "slots")]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
