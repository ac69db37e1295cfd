"""What S3's other clients and test suites lean on: owners, conditions of writes, checksums of uploads, configurations
that nobody set, and headers that are wrong. Against a live endpoint, through boto3 or a plain socket."""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from awscrt import checksums as crt
from botocore.exceptions import ClientError

from gateway.operations import bucket_configurations
from gateway.protocol.routing import BUCKET_CONFIGURATIONS
from tests.support.gateway import OTHER_ACCESS, OTHER_SECRET, READER_ACCESS, READER_SECRET, Gateway, gateway
from tests.support.raw_s3 import UNSIGNED, raw_client, signed_head

MIB = 1 << 20
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""botocore leaves sockets to the garbage collector."""


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway() as found:
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    return door.client()


@pytest.fixture(scope="module")
def other(door: Gateway) -> Any:
    return door.client(OTHER_ACCESS, OTHER_SECRET)


@pytest.fixture
def bucket(s3: Any, request: pytest.FixtureRequest) -> str:
    name = "c-" + hashlib.md5(request.node.name.encode()).hexdigest()[:20]
    s3.create_bucket(Bucket=name)
    return name


def outcome(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """(status, code); the code of a success is empty."""
    try:
        response = call(**arguments)
    except ClientError as error:
        response = error.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response.get("Error", {}).get("Code", "")


DENIED, FAILED = (403, "AccessDenied"), (412, "PreconditionFailed")
MISSING = (404, "NoSuchKey")


# --- owners --------------------------------------------------------------------------------------------------
def test_another_owners_bucket_is_closed(s3: Any, other: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"mine")
    theirs = f"{bucket}-theirs"
    other.create_bucket(Bucket=theirs)
    for call in (other.list_objects_v2, other.get_bucket_location, other.get_bucket_acl, other.delete_bucket):
        assert outcome(call, Bucket=bucket) == DENIED
    assert outcome(other.head_bucket, Bucket=bucket)[0] == 403
    for call in (other.get_object, other.delete_object, other.create_multipart_upload, other.put_object):
        assert outcome(call, Bucket=bucket, Key="k") == DENIED
    copy = {"Bucket": theirs, "Key": "copy", "CopySource": f"{bucket}/k"}
    assert outcome(other.copy_object, **copy) == DENIED
    assert outcome(other.create_bucket, Bucket=bucket) == (409, "BucketAlreadyExists")
    shown = {owner: {each["Name"] for each in owner.list_buckets()["Buckets"]} for owner in (s3, other)}
    assert bucket in shown[s3] - shown[other]
    assert theirs in shown[other] - shown[s3]
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"mine"


def test_a_bucket_made_again_belongs_to_who_made_it(s3: Any, other: Any, bucket: str) -> None:
    assert outcome(other.head_bucket, Bucket=bucket)[0] == 403
    s3.delete_bucket(Bucket=bucket)
    assert outcome(other.head_bucket, Bucket=bucket)[0] == 404
    other.create_bucket(Bucket=bucket)
    assert outcome(s3.list_objects_v2, Bucket=bucket) == DENIED
    assert outcome(other.list_objects_v2, Bucket=bucket) == (200, "")


def test_a_bucket_of_another_door_is_nobodys(door: Gateway, s3: Any, other: Any) -> None:
    (door.service.mount / "from-the-mount").mkdir()
    for client in (s3, other):
        assert outcome(client.put_object, Bucket="from-the-mount", Key="k", Body=b"x") == (200, "")
        expected = {"Bucket": "from-the-mount", "ExpectedBucketOwner": "main"}
        assert outcome(client.list_objects_v2, **expected) == DENIED
    acl = s3.get_bucket_acl(Bucket="from-the-mount")
    assert (acl["Owner"]["ID"], acl["Grants"]) == ("", [])


def test_rights_that_name_buckets_reach_other_owners(door: Gateway, s3: Any) -> None:
    reader = door.client(READER_ACCESS, READER_SECRET)
    s3.create_bucket(Bucket="readable-conformance")
    s3.put_object(Bucket="readable-conformance", Key="k", Body=b"x")
    assert outcome(reader.get_object, Bucket="readable-conformance", Key="k") == (200, "")
    assert outcome(reader.put_object, Bucket="readable-conformance", Key="k") == DENIED


def test_the_expected_owner_is_checked(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    for owner, found in (("main", (200, "")), ("other", DENIED), ("", DENIED)):
        expect = {"Bucket": bucket, "ExpectedBucketOwner": owner}
        assert outcome(s3.list_objects_v2, **expect) == found
        assert outcome(s3.get_object, Key="k", **expect) == found
        assert outcome(s3.put_object, Key="new", Body=b"x", **expect) == found
        copy = {"Bucket": bucket, "Key": "copy", "CopySource": f"{bucket}/k"}
        assert outcome(s3.copy_object, ExpectedSourceBucketOwner=owner, **copy) == found
    missing = {"Bucket": f"{bucket}-missing", "ExpectedBucketOwner": "other"}
    assert outcome(s3.list_objects_v2, **missing) == (404, "NoSuchBucket")


def test_buckets_are_listed_page_by_page(door: Gateway, other: Any) -> None:
    names = [f"paged-{letter}" for letter in "cab"]
    for name in names:
        other.create_bucket(Bucket=name)
    first = other.list_buckets(Prefix="paged-", MaxBuckets=2)
    rest = other.list_buckets(Prefix="paged-", MaxBuckets=2, ContinuationToken=first["ContinuationToken"])
    pages = [[each["Name"] for each in page["Buckets"]] for page in (first, rest)]
    assert pages == [["paged-a", "paged-b"], ["paged-c"]]
    assert "ContinuationToken" not in rest
    assert {each["BucketRegion"] for each in first["Buckets"]} == {"us-east-1"}
    whole = other.list_buckets(Prefix="paged-", MaxBuckets=3, BucketRegion="us-east-1")
    assert len(whole["Buckets"]) == 3
    assert "ContinuationToken" not in whole
    refused = (400, "InvalidArgument")
    assert outcome(other.list_buckets, BucketRegion="eu-west-3") == refused
    assert outcome(other.list_buckets, ContinuationToken="x") == refused
    with raw_client(door) as raw:
        for most in ("0", "10001", "-1", "x"):
            assert raw.ask("GET", f"/?max-buckets={most}").code == "InvalidArgument"


@pytest.mark.parametrize(
    "name", ["xn--a-b", "sthree-a", "amzn-s3-demo-a", "a-s3alias", "ab--ol-s3", "ab.mrap"]
)
def test_names_that_s3_keeps_for_itself(s3: Any, name: str) -> None:
    assert outcome(s3.create_bucket, Bucket=name) == (400, "InvalidBucketName")


# --- configurations ------------------------------------------------------------------------------------------
def test_a_bucket_never_had_a_configuration(door: Gateway, s3: Any, bucket: str) -> None:
    with raw_client(door) as raw:
        for name, code in bucket_configurations.MISSING.items():
            answer = raw.ask("GET", f"/{bucket}?{name}")
            assert (answer.status, answer.code) == (404, code)
        for name in BUCKET_CONFIGURATIONS:
            assert raw.ask("GET", f"/{bucket}-missing?{name}").code == "NoSuchBucket"
            assert raw.ask("PUT", f"/{bucket}?{name}", body=b"<x/>").status == 501
    assert "Status" not in s3.get_bucket_versioning(Bucket=bucket)
    assert "LoggingEnabled" not in s3.get_bucket_logging(Bucket=bucket)
    assert "Status" not in s3.get_bucket_accelerate_configuration(Bucket=bucket)
    assert s3.get_bucket_request_payment(Bucket=bucket)["Payer"] == "BucketOwner"
    assert "TopicConfigurations" not in s3.get_bucket_notification_configuration(Bucket=bucket)
    [rule] = s3.get_bucket_ownership_controls(Bucket=bucket)["OwnershipControls"]["Rules"]
    assert rule == {"ObjectOwnership": "BucketOwnerEnforced"}


def test_buckets_have_tags(s3: Any, bucket: str) -> None:
    none = (404, "NoSuchTagSet")
    assert outcome(s3.get_bucket_tagging, Bucket=bucket) == none
    tags = [{"Key": f"k{number:02}", "Value": "v\u00e9 " * 80} for number in range(50)]
    s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": tags})
    assert s3.get_bucket_tagging(Bucket=bucket)["TagSet"] == tags
    for wrong in ([*tags, {"Key": "k", "Value": ""}], [{"Key": "aws:k", "Value": ""}]):
        assert outcome(s3.put_bucket_tagging, Bucket=bucket, Tagging={"TagSet": wrong})[0] == 400
    assert s3.get_bucket_tagging(Bucket=bucket)["TagSet"] == tags
    s3.delete_bucket(Bucket=bucket)
    assert outcome(s3.get_bucket_tagging, Bucket=bucket) == (404, "NoSuchBucket")
    s3.create_bucket(Bucket=bucket)
    assert outcome(s3.get_bucket_tagging, Bucket=bucket) == none
    s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": tags[:1]})
    s3.delete_bucket_tagging(Bucket=bucket)
    assert outcome(s3.get_bucket_tagging, Bucket=bucket) == none
    s3.delete_bucket_tagging(Bucket=bucket)


def test_tags_go_with_a_bucket_that_another_door_removes(door: Gateway, s3: Any, bucket: str) -> None:
    s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": [{"Key": "k", "Value": "v"}]})
    with door.service.client() as client:
        client.remove_bucket(bucket)
        client.create_bucket(bucket)
    assert outcome(s3.get_bucket_tagging, Bucket=bucket) == (404, "NoSuchTagSet")


def test_what_browsers_send_unsigned(door: Gateway, bucket: str) -> None:
    with raw_client(door) as raw:
        raw.send(
            f"POST /{bucket} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            "Content-Length: 3\r\n\r\nabc".encode()
        )
        assert raw.response().code == "NotImplemented"
        raw.send(f"POST /{bucket} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc".encode())
        assert raw.response().code == "AccessDenied"


def test_an_escape_that_is_none_names_no_object(door: Gateway, s3: Any, bucket: str) -> None:
    with raw_client(door) as raw:
        for target in (f"/{bucket}/a%zz", f"/{bucket}/a%2", f"/{bucket}/%"):
            for method in ("PUT", "GET", "DELETE"):
                assert raw.ask(method, target).code == "InvalidURI"
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


def test_a_thousand_keys_with_an_outcome_each(door: Gateway, s3: Any, bucket: str) -> None:
    """Delete keys that are there, that are not, twice, on conditions that hold and not, markers and long keys."""
    long = [f"{number:04}" + "\u20ac" * 340 for number in range(100)]
    there = [f"k{number}" for number in range(300)] + ["dir/"]
    for key in (*long, *there):
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    kept: list[dict[str, Any]] = [{"Key": f"k{number}", "ETag": '"other"'} for number in range(10)]
    right: list[dict[str, Any]] = [{"Key": f"k{number}", "Size": 1} for number in range(10, 20)]
    plain = [{"Key": key} for key in (*long, *there[20:], *there[20:40], *(f"no{n}" for n in range(400)))]
    wrong = [{"Key": "x" * 1025}, {"Key": "k0", "VersionId": "1"}]
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": [*kept, *right, *plain, *wrong]})
    assert [each["Key"] for each in answer["Deleted"]] == [each["Key"] for each in (*right, *plain)]
    codes = [(each["Key"], each["Code"]) for each in answer["Errors"]]
    assert sorted(codes) == sorted(
        [(f"k{number}", "PreconditionFailed") for number in range(10)]
        + [("x" * 1025, "KeyTooLongError"), ("k0", "NoSuchVersion")]
    )
    assert [each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]] == sorted(there[:10])


def test_the_acl_is_the_owners(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    who = {"ID": "main", "DisplayName": "main"}
    for acl in (s3.get_bucket_acl(Bucket=bucket), s3.get_object_acl(Bucket=bucket, Key="k")):
        assert acl["Owner"] == who
        [grant] = acl["Grants"]
        assert grant == {"Grantee": {**who, "Type": "CanonicalUser"}, "Permission": "FULL_CONTROL"}
    [listed] = s3.list_objects(Bucket=bucket)["Contents"]
    assert listed["Owner"] == who
    assert outcome(s3.get_object_acl, Bucket=bucket, Key="none") == MISSING


def test_the_only_acl_that_can_be_set_is_the_one_there_is(door: Gateway, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    with raw_client(door) as raw:
        for target in (f"/{bucket}?acl", f"/{bucket}/k?acl"):
            both = raw.ask("PUT", target, body=b"<AccessControlPolicy/>", headers={"x-amz-acl": "private"})
            assert both.code == "AccessControlListNotSupported"
    grants = {"Owner": {"ID": "main"}, "Grants": []}
    for call, names in (
        (s3.put_bucket_acl, {"Bucket": bucket}),
        (s3.put_object_acl, {"Bucket": bucket, "Key": "k"}),
    ):
        assert outcome(call, ACL="private", **names) == (200, "")
        assert outcome(call, ACL="bucket-owner-full-control", **names) == (200, "")
        assert outcome(call, ACL="public-read", **names) == (400, "AccessControlListNotSupported")
        assert outcome(call, AccessControlPolicy=grants, **names) == (400, "AccessControlListNotSupported")
        assert outcome(call, ACL="publicly", **names) == (400, "InvalidArgument")
    assert outcome(s3.put_object_acl, Bucket=bucket, Key="none", ACL="private") == MISSING
    assert outcome(s3.put_bucket_acl, Bucket=f"{bucket}-missing", ACL="private") == (404, "NoSuchBucket")


# --- conditions ----------------------------------------------------------------------------------------------
def test_deletions_on_conditions(s3: Any, bucket: str) -> None:
    def put() -> tuple[str, datetime]:
        etag = s3.put_object(Bucket=bucket, Key="k", Body=b"seven b")["ETag"]
        return etag, s3.head_object(Bucket=bucket, Key="k")["LastModified"]

    etag, time = put()
    wrong: list[dict[str, Any]] = [
        {"IfMatch": '"other"'},
        {"IfMatchSize": 8},
        {"IfMatchLastModifiedTime": time - timedelta(seconds=1)},
        {"IfMatch": etag, "IfMatchSize": 8},
    ]
    for condition in wrong:
        assert outcome(s3.delete_object, Bucket=bucket, Key="k", **condition) == FAILED
    for name, found in (
        ("IfMatch", MISSING),
        ("IfMatchSize", (204, "")),
        ("IfMatchLastModifiedTime", (204, "")),
    ):
        etag, time = put()
        condition = {name: {"IfMatch": etag, "IfMatchSize": 7, "IfMatchLastModifiedTime": time}[name]}
        assert outcome(s3.delete_object, Bucket=bucket, Key="k", **condition) == (204, "")
        assert outcome(s3.head_object, Bucket=bucket, Key="k")[0] == 404
        assert outcome(s3.delete_object, Bucket=bucket, Key="k", **condition) == found


def test_deletions_of_many_on_conditions(s3: Any, bucket: str) -> None:
    def delete(*objects: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": objects})
        gone = [each["Key"] for each in answer.get("Deleted", ())]
        return gone, {each["Key"]: each["Code"] for each in answer.get("Errors", ())}

    etags = {key: s3.put_object(Bucket=bucket, Key=key, Body=b"seven b")["ETag"] for key in "abc"}
    time = s3.head_object(Bucket=bucket, Key="c")["LastModified"]
    long_ago = datetime(2015, 1, 1, tzinfo=UTC)
    wrong: list[dict[str, Any]] = [
        {"Key": "a", "ETag": "x"},
        {"Key": "b", "Size": 8},
        {"Key": "c", "LastModifiedTime": long_ago},
    ]
    assert delete(*wrong) == ([], dict.fromkeys("abc", "PreconditionFailed"))
    right = [
        {"Key": "a", "ETag": etags["a"]},
        {"Key": "b", "Size": 7},
        {"Key": "c", "LastModifiedTime": time},
    ]
    assert delete(*right) == (["a", "b", "c"], {})
    assert delete(*wrong) == (["b", "c"], {"a": "NoSuchKey"})


def test_writes_on_another_etag(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch='"any"')["ETag"]
    assert outcome(s3.put_object, Bucket=bucket, Key="k", Body=b"2", IfNoneMatch=etag) == FAILED
    assert outcome(s3.put_object, Bucket=bucket, Key="k", Body=b"2", IfNoneMatch='"any"') == (200, "")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"2"


# --- uploads -------------------------------------------------------------------------------------------------
BODIES = [bytes([letter]) * (5 * MIB) for letter in b"ABC"]


def digest(algorithm: str, body: bytes) -> bytes:
    match algorithm:
        case "CRC32":
            return zlib.crc32(body).to_bytes(4, "big")
        case "CRC32C":
            return int(crt.crc32c(body)).to_bytes(4, "big")
        case "CRC64NVME":
            return int(crt.crc64nvme(body)).to_bytes(8, "big")
        case _:
            return hashlib.new(algorithm, body, usedforsecurity=False).digest()


def text_of(algorithm: str, body: bytes) -> str:
    return b64encode(digest(algorithm, body)).decode()


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ("SHA256", "COMPOSITE"),
        ("SHA1", "COMPOSITE"),
        ("CRC32", "COMPOSITE"),
        ("CRC32", "FULL_OBJECT"),
        ("CRC32C", "FULL_OBJECT"),
        ("CRC64NVME", "FULL_OBJECT"),
    ],
)
def test_checksums_of_an_upload(s3: Any, bucket: str, algorithm: str, kind: str) -> None:
    name, composite = f"Checksum{algorithm}", kind == "COMPOSITE"
    where = {"Bucket": bucket, "Key": "k"}
    made = s3.create_multipart_upload(ChecksumAlgorithm=algorithm, ChecksumType=kind, **where)
    assert (made["ChecksumAlgorithm"], made["ChecksumType"]) == (algorithm, kind)
    where["UploadId"] = made["UploadId"]
    parts = []
    for number, body in enumerate(BODIES, 1):
        put = s3.upload_part(PartNumber=number, Body=body, ChecksumAlgorithm=algorithm, **where)
        assert put[name] == text_of(algorithm, body)
        parts.append({"PartNumber": number, "ETag": put["ETag"], name: put[name]})
    bare = text_of(
        algorithm, b"".join(digest(algorithm, each) for each in BODIES) if composite else b"".join(BODIES)
    )
    whole = f"{bare}-3" if composite else bare

    def complete(parts: list[dict[str, Any]], **more: str) -> tuple[int, str]:
        return outcome(s3.complete_multipart_upload, MultipartUpload={"Parts": parts}, **where, **more)

    swapped = [{**parts[0], name: parts[1][name]}, *parts[1:]]
    assert complete(swapped) == (400, "InvalidPart")
    assert complete([{**parts[0], name: "no base64"}, *parts[1:]]) == (400, "InvalidArgument")
    wrong = text_of(algorithm, b"something else")
    assert complete(parts, **{name: wrong}) == (400, "BadDigest")
    other_type = "FULL_OBJECT" if composite else "COMPOSITE"
    assert complete(parts, ChecksumType=other_type) == (400, "InvalidRequest")
    if composite:
        assert complete(parts, **{name: f"{bare}-2"}) == (400, "BadDigest")
        without = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in parts]
        assert complete(without) == (400, "InvalidRequest")
    for _ in range(2):  # the second time it is a repetition
        done = s3.complete_multipart_upload(
            MultipartUpload={"Parts": parts}, ChecksumType=kind, **where, **{name: whole}
        )
        assert (done[name], done["ChecksumType"]) == (whole, kind)
    head = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (head[name], head["ChecksumType"]) == (whole, kind)
    for number, body in enumerate(BODIES, 1):
        part = s3.get_object(Bucket=bucket, Key="k", PartNumber=number, ChecksumMode="ENABLED")
        assert part["Body"].read() == body
        assert (part[name], part["PartsCount"]) == (text_of(algorithm, body), 3)
    wanted = ["Checksum", "ObjectParts"]
    attributes = s3.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=wanted)
    assert attributes["Checksum"] == {name: bare, "ChecksumType": kind}
    assert len(attributes["ObjectParts"].get("Parts", ())) == (3 if composite else 0)


def test_parts_of_a_composite_upload_come_with_its_checksum(door: Gateway, s3: Any, bucket: str) -> None:
    plain = door.client(request_checksum_calculation="when_required")
    where = {"Bucket": bucket, "Key": "k", "PartNumber": 1, "Body": b"body"}
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k", ChecksumAlgorithm="SHA256")["UploadId"]
    for client, more in ((plain, {}), (s3, {"ChecksumAlgorithm": "CRC32"}), (s3, {"ChecksumSHA256": "bad"})):
        assert outcome(client.upload_part, UploadId=upload, **where, **more) == (400, "InvalidRequest")
    assert "Parts" not in s3.list_parts(Bucket=bucket, Key="k", UploadId=upload)
    full = s3.create_multipart_upload(
        Bucket=bucket, Key="k", ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT"
    )["UploadId"]
    assert plain.upload_part(UploadId=full, **where)["ChecksumCRC32"] == text_of("CRC32", b"body")


def test_a_checksum_is_named_only_at_the_end(s3: Any, bucket: str) -> None:
    where = {
        "Bucket": bucket,
        "Key": "k",
        "UploadId": s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"],
    }
    etag = s3.upload_part(PartNumber=1, Body=b"body", ChecksumAlgorithm="CRC32", **where)["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    refused = {"ChecksumCRC32": (400, "BadDigest"), "ChecksumCRC32C": (400, "InvalidRequest")}
    refused["ChecksumSHA256"] = 400, "InvalidRequest"
    for name, found in refused.items():
        wrong = {name: text_of(name.removeprefix("Checksum"), b"x")}
        assert outcome(s3.complete_multipart_upload, MultipartUpload=parts, **where, **wrong) == found
    right = text_of("CRC32", b"body")
    done = s3.complete_multipart_upload(MultipartUpload=parts, ChecksumCRC32=right, **where)
    assert (done["ChecksumCRC32"], done["ChecksumType"]) == (right, "FULL_OBJECT")


def test_uploads_of_a_missing_bucket(s3: Any, bucket: str) -> None:
    parts = {"Parts": [{"PartNumber": 1, "ETag": "x"}]}
    for name, code in ((bucket, "NoSuchUpload"), (f"{bucket}-missing", "NoSuchBucket")):
        where = {"Bucket": name, "Key": "k", "UploadId": "0" * 32}
        assert outcome(s3.upload_part, PartNumber=1, Body=b"", **where) == (404, code)
        assert outcome(s3.list_parts, **where) == (404, code)
        assert outcome(s3.abort_multipart_upload, **where) == (404, code)
        assert outcome(s3.complete_multipart_upload, MultipartUpload=parts, **where) == (404, code)


def test_uploads_of_a_key_are_listed_by_age(s3: Any, bucket: str) -> None:
    made = [s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"] for _ in range(6)]
    pages, markers = [], {"KeyMarker": "", "UploadIdMarker": "passed over without a key"}
    while markers:
        page = s3.list_multipart_uploads(Bucket=bucket, MaxUploads=4, **markers)
        pages.append([each["UploadId"] for each in page["Uploads"]])
        assert page["UploadIdMarker"] == (markers["UploadIdMarker"] if markers["KeyMarker"] else "")
        markers = {}
        if page["IsTruncated"]:
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
    assert pages == [made[:4], made[4:]]


# --- headers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("gzip", "gzip"),
        ("deflate, gzip", "deflate, gzip"),
        ("br,gzip", "br,gzip"),
        ("gzip, aws-chunked", "gzip"),
        ("aws-chunked,br,gzip", "br, gzip"),
        ("aws-chunked, aws-chunked", None),
    ],
)
def test_content_encodings_stay_as_they_came(s3: Any, bucket: str, given: str, kept: str | None) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x", ContentEncoding=given)
    assert s3.head_object(Bucket=bucket, Key="k").get("ContentEncoding") == kept


def test_tags_without_a_value_and_in_order(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x", Tagging="b=1&a&c=")
    tags = s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"]
    assert [(tag["Key"], tag["Value"]) for tag in tags] == [("a", ""), ("b", "1"), ("c", "")]


def test_a_copy_onto_itself_that_names_its_storage_class(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x", Metadata={"a": "b"})
    itself = {"Bucket": bucket, "Key": "k", "CopySource": f"{bucket}/k"}
    assert outcome(s3.copy_object, **itself) == (400, "InvalidRequest")
    assert outcome(s3.copy_object, StorageClass="STANDARD", **itself) == (200, "")
    found = s3.get_object(Bucket=bucket, Key="k")
    assert (found["Body"].read(), found["Metadata"]) == (b"x", {"a": "b"})


def test_requests_without_what_they_need(door: Gateway, s3: Any, bucket: str) -> None:
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    with raw_client(door) as raw:
        for target in (f"/{bucket}/k", f"/{bucket}/k?partNumber=1&uploadId={upload}"):
            raw.send(signed_head(door, "PUT", target, body=None, payload=UNSIGNED))
            answer = raw.response()
            assert (answer.status, answer.code) == (411, "MissingContentLength")
        raw.send(signed_head(door, "PUT", f"/{bucket}-2", body=None))
        assert raw.response().status == 200
        answer = raw.ask("PUT", f"/{bucket}/k", body=b"abc", unsigned={"Expect": "200-ok"})
        assert answer.status == 200
    with raw_client(door) as raw:
        host = f"Host: {door.host}:{door.port}\r\n"
        for request, found in (
            (f"GET /{bucket}/k HTTP/1.1\r\n{host}Authorization:\r\n\r\n", (403, "AccessDenied")),
            (f"OPTIONS /{bucket}/k HTTP/1.1\r\n{host}\r\n", (400, "BadRequest")),
            (
                f"OPTIONS /{bucket}/k HTTP/1.1\r\n{host}Origin: http://a\r\nAccess-Control-Request-Method: GET\r\n\r\n",
                (403, "AccessForbidden"),
            ),
        ):
            raw.send(request.encode())
            answer = raw.response()
            assert (answer.status, answer.code) == found
