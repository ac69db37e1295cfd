"""Which objects the cold tier has: rows beside the names, in the same environment (`kvfs.index.environment`).

Responsibility: a row for each remote name (`tiers.cold.format`), and two words on the whole: of which bucket the rows
are, and whether a listing of that bucket has ever been held against them to its end. Until then, blocks that were
removed here are noted, since one that the bucket still has would be taken for what was lost with the index.

Invariants: a row is written after the remote object is whole, and removed before anything else of the object is: what
was removed does not come back. A row that does not match its checksum counts as absent. It has the durability of the
names: after a power failure it goes with them.
Concurrency: the service's trio thread; each call is one transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvfs import limits
from kvfs.errors import Corrupt
from kvfs.index.environment import NameEnvironment
from kvfs.index.rows import load_row, store_row
from tiers.cold.format import ColdName, parse_name
from tiers.model.blocks import Block

if TYPE_CHECKING:
    import lmdb

    Txn = lmdb.Transaction[bytes]

DATABASE: Final = b"cold"
_PLACE: Final = b"cold_place"
_COMPLETE: Final = b"cold_complete"
WORDS: Final = (_PLACE, _COMPLETE)
"""Keys in `meta`."""
_FORBIDDEN: Final = b"\xff"
"""Begins keys that are no names, behind all names."""
_ROW = struct.Struct("<BxxxIQq")
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ColdRow:
    """Describes a remote object besides its name."""

    size_bytes: int
    """Of the payload."""
    uid: int
    sealed_at_ns: int

    def encode(self) -> bytes:
        """Encode the row as its value in the index, without the name."""
        return _ROW.pack(_VERSION, self.uid, self.size_bytes, self.sealed_at_ns)

    @classmethod
    def decode(cls, data: bytes) -> ColdRow:
        """Decode a row. Raises Corrupt."""
        if len(data) != _ROW.size or data[0] != _VERSION:
            raise Corrupt(f"cold row of {len(data)} bytes, version {data[:1].hex()}")
        _, uid, size_bytes, sealed_at_ns = _ROW.unpack(data)
        return cls(size_bytes, uid, sealed_at_ns)


def block_of(name: ColdName, row: ColdRow) -> Block:
    """Describe a block of the bucket as the store's catalogue does."""
    return Block(
        name.bucket, row.uid, row.size_bytes, name.object_id, row.sealed_at_ns, parent=name.parent_or_none
    )


class ColdIndex:
    """Keeps the rows, by remote name."""

    def __init__(self, environment: NameEnvironment) -> None:
        self._env = environment
        self._db = environment.open_db(DATABASE)
        self.is_complete = environment.get_meta(_COMPLETE) == b"1"
        """Whether every object of the bucket that is worth it has a row."""

    def bind(self, place: str) -> bool:
        """Bind the rows to this bucket and prefix; return False where they were of another, and drop them."""
        known = self._env.get_meta(_PLACE)
        if known == place.encode():
            return True

        self._env.write(lambda txn: txn.drop(self._db, delete=False))
        self.set_complete(False)
        self._env.put_meta(_PLACE, place.encode())
        return known is None

    def set_complete(self, value: bool) -> None:
        """Record whether the rows are complete; once they are, no block is forbidden any more."""
        if value:
            self._env.write(self._allow_all)
        self._env.put_meta(_COMPLETE, b"1" if value else b"0")
        self.is_complete = value

    def forbid(self, digest: bytes) -> None:
        """Have no block of this prefix hash adopted from the bucket until the rows are complete."""
        self._env.write(lambda txn: txn.put(_FORBIDDEN + digest, b"", db=self._db))

    def is_forbidden(self, digest: bytes) -> bool:
        """Return whether no block of this prefix hash may be adopted from the bucket."""
        return self._env.read(lambda txn: txn.get(_FORBIDDEN + digest, db=self._db)) is not None

    def _allow_all(self, txn: Txn) -> None:
        cursor = txn.cursor(db=self._db)
        while cursor.set_range(_FORBIDDEN):
            cursor.delete()

    def put(self, name: str, row: ColdRow) -> None:
        """Write a row under a remote name, in place of an earlier one."""
        key = name.encode()
        self._env.write(lambda txn: txn.put(key, store_row(key, row.encode()), db=self._db))

    def remove(self, name: str) -> None:
        """Remove the row of a remote name, there or not."""
        self._env.write(lambda txn: txn.delete(name.encode(), db=self._db))

    def page(self, after: str, until: str | None, limit: int) -> list[tuple[str, ColdRow | None]]:
        """Return at most `limit` rows past `after` and up to `until`, in order; None for damaged ones."""

        def look(txn: Txn) -> list[tuple[bytes, bytes]]:
            found: list[tuple[bytes, bytes]] = []
            cursor = txn.cursor(db=self._db)
            there = cursor.set_range(after.encode() + b"\0")
            while there and len(found) < limit:
                if cursor.key() >= _FORBIDDEN or (until is not None and cursor.key() > until.encode()):
                    break
                found.append(cursor.item())
                there = cursor.next()
            return found

        return [(key.decode(), _decoded(key, stored)) for key, stored in self._env.read(look)]

    def rows(self) -> Iterator[tuple[str, ColdRow | None]]:
        """Yield all rows, in order; None for damaged ones. Changes behind the last one yielded are seen."""
        after = ""
        while page := self.page(after, None, limits.MAX_LIST_ENTRIES):
            yield from page
            after = page[-1][0]


def name_of(key: bytes, stored: bytes) -> ColdName | None:
    """Return the object of a stored row; None for a damaged row, or another entry."""
    if key.startswith(_FORBIDDEN) or _decoded(key, stored) is None:
        return None
    return parse_name(key.decode())


def _decoded(key: bytes, stored: bytes) -> ColdRow | None:
    try:
        return ColdRow.decode(load_row(key, stored))
    except Corrupt:
        return None
