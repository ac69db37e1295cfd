"""Which files were being written when a service ended: rows beside the names, in the same environment.

Responsibility: a row for each draft of which the log has a copy (fsync): that it is still open, or which object it was
sealed as. By these rows a start decides whether such a copy gets a name. Without them a copy would come back under its
first name beside the object that was made of it and renamed or removed since.

Invariants: a row is there before the copy is durable. A draft that is sealed under its copy's id loses its row: the
name's row says all. One that is sealed as another object keeps its row until the copy is deleted in the log, since that
object may be in DRAM only.

Concurrency: the service's trio thread; each call is one transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Final

from kvfs.errors import Corrupt
from kvfs.index.environment import NameEnvironment
from kvfs.index.tree import Txn

DATABASE: Final = b"snapshots"
_KNOWN: Final = b"snapshots"
"""Key in `meta` that says that rows are kept; the index of a service that kept none lacks it."""
_ROW = struct.Struct("<Q")
_KEY = struct.Struct(">Q")
OPEN: Final = 0


def sealed_as(pairs: Iterable[tuple[bytes, bytes]]) -> dict[int, int]:
    """Decode rows to a map of a sealed object's id to the id of its copy in the log."""
    sound = ((key, value) for key, value in pairs if len(key) == _KEY.size and len(value) == _ROW.size)
    found = {_ROW.unpack(value)[0]: _KEY.unpack(key)[0] for key, value in sound}
    found.pop(OPEN, None)
    return found


class SnapshotIndex:
    """Keep, for the id of a draft's copy in the log, the id of the object that it was sealed as, or OPEN."""

    def __init__(self, environment: NameEnvironment) -> None:
        self._env = environment
        self._db = environment.open_db(DATABASE)
        self._rows: dict[int, int] = {}

    def load(self) -> dict[int, int] | None:
        """Return the rows of an earlier service; None where it kept none. Raises Corrupt."""
        if self._env.get_meta(_KNOWN) is None:
            return None
        pairs = self._env.read(lambda txn: list(txn.cursor(db=self._db)))
        try:
            return {_KEY.unpack(key)[0]: _ROW.unpack(value)[0] for key, value in pairs}
        except struct.error:
            raise Corrupt("name index: a row of a file being written is damaged") from None

    def clear(self) -> None:
        """Remove the rows of an earlier service, once all are decided."""
        self._rows.clear()
        self._env.write(lambda txn: txn.drop(self._db, delete=False), removes=True)
        self._env.put_meta(_KNOWN, b"1")

    def note(self, object_id: int, sealed_as: int, is_gone: Callable[[int], bool]) -> None:
        """Set a row, and remove those whose copies are deleted in the log."""
        gone = [each for each in self._rows if each != object_id and is_gone(each)]

        def change(txn: Txn) -> None:
            txn.put(_KEY.pack(object_id), _ROW.pack(sealed_as), db=self._db)
            for each in gone:
                txn.delete(_KEY.pack(each), db=self._db)

        self._env.write(change, removes=sealed_as != OPEN)  # else a row of that size is there
        self._rows[object_id] = sealed_as
        for each in gone:
            del self._rows[each]

    def remove(self, object_id: int) -> None:
        """Remove a row, if it is there."""
        if self._rows.pop(object_id, None) is not None:
            self._env.write(lambda txn: txn.delete(_KEY.pack(object_id), db=self._db), removes=True)
