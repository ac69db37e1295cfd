"""Listings, documents and metadata of the S3 door, against a sorted list, botocore's reader and writer, and noise."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar
from xml.etree.ElementTree import fromstring

import pytest
from botocore import handlers
from botocore.model import OperationModel
from botocore.parsers import create_parser
from botocore.serialize import create_serializer
from botocore.session import get_session
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.protocol import list_pages, tags
from gateway.protocol.checksums import Algorithm, Checksum, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.list_pages import Listing, ListRequest, Page, Wanted
from gateway.protocol.metadata import (
    MAGIC,
    ObjectMetadata,
    PartMetadata,
    from_request,
    mail_safe,
    response_headers,
)
from gateway.xml import listings, requests, responses
from gateway.xml.items import ObjectItem, PartItem, UploadItem
from gateway.xml.writer import is_xml
from kvfs.errors import Corrupt
from kvfs.limits import MAX_USER_METADATA_BYTES
from tests.support.s3 import request

T = TypeVar("T")
TIME_NS = 1767323045_678_000_000
TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
KEYS = st.text(TEXT, min_size=1, max_size=20)
ETAG = "d41d8cd98f00b204e9800998ecf8427e"


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(S3Error) as caught:
        call()
    return caught.value.code


def parsed(document: requests.Document[T], body: bytes) -> T:
    """Return what a document means that is there as a whole."""
    if body:
        document.feed(body)
    return document.finish()


# --- listings against a sorted list ------------------------------------------------------------------------------
NAMES = st.text(st.sampled_from("ab/é\U0001f600"), min_size=1, max_size=6)


def entries_of(keys: list[str], prefix: str, delimiter: str) -> list[tuple[str, int | None]]:
    """Everything that a listing shows, in order."""
    found: dict[str, int | None] = {}
    for key in sorted(keys, key=str.encode):
        if key.startswith(prefix):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                found[key[: cut + len(delimiter)]] = None
            else:
                found[key] = len(key)
    return list(found.items())


class Pager:
    """A store that gives at most `most` entries at once, and checks what it is asked."""

    def __init__(self, keys: list[str], most: int) -> None:
        self.keys, self.most = keys, most

    def page(self, wanted: Wanted) -> Page[int]:
        assert wanted.limit > 0
        past = wanted.after[len(wanted.prefix) :] if wanted.after.startswith(wanted.prefix) else ""
        under = wanted.after if wanted.delimiter and past.endswith(wanted.delimiter) else None
        left = [
            key
            for key in self.keys
            if key.encode() > wanted.after.encode() and not (under is not None and key.startswith(under))
        ]
        found = entries_of(left, wanted.prefix, wanted.delimiter)
        count = min(wanted.limit, self.most)
        return Page(found[:count], len(found) > count)

    def run(self, generator: Generator[Wanted, Page[T], Listing[T]]) -> Listing[T]:
        try:
            wanted = next(generator)
            while True:
                wanted = generator.send(self.page(wanted))  # type: ignore[arg-type]
        except StopIteration as stop:
            found: Listing[T] = stop.value
            return found


def in_order(found: Listing[int]) -> list[tuple[str, int | None]]:
    both: list[tuple[str, int | None]] = [*found.keys, *((prefix, None) for prefix in found.prefixes)]
    return sorted(both, key=lambda entry: entry[0].encode())


@example(["a/", "a/a"], "a", "a/", 1, 1)
@settings(max_examples=300, deadline=None)
@given(
    st.lists(NAMES, unique=True, max_size=25),
    st.sampled_from(["", "a", "a/", "b", "é"]),
    st.sampled_from(["", "/", "b", "a/", "é"]),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_pages_are_the_sorted_list_cut_up(
    keys: list[str], prefix: str, delimiter: str, max_keys: int, most: int
) -> None:
    pager = Pager(keys, most)
    arguments = {"prefix": prefix, "delimiter": delimiter, "max-keys": str(max_keys)}
    expected = entries_of(keys, prefix, delimiter)
    v2, v1, token, marker = [], [], None, ""
    while True:
        asked = arguments | ({"continuation-token": token, "start-after": "zzz"} if token else {})
        page: Listing[int] = pager.run(list_pages.collect(list_pages.parse_v2(asked)))
        v2 += in_order(page)
        older: Listing[int] = pager.run(
            list_pages.collect(list_pages.parse_v1(arguments | {"marker": marker}))
        )
        v1 += in_order(older)
        assert in_order(older) == in_order(page)
        assert len(in_order(page)) <= max_keys
        assert page.truncated == (len(v2) < len(expected))
        if not page.truncated:
            assert page.token is None
            break
        assert page.last == in_order(page)[-1][0]
        token, marker = page.token, older.last
    assert v2 == v1 == expected


@given(st.lists(NAMES, unique=True, max_size=25), NAMES)
def test_start_after_is_exclusive(keys: list[str], after: str) -> None:
    page: Listing[int] = Pager(keys, 1000).run(
        list_pages.collect(list_pages.parse_v2({"start-after": after}))
    )
    assert [key for key, _ in page.keys] == sorted(
        (key for key in keys if key.encode() > after.encode()), key=str.encode
    )


def test_an_empty_token_is_none_and_comes_back() -> None:
    asked = list_pages.parse_v2({"continuation-token": "", "start-after": "a"})
    assert (asked.after, asked.token) == ("a", "")
    body = listings.list_objects_v2("b", asked, Listing([], [], False, ""))
    assert read("ListObjectsV2", body)["ContinuationToken"] == ""


def test_no_keys_are_wanted() -> None:
    page: Listing[int] = Pager(["a"], 1).run(list_pages.collect(list_pages.parse_v2({"max-keys": "0"})))
    assert (page.keys, page.prefixes, page.truncated, page.token) == ([], [], False, None)


@pytest.mark.parametrize(
    ("text", "found"), [("", 1000), ("0", 0), ("7", 7), ("1000", 1000), ("1001", 1000), ("2147483647", 1000)]
)
def test_max_keys_is_clamped(text: str, found: int) -> None:
    assert list_pages.parse_v1({"max-keys": text}).max_keys == found


@pytest.mark.parametrize(
    "arguments",
    [
        {"max-keys": "-1"},
        {"max-keys": "x"},
        {"max-keys": "2147483648"},
        {"max-keys": "١"},
        {"max-keys": "0" * 5000},
        {"encoding-type": "base64"},
        {"continuation-token": "AAAA"},
        {"continuation-token": "é"},
        {"continuation-token": list_pages.encode_token("abc")[:-4] + "AAAA"},
        {"prefix": "x" * 1025},
        {"start-after": "é" * 513},
    ],
    ids=str,
)
def test_listings_that_are_refused(arguments: dict[str, str]) -> None:
    assert code_of(lambda: list_pages.parse_v2(arguments)) == "InvalidArgument"


@given(KEYS)
def test_tokens_come_back_and_are_opaque(name: str) -> None:
    token = list_pages.encode_token(name)
    assert list_pages.decode_token(token) == name
    assert token.isascii()


def test_markers_of_versions_and_uploads() -> None:
    assert list_pages.parse_versions({"key-marker": "a", "version-id-marker": "null"}).after == "a"
    for arguments in ({"version-id-marker": "null"}, {"key-marker": "a", "version-id-marker": "3"}):
        assert code_of(lambda arguments=arguments: list_pages.parse_versions(arguments)) == "InvalidArgument"
    assert list_pages.parse_uploads({"max-uploads": "3", "key-marker": "k"}).max_keys == 3
    assert list_pages.parse_number({}, "part-number-marker") == 0
    assert list_pages.parse_number({"part-number-marker": "70000"}, "part-number-marker") == 70000


# --- answers, as botocore reads them -------------------------------------------------------------------------------
@lru_cache
def operation(name: str) -> OperationModel:
    return get_session().get_service_model("s3").operation_model(name)


def read(name: str, body: bytes) -> dict[str, Any]:
    """What boto3 makes of an answer."""
    answer = {"status_code": 200, "headers": {}, "body": body, "context": {}}
    found: dict[str, Any] = create_parser("rest-xml").parse(answer, operation(name).output_shape)
    return found


def list_request(**arguments: str) -> ListRequest:
    return list_pages.parse_v2({name.replace("_", "-"): value for name, value in arguments.items()})


ITEM = ObjectItem(7, ETAG, TIME_NS, "alice", Algorithm.CRC32, ChecksumType.FULL_OBJECT)


@settings(max_examples=100, deadline=None)
@given(st.lists(KEYS, unique=True, max_size=5), st.lists(KEYS, unique=True, max_size=3), KEYS, KEYS)
def test_url_encoded_listings_hold_any_key(
    keys: list[str], prefixes: list[str], prefix: str, delimiter: str
) -> None:
    asked = ListRequest(prefix, delimiter, 10, "", True, start_after=prefix, marker=prefix)
    found = Listing([(key, ITEM) for key in keys], prefixes, True, keys[-1] if keys else "x")
    v2 = read("ListObjectsV2", listings.list_objects_v2("b", asked, found))
    handlers.decode_list_object_v2(v2, context={"encoding_type_auto_set": True})
    v1 = read("ListObjects", listings.list_objects_v1("b", asked, found))
    handlers.decode_list_object(v1, context={"encoding_type_auto_set": True})
    versions = read("ListObjectVersions", listings.list_object_versions("b", asked, found))
    handlers.decode_list_object_versions(versions, context={"encoding_type_auto_set": True})
    for result, name in ((v2, "Contents"), (v1, "Contents"), (versions, "Versions")):
        assert [entry["Key"] for entry in result.get(name, [])] == keys
        assert [entry["Prefix"] for entry in result.get("CommonPrefixes", [])] == prefixes
        assert result["Delimiter"] == delimiter
    assert v2["Prefix"] == versions["Prefix"] == prefix
    if is_xml(prefix):
        assert v1["Prefix"] == prefix
    assert v2["StartAfter"] == v1["Marker"] == versions["KeyMarker"] == prefix
    assert v2["KeyCount"] == len(keys) + len(prefixes)
    assert v1["NextMarker"] == versions["NextKeyMarker"] == found.last


def test_a_listing() -> None:
    found = Listing([("a&<b>\"'", ITEM)], ["p/"], True, "p/")
    result = read("ListObjectsV2", listings.list_objects_v2("b", list_request(fetch_owner="true"), found))
    [entry] = result["Contents"]
    assert entry.pop("LastModified").isoformat() == "2026-01-02T03:04:05.678000+00:00"
    assert entry == {
        "Key": "a&<b>\"'",
        "ETag": f'"{ETAG}"',
        "Size": 7,
        "StorageClass": "STANDARD",
        "ChecksumAlgorithm": ["CRC32"],
        "ChecksumType": "FULL_OBJECT",
        "Owner": {"ID": "alice", "DisplayName": "alice"},
    }
    assert (result["KeyCount"], result["MaxKeys"], result["IsTruncated"]) == (2, 1000, True)
    assert list_pages.decode_token(result["NextContinuationToken"]) == "p/"
    assert "EncodingType" not in result
    plain = read("ListObjectsV2", listings.list_objects_v2("b", list_request(), found))
    assert "Owner" not in plain["Contents"][0]


def test_next_marker_needs_a_delimiter() -> None:
    found: Listing[ObjectItem] = Listing([("k", ITEM)], [], True, "k")
    for delimiter, expected in (("", None), ("/", "k")):
        asked = list_pages.parse_v1({"delimiter": delimiter})
        result = read("ListObjects", listings.list_objects_v1("b", asked, found))
        assert result.get("NextMarker") == expected


def test_control_characters_are_references() -> None:
    found: Listing[ObjectItem] = Listing([("a\x01\t\r\n\ufffe", ITEM)], [], False, "")
    body = listings.list_objects_v2("b", list_request(), found)
    assert b"<Key>a&#x1;&#x9;&#xd;&#xa;&#xfffe;</Key>" in body


def test_versions() -> None:
    found: Listing[ObjectItem] = Listing([("k", ITEM)], [], True, "k")
    result = read(
        "ListObjectVersions", listings.list_object_versions("b", list_pages.parse_versions({}), found)
    )
    [version] = result["Versions"]
    assert (version["VersionId"], version["IsLatest"], version["Key"]) == ("null", True, "k")
    assert (result["NextKeyMarker"], result["NextVersionIdMarker"]) == ("k", "null")
    found = Listing([], ["p/"], True, "p/")
    result = read(
        "ListObjectVersions", listings.list_object_versions("b", list_pages.parse_versions({}), found)
    )
    assert "NextVersionIdMarker" not in result


COMPOSITE = Checksum(Algorithm.SHA256, bytes(32), ChecksumType.COMPOSITE, 2)
UPLOAD = UploadItem("k&", "id", TIME_NS, "alice", Algorithm.SHA256, ChecksumType.COMPOSITE)
PARTS = [PartItem(n, 5, ETAG, TIME_NS, Checksum(Algorithm.SHA256, bytes(32))) for n in (2, 3)]


def test_multipart_documents() -> None:
    result = read("CreateMultipartUpload", responses.initiate_multipart_upload("b", "k&", "id"))
    assert (result["Bucket"], result["Key"], result["UploadId"]) == ("b", "k&", "id")
    result = read("ListParts", listings.list_parts("b", UPLOAD, PARTS, marker=1, max_parts=2, truncated=True))
    assert [part["PartNumber"] for part in result["Parts"]] == [2, 3]
    assert result["Parts"][0]["ChecksumSHA256"] == PARTS[0].checksum.text  # type: ignore[union-attr]
    assert (result["PartNumberMarker"], result["NextPartNumberMarker"], result["MaxParts"]) == (1, 3, 2)
    assert (result["IsTruncated"], result["ChecksumType"], result["Key"]) == (True, "COMPOSITE", "k&")
    result = read(
        "ListMultipartUploads",
        listings.list_multipart_uploads(
            "b",
            list_pages.parse_uploads({"delimiter": "/"}),
            [UPLOAD],
            ["a/"],
            upload_id_marker="",
            truncated=True,
        ),
    )
    assert [upload["UploadId"] for upload in result["Uploads"]] == ["id"]
    assert (result["NextKeyMarker"], result["NextUploadIdMarker"]) == ("k&", "id")
    assert result["CommonPrefixes"] == [{"Prefix": "a/"}]
    result = read(
        "CompleteMultipartUpload",
        responses.complete_multipart_upload("http://h/b/k", "b", "k", f"{ETAG}-2", COMPOSITE),
    )
    assert (result["ETag"], result["Location"]) == (f'"{ETAG}-2"', "http://h/b/k")
    assert (result["ChecksumSHA256"], result["ChecksumType"]) == (COMPOSITE.text, "COMPOSITE")


def test_other_documents() -> None:
    result = read(
        "ListBuckets", listings.list_buckets([("b", TIME_NS)], "alice", region="eu", prefix="b", token="t")
    )
    assert [(bucket["Name"], bucket["BucketRegion"]) for bucket in result["Buckets"]] == [("b", "eu")]
    assert (result["Owner"]["ID"], result["ContinuationToken"]) == ("alice", "t")
    for name, of_part in (("CopyObject", False), ("UploadPartCopy", True)):
        checksum = Checksum(Algorithm.CRC32, bytes(4))
        copied = read(name, responses.copy_result(ETAG, TIME_NS, checksum, of_part=of_part))
        [result] = [value for key, value in copied.items() if key.startswith("Copy")]
        assert (result["ETag"], result["ChecksumCRC32"]) == (f'"{ETAG}"', "AAAAAA==")
    result = read(
        "DeleteObjects",
        responses.delete_result([("a", None), ("b", "null")], [("c", None, S3Error("AccessDenied"))]),
    )
    assert result["Deleted"] == [{"Key": "a"}, {"Key": "b", "VersionId": "null"}]
    assert result["Errors"][0]["Code"] == "AccessDenied"
    result = read("GetObjectTagging", responses.tagging({"k<": "v&"}))
    assert result["TagSet"] == [{"Key": "k<", "Value": "v&"}]
    assert fromstring(responses.location_constraint("eu-1")).text == "eu-1"
    assert not fromstring(responses.location_constraint("us-east-1")).text
    assert responses.match_result(3) == b'{"hits": 3}'


def test_object_attributes() -> None:
    names = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]
    body = responses.object_attributes(
        names, etag=f"{ETAG}-2", size_bytes=10, checksum=COMPOSITE, parts=PARTS, total_parts=3, truncated=True
    )
    result = read("GetObjectAttributes", body)
    assert (result["ETag"], result["ObjectSize"], result["StorageClass"]) == (f"{ETAG}-2", 10, "STANDARD")
    assert result["Checksum"] == {"ChecksumSHA256": COMPOSITE.text[:-2], "ChecksumType": "COMPOSITE"}
    assert result["ObjectParts"]["TotalPartsCount"] == 3
    assert [part["PartNumber"] for part in result["ObjectParts"]["Parts"]] == [2, 3]
    whole = Checksum(Algorithm.CRC64NVME, bytes(8))
    body = responses.object_attributes(
        names, etag=f"{ETAG}-2", size_bytes=10, checksum=whole, parts=PARTS, total_parts=3
    )
    result = read("GetObjectAttributes", body)
    assert result["Checksum"] == {"ChecksumCRC64NVME": whole.text, "ChecksumType": "FULL_OBJECT"}
    assert result["ObjectParts"] == {"TotalPartsCount": 3}
    body = responses.object_attributes(
        ["ObjectSize"], etag=ETAG, size_bytes=10, checksum=None, parts=[], total_parts=0
    )
    assert "ETag" not in read("GetObjectAttributes", body)


def test_errors() -> None:
    error = S3Error("NoSuchKey", "no <such> key\x00", detail={"Key": "a&b"})
    answer = {
        "status_code": 404,
        "headers": {},
        "body": responses.error(error, "/b/a&b", "id"),
        "context": {},
    }
    answer["body"] = answer["body"].replace(b"&#x0;", b"")  # type: ignore[attr-defined]
    found = create_parser("rest-xml").parse(answer, operation("GetObject").output_shape)
    assert found["Error"]["Code"] == "NoSuchKey"
    assert found["Error"]["Message"] == "no <such> key"
    assert (found["Error"]["Key"], found["Error"]["Resource"]) == ("a&b", "/b/a&b")


# --- requests, as botocore writes them -----------------------------------------------------------------------------
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


# --- metadata ------------------------------------------------------------------------------------------------------
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
