"""URLs of engines and Conductors, as settings, flags and routers name them. Concurrency: pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address

ALLOWED = (
    "must be http://HOST:PORT or https://HOST:PORT, without a user, a path or a query; ports are 1 to 65535"
)
BY_NAME = "dns+"
"""What the URL of engines begins with that a name stands for in DNS: each of its addresses is one of them."""
_ASKED_ALLOWED = f"{ALLOWED}; or {BY_NAME}http://NAME:PORT, where each address of the name is an engine"

_URL = re.compile(
    r"(?P<scheme>https?)://(?:(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)|\[(?P<v6>[0-9A-Fa-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?"
)


def check_server_url(url: str) -> str:
    """Return a URL that names a server, and nothing at it. Raises ValueError with what is allowed."""
    _address(url)
    return url


def check_asked_url(url: str) -> str:
    """Return a URL that names a server, or by a name in DNS several. Raises ValueError with what is allowed."""
    named = url.removeprefix(BY_NAME)
    try:
        _address(named)
    except ValueError:
        raise ValueError(_ASKED_ALLOWED) from None
    if named != url and not named.startswith("http://"):  # certificates are of names, and addresses are asked
        raise ValueError(_ASKED_ALLOWED)
    return url


def check_named_once(urls: Mapping[str, Sequence[str]]) -> None:
    """Check that no two settings name one address; `urls`: by key. Raises ValueError with both."""
    names: dict[tuple[str, int], str] = {}
    for key, values in urls.items():
        for url in values:
            name, address = f"{key} = {url!r}", _address(url.removeprefix(BY_NAME))
            if address in names:
                raise ValueError(f"{name}: the address of {names[address]}; each engine is named once")
            names[address] = name


def _address(url: str) -> tuple[str, int]:
    """Return the host and port of a URL. Raises ValueError with what is allowed."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError(ALLOWED)
    port = int(found["port"] or (443 if found["scheme"] == "https" else 80))
    if not 1 <= port <= 65535:
        raise ValueError(ALLOWED)
    try:
        return found["name"].lower() if found["v6"] is None else str(IPv6Address(found["v6"])), port
    except ValueError:
        raise ValueError(ALLOWED) from None
