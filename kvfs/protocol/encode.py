"""Encoding: messages of the session protocol (`kvfs.protocol.messages`) to bodies of frames.

Concurrency: pure functions.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from kvfs import errors, limits
from kvfs.errors import KvfsError
from kvfs.protocol.messages import (
    DIGEST_BYTES,
    MAGIC,
    Abort,
    Answer,
    BlockSeal,
    Control,
    ControlAnswer,
    CountAnswer,
    DigestBatch,
    ExtentAnswer,
    Failure,
    Hello,
    HelloAnswer,
    NameSeal,
    OpenNames,
    Request,
    Reserve,
    ResultAnswer,
    SealBlocks,
    SealNames,
    entry_count,
    request_op,
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


def encode_request(request: Request) -> bytes:
    """Encode the body of a request's frame. Raises LimitExceeded, InvalidRequest for values with no byte form."""
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
            return HELLO.pack(MAGIC, request.version, request.pid) + request.client.encode()
        case Reserve(size_hints=hints, kept=kept):
            return BATCH.pack(count, KEPT if kept else 0) + b"".join(map(HINT.pack, hints))
        case SealBlocks(namespace=namespace, seals=seals):
            return BATCH.pack(count, namespace) + b"".join(map(_encode_block_seal, seals))
        case SealNames(seals=seals):
            return BATCH.pack(count, 0) + b"".join(_encode_name_seal(seal) for seal in seals)
        case Abort(drafts=drafts):
            return BATCH.pack(count, 0) + b"".join(DRAFT.pack(*draft) for draft in drafts)
        case DigestBatch(namespace=namespace, digests=digests):
            return BATCH.pack(count, namespace) + digests
        case OpenNames(names=names):
            return BATCH.pack(count, 0) + b"".join(_encode_name(*name) for name in names)
        case Control(arguments=arguments):
            return encode_object(arguments)


def _encode_block_seal(seal: BlockSeal) -> bytes:
    if len(seal.digest) != DIGEST_BYTES or len(seal.parent) != DIGEST_BYTES:
        raise errors.InvalidRequest(f"a prefix hash has {DIGEST_BYTES} bytes, not {len(seal.digest)}")
    flags = HAS_CHECKSUM if seal.checksum is not None else 0
    return BLOCK_SEAL.pack(seal.slot, seal.generation, seal.digest, seal.parent, flags, 0, seal.checksum or 0)


def _encode_name_seal(seal: NameSeal) -> bytes:
    flags = REPLACE if seal.replace else 0
    flags |= HAS_CHECKSUM if seal.checksum is not None else 0
    flags |= HAS_MTIME if seal.mtime_ns is not None else 0
    flags |= HAS_EXPECTED if seal.expected_id is not None else 0
    flags |= NEEDS_MARKER if seal.needs is not None else 0
    head = NAME_SEAL.pack(
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
    expected = b"" if seal.expected_id is None else HINT.pack(seal.expected_id)
    needs = b"" if seal.needs is None else _encode_name(*seal.needs)
    return _padded(head + expected + seal.bucket + seal.key + seal.user_metadata) + needs


def _encode_name(bucket: bytes, key: bytes) -> bytes:
    return _padded(NAME.pack(len(bucket), len(key), 0) + bucket + key)


def encode_answer(answer: Answer) -> bytes:
    """Encode the body of an answer's frame: the status head, then the payload."""
    match answer:
        case Failure(error=error):
            return _encode_error(error)
        case HelloAnswer():
            flags = MAY_OPEN if answer.may_open else 0
            payload = HELLO_ANSWER.pack(MAGIC, answer.version, flags, answer.store_id)
            payload += encode_object(answer.details)
        case ExtentAnswer(first=first, entries=extents):
            payload = BATCH.pack(len(extents), first) + b"".join(
                EXTENT.pack(e.status, e.slot, e.generation, 0, e.size_bytes) for e in extents
            )
        case ResultAnswer(first=first, entries=results):
            payload = BATCH.pack(len(results), first) + b"".join(
                RESULT.pack(r.status, 0, r.value) for r in results
            )
        case CountAnswer(count=count):
            payload = COUNT.pack(count, 0)
        case ControlAnswer(result=result):
            payload = encode_object(result)
    return STATUS.pack(0, 0, 0) + payload


def _encode_error(error: KvfsError) -> bytes:
    kind = type(error).__name__.encode()
    message = str(error).encode("utf-8", "replace")[: limits.MAX_ERROR_MESSAGE_BYTES]
    return STATUS.pack(type(error).errno, len(kind), len(message)) + kind + message


def encode_object(value: dict[str, Any]) -> bytes:
    """Encode as ASCII JSON without spaces. Raises InvalidRequest for values that JSON has no form for."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidRequest(f"not a JSON object: {error}") from None


def _padded(record: bytes) -> bytes:
    return record + bytes(-len(record) % ALIGNMENT)
