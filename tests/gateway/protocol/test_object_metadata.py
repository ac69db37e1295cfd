"""Metadata of objects at the S3 door: encoded and back, damaged, from headers and to them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.checksums import Algorithm, Checksum, ChecksumType
from gateway.protocol.metadata import (
    MAGIC,
    ObjectMetadata,
    PartMetadata,
    from_request,
    mail_safe,
    response_headers,
)
from kvfs.errors import Corrupt
from kvfs.limits import MAX_USER_METADATA_BYTES
from tests.support.s3 import request
from tests.support.s3_documents import ETAG
from tests.support.s3_refusals import code_of

LATIN_1 = st.text(st.characters(max_codepoint=0xFF), max_size=20)
PAIRS = st.dictionaries(LATIN_1, LATIN_1, max_size=4)


@st.composite
def metadata(draw: st.DrawFn) -> ObjectMetadata:
    checksum = None
    if draw(st.booleans()):
        algorithm = draw(st.sampled_from(Algorithm))
        size = algorithm.digest_bytes
        type_ = draw(st.sampled_from(ChecksumType))
        checksum = Checksum(
            algorithm, draw(st.binary(min_size=size, max_size=size)), type_, draw(st.integers(0, 9))
        )
    sizes = draw(st.lists(st.sampled_from([0, 1, 5 << 20, 5 << 30]), max_size=6))
    with_digests = checksum is not None and draw(st.booleans())
    parts = tuple(
        PartMetadata(size, bytes([index]) * len(checksum.digest) if checksum and with_digests else b"")
        for index, size in enumerate(sizes)
    )
    tags = draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
    return ObjectMetadata(
        draw(LATIN_1),
        draw(PAIRS),
        draw(PAIRS),
        tags,
        draw(st.sampled_from(["", ETAG])),
        draw(LATIN_1),
        checksum,
        parts,
        draw(st.sampled_from(["", "upload"])),
    )


@settings(max_examples=300, deadline=None)
@given(metadata())
def test_metadata_comes_back(found: ObjectMetadata) -> None:
    expected = found if found.content_type else replace(found, content_type="binary/octet-stream")
    assert ObjectMetadata.decode(found.encode()) == expected


@settings(max_examples=300, deadline=None)
@given(metadata(), st.data())
def test_changed_metadata_is_refused_or_something_else(found: ObjectMetadata, data: st.DataObject) -> None:
    encoded = bytearray(found.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    if at < 4:
        assert ObjectMetadata.decode(bytes(encoded)) == ObjectMetadata()
        return
    try:
        decoded = ObjectMetadata.decode(bytes(encoded))
    except Corrupt:
        return
    assert decoded != found
    assert decoded.encode() == encoded


@given(metadata())
def test_metadata_that_ends_early_is_refused(found: ObjectMetadata) -> None:
    encoded = found.encode()
    for length in range(4, len(encoded)):
        try:
            decoded = ObjectMetadata.decode(encoded[:length])
        except Corrupt:
            continue
        assert decoded.encode() == encoded[:length]


@given(st.binary(max_size=40).filter(lambda data: not data.startswith(MAGIC)))
def test_other_doors_metadata_means_the_defaults(data: bytes) -> None:
    assert ObjectMetadata.decode(data) == ObjectMetadata()


def test_the_largest_metadata_fits_or_is_refused() -> None:
    sha = Checksum(Algorithm.SHA256, bytes(32), ChecksumType.COMPOSITE, 10_000)
    parts = tuple(PartMetadata((5 << 20) + n, bytes(32)) for n in range(10_000))
    found = ObjectMetadata(user={"a": "x" * 2000}, checksum=sha, parts=parts)
    encoded = found.encode()
    assert len(encoded) <= MAX_USER_METADATA_BYTES
    decoded = ObjectMetadata.decode(encoded)
    assert [part.size_bytes for part in decoded.parts] == [part.size_bytes for part in parts]
    assert {part.checksum for part in decoded.parts} == {b""}
    equal = ObjectMetadata(checksum=sha, parts=(PartMetadata(8 << 20, bytes(32)),) * 2000)
    assert ObjectMetadata.decode(equal.encode()) == equal
    tags = {f"{n}": "x" * 65_000 for n in range(2)}
    assert code_of(lambda: ObjectMetadata(tags=tags).encode()) == "MetadataTooLarge"


def test_headers_to_metadata_and_back() -> None:
    made = request(
        "/b/k",
        "PUT",
        headers={
            "content-type": "text/plain",
            "content-encoding": "aws-chunked, gzip,aws-chunked",
            "cache-control": "no-cache",
            "expires": "soon",
            "x-amz-meta-colour": "blue",
            "x-amz-meta-utf-8": "é".encode(),
            "x-amz-meta-latin-1": b"\xe9",
            "x-amz-meta-word": "=?UTF-8?B?w6k=?=",
            "x-amz-tagging": "a=1",
            "x-other": "x",
        },
    )
    found = from_request(made)
    assert found.headers == {"content-encoding": "gzip", "cache-control": "no-cache", "expires": "soon"}
    headers = dict(response_headers(ObjectMetadata.decode(found.encode())))
    assert headers == {
        "Content-Type": "text/plain",
        "Content-Encoding": "gzip",
        "Cache-Control": "no-cache",
        "Expires": "soon",
        "x-amz-meta-colour": "blue",
        "x-amz-meta-utf-8": "=?UTF-8?B?w6k=?=",
        "x-amz-meta-latin-1": "\xe9",
        "x-amz-meta-word": "=?UTF-8?B?w6k=?=",
        "x-amz-tagging-count": "1",
    }
    assert mail_safe("plain text") == "plain text"
    bare = from_request(request("/b/k", "PUT", headers={"content-encoding": "aws-chunked"}))
    assert bare == ObjectMetadata()
    assert bare.content_type == "binary/octet-stream"


def test_user_metadata_has_2_kib() -> None:
    def made(size: int) -> ObjectMetadata:
        return from_request(request("/b/k", "PUT", headers={"x-amz-meta-n": "x" * size}))

    assert made(2047).user == {"n": "x" * 2047}
    assert code_of(lambda: made(2048)) == "MetadataTooLarge"
    long = request("/b/k", "PUT", headers={"cache-control": "x" * 8192})
    assert code_of(lambda: from_request(long)) == "MetadataTooLarge"
