"""Listings as pure generators over a sorted pager: what the store is asked, and what the client gets.

A generator yields `Wanted` and is sent a `Page`; it returns the listing. So that one code serves a session that awaits
and a test that does not. Keys are text; code points order as UTF-8 bytes do.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """At most `limit` entries after `after` (exclusive; may be a common prefix, then nothing below it follows)."""

    prefix: str
    after: str
    delimiter: str
    """Empty: none."""
    limit: int


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    entries: Sequence[tuple[str, T | None]]
    """(key, what is known of it), or (common prefix with its delimiter, None), in order."""
    truncated: bool
    """Whether more follow."""


@dataclass(frozen=True, slots=True)
class ListRequest:
    """What the three listings have in common, decoded from the query."""

    prefix: str
    delimiter: str
    max_keys: int
    after: str
    """Exclusive start: start-after, marker or what a token says."""
    encoding_url: bool
    fetch_owner: bool = False
    start_after: str | None = None
    """As the client gave it, for the echo."""
    token: str | None = None
    marker: str | None = None


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    keys: list[tuple[str, T]]
    prefixes: list[str]
    truncated: bool
    last: str
    """The last key or prefix given; empty if none."""

    @property
    def token(self) -> str | None:
        """Of the next page; None if there is none."""
        raise NotImplementedError


def parse_v1(arguments: dict[str, str]) -> ListRequest:
    """Raises S3Error InvalidArgument."""
    raise NotImplementedError


def parse_v2(arguments: dict[str, str]) -> ListRequest:
    """Raises S3Error InvalidArgument."""
    raise NotImplementedError


def parse_versions(arguments: dict[str, str]) -> ListRequest:
    """Raises S3Error InvalidArgument."""
    raise NotImplementedError


def collect(request: ListRequest) -> Generator[Wanted, Page[T], Listing[T]]:
    """One page of a listing."""
    raise NotImplementedError
    yield
