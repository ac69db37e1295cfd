"""What may leave a store: nothing that is held open or pinned, and directories named by a hash as one."""

from __future__ import annotations

import os

from tests.support.opened_store import store as store
from tests.support.stores import BUCKET, CAPACITY_BYTES, keys, put, put_block
from tiers.model.objects import Attributes, Name
from tiers.store.store import Store

MIB = 1 << 20
UNIT = b"0123456789abcdef0123456789abcdef/"


def test_what_is_held_open_is_passed_over(store: Store) -> None:
    held = store.open_read(put(store, b"held", bytes(MIB)), uid=0)
    put(store, b"other", bytes(MIB))
    assert store.evict(MIB) == MIB
    assert keys(store) == [b"held"]
    assert store.evict(MIB) == 0
    os.close(held)
    assert store.evict(MIB) == MIB
    assert keys(store) == []


def test_the_ancestors_of_a_held_block_stay(store: Store) -> None:
    chain = [bytes([i]) * 16 for i in range(1, 5)]
    parents = [None, *chain]
    infos = [put_block(store, key, bytes(MIB), parent=up) for key, up in zip(chain, parents, strict=False)]
    held = store.open_read(infos[2], uid=0)
    store.evict(CAPACITY_BYTES)
    assert store.match(b"".join(chain)) == 3
    os.close(held)
    store.evict(CAPACITY_BYTES)
    assert store.match(b"".join(chain)) == 0


def test_a_directory_named_by_a_hash_leaves_as_one_with_its_marker(store: Store) -> None:
    store.make_directory(Name(BUCKET, UNIT), Attributes())
    put(store, UNIT + b"layer0", bytes(1000))
    put(store, b"younger", bytes(1000))
    put(store, UNIT + b"layer1", bytes(1000))
    store.lookup(Name(BUCKET, UNIT + b"layer0"))
    os.close(store.open_read(put(store, b"youngest", bytes(1000)), uid=0))
    store.evict(1001)
    assert keys(store) == [b"youngest"]


def test_a_directory_that_is_renamed_to_a_hash_leaves_as_one(store: Store) -> None:
    store.make_directory(Name(BUCKET, b"tmp/"), Attributes())
    put(store, b"tmp/layer0", bytes(1000))
    put(store, b"other", bytes(1000))
    put(store, b"tmp/layer1", bytes(1000))
    store.rename(Name(BUCKET, b"tmp/"), Name(BUCKET, UNIT))
    put(store, b"layer2.tmp", bytes(1000))
    store.rename(Name(BUCKET, b"layer2.tmp"), Name(BUCKET, UNIT + b"layer2"))
    store.evict(1001)
    assert keys(store) == []


def test_what_is_renamed_out_of_a_hash_leaves_alone(store: Store) -> None:
    put(store, UNIT + b"a", bytes(1000))
    put(store, UNIT + b"b", bytes(1000))
    store.rename(Name(BUCKET, UNIT + b"a"), Name(BUCKET, b"a"))
    store.evict(1)
    assert keys(store) == [b"a"]


def test_a_pin_survives_a_rename_and_keeps_the_whole_unit(store: Store) -> None:
    put(store, b"a", bytes(1000))
    put(store, UNIT + b"b", bytes(1000))
    store.set_attributes(Name(BUCKET, b"a"), pinned=True)
    store.rename(Name(BUCKET, b"a"), Name(BUCKET, UNIT + b"a"))
    assert store.evict(CAPACITY_BYTES) == 0
    store.set_attributes(Name(BUCKET, UNIT + b"a"), pinned=False)
    assert store.evict(CAPACITY_BYTES) == 2000
