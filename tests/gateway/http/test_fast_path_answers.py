"""Plain requests that are answered without Python: the same answers as on the general path; the waits in between."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
from awscrt.checksums import crc64nvme
from trio.testing import MockClock

from kvfs import limits
from kvfs._native.s3.fast_path import Reads
from kvfs.http.transports import PlainTransport, Sweeper
from tests.support.gateway import OTHER_ACCESS, OTHER_SECRET, READER_ACCESS, READER_SECRET, Gateway, gateway
from tests.support.held_ports import HeldPort
from tests.support.raw_s3 import UNSIGNED, RawClient, Response, raw_client, signed_head
from tests.support.waits import WAIT_S

BUCKET = "front"
KIB, MIB = 1 << 10, 1 << 20
ASKS = 5
"""Until one is answered in front: the general path is needed once, and again when it no longer remembers whose the
bucket is, which it does for a second."""
ADMIN = HeldPort()


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    settings = f'admin = "127.0.0.1:{ADMIN.number}"\nopaque_etags = ["plain", "refused"]'
    with gateway(settings=settings) as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found
        assert not found.service.complaints()


@pytest.fixture
def raw(door: Gateway) -> Iterator[RawClient]:
    with raw_client(door) as client:
        yield client


def counted(what: str) -> int:
    """A counter of the gateway's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ADMIN.number}/metrics", timeout=WAIT_S) as answer:
        text = answer.read().decode()
    found = re.search(rf"^kvfs_s3_{what} (\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def front_reads() -> int:
    """How many requests were answered without Python."""
    return counted("front_reads_total")


def both(raw: RawClient, method: str, path: str, **options: object) -> list[Response]:
    """The answers without Python and from the general path, which an unknown header asks for."""
    for _ in range(ASKS):
        before = front_reads()
        front = raw.ask(method, path, **options)  # type: ignore[arg-type]
        if front_reads() == before + 1:
            break
    else:
        pytest.fail("never answered without Python")
    before = front_reads()
    general = raw.ask(method, path, unsigned={"X-Unknown": "1"}, **options)  # type: ignore[arg-type]
    assert front_reads() == before
    for answer in (front, general):
        assert answer.headers.pop("x-amz-request-id") == answer.headers.pop("x-amz-id-2")
        for changing in ("date", "x-kvfs-hits"):
            assert answer.headers.pop(changing)
    return [front, general]


@pytest.mark.parametrize("size", [0, 1, 4 * KIB, 64 * KIB, 64 * KIB + 1, 5 * MIB])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_both_ways_answer_the_same(door: Gateway, raw: RawClient, size: int, method: str) -> None:
    body = os.urandom(size)
    door.client().put_object(
        Bucket=BUCKET,
        Key=f"same {size}",
        Body=body,
        ContentType="text/plain; charset=x",
        CacheControl="no-store",
        Metadata={"a": "b", "c": "d e"},
        ChecksumAlgorithm="CRC64NVME",
    )
    for headers in ({}, {"x-amz-checksum-mode": "ENABLED"}):
        front, general = both(raw, method, f"/{BUCKET}/same%20{size}", headers=headers)
        assert front == general
        assert front.status == 200
        assert front.body == (body if method == "GET" else b"")
        assert list(front.headers) == list(general.headers)
        assert ("x-amz-checksum-crc64nvme" in front.headers) == bool(headers)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("expects", [False, True])
@pytest.mark.parametrize("bucket", ["plain", BUCKET])
def test_a_plain_put_and_any_other_leave_the_same(
    door: Gateway, raw: RawClient, bucket: str, checked: bool, expects: bool
) -> None:
    s3 = door.client()
    s3.create_bucket(Bucket="plain")
    body = os.urandom(300 * KIB)
    said = b64encode(crc64nvme(body).to_bytes(8, "big")).decode()
    headers = {"x-amz-checksum-crc64nvme": said} if checked else {}
    answers = []
    for unknown in ({}, {"X-Unknown": "1"}):
        unsigned = {**unknown, **({"Expect": "100-continue"} if expects else {})}
        before, in_front = counted("front_writes_total"), not unknown and bucket != BUCKET
        for number in range(ASKS):
            options = {"headers": headers, "unsigned": unsigned, "payload": UNSIGNED}
            raw.send(signed_head(door, "PUT", f"/{bucket}/put", body=body, **options))  # type: ignore[arg-type]
            if expects:
                assert raw.response().status == 100
            raw.send(body)
            answer = raw.response()
            if number and (not in_front or counted("front_writes_total") > before):
                break
        assert (counted("front_writes_total") > before) == in_front
        for changing in ("date", "x-amz-request-id", "x-amz-id-2"):
            assert answer.headers.pop(changing)
        etag = answer.headers.pop("etag")
        assert etag == raw.ask("HEAD", f"/{bucket}/put").headers["etag"]
        found = s3.get_object(Bucket=bucket, Key="put", ChecksumMode="ENABLED")
        assert found["Body"].read() == body
        kept = {name: found.get(name) for name in ("ChecksumCRC64NVME", "ContentType", "Metadata")}
        answers.append((answer, kept, etag if bucket == BUCKET else len(etag)))
    assert answers[0] == answers[1]
    assert (answers[0][1]["ChecksumCRC64NVME"] == said) == checked


def test_a_plain_put_is_refused_like_any_other(door: Gateway, raw: RawClient) -> None:
    s3 = door.client()
    s3.create_bucket(Bucket="refused")
    said = b64encode(bytes(8)).decode()
    for _ in range(2):
        wrong = raw.ask(
            "PUT", "/refused/k", b"x", headers={"x-amz-checksum-crc64nvme": said}, payload=UNSIGNED
        )
        assert (wrong.status, wrong.code) == (400, "BadDigest")
        assert raw.ask("PUT", "/nowhere/k", b"x", payload=UNSIGNED).code == "NoSuchBucket"
        bad = raw.ask("PUT", "/refused/k", b"x", headers={"x-amz-checksum-crc64nvme": "x"}, payload=UNSIGNED)
        assert (bad.status, bad.code) == (400, "InvalidRequest")
        reader = raw.ask(
            "PUT", "/refused/k", b"x", payload=UNSIGNED, access=READER_ACCESS, secret=READER_SECRET
        )
        assert reader.code == "AccessDenied"
        assert raw.ask("PUT", "/refused/k", b"x" * 10, payload=UNSIGNED).status == 200
        raw.ask("GET", "/refused/k")
    with raw_client(door) as client:
        client.send(signed_head(door, "PUT", "/refused/k", body=b"12345", payload=UNSIGNED) + b"123")
        client.socket.shutdown(socket.SHUT_WR)
        assert client.response().code == "IncompleteBody"
    assert raw.ask("GET", "/refused/k").body == b"x" * 10


def test_a_bucket_of_another_owner_stays_closed(door: Gateway, raw: RawClient) -> None:
    """Also when it was the reader's own a moment ago."""
    s3, other = door.client(), door.client(OTHER_ACCESS, OTHER_SECRET)
    s3.create_bucket(Bucket="changing")
    s3.put_object(Bucket="changing", Key="k", Body=b"mine")
    front, _ = both(raw, "GET", "/changing/k")
    assert front.body == b"mine"
    with raw_client(door) as stranger:
        for _ in range(3):
            denied = stranger.ask("GET", "/changing/k", access=OTHER_ACCESS, secret=OTHER_SECRET)
            assert denied.code == "AccessDenied"
    s3.delete_object(Bucket="changing", Key="k")
    s3.delete_bucket(Bucket="changing")
    other.create_bucket(Bucket="changing")
    other.put_object(Bucket="changing", Key="k", Body=b"theirs")
    for _ in range(3):
        assert raw.ask("GET", "/changing/k").code == "AccessDenied"
        assert raw.ask("PUT", "/changing/k", b"x", payload=UNSIGNED).code == "AccessDenied"


def test_what_the_other_doors_wrote_reads_the_same(door: Gateway, raw: RawClient) -> None:
    with door.service.client() as client:
        client.put(f"{BUCKET}/other", b"by the client")
    front, general = both(raw, "GET", f"/{BUCKET}/other")
    assert front == general
    assert front.body == b"by the client"


def test_requests_of_all_kinds_in_one_packet_are_answered_in_order(door: Gateway, raw: RawClient) -> None:
    big = os.urandom(3 * MIB)
    raw.ask("PUT", f"/{BUCKET}/big", big)
    raw.ask("GET", f"/{BUCKET}/big")
    wire = b""
    for n in range(4):
        body = b"x" * n
        wire += signed_head(door, "PUT", f"/{BUCKET}/mixed", body=body) + body
        wire += signed_head(door, "GET", f"/{BUCKET}/mixed")
        wire += signed_head(door, "HEAD", f"/{BUCKET}/mixed")
        wire += signed_head(door, "GET", f"/{BUCKET}/mixed", unsigned={"Range": "bytes=0-0"})
        wire += signed_head(door, "GET", f"/{BUCKET}/big")
        wire += signed_head(door, "GET", f"/{BUCKET}/missing")
    raw.send(wire)
    for n in range(4):
        assert raw.response().status == 200
        assert raw.response().body == b"x" * n
        assert raw.response(head_only=True).headers["content-length"] == str(n)
        ranged = raw.response()
        assert (ranged.status, ranged.body) == ((206, b"x") if n else (416, ranged.body))
        assert raw.response().body == big
        assert raw.response().status == 404


def test_a_head_cut_anywhere_is_answered(door: Gateway, raw: RawClient) -> None:
    raw.ask("PUT", f"/{BUCKET}/cut", b"whole")
    head = signed_head(door, "GET", f"/{BUCKET}/cut")
    for cut in range(1, len(head)):
        raw.send(head[:cut])
        raw.send(head[cut:])
        assert raw.response().body == b"whole"


def test_what_is_read_follows_every_change_of_the_name(door: Gateway, raw: RawClient) -> None:
    s3 = door.client()
    path = f"/{BUCKET}/changes"
    for n in range(5):
        s3.put_object(Bucket=BUCKET, Key="changes", Body=b"v%d" % n, Metadata={"n": str(n)})
        for _ in range(3):
            answer = raw.ask("GET", path)
            assert (answer.body, answer.headers["x-amz-meta-n"]) == (b"v%d" % n, str(n))
        s3.delete_object(Bucket=BUCKET, Key="changes")
        assert raw.ask("GET", path).code == "NoSuchKey"
    s3.put_object(Bucket=BUCKET, Key="changes/", Body=b"a marker")
    assert raw.ask("GET", path + "/").body == b"a marker"
    assert raw.ask("GET", path).status == 404


def test_hits_are_counted(door: Gateway, raw: RawClient) -> None:
    raw.ask("PUT", f"/{BUCKET}/counted", b"x")
    before = front_reads()
    for _ in range(20):
        raw.ask("GET", f"/{BUCKET}/counted")
    assert front_reads() > before
    end = time.monotonic() + WAIT_S
    while int(raw.ask("HEAD", f"/{BUCKET}/counted").headers["x-kvfs-hits"]) < 20:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_reader_that_stops_and_goes_on_gets_every_byte(door: Gateway) -> None:
    body = os.urandom(24 * MIB)
    door.client().put_object(Bucket=BUCKET, Key="slow", Body=body)
    with raw_client(door) as client:
        client.ask("HEAD", f"/{BUCKET}/slow")
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.send(signed_head(door, "GET", f"/{BUCKET}/slow") * 2)
        with raw_client(door) as other:
            assert other.ask("HEAD", f"/{BUCKET}/slow").status == 200
        assert client.response().body == body
        assert client.response().body == body


def test_descriptors_go_with_the_readers(door: Gateway) -> None:
    door.client().put_object(Bucket=BUCKET, Key="left", Body=bytes(24 * MIB))
    [pid] = door.worker_pids()
    with raw_client(door) as client:
        client.ask("HEAD", f"/{BUCKET}/left")
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(20):
        with raw_client(door) as client:
            client.send(signed_head(door, "GET", f"/{BUCKET}/left"))
            client.socket.recv(1)
    end = time.monotonic() + WAIT_S
    while len(os.listdir(f"/proc/{pid}/fd")) > before:
        assert time.monotonic() < end
        time.sleep(0.01)


# --- time --------------------------------------------------------------------------------------------------
@contextmanager
def parked(sweeper: Sweeper) -> Iterator[tuple[PlainTransport, socket.socket]]:
    """A connection's end here, and the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        ours = listener.accept()[0]
    with ours, client:
        yield PlainTransport(ours, "test", sweeper), client


@pytest.mark.parametrize("quiet_s", [limits.FIRST_BYTE_S, limits.KEEP_ALIVE_S])
async def test_a_parked_connection_is_quiet_for_so_long_as_it_may(
    autojump_clock: MockClock, quiet_s: float
) -> None:
    """A new one less than one that had a request."""
    reads, sweeper = Reads(1), Sweeper()

    async def serve() -> None:
        while True:
            await trio.lowlevel.wait_readable(reads.fileno())
            for task in reads.serve(0.0, trio.current_time(), b"", 0.001):
                assert isinstance(task, trio.lowlevel.Task)
                trio.lowlevel.reschedule(task)

    with parked(sweeper) as (transport, _):
        assert transport.quiet_s == limits.FIRST_BYTE_S
        transport.quiet_s = quiet_s
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sweeper.run)
            nursery.start_soon(serve)
            idle = await transport.park(reads)
            took_s = trio.current_time() - began
            nursery.cancel_scope.cancel()
    assert (idle.data, idle.rest, idle.file, idle.gone, idle.task) == (b"", b"", -1, False, None)
    assert quiet_s <= took_s <= quiet_s + 4


async def test_a_cancelled_wait_is_not_watched_any_more() -> None:
    reads = Reads(1)
    with parked(Sweeper()) as (transport, client):
        with trio.move_on_after(0.01):
            await transport.park(reads)
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        assert reads.serve(0.0, 0.0, b"", 0.001) == []
