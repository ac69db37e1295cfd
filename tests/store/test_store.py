"""The store by itself: order of use, failures half-way, and who is charged."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import NoSpace
from tests.support.stores import BOUND, put_block, small_store
from tests.support.stores import put as put_object
from tiers.model.objects import Attributes, Name, ObjectInfo
from tiers.model.tier import Kind
from tiers.recovery.start import StoreOptions, open_store
from tiers.store.store import Store

MIB = 1 << 20
BUCKET = b"bucket"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(
        StoreOptions(tmp_path / "data", dram_bytes=16 * MIB, max_slots=64, backing="directory")
    ) as store:
        store.create_bucket(BUCKET, uid=0, gid=0)
        yield store


def put(store: Store, key: bytes, data: bytes = b"bytes", uid: int = 0) -> ObjectInfo:
    draft = store.reserve(len(data), uid=uid)
    fd = store.open_draft(draft)
    os.pwrite(fd, data, 0)
    os.close(fd)
    return store.seal(draft, Name(BUCKET, key), Attributes(uid=uid))


def test_hits_reported_late_do_not_make_the_newest_object_the_oldest(store: Store) -> None:
    unreported = [put(store, b"read-%d" % i, bytes(MIB)).key for i in range(4)]

    def report() -> None:
        while unreported:
            store.touch(unreported.pop())

    store.before_eviction.append(report)
    put(store, b"newest", bytes(MIB))
    store.evict(4 * MIB)
    assert isinstance(store.lookup(Name(BUCKET, b"newest")), ObjectInfo)


def test_a_seal_that_the_index_refuses_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.dram.usage().slots

    def full(*_: object) -> None:
        raise NoSpace("the index is full")

    with monkeypatch.context() as patched:
        patched.setattr(store.names, "put", full)
        with pytest.raises(NoSpace):
            put(store, b"name", uid=7)
    assert store.dram.usage().slots == before
    assert store.space.open_drafts == 0
    put(store, b"name")


@pytest.mark.parametrize("kind", ["object", "block"])
def test_what_is_sealed_has_no_holes(tmp_path: Path, kind: str) -> None:
    """Whoever maps a hole while the tier is full meets SIGBUS."""
    with small_store(tmp_path / "data") as store:
        store.create_bucket(BUCKET, uid=0, gid=0)
        draft = store.reserve(0, uid=0)
        descriptor = store.open_draft(draft)
        os.pwrite(descriptor, b"end", 3 * MIB)
        os.close(descriptor)
        if kind == "object":
            info = store.seal(draft, Name(BUCKET, b"sparse"), Attributes())
        else:
            info = store.seal_block(draft, BOUND, b"\1" * 16, parent=None, uid=0)
        descriptor = store.open_read(info, uid=0)
        assert os.fstat(descriptor).st_blocks * 512 >= info.size_bytes == 3 * MIB + 3
        os.close(descriptor)


def test_holes_that_find_no_room_leave_the_draft_as_it_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = store.reserve(0, uid=0)
    descriptor = store.open_draft(draft)
    os.ftruncate(descriptor, MIB)
    os.close(descriptor)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(NoSpace, match="holes"):
            store.seal(draft, Name(BUCKET, b"sparse"), Attributes())
    assert store.space.open_drafts == 1
    assert store.seal(draft, Name(BUCKET, b"sparse"), Attributes()).size_bytes == MIB


def test_without_descriptors_an_object_is_removed_and_its_slot_comes_back(store: Store) -> None:
    put(store, b"name")
    before = store.dram.usage().slots
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        store.remove(Name(BUCKET, b"name"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    store.maintain()
    assert store.dram.usage().slots == before - 1


def test_a_block_carries_the_id_of_its_bucket(tmp_path: Path) -> None:
    with small_store(tmp_path / "data") as store:
        put_block(store, b"\1" * 16, b"of a block")
        put_object(store, b"name", b"of a name")
        ids = {sealed.header.key.kind: sealed.header.bucket_id for sealed in store.dram.sealed()}
        assert ids == {Kind.BLOCK: store.bucket(BOUND).bucket_id, Kind.OBJECT: 0}
        assert len({bucket.bucket_id for bucket in store.buckets()}) == 2
