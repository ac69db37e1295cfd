"""Keys of LMCache's objects, what is locked and results of tasks, without LMCache."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs._native.blocks.reader import View
from kvfs.connectors.common import digest_keys, string_namespace
from kvfs.connectors.lmcache_rules.object_keys import (
    Layout,
    ObjectKeys,
    bare_key_bytes,
    key_bytes,
    layout_of,
)
from kvfs.connectors.lmcache_rules.object_locks import ObjectLocks
from kvfs.connectors.lmcache_rules.task_results import Results, Tasks
from kvfs.limits import CONNECTOR_LAYOUTS, CONNECTOR_LOCKS
from tests.support.waits import eventually


@dataclass(frozen=True)
class Dtype:
    """An element type, as torch's."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class Key:
    """LMCache's ObjectKey."""

    chunk_hash: bytes = b"hash"
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


FLOAT16, BFLOAT16 = Dtype("float16", 2), Dtype("bfloat16", 2)
UINT8, FLOAT32 = Dtype("uint8", 1), Dtype("float32", 4)


def described(*parts: tuple[Dtype, tuple[int, ...]]) -> Any:
    return SimpleNamespace(shapes=[shape for _, shape in parts], dtypes=[dtype for dtype, _ in parts])


HALF = layout_of(described((FLOAT16, (2, 3, 8, 16))))
OTHER_HALF = layout_of(described((BFLOAT16, (2, 3, 8, 16))))
STATE = layout_of(described((FLOAT32, (1, 2, 1, 40)), (UINT8, (1, 1, 1, 7))))
SERIALISED = layout_of(described((UINT8, (100,))))


def object_keys() -> ObjectKeys:
    return ObjectKeys(lambda key: hashlib.sha256(key).digest()[:16])


def digests_of(keys: ObjectKeys, key: Key, layouts: dict[int, Layout]) -> list[bytes]:
    return [name.digest for name in keys.looked_up(key, layouts)]


# --- layouts -----------------------------------------------------------------------------------------------
def test_a_layout_has_the_size_of_all_parts() -> None:
    assert HALF.size_bytes == 2 * 3 * 8 * 16 * 2
    assert STATE.size_bytes == 2 * 40 * 4 + 7
    assert (HALF.is_serialised, STATE.is_serialised, SERIALISED.is_serialised) == (False, False, True)


def test_bytes_without_a_form_are_serialised_whatever_their_size() -> None:
    assert layout_of(described((UINT8, (9,)))) == SERIALISED
    assert layout_of(SimpleNamespace(shapes=[(9, 0, 0, 0)], dtypes=[None])) == SERIALISED
    assert not layout_of(described((UINT8, (1, 9)))).is_serialised, "a group of one-byte elements"


# --- keys --------------------------------------------------------------------------------------------------
DTYPES = st.sampled_from([FLOAT16, BFLOAT16, UINT8, FLOAT32])
SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)
LAYOUTS = st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=3).map(lambda parts: described(*parts))
TEXTS = st.text(st.sampled_from('\0"[],01 aé\\'), max_size=4)
KEYS = st.builds(
    Key,
    chunk_hash=st.binary(max_size=3) | st.sampled_from([b"0\0\0", b"\x000", b"\0\0"]),
    model_name=TEXTS,
    kv_rank=st.integers(0, 11),
    object_group_id=st.integers(0, 11),
    cache_salt=TEXTS,
)


@given(st.tuples(KEYS, LAYOUTS), st.tuples(KEYS, LAYOUTS))
def test_no_two_objects_have_one_key(one: tuple[Key, Any], two: tuple[Key, Any]) -> None:
    first, second = ((key, layout_of(layout)) for key, layout in (one, two))
    assert (key_bytes(first[0], first[1].name) == key_bytes(second[0], second[1].name)) == (first == second)


@given(KEYS, LAYOUTS, KEYS)
def test_no_object_has_a_bare_key(key: Key, layout: Any, other: Key) -> None:
    assert key_bytes(key, layout_of(layout).name) != bare_key_bytes(other)
    assert key_bytes(key, layout_of(layout).name) != bare_key_bytes(key)


def test_no_models_name_makes_a_bare_key_an_objects() -> None:
    key = Key(chunk_hash=b"0\x000\0\0hash")
    text, _, _ = key_bytes(key, HALF.name).lstrip(b"\xff").partition(b"\0")
    named = Key(model_name=text.decode(), chunk_hash=b"hash")
    assert bare_key_bytes(named).endswith(text + b"\0" + key.chunk_hash)
    assert bare_key_bytes(named) != key_bytes(key, HALF.name)


@given(st.sampled_from(["\0", ",", ", ", '", "', '", ', "\\"]), st.integers(0, 9), st.integers(0, 9))
def test_no_text_moves_into_the_next_field(between: str, rank: int, group: int) -> None:
    one = Key(model_name=f"model{between}{rank}", kv_rank=group, object_group_id=7, cache_salt="salt")
    two = Key(model_name="model", kv_rank=rank, object_group_id=group, cache_salt=f"7{between}salt")
    assert key_bytes(one, HALF.name) != key_bytes(two, HALF.name)
    assert key_bytes(replace(one, cache_salt=f"salt{between}"), "layout") != key_bytes(
        replace(one, cache_salt="salt"), f"{between}layout"
    )


def test_each_field_makes_another_key() -> None:
    base = Key()
    others = [
        replace(base, chunk_hash=b"hast"),
        replace(base, model_name="model2"),
        replace(base, kv_rank=1),
        replace(base, object_group_id=1),
        replace(base, cache_salt="0"),
    ]
    transposed = layout_of(described((FLOAT16, (2, 8, 3, 16))))
    split = layout_of(described((FLOAT16, (1, 3, 8, 16)), (FLOAT16, (1, 3, 8, 16))))
    made = [key_bytes(each, HALF.name) for each in [base, *others]]
    made += [key_bytes(base, each.name) for each in (OTHER_HALF, transposed, split, STATE, SERIALISED)]
    assert len(set(made)) == len(made)


def test_a_bare_key_stays_what_it_is() -> None:
    """What stores have under some is found by them: they are recorded here."""
    namespace = string_namespace("lmcache object key", {"revision": "1"})
    some = [Key(b"\x01" * 32, "test-model", 0x01000100), Key(b"\x02" * 32, "org/model", 3, 2, "user")]
    assert [digest.hex() for digest in digest_keys(namespace, [bare_key_bytes(key) for key in some])] == [
        "4923c32caa44f4ac0929cf476d39b6ac",
        "38dd3a556e57f5455bbd3cad4d709b2b",
    ]


# --- which keys are read -----------------------------------------------------------------------------------
def test_a_look_up_finds_what_was_stored() -> None:
    stores, looks = object_keys(), object_keys()
    layouts = {0: HALF, 1: STATE}
    for group, layout in layouts.items():
        key = Key(object_group_id=group)
        looks.note_groups([Key(object_group_id=1)], layouts)
        assert digests_of(looks, key, layouts)[0] == stores.stored(key, layout)
        assert looks.looked_up(key, layouts)[0].size_bytes == layout.size_bytes
        assert stores.stored(key, layout) not in digests_of(looks, key, {group: OTHER_HALF})


def test_a_bare_key_is_read_where_the_model_has_one_group_and_by_size() -> None:
    keys = object_keys()
    bare = hashlib.sha256(bare_key_bytes(Key())).digest()[:16]
    assert keys.looked_up(Key(), {0: HALF})[-1] == (bare, None), "serialised objects have any size"
    assert keys.loaded(Key(), HALF)[1:] == [bare]
    assert keys.looked_up(Key(), {0: HALF})[1:] == [(bare, HALF.size_bytes)]
    assert keys.stored(Key(), HALF) != bare
    other = Key(object_group_id=1)
    keys.note_groups([Key(), other], {0: HALF, 1: STATE})
    for key in (Key(), other):
        assert bare not in digests_of(keys, key, {0: HALF, 1: STATE})
        assert len(keys.loaded(key, HALF)) == 1
    assert len(keys.loaded(Key(model_name="alone"), HALF)) == 2


def test_serialised_objects_are_looked_up_by_the_layout_of_what_becomes_of_them() -> None:
    stores, looks = object_keys(), object_keys()
    stored = stores.stored(Key(), SERIALISED)
    assert stored in digests_of(looks, Key(), {0: HALF}), "before the first store it may be either"
    assert stored in digests_of(stores, Key(), {0: HALF})
    assert looks.stored(Key(), HALF) in digests_of(looks, Key(), {0: HALF})
    assert stored not in digests_of(looks, Key(), {0: HALF}), "objects are not transformed here"
    assert stored not in looks.loaded(Key(), HALF)


def test_a_look_up_without_layouts_goes_by_those_that_were_seen() -> None:
    keys = object_keys()
    stored = [keys.stored(Key(), layout) for layout in (HALF, OTHER_HALF)]
    assert digests_of(keys, Key(), {})[:2] == stored
    assert not set(stored) & set(digests_of(object_keys(), Key(), {}))


def test_all_that_was_seen_is_removed() -> None:
    keys = object_keys()
    stored = {keys.stored(Key(), layout) for layout in (HALF, OTHER_HALF, SERIALISED)}
    keys.note_groups([Key()], {0: STATE})
    found = object_keys()
    stored |= {found.stored(Key(), STATE), hashlib.sha256(bare_key_bytes(Key())).digest()[:16]}
    assert set(keys.removed(Key())) == stored


def test_so_many_layouts_are_remembered() -> None:
    keys = object_keys()
    for width in range(1, CONNECTOR_LAYOUTS + 3):
        keys.stored(Key(), layout_of(described((FLOAT16, (1, width)))))
    assert len(keys.removed(Key())) == CONNECTOR_LAYOUTS + 2


# --- locks -------------------------------------------------------------------------------------------------
@pytest.fixture
def view() -> Iterator[View]:
    fd = os.memfd_create("object")
    os.write(fd, b"object" * 1000)
    made = View.of_descriptor(fd, 6000)
    assert made is not None
    yield made
    os.close(fd)


def test_a_locked_object_is_copied_where_digest_and_size_fit(view: View) -> None:
    locks, place = ObjectLocks(), bytearray(6000)
    locks.lock(Key(), b"digest", view)
    assert not locks.copy(Key(), [b"other"], place)
    assert not locks.copy(Key(object_group_id=1), [b"digest"], place)
    assert not locks.copy(Key(), [b"digest"], bytearray(5999))
    assert not any(place)
    assert locks.copy(Key(), [b"other", b"digest"], place)
    assert place == b"object" * 1000
    locks.unlock(Key(object_group_id=1))
    assert (len(locks), view.released) == (1, False)
    locks.unlock(Key())
    assert (len(locks), view.released) == (0, True)
    locks.unlock(Key())
    assert locks.room == CONNECTOR_LOCKS


def test_a_key_is_locked_until_each_look_up_unlocked_it() -> None:
    locks = ObjectLocks()
    views = []
    for _ in range(2):
        fd = os.memfd_create("object")
        os.write(fd, b"object")
        made = View.of_descriptor(fd, 6)
        assert made is not None
        views.append(made)
        os.close(fd)
        locks.lock(Key(), b"digest", made)
    assert locks.room == CONNECTOR_LOCKS - 2
    locks.unlock(Key())
    assert locks.copy(Key(), [b"digest"], bytearray(6))
    assert sum(each.released for each in views) == 1
    locks.close()
    assert all(each.released for each in views)
    assert (len(locks), locks.room) == (0, CONNECTOR_LOCKS)


def test_an_object_that_is_unlocked_while_it_is_copied_stays_until_then(view: View) -> None:
    locks = ObjectLocks()
    locks.lock(Key(), b"digest", view)
    with memoryview(view) as source:
        locks.unlock(Key())
        assert (len(locks), bytes(source)) == (0, b"object" * 1000)


# --- tasks -------------------------------------------------------------------------------------------------
class Heard:
    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def notify(self) -> None:
        with self._lock:
            self.count += 1


def test_each_task_has_one_result_that_is_taken_once(caplog: pytest.LogCaptureFixture) -> None:
    heard, tasks = Heard(), Tasks(logging.getLogger("lmcache.kvfs"))
    results = Results(heard)

    def fail() -> None:
        raise ValueError("of a task")

    numbers = [tasks.submit(lambda i=i: i, "failed", results) for i in range(8)]
    failed = tasks.submit(fail, "failed", results)
    eventually(lambda: heard.count == 9, "nine tasks are done")
    assert results.take(failed) == "failed"
    assert results.take(failed) is None
    assert "of a task" in caplog.text
    assert results.take_all() == dict(zip(numbers, range(8), strict=True))
    assert results.take_all() == {}
    tasks.close()
