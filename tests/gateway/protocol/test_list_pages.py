"""Pages of the S3 door's listings against a sorted list: cut anywhere, continued by token or marker."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.protocol import list_pages
from gateway.protocol.list_pages import Listing, Page, Wanted
from gateway.xml import listings
from tests.support.s3_documents import KEYS, read
from tests.support.s3_refusals import code_of

T = TypeVar("T")

NAMES = st.text(st.sampled_from("ab/é\U0001f600"), min_size=1, max_size=6)


def entries_of(keys: list[str], prefix: str, delimiter: str) -> list[tuple[str, int | None]]:
    """Everything that a listing shows, in order."""
    found: dict[str, int | None] = {}
    for key in sorted(keys, key=str.encode):
        if key.startswith(prefix):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                found[key[: cut + len(delimiter)]] = None
            else:
                found[key] = len(key)
    return list(found.items())


class Pager:
    """A store that gives at most `most` entries at once, and checks what it is asked."""

    def __init__(self, keys: list[str], most: int) -> None:
        self.keys, self.most = keys, most

    def page(self, wanted: Wanted) -> Page[int]:
        assert wanted.limit > 0
        past = wanted.after[len(wanted.prefix) :] if wanted.after.startswith(wanted.prefix) else ""
        under = wanted.after if wanted.delimiter and past.endswith(wanted.delimiter) else None
        left = [
            key
            for key in self.keys
            if key.encode() > wanted.after.encode() and not (under is not None and key.startswith(under))
        ]
        found = entries_of(left, wanted.prefix, wanted.delimiter)
        count = min(wanted.limit, self.most)
        return Page(found[:count], len(found) > count)

    def run(self, generator: Generator[Wanted, Page[T], Listing[T]]) -> Listing[T]:
        try:
            wanted = next(generator)
            while True:
                wanted = generator.send(self.page(wanted))  # type: ignore[arg-type]
        except StopIteration as stop:
            found: Listing[T] = stop.value
            return found


def in_order(found: Listing[int]) -> list[tuple[str, int | None]]:
    both: list[tuple[str, int | None]] = [*found.keys, *((prefix, None) for prefix in found.prefixes)]
    return sorted(both, key=lambda entry: entry[0].encode())


@example(["a/", "a/a"], "a", "a/", 1, 1)
@settings(max_examples=300, deadline=None)
@given(
    st.lists(NAMES, unique=True, max_size=25),
    st.sampled_from(["", "a", "a/", "b", "é"]),
    st.sampled_from(["", "/", "b", "a/", "é"]),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_pages_are_the_sorted_list_cut_up(
    keys: list[str], prefix: str, delimiter: str, max_keys: int, most: int
) -> None:
    pager = Pager(keys, most)
    arguments = {"prefix": prefix, "delimiter": delimiter, "max-keys": str(max_keys)}
    expected = entries_of(keys, prefix, delimiter)
    v2, v1, token, marker = [], [], None, ""
    while True:
        asked = arguments | ({"continuation-token": token, "start-after": "zzz"} if token else {})
        page: Listing[int] = pager.run(list_pages.collect(list_pages.parse_v2(asked)))
        v2 += in_order(page)
        older: Listing[int] = pager.run(
            list_pages.collect(list_pages.parse_v1(arguments | {"marker": marker}))
        )
        v1 += in_order(older)
        assert in_order(older) == in_order(page)
        assert len(in_order(page)) <= max_keys
        assert page.truncated == (len(v2) < len(expected))
        if not page.truncated:
            assert page.token is None
            break
        assert page.last == in_order(page)[-1][0]
        token, marker = page.token, older.last
    assert v2 == v1 == expected


@given(st.lists(NAMES, unique=True, max_size=25), NAMES)
def test_start_after_is_exclusive(keys: list[str], after: str) -> None:
    page: Listing[int] = Pager(keys, 1000).run(
        list_pages.collect(list_pages.parse_v2({"start-after": after}))
    )
    assert [key for key, _ in page.keys] == sorted(
        (key for key in keys if key.encode() > after.encode()), key=str.encode
    )


def test_an_empty_token_is_none_and_comes_back() -> None:
    asked = list_pages.parse_v2({"continuation-token": "", "start-after": "a"})
    assert (asked.after, asked.token) == ("a", "")
    body = listings.list_objects_v2("b", asked, Listing([], [], False, ""))
    assert read("ListObjectsV2", body)["ContinuationToken"] == ""


def test_no_keys_are_wanted() -> None:
    page: Listing[int] = Pager(["a"], 1).run(list_pages.collect(list_pages.parse_v2({"max-keys": "0"})))
    assert (page.keys, page.prefixes, page.truncated, page.token) == ([], [], False, None)


@pytest.mark.parametrize(
    ("text", "found"), [("", 1000), ("0", 0), ("7", 7), ("1000", 1000), ("1001", 1000), ("2147483647", 1000)]
)
def test_max_keys_is_clamped(text: str, found: int) -> None:
    assert list_pages.parse_v1({"max-keys": text}).max_keys == found


@pytest.mark.parametrize(
    "arguments",
    [
        {"max-keys": "-1"},
        {"max-keys": "x"},
        {"max-keys": "2147483648"},
        {"max-keys": "١"},
        {"max-keys": "0" * 5000},
        {"encoding-type": "base64"},
        {"continuation-token": "AAAA"},
        {"continuation-token": "é"},
        {"continuation-token": list_pages.encode_token("abc")[:-4] + "AAAA"},
        {"prefix": "x" * 1025},
        {"start-after": "é" * 513},
    ],
    ids=str,
)
def test_listings_that_are_refused(arguments: dict[str, str]) -> None:
    assert code_of(lambda: list_pages.parse_v2(arguments)) == "InvalidArgument"


@given(KEYS)
def test_tokens_come_back_and_are_opaque(name: str) -> None:
    token = list_pages.encode_token(name)
    assert list_pages.decode_token(token) == name
    assert token.isascii()


def test_markers_of_versions_and_uploads() -> None:
    assert list_pages.parse_versions({"key-marker": "a", "version-id-marker": "null"}).after == "a"
    for arguments in ({"version-id-marker": "null"}, {"key-marker": "a", "version-id-marker": "3"}):
        assert code_of(lambda arguments=arguments: list_pages.parse_versions(arguments)) == "InvalidArgument"
    assert list_pages.parse_uploads({"max-uploads": "3", "key-marker": "k"}).max_keys == 3
    assert list_pages.parse_number({}, "part-number-marker") == 0
    assert list_pages.parse_number({"part-number-marker": "70000"}, "part-number-marker") == 70000
