"""The page that shows what runs, as files of this package.

Responsibility: bytes and headers of the page's files. Nothing of it comes from another address or is
written inline: its Content-Security-Policy forbids both.

Concurrency: pure functions.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

_STATIC: Final = Path(__file__).parent / "static"
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/figures.js": ("figures.js", "text/javascript; charset=utf-8"),
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_file(path: str) -> tuple[list[tuple[str, str]], bytes] | None:
    """Return headers and bytes of the page's file at a path; None for another path."""
    found = _FILES.get(path)
    return None if found is None else _read(*found)


@cache
def _read(name: str, kind: str) -> tuple[list[tuple[str, str]], bytes]:
    headers = [
        ("Content-Type", kind),
        ("Content-Security-Policy", _POLICY),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Cache-Control", "no-cache"),
    ]
    return headers, (_STATIC / name).read_bytes()
