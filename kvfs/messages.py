"""The messages of the session protocol as values (docs/sessions.md is the specification).

Responsibility: every request and answer is an immutable value, with the operation that it belongs to. Their
byte forms are `kvfs.codec`'s; frames, order and state are `kvfs.protocol`'s. Concurrency: plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

from kvfs.errors import InvalidRequest, KvfsError

PROTOCOL_VERSION: Final = 3
MAGIC: Final = b"kvfs-ses"
DIGEST_BYTES: Final = 16
NO_PARENT: Final = bytes(DIGEST_BYTES)


class Op(IntEnum):
    """What a frame is about. CLOSED is only ever an answer: the reason why the service ends the session."""

    CLOSED = 0
    HELLO = 1
    RESERVE = 2
    SEAL_BLOCK = 3
    SEAL_NAMED = 4
    ABORT = 5
    REMOVE_BLOCK = 6
    LOOKUP_BLOCK = 7
    MATCH = 8
    OPEN_BLOCK = 9
    OPEN_NAMED = 10
    TOUCH = 11
    OPEN_SEALER = 12
    PREFETCH = 13
    STAT = 32
    LIST = 33
    REMOVE = 34
    RENAME = 35
    MKDIR = 36
    BUCKET_CREATE = 37
    BUCKET_LIST = 38
    BUCKET_REMOVE = 39
    OPEN_NAMESPACE = 40
    PIN = 41
    EVICT = 42
    SET_ATTRIBUTES = 43
    STATUS = 44
    SHUTDOWN = 45
    PROMISE = 46
    REMOVE_NAMES = 47
    LARGE_CREATE = 48
    LARGE_APPEND = 49
    LARGE_SEAL = 50
    LARGE_OPEN = 51
    LARGE_READ = 52
    LARGE_CLOSE = 53


DIGEST_OPS: Final = frozenset(
    {Op.REMOVE_BLOCK, Op.LOOKUP_BLOCK, Op.MATCH, Op.OPEN_BLOCK, Op.TOUCH, Op.OPEN_SEALER, Op.PREFETCH}
)
EXTENT_OPS: Final = frozenset({Op.RESERVE, Op.LOOKUP_BLOCK, Op.OPEN_BLOCK, Op.OPEN_NAMED, Op.OPEN_SEALER})
DESCRIPTOR_OPS: Final = frozenset({Op.RESERVE, Op.OPEN_BLOCK, Op.OPEN_NAMED, Op.OPEN_SEALER})
RESULT_OPS: Final = frozenset({Op.SEAL_BLOCK, Op.SEAL_NAMED, Op.ABORT, Op.REMOVE_BLOCK})
COUNT_OPS: Final = frozenset({Op.MATCH, Op.TOUCH, Op.PREFETCH})
CONTROL_OPS: Final = frozenset(op for op in Op if op >= Op.STAT)


# --- requests --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Hello:
    """The first request. `pid` is what the client says of itself; rights follow the kernel's credentials."""

    client: str
    pid: int
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for drafts; one size hint in bytes each, 0 where the size is not known."""

    size_hints: tuple[int, ...]


class BlockSeal(NamedTuple):
    """Seal a draft as the block `digest`. `parent` is the prefix hash before it, zeros for a first block."""

    slot: int
    generation: int
    digest: bytes
    parent: bytes = NO_PARENT
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class SealBlocks:
    namespace: int
    """A handle that OPEN_NAMESPACE gave to this session."""
    seals: tuple[BlockSeal, ...]


class NameSeal(NamedTuple):
    """Seal a draft as the object `bucket`/`key`. `mtime_ns` None: the moment of the seal."""

    slot: int
    generation: int
    bucket: bytes
    key: bytes
    mode: int = 0o644
    replace: bool = True
    mtime_ns: int | None = None
    checksum: int | None = None
    user_metadata: bytes = b""
    expected_id: int | None = None
    """Only in the place of the object with this id."""


@dataclass(frozen=True, slots=True)
class SealNames:
    seals: tuple[NameSeal, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    drafts: tuple[tuple[int, int], ...]
    """(slot, generation) each."""


@dataclass(frozen=True, slots=True)
class DigestBatch:
    """A batch over prefix hashes of one namespace; OPEN_SEALER over the namespace's own digest."""

    op: Op
    namespace: int
    digests: bytes
    """Sixteen bytes each."""


@dataclass(frozen=True, slots=True)
class OpenNames:
    names: tuple[tuple[bytes, bytes], ...]
    """(bucket, key) each."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control request: a JSON object of arguments. Bytes that are no UTF-8 travel as lone surrogates."""

    op: Op
    arguments: dict[str, Any] = field(default_factory=dict)


Request = Hello | Reserve | SealBlocks | SealNames | Abort | DigestBatch | OpenNames | Control


# --- answers ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HelloAnswer:
    store_id: bytes
    may_open: bool
    """Whether the caller may open slots in the tmpfs directory itself."""
    details: dict[str, Any]
    """`directory` and `table` (paths), `limits` and `quota` (objects of integers)."""
    version: int = PROTOCOL_VERSION


class ExtentResult(NamedTuple):
    """`status` 0 or an errno; the other fields are zero where it is not 0."""

    status: int
    slot: int = 0
    generation: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExtentAnswer:
    """RESERVE, OPEN_* and LOOKUP_BLOCK: entries from index `first` of the request on."""

    op: Op
    first: int
    entries: tuple[ExtentResult, ...]


class Result(NamedTuple):
    """`status` 0, EEXIST (the block was already there and is the one that counts) or another errno. `value`: of a seal
    the id of the object that counts now, of a removal the size in bytes."""

    status: int
    value: int = 0


@dataclass(frozen=True, slots=True)
class ResultAnswer:
    op: Op
    first: int
    entries: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class CountAnswer:
    """MATCH: the contiguous hits from the first digest on. TOUCH: how many are there. PREFETCH: how many in DRAM."""

    op: Op
    count: int


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    op: Op
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """The request failed as a whole; with CLOSED, the session did."""

    op: Op
    error: KvfsError


Answer = HelloAnswer | ExtentAnswer | ResultAnswer | CountAnswer | ControlAnswer | Failure


def request_op(request: Request) -> Op:
    match request:
        case Hello():
            return Op.HELLO
        case Reserve():
            return Op.RESERVE
        case SealBlocks():
            return Op.SEAL_BLOCK
        case SealNames():
            return Op.SEAL_NAMED
        case Abort():
            return Op.ABORT
        case OpenNames():
            return Op.OPEN_NAMED
        case DigestBatch(op=op) | Control(op=op):
            return op


def answer_op(answer: Answer) -> Op:
    return Op.HELLO if isinstance(answer, HelloAnswer) else answer.op


def entry_count(request: Request) -> int:
    """How many entries the answer to `request` will have; 0 for requests that are no batch."""
    match request:
        case Reserve(size_hints=entries) | SealBlocks(seals=entries) | SealNames(seals=entries):
            return len(entries)
        case Abort(drafts=entries) | OpenNames(names=entries):
            return len(entries)
        case DigestBatch(digests=digests):
            return len(digests) // DIGEST_BYTES
        case _:
            return 0


def text(value: bytes) -> str:
    """Bytes of a name as a JSON string: UTF-8, other bytes as lone surrogates U+DC80..U+DCFF."""
    return value.decode("utf-8", "surrogateescape")


def untext(value: str) -> bytes:
    """The bytes that `text` came from. Raises InvalidRequest for a string that comes from no bytes."""
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a name has no byte form: {error.reason}") from None
