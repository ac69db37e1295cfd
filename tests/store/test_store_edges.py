"""The edges of the store: limits and their errors, full stores, directories that leave as one, data directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs.errors import (
    ConfigError,
    Exists,
    FormatMismatch,
    InvalidRequest,
    IsDirectory,
    LimitExceeded,
    NameTooLong,
    NoSpace,
    NotFound,
    ObjectTooLarge,
    QuotaExceeded,
    StoreLocked,
    WriterActive,
)
from kvfs.keys import block_name
from tests.support.processor_waits import within
from tests.support.stores import (
    BOUND,
    BUCKET,
    CAPACITY_BYTES,
    draft_of,
    keys,
    put,
    put_block,
    read,
    small_store,
)
from tiers.data_dir import FORMAT_VERSION, open_home
from tiers.eviction.quota import SpaceBook
from tiers.model.blocks import Block, BlockCatalog
from tiers.model.objects import Attributes, Directory, Name, ObjectInfo
from tiers.model.tier import Kind, object_key
from tiers.store.store import Store

MIB = 1 << 20
UNIT = b"0123456789abcdef0123456789abcdef/"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "data") as opened:
        yield opened


# --- listings of blocks -------------------------------------------------------------------------------------

digests = st.builds(
    lambda first, rest: bytes([first]) + rest * 15,
    st.sampled_from([0x00, 0x0A, 0x10, 0xA0, 0xFF]),
    st.sampled_from([b"\0", b"\x0a", b"\x10", b"\xff"]),
)
pieces = st.lists(
    st.sampled_from([b"k", b"kv", b"/", b"0", b"00", b"0a", b"a", b"10", b"f", b"ff"]), max_size=6
)
parts = st.one_of(
    pieces.map(b"".join),
    st.builds(lambda digest, length: block_name(digest)[:length], digests, st.integers(0, 38)),
)
delimiters = st.one_of(st.none(), st.sampled_from([b"", b"/", b"a", b"0", b"0/", b"/0", b"kv", b"ff", b"-"]))


@given(st.sets(digests), parts, parts, delimiters)
@example({bytes(16)}, b"kv/", b"kv/", None)
@example({bytes(16)}, b"kv/", b"kv/", b"/")
@example({bytes(16)}, b"", b"kv/", b"/")
@example({bytes(16), b"\xff" * 16}, b"kv/00/", b"", b"0")
def test_blocks_are_listed_as_sorted_names_are(
    known: set[bytes], prefix: bytes, after: bytes, delimiter: bytes | None
) -> None:
    catalog = BlockCatalog()
    for digest in known:
        catalog.add(digest, Block(b"b", 0, 1, 1, 1))
    catalog.add(b"\x77" * 16, Block(b"another", 0, 1, 1, 1))
    entries = set()
    for name in filter(lambda name: name.startswith(prefix), map(block_name, known)):
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        entries.add(name if cut < 0 else name[: cut + len(delimiter or b"")])
    expected = sorted(entry for entry in entries if entry > after)
    assert list(catalog.names(b"b", prefix=prefix, after=after, delimiter=delimiter)) == expected


@given(st.lists(st.tuples(digests, st.booleans())))
def test_a_catalog_forgets_what_is_removed(steps: list[tuple[bytes, bool]]) -> None:
    catalog, known = BlockCatalog(), set()
    for digest, add in steps:
        if add:
            catalog.add(digest, Block(b"b", 0, 1, 1, 1))
            known.add(digest)
        else:
            assert (catalog.remove(digest) is not None) == (digest in known)
            known.discard(digest)
        assert catalog.count(b"b") == len(catalog) == len(known)
        names = list(catalog.names(b"b", prefix=b"", after=b"", delimiter=None))
        assert names == sorted(map(block_name, known))


def test_a_listing_starts_after_the_directory_of_blocks(store: Store) -> None:
    put_block(store, b"\x11" * 16, b"block")
    page = store.list(BOUND, prefix=b"kv/", after=b"kv/")
    assert [key for key, _ in page.entries] == [block_name(b"\x11" * 16)]


@pytest.mark.parametrize("bucket", [BUCKET, BOUND])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.text("a/b", min_size=1, max_size=5), min_size=1, max_size=10, unique=True),
    prefix=st.sampled_from(["", "a", "a/", "aa", "b"]),
    delimiter=st.sampled_from(["/", "a", "a/", "/a", "aa", "//"]),
    limit=st.integers(1, 3),
)
@example(names=["a/", "a/a"], prefix="a", delimiter="a/", limit=1)  # the delimiter overlaps the prefix
@example(names=["aa/", "aa/a", "aa/b"], prefix="a", delimiter="a/", limit=1)  # a key is prefix plus delimiter
def test_pages_are_those_of_a_sorted_list(
    store: Store, bucket: bytes, names: list[str], prefix: str, delimiter: str, limit: int
) -> None:
    for key, _ in store.list(bucket).entries:
        (store.remove_marker if key.endswith(b"/") else store.remove)(Name(bucket, key))
    for name in names:
        if name.endswith("/"):
            store.put_marker(Name(bucket, name.encode()), Attributes())
        else:
            put(store, name.encode(), b"x", bucket=bucket)
    expected: dict[bytes, bool] = {}
    for name in sorted(name for name in names if name.startswith(prefix)):
        cut = name.find(delimiter, len(prefix))
        expected[(name if cut < 0 else name[: cut + len(delimiter)]).encode()] = cut >= 0
    listed: list[tuple[bytes, bool]] = []
    after: bytes | None = b""
    while after is not None:
        page = store.list(
            bucket, prefix=prefix.encode(), after=after, delimiter=delimiter.encode(), limit=limit
        )
        assert len(page.entries) <= limit
        listed += [(key, key in expected and expected[key]) for key, _ in page.entries]
        after = page.next_after
    assert listed == list(expected.items())


@pytest.mark.parametrize("delimiter", [b"-", b"b", b"/b"])
def test_any_delimiter_makes_common_prefixes(store: Store, delimiter: bytes) -> None:
    put(store, b"a/b-c", b"1")
    put(store, b"a/b-d", b"2")
    put(store, b"z", b"3")
    found = store.list(BUCKET, delimiter=delimiter).entries
    common = b"a/b-d"[: b"a/b-d".index(delimiter) + len(delimiter)]
    assert [key for key, _ in found] == [common, b"z"]
    assert isinstance(found[0][1], Directory)
    assert isinstance(found[1][1], ObjectInfo)


def test_an_object_is_not_shown_for_the_common_prefix_of_its_name(store: Store) -> None:
    put(store, b"a-", b"1")
    [(key, found)] = store.list(BUCKET, delimiter=b"-").entries
    assert key == b"a-"
    assert isinstance(found, Directory)


def test_a_page_of_nothing_is_the_last(store: Store) -> None:
    put_block(store, b"\x11" * 16, b"block")
    assert store.list(BOUND, limit=0).next_after is None


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


# --- room ---------------------------------------------------------------------------------------------------


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


# --- who may leave ------------------------------------------------------------------------------------------


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


# --- names --------------------------------------------------------------------------------------------------


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


# --- the data directory -------------------------------------------------------------------------------------

OPENER = (
    "import sys; from pathlib import Path; from tiers.data_dir import open_home; open_home(Path(sys.argv[1]))"
)


def test_a_second_process_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    home = open_home(tmp_path / "data")
    ran = subprocess.run(
        [sys.executable, "-c", OPENER, str(tmp_path / "data")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "StoreLocked" in ran.stderr
    assert f"{tmp_path / 'data'} is in use" in ran.stderr
    assert f"process {os.getpid()})" in ran.stderr
    home.close()
    subprocess.run([sys.executable, "-c", OPENER, str(tmp_path / "data")], check=True)


def test_a_directory_knows_its_store_and_how_it_was_left(tmp_path: Path) -> None:
    first = open_home(tmp_path)
    assert first.clean
    with pytest.raises(StoreLocked):
        open_home(tmp_path)
    first.begin("")
    first.close(clean=False)
    second = open_home(tmp_path)
    assert not second.clean
    assert second.store_id == first.store_id
    second.begin(first.start)
    second.close()
    third = open_home(tmp_path)
    assert third.clean
    third.begin(second.start)
    assert json.loads((tmp_path / "format.json").read_text())["clean"] is False  # while it is in use
    third.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            json.dumps({"format": FORMAT_VERSION + 1, "store_id": "00" * 16, "clean": True}),
            f"says data format {FORMAT_VERSION + 1}.* reads up to {FORMAT_VERSION}",
        ),
        (json.dumps({"format": 1, "store_id": "00" * 15, "clean": True}), "15 bytes: it must be 16"),
        (json.dumps({"format": 1, "store_id": "zz", "clean": True}), "not a kvfs format file"),
        (json.dumps({"format": 1, "store_id": 5, "clean": True}), "not a kvfs format file"),
        ('{"format": Infinity, "store_id": "00", "clean": true}', "not a kvfs format file"),
        (json.dumps({"format": 1}), "not a kvfs format file"),
        ("[]", "not a kvfs format file"),
        ("", "not a kvfs format file"),
        ("\udcff", "not a kvfs format file"),
    ],
)
def test_a_foreign_format_is_refused_and_left_as_it_is(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "format.json"
    file.write_text(content, errors="surrogateescape")
    before = file.read_bytes()
    for _ in range(2):  # the lock is free again
        with pytest.raises(FormatMismatch, match=message) as caught:
            open_home(tmp_path)
        assert str(file) in str(caught.value)
    assert file.read_bytes() == before


def test_a_store_that_did_not_open_leaves_its_directory_free(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError):
            small_store(tmp_path / "data", backing="paper")
    with small_store(tmp_path / "data") as store:
        assert keys(store) == []


# --- a table that fills in the middle of a seal -------------------------------------------------------------
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
