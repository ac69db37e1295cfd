"""Decoding: bodies of frames to messages of the session protocol (`kvfs.protocol.messages`).

Invariants: decoding is exact (a body has the length that its counts imply, reserved fields are zero) and
total: any bytes give a message or a `ProtocolError` that names the field.

Concurrency: pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from kvfs import errors, limits
from kvfs.errors import KvfsError, ProtocolError
from kvfs.protocol.messages import (
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
)
from kvfs.protocol.records import (
    ALIGNMENT,
    BATCH,
    BLOCK_SEAL,
    COUNT,
    DRAFT,
    EXTENT,
    HAS_CHECKSUM,
    HAS_EXPECTED,
    HAS_MTIME,
    HELLO,
    HELLO_ANSWER,
    HINT,
    KEPT,
    MAY_OPEN,
    NAME,
    NAME_SEAL,
    NEEDS_MARKER,
    REPLACE,
    RESULT,
    STATUS,
)

_SEAL_FLAGS: Final = HAS_CHECKSUM | REPLACE | HAS_MTIME | HAS_EXPECTED | NEEDS_MARKER


def decode_request(op: Op, body: bytes) -> Request:
    """Decode the request in `body`. Raises ProtocolError naming the field that is wrong."""
    if op in CONTROL_OPS:
        if len(body) > limits.MAX_CONTROL_BYTES:
            raise ProtocolError(f"{op.name}: {len(body)} bytes, over the limit of {limits.MAX_CONTROL_BYTES}")
        return Control(op, decode_object(op, body))
    if op is Op.HELLO:
        return _decode_hello(body)
    count, argument = _batch_head(op, body)
    if op in DIGEST_OPS:
        _exact(op, body, BATCH.size + count * DIGEST_BYTES)
        return DigestBatch(op, argument, body[BATCH.size :])
    if op is Op.SEAL_BLOCK:
        _exact(op, body, BATCH.size + count * BLOCK_SEAL.size)
        return SealBlocks(argument, tuple(_block_seal(f) for f in BLOCK_SEAL.iter_unpack(body[BATCH.size :])))
    if op is Op.RESERVE:
        _zero(op, "unknown flags", argument & ~KEPT)
        _exact(op, body, BATCH.size + count * HINT.size)
        hints = tuple(hint for (hint,) in HINT.iter_unpack(body[BATCH.size :]))
        return Reserve(hints, kept=bool(argument & KEPT))
    _zero(op, "reserved", argument)
    if op is Op.SEAL_NAMED:
        return SealNames(tuple(_name_seals(count, body)))
    if op is Op.OPEN_NAMED:
        return OpenNames(tuple(_names(count, body)))
    _exact(op, body, BATCH.size + count * DRAFT.size)
    return Abort(tuple(DRAFT.iter_unpack(body[BATCH.size :])))


def _decode_hello(body: bytes) -> Hello:
    if len(body) < HELLO.size:
        raise ProtocolError(f"HELLO: {len(body)} bytes, at least {HELLO.size} expected")
    magic, version, pid = HELLO.unpack_from(body)
    if magic != MAGIC:
        raise ProtocolError(f"HELLO: magic {magic!r} instead of {MAGIC!r}")
    name = body[HELLO.size :]
    if len(name) > limits.MAX_CLIENT_NAME_BYTES:
        raise ProtocolError(f"HELLO: client name of {len(name)} bytes, over {limits.MAX_CLIENT_NAME_BYTES}")
    return Hello(_utf8(Op.HELLO, "client name", name), pid, version)


def _block_seal(fields: tuple[Any, ...]) -> BlockSeal:
    slot, generation, digest, parent, flags, reserved, checksum = fields
    _zero(Op.SEAL_BLOCK, "reserved", reserved)
    _zero(Op.SEAL_BLOCK, "unknown flags", flags & ~HAS_CHECKSUM)
    return BlockSeal(
        slot,
        generation,
        digest,
        parent,
        _optional(Op.SEAL_BLOCK, "checksum", checksum, flags & HAS_CHECKSUM),
    )


def _name_seals(count: int, body: bytes) -> Iterator[NameSeal]:
    op, at = Op.SEAL_NAMED, BATCH.size
    for _ in range(count):
        if len(body) - at < NAME_SEAL.size:
            raise ProtocolError(f"{op.name}: body ends inside the entry at byte {at}")
        slot, generation, flags, mode, mtime, checksum, bucket, key, metadata = NAME_SEAL.unpack_from(
            body, at
        )
        _zero(op, "unknown flags", flags & ~_SEAL_FLAGS)
        expected = HINT.size if flags & HAS_EXPECTED else 0
        parts, at = _parts(op, body, at + NAME_SEAL.size, expected, bucket, key, metadata)
        needs = None
        if flags & NEEDS_MARKER:
            needs, at = _name(op, body, at)
        yield NameSeal(
            slot,
            generation,
            parts[1],
            parts[2],
            mode,
            bool(flags & REPLACE),
            _optional(op, "mtime", mtime, flags & HAS_MTIME),
            _optional(op, "checksum", checksum, flags & HAS_CHECKSUM),
            parts[3],
            HINT.unpack(parts[0])[0] if expected else None,
            needs,
        )
    _exact(op, body, at)


def _names(count: int, body: bytes) -> Iterator[tuple[bytes, bytes]]:
    op, at = Op.OPEN_NAMED, BATCH.size
    for _ in range(count):
        name, at = _name(op, body, at)
        yield name
    _exact(op, body, at)


def _name(op: Op, body: bytes, at: int) -> tuple[tuple[bytes, bytes], int]:
    """Return the bucket and key of the record at `at`, and where the next record starts."""
    if len(body) - at < NAME.size:
        raise ProtocolError(f"{op.name}: body ends inside the entry at byte {at}")
    bucket, key, reserved = NAME.unpack_from(body, at)
    _zero(op, "reserved", reserved)
    parts, at = _parts(op, body, at + NAME.size, bucket, key)
    return (parts[0], parts[1]), at


def _parts(op: Op, body: bytes, at: int, *lengths: int) -> tuple[list[bytes], int]:
    """Return the byte strings of a record that start at `at`, and where the next record starts."""
    parts = []
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    end = at + (-at % ALIGNMENT)
    if end > len(body):
        raise ProtocolError(f"{op.name}: body ends inside the entry that reaches byte {end}")
    if any(body[at:end]):
        raise ProtocolError(f"{op.name}: padding at byte {at} is not zero")
    return parts, end


def decode_answer(op: Op, body: bytes) -> Answer:
    """Decode the answer in `body`. Raises ProtocolError naming the field that is wrong."""
    if len(body) < STATUS.size:
        raise ProtocolError(f"{op.name} answer: {len(body)} bytes, at least {STATUS.size} expected")
    status, kind_bytes, message_bytes = STATUS.unpack_from(body)
    if status != 0:
        _exact(op, body, STATUS.size + kind_bytes + message_bytes)
        return Failure(op, _decode_error(op, status, body[STATUS.size :], kind_bytes))
    _zero(op, "error length", kind_bytes | message_bytes)
    if op is Op.CLOSED:
        raise ProtocolError("CLOSED answer without an error")
    payload = body[STATUS.size :]
    if op in CONTROL_OPS:
        return ControlAnswer(op, decode_object(op, payload))
    if op is Op.HELLO:
        return _decode_hello_answer(payload)
    count, argument = _batch_head(op, payload)
    if op in COUNT_OPS:
        _exact(op, payload, COUNT.size)
        _zero(op, "reserved", argument)
        return CountAnswer(op, count)
    record = EXTENT if op in EXTENT_OPS else RESULT
    _exact(op, payload, BATCH.size + count * record.size)
    rows = record.iter_unpack(payload[BATCH.size :])
    if op in EXTENT_OPS:
        return ExtentAnswer(op, argument, tuple(_extent_result(op, row) for row in rows))
    return ResultAnswer(op, argument, tuple(_result(op, row) for row in rows))


def _decode_hello_answer(payload: bytes) -> HelloAnswer:
    if len(payload) < HELLO_ANSWER.size:
        raise ProtocolError(f"HELLO answer: {len(payload)} bytes, at least {HELLO_ANSWER.size} expected")
    magic, version, flags, store_id = HELLO_ANSWER.unpack_from(payload)
    if magic != MAGIC:
        raise ProtocolError(f"HELLO answer: magic {magic!r} instead of {MAGIC!r}")
    details = decode_object(Op.HELLO, payload[HELLO_ANSWER.size :])
    return HelloAnswer(store_id, bool(flags & MAY_OPEN), details, version)


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
    """Decode strict JSON: one object, no repeated key, no NaN. Raises ProtocolError."""
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
    if len(body) < BATCH.size:
        raise ProtocolError(f"{op.name}: {len(body)} bytes, at least {BATCH.size} expected")
    count, argument = BATCH.unpack_from(body)
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
