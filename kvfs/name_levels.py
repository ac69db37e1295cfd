"""One level of a path in the index of names: what a listing needs when it wants no attributes.

Responsibility: the names directly below a prefix, with inode numbers, a page at a time; a page is bounded by the names
that were looked at, whether or not they are shown. Names of LMDB's own key size are walked natively, and longer ones
as any listing walks them.

Concurrency: none of its own; one transaction, from the service's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvfs import paths
from kvfs._native.name_scan import ENDED, LONG, scan_level
from kvfs._native.slots import xxh3_64
from kvfs.name_rows import DIRECTORY, NameRow, load_row
from kvfs.name_tree import HEAD_BYTES, NameTree

if TYPE_CHECKING:
    import lmdb

    Txn = lmdb.Transaction[bytes]

LevelEntry = tuple[bytes, int, int, bool]
"""Tail, inode number, object id (0: a directory, whose tail ends in `/`), and whether a directory may have the same
name as this file, which then is not shown."""

UNMARKED = 1 << 63
"""Inode numbers of directories without a marker have this bit, and come from their names."""


class LevelPage(NamedTuple):
    entries: list[LevelEntry]
    last: bytes | None
    """The last tail that was looked at; None at the end."""


def unmarked_ino(bucket: bytes, key: bytes) -> int:
    """The inode number of a directory without a marker."""
    return xxh3_64(bucket + b"\0" + key) | UNMARKED


def scan_page(tree: NameTree, txn: Txn, prefix: bytes, start: bytes, limit: int) -> LevelPage | None:
    """What is directly below a full prefix, from `start` on; None where a long name is the first."""
    if len(start) >= HEAD_BYTES:
        return None
    with txn.cursor(db=tree.heads) as cursor:
        if not cursor.set_range(start):
            return LevelPage([], None)
        entries, last, why = scan_level(cursor, prefix, limit)
    if why == LONG and not last:
        return None
    return LevelPage(entries, None if why == ENDED else last)


def page_of_list(
    tree: NameTree,
    txn: Txn,
    bucket: bytes,
    prefix: bytes,
    listed: Sequence[tuple[bytes, NameRow | None]],
    *,
    more: bool,
) -> LevelPage:
    """The same, of a page of a listing with `/` as delimiter. Raises Corrupt."""
    entries: list[LevelEntry] = []
    for key, row in listed:
        if not paths.is_path(key) or key == prefix:
            continue
        tail = key[len(prefix) :]
        if key.endswith(b"/"):
            entries.append((tail, _directory_ino(tree, txn, bucket, key, row), 0, False))
        elif row is not None and not row.flags & DIRECTORY:
            entries.append((tail, row.ino, row.object_id, True))
    return LevelPage(entries, listed[-1][0][len(prefix) :] if more else None)


def _directory_ino(tree: NameTree, txn: Txn, bucket: bytes, key: bytes, row: NameRow | None) -> int:
    name = bucket + b"\0" + key
    if row is None and (stored := tree.get(txn, name)) is not None:
        row = NameRow.decode(load_row(name, stored))
    return unmarked_ino(bucket, key) if row is None else row.ino
