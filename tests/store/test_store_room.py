"""Room in a store: headroom, quotas, the largest object, and stores full of bytes, drafts or slots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs.errors import NoSpace, ObjectTooLarge, QuotaExceeded, WriterActive
from tests.support.opened_store import store as store
from tests.support.processor_waits import within
from tests.support.stores import BUCKET, CAPACITY_BYTES, keys, put, put_block, small_store
from tiers.eviction.quota import SpaceBook
from tiers.model.objects import Attributes, Name
from tiers.model.tier import Kind
from tiers.store.store import Store

MIB = 1 << 20


@given(
    st.integers(limits.MIN_DRAM_BYTES, 1 << 44),
    st.lists(st.tuples(st.integers(0, 1 << 40), st.booleans()), max_size=20),
    st.integers(0, 100),
)
def test_headroom_stays_within_its_shares(capacity: int, seals: list[tuple[int, bool]], drafts: int) -> None:
    book = SpaceBook(capacity, capacity)
    for size_bytes, aborted in seals:
        book.opened(0, size_bytes)
        book.closed(0, size_bytes, None if aborted else size_bytes)
    for _ in range(drafts):
        book.opened(0, 0)
    floor = min(capacity // 8, max(1 << 30, capacity // 64))
    assert min(floor, capacity // 2) <= book.headroom_bytes() <= capacity // 2
    sealed = [size_bytes for size_bytes, aborted in seals if not aborted]
    if sealed:
        assert book.headroom_bytes() >= min(capacity // 2, 2 * sealed[-1])
    assert book.open_drafts == drafts


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 100)), max_size=20), st.integers(0, 100))
def test_reservations_end_with_their_drafts(drafts: list[tuple[int, int]], more: int) -> None:
    book = SpaceBook(MIB, 1000)
    for uid, size_bytes in drafts:
        book.opened(uid, size_bytes)
    for uid in (1, 2, 3):
        reserved = sum(size_bytes for owner, size_bytes in drafts if owner == uid)
        if reserved + more > 1000:
            with pytest.raises(QuotaExceeded, match=rf"uid {uid} .* {reserved} reserved.* 1000"):
                book.check_quota(uid, held_bytes=0, more_bytes=more)
        else:
            book.check_quota(uid, held_bytes=1000 - reserved - more, more_bytes=more)
            with pytest.raises(QuotaExceeded):
                book.check_quota(uid, held_bytes=1001 - reserved - more, more_bytes=more)
    for uid, size_bytes in drafts:
        book.closed(uid, size_bytes, None)
    assert book == SpaceBook(MIB, 1000)


def test_a_quota_counts_reservations_and_held_bytes(tmp_path: Path) -> None:
    with small_store(tmp_path / "data", quota_bytes=2 * MIB) as store:
        draft = store.reserve(MIB, uid=7)
        with pytest.raises(QuotaExceeded, match=r"uid 7 .* quota of 2097152"):
            store.reserve(MIB + 1, uid=7)
        store.abort(store.reserve(MIB + 1, uid=8))
        store.abort(draft)
        store.abort(draft)  # twice is harmless
        info = put(store, b"a", bytes(2 * MIB), uid=7)
        descriptor = store.open_read(info, uid=7)
        store.remove(Name(BUCKET, b"a"))
        with pytest.raises(QuotaExceeded, match="uid 7 holds 2097152 bytes"):
            store.reserve(1, uid=7)
        os.close(descriptor)
        store.maintain()
        store.abort(store.reserve(1, uid=7))


@pytest.mark.parametrize("size_bytes", [CAPACITY_BYTES // 4 + 1, CAPACITY_BYTES // 2 + 1, 1 << 40])
def test_an_object_over_the_limit_is_too_large_whatever_the_quota(store: Store, size_bytes: int) -> None:
    with pytest.raises(ObjectTooLarge, match=f"{size_bytes} bytes.* {CAPACITY_BYTES // 4}"):
        store.reserve(size_bytes, uid=1)
    assert store.space.open_drafts == 0


def test_a_draft_that_grew_too_large_stays_open(store: Store) -> None:
    draft = store.reserve(0, uid=0)
    descriptor = store.open_draft(draft)
    os.ftruncate(descriptor, CAPACITY_BYTES // 4 + 1)
    with pytest.raises(WriterActive):
        store.seal(draft, Name(BUCKET, b"a"), Attributes())
    os.close(descriptor)
    with pytest.raises(ObjectTooLarge):
        store.seal(draft, Name(BUCKET, b"a"), Attributes())
    assert draft.open
    assert keys(store) == []
    store.abort(draft)


def test_a_store_full_of_held_bytes_answers_promptly(store: Store) -> None:
    descriptors = []
    try:
        for i in range(CAPACITY_BYTES // MIB):
            info = put(store, b"%d" % i, bytes(MIB))
            descriptors.append(store.open_read(info, uid=i))
        with within(2.0), pytest.raises(NoSpace, match="no room for"):
            store.reserve(MIB, uid=0)
        assert len(keys(store)) == len(descriptors) == CAPACITY_BYTES // MIB
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    store.abort(store.reserve(MIB, uid=0))


def test_room_for_one_object_costs_no_more_than_the_headroom(store: Store) -> None:
    for i in range(CAPACITY_BYTES // MIB):
        put(store, b"%02d" % i, bytes(MIB))
    before = keys(store)
    draft = store.reserve(MIB, uid=0)
    most = store.space.headroom_bytes() // MIB + 1
    assert len(before) - most <= len(keys(store)) < len(before)
    store.abort(draft)


def test_room_is_made_where_open_drafts_were_promised_the_rest(store: Store) -> None:
    for i in range(8):
        put(store, b"%02d" % i, bytes(MIB))
    drafts = [store.reserve(MIB, uid=i) for i in range(8)]
    drafts.append(store.reserve(MIB, uid=9))
    assert 4 <= len(keys(store)) < 8
    for draft in drafts:
        store.abort(draft)


def test_slots_are_made_free_where_bytes_are_not_short(tmp_path: Path) -> None:
    with small_store(tmp_path / "data", max_slots=64) as store:
        for i in range(200):
            put(store, b"%03d" % i, b"")
        assert keys(store)[-1] == b"199"


@pytest.mark.parametrize("block", [False, True], ids=["object", "block"])
def test_a_seal_that_finds_the_table_full_leaves_nothing(tmp_path: Path, block: bool) -> None:
    """As where sealing threads take the room that was made: neither its slot nor its bytes stay in use."""
    with small_store(tmp_path) as store:
        before = store.usage()["tiers"][0]

        def fill_table() -> None:
            for number in range(store.table.max_entries - len(store.table)):
                store.table.put(b"\xff" * 8 + number.to_bytes(8, "big"), int(Kind.BLOCK), 0, 0, 0, tiers=1)

        store.before_eviction.append(fill_table)
        data = b"x" * 100_000
        with pytest.raises(NoSpace):
            _ = put_block(store, b"\x01" * 16, data) if block else put(store, b"k", data)
        assert store.usage()["tiers"][0] == before
        assert (store.usage()["open_drafts"], keys(store)) == (0, [])
