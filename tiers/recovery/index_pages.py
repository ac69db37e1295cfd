"""The page headers of a copy of the name index, checked before the copy is written to.

Responsibility: whether the header of every page says what LMDB relies on when it inserts there. A walk only reads, and
reading finds each row by its pointer; LMDB believes the header alone about where a page's free room ends, copies pages
without it, and takes a page that is marked dirty for its own.

Invariants: the file has live pages only, as a compact copy has.

Concurrency: within the process that walks the index.

Source: LMDB 0.9, `MDB_page` in mdb.c: page number, pad, flags, then the bounds of the free room or the count of a large
value's pages.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final

from kvfs.errors import Corrupt

_HEADER: Final = struct.Struct("<8x2xHHH")
_BRANCH: Final = 0x01
_LEAF: Final = 0x02
_OVERFLOW: Final = 0x04
_META_PAGES: Final = 2


def check_pages(descriptor: int, used_bytes: int, page_bytes: int) -> None:
    """Check the headers of the first `used_bytes` of a file. Raises Corrupt, naming the page."""
    with mmap.mmap(descriptor, used_bytes, prot=mmap.PROT_READ) as pages:
        at = _META_PAGES * page_bytes
        while at < used_bytes:
            flags, lower, upper = _HEADER.unpack_from(pages, at)
            if flags == _OVERFLOW and (lower or upper):
                at += (lower | upper << 16) * page_bytes
            elif flags in (_BRANCH, _LEAF) and lower <= upper <= _first_row(pages, at, lower, page_bytes):
                at += page_bytes
            else:
                raise Corrupt(f"page {at // page_bytes}: its header says {flags=:#x}, {lower=}, {upper=}")


def _first_row(pages: mmap.mmap, at: int, lower: int, page_bytes: int) -> int:
    """Return the lowest offset of a row in a page whose pointers end at `lower`; 0 where they cannot end there."""
    pointers_bytes = lower - _HEADER.size
    if pointers_bytes < 0 or pointers_bytes % 2 or lower > page_bytes:
        return 0
    return min(struct.unpack_from(f"<{pointers_bytes // 2}H", pages, at + _HEADER.size), default=page_bytes)
