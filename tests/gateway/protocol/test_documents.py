"""Documents that the S3 door is sent, as botocore writes them, and noise: read or refused."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from botocore.serialize import create_serializer
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol import tags
from gateway.protocol.checksums import Algorithm
from gateway.protocol.errors import S3Error
from gateway.xml import requests, responses
from tests.support.s3_documents import ETAG, operation
from tests.support.s3_refusals import code_of

T = TypeVar("T")


def parsed(document: requests.Document[T], body: bytes) -> T:
    """Return what a document means that is there as a whole."""
    if body:
        document.feed(body)
    return document.finish()


def written(name: str, **parameters: Any) -> bytes:
    made = create_serializer("rest-xml", include_validation=False).serialize_to_request(
        {"Bucket": "b", **parameters}, operation(name)
    )
    body: bytes = made["body"]
    return body


XML_TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), min_size=1, max_size=20
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10_000), unique=True, min_size=1, max_size=20), XML_TEXT)
def test_complete_multipart_upload(numbers: list[int], etag: str) -> None:
    parts = [
        {"PartNumber": number, "ETag": f'"{ETAG}"', "ChecksumCRC32C": "AAAAAA=="}
        for number in sorted(numbers)
    ]
    body = written("CompleteMultipartUpload", Key="k", UploadId="u", MultipartUpload={"Parts": parts})
    found = parsed(requests.complete_multipart_upload(), body)
    assert [part.number for part in found] == sorted(numbers)
    assert {part.etag for part in found} == {ETAG}
    assert found[0].checksums == {Algorithm.CRC32C: bytes(4)}
    if any(after < before for before, after in pairwise(numbers)):
        shuffled = [{"PartNumber": number, "ETag": ETAG} for number in numbers]
        body = written("CompleteMultipartUpload", Key="k", UploadId="u", MultipartUpload={"Parts": shuffled})
        assert code_of(lambda: parsed(requests.complete_multipart_upload(), body)) == "InvalidPartOrder"


@settings(max_examples=100, deadline=None)
@given(st.lists(XML_TEXT, min_size=1, max_size=20), st.booleans())
def test_delete(keys: list[str], quiet: bool) -> None:
    objects = [{"Key": key, "VersionId": "null"} for key in keys]
    found = parsed(requests.delete(), written("DeleteObjects", Delete={"Objects": objects, "Quiet": quiet}))
    assert [each.key for each in found.objects] == keys
    assert {each.version_id for each in found.objects} == {"null"}
    assert found.quiet == quiet


TAG_TEXT = st.text(st.sampled_from("aZ9é +-=._:/@"), max_size=20)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(TAG_TEXT.filter(bool), TAG_TEXT, max_size=10))
def test_tagging(tags: dict[str, str]) -> None:
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    assert parsed(requests.tagging(), written("PutObjectTagging", Key="k", Tagging={"TagSet": pairs})) == tags
    assert parsed(requests.tagging(), responses.tagging(tags)) == tags


def test_create_bucket_configuration() -> None:
    body = written("CreateBucket", CreateBucketConfiguration={"LocationConstraint": "eu-1"})
    assert parsed(requests.create_bucket_configuration(), body) == "eu-1"
    assert parsed(requests.create_bucket_configuration(), b"") is None
    body = written("CreateBucket", CreateBucketConfiguration={"Location": {"Name": "x"}})
    assert code_of(lambda: parsed(requests.create_bucket_configuration(), body)) == "NotImplemented"


def part(number: object = 1, etag: str = "e", more: str = "") -> str:
    return f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>{more}</Part>"


def complete(inner: str) -> bytes:
    return f"<CompleteMultipartUpload>{inner}</CompleteMultipartUpload>".encode()


BOMB = b'<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><Delete><Object><Key>&b;</Key></Object></Delete>'
EXTERNAL = (
    b'<!DOCTYPE d [<!ENTITY a SYSTEM "file:///etc/passwd">]><Delete><Object><Key>&a;</Key></Object></Delete>'
)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (complete(""), "MalformedXML"),
        (complete(part(0)), "InvalidArgument"),
        (complete(part(-4)), "InvalidArgument"),
        (complete(part(10_001)), "InvalidArgument"),
        (complete(part("9" * 5000)), "InvalidArgument"),
        (complete(part("x")), "MalformedXML"),
        (complete(part(1) + part(1)), "InvalidPartOrder"),
        (complete(part(1, more="<ETag>f</ETag>")), "MalformedXML"),
        (complete("<Part><PartNumber>1</PartNumber></Part>"), "MalformedXML"),
        (complete(part(1, more="<ChecksumCRC32>x</ChecksumCRC32>")), "InvalidArgument"),
        (complete(part(1, more="<ChecksumMD5>x</ChecksumMD5>")), "NotImplemented"),
        (b"<Complete>" + part().encode() + b"</Complete>", "MalformedXML"),
        (b"", "MalformedXML"),
        (b"\xff\xfe", "MalformedXML"),
        (b'<?xml version="1.0" encoding="klingon"?><a/>', "MalformedXML"),
        (complete(part())[:-1], "MalformedXML"),
        (complete(part()) + b"<x/>", "MalformedXML"),
    ],
)
def test_completes_that_are_refused(body: bytes, code: str) -> None:
    assert code_of(lambda: parsed(requests.complete_multipart_upload(), body)) == code


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (BOMB, "MalformedXML"),
        (EXTERNAL, "MalformedXML"),
        (b"<!DOCTYPE Delete><Delete><Object><Key>k</Key></Object></Delete>", "MalformedXML"),
        (b"<Delete/>", "MalformedXML"),
        (b"<Delete><Object><Key/></Object></Delete>", "MalformedXML"),
        (b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1001 + b"</Delete>", "MalformedXML"),
        (b"<Delete><Quiet>maybe</Quiet><Object><Key>k</Key></Object></Delete>", "MalformedXML"),
        (b"<Delete><Object><Key>&#1;</Key></Object></Delete>", "MalformedXML"),
        (b"<a>" * 100_000, "MalformedXML"),
        (b"<Delete><Object><Key>" + b"k" * 9_000 + b"</Key></Object></Delete>", "MalformedXML"),
        (b"<Delete>" + b"<x/>" * 20_000 + b"</Delete>", "MalformedXML"),
        (b"<Delete><!--" + b"x" * 100_000 + b"--></Delete>", "MalformedXML"),
        (b"<Delete " + b" ".join(b"a%d=''" % n for n in range(20_000)) + b"/>", "MalformedXML"),
        (b"<a>" * 100_000 + b"</a>" * 100_000, "MalformedXML"),
        (b"<Delete>" + b" " * (4 << 20) + b"</Delete>", "MaxMessageLengthExceeded"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_deletes_that_are_refused(body: bytes, code: str) -> None:
    assert code_of(lambda: parsed(requests.delete(), body)) == code


def tags_of(*pairs: tuple[str, str]) -> bytes:
    rows = "".join(f"<Tag><Key>{key}</Key><Value>{value}</Value></Tag>" for key, value in pairs)
    return f"<Tagging><TagSet>{rows}</TagSet></Tagging>".encode()


def test_documents_leave_nothing_to_the_collector() -> None:
    """Whether they are right or not: a server's collector comes by seldom."""
    right = f"<Delete>{'<Object><Key>k</Key></Object>' * 1000}</Delete>".encode()
    while gc.collect():  # also what the finalizers of others' garbage leave
        pass
    gc.disable()
    try:
        for body in (right, right[:-1], BOMB, b"<Delete>" + b"<a>" * 9, b"<Delete><Object/></Delete>"):
            with contextlib.suppress(S3Error):
                parsed(requests.delete(), body)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_largest_documents_are_taken() -> None:
    """Feed the longest that S3 allows: 1,000 keys of 1,024 bytes that all have to be escaped, and 10,000 parts."""
    keys = "".join(f"<Object><Key>{'&lt;' * 1024}</Key></Object>" for _ in range(1000))
    assert len(parsed(requests.delete(), f"<Delete>{keys}</Delete>".encode()).objects) == 1000
    checksum = "<ChecksumSHA256>47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=</ChecksumSHA256>"
    parts = "".join(part(n, f"&quot;{ETAG}&quot;", checksum) for n in range(1, 10_001))
    assert len(parsed(requests.complete_multipart_upload(), complete(parts))) == 10_000


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (tags_of(*((f"k{n}", "v") for n in range(11))), "BadRequest"),
        (tags_of(("k", "v"), ("k", "w")), "InvalidTag"),
        (tags_of(("", "v")), "InvalidTag"),
        (tags_of(("k" * 129, "v")), "InvalidTag"),
        (tags_of(("k", "v" * 257)), "InvalidTag"),
        (tags_of(("aws:k", "v")), "InvalidTag"),
        (tags_of(("k!", "v")), "InvalidTag"),
        (tags_of(("k", "v*")), "InvalidTag"),
        (b"<Tagging/>", "MalformedXML"),
        (b"<Tagging><TagSet><Tag><Key>k</Key></Tag></TagSet></Tagging>", "MalformedXML"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_tags_that_are_refused(body: bytes, code: str) -> None:
    assert code_of(lambda: parsed(requests.tagging(), body)) == code


def test_tags_in_a_header() -> None:
    assert tags.parse_header("a=1&b=&c=x%20y+z") == {"a": "1", "b": "", "c": "x y z"}
    assert tags.parse_header("") == {}
    assert tags.parse_header("b=1&a") == {"b": "1", "a": ""}
    assert tags.parse_header("&a&&") == {"a": ""}
    for text in ("a=1&a=2", "=", "=1", "a%", "a=%4", "a=%zz"):
        assert code_of(lambda text=text: tags.parse_header(text)) == "InvalidArgument"
    assert code_of(lambda: tags.parse_header("a(=1")) == "InvalidTag"
    assert code_of(lambda: tags.parse_header("a=%ff")) == "InvalidArgument"
    assert code_of(lambda: tags.parse_header("&".join(f"k{n}=" for n in range(11)))) == "BadRequest"


def test_match() -> None:
    assert parsed(requests.match(), b'{"hashes": ["' + b"0f" * 16 + b'"]}') == [b"\x0f" * 16]
    assert parsed(requests.match(), b'{"hashes": []}') == []
    for body in (
        b"",
        b"[]",
        b'{"hashes": 3}',
        b'{"hashes": ["0F"]}',
        b'{"hashes": [3]}',
        b'{"hashes": "ab"}',
    ):
        assert code_of(lambda body=body: parsed(requests.match(), body)) == "InvalidRequest"
    assert code_of(lambda: parsed(requests.match(), b"[" * 100_000)) == "InvalidRequest"


READERS: st.SearchStrategy[Callable[[], requests.Document[object]]] = st.sampled_from(
    [
        requests.complete_multipart_upload,
        requests.delete,
        requests.tagging,
        requests.bucket_tagging,
        requests.create_bucket_configuration,
        requests.match,
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    READERS,
    st.one_of(
        st.binary(max_size=60),
        st.lists(
            st.sampled_from(["<Delete>", "</Delete>", "<Object>", "</Object>", "<Key>", "</Key>", "k", "&amp;", "&x;",
                             "<!--", "-->", "<![CDATA[", "]]>", "<?x?>", "<Quiet/>"]), max_size=12,
        ).map(lambda parts: "".join(parts).encode()),
    ),
)  # fmt: skip
def test_any_document_is_read_or_refused(
    reader: Callable[[], requests.Document[object]], body: bytes
) -> None:
    try:
        parsed(reader(), body)
    except S3Error as error:
        refused = error
    else:
        return
    assert 400 <= refused.status < 500 or refused.code == "NotImplemented"
