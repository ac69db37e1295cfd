"""Names in a store: which are refused, what no rename takes the place of, and what a refused call leaves."""

from __future__ import annotations

import pytest

from kvfs import limits
from kvfs.errors import Exists, InvalidRequest, IsDirectory, LimitExceeded, NameTooLong, NotFound
from kvfs.keys import block_name
from tests.support.opened_store import store as store
from tests.support.stores import BOUND, BUCKET, draft_of, keys, put, put_block, read
from tiers.model.objects import Attributes, Directory, Name, ObjectInfo
from tiers.model.tier import object_key
from tiers.store.store import Store


def test_the_directory_of_blocks_hides_an_object_of_its_name(store: Store) -> None:
    """In the path view; every other door sees both."""
    put(store, b"kv", b"object", bucket=BOUND)
    put(store, b"kvs", b"object", bucket=BOUND)
    put(store, b"kvs/below", b"object", bucket=BOUND)
    put_block(store, b"\x11" * 16, b"block")
    assert isinstance(store.find_path(Name(BOUND, b"kv")), Directory)
    assert isinstance(store.find_path(Name(BOUND, b"kvs")), Directory)
    assert isinstance(store.lookup(Name(BOUND, b"kv")), ObjectInfo)
    assert isinstance(store.find_path(Name(BOUND, block_name(b"\x11" * 16))), ObjectInfo)
    assert store.find_path(Name(BOUND, block_name(b"\x12" * 16))) is None


def test_no_object_is_renamed_over_the_directory_of_blocks(store: Store) -> None:
    put(store, b"a", b"object", bucket=BOUND)
    put_block(store, b"\x11" * 16, b"block")
    with pytest.raises(IsDirectory):
        store.rename(Name(BOUND, b"a"), Name(BOUND, b"kv"))


@pytest.mark.parametrize("source", [b"a", b"d/a"], ids=["another", "the only one in it"])
def test_no_object_is_renamed_over_a_directory(store: Store, source: bytes) -> None:
    put(store, b"a", b"another")
    put(store, b"d/a", b"the only one in it")
    with pytest.raises(IsDirectory):
        store.rename(Name(BUCKET, source), Name(BUCKET, b"d"))
    assert isinstance(store.lookup(Name(BUCKET, source)), ObjectInfo)


def test_names_over_the_limits_say_so(store: Store) -> None:
    key = b"k" * (limits.MAX_KEY_BYTES + 1)
    with pytest.raises(NameTooLong, match=f"{len(key)} bytes: the limit is {limits.MAX_KEY_BYTES}"):
        put(store, key, b"")
    for call in (
        lambda: store.rename(Name(BUCKET, b"a"), Name(BUCKET, key)),
        lambda: store.make_directory(Name(BUCKET, key + b"/"), Attributes()),
        lambda: store.list(BUCKET, prefix=key),
    ):
        with pytest.raises(NameTooLong, match=str(limits.MAX_KEY_BYTES)):
            call()
    with pytest.raises(NameTooLong, match=f"the limit is {limits.MAX_BUCKET_NAME_BYTES}"):
        store.create_bucket(b"b" * (limits.MAX_BUCKET_NAME_BYTES + 1), uid=0, gid=0)
    longest = put(store, key[:-1], b"data")
    assert read(store, longest) == b"data"
    assert store.find_path(Name(BUCKET, key[:-1])) is not None


def test_a_refused_seal_leaves_nothing_behind(store: Store) -> None:
    draft = draft_of(store, b"data")
    name = Name(BUCKET, b"a")
    with pytest.raises(LimitExceeded, match=str(limits.MAX_USER_METADATA_BYTES)):
        store.seal(draft, name, Attributes(user_metadata=bytes(limits.MAX_USER_METADATA_BYTES + 1)))
    with pytest.raises(InvalidRequest, match="uid is -1"):
        store.seal(draft, name, Attributes(uid=-1))
    assert draft.open
    assert read(store, store.seal(draft, name, Attributes())) == b"data"
    store.remove(name)
    assert store.dram.usage().used_bytes == 0


def test_an_object_has_no_directory_s_name(store: Store) -> None:
    """Its bytes would be beyond the reach of `remove`, which takes the name for a directory's."""
    draft = draft_of(store, b"data")
    with pytest.raises(InvalidRequest, match="ends in '/'"):
        store.seal(draft, Name(BUCKET, b"d/"), Attributes())
    store.seal(draft, Name(BUCKET, b"a"), Attributes())
    with pytest.raises(InvalidRequest, match="both keys end in '/' or none"):
        store.rename(Name(BUCKET, b"a"), Name(BUCKET, b"d/"))
    store.make_directory(Name(BUCKET, b"d/"), Attributes())
    with pytest.raises(InvalidRequest, match="both keys end in '/' or none"):
        store.rename(Name(BUCKET, b"d/"), Name(BUCKET, b"e"))
    with pytest.raises(InvalidRequest, match="ends in '/'"):
        store.remove_directory(Name(BUCKET, b"a"))
    assert keys(store) == [b"a", b"d/"]


def test_block_names_are_ordinary_where_no_namespace_is_bound(store: Store) -> None:
    name = Name(BUCKET, block_name(b"\x11" * 16))
    put(store, b"a", b"1", bucket=BOUND)
    store.rename(Name(BOUND, b"a"), name)
    assert isinstance(store.lookup(name), ObjectInfo)


def test_a_prefix_hash_cannot_be_the_key_of_an_object(store: Store) -> None:
    """Both live in one table: the object would read the block's bytes."""
    info = put(store, b"a", b"object")
    draft = draft_of(store, b"block!")
    for digest in (info.key.digest, object_key(info.object_id + 1).digest):
        with pytest.raises(InvalidRequest, match="prefix hash"):
            store.seal_block(draft, BOUND, digest, parent=None, uid=0)
    found = store.lookup(Name(BUCKET, b"a"))
    assert isinstance(found, ObjectInfo)
    assert read(store, found) == b"object"
    store.abort(draft)


def test_a_failed_rename_leaves_the_target(store: Store) -> None:
    put(store, b"a/" + b"k" * 1000, b"")
    store.make_directory(Name(BUCKET, b"empty-and-longer-than-a-and-that-is-too-long/"), Attributes())
    with pytest.raises(NameTooLong):
        store.rename(Name(BUCKET, b"a/"), Name(BUCKET, b"empty-and-longer-than-a-and-that-is-too-long/"))
    assert len(keys(store)) == 2


def test_a_directory_replaces_an_empty_one(store: Store) -> None:
    put(store, b"a/x", b"")
    store.make_directory(Name(BUCKET, b"d/"), Attributes())
    with pytest.raises(Exists):
        store.rename(Name(BUCKET, b"a/"), Name(BUCKET, b"d/"), replace=False)
    store.rename(Name(BUCKET, b"a/"), Name(BUCKET, b"d/"))
    with pytest.raises(NotFound):
        store.lookup(Name(BUCKET, b"a/"))
    assert b"d/x" in keys(store)
