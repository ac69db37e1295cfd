"""The objects of the NVMe tier that nobody uses as values."""

from typing import Any

from typing_extensions import disjoint_base

_Fields = tuple[
    int, bytes, bytes, int, int, int, int, bool, int, int, int, bool, tuple[int, int, int, int] | None,
    tuple[int, int, int] | None,
]  # fmt: skip
"""Kind, key, parent, size, bucket's id, uid, time of the seal, whether reclaim moves it, hits, writing, first sequence,
whether the log has a name of it; (segment, offset, record's bytes, checksum) of its only extent; (segment, offset,
counted bytes) of its name."""

@disjoint_base
class RecordRows:
    """Keeps objects by id, in about 105 bytes each, that have one extent or none, with all of its bytes."""

    def __new__(cls) -> RecordRows: ...
    def put(self, object_id: int, fields: _Fields) -> bool:
        """Keep an object that is not here yet; return False, with nothing changed, for one that no row has room for:
        values that occur in damaged records alone. Raises MemoryError."""

    def get(self, object_id: int) -> _Fields | None: ...
    def take(self, object_id: int) -> _Fields | None:
        """Remove an object and return it."""

    def __contains__(self, object_id: int, /) -> bool: ...
    def __len__(self) -> int: ...
    def is_kept(self, object_id: int) -> bool:
        """Return whether an object is here that reclaim moves."""

    def ids(self) -> list[int]:
        """List the ids of all objects, by their first sequences."""

    def oldest(self, after: tuple[int, int], count: int) -> list[tuple[int, int]]:
        """List (first sequence, id) of the oldest objects past `after` that have an extent and that reclaim may evict,
        at most `count` of them, in order."""

    @property
    def state_bytes(self) -> int:
        """Bytes allocated now."""

def unused(values: dict[int, Any]) -> list[int]:
    """List the keys of the values that nothing but the dictionary refers to."""
