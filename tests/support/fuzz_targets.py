"""What a fuzzer feeds with bytes of the S3 endpoint's clients, before anybody has been recognised.

Responsibility: targets, each a function of bytes that ends well or raises something else than a refusal, and seeds from
which a fuzzer finds its way. Invariants: a target depends on nothing but its bytes. Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pydantic import SecretStr

from gateway.auth import sigv4
from gateway.auth.credentials import Credentials
from gateway.auth.sigv4 import PayloadMode, Verified
from gateway.call.aws_chunked import ChunkedDecoder, encoded_bytes_limit
from gateway.protocol import checksums, conditions, metadata, ranges, tags
from gateway.protocol.addressing import resolve
from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request
from gateway.protocol.routing import copy_source, route
from gateway.xml import requests
from kvfs import limits
from kvfs.config.credentials import Credential
from kvfs.http.head import BadHead, parse_head
from kvfs.http.transfer_chunks import BadChunk, ChunkedReader

_CREDENTIAL = Credential(access_key="AKIDEXAMPLE", secret_key=SecretStr("wJalrXUtnFEMI/K7MDENG"))
_NOW_S: Final = 1_767_323_045.0
_MOST_CUT = 512
"""Longer input is not cut into single bytes: a fuzzer's runs are to stay short."""


@dataclass(frozen=True, slots=True)
class Target:
    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


# --- heads -------------------------------------------------------------------------------------------------
def head(data: bytes) -> None:
    """A request's head: refused, or read in one way, whatever an operation asks of it afterwards."""
    try:
        found = parse_head(data)
    except BadHead:
        return
    names = [name for name, _ in found.headers]
    framing = names.count(b"content-length") + names.count(b"transfer-encoding")
    assert framing <= 1, "two framings of one body"
    assert names.count(b"host") <= 1, "two hosts"
    assert not (found.chunked and found.content_length), "two lengths"
    assert all(0x20 < byte < 0x7F for byte in found.target), found.target
    assert all(not set(value) & set(b"\r\n\0") for _, value in found.headers), "a line in a value"
    path, _, query = found.target.partition(b"?")
    host = next((value for name, value in found.headers if name == b"host"), b"")
    request = Request(found.method, path, query, found.headers, host.decode("latin-1"))
    for ask in _ASKED:
        with suppress(S3Error):
            ask(request)


def _route(request: Request) -> None:
    for domains, default in (((), None), (("s3.test",), "bucket")):
        address = resolve(request, domains, default)
        assert address.key is None or len(address.key.encode()) <= limits.MAX_KEY_BYTES
        route(request, address)


def _range(request: Request) -> None:
    for size_bytes in (0, 1, 1000):
        span = ranges.parse(request.header(b"range"), size_bytes)
        assert span is None or 0 <= span.start < span.end <= size_bytes


_ASKED: Final[Sequence[Callable[[Request], object]]] = (
    _route,
    _range,
    copy_source,
    checksums.wanted,
    conditions.from_headers,
    metadata.from_request,
    lambda request: sigv4.verify(request, Credentials((_CREDENTIAL,)), _NOW_S, "us-east-1"),
)


# --- bodies ------------------------------------------------------------------------------------------------
def chunked(data: bytes) -> None:
    """HTTP's chunks: the same payload, or a refusal, however the bytes are cut."""
    whole = _unframed([data])
    if len(data) <= _MOST_CUT:
        assert _unframed([data[at : at + 1] for at in range(len(data))]) == whole
    assert whole is None or len(whole[0]) <= len(data)


def _unframed(pieces: Sequence[bytes]) -> tuple[bytes, bool] | None:
    """(payload, whether it is complete), None where it is refused."""
    reader, kept, payload = ChunkedReader(), b"", b""
    try:
        for piece in pieces:
            kept += piece
            while kept and not reader.done:
                step = reader.step(memoryview(kept), 1 << 16)
                payload += kept[step.consumed - step.payload : step.consumed]
                kept = kept[step.consumed :]
                if not step.consumed:
                    break
            assert len(kept) <= limits.MAX_TRAILER_BYTES + len(piece) or reader.done
    except BadChunk:
        return None
    return payload, reader.done


def aws_chunked(data: bytes) -> None:
    """S3's chunks in HTTP's: the first two bytes say how many bytes are expected, and in which mode."""
    if len(data) < 2:
        return
    modes = [mode for mode in PayloadMode if mode.is_streaming]
    mode, expected, body = modes[data[0] % len(modes)], data[1] * 64, data[2:]
    whole = _decoded(mode, expected, [body])
    if len(body) <= _MOST_CUT:
        assert _decoded(mode, expected, [body[at : at + 1] for at in range(len(body))]) == whole
    if whole is not None:
        assert len(whole[0]) == expected
        assert len(body) <= encoded_bytes_limit(expected)


def _decoded(
    mode: PayloadMode, expected: int, pieces: Sequence[bytes]
) -> tuple[bytes, dict[str, str]] | None:
    names = frozenset({"x-amz-checksum-crc32"}) if mode.has_trailer else frozenset[str]()
    verified = Verified(_CREDENTIAL, mode, None, "0" * 64, b"k" * 32, "20260102T030405Z", "scope", False)
    decoder, payload = ChunkedDecoder(verified, expected, names), b""
    try:
        for piece in pieces:
            memory = bytearray(piece)
            payload += memory[: decoder.compact(memoryview(memory))]
            assert len(payload) <= expected, "more payload than was expected"
        return payload, decoder.finish()
    except S3Error:
        return None


def document(data: bytes) -> None:
    """XML and JSON that operations take: the same meaning, or a refusal, however the bytes are cut."""
    for make in (
        requests.complete_multipart_upload,
        requests.delete,
        requests.tagging,
        requests.bucket_tagging,
        requests.create_bucket_configuration,
        requests.match,
    ):
        whole = _meaning(make(), [data])
        if len(data) <= _MOST_CUT:
            assert _meaning(make(), [data[at : at + 1] for at in range(len(data))]) == whole
    with suppress(S3Error):
        tags.parse_header(data.decode("latin-1"))


def _meaning(document: requests.Document[object], pieces: Sequence[bytes]) -> tuple[object] | None:
    try:
        for piece in pieces:
            if piece:
                document.feed(piece)
        return (document.finish(),)
    except S3Error:
        return None


_SIGNED = (
    b"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20260102/us-east-1/s3/aws4_request, "
    b"SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature=" + b"0" * 64
)
TARGETS: Final = {
    "head": Target(
        head,
        (
            b"GET /b/k?partNumber=1&versionId=null HTTP/1.1\r\nHost: b.s3.test:80\r\nRange: bytes=0-9\r\n"
            b'If-Match: "x"\r\nIf-Modified-Since: Fri, 02 Jan 2026 03:04:05 GMT\r\n\r\n',
            b"PUT /b/%6b HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\nAuthorization: "
            + _SIGNED
            + b"\r\nx-amz-content-sha256: UNSIGNED-PAYLOAD\r\nx-amz-date: 20260102T030405Z\r\n\r\n",
            b"PUT /b/k?uploadId=0&partNumber=2 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"
            b"x-amz-copy-source: /b/k%20k?versionId=null\r\nx-amz-meta-a: =?UTF-8?B?w6Q=?=\r\n"
            b"x-amz-checksum-crc32: AAAAAA==\r\nx-amz-tagging: a=b&c=d\r\n"
            b"Content-MD5: 1B2M2Y8AsgTpgAmY7PhCfg==\r\n\r\n",
            b"POST /b?delete HTTP/1.1\r\nHost: h\r\nHost: i\r\nContent-Length: 3\r\nContent-Length: 3\r\n"
            b"Transfer-Encoding: chunked\r\n folded\r\n\r\n",
            b"GET /?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIDEXAMPLE%2F20260102%2Fus-east-1%2Fs3"
            b"%2Faws4_request&X-Amz-Date=20260102T030405Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host"
            b"&X-Amz-Signature=00 HTTP/1.1\r\nHost: h\r\n\r\n",
        ),
    ),
    "chunked": Target(
        chunked, (b"5\r\nhello\r\n0\r\n\r\n", b"a;x=y\r\n0123456789\r\n1\r\nx\r\n0\r\nTrailer: v\r\n\r\n")
    ),
    "aws_chunked": Target(
        aws_chunked,
        (
            b"\x02\x01" + b"40\r\n" + b"x" * 64 + b"\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n",
            b"\x00\x01" + b"40;chunk-signature=" + b"0" * 64 + b"\r\n" + b"x" * 64 + b"\r\n0\r\n\r\n",
            b"\x02\x00" + b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n",
        ),
    ),
    "document": Target(
        document,
        (
            b'<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>"x"</ETag>'
            b"<ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part></CompleteMultipartUpload>",
            b"<Delete><Object><Key>k</Key></Object><Quiet>true</Quiet></Delete>",
            b"<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>",
            b"<CreateBucketConfiguration><LocationConstraint>EU</LocationConstraint></CreateBucketConfiguration>",
            b'{"hashes": ["00112233445566778899aabbccddeeff"]}',
            b"a=b&c=d",
        ),
    ),
}
