"""The shared table: slot headers and the index of every store key, in one file.

Keys are 16 bytes. `kind` is `tiers.model.tier.Kind`: 1 object, 2 block.
"""

import os
from collections.abc import Iterator

from typing_extensions import Buffer, disjoint_base

FREE: int
DRAFT: int
SEALED: int

TIER_DRAM: int
TIER_HBM: int
TIER_NVME: int
TIER_REMOTE: int
TIER_COLD: int
TIER_UNVERIFIED: int

READER_WAIT_NS: int
MAX_LOAD_PERCENT: int

def native_fields() -> list[tuple[str, str, int, int]]:
    """Return (structure, field, offset, size) of every field of formats.h."""

@disjoint_base
class Entry:
    """A consistent copy of one index entry."""

    kind: int
    tiers: int
    flags: int
    slot: int
    generation: int
    size_bytes: int
    location: int
    hits: int
    last_access_s: int

@disjoint_base
class SlotHeader:
    """A consistent copy of one slot header."""

    state: int
    kind: int
    generation: int
    flags: int
    key: bytes
    object_id: int
    sequence: int
    size_bytes: int
    checksum: int | None
    parent: bytes
    uid: int
    bucket_id: int
    sealed_at_ns: int

@disjoint_base
class Table:
    """One writer process (`create`), any number of readers (`attach`). Closed tables raise SessionClosed."""

    path: str
    @staticmethod
    def create(path: str | os.PathLike[str], store_id: bytes, slots: int, entries: int) -> Table:
        """Make a table in the place of `path`; `entries` is a power of two. Raises InvalidRequest, NoSpace."""

    @staticmethod
    def attach(path: str | os.PathLike[str], store_id: bytes | None = None) -> Table:
        """Map a table for reading. Raises FormatMismatch for another format, version or store; NotFound."""

    @staticmethod
    def mark_dead(path: str | os.PathLike[str]) -> bool:
        """Mark an older table as one that will not change again; return False if `path` is no table."""

    def close(self) -> None: ...
    def put(
        self,
        key: bytes,
        kind: int,
        slot: int,
        generation: int,
        size: int,
        tiers: int = 1,
        flags: int = 0,
        location: int = 0,
    ) -> None:
        """Insert, or replace the value (hits stay). Raises NoSpace when the table is full."""

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of a key; None for a miss. Raises DeadlinePassed when the writer died inside a change."""

    def remove(self, key: bytes) -> bool: ...
    def touch(self, key: bytes) -> bool:
        """Count a hit and set the last access to now; return False if the key is not there."""

    def set_access(self, key: bytes, hits: int, last_access_s: int) -> bool:
        """Set what `touch` counts; return False if the key is not there."""

    def match(self, hashes: Buffer, kind: int = 2) -> int:
        """Return how many of the n x 16 bytes of hashes are there, from the first on. Drops the GIL."""

    def items(self) -> Iterator[tuple[bytes, Entry]]:
        """Yield every entry, in table order. Complete only while nobody writes."""

    def __len__(self) -> int: ...
    def __contains__(self, key: bytes, /) -> bool: ...
    def begin(self, slot: int) -> int:
        """Make a free slot a draft; return its odd generation. Raises Superseded if it is not free."""

    def publish(
        self,
        slot: int,
        draft: int,
        *,
        kind: int,
        key: bytes,
        size: int,
        object_id: int = 0,
        sequence: int = 0,
        flags: int = 0,
        checksum: int | None = None,
        parent: bytes = ...,
        uid: int = 0,
        bucket_id: int = 0,
        sealed_at_ns: int = 0,
    ) -> int:
        """Make a draft sealed; return its even generation. Raises Superseded if it is no longer that draft."""

    def retire(self, slot: int, generation: int) -> None:
        """Make a draft or sealed slot free, with the next odd generation. Raises Superseded."""

    def read_header(self, slot: int) -> SlotHeader:
        """Return a slot's header, all zeros for a slot never used. Raises Corrupt where its checksum differs."""

    def generation(self, slot: int) -> int:
        """Return a slot's generation. Odd: draft or free. Even: sealed. 0: never used."""

    def set_checksum(self, slot: int, generation: int, value: int) -> bool:
        """Record the payload's XXH3-64; return whether the slot is still sealed with that generation."""

    def move(self, path: str | os.PathLike[str]) -> None:
        """Rename the file, over another table if one is there. Raises OSError."""

    def set_dead(self) -> None: ...
    def hide(self, tiers: int) -> None:
        """Hide entries of these tiers (TIER_ bits) alone from readers from here on; 0 hides none."""

    @property
    def hidden_tiers(self) -> int: ...
    @property
    def alive(self) -> bool:
        """Return whether the service still uses this file; a reader that gets False attaches anew."""

    clean: bool
    @property
    def store_id(self) -> bytes: ...
    @property
    def slots(self) -> int: ...
    @property
    def slots_used(self) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def max_entries(self) -> int:
        """Return how many live entries fit: 75 percent of the places."""

    @property
    def file_bytes(self) -> int: ...
