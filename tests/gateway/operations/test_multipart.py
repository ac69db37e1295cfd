"""Multipart uploads at the S3 endpoint: parts, checksums, completion, retries, races, expiry."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.operations.multipart import page_of
from gateway.operations.uploads import Upload
from gateway.protocol.list_pages import ListRequest
from tests.support.gateway import Gateway, fails, gateway

MIB = 1 << 20
PART = 5 * MIB
BUCKET = "multi"
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway(dram="512MiB") as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    return door.client()


def begin(s3: Any, key: str, **options: Any) -> dict[str, Any]:
    """The arguments that name a new upload."""
    made = s3.create_multipart_upload(Bucket=BUCKET, Key=key, **options)
    return {"Bucket": BUCKET, "Key": key, "UploadId": made["UploadId"]}


def put_parts(s3: Any, upload: dict[str, Any], *bodies: bytes, **options: Any) -> list[dict[str, Any]]:
    parts = []
    for number, body in enumerate(bodies, 1):
        made = s3.upload_part(**upload, PartNumber=number, Body=body, **options)
        sums = {name: value for name, value in made.items() if name.startswith("Checksum")}
        parts.append({"PartNumber": number, "ETag": made["ETag"], **sums})
    return parts


def complete(s3: Any, upload: dict[str, Any], parts: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = s3.complete_multipart_upload(
        **upload, MultipartUpload={"Parts": parts}, **options
    )
    return found


def leftovers(door: Gateway) -> list[str]:
    """What the gateway remembers of uploads."""
    with door.service.client() as client:
        return [entry.key for entry in client.list(".kvfs-s3/") if not entry.key.startswith("owners/")]


def test_parts_become_an_object(door: Gateway, s3: Any) -> None:
    bodies = [os.urandom(PART), os.urandom(PART), os.urandom(77)]
    upload = begin(s3, "big", Metadata={"a": "b"}, ContentType="text/x", Tagging="t=1")
    parts = put_parts(s3, upload, *bodies)
    listed = s3.list_parts(**upload)
    assert [(part["PartNumber"], part["Size"]) for part in listed["Parts"]] == [(1, PART), (2, PART), (3, 77)]
    page = s3.list_parts(**upload, MaxParts=1, PartNumberMarker=1)
    assert (page["Parts"][0]["PartNumber"], page["IsTruncated"], page["NextPartNumberMarker"]) == (2, True, 2)
    assert "big" not in [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])]
    done = complete(s3, upload, parts)
    md5 = hashlib.md5(b"".join(hashlib.md5(body).digest() for body in bodies)).hexdigest()
    assert done["ETag"] == f'"{md5}-3"'
    found = s3.get_object(Bucket=BUCKET, Key="big")
    assert found["Body"].read() == b"".join(bodies)
    assert (found["Metadata"], found["ContentType"], found["TagCount"]) == ({"a": "b"}, "text/x", 1)
    second = s3.get_object(Bucket=BUCKET, Key="big", PartNumber=2)
    assert (second["Body"].read() == bodies[1], second["PartsCount"]) == (True, 3)
    assert s3.head_object(Bucket=BUCKET, Key="big", PartNumber=3)["ContentLength"] == 77
    fails(lambda: s3.get_object(Bucket=BUCKET, Key="big", PartNumber=4), "InvalidPartNumber", 416)
    assert leftovers(door) == []
    assert complete(s3, upload, parts)["ETag"] == done["ETag"]
    fails(lambda: s3.list_parts(**upload), "NoSuchUpload", 404)


def test_parts_may_be_uploaded_again_in_any_order_and_left_out(s3: Any) -> None:
    upload = begin(s3, "again")
    bodies = {7: os.urandom(PART), 3: os.urandom(PART), 9: b"tail"}
    s3.upload_part(**upload, PartNumber=3, Body=b"old")
    s3.upload_part(**upload, PartNumber=5, Body=b"left out")
    tags = {n: s3.upload_part(**upload, PartNumber=n, Body=body)["ETag"] for n, body in bodies.items()}
    complete(s3, upload, [{"PartNumber": n, "ETag": tags[n].strip('"')} for n in sorted(bodies)])
    assert s3.get_object(Bucket=BUCKET, Key="again")["Body"].read() == bodies[3] + bodies[7] + bodies[9]


def test_wrong_completions_leave_the_upload(s3: Any) -> None:
    upload = begin(s3, "wrong")
    parts = put_parts(s3, upload, b"small", b"tail")
    fails(lambda: complete(s3, upload, parts), "EntityTooSmall", 400)
    fails(lambda: complete(s3, upload, parts[::-1]), "InvalidPartOrder", 400)
    fails(lambda: complete(s3, upload, [{**parts[0], "ETag": '"x"'}]), "InvalidPart", 400)
    fails(lambda: complete(s3, upload, [{**parts[0], "PartNumber": 9}]), "InvalidPart", 400)
    fails(lambda: complete(s3, upload, []), "MalformedXML", 400)
    fails(lambda: complete(s3, upload, parts[:1], MpuObjectSize=4), "InvalidRequest", 400)
    s3.put_object(Bucket=BUCKET, Key="wrong", Body=b"there")
    fails(lambda: complete(s3, upload, parts[:1], IfNoneMatch="*"), "PreconditionFailed", 412)
    complete(s3, upload, parts[:1], IfMatch=s3.head_object(Bucket=BUCKET, Key="wrong")["ETag"])
    assert s3.get_object(Bucket=BUCKET, Key="wrong")["Body"].read() == b"small"


def test_an_upload_that_is_aborted_is_gone(door: Gateway, s3: Any) -> None:
    upload = begin(s3, "aborted")
    parts = put_parts(s3, upload, b"x")
    s3.abort_multipart_upload(**upload)
    assert leftovers(door) == []
    for call in (
        lambda: s3.abort_multipart_upload(**upload),
        lambda: s3.upload_part(**upload, PartNumber=1, Body=b""),
        lambda: complete(s3, upload, parts),
        lambda: s3.list_parts(**{**upload, "UploadId": "no-such-id"}),
    ):
        fails(call, "NoSuchUpload", 404)


def test_uploads_are_listed(s3: Any) -> None:
    for upload in s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
        s3.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    uploads = [begin(s3, key) for key in ("l/a", "l/b", "l/b", "m")]
    listed = s3.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert sorted((each["Key"], each["UploadId"]) for each in listed) == sorted(
        (each["Key"], each["UploadId"]) for each in uploads
    )
    found, options = [], {"Bucket": BUCKET, "MaxUploads": 1}
    while True:
        page = s3.list_multipart_uploads(**options)
        found += [each["UploadId"] for each in page.get("Uploads", [])]
        if not page["IsTruncated"]:
            break
        options |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
    assert sorted(found) == sorted(each["UploadId"] for each in uploads)
    common = s3.list_multipart_uploads(Bucket=BUCKET, Delimiter="/")
    assert (common["CommonPrefixes"], [each["Key"] for each in common["Uploads"]]) == (
        [{"Prefix": "l/"}],
        ["m"],
    )
    for upload in uploads:
        s3.abort_multipart_upload(**upload)


@settings(max_examples=300, deadline=None)
@given(
    keys=st.lists(st.text("a/b", min_size=1, max_size=5), min_size=1, max_size=10),
    prefix=st.sampled_from(["", "a", "a/", "aa", "b"]),
    delimiter=st.sampled_from(["", "/", "a", "a/", "/a", "aa"]),
    limit=st.integers(1, 3),
)
@example(keys=["a/", "a/a"], prefix="a", delimiter="a/", limit=1)
@example(keys=["a/", "a/", "a/a"], prefix="", delimiter="a/", limit=1)
def test_pages_of_uploads_are_those_of_a_sorted_list(
    keys: list[str], prefix: str, delimiter: str, limit: int
) -> None:
    uploads = [Upload(f"{n:02}", BUCKET, key, "o", n) for n, key in enumerate(sorted(keys))]
    expected: list[tuple[str, str]] = []
    for each in uploads:
        cut = each.key.find(delimiter, len(prefix)) if delimiter else -1
        entry = (each.key, each.upload_id) if cut < 0 else (each.key[: cut + len(delimiter)], "")
        if each.key.startswith(prefix) and entry not in expected:
            expected.append(entry)
    listed: list[tuple[str, str]] = []
    request, id_marker, truncated = ListRequest(prefix, delimiter, limit, "", False), "", True
    while truncated:
        shown, prefixes, truncated = page_of(uploads, request, id_marker)
        entries = sorted([(each.key, each.upload_id) for each in shown] + [(each, "") for each in prefixes])
        assert len(entries) <= limit
        listed += entries
        if truncated:
            request, id_marker = replace(request, after=entries[-1][0]), entries[-1][1]
    assert listed == expected


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ("CRC32", "COMPOSITE"),
        ("CRC32C", "COMPOSITE"),
        ("SHA1", "COMPOSITE"),
        ("SHA256", "COMPOSITE"),
        ("CRC32", "FULL_OBJECT"),
        ("CRC64NVME", "FULL_OBJECT"),
    ],
)
def test_checksums_of_parts(s3: Any, algorithm: str, kind: str) -> None:
    bodies = [os.urandom(PART), os.urandom(1000)]
    upload = begin(s3, f"sum-{algorithm}-{kind}", ChecksumAlgorithm=algorithm, ChecksumType=kind)
    parts = put_parts(s3, upload, *bodies, ChecksumAlgorithm=algorithm)
    done = complete(s3, upload, parts)
    assert done["ChecksumType"] == kind
    found = s3.head_object(Bucket=BUCKET, Key=upload["Key"], ChecksumMode="ENABLED")
    assert found[f"Checksum{algorithm}"] == done[f"Checksum{algorithm}"]
    assert done[f"Checksum{algorithm}"].endswith("-2") == (kind == "COMPOSITE")
    if (algorithm, kind) == ("CRC32", "FULL_OBJECT"):
        whole = zlib.crc32(b"".join(bodies)).to_bytes(4, "big")
        assert done["ChecksumCRC32"] == base64.b64encode(whole).decode()
    attributes = s3.get_object_attributes(
        Bucket=BUCKET, Key=upload["Key"], ObjectAttributes=["ObjectParts", "Checksum", "ETag"]
    )
    assert attributes["ObjectParts"]["TotalPartsCount"] == 2


def test_parts_are_copied(s3: Any) -> None:
    body = os.urandom(2 * PART)
    s3.put_object(Bucket=BUCKET, Key="source", Body=body)
    upload = begin(s3, "copied")
    copies = [(1, f"bytes=0-{PART - 1}"), (2, f"bytes={PART}-{2 * PART - 1}")]
    parts = []
    for number, span in copies:
        made = s3.upload_part_copy(
            **upload, PartNumber=number, CopySource=f"{BUCKET}/source", CopySourceRange=span
        )
        parts.append({"PartNumber": number, "ETag": made["CopyPartResult"]["ETag"]})
    assert parts[0]["ETag"] == f'"{hashlib.md5(body[:PART]).hexdigest()}"'
    complete(s3, upload, parts)
    assert s3.get_object(Bucket=BUCKET, Key="copied")["Body"].read() == body
    upload = begin(s3, "copied-2")
    wrong = {
        **upload,
        "PartNumber": 1,
        "CopySource": f"{BUCKET}/source",
        "CopySourceRange": f"bytes=0-{2 * PART}",
    }
    fails(lambda: s3.upload_part_copy(**wrong), "InvalidArgument", 400)
    s3.abort_multipart_upload(**upload)


def test_completions_and_aborts_that_race(door: Gateway, s3: Any) -> None:
    clients = [door.client() for _ in range(6)]
    for _ in range(4):
        upload = begin(s3, "raced")
        parts = put_parts(s3, upload, b"whole")

        def finish(n: int, upload: dict[str, Any] = upload, parts: list[dict[str, Any]] = parts) -> str:
            try:
                if n % 3 == 2:
                    clients[n].abort_multipart_upload(**upload)
                    return "aborted"
                complete(clients[n], upload, parts)
            except ClientError as error:
                return str(error.response["Error"]["Code"])
            return "completed"

        with ThreadPoolExecutor(6) as pool:
            ends = list(pool.map(finish, range(6)))
        assert set(ends) <= {"completed", "aborted", "NoSuchUpload", "InvalidPart"}
        assert ("completed" in ends) != ("aborted" in ends)
        assert ("completed" in ends) == (s3.list_objects_v2(Bucket=BUCKET, Prefix="raced")["KeyCount"] == 1)
        s3.delete_object(Bucket=BUCKET, Key="raced")
        assert leftovers(door) == []


# --- objects larger than DRAM takes ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wide() -> Iterator[Gateway]:
    """A small DRAM tier, which takes objects of 16 MiB, over NVMe."""
    settings = 'large_buckets = ["wide*"]\nopaque_etags = ["wide-opaque"]'
    with gateway(dram="64MiB", nvme="512MiB", settings=settings) as found:
        for name in ("wide", "wide-opaque", "narrow"):
            found.client().create_bucket(Bucket=name)
        yield found
        assert not found.service.complaints()


@pytest.mark.parametrize("bucket", ["wide", "wide-opaque"])
def test_an_object_larger_than_dram_takes(wide: Gateway, bucket: str) -> None:
    s3, body = wide.client(), os.urandom(40 * MIB + 123)
    put = s3.put_object(Bucket=bucket, Key="k", Body=body, Metadata={"a": "b"}, ChecksumAlgorithm="CRC64NVME")
    if bucket == "wide":
        assert put["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    found = s3.get_object(Bucket=bucket, Key="k")
    assert (found["Metadata"], found["ContentLength"], found["ETag"]) == ({"a": "b"}, len(body), put["ETag"])
    assert found["Body"].read() == body
    start = 9 * MIB + 7
    part = s3.get_object(Bucket=bucket, Key="k", Range=f"bytes={start}-{start + 5 * MIB}")
    assert part["Body"].read() == body[start : start + 5 * MIB + 1]
    assert (wide.service.mount / bucket / "k").read_bytes() == body
    fails(
        lambda: s3.put_object(Bucket=bucket, Key="k", Body=body, IfNoneMatch="*"), "PreconditionFailed", 412
    )
    s3.delete_object(Bucket=bucket, Key="k")


def test_a_wrong_digest_of_a_large_object_leaves_nothing(wide: Gateway) -> None:
    s3, wrong = wide.client(), base64.b64encode(hashlib.md5(b"").digest()).decode()
    fails(
        lambda: s3.put_object(Bucket="wide", Key="bad", Body=bytes(20 * MIB), ContentMD5=wrong),
        "BadDigest",
        400,
    )
    fails(lambda: s3.head_object(Bucket="wide", Key="bad"), "404")
    with wide.service.client() as client:
        while client.status()["open_drafts"] or client.status()["sessions"] > 3:
            pass


def test_parts_become_an_object_larger_than_dram(wide: Gateway) -> None:
    s3 = wide.client()
    bodies = [os.urandom(10 * MIB) for _ in range(9)]
    made = s3.create_multipart_upload(Bucket="wide", Key="parts", ChecksumAlgorithm="CRC32")
    upload = {"Bucket": "wide", "Key": "parts", "UploadId": made["UploadId"]}
    parts = put_parts(s3, upload, *bodies, ChecksumAlgorithm="CRC32")
    done = complete(s3, upload, parts)
    md5 = hashlib.md5(b"".join(hashlib.md5(body).digest() for body in bodies)).hexdigest()
    assert done["ETag"] == f'"{md5}-9"'
    whole = hashlib.sha256(b"".join(bodies)).digest()
    found = s3.get_object(Bucket="wide", Key="parts")
    assert hashlib.sha256(found["Body"].read()).digest() == whole
    assert s3.get_object(Bucket="wide", Key="parts", PartNumber=4)["Body"].read() == bodies[3]
    assert leftovers(wide) == []


def test_a_large_object_stays_while_it_is_read_and_replaced(wide: Gateway) -> None:
    s3, old, new = wide.client(), os.urandom(30 * MIB), os.urandom(20 * MIB)
    s3.put_object(Bucket="wide", Key="moving", Body=old)
    reader = s3.get_object(Bucket="wide", Key="moving")["Body"]
    first = reader.read(1000)
    s3.put_object(Bucket="wide", Key="moving", Body=new)
    assert hashlib.sha256(first + reader.read()).digest() == hashlib.sha256(old).digest()
    assert s3.get_object(Bucket="wide", Key="moving")["Body"].read() == new


def test_seals_with_much_metadata_at_once(wide: Gateway) -> None:
    """Together they are more than one message of a session takes."""
    clients = [wide.client() for _ in range(8)]
    metadata = {f"n{n}": "x" * 180 for n in range(10)}
    tags = "&".join(f"{n}{'k' * 100}={'v' * 200}" for n in range(10))
    language = "x" * 4000

    def put(n: int) -> None:
        for each in range(10):
            clients[n].put_object(
                Bucket="narrow",
                Key=f"{n}-{each}-{'k' * 900}",
                Body=b"x",
                Metadata=metadata,
                Tagging=tags,
                ContentLanguage=language,
            )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(8)))
    assert clients[0].list_objects_v2(Bucket="narrow")["KeyCount"] == 80
