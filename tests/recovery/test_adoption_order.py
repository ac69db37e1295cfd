"""The order in which adopted objects are dear: it goes on, and decides what stays where there is less room."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvfs._native.catalog.adoption import Adoption
from kvfs._native.catalog.block_index import BlockIndex
from kvfs._native.catalog.object_names import ObjectNames
from kvfs._native.shared import slots as native
from kvfs._native.shared.table import Table
from kvfs.limits import MIB
from tests.support.killed_stores import crash, names_of, open_again, use
from tests.support.store_writer import DIGESTS
from tests.support.stores import BUCKET, put, put_block
from tiers.model.objects import Name


def test_the_order_of_eviction_goes_on(data: Path) -> None:
    with open_again(data) as store:
        for i in range(8):
            put(store, b"%d" % i, bytes([i]) * 100_000)
            use(store, b"%d" % i, 100 + i)
        use(store, b"0", 999)
        for at, digest in enumerate(DIGESTS[:4]):  # a chain, of which the first block was used last
            put_block(store, digest, b"block", parent=DIGESTS[at - 1] if at else None)
            store.table.set_access(digest, 1, 50 - at)
        store.set_attributes(Name(BUCKET, b"1"), pinned=True)
        crash(store)
        with open_again(data) as again:
            gone: list[str] = []
            again.listeners.append(lambda change: gone.append(str(change.name)))
            again.evict(1 << 30)
            assert [name.partition("/")[2][-2:] for name in gone] == [*("04", "03", "02", "01"), *"2345670"]


def test_less_room_keeps_what_was_used_last(data: Path, backing: str) -> None:
    store = open_again(data, backing=backing, capacity_bytes=64 * MIB)
    for i in range(48):
        put(store, b"%02d" % i, bytes([i]) * MIB)
        use(store, b"%02d" % i, 1000 - i)
    store.set_attributes(Name(BUCKET, b"47"), pinned=True)
    crash(store)
    with open_again(data, backing=backing, capacity_bytes=16 * MIB) as again:
        usage = again.dram.usage()
        assert usage.used_bytes <= usage.capacity_bytes == 16 * MIB
        found = sorted(int(key) for key in names_of(again))
        assert found[-1] == 47
        assert found[:-1] == list(range(len(found) - 1))
        assert 12 <= len(found) <= 16


def test_fewer_slots_keep_the_slots_that_there_are(data: Path) -> None:
    store = open_again(data, max_slots=128)
    for i in range(100):
        put(store, b"%d" % i, b"data")
    crash(store)
    with open_again(data, max_slots=64) as again:
        assert 60 <= len(names_of(again)) <= 64
        assert again.dram.usage().max_slots == 64


digests = st.integers(0, 11).map(lambda number: bytes([number + 1]) * 16)


def order_of(blocks: list[tuple[bytes, bytes, int, bool]], at: Path, most: int) -> list[bytes]:
    """Sort out slots of one page each, with room for `most` of them; return the hashes kept, the dearest first."""
    table = Table.create(at / "old", bytes(16), 16, 32)
    (at / "slots").mkdir(exist_ok=True)
    for slot, (digest, parent, used, pinned) in enumerate(blocks):
        (at / "slots" / native.slot_name(slot)).write_bytes(bytes(4096))
        generation = table.publish(
            slot, table.begin(slot), kind=2, key=digest, size=4096, sequence=slot, checksum=0, parent=parent
        )
        table.put(digest, 2, slot, generation, 4096, flags=int(pinned))
        table.set_access(digest, 1, used)
    adoption, index, order = Adoption(16), BlockIndex(), list[bytes]()
    slotfd = os.open(at / "slots", os.O_RDONLY)
    with (at / "old").open("rb", buffering=0) as file:
        assert adoption.list_files(slotfd) == []
        assert adoption.read(file.fileno()) == []
    adoption.check_files(slotfd, 0)
    adoption.keep_whole()
    os.close(slotfd)
    adoption.want_blocks({0})
    adoption.sort()
    adoption.fit(most * 4096)
    new = Table.create(at / "new", bytes(16), 16, 32)
    adoption.write_headers(new)
    adoption.restore(
        new, index, {0: index.open_bucket()}, ObjectNames(), lambda key, **_: order.append(key), 0.0
    )
    assert len(new) == len(index) == len(adoption) == len(order)
    table.close()
    new.close()
    return order[::-1]


@given(
    st.lists(st.tuples(digests, digests, st.integers(0, 5), st.booleans()), unique_by=lambda each: each[0]),
    st.data(),
)
def test_any_first_part_of_what_is_dear_can_be_used(
    blocks: list[tuple[bytes, bytes, int, bool]], chance: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        order = order_of(blocks, Path(name), len(blocks))
        assert sorted(order) == sorted(digest for digest, _, _, _ in blocks)
        cut = chance.draw(st.integers(0, len(order)))
        kept = set(order_of(blocks, Path(name), cut))
    assert kept == set(order[:cut])
    parents = {digest: parent for digest, parent, _, _ in blocks}
    for digest in kept:
        seen = {digest}
        while (digest := parents[digest]) in parents and digest not in seen:
            seen.add(digest)
            if digest not in kept:
                assert digest_is_in_cycle(digest, parents), "an ancestor is behind its descendant"
                break


def digest_is_in_cycle(digest: bytes, parents: dict[bytes, bytes]) -> bool:
    at = parents[digest]
    for _ in parents:
        if at == digest:
            return True
        at = parents.get(at, b"")
    return False
