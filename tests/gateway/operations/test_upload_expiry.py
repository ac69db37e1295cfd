"""Uploads that nobody completes: removed by what a worker does every few minutes, here at chosen times."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest
import trio

from gateway.backend.backend import Backend
from gateway.operations.uploads import Upload, expire, find_upload
from tests.support.gateway import Gateway, fails, gateway, until
from tests.support.raw_s3 import UNSIGNED, raw_client, signed_head
from tests.support.waits import WAIT_S

MIB, WEEK_S, HOUR_S = 1 << 20, 7 * 86400, 3600
BUCKET = "expiring"
Result = TypeVar("Result")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", params=["0", "512MiB"], ids=["dram", "nvme"])
def door(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    with gateway(dram="256MiB", nvme=request.param) as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    return door.client()


def expire_at(door: Gateway, after_s: float) -> int:
    """What a worker does, so long from now; how many uploads it removes."""

    return with_backend(door, lambda backend: expire(backend, WEEK_S, time.time_ns() + int(after_s * 1e9)))


def make_old(door: Gateway, upload_id: str) -> None:
    """Have an upload, and what was sent to it, be from before the expiry."""
    old_ns = time.time_ns() - (WEEK_S + HOUR_S) * 10**9

    async def change(backend: Backend) -> None:
        for prefix in ("uploads/", "parts/"):
            for key, found in (await backend.list(".kvfs-s3", prefix=prefix)).entries:
                if upload_id in key and found is not None:
                    await backend.set_metadata(".kvfs-s3", key, found, found.user_metadata, old_ns)

    with_backend(door, change)


def with_backend(door: Gateway, work: Callable[[Backend], Awaitable[Result]]) -> Result:
    """What `work` gives, of a gateway's session in this process."""

    async def run() -> Result:
        backend = Backend(door.service.data / "kvfs.sock")
        async with trio.open_nursery() as nursery:
            await nursery.start(backend.sessions.run)
            result = await work(backend)
            nursery.cancel_scope.cancel()
        return result

    return trio.run(run)


def begin(s3: Any, key: str, *bodies: bytes) -> dict[str, Any]:
    """An upload with these parts."""
    made = s3.create_multipart_upload(Bucket=BUCKET, Key=key)
    upload = {"Bucket": BUCKET, "Key": key, "UploadId": made["UploadId"]}
    for number, body in enumerate(bodies, 1):
        s3.upload_part(**upload, PartNumber=number, Body=body)
    return upload


def uploads(s3: Any) -> list[str]:
    return [each["Key"] for each in s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]


def parts(door: Gateway) -> list[str]:
    with door.service.client() as client:
        return [entry.key for entry in client.list(".kvfs-s3/") if entry.key.startswith("parts/")]


def kept_mib(door: Gateway) -> int:
    """On NVMe, of what may not be evicted, as parts may not."""
    with door.service.client() as client:
        return sum(int(tier.get("durable_bytes", 0)) // MIB for tier in client.status()["tiers"])


def dram_bytes(door: Gateway) -> int:
    with door.service.client() as client:
        tiers = client.status()["tiers"]
    return int(next(tier for tier in tiers if tier["name"] == "dram")["used_bytes"])


def objects(door: Gateway) -> int:
    with door.service.client() as client:
        return int(client.status()["objects"])


def test_an_upload_expires_with_its_parts_and_their_bytes(door: Gateway, s3: Any) -> None:
    before = dram_bytes(door), objects(door), kept_mib(door)
    upload = begin(s3, "old", os.urandom(8 * MIB), os.urandom(8 * MIB), b"tail")
    assert dram_bytes(door) >= before[0] + 16 * MIB
    assert kept_mib(door) == before[2] + (16 if door.service.nvme != "0" else 0)
    assert (expire_at(door, WEEK_S - HOUR_S), uploads(s3), len(parts(door))) == (0, ["old"], 3)
    assert (expire_at(door, WEEK_S + HOUR_S), uploads(s3), parts(door)) == (1, [], [])
    assert (dram_bytes(door), objects(door), kept_mib(door)) == before
    for call in (
        lambda: s3.upload_part(**upload, PartNumber=4, Body=b"x"),
        lambda: s3.list_parts(**upload),
        lambda: s3.abort_multipart_upload(**upload),
    ):
        fails(call, "NoSuchUpload", 404)
    assert parts(door) == []


def test_an_upload_without_parts_expires(door: Gateway, s3: Any) -> None:
    begin(s3, "empty")
    assert expire_at(door, WEEK_S - HOUR_S) == 0
    assert (expire_at(door, WEEK_S + HOUR_S), uploads(s3)) == (1, [])


def test_an_upload_that_is_written_to_stays(door: Gateway, s3: Any) -> None:
    """It was begun, and its last part came, longer ago than the expiry; another part is on its way."""
    first, second = os.urandom(5 * MIB), os.urandom(5 * MIB)
    upload = begin(s3, "long", first)
    make_old(door, upload["UploadId"])
    initiated = s3.list_multipart_uploads(Bucket=BUCKET)["Uploads"][0]["Initiated"]
    path = f"/{BUCKET}/long?partNumber=2&uploadId={upload['UploadId']}"
    with raw_client(door) as client:
        client.send(signed_head(door, "PUT", path, body=second, payload=UNSIGNED) + second[:MIB])
        _wait_for_draft(door)
        assert (expire_at(door, 0), len(parts(door))) == (0, 1)
        client.send(second[MIB:])
        assert client.response().status == 200
    assert expire_at(door, WEEK_S - HOUR_S) == 0
    assert s3.list_multipart_uploads(Bucket=BUCKET)["Uploads"][0]["Initiated"] == initiated
    listed = [{key: part[key] for key in ("PartNumber", "ETag")} for part in s3.list_parts(**upload)["Parts"]]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed})
    assert s3.get_object(Bucket=BUCKET, Key="long")["Body"].read() == first + second


def test_an_upload_that_nobody_comes_back_to_goes(door: Gateway, s3: Any) -> None:
    upload = begin(s3, "left", b"one")
    make_old(door, upload["UploadId"])
    s3.list_parts(**upload)
    assert (expire_at(door, 0), uploads(s3), parts(door)) == (1, [], [])


def test_a_part_that_comes_while_its_upload_expires_is_refused_and_leaves_nothing(
    door: Gateway, s3: Any
) -> None:
    upload, before = begin(s3, "racing"), dram_bytes(door)
    path = f"/{BUCKET}/racing?partNumber=1&uploadId={upload['UploadId']}"
    body = os.urandom(4 * MIB)
    with raw_client(door) as client:
        client.send(signed_head(door, "PUT", path, body=body, payload=UNSIGNED) + body[:MIB])
        _wait_for_draft(door)
        assert expire_at(door, WEEK_S + HOUR_S) == 1
        client.send(body[MIB:])
        answer = client.response()
        assert (answer.status, answer.code) == (404, "NoSuchUpload")
    assert (parts(door), dram_bytes(door)) == ([], before)


def _wait_for_draft(door: Gateway) -> None:
    end = time.monotonic() + WAIT_S
    with door.service.client() as client:
        while not client.status()["open_drafts"]:
            assert time.monotonic() < end


def test_parts_without_an_upload_are_removed(door: Gateway, s3: Any) -> None:
    kept = begin(s3, "kept", b"stays")
    orphan = begin(s3, "orphan", b"x" * MIB)
    with door.service.client() as client:
        client.remove(f".kvfs-s3/uploads/{orphan['UploadId']}/")
    assert len(parts(door)) == 2
    assert expire_at(door, 0) == 0
    assert parts(door) == [f"parts/{kept['UploadId']}/00001"]
    s3.abort_multipart_upload(**kept)


def left_beside(door: Gateway, s3: Any, key: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """A completed upload with its listed parts and ETag, its record and a part still there, as a kill leaves them."""
    upload = begin(s3, key, b"whole")
    listed = [
        {name: part[name] for name in ("PartNumber", "ETag")} for part in s3.list_parts(**upload)["Parts"]
    ]

    async def record(backend: Backend) -> Upload:
        found = await find_upload(backend, upload["UploadId"], BUCKET, key)
        assert found is not None
        return found

    found = with_backend(door, record)
    etag = s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed})["ETag"]
    with_backend(door, lambda backend: found.save(backend))
    s3.upload_part(**upload, PartNumber=1, Body=b"whole")
    assert (uploads(s3), len(parts(door))) == ([key], 1)
    return upload, listed, etag


def test_what_a_kill_left_beside_the_object_is_removed(door: Gateway, s3: Any) -> None:
    left_beside(door, s3, "beside")
    assert (expire_at(door, 0), uploads(s3), parts(door)) == (1, [], [])
    assert s3.get_object(Bucket=BUCKET, Key="beside")["Body"].read() == b"whole"


def test_a_start_removes_it() -> None:
    with gateway() as door:
        s3 = door.client()
        s3.create_bucket(Bucket=BUCKET)
        left_beside(door, s3, "started")
        orphan = begin(s3, "orphan", b"x")
        with door.service.client() as client:
            client.remove(f".kvfs-s3/uploads/{orphan['UploadId']}/")
        [pid] = door.worker_pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: parts(door) == [], door)


def test_a_completion_is_repeated_and_an_abort_refused_then(door: Gateway, s3: Any) -> None:
    upload, listed, etag = left_beside(door, s3, "again")
    assert s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed})["ETag"] == etag
    assert (uploads(s3), parts(door)) == ([], [])
    upload, listed, etag = left_beside(door, s3, "refused")
    fails(lambda: s3.abort_multipart_upload(**upload), "NoSuchUpload", 404)
    assert (uploads(s3), parts(door)) == ([], [])
    assert s3.get_object(Bucket=BUCKET, Key="refused")["ETag"] == etag


def test_uploads_of_a_bucket_that_is_gone_are_removed(door: Gateway, s3: Any) -> None:
    """As a kill between the removal of the bucket and that of its uploads leaves them."""
    s3.create_bucket(Bucket="short-lived")
    made = s3.create_multipart_upload(Bucket="short-lived", Key="k")
    s3.upload_part(Bucket="short-lived", Key="k", UploadId=made["UploadId"], PartNumber=1, Body=b"x")
    with door.service.client() as client:
        client.remove_bucket("short-lived")
    assert expire_at(door, 0) == 1
    assert parts(door) == []
