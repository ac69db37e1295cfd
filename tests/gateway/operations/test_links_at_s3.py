"""Symbolic links at the S3 endpoint: objects whose body is the target, marked by a header that no client can set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import Gateway, fails, gateway
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.mount,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", params=["cache", "durable"])
def kind(request: pytest.FixtureRequest) -> str:
    """The class of the buckets; of a cache's without NVMe."""
    return str(request.param)


@pytest.fixture(scope="module")
def door(kind: str) -> Iterator[Gateway]:
    with gateway(mode="auto", nvme="0" if kind == "cache" else "64MiB") as found:
        yield found
        assert not found.service.complaints()


@pytest.fixture
def bucket(door: Gateway, kind: str, request: pytest.FixtureRequest) -> Path:
    name = "t-" + hashlib.md5(request.node.name.encode()).hexdigest()[:20]
    return door.service.create_bucket(name, durable=kind == "durable")


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    return door.client()


def body(answer: dict[str, Any]) -> bytes:
    return bytes(answer["Body"].read())


def is_link(answer: dict[str, Any]) -> bool:
    return "x-kvfs-symlink" in answer["ResponseMetadata"]["HTTPHeaders"]


def test_a_link_is_an_object_with_its_target(s3: Any, bucket: Path) -> None:
    (bucket / "file").write_bytes(b"bytes of the file")
    os.symlink("file", bucket / "link")
    os.symlink(b"\xff" * 4095, os.fsencode(bucket / "longest"))
    name = bucket.name
    for key, target in (("link", b"file"), ("longest", b"\xff" * 4095)):
        got = s3.get_object(Bucket=name, Key=key)
        assert (body(got), is_link(got), got["ContentLength"]) == (target, True, len(target))
        assert got["ResponseMetadata"]["HTTPHeaders"]["x-kvfs-tier"] == "index"
        head = s3.head_object(Bucket=name, Key=key)
        assert (head["ContentLength"], head["ETag"], is_link(head)) == (len(target), got["ETag"], True)
        assert s3.head_object(Bucket=name, Key=key, IfMatch=got["ETag"])["ETag"] == got["ETag"]
    part = s3.get_object(Bucket=name, Key="link", Range="bytes=1-2")
    assert (body(part), part["ContentRange"]) == (b"il", "bytes 1-2/4")
    assert not is_link(s3.head_object(Bucket=name, Key="file"))
    listed = s3.list_objects_v2(Bucket=name)["Contents"]
    assert {each["Key"]: each["Size"] for each in listed} == {"file": 17, "link": 4, "longest": 4095}
    assert {each["Key"]: each["ETag"] for each in listed}["link"] == s3.head_object(Bucket=name, Key="link")[
        "ETag"
    ]


def test_nothing_below_a_link_exists(s3: Any, bucket: Path) -> None:
    (bucket / "d").mkdir()
    (bucket / "d" / "file").write_bytes(b"x")
    os.symlink("d", bucket / "link")
    os.symlink("/etc", bucket / "outside")
    for key in ("link/file", "outside/hostname", "d/../link/file"):
        fails(lambda key=key: s3.get_object(Bucket=bucket.name, Key=key), "NoSuchKey")
    assert s3.list_objects_v2(Bucket=bucket.name, Prefix="link/")["KeyCount"] == 0


def test_a_put_replaces_the_link_and_not_what_it_leads_to(s3: Any, bucket: Path) -> None:
    (bucket / "file").write_bytes(b"stays")
    os.symlink("file", bucket / "link")
    etag = s3.head_object(Bucket=bucket.name, Key="link")["ETag"]
    fails(
        lambda: s3.put_object(Bucket=bucket.name, Key="link", Body=b"x", IfNoneMatch="*"),
        "PreconditionFailed",
    )
    s3.put_object(Bucket=bucket.name, Key="link", Body=b"an object now", IfMatch=etag)
    assert body(s3.get_object(Bucket=bucket.name, Key="link")) == b"an object now"
    eventually(lambda: not (bucket / "link").is_symlink(), "the link is a file")
    assert ((bucket / "link").read_bytes(), (bucket / "file").read_bytes()) == (b"an object now", b"stays")


def test_a_link_in_the_place_of_an_object_that_is_read_again_and_again(s3: Any, bucket: Path) -> None:
    s3.put_object(Bucket=bucket.name, Key="name", Body=b"object")
    for _ in range(3):
        assert body(s3.get_object(Bucket=bucket.name, Key="name")) == b"object"
    os.symlink("target", bucket / "beside")
    os.rename(bucket / "beside", bucket / "name")
    got = s3.get_object(Bucket=bucket.name, Key="name")
    assert (body(got), is_link(got)) == (b"target", True)
    os.unlink(bucket / "name")
    fails(lambda: s3.get_object(Bucket=bucket.name, Key="name"), "NoSuchKey")


def test_no_metadata_makes_a_link(s3: Any, bucket: Path) -> None:
    said = {"kvfs-symlink": "true", "x-kvfs-symlink": "true", "mode": "41471"}
    put = s3.put_object(Bucket=bucket.name, Key="forged", Body=b"/etc/passwd", Metadata=said)
    assert put["ResponseMetadata"]["HTTPStatusCode"] == 200
    got = s3.get_object(Bucket=bucket.name, Key="forged")
    assert (got["Metadata"], is_link(got)) == (said, False)
    assert not (bucket / "forged").is_symlink()


def test_a_copy_copies_the_link(s3: Any, bucket: Path) -> None:
    name = bucket.name
    os.symlink("../there", bucket / "link")
    s3.put_object(Bucket=name, Key="taken", Body=b"x")
    for key in ("copy", "taken", "d/copy"):
        copied = s3.copy_object(Bucket=name, Key=key, CopySource=f"{name}/link")
        head = s3.head_object(Bucket=name, Key=key)
        assert is_link(head)
        assert head["ETag"] == copied["CopyObjectResult"]["ETag"]
        eventually(lambda key=key: (bucket / key).is_symlink(), "the copy is a link")
        assert os.readlink(bucket / key) == "../there"
    s3.copy_object(
        Bucket=name, Key="copy", CopySource=f"{name}/link", Metadata={"a": "b"}, MetadataDirective="REPLACE"
    )
    s3.copy_object(
        Bucket=name, Key="link", CopySource=f"{name}/link", Metadata={"c": "d"}, MetadataDirective="REPLACE"
    )
    for key, said in (("copy", {"a": "b"}), ("link", {"c": "d"})):
        head = s3.head_object(Bucket=name, Key=key)
        assert (head["Metadata"], is_link(head)) == (said, True)
        assert os.readlink(bucket / key) == "../there"
    etag = s3.head_object(Bucket=name, Key="taken")["ETag"]
    fails(
        lambda: s3.copy_object(
            Bucket=name, Key="copy", CopySource=f"{name}/taken", CopySourceIfNoneMatch=etag
        ),
        "PreconditionFailed",
    )
    checked = s3.copy_object(Bucket=name, Key="sum", CopySource=f"{name}/link", ChecksumAlgorithm="SHA256")
    assert checked["CopyObjectResult"]["ChecksumSHA256"]
    assert is_link(s3.head_object(Bucket=name, Key="sum"))


def test_a_part_that_is_copied_from_a_link_is_its_target(s3: Any, bucket: Path) -> None:
    name = bucket.name
    os.symlink("target", bucket / "link")
    upload = s3.create_multipart_upload(Bucket=name, Key="whole")["UploadId"]
    part = s3.upload_part_copy(
        Bucket=name, Key="whole", UploadId=upload, PartNumber=1, CopySource=f"{name}/link"
    )
    parts = [{"PartNumber": 1, "ETag": part["CopyPartResult"]["ETag"]}]
    s3.complete_multipart_upload(Bucket=name, Key="whole", UploadId=upload, MultipartUpload={"Parts": parts})
    got = s3.get_object(Bucket=name, Key="whole")
    assert (body(got), is_link(got)) == (b"target", False)


def test_tags_and_deletion(s3: Any, bucket: Path) -> None:
    name, tags = bucket.name, [{"Key": "a", "Value": "b"}]
    for key in ("one", "two", "three"):
        os.symlink("x", bucket / key)
    s3.put_object_tagging(Bucket=name, Key="one", Tagging={"TagSet": tags})
    assert s3.get_object_tagging(Bucket=name, Key="one")["TagSet"] == tags
    assert os.readlink(bucket / "one") == "x"
    attributes = s3.get_object_attributes(Bucket=name, Key="one", ObjectAttributes=["ObjectSize", "ETag"])
    assert attributes["ObjectSize"] == 1
    s3.delete_object(Bucket=name, Key="one")
    s3.delete_objects(Bucket=name, Delete={"Objects": [{"Key": "two"}, {"Key": "three"}]})
    assert s3.list_objects_v2(Bucket=name)["KeyCount"] == 0
    eventually(lambda: os.listdir(bucket) == [], "all links are gone")
    s3.delete_bucket(Bucket=name)
