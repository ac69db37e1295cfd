"""Documents that the S3 door answers, as botocore reads them."""

from __future__ import annotations

from xml.etree.ElementTree import fromstring

from botocore import handlers
from botocore.parsers import create_parser
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol import list_pages
from gateway.protocol.checksums import Algorithm, Checksum, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.list_pages import Listing, ListRequest
from gateway.xml import listings, responses
from gateway.xml.items import ObjectItem, PartItem, UploadItem
from gateway.xml.writer import is_xml
from tests.support.s3_documents import ETAG, KEYS, operation, read

TIME_NS = 1767323045_678_000_000


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
