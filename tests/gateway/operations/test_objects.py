"""Objects at the S3 endpoint, through boto3 as it is: reads, writes, conditions, listings, copies, tags, presigning."""

from __future__ import annotations

import base64
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.block_batches import Block, open_blocks
from tests.support.gateway import (
    OTHER_ACCESS,
    OTHER_SECRET,
    READER_ACCESS,
    READER_SECRET,
    Gateway,
    fails,
    gateway,
)
from tests.support.raw_s3 import UNSIGNED, raw_client
from tests.support.stores import NAMESPACE

MIB = 1 << 20
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""botocore leaves sockets to the garbage collector."""


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway(settings='opaque_etags = ["opaque-*"]') as found:
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    return door.client()


@pytest.fixture
def bucket(s3: Any, request: pytest.FixtureRequest) -> str:
    name = "t-" + hashlib.md5(request.node.name.encode()).hexdigest()[:20]
    s3.create_bucket(Bucket=name)
    return name


# --- bytes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 4096, 65537, MIB, 3 * MIB + 1])
def test_a_body_comes_back(s3: Any, bucket: str, size: int) -> None:
    body = os.urandom(size)
    put = s3.put_object(Bucket=bucket, Key="k", Body=body, Metadata={"Some": "thing"}, ContentType="text/x")
    found = s3.get_object(Bucket=bucket, Key="k")
    assert found["Body"].read() == body
    assert put["ETag"] == found["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    assert (found["Metadata"], found["ContentType"], found["ContentLength"]) == (
        {"some": "thing"},
        "text/x",
        size,
    )
    head = s3.head_object(Bucket=bucket, Key="k")
    assert (head["ContentLength"], head["ETag"]) == (size, put["ETag"])


def test_the_mount_shows_the_same_bytes(door: Gateway, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="dir/from-s3", Body=b"one")
    where = door.service.mount / bucket / "dir"
    assert (where / "from-s3").read_bytes() == b"one"
    (where / "from-mount").write_bytes(b"two")
    found = s3.get_object(Bucket=bucket, Key="dir/from-mount")
    assert found["Body"].read() == b"two"
    assert found["ETag"].endswith('-1"')
    (where / "from-s3").write_bytes(b"three")
    old = f'"{hashlib.md5(b"one").hexdigest()}"'
    while (again := s3.get_object(Bucket=bucket, Key="dir/from-s3"))["ETag"] == old:
        assert again["Body"].read() == b"one"  # until the kernel has said that the file was closed
    assert again["Body"].read() == b"three"


def test_a_key_may_be_what_no_path_is(s3: Any, bucket: str) -> None:
    keys = [
        "a//b",
        "./c",
        "d/../e",
        "/f",
        "g ",
        "h+i",
        "j%2Fk",
        "l\u00e9",
        "m\U0001f600",
        "n?o#p",
        "x" * 1024,
        "q/",
    ]
    keys += ["a", "a/b", "<&>\"'", "caf\u0065\u0301"]
    for key in keys:
        s3.put_object(Bucket=bucket, Key=key, Body=key.encode())
    for key in keys:
        assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == key.encode()
    listed = [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]]
    assert listed == sorted(keys, key=str.encode)
    s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys]})
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    fails(lambda: s3.put_object(Bucket=bucket, Key="x" * 1025, Body=b""), "KeyTooLongError", 400)
    s3.put_object(Bucket=bucket, Key="control\x01\x1f", Body=b"x")
    assert s3.list_objects_v2(Bucket=bucket)["Contents"][0]["Key"] == "control\x01\x1f"


def test_ranges(s3: Any, bucket: str) -> None:
    body = bytes(range(100))
    s3.put_object(Bucket=bucket, Key="k", Body=body)
    s3.put_object(Bucket=bucket, Key="empty", Body=b"")
    for text, start, end in (
        ("bytes=0-9", 0, 10),
        ("bytes=90-", 90, 100),
        ("bytes=-5", 95, 100),
        ("bytes=95-200", 95, 100),
        ("bytes=-500", 0, 100),
    ):
        found = s3.get_object(Bucket=bucket, Key="k", Range=text)
        assert found["Body"].read() == body[start:end]
        assert found["ContentRange"] == f"bytes {start}-{end - 1}/100"
        assert found["ResponseMetadata"]["HTTPStatusCode"] == 206
    for text in ("bytes=5-2", "items=0-1", "bytes=0-1,3-4"):
        assert s3.get_object(Bucket=bucket, Key="k", Range=text)["Body"].read() == body
    for key, text in (("k", "bytes=100-"), ("k", "bytes=-0"), ("empty", "bytes=0-")):
        found = fails(
            lambda key=key, text=text: s3.get_object(Bucket=bucket, Key=key, Range=text), "InvalidRange", 416
        )
        assert found["ResponseMetadata"]["HTTPHeaders"]["content-range"].startswith("bytes */")


def test_conditional_reads(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"x")["ETag"]
    changed = s3.head_object(Bucket=bucket, Key="k")["LastModified"]
    s3.get_object(Bucket=bucket, Key="k", IfMatch=etag)
    fails(lambda: s3.get_object(Bucket=bucket, Key="k", IfMatch='"x"'), "PreconditionFailed", 412)
    found = fails(lambda: s3.get_object(Bucket=bucket, Key="k", IfNoneMatch=etag), "304", 304)
    assert found["ResponseMetadata"]["HTTPHeaders"]["etag"] == etag
    fails(lambda: s3.head_object(Bucket=bucket, Key="k", IfModifiedSince=changed), "304", 304)
    s3.get_object(Bucket=bucket, Key="k", IfMatch=etag, IfUnmodifiedSince="Sat, 01 Jan 2000 00:00:00 GMT")
    fails(
        lambda: s3.get_object(Bucket=bucket, Key="k", IfUnmodifiedSince="Sat, 01 Jan 2000 00:00:00 GMT"),
        "PreconditionFailed",
    )


# --- writes ------------------------------------------------------------------------------------------------
def test_conditional_writes(s3: Any, bucket: str) -> None:
    first = s3.put_object(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    fails(
        lambda: s3.put_object(Bucket=bucket, Key="k", Body=b"2", IfNoneMatch="*"), "PreconditionFailed", 412
    )
    second = s3.put_object(Bucket=bucket, Key="k", Body=b"2", IfMatch=first)["ETag"]
    fails(lambda: s3.put_object(Bucket=bucket, Key="k", Body=b"3", IfMatch=first), "PreconditionFailed", 412)
    fails(lambda: s3.put_object(Bucket=bucket, Key="none", Body=b"3", IfMatch=first), "NoSuchKey", 404)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"2"
    assert second != first


def test_of_writers_that_race_on_a_condition_one_wins(door: Gateway, s3: Any, bucket: str) -> None:
    clients = [door.client() for _ in range(8)]

    def put(n: int, **condition: str) -> bool:
        try:
            clients[n].put_object(Bucket=bucket, Key="race", Body=b"%d" % n, **condition)
        except ClientError as error:
            return bool(error.response["Error"]["Code"] != "PreconditionFailed")
        return True

    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            s3.delete_object(Bucket=bucket, Key="race")
            assert sum(pool.map(lambda n: put(n, IfNoneMatch="*"), range(8))) == 1
            etag = s3.head_object(Bucket=bucket, Key="race")["ETag"]
            s3.put_object(Bucket=bucket, Key="race", Body=b"base")
            fails(
                lambda etag=etag: s3.put_object(Bucket=bucket, Key="race", Body=b"", IfMatch=etag),
                "PreconditionFailed",
            )
            etag = s3.head_object(Bucket=bucket, Key="race")["ETag"]
            assert sum(pool.map(lambda n, etag=etag: put(n, IfMatch=etag), range(8))) == 1


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_checksums(s3: Any, bucket: str, algorithm: str) -> None:
    body = os.urandom(300_000)
    put = s3.put_object(Bucket=bucket, Key="k", Body=body, ChecksumAlgorithm=algorithm)
    found = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert found["Body"].read() == body
    assert found[f"Checksum{algorithm}"] == put[f"Checksum{algorithm}"]
    assert f"Checksum{algorithm}" not in s3.head_object(Bucket=bucket, Key="k")
    wrong = base64.b64encode(bytes(len(base64.b64decode(put[f"Checksum{algorithm}"])))).decode()
    fails(
        lambda: s3.put_object(Bucket=bucket, Key="bad", Body=body, **{f"Checksum{algorithm}": wrong}),
        "BadDigest",
        400,
    )
    fails(lambda: s3.head_object(Bucket=bucket, Key="bad"), "404")
    attributes = s3.get_object_attributes(
        Bucket=bucket, Key="k", ObjectAttributes=["ETag", "Checksum", "ObjectSize", "StorageClass"]
    )
    assert attributes["ObjectSize"] == len(body)
    assert attributes["Checksum"][f"Checksum{algorithm}"] == put[f"Checksum{algorithm}"]


def test_a_wrong_md5_leaves_nothing(s3: Any, bucket: str) -> None:
    wrong = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    fails(lambda: s3.put_object(Bucket=bucket, Key="k", Body=b"x", ContentMD5=wrong), "BadDigest", 400)
    fails(lambda: s3.put_object(Bucket=bucket, Key="k", Body=b"x", ContentMD5="zzz"), "InvalidDigest", 400)
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_opaque_etags_of_a_bucket(s3: Any) -> None:
    s3.create_bucket(Bucket="opaque-one")
    put = s3.put_object(Bucket="opaque-one", Key="k", Body=b"x")
    assert put["ETag"].endswith('-1"')
    assert s3.head_object(Bucket="opaque-one", Key="k")["ETag"] == put["ETag"]
    assert s3.put_object(Bucket="opaque-one", Key="k", Body=b"x")["ETag"] != put["ETag"]


def test_an_object_over_the_limit_is_refused_at_once(door: Gateway, s3: Any, bucket: str) -> None:
    fails(lambda: s3.put_object(Bucket=bucket, Key="k", Body=bytes(65 * MIB)), "EntityTooLarge", 400)


def test_metadata_is_limited_and_kept(s3: Any, bucket: str) -> None:
    s3.put_object(
        Bucket=bucket,
        Key="k",
        Body=b"",
        CacheControl="no-cache",
        ContentDisposition="attachment",
        ContentEncoding="gzip",
        ContentLanguage="de",
        Metadata={"a": "b", "c": ""},
    )
    head = s3.head_object(Bucket=bucket, Key="k")
    assert (
        head["CacheControl"],
        head["ContentDisposition"],
        head["ContentEncoding"],
        head["ContentLanguage"],
    ) == (
        "no-cache",
        "attachment",
        "gzip",
        "de",
    )
    assert head["Metadata"] == {"a": "b", "c": ""}
    fails(lambda: s3.put_object(Bucket=bucket, Key="k", Metadata={"a": "x" * 2048}), "MetadataTooLarge", 400)
    found = s3.get_object(
        Bucket=bucket, Key="k", ResponseContentType="image/x", ResponseCacheControl="max-age=1"
    )
    assert (found["ContentType"], found["CacheControl"]) == ("image/x", "max-age=1")


# --- copies, tags, removal ---------------------------------------------------------------------------------
def test_copies(s3: Any, bucket: str) -> None:
    body = os.urandom(MIB)
    etag = s3.put_object(Bucket=bucket, Key="s\u00f6urce +?", Body=body, Metadata={"a": "1"}, Tagging="t=1")[
        "ETag"
    ]
    source = {"Bucket": bucket, "Key": "s\u00f6urce +?"}
    copied = s3.copy_object(Bucket=bucket, Key="copy", CopySource=source)
    assert copied["CopyObjectResult"]["ETag"] == etag
    found = s3.get_object(Bucket=bucket, Key="copy")
    assert (found["Body"].read() == body, found["Metadata"]) == (True, {"a": "1"})
    assert s3.get_object_tagging(Bucket=bucket, Key="copy")["TagSet"] == [{"Key": "t", "Value": "1"}]
    s3.copy_object(
        Bucket=bucket, Key="copy2", CopySource=source, Metadata={"b": "2"}, MetadataDirective="REPLACE"
    )
    assert s3.head_object(Bucket=bucket, Key="copy2")["Metadata"] == {"b": "2"}
    fails(
        lambda: s3.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/copy"), "InvalidRequest", 400
    )
    before = s3.head_object(Bucket=bucket, Key="copy")
    s3.copy_object(
        Bucket=bucket,
        Key="copy",
        CopySource=f"{bucket}/copy",
        Metadata={"c": "3"},
        MetadataDirective="REPLACE",
    )
    after = s3.get_object(Bucket=bucket, Key="copy")
    assert (after["Metadata"], after["ETag"], after["Body"].read() == body) == (
        {"c": "3"},
        before["ETag"],
        True,
    )
    fails(lambda: s3.copy_object(Bucket=bucket, Key="x", CopySource=f"{bucket}/none"), "NoSuchKey", 404)
    fails(lambda: s3.copy_object(Bucket=bucket, Key="x", CopySource="no-such-bucket/k"), "NoSuchBucket", 404)
    fails(
        lambda: s3.copy_object(Bucket=bucket, Key="x", CopySource=source, CopySourceIfMatch='"no"'),
        "PreconditionFailed",
        412,
    )
    s3.copy_object(Bucket=bucket, Key="x", CopySource=source, CopySourceIfMatch=etag)


def test_tags(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"x", Tagging="a=1&b=2")["ETag"]
    head = s3.head_object(Bucket=bucket, Key="k")
    assert s3.get_object(Bucket=bucket, Key="k")["TagCount"] == 2
    s3.put_object_tagging(Bucket=bucket, Key="k", Tagging={"TagSet": [{"Key": "c", "Value": "3"}]})
    assert s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == [{"Key": "c", "Value": "3"}]
    s3.delete_object_tagging(Bucket=bucket, Key="k")
    assert s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == []
    again = s3.head_object(Bucket=bucket, Key="k")
    assert (again["ETag"], again["LastModified"]) == (etag, head["LastModified"])
    fails(lambda: s3.get_object_tagging(Bucket=bucket, Key="none"), "NoSuchKey", 404)


def test_removal(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    s3.put_object(Bucket=bucket, Key="d/", Body=b"")
    s3.put_object(Bucket=bucket, Key="d/k", Body=b"x")
    s3.delete_object(Bucket=bucket, Key="d/")
    s3.delete_object(Bucket=bucket, Key="d")
    assert [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]] == ["d/k", "k"]
    fails(lambda: s3.delete_bucket(Bucket=bucket), "BucketNotEmpty", 409)
    found = s3.delete_objects(
        Bucket=bucket,
        Delete={"Objects": [{"Key": "k"}, {"Key": "d/k"}, {"Key": "none"}, {"Key": "v", "VersionId": "x"}]},
    )
    assert {entry["Key"] for entry in found["Deleted"]} == {"k", "d/k", "none"}
    assert found["Errors"][0]["Code"] == "NoSuchVersion"
    quiet = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "k"}], "Quiet": True})
    assert "Deleted" not in quiet
    s3.delete_bucket(Bucket=bucket)
    fails(lambda: s3.head_bucket(Bucket=bucket), "404")
    fails(lambda: s3.list_objects_v2(Bucket=bucket), "NoSuchBucket", 404)
    fails(lambda: s3.put_object(Bucket=bucket, Key="k", Body=b""), "NoSuchBucket", 404)
    s3.create_bucket(Bucket=bucket)


# --- listings ----------------------------------------------------------------------------------------------
KEYS = st.lists(st.text("ab/\u00e9\U0001f600-", min_size=1, max_size=6), min_size=1, max_size=14, unique=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=KEYS,
    prefix=st.sampled_from(["", "a", "a/", "aa", "b"]),
    delimiter=st.sampled_from(["", "/", "a", "a/", "/a", "aa"]),
    page=st.integers(1, 4),
)
@example(keys=["a/", "a/a"], prefix="a", delimiter="a/", page=1)  # the delimiter overlaps the prefix
@example(keys=["aa/", "aa/a", "aa/b"], prefix="a", delimiter="a/", page=1)  # a key is prefix plus delimiter
@example(keys=["a/", "a/a", "a/b", "a0"], prefix="a", delimiter="/", page=1)
@example(keys=["aa", "aaa", "aaaa", "ab"], prefix="a", delimiter="aa", page=1)
def test_listings_are_those_of_a_sorted_list(
    s3: Any, bucket: str, keys: list[str], prefix: str, delimiter: str, page: int
) -> None:
    found = s3.list_objects_v2(Bucket=bucket).get("Contents", [])
    if found:
        s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": entry["Key"]} for entry in found]})
    for key in keys:
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    entries: list[tuple[str, bool]] = []
    for key in sorted(keys, key=str.encode):
        if not key.startswith(prefix):
            continue
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        entry = (key, False) if cut < 0 else (key[: cut + len(delimiter)], True)
        if entry not in entries:
            entries.append(entry)
    for name in ("list_objects_v2", "list_objects", "list_object_versions"):
        listed: list[tuple[str, bool]] = []
        options = {"Bucket": bucket, "Prefix": prefix, "PaginationConfig": {"PageSize": page}}
        if delimiter:
            options["Delimiter"] = delimiter
        for each in s3.get_paginator(name).paginate(**options):
            some = [(entry["Key"], False) for entry in each.get("Contents", each.get("Versions", []))]
            some += [(entry["Prefix"], True) for entry in each.get("CommonPrefixes", [])]
            assert len(some) <= page
            listed += some
        assert sorted(listed, key=lambda entry: entry[0].encode()) == entries, name


def test_listing_details(s3: Any, bucket: str) -> None:
    for key in ("a/1", "a/2", "b", "c"):
        s3.put_object(Bucket=bucket, Key=key, Body=key.encode())
    none = s3.list_objects_v2(Bucket=bucket, MaxKeys=0)
    assert (none["KeyCount"], none["IsTruncated"]) == (0, False)
    page = s3.list_objects_v2(Bucket=bucket, Delimiter="/", MaxKeys=1)
    assert (page["KeyCount"], page["IsTruncated"], page["CommonPrefixes"]) == (1, True, [{"Prefix": "a/"}])
    rest = s3.list_objects_v2(
        Bucket=bucket, Delimiter="/", ContinuationToken=page["NextContinuationToken"], StartAfter="zz"
    )
    assert [entry["Key"] for entry in rest["Contents"]] == ["b", "c"]
    assert [e["Key"] for e in s3.list_objects_v2(Bucket=bucket, StartAfter="b")["Contents"]] == ["c"]
    assert "NextMarker" not in s3.list_objects(Bucket=bucket, MaxKeys=1)
    assert s3.list_objects(Bucket=bucket, MaxKeys=1, Delimiter="/")["NextMarker"] == "a/"
    versions = s3.list_object_versions(Bucket=bucket)["Versions"]
    assert next((entry["Key"], entry["VersionId"], entry["IsLatest"]) for entry in versions) == (
        "a/1",
        "null",
        True,
    )
    fails(lambda: s3.list_objects_v2(Bucket=bucket, ContinuationToken="garbage"), "InvalidArgument", 400)


# --- who ---------------------------------------------------------------------------------------------------
def test_buckets_have_owners(door: Gateway, s3: Any, bucket: str) -> None:
    other = door.client(OTHER_ACCESS, OTHER_SECRET)
    s3.create_bucket(Bucket=bucket)
    fails(lambda: other.create_bucket(Bucket=bucket), "BucketAlreadyExists", 409)
    for name in ("ab", "Upper", "under_score", "a..b", "192.168.1.1", "-dash", "x" * 64):
        fails(lambda name=name: s3.create_bucket(Bucket=name), "InvalidBucketName", 400)
    assert bucket in [entry["Name"] for entry in s3.list_buckets()["Buckets"]]
    assert s3.get_bucket_location(Bucket=bucket)["LocationConstraint"] is None
    fails(
        lambda: s3.create_bucket(
            Bucket="elsewhere", CreateBucketConfiguration={"LocationConstraint": "eu-west-3"}
        ),
        "IllegalLocationConstraintException",
    )


def test_rights_are_per_bucket(door: Gateway, s3: Any) -> None:
    reader = door.client(READER_ACCESS, READER_SECRET)
    s3.create_bucket(Bucket="readable-1")
    s3.create_bucket(Bucket="hidden-1")
    s3.put_object(Bucket="readable-1", Key="k", Body=b"x")
    s3.put_object(Bucket="hidden-1", Key="k", Body=b"x")
    assert reader.get_object(Bucket="readable-1", Key="k")["Body"].read() == b"x"
    fails(lambda: reader.put_object(Bucket="readable-1", Key="k", Body=b""), "AccessDenied", 403)
    fails(lambda: reader.delete_object(Bucket="readable-1", Key="k"), "AccessDenied", 403)
    fails(lambda: reader.get_object(Bucket="hidden-1", Key="k"), "AccessDenied", 403)
    fails(
        lambda: reader.copy_object(Bucket="readable-1", Key="c", CopySource="hidden-1/k"), "AccessDenied", 403
    )
    assert [entry["Name"] for entry in reader.list_buckets()["Buckets"]] == ["readable-1"]
    other = door.client(READER_ACCESS, "wrong-secret-0123456789")
    fails(lambda: other.list_buckets(), "SignatureDoesNotMatch", 403)


def test_presigned_urls(door: Gateway, bucket: str) -> None:
    client = door.client(signature_version="s3v4")
    put = client.generate_presigned_url("put_object", {"Bucket": bucket, "Key": "p/\u00e9 +"}, ExpiresIn=60)
    with urllib.request.urlopen(urllib.request.Request(put, data=b"hello", method="PUT")) as answer:
        assert answer.status == 200
    options = {"Bucket": bucket, "Key": "p/\u00e9 +", "ResponseContentType": "text/x"}
    url = client.generate_presigned_url("get_object", options, ExpiresIn=60)
    with urllib.request.urlopen(url) as answer:
        assert (answer.read(), answer.headers["content-type"]) == (b"hello", "text/x")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(url + "&x=y")
    assert error.value.code == 403


def test_what_is_not_served_is_not_implemented(s3: Any, bucket: str) -> None:
    fails(lambda: s3.put_bucket_acl(Bucket=bucket, ACL="public-read"), "AccessControlListNotSupported", 400)
    fails(lambda: s3.put_bucket_policy(Bucket=bucket, Policy="{}"), "NotImplemented", 501)
    fails(
        lambda: s3.put_bucket_notification_configuration(Bucket=bucket, NotificationConfiguration={}),
        "NotImplemented",
        501,
    )
    fails(
        lambda: s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}),
        "NotImplemented",
    )


def test_kvfs_headers(s3: Any, door: Gateway, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x", Metadata={"kvfs-pin": "1"})
    headers = s3.get_object(Bucket=bucket, Key="k")["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-kvfs-tier"] == "dram"
    assert headers["x-kvfs-hits"].isdigit()
    with door.service.client() as client:
        assert client.stat(f"{bucket}/k").pinned


def test_hits_are_counted(s3: Any, door: Gateway, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    for _ in range(5):
        s3.get_object(Bucket=bucket, Key="k")["Body"].read()
    with door.service.client() as client:
        while client.stat(f"{bucket}/k").hits < 5:
            pass


def test_blocks_by_prefix_hash(s3: Any, door: Gateway) -> None:
    digests = [hashlib.sha256(b"%d" % n).digest()[:16] for n in range(4)]
    with door.service.client() as client:
        open_blocks(client, NAMESPACE, bucket="kv-s3").put([Block(digests[0], b"block zero")])
    name = f"kv/{digests[0].hex()[:2]}/{digests[0].hex()}"
    assert s3.get_object(Bucket="kv-s3", Key=name)["Body"].read() == b"block zero"
    second = f"kv/{digests[1].hex()[:2]}/{digests[1].hex()}"
    put = s3.put_object(Bucket="kv-s3", Key=second, Body=b"block one")
    assert s3.head_object(Bucket="kv-s3", Key=second)["ETag"] == put["ETag"]
    s3.put_object(Bucket="kv-s3", Key=second, Body=b"never seen")
    assert s3.get_object(Bucket="kv-s3", Key=second)["Body"].read() == b"block one"
    listed = [entry["Key"] for entry in s3.list_objects_v2(Bucket="kv-s3", Prefix="kv/")["Contents"]]
    assert sorted(listed) == sorted([name, second])
    s3.delete_object(Bucket="kv-s3", Key=second)
    fails(lambda: s3.get_object(Bucket="kv-s3", Key=second), "NoSuchKey", 404)


def test_hosts_name_buckets() -> None:
    """Ask as engines' connectors do: the bucket in the host, the range first, then the rest under its ETag."""
    settings = 'domains = ["s3.test"]\ndefault_bucket = "fallback"'
    body = os.urandom(3 * MIB)
    with gateway(settings=settings) as door:
        s3 = door.client()
        for name, content in (("vhost", body), ("fallback", b"by default")):
            s3.create_bucket(Bucket=name)
            s3.put_object(Bucket=name, Key="k", Body=content)
        with raw_client(door) as raw:
            first = raw.ask(
                "GET", "/k", host="vhost.s3.test", payload=UNSIGNED, headers={"range": "bytes=0-999999"}
            )
            assert (first.status, first.body) == (206, body[:1_000_000])
            headers = {"range": f"bytes=1000000-{len(body) - 1}", "if-match": first.headers["etag"]}
            rest = raw.ask("GET", "/k", host="vhost.s3.test:8080", payload=UNSIGNED, headers=headers)
            assert rest.body == body[1_000_000:]
            assert raw.ask("GET", "/vhost/k", host="s3.test").body == body
            assert raw.ask("GET", "/k", host="unknown.example").body == b"by default"
            assert raw.ask("GET", "/k", host="nobody.s3.test").code == "NoSuchBucket"


def test_objects_come_up_from_nvme() -> None:
    """Many at once, which DRAM could not hold together, each with the metadata that it was put with."""
    bodies = {f"k{n}": os.urandom(2 * MIB) for n in range(40)}
    with gateway(dram="32MiB", nvme="512MiB") as door:
        s3 = door.client()
        s3.create_bucket(Bucket="deep")
        for key, body in bodies.items():
            s3.put_object(Bucket="deep", Key=key, Body=body, Metadata={"key": key})
        with door.service.client() as client:
            tiers = {client.stat(f"deep/{key}").tier for key in bodies}
        assert "nvme" in tiers

        def read(key: str) -> bool:
            found = s3.get_object(Bucket="deep", Key=key)
            return bool(found["Body"].read() == bodies[key] and found["Metadata"] == {"key": key})

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, bodies))
        assert not door.service.complaints()
