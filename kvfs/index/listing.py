"""One page of a bucket's names, with or without a delimiter.

Concurrency: pure functions over a read transaction.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfs.errors import LimitExceeded
from kvfs.index.full_names import check_part, full_prefix
from kvfs.index.rows import NameRow, row_of
from kvfs.index.tree import NameScan, NameTree, Txn
from kvfs.limits import MAX_KEY_BYTES, MAX_LIST_ENTRIES


class ListEntry(NamedTuple):
    """One entry of a listing: a key and its row, or a common prefix (with its delimiter) and None."""

    name: bytes
    row: NameRow | None


class ListPage(NamedTuple):
    """One page of a bucket's names."""

    entries: list[ListEntry]
    truncated: bool
    """Whether more entries follow, after the name of the last one."""


def past(prefix: bytes) -> bytes:
    """Return the smallest byte string above everything that starts with `prefix`, which holds a byte below 0xff."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,))


def list_start(base: bytes, prefix: bytes, after: bytes, delimiter: bytes | None) -> bytes:
    """Return where a listing of the entries greater than `after` begins to look."""
    if after < prefix or not after:
        return base + prefix
    cut = after.find(delimiter, len(prefix)) if delimiter and after.startswith(prefix) else -1
    if delimiter and cut >= 0:
        return past(base + after[: cut + len(delimiter)])
    return base + after + b"\0"


def list_page(
    tree: NameTree, txn: Txn, bucket: bytes, prefix: bytes, after: bytes, delimiter: bytes | None, limit: int
) -> ListPage:
    """Read one page of a bucket; the arguments are those of `NameIndex.list`."""
    if not 0 <= limit <= MAX_LIST_ENTRIES:
        raise LimitExceeded(f"a page of {limit} entries, the limit is {MAX_LIST_ENTRIES}")
    check_part("after", after, MAX_KEY_BYTES)
    whole = full_prefix(bucket, prefix)
    base = bucket + b"\0"
    page: list[ListEntry] = []
    scan = NameScan(tree, txn)
    found = scan.seek(list_start(base, prefix, after, delimiter))
    while found and scan.name.startswith(whole):
        if len(page) == limit:
            return ListPage(page, limit > 0)
        key = scan.name[len(base) :]
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if delimiter and cut >= 0:
            common = key[: cut + len(delimiter)]
            page.append(ListEntry(common, None))
            found = scan.seek(past(base + common))
        else:
            page.append(ListEntry(key, row_of(scan.name, scan.value())))
            found = scan.step()
    return ListPage(page, False)
