"""Listings as a pure generator over a sorted pager: what the store is asked, and what the client gets.

Responsibility: prefix, delimiter, max-keys, start and tokens of ListObjects, ListObjectsV2, ListObjectVersions and
ListMultipartUploads. `collect` yields `Wanted`, is sent a `Page`, and returns the listing: one code serves a session
that awaits its pages and a test that does not.

Invariants: keys are text, and code points order as UTF-8 bytes do. A page holds at most `max_keys` keys and common
prefixes together, each prefix once, also where a page ends in one: the next begins behind all that it stands for. A
token says where the next page begins and nothing else; it is opaque to clients and checked when it comes back.

Concurrency: pure; keys that appear or vanish between two pages are seen or not, the others exactly once.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar
from zlib import crc32

from gateway.protocol.errors import argument
from kvfs.limits import MAX_KEY_BYTES, MAX_LIST_ENTRIES

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for at most `limit` entries after `after`, which may be a common prefix: then none below it follow."""

    prefix: str
    after: str
    delimiter: str
    """Empty: none."""
    limit: int


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A store's answer, which may hold fewer entries than wanted although more follow."""

    entries: Sequence[tuple[str, T | None]]
    """(key, item), or (common prefix with its delimiter, None), in order."""
    truncated: bool
    """Whether more follow."""


@dataclass(frozen=True, slots=True)
class ListRequest:
    """The parameters that the listings have in common, decoded from the query."""

    prefix: str
    delimiter: str
    max_keys: int
    """Clamped to 1,000."""
    after: str
    """The exclusive start: start-after, marker or the name in a token."""
    encoding_url: bool
    fetch_owner: bool = False
    start_after: str | None = None
    """As the client gave it, for the echo."""
    token: str | None = None
    marker: str | None = None


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """One page for the client."""

    keys: list[tuple[str, T]]
    prefixes: list[str]
    truncated: bool
    last: str
    """The last key or prefix given; empty if none."""

    @property
    def token(self) -> str | None:
        """Return the token of the next page; None if there is none."""
        return encode_token(self.last) if self.truncated else None


def collect(request: ListRequest) -> Generator[Wanted, Page[T], Listing[T]]:
    """Collect one page of a listing."""
    keys: list[tuple[str, T]] = []
    prefixes: list[str] = []
    after, left, truncated = request.after, request.max_keys, False
    while left:
        page = yield Wanted(request.prefix, after, request.delimiter, left)
        for name, item in page.entries[:left]:
            if item is None:
                prefixes.append(name)
            else:
                keys.append((name, item))
            after = name
        left -= len(page.entries[:left])
        truncated = page.truncated
        if not truncated or not page.entries:
            break
    return Listing(keys, prefixes, truncated, after if keys or prefixes else "")


# --- requests ------------------------------------------------------------------------------------------------
def parse_v1(arguments: Mapping[str, str]) -> ListRequest:
    """Parse the query of ListObjects. Raises S3Error InvalidArgument."""
    marker = arguments.get("marker", "")
    return replace(_parse(arguments, marker), marker=marker)


def parse_v2(arguments: Mapping[str, str]) -> ListRequest:
    """Parse the query of ListObjectsV2; a token beats start-after, an empty one is none.

    Raises S3Error InvalidArgument.
    """
    token, start_after = arguments.get("continuation-token"), arguments.get("start-after")
    after = decode_token(token) if token else start_after or ""
    fetch_owner = arguments.get("fetch-owner", "").lower() == "true"
    return replace(_parse(arguments, after), fetch_owner=fetch_owner, start_after=start_after, token=token)


def parse_versions(arguments: Mapping[str, str]) -> ListRequest:
    """Parse the query of ListObjectVersions: every key has one version. Raises S3Error InvalidArgument."""
    marker = arguments.get("key-marker", "")
    version = arguments.get("version-id-marker", "")
    if version and not marker:
        raise argument("version-id-marker", version, "A version-id-marker needs a key-marker")
    if version not in ("", "null"):
        raise argument("version-id-marker", version, "The only version of a key is null")
    return replace(_parse(arguments, marker), marker=marker)


def parse_uploads(arguments: Mapping[str, str]) -> ListRequest:
    """Parse the query of ListMultipartUploads; `upload-id-marker` is the caller's. Raises S3Error InvalidArgument."""
    marker = arguments.get("key-marker", "")
    return replace(_parse(arguments, marker, "max-uploads"), marker=marker)


def _parse(arguments: Mapping[str, str], after: str, limit_name: str = "max-keys") -> ListRequest:
    """Parse what the listings have in common."""
    encoding = arguments.get("encoding-type")
    if encoding not in (None, "", "url"):
        raise argument("encoding-type", encoding or "", "The only encoding type is url")
    prefix, delimiter = arguments.get("prefix", ""), arguments.get("delimiter", "")
    for name, text in (("prefix", prefix), ("delimiter", delimiter), ("marker", after)):
        if len(text.encode()) > MAX_KEY_BYTES:
            raise argument(name, text, f"Longer than a key, which has at most {MAX_KEY_BYTES} bytes")
    return ListRequest(prefix, delimiter, parse_limit(arguments, limit_name), after, encoding == "url")


def parse_limit(arguments: Mapping[str, str], name: str, most: int = MAX_LIST_ENTRIES) -> int:
    """Parse `max-keys`, `max-parts`, ...: 0 to 2^31-1, clamped to `most`. Raises S3Error InvalidArgument."""
    text = arguments.get(name, "")
    if text == "":
        return most
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 31):
        raise argument(name, text, f"{name} is to be an integer from 0 to 2147483647")
    return min(int(text), most)


def parse_number(arguments: Mapping[str, str], name: str) -> int:
    """Parse `part-number-marker`, ...: 0 to 2^31-1, 0 without. Raises S3Error InvalidArgument."""
    return parse_limit({name: arguments.get(name) or "0"}, name, (1 << 31) - 1)


# --- tokens --------------------------------------------------------------------------------------------------
def encode_token(after: str) -> str:
    """Encode an opaque token: base64 of the last name behind its CRC32."""
    data = after.encode()
    return urlsafe_b64encode(crc32(data).to_bytes(4, "big") + data).decode()


def decode_token(token: str) -> str:
    """Decode the name that a token stands for. Raises S3Error InvalidArgument."""
    try:
        data = urlsafe_b64decode(token)
        check, name = data[:4], data[4:]
        if check == crc32(name).to_bytes(4, "big") and name:
            return name.decode()
    except (Base64Error, ValueError):
        pass
    raise argument("continuation-token", token, "The continuation token is not one of this endpoint")
