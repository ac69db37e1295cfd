"""Writing XML: escaping, elements, times.

Responsibility: text to what stands in a document. Invariants: every character that XML 1.0 cannot hold is written as a
character reference, as S3 does: keys may have them, and `encoding-type=url` is for clients whose parsers refuse that.
Concurrency: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final
from urllib.parse import quote

_NAMED: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_SPECIAL: Final = re.compile('[&<>"\x00-\x1f\x7f-\x9f\u2028\ufffe\uffff]')
_IMPOSSIBLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_SECOND_NS: Final = 1_000_000_000

NAMESPACE: Final = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def escape(text: str) -> str:
    """Escape as text of an element."""
    if not _SPECIAL.search(text):
        return text
    return _SPECIAL.sub(lambda found: _NAMED.get(found[0]) or f"&#x{ord(found[0]):x};", text)


def is_xml(text: str) -> bool:
    """Return whether XML 1.0 can hold `text`, so that every parser reads it."""
    return not _IMPOSSIBLE.search(text)


def element(name: str, value: object) -> str:
    """Render `<name>value</name>`, with True and False in lower case."""
    text = str(value).lower() if isinstance(value, bool) else escape(str(value))
    return f"<{name}>{text}</{name}>"


def optional(name: str, value: object | None) -> str:
    """Render an element, or nothing for None."""
    return "" if value is None else element(name, value)


def document(name: str, parts: Iterable[str], *, namespace: str = NAMESPACE) -> bytes:
    """Render a whole document, UTF-8."""
    body = "".join(parts)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{namespace}>{body}</{name}>'.encode()


def url_encoded(text: str) -> str:
    """Encode as `encoding-type=url` has it.

    `/` stays, a space is %20 (which clients that take + for a space read too).
    """
    return quote(text, safe="/")


def timestamp(ns: int) -> str:
    """Render nanoseconds since 1970 as `2026-01-02T03:04:05.678Z`."""
    seconds, rest = divmod(ns, _SECOND_NS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"


def http_date(ns: int) -> str:
    """Render nanoseconds since 1970 as `Fri, 02 Jan 2026 03:04:05 GMT`."""
    return format_datetime(datetime.fromtimestamp(ns // _SECOND_NS, UTC), usegmt=True)
