"""Writers of one key at the S3 endpoint: each is answered with what it sealed itself, whatever came after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.door import need_mount
from tests.support.gateway import Gateway, gateway

WRITERS, ROUNDS = 8, 25
BUCKET = "opaque-race"
"""Its ETags are made of the objects' ids: no two writes of a key have the same."""
DURABLE = "durable"
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""botocore leaves sockets to the garbage collector."""


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway(settings='opaque_etags = ["opaque-*"]', nvme="64MiB") as found:
        with found.service.client() as client:
            client.create_bucket(DURABLE, durable=True)
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    client = door.client(max_pool_connections=WRITERS)
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key="source", Body=b"source", Metadata={"kvfs-pin": "0"})
    return client


def _put(s3: Any) -> str:
    return str(s3.put_object(Bucket=BUCKET, Key="k", Body=os.urandom(64), Metadata={"a": "b"})["ETag"])


def _put_plain(s3: Any) -> str:
    return str(s3.put_object(Bucket=BUCKET, Key="k", Body=os.urandom(64))["ETag"])


def _copy(s3: Any) -> str:
    source = {"Bucket": BUCKET, "Key": "source"}
    return str(s3.copy_object(Bucket=BUCKET, Key="k", CopySource=source)["CopyObjectResult"]["ETag"])


def _complete(s3: Any) -> str:
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key="k")["UploadId"]
    where = {"Bucket": BUCKET, "Key": "k", "UploadId": upload}
    part = s3.upload_part(**where, PartNumber=1, Body=os.urandom(64))
    parts = [{"ETag": part["ETag"], "PartNumber": 1}]
    return str(s3.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})["ETag"])


@pytest.mark.parametrize("write", [_put, _put_plain, _copy, _complete])
def test_racing_writes_are_answered_with_their_own_etags(s3: Any, write: Callable[[Any], str]) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        etags = list(pool.map(lambda _: write(s3), range(WRITERS * ROUNDS)))
    assert len(set(etags)) == len(etags)
    assert s3.head_object(Bucket=BUCKET, Key="k")["ETag"] in etags


def test_a_copy_that_was_made_succeeds_though_its_key_is_removed_at_once(s3: Any) -> None:
    def remove(_: int) -> None:
        s3.delete_object(Bucket=BUCKET, Key="k")

    with ThreadPoolExecutor(WRITERS) as pool:
        removals = pool.map(remove, range(WRITERS * ROUNDS))
        copies = list(pool.map(lambda _: _copy(s3), range(WRITERS * ROUNDS)))
        assert list(removals)
    assert len(set(copies)) == len(copies)


def test_a_pin_is_of_the_object_that_asked_for_it(door: Gateway, s3: Any) -> None:
    """A rival that replaces a pinned object at once is not pinned by it."""

    def put(number: int) -> None:
        pin = {"kvfs-pin": "1"} if number % 2 else {}
        s3.put_object(Bucket=BUCKET, Key="pinned", Body=b"x", Metadata=pin)

    client = door.service.client()
    with ThreadPoolExecutor(WRITERS) as pool:
        for _ in range(ROUNDS):
            list(pool.map(put, range(WRITERS)))
            wants = "kvfs-pin" in s3.head_object(Bucket=BUCKET, Key="pinned")["Metadata"]
            assert client.stat(f"{BUCKET}/pinned").pinned is wants


@pytest.mark.parametrize("bucket", [BUCKET, DURABLE])
@pytest.mark.parametrize("replaces", ["written again", "renamed over"])
def test_what_was_answered_on_the_mount_is_read_at_once(
    door: Gateway, s3: Any, replaces: str, bucket: str
) -> None:
    need_mount()
    path = door.service.mount / bucket / "file"
    for number in range(60):
        data = b"%d" % number
        if replaces == "written again":
            path.write_bytes(data)
        else:
            path.with_name("new").write_bytes(data)
            path.with_name("new").rename(path)
        assert s3.get_object(Bucket=bucket, Key="file")["Body"].read() == data
