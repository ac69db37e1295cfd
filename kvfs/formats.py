"""Every byte format that outlives a process, as field lists: the shared table, the records of NVMe segments.

Responsibility: offsets, sizes, versions and checksums. `docs/formats.md` explains the fields; the C side of
the table is `kvfs/_native/shared/formats.h`, and a test compares the offsets of the two.

Invariants: all integers are little endian and naturally aligned; reserved bytes are written as zeros and
ignored when read; every header carries a version and an XXH3-64 of itself, and decoding raises before it
returns a field of a header that does not match.
Concurrency: pure functions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from operator import attrgetter
from typing import Any, Final

from kvfs._native.shared.slots import xxh3_64
from kvfs.errors import Corrupt, FormatMismatch, InvalidRequest

KEY_BYTES: Final = 16


class Layout:
    """Encode and decode a fixed structure of (name, struct code) pairs, in order, without implicit padding."""

    def __init__(self, name: str, fields: tuple[tuple[str, str], ...]) -> None:
        self.name = name
        self._fields = fields
        self.struct = struct.Struct("<" + "".join(code for _, code in fields))
        self.size: Final = self.struct.size
        self._zeros = self.struct.unpack(bytes(self.size))
        self.names: Final = tuple(name for name, _ in fields)
        self.offsets: Final[dict[str, tuple[int, int]]] = {}
        """Field -> (offset, size), in bytes."""
        offset = 0
        for field, code in fields:
            size = struct.calcsize("<" + code)
            self.offsets[field] = (offset, size)
            offset += size

    def only(self, *names: str) -> struct.Struct:
        """Return a structure that unpacks these fields alone, in the order of the layout."""
        return struct.Struct(
            "<"
            + "".join(
                code if field in names else f"{struct.calcsize('<' + code)}x" for field, code in self._fields
            )
        )

    def decode(self, data: bytes | memoryview) -> dict[str, Any]:
        """Return the fields of the first `size` bytes. Raises Corrupt when there are fewer."""
        if len(data) < self.size:
            raise Corrupt(f"{self.name}: {len(data)} bytes where {self.size} are needed")
        return dict(zip(self.names, self.struct.unpack_from(data), strict=True))

    def encode(self, **values: Any) -> bytes:
        """Encode fields; those not given are zero. Raises InvalidRequest for one that is unknown or out of range."""
        if not values.keys() <= self.offsets.keys():
            raise InvalidRequest(
                f"{self.name} has no field {sorted(values.keys() - self.offsets.keys())[0]!r}"
            )
        try:
            return self.struct.pack(*map(values.get, self.names, self._zeros))
        except struct.error as error:
            raise InvalidRequest(f"{self.name}: {error}") from error


# --- the shared table ------------------------------------------------------------------------------------
SLOT_VERSION: Final = 1
TABLE_HEADER_BYTES: Final = 4096


class SlotState(IntEnum):
    """The state of a slot, in its header."""

    FREE = 0
    DRAFT = 1
    SEALED = 2


class EntryState(IntEnum):
    """The state of an index entry."""

    EMPTY = 0
    LIVE = 1


class TierBit(IntFlag):
    """Where an entry's bytes are."""

    DRAM = 1
    HBM = 2
    NVME = 4
    REMOTE = 8
    COLD = 16
    UNVERIFIED = 32
    """In a slot of DRAM that a start took over; who wants it has it verified first."""


_TIER_NAMES: Final = {int(TierBit.UNVERIFIED): "dram"} | {
    int(bit): str(bit.name).lower() for bit in TierBit if bit is not TierBit.UNVERIFIED
}


def tier_of(tiers: int) -> str:
    """Return the name of the highest tier of these bits; empty for none."""
    return next((name for bit, name in _TIER_NAMES.items() if tiers & bit), "")


class SlotMark(IntFlag):
    """`marks` of a slot header."""

    HAS_CHECKSUM = 1


TABLE_HEADER: Final = Layout(
    "table header",
    (
        ("magic", "8s"),
        ("version", "I"),
        ("header_bytes", "I"),
        ("store_id", "16s"),
        ("slot_count", "I"),
        ("entry_count", "I"),
        ("slots_offset", "Q"),
        ("entries_offset", "Q"),
        ("file_bytes", "Q"),
        ("slot_header_bytes", "I"),
        ("entry_bytes", "I"),
        ("hash_seed", "Q"),
        ("created_ns", "Q"),
        ("reserved0", "32s"),
        ("header_checksum", "Q"),
        ("clean", "I"),
        ("dead", "I"),
        ("hidden_tiers", "I"),
        ("reserved1", "52s"),
        ("move_seq", "I"),
        ("reserved2", "60s"),
        ("live_entries", "I"),
        ("slots_used", "I"),
        ("reserved3", "3832s"),
    ),
)

SLOT_HEADER: Final = Layout(
    "slot header",
    (
        ("seq", "I"),
        ("version", "H"),
        ("state", "B"),
        ("kind", "B"),
        ("generation", "I"),
        ("flags", "I"),
        ("key", "16s"),
        ("object_id", "Q"),
        ("sequence", "Q"),
        ("size_bytes", "Q"),
        ("checksum", "Q"),
        ("parent", "16s"),
        ("uid", "I"),
        ("bucket_id", "I"),
        ("sealed_at_ns", "q"),
        ("marks", "I"),
        ("reserved0", "I"),
        ("reserved1", "16s"),
        ("header_checksum", "Q"),
    ),
)

INDEX_ENTRY: Final = Layout(
    "index entry",
    (
        ("seq", "I"),
        ("state", "B"),
        ("kind", "B"),
        ("tiers", "B"),
        ("flags", "B"),
        ("key", "16s"),
        ("slot", "I"),
        ("generation", "I"),
        ("size_bytes", "Q"),
        ("location", "Q"),
        ("hits", "I"),
        ("last_access_s", "I"),
        ("reserved", "8s"),
    ),
)


def slot_header_checksum(header: bytes | memoryview) -> int:
    """Hash the bytes between `seq` and the field itself."""
    return xxh3_64(header[4 : SLOT_HEADER.offsets["header_checksum"][0]])


# --- records of NVMe segments ----------------------------------------------------------------------------
RECORD_MAGIC: Final = b"KVFR"
RECORD_VERSION: Final = 1
RECORD_ALIGNMENT: Final = 512
"""Records start and end at multiples of this: the smallest logical block of the devices that kvfs runs on."""
PAYLOAD_ALIGNMENT: Final = 4096
"""Payloads lie at multiples of this in their segment, so that O_DIRECT reads them into a slot's pages."""


class RecordType(IntEnum):
    """The type of a record."""

    DATA = 1
    META = 2
    TOMBSTONE = 3
    BUCKET = 4
    FOOTER = 5
    RENAME = 6


RECORD_HEADER: Final = Layout(
    "record header",
    (
        ("magic", "4s"),
        ("version", "H"),
        ("type", "B"),
        ("kind", "B"),
        ("header_bytes", "I"),
        ("body_bytes", "I"),
        ("record_bytes", "Q"),
        ("payload_bytes", "Q"),
        ("payload_offset", "I"),
        ("flags", "I"),
        ("segment_sequence", "Q"),
        ("sequence", "Q"),
        ("key", "16s"),
        ("parent", "16s"),
        ("object_id", "Q"),
        ("extent_number", "I"),
        ("generation", "I"),
        ("object_bytes", "Q"),
        ("sealed_at_ns", "q"),
        ("uid", "I"),
        ("bucket_id", "I"),
        ("origin_sequence", "Q"),
        ("reserved0", "24s"),
        ("payload_checksum", "Q"),
        ("body_checksum", "Q"),
        ("reserved1", "8s"),
        ("header_checksum", "Q"),
    ),
)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The head of one record of a segment; `docs/formats.md` says what each type fills in."""

    type: RecordType
    sequence: int
    """Store-wide, rises with every record: of two records about one key or name the higher wins."""
    segment_sequence: int
    """The number of this use of the segment file; a record of an earlier use is not part of the segment."""
    record_bytes: int
    """From the start of this record to the start of the next; a multiple of RECORD_ALIGNMENT."""
    kind: int = 0
    key: bytes = bytes(KEY_BYTES)
    parent: bytes = bytes(KEY_BYTES)
    object_id: int = 0
    extent_number: int = 0
    generation: int = 0
    """The generation of the slot from which the payload was read; 0 for another source."""
    object_bytes: int = 0
    """Size of the whole object, of which this record may hold one extent."""
    sealed_at_ns: int = 0
    uid: int = 0
    bucket_id: int = 0
    origin_sequence: int = 0
    """The sequence with which a META that reclaim rewrote was first written; 0 for others."""
    flags: int = 0
    body_bytes: int = 0
    body_checksum: int = 0
    payload_bytes: int = 0
    payload_offset: int = 0
    """From the start of the record."""
    payload_checksum: int = 0

    def encode(self) -> bytes:
        """Encode as RECORD_HEADER.size bytes. Raises InvalidRequest when a field does not fit."""
        self._check_shape()
        values = dict(zip(RecordHeader.__slots__, _record_fields(self), strict=True))
        head = RECORD_HEADER.encode(
            magic=RECORD_MAGIC, version=RECORD_VERSION, header_bytes=RECORD_HEADER.size, **values
        )
        return head[:-8] + xxh3_64(head[:-8]).to_bytes(8, "little")

    @classmethod
    def decode(cls, data: bytes | memoryview) -> RecordHeader:
        """Decode a header. Raises Corrupt for a torn or foreign header, FormatMismatch for another version."""
        raw = RECORD_HEADER.decode(data)
        if raw["magic"] != RECORD_MAGIC:
            raise Corrupt(f"record header: magic {raw['magic']!r} instead of {RECORD_MAGIC!r}")
        if raw["header_checksum"] != xxh3_64(data[: RECORD_HEADER.size - 8]):
            raise Corrupt("record header: it does not match its checksum")
        if raw["version"] != RECORD_VERSION or raw["header_bytes"] != RECORD_HEADER.size:
            raise FormatMismatch(f"record header: version {raw['version']}, this code reads {RECORD_VERSION}")
        try:
            header = cls(**{name: raw[name] for name in cls.__slots__} | {"type": RecordType(raw["type"])})
            header._check_shape()
        except (ValueError, InvalidRequest) as error:
            raise Corrupt(f"record header: {error}") from error
        return header

    def _check_shape(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.parent) != KEY_BYTES:
            raise InvalidRequest(f"record header: key and parent have {KEY_BYTES} bytes")
        if self.record_bytes <= 0 or self.record_bytes % RECORD_ALIGNMENT:
            raise InvalidRequest(f"record of {self.record_bytes} bytes: no multiple of {RECORD_ALIGNMENT}")
        body_end = RECORD_HEADER.size + self.body_bytes
        if self.payload_bytes and self.payload_offset < body_end:
            raise InvalidRequest(
                f"record: payload at {self.payload_offset}, inside the {body_end} bytes before it"
            )
        if max(body_end, self.payload_offset + self.payload_bytes) > self.record_bytes:
            raise InvalidRequest(f"record of {self.record_bytes} bytes: its parts are longer")


_record_fields: Final = attrgetter(*RecordHeader.__slots__)

SEGMENT_MAGIC: Final = b"KVFSEGMT"
TRAILER_MAGIC: Final = b"KVFSTRLR"
SEGMENT_VERSION: Final = 1
SEGMENT_HEADER_COPIES: Final = (0, 4096)
"""A segment's header stands twice, so that no single damaged sector hides which use of the file this is."""
SEGMENT_DATA_START: Final = 8192
SEGMENT_TRAILER_BYTES: Final = 4096
"""The last page of a segment, written after its footer."""


class SegmentState(IntEnum):
    """The state of a segment file, as its header says."""

    FREE = 1
    IN_USE = 2


SEGMENT_HEADER: Final = Layout(
    "segment header",
    (
        ("magic", "8s"),
        ("version", "I"),
        ("state", "I"),
        ("store_id", "16s"),
        ("segment_sequence", "Q"),
        ("segment_bytes", "Q"),
        ("written_ns", "Q"),
        ("header_checksum", "Q"),
    ),
)

SEGMENT_TRAILER: Final = Layout(
    "segment trailer",
    (
        ("magic", "8s"),
        ("version", "I"),
        ("reserved0", "I"),
        ("store_id", "16s"),
        ("segment_sequence", "Q"),
        ("footer_offset", "Q"),
        ("footer_bytes", "Q"),
        ("first_sequence", "Q"),
        ("last_sequence", "Q"),
        ("records", "Q"),
        ("trailer_checksum", "Q"),
    ),
)


# --- endings beside the segments -------------------------------------------------------------------------
DEVICE_LABEL_MAGIC: Final = b"KVFSBDEV"
DEVICE_LABEL_COPIES: Final = (0, 4096)
DEVICE_SEGMENTS_START: Final = 1 << 20
"""Where the first segment of a block device begins: a multiple of any erase block's share that a partition respects."""
DEVICE_NUMBER_SHIFT: Final = 16
"""A segment on a block device has the device's number above these bits, and its place there below."""

DEVICE_LABEL: Final = Layout(
    "device label",
    (
        ("magic", "8s"),
        ("version", "I"),
        ("device_number", "I"),
        ("store_id", "16s"),
        ("segment_bytes", "Q"),
        ("segments", "Q"),
        ("first_sequence", "Q"),
        ("written_ns", "Q"),
        ("label_checksum", "Q"),
    ),
)

ENDINGS_MAGIC: Final = b"KVFSENDS"
ENDINGS_PAGE_BYTES: Final = 4096

ENDINGS_HEADER: Final = Layout(
    "endings page",
    (
        ("magic", "8s"),
        ("version", "I"),
        ("entries", "I"),
        ("store_id", "16s"),
        ("epoch", "Q"),
        ("page", "I"),
        ("first_pages", "I"),
        ("durable_sequence", "Q"),
        ("page_checksum", "Q"),
    ),
)

ENDING: Final = Layout(
    "ending",
    (
        ("object_id", "Q"),
        ("first_sequence", "Q"),
        ("sequence", "Q"),
        ("what", "I"),
        ("extent_number", "I"),
    ),
)


class EndingKind(IntEnum):
    """Which records of an object have ended."""

    OBJECT = 1
    """All: it was removed or replaced."""
    NAME = 2
    """Every META older than `sequence`."""
    EXTENT = 3
    """Every DATA of one extent older than `sequence`."""


# --- objects of the cold tier ----------------------------------------------------------------------------
COLD_MAGIC: Final = b"KVFSCOLD"
COLD_VERSION: Final = 1

COLD_HEADER: Final = Layout(
    "cold header",
    (
        ("magic", "8s"),
        ("version", "I"),
        ("kind", "I"),
        ("store_id", "16s"),
        ("key", "16s"),
        ("parent", "16s"),
        ("object_id", "Q"),
        ("size_bytes", "Q"),
        ("checksum", "Q"),
        ("sealed_at_ns", "q"),
        ("uid", "I"),
        ("reserved0", "I"),
        ("reserved1", "16s"),
        ("header_checksum", "Q"),
    ),
)


def encode_page(layout: Layout, **values: Any) -> bytes:
    """Encode a segment's header or trailer as a whole page, its checksum in the last eight bytes of the layout."""
    head = layout.encode(**values)[:-8]
    return (head + xxh3_64(head).to_bytes(8, "little")).ljust(SEGMENT_TRAILER_BYTES, b"\0")


def decode_page(layout: Layout, magic: bytes, data: bytes | memoryview) -> dict[str, Any]:
    """Decode a page that `encode_page` wrote. Raises Corrupt, FormatMismatch for another version."""
    raw = layout.decode(data)
    if raw["magic"] != magic:
        raise Corrupt(f"{layout.name}: magic {raw['magic']!r} instead of {magic!r}")
    if raw[layout.names[-1]] != xxh3_64(data[: layout.size - 8]):
        raise Corrupt(f"{layout.name}: it does not match its checksum")
    if raw["version"] != SEGMENT_VERSION:
        raise FormatMismatch(f"{layout.name}: version {raw['version']}, this code reads {SEGMENT_VERSION}")
    return raw


def record_extent(start: int, body_bytes: int, payload_bytes: int) -> tuple[int, int]:
    """Return (payload_offset, record_bytes) for a record that starts at byte `start` of its segment."""
    end = start + RECORD_HEADER.size + body_bytes
    if not payload_bytes:
        return 0, _up(end, RECORD_ALIGNMENT) - start
    payload = _up(end, PAYLOAD_ALIGNMENT)
    return payload - start, _up(payload + payload_bytes, RECORD_ALIGNMENT) - start


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
