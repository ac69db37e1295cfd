"""A damaged table of slots costs the slots whose headers do not hold, or all, and never makes a wrong object."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvfs._native.shared import slots as native
from kvfs._native.shared.table import Table
from kvfs.formats import SLOT_HEADER, TABLE_HEADER, slot_header_checksum
from tests.support.damage import flip
from tests.support.killed_stores import crash, names_of, open_again
from tests.support.posix import pattern
from tests.support.seeds import SEED
from tests.support.store_writer import DIGESTS
from tests.support.stores import BUCKET, put, put_block
from tests.support.waits import WAIT_S
from tiers.model.objects import Name
from tiers.model.tier import Sealed
from tiers.store.store import Store


def test_slot_headers_carry_their_checksum() -> None:
    """What the other tests rely on: a flipped bit anywhere but in `seq` shows."""
    header = SLOT_HEADER.encode(version=1, state=2, generation=4)
    assert slot_header_checksum(header) != slot_header_checksum(header[:50] + b"\1" + header[51:])


@pytest.mark.seeded
def test_a_flipped_bit_of_a_header_costs_that_slot_at_most(data: Path) -> None:
    chance = random.Random(SEED)
    store = open_again(data)
    for i in range(8):
        put(store, b"%d" % i, pattern(i, 1 + i * 1000))
    for i in range(16):
        put_block(store, DIGESTS[i], pattern(i + 8, 1 + i * 1000), parent=DIGESTS[i - 1] if i else None)
    store.dram.checksums.wait(WAIT_S)
    seen = headers_of(store)
    crash(store)
    for _ in range(20):
        table = data / "dram/table"
        head = TABLE_HEADER.decode(table.read_bytes())
        offset = head["slots_offset"] + chance.randrange(24 * SLOT_HEADER.size)
        flip(table, offset, chance)
        store = open_again(data)
        found = headers_of(store)
        crash(store)
        assert found.items() <= seen.items()
        assert len(found) >= len(seen) - 1
        seen = found
    assert len(seen) < 24


def headers_of(store: Store) -> dict[int, Sealed]:
    return {sealed.extent.slot: sealed for sealed in store.dram.sealed()}


def test_a_header_in_mid_change_does_not_hold_the_start_up(data: Path) -> None:
    store = open_again(data)
    for i in range(50):
        put(store, b"%d" % i, b"data")
    put(store, b"whole", b"data")
    slots = {store.lookup(Name(BUCKET, b"%d" % i)).extent.slot for i in range(50)}  # type: ignore[union-attr]
    crash(store)
    with (data / "dram/table").open("r+b") as table:
        head = TABLE_HEADER.decode(table.read(TABLE_HEADER.size))
        for slot in slots:
            table.seek(head["slots_offset"] + slot * SLOT_HEADER.size)
            table.write(b"\1")
        for place in range(head["entry_count"]):  # 2,048 x 0.1 s, if anybody waited for a writer
            table.seek(head["entries_offset"] + place * 64)
            table.write(b"\1")
    with open_again(data) as again:
        assert names_of(again) == {b"whole": b"data"}


@pytest.mark.parametrize("damage", ["store", "version", "magic", "truncated", "empty", "gone"])
def test_a_table_that_is_not_ours_is_refused_with_its_slots(data: Path, backing: str, damage: str) -> None:
    store = open_again(data, backing=backing)
    put(store, b"key", b"data")
    crash(store)
    table = data / "dram/table"
    content = bytearray(table.read_bytes())
    if damage in ("store", "version", "magic"):
        offset, size = TABLE_HEADER.offsets[{"store": "store_id"}.get(damage, damage)]
        content[offset : offset + size] = b"\x63" * size
        at = TABLE_HEADER.offsets["header_checksum"][0]
        content[at : at + 8] = native.xxh3_64(bytes(content[:at])).to_bytes(8, "little")
    if damage == "gone":
        table.unlink()
    else:
        table.write_bytes(bytes(content[: {"truncated": len(content) // 2, "empty": 0}.get(damage)]))
    with open_again(data, backing=backing) as again:
        assert names_of(again) == {}
        assert again.dram.usage().held_bytes == 0
        assert put(again, b"key", b"new").size_bytes == 3


def test_generations_go_on_and_old_readers_see_their_table_dead(data: Path, backing: str) -> None:
    store = open_again(data, backing=backing)
    tier = store.dram
    for i in range(6):
        put(store, b"%d" % i, b"data")
    for i in range(3):
        store.remove(Name(BUCKET, b"%d" % i))
    used = {slot: tier.table.generation(slot) for slot in range(tier.table.slots_used)}
    reader = Table.attach(tier.root / "table", store.store_id)
    crash(store)
    with open_again(data, backing=backing) as again:
        assert not reader.alive
        found = {sealed.extent.slot: sealed.extent.generation for sealed in again.dram.sealed()}
        assert found == {slot: used[slot] for slot in found}
        assert len(found) == 3
        for _ in range(20):
            extent = again.reserve(uid=0).extent
            assert extent.generation & 1
            assert extent.generation > used.get(extent.slot, 0)
