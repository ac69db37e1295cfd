"""Where a server listens, as its URL says. Concurrency: pure functions."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit


class Place(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    secure: bool = False


def host_in_url(host: str) -> str:
    """Return a host as URLs have it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def place_of(url: str) -> Place:
    """Return the place that an http:// or https:// URL names."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    return Place(parts.hostname or "", parts.port or (443 if secure else 80), secure)
