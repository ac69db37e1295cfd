"""Failures of the store that a client sees as InternalError: the log has each under its request id, with its trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lmdb
import pytest

from kvfs.index.environment import MAX_DATABASES
from tests.support.gateway import Gateway, fails, gateway

BUCKET = "internal"
TRACE = "Traceback (most recent call last)"
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway() as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    return door.client()


def damage(door: Gateway, key: str) -> None:
    """Change the row of a key where LMDB does not notice, under the service that runs."""
    path = door.service.data / "index"
    size_bytes = (path / "data.mdb").stat().st_size
    name = f"{BUCKET}\0{key}".encode()
    with lmdb.open(str(path), max_dbs=MAX_DATABASES, map_size=size_bytes) as env:
        names = env.open_db(b"names", create=False)
        with env.begin(write=True) as txn:
            row = txn.get(name, db=names)
            assert row is not None
            txn.put(name, bytes([row[0]]) + bytes([row[8] ^ 1]) + row[2:], db=names)


def entries_of(door: Gateway, before: int) -> list[str]:
    """The entries of the log since `before`, each with the lines of its trace."""
    log = door.service.log()[before:]
    entries: list[str] = []
    for line in log.splitlines():
        if " ERROR " in line or " WARNING " in line or " INFO " in line:
            entries.append(line)
        elif entries:
            entries[-1] += "\n" + line
    return entries


def said_of(door: Gateway, request_id: str, before: int) -> list[str]:
    """The entries of the log since `before` that name a request, each with the lines of its trace."""
    return [entry for entry in entries_of(door, before) if request_id in entry]


def test_a_damaged_row_is_in_the_log_under_the_request_id(door: Gateway, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="damaged", Body=os.urandom(100))
    assert s3.get_object(Bucket=BUCKET, Key="damaged")["Body"].read()
    damage(door, "damaged")
    for call in (
        lambda: s3.get_object(Bucket=BUCKET, Key="damaged"),
        lambda: s3.list_objects_v2(Bucket=BUCKET),
        lambda: s3.copy_object(Bucket=BUCKET, Key="other", CopySource=f"{BUCKET}/damaged"),
    ):
        before = len(door.service.log())
        answer = fails(call, "InternalError", 500)
        assert "request id is in the log" in answer["Error"]["Message"]
        [entry] = said_of(door, answer["ResponseMetadata"]["RequestId"], before)
        assert TRACE in entry
        assert "Corrupt" in entry


def test_a_key_of_many_that_cannot_be_deleted_is_in_the_log(door: Gateway, s3: Any) -> None:
    for key in ("many/a", "many/b"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    damage(door, "many/b")
    before = len(door.service.log())
    objects = [{"Key": "many/a"}, {"Key": "many/b"}]
    answer = s3.delete_objects(Bucket=BUCKET, Delete={"Objects": objects})
    assert [each["Key"] for each in answer["Deleted"]] == ["many/a"]
    assert [(each["Key"], each["Code"]) for each in answer["Errors"]] == [("many/b", "InternalError")]
    [entry] = said_of(door, answer["ResponseMetadata"]["RequestId"], before)
    assert "many/b" in entry
    assert "Corrupt: " in entry
    said = [entry for entry in entries_of(door, before) if TRACE in entry]
    assert ["many/b" in entry and "Corrupt: " in entry for entry in said] == [True], "where it was met"


def test_what_a_client_is_told_is_not_in_the_log(door: Gateway, s3: Any) -> None:
    before = len(door.service.log())
    answer = fails(lambda: s3.get_object(Bucket=BUCKET, Key="missing"), "NoSuchKey", 404)
    assert said_of(door, answer["ResponseMetadata"]["RequestId"], before) == []
