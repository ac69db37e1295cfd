"""Readers in other processes while one writer inserts, moves and removes: nothing torn, nothing missed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from kvfs._native.shared.table import Table
from kvfs.errors import DeadlinePassed
from tests.support import hammers
from tests.support.processes import Helper
from tests.support.processor_waits import within

STORE = bytes(16)
ENTRIES = 256
STEADY = 100
"""Keys that are there all the time; their values change."""
CHURN = 90
"""Keys that come and go: at 190 of 256 places, runs are long and most removals move others."""

READER = """
import sys, time
from kvfs._native.shared.table import Table
from kvfs.errors import DeadlinePassed
from kvfs.limits import TABLE_READER_WAIT_S

def patient(read, *args):
    # On a busy machine a living writer can be without a processor in mid-change for as long as a read waits.
    for attempt in range(100):
        try:
            return read(*args)
        except DeadlinePassed:
            pass
    raise AssertionError("the writer seems dead")

def match(hashes):
    # Where it gives up in the middle, it answers with what it has; that takes as long as it waits.
    for attempt in range(100):
        began_s = time.monotonic()
        found = patient(table.match, hashes)
        if found == len(hashes) // 16 or time.monotonic() - began_s < TABLE_READER_WAIT_S:
            return found
    raise AssertionError("the writer seems dead")

table = Table.attach(sys.argv[1])
steady = [b"steady".ljust(14) + i.to_bytes(2, "big") for i in range(int(sys.argv[2]))]
churn = [b"churn".ljust(14) + i.to_bytes(2, "big") for i in range(int(sys.argv[3]))]
hashes = b"".join(steady)
header_slot = int(sys.argv[4])
print("ready", flush=True)
rounds = hits = 0
while table.alive:
    for _ in range(20):
        assert match(hashes) == len(steady), "a key that is there all the time was missed"
    for key in steady + churn:
        entry = patient(table.get, key)
        if entry is None:
            assert key in churn, "a key that is there all the time was missed"
            continue
        hits += 1
        assert entry.size_bytes == entry.slot << 32 | entry.generation, "a torn entry"
        assert entry.location == entry.size_bytes ^ int.from_bytes(key[8:], "big"), "an entry of another key"
    header = patient(table.read_header, header_slot)  # raises Corrupt for a torn one
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


def seal(table: Table, number: int) -> int:
    """Seal slot 0, whose header says the number three times."""
    return table.publish(
        0, table.begin(0), kind=2, key=bytes(16), size=number, object_id=number, sequence=number
    )


def change_everything(table: Table, seconds: float) -> int:
    """Values of the steady keys, the presence of the others, and slot header 0; the number of changes."""
    rng = random.Random(7)
    present = dict.fromkeys(range(CHURN), False)
    until = time.monotonic() + seconds
    generation, sealed = 0, table.generation(0)
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
            table.set_checksum(0, sealed, generation)
        table.retire(0, sealed)
        sealed = seal(table, generation)
    table.set_dead()
    return generation


def shared_table(path: Path) -> Table:
    table = Table.create(path, STORE, 8, ENTRIES)
    for number in range(STEADY):
        put(table, steady(number), number, 0)
    seal(table, 0)
    return table


def test_readers_in_python_see_whole_entries_and_miss_none(tmp_path: Path) -> None:
    table = shared_table(tmp_path / "table")
    with Helper(READER, tmp_path / "table", STEADY, CHURN, 0) as reader:
        reader.expect("ready")
        assert change_everything(table, 0.7) > 5_000
        reader.expect("done")


def lingering(turns: int) -> str:
    """C text that passes the time."""
    return f"for (volatile int i_ = 0; i_ < {turns}; i_++) {{}}"


def slow_load(turns: int) -> str:
    return f"({{ __auto_type v_ = __atomic_load_n((p), __ATOMIC_RELAXED); {lingering(turns)} v_; }})"


SLOW_STORE = f"do {{ __atomic_store_n((p), (v), __ATOMIC_RELAXED); {lingering(100)} }} while (0)"
PROGRAMS = {
    "table_reader": [f"-DKVFS_LOAD(p)={slow_load(50)}"],
    "slow_table_reader": [f"-DKVFS_LOAD(p)={slow_load(1500)}"],
    "table_writer": [f"-DKVFS_STORE(p, v)={SLOW_STORE}"],
}
"""Programs, and how they linger after each access. An entry is one cache line: at full speed hardly anybody
meets half of one, nor does an entry move past a reader unless that takes its time between two places; the one
reader is about as slow as one change, the other as several."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the C programs of tests/native, which need nothing of Python."""
    built = tmp_path_factory.mktemp("native")
    for name, linger in PROGRAMS.items():
        program = f"{name.removeprefix('slow_')}.c"
        hammers.build(built, program, ["shared/table_core.c"], *linger, name=name)
    return built


def test_native_readers_see_whole_entries_and_miss_none(programs: Path, tmp_path: Path) -> None:
    """Readers that linger between their loads, against a writer that lingers between its stores."""
    path = tmp_path / "table"
    with Helper(programs / "table_writer", path, STEADY, CHURN, 1500) as writer:
        writer.expect("ready")
        with Helper(programs / "table_reader", path, STEADY, CHURN) as one:
            one.expect("ready")
            with Helper(programs / "slow_table_reader", path, STEADY, CHURN) as two:
                two.expect("ready")
                writer.tell("go")
                one.expect("done")
                two.expect("done")
        writer.expect("done")


WRITER = """
import sys
from kvfs._native.shared.table import Table
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
            try:
                for number in range(200):
                    with within(1.0):
                        reader.get(number.to_bytes(16, "big"))
            except DeadlinePassed:
                gave_up += 1
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
