"""Every operation of S3, done and refused: none keeps a slot of LMDB's table of readers, of worker or service."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lmdb
import pytest
from botocore import xform_name
from botocore.exceptions import ClientError

from gateway.protocol.action import Operation
from tests.support.block_batches import Block, open_blocks
from tests.support.gateway import OTHER_ACCESS, OTHER_SECRET, SECRET, Gateway, fails, gateway
from tests.support.raw_s3 import raw_client
from tests.support.stores import NAMESPACE

ROUNDS: Final = 15
MOST_SLOTS: Final = 2
"""Of one process: what it keeps for its next reads (`max_spare_txns`)."""
DIGEST: Final = b"\1" * 16
PART: Final = b"part"
TAGS: Final = {"Tagging": {"TagSet": [{"Key": "a", "Value": "b"}]}}
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def door() -> Iterator[Gateway]:
    with gateway() as found:
        yield found
        assert not found.service.complaints()


def calls(bucket: str, upload: str, another: str, etag: str) -> dict[Operation, dict[str, Any]]:
    """The arguments of boto3's calls, in an order in which all can be done; `upload` and `another` are begun."""
    here = {"Bucket": bucket}
    key = {**here, "Key": "k"}
    part = {**key, "UploadId": upload}
    source = {"CopySource": f"{bucket}/k"}
    return {
        Operation.HEAD_BUCKET: here,
        Operation.GET_BUCKET_LOCATION: here,
        Operation.PUT_OBJECT: {**key, "Body": b"bytes"},
        Operation.GET_OBJECT: key,
        Operation.HEAD_OBJECT: key,
        Operation.COPY_OBJECT: {**here, "Key": "copy", **source},
        Operation.GET_OBJECT_ATTRIBUTES: {**key, "ObjectAttributes": ["ETag"]},
        Operation.PUT_OBJECT_TAGGING: {**key, **TAGS},
        Operation.GET_OBJECT_TAGGING: key,
        Operation.DELETE_OBJECT_TAGGING: key,
        Operation.PUT_OBJECT_ACL: {**key, "ACL": "private"},
        Operation.GET_OBJECT_ACL: key,
        Operation.LIST_OBJECTS: here,
        Operation.LIST_OBJECTS_V2: here,
        Operation.LIST_OBJECT_VERSIONS: here,
        Operation.PUT_BUCKET_ACL: {**here, "ACL": "private"},
        Operation.GET_BUCKET_ACL: here,
        Operation.PUT_BUCKET_TAGGING: {**here, **TAGS},
        Operation.GET_BUCKET_TAGGING: here,
        Operation.DELETE_BUCKET_TAGGING: here,
        Operation.CREATE_MULTIPART_UPLOAD: {**here, "Key": "third"},
        Operation.LIST_MULTIPART_UPLOADS: here,
        Operation.UPLOAD_PART: {**part, "PartNumber": 1, "Body": PART},
        Operation.UPLOAD_PART_COPY: {**part, "PartNumber": 2, **source},
        Operation.LIST_PARTS: part,
        Operation.COMPLETE_MULTIPART_UPLOAD: {
            **part,
            "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": etag}]},
        },
        Operation.ABORT_MULTIPART_UPLOAD: {**key, "UploadId": another},
        Operation.DELETE_OBJECTS: {**here, "Delete": {"Objects": [{"Key": "copy"}]}},
        Operation.DELETE_OBJECT: key,
        Operation.DELETE_BUCKET: here,
    }


APART: Final = {
    Operation.LIST_BUCKETS,
    Operation.CREATE_BUCKET,
    Operation.MATCH,
    Operation.GET_BUCKET_CONFIGURATION,
}
"""Done beside those of `calls`."""


def ask(s3: Any, operation: Operation, arguments: dict[str, Any]) -> None:
    answer = getattr(s3, xform_name(operation.value))(**arguments)
    if "Body" in answer:
        answer["Body"].read()


def match(door: Gateway, bucket: str) -> int:
    with raw_client(door) as raw:
        return raw.ask("POST", f"/{bucket}?match=", json.dumps({"hashes": [DIGEST.hex()]}).encode()).status


def do_all(door: Gateway, s3: Any) -> None:
    s3.create_bucket(Bucket="there")
    upload, another = (s3.create_multipart_upload(Bucket="there", Key="k")["UploadId"] for _ in range(2))
    etag = hashlib.md5(PART).hexdigest()
    for operation, arguments in calls("there", upload, another, etag).items():
        if operation is not Operation.DELETE_BUCKET:
            ask(s3, operation, arguments)
    s3.get_bucket_versioning(Bucket="there")
    s3.list_buckets()
    assert match(door, "kv-s3") == 200
    for begun in s3.list_multipart_uploads(Bucket="there").get("Uploads", []):
        s3.abort_multipart_upload(Bucket="there", Key=begun["Key"], UploadId=begun["UploadId"])
    s3.delete_bucket(Bucket="there")


def refuse_all(door: Gateway, s3: Any) -> None:
    """A bucket that is missing; one that is another owner's; a signature that is wrong."""
    for operation, arguments in calls("missing", "none", "none", "none").items():
        with pytest.raises(ClientError):
            ask(s3, operation, arguments)
    fails(lambda: s3.get_bucket_versioning(Bucket="missing"), "NoSuchBucket", 404)
    fails(lambda: s3.create_bucket(Bucket="taken"), "BucketAlreadyExists", 409)
    fails(lambda: door.client(OTHER_ACCESS, SECRET).list_buckets(), "SignatureDoesNotMatch", 403)
    assert match(door, "missing") == 404


def slots(door: Gateway) -> Counter[int]:
    """How many rows of LMDB's table of readers each process has."""
    with lmdb.open(str(Path(door.service.data) / "index"), readonly=True, max_dbs=4) as env:
        rows = [line.split() for line in env.readers().splitlines()[1:]]
    return Counter(int(row[0]) for row in rows if row)


def test_no_operation_keeps_a_slot_of_lmdbs_table_of_readers(door: Gateway) -> None:
    assert calls("b", "", "", "").keys() | APART == set(Operation)
    s3 = door.client()
    door.client(OTHER_ACCESS, OTHER_SECRET).create_bucket(Bucket="taken")
    with door.service.client() as client:
        open_blocks(client, NAMESPACE, bucket="kv-s3").put([Block(DIGEST, b"block")])
    for _ in range(ROUNDS):
        do_all(door, s3)
        refuse_all(door, s3)
    found = slots(door)
    assert found.keys() <= {door.service.running.pid, *door.worker_pids()}
    assert found, "the door reads the index itself"
    assert max(found.values()) <= MOST_SLOTS, found
