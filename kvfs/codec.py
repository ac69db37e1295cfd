"""The byte forms of the session protocol's messages (docs/sessions.md is the specification).

Responsibility: `encode_*` and `decode_*` turn a message of `kvfs.messages` into the body of a frame and back.

Invariants: decoding is exact (a body has the length that its counts imply, reserved fields are zero) and
total: any bytes give a message or a `ProtocolError` that names the field. Integers are little-endian, records
are multiples of eight bytes with natural alignment, so that native code reads them in place.

Concurrency: pure functions.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final

from kvfs import errors, limits
from kvfs.errors import KvfsError, ProtocolError
from kvfs.messages import (
    CONTROL_OPS,
    COUNT_OPS,
    DIGEST_BYTES,
    DIGEST_OPS,
    EXTENT_OPS,
    MAGIC,
    Abort,
    Answer,
    BlockSeal,
    Control,
    ControlAnswer,
    CountAnswer,
    DigestBatch,
    ExtentAnswer,
    ExtentResult,
    Failure,
    Hello,
    HelloAnswer,
    NameSeal,
    Op,
    OpenNames,
    Request,
    Reserve,
    Result,
    ResultAnswer,
    SealBlocks,
    SealNames,
    entry_count,
    request_op,
)

_BATCH: Final = struct.Struct("<II")
_HELLO: Final = struct.Struct("<8sII")
_HELLO_ANSWER: Final = struct.Struct("<8sII16s")
_HINT: Final = struct.Struct("<Q")
_DRAFT: Final = struct.Struct("<II")
_BLOCK_SEAL: Final = struct.Struct("<II16s16sIIQ")
_NAME_SEAL: Final = struct.Struct("<IIIIqQHHI")
_NAME: Final = struct.Struct("<HHI")
_EXTENT: Final = struct.Struct("<iIIIQ")
_RESULT: Final = struct.Struct("<iIQ")
_COUNT: Final = struct.Struct("<II")
_STATUS: Final = struct.Struct("<iHH")

_HAS_CHECKSUM: Final = 1
_REPLACE: Final = 2
_HAS_MTIME: Final = 4
_HAS_EXPECTED: Final = 8
_MAY_OPEN: Final = 1
_ALIGNMENT: Final = 8


# --- encoding --------------------------------------------------------------------------------------------
def encode_request(request: Request) -> bytes:
    """The body of a request's frame. Raises LimitExceeded, InvalidRequest for values with no byte form."""
    try:
        return _encode_request(request)
    except struct.error as error:
        raise errors.InvalidRequest(f"{request_op(request).name}: a field is out of range: {error}") from None


def _encode_request(request: Request) -> bytes:
    count = entry_count(request)
    if count > limits.MAX_BATCH:
        raise errors.LimitExceeded(f"{request_op(request).name}: {count} entries, over {limits.MAX_BATCH}")
    match request:
        case Hello():
            return _HELLO.pack(MAGIC, request.version, request.pid) + request.client.encode()
        case Reserve(size_hints=hints):
            return _BATCH.pack(count, 0) + b"".join(map(_HINT.pack, hints))
        case SealBlocks(namespace=namespace, seals=seals):
            return _BATCH.pack(count, namespace) + b"".join(map(_encode_block_seal, seals))
        case SealNames(seals=seals):
            return _BATCH.pack(count, 0) + b"".join(_encode_name_seal(seal) for seal in seals)
        case Abort(drafts=drafts):
            return _BATCH.pack(count, 0) + b"".join(_DRAFT.pack(*draft) for draft in drafts)
        case DigestBatch(namespace=namespace, digests=digests):
            return _BATCH.pack(count, namespace) + digests
        case OpenNames(names=names):
            return _BATCH.pack(count, 0) + b"".join(
                _padded(_NAME.pack(len(bucket), len(key), 0) + bucket + key) for bucket, key in names
            )
        case Control(arguments=arguments):
            return encode_object(arguments)


def _encode_block_seal(seal: BlockSeal) -> bytes:
    if len(seal.digest) != DIGEST_BYTES or len(seal.parent) != DIGEST_BYTES:
        raise errors.InvalidRequest(f"a prefix hash has {DIGEST_BYTES} bytes, not {len(seal.digest)}")
    flags = _HAS_CHECKSUM if seal.checksum is not None else 0
    return _BLOCK_SEAL.pack(
        seal.slot, seal.generation, seal.digest, seal.parent, flags, 0, seal.checksum or 0
    )


def _encode_name_seal(seal: NameSeal) -> bytes:
    flags = _REPLACE if seal.replace else 0
    flags |= _HAS_CHECKSUM if seal.checksum is not None else 0
    flags |= _HAS_MTIME if seal.mtime_ns is not None else 0
    flags |= _HAS_EXPECTED if seal.expected_id is not None else 0
    head = _NAME_SEAL.pack(
        seal.slot,
        seal.generation,
        flags,
        seal.mode,
        seal.mtime_ns or 0,
        seal.checksum or 0,
        len(seal.bucket),
        len(seal.key),
        len(seal.user_metadata),
    )
    expected = b"" if seal.expected_id is None else _HINT.pack(seal.expected_id)
    return _padded(head + expected + seal.bucket + seal.key + seal.user_metadata)


def encode_answer(answer: Answer) -> bytes:
    """The body of an answer's frame: the status head, then the payload."""
    match answer:
        case Failure(error=error):
            return _encode_error(error)
        case HelloAnswer():
            flags = _MAY_OPEN if answer.may_open else 0
            payload = _HELLO_ANSWER.pack(MAGIC, answer.version, flags, answer.store_id)
            payload += encode_object(answer.details)
        case ExtentAnswer(first=first, entries=extents):
            payload = _BATCH.pack(len(extents), first) + b"".join(
                _EXTENT.pack(e.status, e.slot, e.generation, 0, e.size_bytes) for e in extents
            )
        case ResultAnswer(first=first, entries=results):
            payload = _BATCH.pack(len(results), first) + b"".join(
                _RESULT.pack(r.status, 0, r.value) for r in results
            )
        case CountAnswer(count=count):
            payload = _COUNT.pack(count, 0)
        case ControlAnswer(result=result):
            payload = encode_object(result)
    return _STATUS.pack(0, 0, 0) + payload


def _encode_error(error: KvfsError) -> bytes:
    kind = type(error).__name__.encode()
    message = str(error).encode("utf-8", "replace")[: limits.MAX_ERROR_MESSAGE_BYTES]
    return _STATUS.pack(type(error).errno, len(kind), len(message)) + kind + message


def encode_object(value: dict[str, Any]) -> bytes:
    """ASCII JSON without spaces. Raises InvalidRequest for values that JSON has no form for."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidRequest(f"not a JSON object: {error}") from None


def _padded(record: bytes) -> bytes:
    return record + bytes(-len(record) % _ALIGNMENT)


# --- decoding --------------------------------------------------------------------------------------------
def decode_request(op: Op, body: bytes) -> Request:
    """The request in `body`. Raises ProtocolError naming the field that is wrong."""
    if op in CONTROL_OPS:
        if len(body) > limits.MAX_CONTROL_BYTES:
            raise ProtocolError(f"{op.name}: {len(body)} bytes, over the limit of {limits.MAX_CONTROL_BYTES}")
        return Control(op, decode_object(op, body))
    if op is Op.HELLO:
        return _decode_hello(body)
    count, argument = _batch_head(op, body)
    if op in DIGEST_OPS:
        _exact(op, body, _BATCH.size + count * DIGEST_BYTES)
        return DigestBatch(op, argument, body[_BATCH.size :])
    if op is Op.SEAL_BLOCK:
        _exact(op, body, _BATCH.size + count * _BLOCK_SEAL.size)
        return SealBlocks(
            argument, tuple(_block_seal(f) for f in _BLOCK_SEAL.iter_unpack(body[_BATCH.size :]))
        )
    _zero(op, "reserved", argument)
    if op is Op.SEAL_NAMED:
        return SealNames(tuple(_name_seals(count, body)))
    if op is Op.OPEN_NAMED:
        return OpenNames(tuple(_names(count, body)))
    record = _HINT if op is Op.RESERVE else _DRAFT
    _exact(op, body, _BATCH.size + count * record.size)
    fields = record.iter_unpack(body[_BATCH.size :])
    return Reserve(tuple(hint for (hint,) in fields)) if op is Op.RESERVE else Abort(tuple(fields))


def _decode_hello(body: bytes) -> Hello:
    if len(body) < _HELLO.size:
        raise ProtocolError(f"HELLO: {len(body)} bytes, at least {_HELLO.size} expected")
    magic, version, pid = _HELLO.unpack_from(body)
    if magic != MAGIC:
        raise ProtocolError(f"HELLO: magic {magic!r} instead of {MAGIC!r}")
    name = body[_HELLO.size :]
    if len(name) > limits.MAX_CLIENT_NAME_BYTES:
        raise ProtocolError(f"HELLO: client name of {len(name)} bytes, over {limits.MAX_CLIENT_NAME_BYTES}")
    return Hello(_utf8(Op.HELLO, "client name", name), pid, version)


def _block_seal(fields: tuple[Any, ...]) -> BlockSeal:
    slot, generation, digest, parent, flags, reserved, checksum = fields
    _zero(Op.SEAL_BLOCK, "reserved", reserved)
    _zero(Op.SEAL_BLOCK, "unknown flags", flags & ~_HAS_CHECKSUM)
    return BlockSeal(
        slot,
        generation,
        digest,
        parent,
        _optional(Op.SEAL_BLOCK, "checksum", checksum, flags & _HAS_CHECKSUM),
    )


def _name_seals(count: int, body: bytes) -> Iterator[NameSeal]:
    op, at = Op.SEAL_NAMED, _BATCH.size
    for _ in range(count):
        if len(body) - at < _NAME_SEAL.size:
            raise ProtocolError(f"{op.name}: body ends inside the entry at byte {at}")
        slot, generation, flags, mode, mtime, checksum, bucket, key, metadata = _NAME_SEAL.unpack_from(
            body, at
        )
        _zero(op, "unknown flags", flags & ~(_HAS_CHECKSUM | _REPLACE | _HAS_MTIME | _HAS_EXPECTED))
        expected = _HINT.size if flags & _HAS_EXPECTED else 0
        parts, at = _parts(op, body, at + _NAME_SEAL.size, expected, bucket, key, metadata)
        yield NameSeal(
            slot,
            generation,
            parts[1],
            parts[2],
            mode,
            bool(flags & _REPLACE),
            _optional(op, "mtime", mtime, flags & _HAS_MTIME),
            _optional(op, "checksum", checksum, flags & _HAS_CHECKSUM),
            parts[3],
            _HINT.unpack(parts[0])[0] if expected else None,
        )
    _exact(op, body, at)


def _names(count: int, body: bytes) -> Iterator[tuple[bytes, bytes]]:
    op, at = Op.OPEN_NAMED, _BATCH.size
    for _ in range(count):
        if len(body) - at < _NAME.size:
            raise ProtocolError(f"{op.name}: body ends inside the entry at byte {at}")
        bucket, key, reserved = _NAME.unpack_from(body, at)
        _zero(op, "reserved", reserved)
        parts, at = _parts(op, body, at + _NAME.size, bucket, key)
        yield parts[0], parts[1]
    _exact(op, body, at)


def _parts(op: Op, body: bytes, at: int, *lengths: int) -> tuple[list[bytes], int]:
    """The byte strings of a record that start at `at`, and where the next record starts."""
    parts = []
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    end = at + (-at % _ALIGNMENT)
    if end > len(body):
        raise ProtocolError(f"{op.name}: body ends inside the entry that reaches byte {end}")
    if any(body[at:end]):
        raise ProtocolError(f"{op.name}: padding at byte {at} is not zero")
    return parts, end


def decode_answer(op: Op, body: bytes) -> Answer:
    """The answer in `body`. Raises ProtocolError naming the field that is wrong."""
    if len(body) < _STATUS.size:
        raise ProtocolError(f"{op.name} answer: {len(body)} bytes, at least {_STATUS.size} expected")
    status, kind_bytes, message_bytes = _STATUS.unpack_from(body)
    if status != 0:
        _exact(op, body, _STATUS.size + kind_bytes + message_bytes)
        return Failure(op, _decode_error(op, status, body[_STATUS.size :], kind_bytes))
    _zero(op, "error length", kind_bytes | message_bytes)
    if op is Op.CLOSED:
        raise ProtocolError("CLOSED answer without an error")
    payload = body[_STATUS.size :]
    if op in CONTROL_OPS:
        return ControlAnswer(op, decode_object(op, payload))
    if op is Op.HELLO:
        return _decode_hello_answer(payload)
    count, argument = _batch_head(op, payload)
    if op in COUNT_OPS:
        _exact(op, payload, _COUNT.size)
        _zero(op, "reserved", argument)
        return CountAnswer(op, count)
    record = _EXTENT if op in EXTENT_OPS else _RESULT
    _exact(op, payload, _BATCH.size + count * record.size)
    rows = record.iter_unpack(payload[_BATCH.size :])
    if op in EXTENT_OPS:
        return ExtentAnswer(op, argument, tuple(_extent_result(op, row) for row in rows))
    return ResultAnswer(op, argument, tuple(_result(op, row) for row in rows))


def _decode_hello_answer(payload: bytes) -> HelloAnswer:
    if len(payload) < _HELLO_ANSWER.size:
        raise ProtocolError(f"HELLO answer: {len(payload)} bytes, at least {_HELLO_ANSWER.size} expected")
    magic, version, flags, store_id = _HELLO_ANSWER.unpack_from(payload)
    if magic != MAGIC:
        raise ProtocolError(f"HELLO answer: magic {magic!r} instead of {MAGIC!r}")
    details = decode_object(Op.HELLO, payload[_HELLO_ANSWER.size :])
    return HelloAnswer(store_id, bool(flags & _MAY_OPEN), details, version)


def _decode_error(op: Op, status: int, body: bytes, kind_bytes: int) -> KvfsError:
    name = _utf8(op, "error class", body[:kind_bytes])
    message = body[kind_bytes:].decode("utf-8", "replace")
    kind = _error_classes().get(name)
    if kind is not None and kind.errno == status:
        return kind(message)
    error = errors.from_errno(status, message)
    return error if isinstance(error, KvfsError) else KvfsError(f"{name}: {message} (errno {status})")


def _error_classes() -> dict[str, type[KvfsError]]:
    found: dict[str, type[KvfsError]] = {}
    pending = [KvfsError]
    while pending:
        kind = pending.pop()
        found[kind.__name__] = kind
        pending += kind.__subclasses__()
    return found


def _extent_result(op: Op, fields: tuple[int, ...]) -> ExtentResult:
    status, slot, generation, reserved, size = fields
    _zero(op, "reserved", reserved)
    return ExtentResult(_status(op, status), slot, generation, size)


def _result(op: Op, fields: tuple[int, ...]) -> Result:
    status, reserved, value = fields
    _zero(op, "reserved", reserved)
    return Result(_status(op, status), value)


def decode_object(op: Op, body: bytes) -> dict[str, Any]:
    """Strict JSON: one object, no repeated key, no NaN. Raises ProtocolError."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{op.name}: body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"{op.name}: body is a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _batch_head(op: Op, body: bytes) -> tuple[int, int]:
    if len(body) < _BATCH.size:
        raise ProtocolError(f"{op.name}: {len(body)} bytes, at least {_BATCH.size} expected")
    count, argument = _BATCH.unpack_from(body)
    if count > limits.MAX_BATCH:
        raise ProtocolError(f"{op.name}: {count} entries, over the limit of {limits.MAX_BATCH}")
    return count, argument


def _exact(op: Op, body: bytes, size_bytes: int) -> None:
    if len(body) != size_bytes:
        raise ProtocolError(f"{op.name}: body of {len(body)} bytes where its counts say {size_bytes}")


def _zero(op: Op, what: str, value: int) -> None:
    if value != 0:
        raise ProtocolError(f"{op.name}: {what} is {value:#x}, not 0")


def _status(op: Op, status: int) -> int:
    if status < 0:
        raise ProtocolError(f"{op.name}: status {status} is negative")
    return status


def _optional(op: Op, what: str, value: int, present: int) -> int | None:
    if present:
        return value
    _zero(op, f"{what} without its flag", value)
    return None


def _utf8(op: Op, what: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError(f"{op.name}: {what} is not UTF-8") from None
