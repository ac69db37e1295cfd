"""Listings of a store: blocks and objects, in pages and with any delimiter, as in a sorted list of their names."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvfs.keys import block_name
from tests.support.opened_store import store as store
from tests.support.stores import BOUND, BUCKET, put, put_block
from tiers.model.blocks import Block, BlockCatalog
from tiers.model.objects import Attributes, Directory, Name, ObjectInfo
from tiers.store.store import Store

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
