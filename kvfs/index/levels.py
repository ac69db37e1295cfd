"""One level of a path in the index of names, without attributes.

Responsibility: the names directly below a prefix, with inode numbers, a page at a time; a page is bounded by the names
looked at, shown or not. Names of LMDB's own key size are walked natively, longer ones as in any listing.

Concurrency: none of its own; one transaction, from the service's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvfs import paths
from kvfs._native.shared.name_scan import ENDED, LONG, scan_level
from kvfs._native.shared.slots import xxh3_64
from kvfs.index.rows import DIRECTORY, LINK, NameRow, row_of
from kvfs.index.tree import HEAD_BYTES, NameTree, Txn

LevelEntry = tuple[bytes, int, int, bool, bool]
"""Tail, inode number, object id (0: a directory, whose tail ends in `/`), whether a directory may have the same name as
this file, which then is not shown, and whether this is a symbolic link."""

UNMARKED = 1 << 63
"""Inode numbers of directories without a marker have this bit, and come from their names."""


class LevelPage(NamedTuple):
    """One page of the names directly below a prefix."""

    entries: list[LevelEntry]
    last: bytes | None
    """The last tail that was looked at; None at the end."""


def unmarked_ino(bucket: bytes, key: bytes) -> int:
    """Return the inode number of a directory without a marker."""
    return xxh3_64(bucket + b"\0" + key) | UNMARKED


def scan_page(tree: NameTree, txn: Txn, prefix: bytes, start: bytes, limit: int) -> LevelPage | None:
    """Return the names directly below a full prefix, from `start` on; None where the first name is a long one."""
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
    """Return the names directly below a prefix from a page of its listing with the delimiter `/`. Raises Corrupt."""
    entries: list[LevelEntry] = []
    for key, row in listed:
        if not paths.is_path(key) or key == prefix:
            continue
        tail = key[len(prefix) :]
        if key.endswith(b"/"):
            entries.append((tail, _directory_ino(tree, txn, bucket, key, row), 0, False, False))
        elif row is not None and not row.flags & DIRECTORY:
            entries.append((tail, row.ino, row.object_id, True, bool(row.flags & LINK)))
    return LevelPage(entries, listed[-1][0][len(prefix) :] if more else None)


def _directory_ino(tree: NameTree, txn: Txn, bucket: bytes, key: bytes, row: NameRow | None) -> int:
    name = bucket + b"\0" + key
    if row is None and (stored := tree.get(txn, name)) is not None:
        row = row_of(name, stored)
    return unmarked_ino(bucket, key) if row is None else row.ino
