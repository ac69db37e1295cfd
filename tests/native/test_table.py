"""The shared table: against a dictionary, its format checks, its limits, its slot headers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs._native.shared import table as native
from kvfs._native.shared.slots import xxh3_64
from kvfs._native.shared.table import DRAFT, FREE, SEALED, Table
from kvfs.errors import (
    Corrupt,
    FormatMismatch,
    InvalidRequest,
    NoSpace,
    NotFound,
    SessionClosed,
    Superseded,
)
from kvfs.formats import SLOT_HEADER, TABLE_HEADER

STORE = b"store-of-16-byte"
BLOCK = 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def new(path: Path, slots: int = 64, entries: int = 64) -> Table:
    return Table.create(path, STORE, slots, entries)


# --- index -----------------------------------------------------------------------------------------------
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "touch"]), st.integers(0, 60), st.integers(0, 2**32 - 1)),
    max_size=300,
)


@settings(deadline=None)
@given(steps=STEPS)
def test_the_index_is_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """64 places for 61 keys: at 48 live ones it is full, and nearly every removal moves others."""
    path = tmp_path_factory.mktemp("table") / "table"
    table = new(path)
    reader = Table.attach(path)
    model: dict[bytes, list[int]] = {}
    for step, number, value in steps:
        if step == "put" and key(number) not in model and len(model) == table.max_entries:
            with pytest.raises(NoSpace, match="48 of 48"):
                table.put(key(number), BLOCK, value, value ^ 1, value * 3)
        elif step == "put":
            table.put(key(number), BLOCK, value, value ^ 1, value * 3)
            model[key(number)] = [value, model.get(key(number), [0, 0])[1]]
        elif step == "remove":
            assert table.remove(key(number)) == (model.pop(key(number), None) is not None)
        else:
            assert table.touch(key(number)) == (key(number) in model)
            if key(number) in model:
                model[key(number)][1] += 1
    for number in range(61):
        entry = reader.get(key(number))
        found = entry and (entry.slot, entry.generation, entry.size_bytes, entry.hits, entry.kind)
        expected = model.get(key(number))
        assert found == (expected and (expected[0], expected[0] ^ 1, expected[0] * 3, expected[1], BLOCK))
    assert len(reader) == len(model)
    assert {name: entry.slot for name, entry in reader.items()} == {
        name: row[0] for name, row in model.items()
    }
    table.close()
    reader.close()


def test_match_counts_from_the_first_hash(path: Path) -> None:
    table = new(path, entries=1024)
    for number in range(100):
        table.put(
            key(number), BLOCK, number, 2, 10, tiers=native.TIER_DRAM if number < 50 else native.TIER_NVME
        )
    reader = Table.attach(path, STORE)
    hashes = b"".join(map(key, range(120)))
    assert reader.match(hashes) == 100
    assert reader.match(hashes[:160]) == 10
    assert reader.match(key(200) + hashes) == 0
    assert reader.match(b"") == 0
    table.remove(key(60))
    assert reader.match(memoryview(hashes)) == 60


def test_match_sees_blocks_only_and_only_where_bytes_are(path: Path) -> None:
    table = new(path)
    table.put(key(1), BLOCK, 0, 2, 0)
    table.put(key(2), 1, 0, 2, 0)
    table.put(key(3), BLOCK, 0, 2, 0, tiers=0)
    assert table.match(key(1) + key(2)) == 1
    assert table.match(key(2), kind=1) == 1
    assert table.match(key(3)) == 0


def test_match_refuses_what_is_no_list_of_hashes(path: Path) -> None:
    table = new(path)
    with pytest.raises(InvalidRequest, match="17 bytes"):
        table.match(bytes(17))


@pytest.mark.parametrize("bad", [b"", bytes(15), bytes(17)])
def test_a_key_has_16_bytes(path: Path, bad: bytes) -> None:
    table = new(path)
    for call in (table.get, table.remove, table.touch, lambda k: table.put(k, 1, 1, 1, 1)):
        with pytest.raises(InvalidRequest, match="16 bytes"):
            call(bad)


def test_a_reader_cannot_write(path: Path) -> None:
    new(path)
    reader = Table.attach(path)
    for call in (
        lambda: reader.put(key(1), 1, 1, 1, 1),
        lambda: reader.remove(key(1)),
        lambda: reader.begin(0),
    ):
        with pytest.raises(InvalidRequest, match="reading only"):
            call()


def test_a_closed_table_says_so(path: Path) -> None:
    table = new(path)
    table.close()
    table.close()
    with pytest.raises(SessionClosed):
        table.get(key(1))


def test_untouched_slot_headers_cost_nothing(path: Path) -> None:
    table = Table.create(path, STORE, limits.MAX_SLOTS, 1024)
    assert os.stat(path).st_size == table.file_bytes > 128 << 20
    assert os.stat(path).st_blocks * 512 < 1 << 20
    table.begin(0)
    assert os.stat(path).st_blocks * 512 < 1 << 20


def test_there_are_more_than_a_million_slots(path: Path) -> None:
    slot = (1 << 20) + 5
    table = Table.create(path, STORE, limits.MAX_SLOTS, 1024)
    reader = Table.attach(path)
    generation = table.publish(slot, table.begin(slot), kind=2, key=key(1), size=4096, sequence=7)
    table.put(key(1), 2, slot, generation, 4096)
    found = reader.get(key(1))
    assert found is not None
    assert (found.slot, reader.generation(slot)) == (slot, generation)
    assert (reader.read_header(slot).sequence, reader.slots_used) == (7, slot + 1)
    with pytest.raises(InvalidRequest):
        table.begin(limits.MAX_SLOTS)


# --- slot headers ----------------------------------------------------------------------------------------
def test_the_life_of_a_slot(path: Path) -> None:
    table = new(path)
    reader = Table.attach(path)
    assert (table.generation(5), table.read_header(5).state) == (0, FREE)
    draft = table.begin(5)
    assert (draft, table.read_header(5).state, table.slots_used) == (1, DRAFT, 6)
    with pytest.raises(Superseded):
        table.begin(5)
    sealed = table.publish(
        5, draft, kind=BLOCK, key=key(9), size=77, parent=key(8), checksum=2**64 - 1, uid=3
    )
    assert sealed == reader.generation(5) == 2
    header = reader.read_header(5)
    assert (header.state, header.kind, header.key, header.parent) == (SEALED, BLOCK, key(9), key(8))
    assert (header.size_bytes, header.checksum, header.uid) == (77, 2**64 - 1, 3)
    for call in (lambda: table.publish(5, 1, kind=1, key=key(1), size=0), lambda: table.retire(5, 1)):
        with pytest.raises(Superseded):
            call()
    table.retire(5, 2)
    assert (table.generation(5), table.read_header(5).state) == (3, FREE)
    assert table.begin(5) == 3
    table.retire(5, 3)
    assert table.begin(5) == 5


def test_a_checksum_belongs_to_its_generation(path: Path) -> None:
    table = new(path)
    sealed = table.publish(0, table.begin(0), kind=BLOCK, key=key(1), size=1)
    assert table.read_header(0).checksum is None
    assert not table.set_checksum(0, sealed + 2, 5)
    assert table.set_checksum(0, sealed, 5)
    assert table.read_header(0).checksum == 5
    table.retire(0, sealed)
    assert not table.set_checksum(0, sealed, 6)
    assert not table.set_checksum(0, table.generation(0), 6)


def test_headers_are_published_as_given(path: Path) -> None:
    table = new(path)
    generation = table.publish(
        3,
        table.begin(3),
        kind=1,
        key=key(4),
        size=2**40,
        object_id=2**63,
        sequence=2**64 - 1,
        flags=2**32 - 1,
        uid=5,
        bucket_id=6,
        sealed_at_ns=7,
    )
    header = table.read_header(3)
    assert (header.state, header.generation, header.kind, header.key) == (SEALED, generation, 1, key(4))
    assert (header.size_bytes, header.object_id, header.sequence) == (2**40, 2**63, 2**64 - 1)
    assert (header.flags, header.uid, header.bucket_id, header.sealed_at_ns) == (2**32 - 1, 5, 6, 7)


def test_slot_numbers_are_checked(path: Path) -> None:
    table = new(path, slots=8)
    for call in (table.begin, table.generation, table.read_header, lambda s: table.set_checksum(s, 0, 0)):
        with pytest.raises(InvalidRequest, match="slot 8 of a table with 8 slots"):
            call(8)


def test_a_damaged_slot_header_is_not_believed(path: Path) -> None:
    table = new(path)
    table.publish(0, table.begin(0), kind=BLOCK, key=key(1), size=1)
    slots_offset = TABLE_HEADER.decode(path.read_bytes())["slots_offset"]
    with open(path, "r+b") as file:
        file.seek(slots_offset + SLOT_HEADER.offsets["size_bytes"][0])
        file.write(b"\x02")
    with pytest.raises(Corrupt, match="slot 0"):
        table.read_header(0)


# --- format ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("slots", "entries"), [(0, 64), (64, 0), (64, 63), (2**31, 64), (64, 2**32)])
def test_sizes_are_checked(path: Path, slots: int, entries: int) -> None:
    with pytest.raises(InvalidRequest, match="power of two"):
        Table.create(path, STORE, slots, entries)
    assert not path.exists()


def test_a_missing_table_is_not_found(path: Path) -> None:
    with pytest.raises(NotFound):
        Table.attach(path)


def change(path: Path, field: str, value: int | bytes, *, resum: bool = True) -> None:
    data = bytearray(path.read_bytes())
    offset, size = TABLE_HEADER.offsets[field]
    data[offset : offset + size] = value if isinstance(value, bytes) else value.to_bytes(size, "little")
    if resum:
        at = TABLE_HEADER.offsets["header_checksum"][0]
        data[at : at + 8] = xxh3_64(bytes(data[:at])).to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("magic", b"KVFSTABX", "no kvfs table"),
        ("version", 2, "another format version"),
        ("slot_header_bytes", 256, "another layout"),
        ("entry_count", 63, "truncated or inconsistent"),
        ("entry_count", 1 << 30, "truncated or inconsistent"),
        ("slot_count", 1 << 30, "truncated or inconsistent"),
        ("slots_offset", 1 << 60, "truncated or inconsistent"),
        ("entries_offset", 4097, "truncated or inconsistent"),
        ("file_bytes", 1 << 40, "truncated or inconsistent"),
    ],
)
def test_a_foreign_header_is_refused(path: Path, field: str, value: int | bytes, message: str) -> None:
    new(path).close()
    change(path, field, value)
    with pytest.raises(FormatMismatch, match=message):
        Table.attach(path)


def test_a_damaged_header_is_refused(path: Path) -> None:
    new(path).close()
    change(path, "slot_count", 60, resum=False)
    with pytest.raises(FormatMismatch, match="checksum"):
        Table.attach(path)


@pytest.mark.parametrize("content", [b"", b"short", bytes(5000)])
def test_other_files_are_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(FormatMismatch, match="no kvfs table"):
        Table.attach(path)
    assert not Table.mark_dead(path)
    assert path.read_bytes() == content


def test_another_stores_table_is_refused(path: Path) -> None:
    new(path)
    with pytest.raises(FormatMismatch, match="another store"):
        Table.attach(path, bytes(16))
    assert Table.attach(path, STORE).store_id == STORE


def test_readers_of_a_replaced_table_notice(path: Path) -> None:
    old = new(path)
    old.put(key(1), BLOCK, 1, 2, 3)
    reader = Table.attach(path)
    assert reader.alive
    assert Table.mark_dead(path)
    path.unlink()
    Table.create(path, STORE, 8, 8)
    assert not reader.alive
    assert reader.get(key(1)) is not None
    fresh = Table.attach(path)
    assert fresh.alive
    assert fresh.get(key(1)) is None


def test_limits_are_those_of_the_c_side() -> None:
    assert int(limits.TABLE_READER_WAIT_S * 1e9) == native.READER_WAIT_NS
    assert native.MAX_LOAD_PERCENT < 100
    assert limits.TABLE_ENTRIES_PER_SLOT * native.MAX_LOAD_PERCENT >= 100, "every slot needs an entry"
