"""The messages of the session protocol as values (docs/sessions.md is the specification).

Responsibility: every request and answer is an immutable value, with the operation that it belongs to. Their
byte forms are `kvfs.protocol.encode`'s and `decode`'s; frames, order and state are `kvfs.protocol.state_machine`'s.
Concurrency: plain values.
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
    RESERVE_BYTES = 46
    REMOVE_NAMES = 47
    LARGE_CREATE = 48
    LARGE_APPEND = 49
    LARGE_SEAL = 50
    LARGE_OPEN = 51
    LARGE_READ = 52
    LARGE_CLOSE = 53
    SYMLINK = 54
    FETCH = 55
    MATCH_CLUSTER = 56
    HBM_ATTACH = 57
    HBM_DETACH = 58
    HBM_MAP = 59
    HBM_FIND = 60
    HBM_RESERVE = 61
    HBM_SEAL = 62
    HBM_ABORT = 63
    HBM_DROP = 64
    HBM_ADOPT = 65
    CLUSTER_COPY = 66
    CLUSTER_CANCEL = 67
    CLUSTER_DRAIN = 68
    CLUSTER_MOVE = 69


DIGEST_OPS: Final = frozenset(
    {Op.REMOVE_BLOCK, Op.LOOKUP_BLOCK, Op.MATCH, Op.OPEN_BLOCK, Op.TOUCH, Op.OPEN_SEALER, Op.PREFETCH}
)
EXTENT_OPS: Final = frozenset({Op.RESERVE, Op.LOOKUP_BLOCK, Op.OPEN_BLOCK, Op.OPEN_NAMED, Op.OPEN_SEALER})
DESCRIPTOR_OPS: Final = frozenset(
    {Op.RESERVE, Op.OPEN_BLOCK, Op.OPEN_NAMED, Op.OPEN_SEALER, Op.HBM_ATTACH, Op.HBM_MAP}
)
SENDING_OPS: Final = frozenset({Op.HBM_ADOPT})
"""A request of these brings one descriptor."""
COUNT_OPS: Final = frozenset({Op.MATCH, Op.TOUCH, Op.PREFETCH})
CONTROL_OPS: Final = frozenset(op for op in Op if op >= Op.STAT)


# --- requests --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Hello:
    """The first request. `pid` is the client's own word; rights follow the kernel's credentials."""

    client: str
    pid: int
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve drafts, with a size hint in bytes for each; 0 where the size is not known.

    With `kept`, nothing is reserved for the sizes: each draft may have so many bytes of an earlier object, as its
    answer says. The writer writes all of them, or truncates the draft to 0 first.
    """

    size_hints: tuple[int, ...]
    kept: bool = False


class BlockSeal(NamedTuple):
    """Seal a draft as the block `digest`. `parent` is the prefix hash before it, zeros for a first block."""

    slot: int
    generation: int
    digest: bytes
    parent: bytes = NO_PARENT
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class SealBlocks:
    """Seal drafts as blocks of a namespace."""

    namespace: int
    """A handle that OPEN_NAMESPACE gave to this session."""
    seals: tuple[BlockSeal, ...]


class NameSeal(NamedTuple):
    """Seal a draft as the object `bucket`/`key`. Without `mtime_ns` it gets the time of the seal."""

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
    """Replace only the object with this id."""
    needs: tuple[bytes, bytes] | None = None
    """Bucket and key of a directory's marker, which has to be there."""


@dataclass(frozen=True, slots=True)
class SealNames:
    """Seal drafts under names."""

    seals: tuple[NameSeal, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End drafts without making objects of them."""

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
    """Open sealed objects by their names, for reading."""

    names: tuple[tuple[bytes, bytes], ...]
    """(bucket, key) each."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control request: a JSON object of arguments. Bytes that are not UTF-8 travel as lone surrogates."""

    op: Op
    arguments: dict[str, Any] = field(default_factory=dict)


Request = Hello | Reserve | SealBlocks | SealNames | Abort | DigestBatch | OpenNames | Control


# --- answers ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """Say what the caller needs to use the store, and what he may do."""

    store_id: bytes
    may_open: bool
    """Whether the caller may open slots in the tmpfs directory itself."""
    details: dict[str, Any]
    """`directory` and `table` (paths), `limits` and `quota` (objects of integers)."""
    version: int = PROTOCOL_VERSION


class ExtentResult(NamedTuple):
    """One entry: `status` is 0 or an errno, and the other fields are zero with an errno."""

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
    """One entry: `status` is 0, EEXIST (the block was there already, and stays) or another errno. `value` is the id of
    the object that is there after a seal, the size in bytes after a removal."""

    status: int
    value: int = 0


@dataclass(frozen=True, slots=True)
class ResultAnswer:
    """Say what became of each entry of a request, from number `first` on."""

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
    """Carry the result of a control request. In an operation of DESCRIPTOR_OPS, `descriptors` in it counts them."""

    op: Op
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a whole request; with CLOSED, of the session."""

    op: Op
    error: KvfsError


Answer = HelloAnswer | ExtentAnswer | ResultAnswer | CountAnswer | ControlAnswer | Failure


_REQUEST_OPS: Final[dict[type, Op]] = {
    Hello: Op.HELLO,
    Reserve: Op.RESERVE,
    SealBlocks: Op.SEAL_BLOCK,
    SealNames: Op.SEAL_NAMED,
    Abort: Op.ABORT,
    OpenNames: Op.OPEN_NAMED,
}
_NAMES: Final = {op.value: op.name.lower() for op in Op}


def request_op(request: Request) -> Op:
    """Return the operation of a request."""
    if isinstance(request, (DigestBatch, Control)):  # a union would be made anew each time
        return request.op
    return _REQUEST_OPS[type(request)]


def operation_name(request: Request) -> str:
    """Return the operation's name in metrics."""
    return _NAMES[int(request_op(request))]


def answer_op(answer: Answer) -> Op:
    """Return the operation of an answer."""
    return Op.HELLO if isinstance(answer, HelloAnswer) else answer.op


def entry_count(request: Request) -> int:
    """Return how many entries the answer to a batch has; 0 for other requests."""
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
    """Return bytes of a name as a JSON string: UTF-8, other bytes as lone surrogates U+DC80..U+DCFF."""
    return value.decode("utf-8", "surrogateescape")


def untext(value: str) -> bytes:
    """Return the bytes for which `text` returns this string. Raises InvalidRequest where there are none."""
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a name has no byte form: {error.reason}") from None
