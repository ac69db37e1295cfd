"""Objects much larger than DRAM at the S3 endpoint: memory that stays bounded, and copies of them."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from kvfs import limits
from tests.support.gateway import Gateway, fails, gateway
from tests.support.raw_s3 import UNSIGNED, raw_client, signed_head

MIB, GIB = 1 << 20, 1 << 30
BUCKET = "wide"
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def wide_gateway() -> Iterator[Gateway]:
    """64 MiB of DRAM, which take objects of 16 MiB, over NVMe."""
    with gateway(dram="64MiB", nvme="2GiB") as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def wide() -> Iterator[Gateway]:
    with wide_gateway() as found:
        yield found


@pytest.fixture
def fresh() -> Iterator[Gateway]:
    """Whose peak of memory is its own."""
    with wide_gateway() as found:
        yield found


def memory_bytes(pid: int, name: str) -> int:
    """A line of a process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def write_file(path: Path, size_bytes: int) -> str:
    """A file without repetitions; its digest."""
    noise, digest = os.urandom(MIB - 8), hashlib.sha256()
    with path.open("wb") as file:
        for number in range(size_bytes // MIB):
            piece = number.to_bytes(8, "big") + noise
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_a_quarter_of_a_gibibyte_both_ways_through_64_mib(fresh: Gateway, tmp_path: Path) -> None:
    """Parallel parts that are together twice what one user may have in drafts, and ranges in parallel."""
    s3, file, size_bytes = fresh.client(), tmp_path / "file", 256 * MIB
    digest = write_file(file, size_bytes)
    [worker] = fresh.worker_pids()
    before = {pid: memory_bytes(pid, "VmHWM") for pid in (worker, fresh.service.pid)}
    transfer = TransferConfig(multipart_chunksize=8 * MIB, max_concurrency=8)
    s3.upload_file(str(file), BUCKET, "big", Config=transfer)
    file.unlink()
    s3.download_file(BUCKET, "big", str(file), Config=transfer)
    assert digest_of(file) == digest
    assert fresh.worker_pids() == [worker]
    grown = {pid: memory_bytes(pid, "VmHWM") - size for pid, size in before.items()}
    extents = limits.LARGE_DIRTY_EXTENTS + limits.LARGE_CACHED_EXTENTS
    assert grown[worker] < 32 * MIB, grown
    assert grown[fresh.service.pid] < extents * limits.MAX_EXTENT_BYTES + 32 * MIB, grown


# --- what is too large -------------------------------------------------------------------------------------
@pytest.mark.parametrize("size_bytes", [GIB + 1, 5 * GIB + 1])
def test_more_than_half_of_the_nvme_tier_is_refused_before_a_byte_is_sent(
    wide: Gateway, size_bytes: int
) -> None:
    headers = {"content-length": str(size_bytes), "expect": "100-continue"}
    with raw_client(wide) as client:
        client.send(signed_head(wide, "PUT", f"/{BUCKET}/k", headers=headers, body=None, payload=UNSIGNED))
        answer = client.response()
        assert (answer.status, answer.code) == (400, "EntityTooLarge")
        assert f"<MaxSizeAllowed>{GIB}</MaxSizeAllowed>" in answer.body.decode()


def test_without_an_nvme_tier_dram_sets_the_limit() -> None:
    with gateway(dram="128MiB") as door:
        s3 = door.client()
        s3.create_bucket(Bucket=BUCKET)
        s3.put_object(Bucket=BUCKET, Key="k", Body=bytes(17 * MIB))
        fails(lambda: s3.put_object(Bucket=BUCKET, Key="l", Body=bytes(32 * MIB + 1)), "EntityTooLarge", 400)
        source = {"Bucket": BUCKET, "Key": "k"}
        made = s3.create_multipart_upload(Bucket=BUCKET, Key="l")
        upload = {"Bucket": BUCKET, "Key": "l", "UploadId": made["UploadId"]}
        parts = [s3.upload_part_copy(**upload, PartNumber=n, CopySource=source) for n in (1, 2)]
        with pytest.raises(ClientError, match="largest part here has 33554432 bytes, a quarter of DRAM"):
            s3.upload_part(**upload, PartNumber=3, Body=bytes(32 * MIB + 1))
        listed = [
            {"PartNumber": n, "ETag": part["CopyPartResult"]["ETag"]} for n, part in enumerate(parts, 1)
        ]
        fails(
            lambda: s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed}),
            "EntityTooLarge",
            400,
        )


def test_the_mount_reads_what_it_would_not_write(wide: Gateway) -> None:
    """The bucket was not made for large files: the mount keeps its short ways there."""
    s3, body = wide.client(), os.urandom(20 * MIB)
    s3.put_object(Bucket=BUCKET, Key="k", Body=body)
    path = wide.service.mount / BUCKET / "k"
    assert (path.read_bytes(), os.getxattr(path.parent, "user.kvfs.large")) == (body, b"0")
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        path.open("r+b")
    path.unlink()
    fails(lambda: s3.head_object(Bucket=BUCKET, Key="k"), "404")


# --- copies ------------------------------------------------------------------------------------------------
def test_a_large_object_is_copied(wide: Gateway) -> None:
    s3, body = wide.client(), os.urandom(40 * MIB + 123)
    put = s3.put_object(Bucket=BUCKET, Key="a", Body=body, Metadata={"a": "b"}, ChecksumAlgorithm="CRC32")
    source = {"Bucket": BUCKET, "Key": "a"}
    made = s3.copy_object(Bucket=BUCKET, Key="b", CopySource=source)
    assert made["CopyObjectResult"]["ETag"] == put["ETag"]
    found = s3.get_object(Bucket=BUCKET, Key="b", ChecksumMode="ENABLED")
    assert (found["Metadata"], found["ChecksumCRC32"]) == ({"a": "b"}, put["ChecksumCRC32"])
    assert found["Body"].read() == body
    # A digest that the source has not is taken on the way.
    made = s3.copy_object(Bucket=BUCKET, Key="c", CopySource=source, ChecksumAlgorithm="SHA256")
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    assert made["CopyObjectResult"]["ChecksumSHA256"] == digest
    wrong = {**source, "Key": "none"}
    fails(lambda: s3.copy_object(Bucket=BUCKET, Key="d", CopySource=wrong), "NoSuchKey", 404)
    fails(
        lambda: s3.copy_object(Bucket=BUCKET, Key="d", CopySource=source, CopySourceIfMatch='"other"'),
        "PreconditionFailed",
        412,
    )
    fails(lambda: s3.head_object(Bucket=BUCKET, Key="d"), "404")


def test_a_large_object_is_given_other_metadata(wide: Gateway) -> None:
    s3, body = wide.client(), os.urandom(20 * MIB)
    put = s3.put_object(Bucket=BUCKET, Key="a", Body=body, Metadata={"a": "b"})
    source = {"Bucket": BUCKET, "Key": "a"}
    s3.copy_object(
        Bucket=BUCKET, Key="a", CopySource=source, Metadata={"c": "d"}, MetadataDirective="REPLACE"
    )
    found = s3.get_object(Bucket=BUCKET, Key="a")
    assert (found["Metadata"], found["ETag"], found["Body"].read() == body) == ({"c": "d"}, put["ETag"], True)


def test_parts_are_copied_from_a_large_object(wide: Gateway) -> None:
    """All at once: together they need more drafts than there may be, and none waits for another for ever."""
    s3, body = wide.client(max_pool_connections=16, retries={"max_attempts": 0}), os.urandom(100 * MIB + 5)
    s3.put_object(Bucket=BUCKET, Key="source", Body=body)
    made = s3.create_multipart_upload(Bucket=BUCKET, Key="copied")
    upload = {"Bucket": BUCKET, "Key": "copied", "UploadId": made["UploadId"]}
    step = 7 * MIB
    spans = [(at, min(at + step, len(body)) - 1) for at in range(0, len(body), step)]

    def copy(number: int, first: int, last: int) -> dict[str, Any]:
        found = s3.upload_part_copy(
            **upload,
            PartNumber=number,
            CopySource=f"{BUCKET}/source",
            CopySourceRange=f"bytes={first}-{last}",
        )
        etag = found["CopyPartResult"]["ETag"]
        assert etag == f'"{hashlib.md5(body[first : last + 1]).hexdigest()}"'
        return {"PartNumber": number, "ETag": etag}

    with ThreadPoolExecutor(16) as pool:
        parts = list(pool.map(lambda each: copy(each[0], *each[1]), enumerate(spans, 1)))
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert s3.get_object(Bucket=BUCKET, Key="copied")["Body"].read() == body
    wrong = {**upload, "PartNumber": 1, "CopySource": f"{BUCKET}/source"}
    fails(lambda: s3.upload_part_copy(**wrong, CopySourceRange=f"bytes=0-{len(body)}"), "NoSuchUpload", 404)
    part_of_it_becomes_a_small_object(s3, body)


def part_of_it_becomes_a_small_object(s3: Any, body: bytes) -> None:
    made = s3.create_multipart_upload(Bucket=BUCKET, Key="piece")
    upload = {"Bucket": BUCKET, "Key": "piece", "UploadId": made["UploadId"]}
    source: dict[str, Any] = {**upload, "PartNumber": 1, "CopySource": f"{BUCKET}/source"}
    fails(
        lambda: s3.upload_part_copy(**source, CopySourceRange=f"bytes=0-{len(body)}"), "InvalidArgument", 400
    )
    found = s3.upload_part_copy(**source, CopySourceRange=f"bytes={9 * MIB + 1}-{12 * MIB}")
    etag = found["CopyPartResult"]["ETag"]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    assert s3.get_object(Bucket=BUCKET, Key="piece")["Body"].read() == body[9 * MIB + 1 : 12 * MIB + 1]


@pytest.mark.parametrize(("client", "part_bytes"), [("s3fs", 50 * MIB), ("DuckDB", 84 * MIB)])
def test_parts_that_no_slot_holds(wide: Gateway, client: str, part_bytes: int) -> None:
    """Parts of the sizes that these clients' parts have by default, where slots hold 16 MiB; and a small last one."""
    s3 = wide.client()
    body = os.urandom(MIB) * (part_bytes // MIB)
    made = s3.create_multipart_upload(Bucket=BUCKET, Key=client)
    upload = {"Bucket": BUCKET, "Key": client, "UploadId": made["UploadId"]}
    bodies = {1: body, 2: body[: 6 * MIB], 3: b"end"}
    tags = {n: s3.upload_part(**upload, PartNumber=n, Body=part)["ETag"] for n, part in bodies.items()}
    assert tags[1] == f'"{hashlib.md5(body).hexdigest()}"'
    tags[1] = s3.upload_part(**upload, PartNumber=1, Body=body)["ETag"]
    s3.complete_multipart_upload(
        **upload, MultipartUpload={"Parts": [{"PartNumber": n, "ETag": tag} for n, tag in tags.items()]}
    )
    assert s3.get_object(Bucket=BUCKET, Key=client)["Body"].read() == b"".join(bodies.values())
    copied = s3.create_multipart_upload(Bucket=BUCKET, Key="copy")
    upload = {"Bucket": BUCKET, "Key": "copy", "UploadId": copied["UploadId"]}
    part = s3.upload_part_copy(**upload, PartNumber=1, CopySource=f"{BUCKET}/{client}")["CopyPartResult"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    s3.complete_multipart_upload(**upload, MultipartUpload=parts)
    assert s3.get_object(Bucket=BUCKET, Key="copy")["Body"].read() == b"".join(bodies.values())
    for key in (client, "copy"):
        s3.delete_object(Bucket=BUCKET, Key=key)


def test_copies_give_all_back(wide: Gateway) -> None:
    s3 = wide.client()
    s3.put_object(Bucket=BUCKET, Key="a", Body=bytes(20 * MIB))
    for key in "bcd":
        s3.copy_object(Bucket=BUCKET, Key=key, CopySource=f"{BUCKET}/a")
    fails(lambda: s3.copy_object(Bucket=BUCKET, Key="a/", CopySource=f"{BUCKET}/a"), "EntityTooLarge", 400)
    with wide.service.client() as client:
        while client.status()["open_drafts"] or client.status()["sessions"] > 3:
            pass
    for key in "abcd":
        s3.delete_object(Bucket=BUCKET, Key=key)
