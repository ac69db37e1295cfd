"""Pages of the files that repeat what has ended (`tiers.log.endings`), and what a replay learns from them.

Responsibility: endings as values, and a page of them as bytes (docs/formats.md).

Invariants: a page that decodes matches its checksum and is of this store. Concurrency: pure values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, FormatMismatch
from kvfs.formats import (
    ENDING,
    ENDINGS_HEADER,
    ENDINGS_MAGIC,
    ENDINGS_PAGE_BYTES,
    SEGMENT_VERSION,
    EndingKind,
)

PER_PAGE: Final = (ENDINGS_PAGE_BYTES - ENDINGS_HEADER.size) // ENDING.size
_NEVER_WRITTEN: Final = bytes(ENDINGS_PAGE_BYTES)


class Ending(NamedTuple):
    """Says which records of an object count no more."""

    object_id: int
    first_sequence: int
    """No record of the object is older; 0 where that is not known."""
    sequence: int
    """Every record that has ended is older."""
    kind: EndingKind = EndingKind.OBJECT
    extent_number: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Holds one page of a file, decoded."""

    epoch: int
    first_pages: int
    durable_sequence: int
    endings: list[Ending]


@dataclass(slots=True)
class Ended:
    """Collects the endings of all pages, for a replay."""

    objects: dict[int, int] = field(default_factory=dict)
    """Object id -> sequence that all of its records are older than."""
    names: dict[int, int] = field(default_factory=dict)
    """Object id -> sequence of the oldest META that may count."""
    extents: dict[int, dict[int, int]] = field(default_factory=dict)
    """Object id -> extent number -> sequence of the oldest DATA that may count."""
    highest_sequence: int = 0
    newest: tuple[int, int, int] = (0, 0, 0)
    """(epoch, number, durable sequence) of the newest page."""

    @property
    def durable_sequence(self) -> int:
        """Return the record up to which all were durable when the newest page was written."""
        return self.newest[2]

    def mark(self, page: Page, number: int) -> None:
        """Note a page that was read: the newest one says what was durable."""
        self.newest = max(self.newest, (page.epoch, number, page.durable_sequence))

    def add(self, ending: Ending) -> bool:
        """Add an ending; return whether it was new."""
        key = ending.object_id
        known = self.objects if ending.kind is EndingKind.OBJECT else self.names
        if ending.kind is EndingKind.EXTENT:
            known, key = self.extents.setdefault(ending.object_id, {}), ending.extent_number
        if known.get(key, -1) >= ending.sequence:
            return False
        known[key] = ending.sequence
        self.highest_sequence = max(self.highest_sequence, ending.sequence)
        return True


def encode_page(
    store_id: bytes, epoch: int, page: int, first_pages: int, durable_sequence: int, endings: Sequence[Ending]
) -> bytes:
    """Encode one page of endings, padded to the size of a page, with its checksum."""
    body = b"".join(
        ENDING.struct.pack(each.object_id, each.first_sequence, each.sequence, each.kind, each.extent_number)
        for each in endings
    )
    head = ENDINGS_HEADER.encode(
        magic=ENDINGS_MAGIC,
        version=SEGMENT_VERSION,
        entries=len(endings),
        store_id=store_id,
        epoch=epoch,
        page=page,
        first_pages=first_pages,
        durable_sequence=durable_sequence,
    )[:-8]
    return (head + xxh3_64(head + body).to_bytes(8, "little") + body).ljust(ENDINGS_PAGE_BYTES, b"\0")


def decode_page(data: bytes | memoryview, store_id: bytes) -> Page | None:
    """Decode a page; return None for one that was never written. Raises Corrupt, FormatMismatch."""
    data = bytes(data)
    if data == _NEVER_WRITTEN:
        return None
    raw = ENDINGS_HEADER.decode(data)
    if raw["magic"] != ENDINGS_MAGIC or raw["entries"] > PER_PAGE:
        raise Corrupt("endings page: it is none")
    end = ENDINGS_HEADER.size + raw["entries"] * ENDING.size
    if raw["page_checksum"] != xxh3_64(data[: ENDINGS_HEADER.size - 8] + data[ENDINGS_HEADER.size : end]):
        raise Corrupt("endings page: it does not match its checksum")
    if raw["version"] != SEGMENT_VERSION:
        raise FormatMismatch(f"endings page: version {raw['version']}, this code reads {SEGMENT_VERSION}")
    if raw["store_id"] != store_id:
        raise FormatMismatch(f"endings page: it belongs to store {raw['store_id'].hex()}")
    try:
        endings = [
            Ending(object_id, first, sequence, EndingKind(kind), number)
            for object_id, first, sequence, kind, number in ENDING.struct.iter_unpack(
                data[ENDINGS_HEADER.size : end]
            )
        ]
    except ValueError as error:
        raise Corrupt(f"endings page: {error}") from None
    return Page(raw["epoch"], raw["first_pages"], raw["durable_sequence"], endings)
