"""Readers in other processes while one writer inserts, moves and removes: nothing torn, nothing missed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from kvfs._native.table import Table
from kvfs.errors import DeadlinePassed
from tests.support.processes import Helper

STORE = bytes(16)
ENTRIES = 256
STEADY = 100
"""Keys that are there all the time; their values change."""
CHURN = 90
"""Keys that come and go: at 190 of 256 places, runs are long and most removals move others."""

READER = """
import sys
from kvfs._native.table import Table
table = Table.attach(sys.argv[1])
steady = [b"steady".ljust(14) + i.to_bytes(2, "big") for i in range(int(sys.argv[2]))]
churn = [b"churn".ljust(14) + i.to_bytes(2, "big") for i in range(int(sys.argv[3]))]
hashes = b"".join(steady)
header_slot = int(sys.argv[4])
print("ready", flush=True)
rounds = hits = 0
while table.alive:
    for _ in range(20):
        assert table.match(hashes) == len(steady), "a key that is there all the time was missed"
    for key in steady + churn:
        entry = table.get(key)
        if entry is None:
            assert key in churn, "a key that is there all the time was missed"
            continue
        hits += 1
        assert entry.size_bytes == entry.slot << 32 | entry.generation, "a torn entry"
        assert entry.location == entry.size_bytes ^ int.from_bytes(key[8:], "big"), "an entry of another key"
    header = table.read_header(header_slot)  # raises Corrupt for a torn one
    assert header.size_bytes == header.object_id == header.sequence
    rounds += 1
assert rounds > 10 and hits > 1000
print("done", flush=True)
"""


def steady(number: int) -> bytes:
    return b"steady".ljust(14) + number.to_bytes(2, "big")


def churn(number: int) -> bytes:
    return b"churn".ljust(14) + number.to_bytes(2, "big")


def put(table: Table, key: bytes, slot: int, generation: int) -> None:
    size = slot << 32 | generation
    table.put(key, 2, slot, generation, size, location=size ^ int.from_bytes(key[8:], "big"))


def test_readers_see_whole_entries_and_miss_none(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table = Table.create(path, STORE, 8, ENTRIES)
    rng = random.Random(7)
    present = dict.fromkeys(range(CHURN), False)
    for number in range(STEADY):
        put(table, steady(number), number, 0)
    table.begin(0)
    with Helper(READER, path, STEADY, CHURN, 0) as one, Helper(READER, path, STEADY, CHURN, 0) as two:
        one.expect("ready")
        two.expect("ready")
        until = time.monotonic() + 1.5
        generation = 0
        while time.monotonic() < until:
            for _ in range(500):
                generation += 1
                number = rng.randrange(CHURN)
                if present[number]:
                    table.remove(churn(number))
                else:
                    put(table, churn(number), number, generation)
                present[number] = not present[number]
                put(table, steady(generation % STEADY), generation % STEADY, generation)
            size = generation
            table.write_header(
                0, state=2, generation=2, kind=2, key=bytes(16), size=size, object_id=size, sequence=size
            )
        table.set_dead()
        one.expect("done")
        two.expect("done")
    assert generation > 10_000


WRITER = """
import sys
from kvfs._native.table import Table
table = Table.create(sys.argv[1], bytes(16), 8, 256)
keys = [i.to_bytes(16, "big") for i in range(180)]
print("ready", flush=True)
while True:
    for key in keys:
        table.put(key, 2, 1, 2, 3)
    for key in keys:
        table.remove(key)
"""


def test_a_writer_that_stops_in_mid_change_costs_a_reader_a_bounded_wait(tmp_path: Path) -> None:
    """SIGSTOP lands anywhere in the writer; whichever way, each lookup answers or gives up in time."""
    path = tmp_path / "table"
    gave_up = 0
    with Helper(WRITER, path) as writer:
        writer.expect("ready")
        reader = Table.attach(path)
        for _ in range(10):
            writer.stop()
            began = time.monotonic()
            try:
                for number in range(200):
                    reader.get(number.to_bytes(16, "big"))
                    began = time.monotonic()
            except DeadlinePassed:
                gave_up += 1
            assert time.monotonic() - began < 1.0
            os.kill(writer.process.pid, signal.SIGCONT)
    assert gave_up <= 10


@pytest.mark.parametrize("field", ["move_seq", "entry"])
def test_a_writer_that_died_in_mid_change_is_reported(tmp_path: Path, field: str) -> None:
    from kvfs.formats import TABLE_HEADER

    path = tmp_path / "table"
    table = Table.create(path, STORE, 8, 8)
    table.put(bytes(16), 2, 1, 2, 3)
    header = TABLE_HEADER.decode(path.read_bytes())
    with open(path, "r+b", buffering=0) as file:
        if field == "move_seq":
            offsets = [TABLE_HEADER.offsets["move_seq"][0]]
        else:
            offsets = [header["entries_offset"] + 64 * place for place in range(8)]
        for offset in offsets:
            value = os.pread(file.fileno(), 4, offset)[0] | 1
            os.pwrite(file.fileno(), bytes([value]), offset)
    reader = Table.attach(path)
    with pytest.raises(DeadlinePassed, match="mid-change"):
        reader.get(bytes(16) if field == "entry" else b"k" * 16)
    if field == "move_seq":
        assert reader.get(bytes(16)) is not None, "a hit does not depend on moves"
