"""The metadata that the gateway keeps with an object's name (docs/formats.md, *S3 metadata*).

Responsibility: headers of a PUT to an `ObjectMetadata`, that to bytes and back, and to the headers of a GET.

Invariants: the bytes are canonical: fields in order, none twice, nothing after them; anything else that has the magic
is Corrupt. Bytes without the magic are another door's own, and the object has the defaults. Values of headers are kept
as the bytes that came, as Latin-1 text.

Concurrency: pure values and functions.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from gateway.protocol import tags
from gateway.protocol.checksums import Algorithm, Checksum, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request
from kvfs.errors import Corrupt
from kvfs.limits import (
    MAX_PARTS,
    MAX_S3_USER_METADATA_BYTES,
    MAX_SYSTEM_METADATA_BYTES,
    MAX_USER_METADATA_BYTES,
)

DEFAULT_CONTENT_TYPE: Final = "binary/octet-stream"
MAGIC: Final = b"kvS3"
VERSION: Final = 1

_HEAD: Final = struct.Struct("<4sB3x")
_PREFIX: Final = _HEAD.pack(MAGIC, VERSION)
_FIELD: Final = struct.Struct("<BxHI")
_CHECKSUM: Final = struct.Struct("<BBH")
_LENGTH: Final = struct.Struct("<H")

(
    _CONTENT_TYPE,
    _HEADERS,
    _USER,
    _TAGS,
    _ETAG,
    _OWNER,
    _CHECKSUM_FIELD,
    _SIZES,
    _PART_CHECKSUMS,
    _UPLOAD,
) = range(1, 11)

_ALGORITHM_CODES: Final = {algorithm: code for code, algorithm in enumerate(Algorithm, 1)}
_ALGORITHMS: Final = {code: algorithm for algorithm, code in _ALGORITHM_CODES.items()}
_TYPE_CODES: Final = {ChecksumType.FULL_OBJECT: 1, ChecksumType.COMPOSITE: 2}
_TYPES: Final = {code: type_ for type_, code in _TYPE_CODES.items()}

_KEPT: Final = (
    b"cache-control",
    b"content-disposition",
    b"content-encoding",
    b"content-language",
    b"expires",
)
_META: Final = b"x-amz-meta-"


@dataclass(frozen=True, slots=True)
class PartMetadata:
    """A part of a multipart object; `checksum` is empty where none is kept."""

    size_bytes: int
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class ObjectMetadata:
    """What is kept of an object; the defaults are those of one that another door wrote."""

    content_type: str = DEFAULT_CONTENT_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)
    """cache-control, content-disposition, content-encoding, content-language, expires."""
    user: Mapping[str, str] = field(default_factory=dict)
    """Names without `x-amz-meta-`, lower case."""
    tags: Mapping[str, str] = field(default_factory=dict)
    etag: str = ""
    """Empty: opaque, see `gateway.protocol.etag.opaque`."""
    owner: str = ""
    checksum: Checksum | None = None
    parts: tuple[PartMetadata, ...] = ()
    """The parts of a multipart object, in order."""
    upload_id: str = ""
    """The upload that a multipart object came from: a completion that is repeated gets the same answer."""

    def encode(self) -> bytes:
        """Encode as bytes, without the parts' checksums where they do not fit. Raises S3Error MetadataTooLarge."""
        data = _encode(self)
        if len(data) > MAX_USER_METADATA_BYTES and any(part.checksum for part in self.parts):
            data = _encode(replace(self, parts=tuple(PartMetadata(part.size_bytes) for part in self.parts)))
        if len(data) > MAX_USER_METADATA_BYTES:
            raise S3Error(
                "MetadataTooLarge",
                f"Metadata, tags and part sizes take {len(data)} bytes: at most {MAX_USER_METADATA_BYTES} are kept.",
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> ObjectMetadata:
        """Decode what `encode` wrote; the defaults for bytes without the magic. Raises Corrupt."""
        if not data.startswith(MAGIC):
            return _DEFAULT
        try:
            return _decode(data)
        except (struct.error, KeyError, IndexError, ValueError) as error:
            raise Corrupt(f"S3 metadata of {len(data)} bytes: {error}") from None


_DEFAULT: Final = ObjectMetadata()


# --- headers -------------------------------------------------------------------------------------------------
def from_request(request: Request) -> ObjectMetadata:
    """Read what a PUT, copy (REPLACE) or create-upload says to keep.

    Raises S3Error MetadataTooLarge, and what `gateway.protocol.tags.parse_header` raises.
    """
    found = request.headers_by_name
    kept = {name.decode(): found[name].decode("latin-1") for name in _KEPT if name in found}
    codings = [coding.strip() for coding in kept.get("content-encoding", "").split(",")]
    if any(coding.lower() == "aws-chunked" for coding in codings):
        kept["content-encoding"] = ", ".join(coding for coding in codings if coding.lower() != "aws-chunked")
    kept = {name: value for name, value in kept.items() if value}
    user = {
        name[len(_META) :].decode("latin-1"): value.decode("latin-1")
        for name, value in found.items()
        if name.startswith(_META)
    }
    content_type = found.get(b"content-type", b"").decode("latin-1") or DEFAULT_CONTENT_TYPE
    _check_size("user metadata", user, MAX_S3_USER_METADATA_BYTES)
    _check_size("headers", kept | {"content-type": content_type}, MAX_SYSTEM_METADATA_BYTES)
    said = tags.parse_header(request.header(b"x-amz-tagging") or "")
    return ObjectMetadata(content_type, kept, user, said)


def _check_size(what: str, pairs: Mapping[str, str], limit: int) -> None:
    size = sum(len(name) + len(value) for name, value in pairs.items())
    if size > limit:
        raise S3Error(
            "MetadataTooLarge",
            f"The {what} to keep take {size} bytes: at most {limit}.",
            detail={"Size": str(size), "MaxSizeAllowed": str(limit)},
        )


def response_headers(metadata: ObjectMetadata) -> list[tuple[str, str]]:
    """Make Content-Type, the kept headers, x-amz-meta-* and x-amz-tagging-count of a GET or HEAD, as Latin-1 text."""
    found = [("Content-Type", metadata.content_type)]
    found += [(name.title(), value) for name, value in metadata.headers.items()]
    found += [(f"x-amz-meta-{name}", mail_safe(value)) for name, value in metadata.user.items()]
    if metadata.tags:
        found.append(("x-amz-tagging-count", str(len(metadata.tags))))
    return found


def mail_safe(value: str) -> str:
    """Encode a value that holds UTF-8 as an encoded word of RFC 2047, as S3 answers it; any other stays as it came."""
    if value.isascii() and value.isprintable():
        return value
    raw = value.encode("latin-1")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return value
    return f"=?UTF-8?B?{b64encode(raw).decode()}?="


# --- bytes ---------------------------------------------------------------------------------------------------
def _encode(metadata: ObjectMetadata) -> bytes:
    content_type, checksum, parts = metadata.content_type, metadata.checksum, metadata.parts
    fields = [
        (_CONTENT_TYPE, b"" if content_type == DEFAULT_CONTENT_TYPE else content_type.encode()),
        (_HEADERS, _pairs(metadata.headers)),
        (_USER, _pairs(metadata.user)),
        (_TAGS, _pairs(metadata.tags)),
        (_ETAG, metadata.etag.encode()),
        (_OWNER, metadata.owner.encode()),
        (_CHECKSUM_FIELD, b"" if checksum is None else _checksum(checksum)),
    ]
    if parts:
        fields.append((_SIZES, _sizes([part.size_bytes for part in parts])))
        fields.append((_PART_CHECKSUMS, b"".join([part.checksum for part in parts])))
    fields.append((_UPLOAD, metadata.upload_id.encode()))
    return _PREFIX + b"".join([_FIELD.pack(tag, 0, len(value)) + value for tag, value in fields if value])


def _pairs(pairs: Mapping[str, str]) -> bytes:
    out = bytearray()
    for pair in pairs.items():
        for text in pair:
            data = text.encode()
            out += _LENGTH.pack(len(data)) + data
    return bytes(out)


def _checksum(checksum: Checksum) -> bytes:
    head = _CHECKSUM.pack(_ALGORITHM_CODES[checksum.algorithm], _TYPE_CODES[checksum.type], checksum.parts)
    return head + checksum.digest


def _sizes(sizes: Sequence[int]) -> bytes:
    """Encode runs of equal sizes: varint(size * 2 + whether a count follows), varint(count)."""
    out = bytearray()
    for size, run in groupby(sizes):
        count = sum(1 for _ in run)
        out += _varint(size * 2 + (count > 1))
        if count > 1:
            out += _varint(count)
    return bytes(out)


def _varint(value: int) -> bytes:
    """Encode as LEB128: seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _decode(data: bytes) -> ObjectMetadata:
    fields = _read_fields(data)
    checksum = _read_checksum(fields[_CHECKSUM_FIELD]) if _CHECKSUM_FIELD in fields else None
    sizes = list(_read_sizes(fields.get(_SIZES, b"")))
    found = ObjectMetadata(
        fields.get(_CONTENT_TYPE, DEFAULT_CONTENT_TYPE.encode()).decode(),
        _read_pairs(fields.get(_HEADERS, b"")),
        _read_pairs(fields.get(_USER, b"")),
        _read_pairs(fields.get(_TAGS, b"")),
        fields.get(_ETAG, b"").decode(),
        fields.get(_OWNER, b"").decode(),
        checksum,
        _read_parts(sizes, fields.get(_PART_CHECKSUMS, b""), checksum),
        fields.get(_UPLOAD, b"").decode(),
    )
    if _encode(found) != data:
        raise ValueError("not in the canonical form")
    return found


def _read_fields(data: bytes) -> dict[int, bytes]:
    _, version = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"version {version}, known is {VERSION}")
    fields = {}
    at, end = _HEAD.size, len(data)
    while at < end:
        tag, _, length = _FIELD.unpack_from(data, at)
        at += _FIELD.size
        fields[tag] = data[at : at + length]
        at += length
    return fields


def _read_pairs(data: bytes) -> dict[str, str]:
    texts = []
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        texts.append(data[at : at + length].decode())
        at += length
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _read_checksum(data: bytes) -> Checksum:
    algorithm, type_, parts = _CHECKSUM.unpack_from(data)
    checksum = Checksum(_ALGORITHMS[algorithm], data[_CHECKSUM.size :], _TYPES[type_], parts)
    if len(checksum.digest) != checksum.algorithm.digest_bytes:
        raise ValueError(f"a {checksum.algorithm.value} of {len(checksum.digest)} bytes")
    return checksum


def _read_sizes(data: bytes) -> Iterator[int]:
    at = total = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        count = 1
        if value & 1:
            count, at = _read_varint(data, at)
        total += count
        if total > MAX_PARTS:
            raise ValueError(f"over {MAX_PARTS} parts")
        for _ in range(count):
            yield value >> 1


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number over 64 bits")


def _read_parts(sizes: Sequence[int], digests: bytes, checksum: Checksum | None) -> tuple[PartMetadata, ...]:
    if not digests:
        return tuple(map(PartMetadata, sizes))
    if checksum is None or len(digests) != len(sizes) * checksum.algorithm.digest_bytes:
        raise ValueError(f"{len(digests)} bytes of checksums of {len(sizes)} parts")
    width = checksum.algorithm.digest_bytes
    return tuple(
        PartMetadata(size, digests[index * width : (index + 1) * width]) for index, size in enumerate(sizes)
    )
