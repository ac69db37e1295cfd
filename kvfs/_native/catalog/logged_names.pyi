"""Names as the log has them, while a start decides what counts."""

from typing import Any

from typing_extensions import disjoint_base

from kvfs._native.catalog.records import RecordRows

@disjoint_base
class LoggedNames:
    """Keeps the newest META of each object that has one and nothing unusual about it, by id and by name."""

    def __new__(cls) -> LoggedNames: ...
    @property
    def contended(self) -> list[int]:
        """Ids of objects whose name a later record gives to another one, too."""

    def get(self, object_id: int) -> tuple[bytes, bytes] | None:
        """Return an object's encoded row and `bucket NUL key`."""

    def pop(self, object_id: int) -> tuple[bytes, int] | None:
        """Remove an object; return the body of its META and the sequence that it was first written with."""

    def sequence(self, object_id: int) -> int: ...
    def find(self, name: bytes) -> int | None:
        """Return the object that has this `bucket NUL key`."""

    def ids(self) -> list[int]: ...
    def __contains__(self, object_id: int, /) -> bool: ...
    def __len__(self) -> int: ...

def take_plain(
    rows: RecordRows,
    names: LoggedNames,
    used: dict[int, Any],
    apart: set[int],
    headers: memoryview,
    bodies: memoryview,
    place: tuple[int, int, int],
    segment: int,
    extent_bytes: int,
) -> tuple[int, int, int, int]:
    """Take the records of a segment in, from `place` (number, offset, offset in the bodies) up to the first that is not
    plain: of an object that is not here yet the only extent, of one that has no name yet its name. Return where that
    record is, as `place`, and the highest number of a writing. `used`, `apart`: objects of which nothing is plain."""

def repeated_blocks(rows: RecordRows, others: list[bytes]) -> list[int]:
    """List the ids of the blocks whose prefix hash another row has, too, or is one of `others`."""

def nameless(rows: RecordRows) -> list[int]:
    """List the ids of the named objects that no META speaks of."""

def count_rows(rows: RecordRows, kept: dict[int, bool]) -> tuple[list[int], list[tuple[int, int, int]], int]:
    """Decide by the buckets, of which `kept` says whether they are durable, what reclaim moves. Return the ids of
    objects of other buckets, (segment, live bytes, kept bytes) of what counts of the others, and the highest id of all
    that can have been given out."""
