"""Plain reads that are answered without Python: the same requests, the same answers, as on the general path."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from urllib.parse import quote

import pytest
import trio
from awscrt.checksums import crc64nvme
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from gateway.auth.sigv4 import PayloadMode, verify
from gateway.protocol import addressing, checksums, conditions, metadata, routing
from gateway.protocol.action import Operation
from gateway.protocol.checksums import Algorithm
from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request
from kvfs import limits
from kvfs._native.s3.fast_path import Reads
from kvfs.http.head import BadHead, parse_head
from kvfs.http.transports import PlainTransport, Sweeper
from tests.support.gateway import OTHER_ACCESS, OTHER_SECRET, READER_ACCESS, READER_SECRET, Gateway, gateway
from tests.support.held_ports import HeldPort
from tests.support.raw_s3 import UNSIGNED, RawClient, Response, raw_client, signed_head
from tests.support.s3 import CREDENTIAL, CREDENTIALS, HOST, REGION, signed, signing_time
from tests.support.waits import WAIT_S

BUCKET = "front"
EMPTY = sha256(b"").hexdigest()
KIB, MIB = 1 << 10, 1 << 20
ASKS = 5
"""Until one is answered in front: the general path is needed once, and again when it no longer remembers whose the
bucket is, which it does for a second."""


# --- what is recognised ------------------------------------------------------------------------------------
def rendered(request: Request, method: str | None = None) -> bytes:
    """Render a request as a client sends it."""
    lines = [b"%s %s HTTP/1.1" % ((method or request.method).encode(), request.raw_path)]
    if request.raw_query:
        lines[0] = lines[0].replace(b" HTTP", b"?" + request.raw_query + b" HTTP")
    lines += [name + b": " + value for name, value in request.headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def learned(
    *requests: Request, bucket: bytes = b"", may: Callable[[bytes, bool], bool] = lambda *_: True
) -> Reads:
    """Reads that know the hosts and signers of these requests."""
    reads = Reads(1)
    for request in requests:
        verified = verify(request, CREDENTIALS, signing_time(request), REGION)
        raw = request.header_bytes(b"authorization") or b""
        signed_headers = raw.partition(b"SignedHeaders=")[2].partition(b",")[0]
        reads.learn_host(request.header_bytes(b"host") or b"", bucket)
        signer = raw.rpartition(b"Signature=")[0]
        reads.learn_signer(
            signer, verified.signing_key, verified.scope.encode(), signed_headers, CREDENTIAL, may
        )
    return reads


def general(head: bytes, now_s: float) -> tuple[bytes, bytes, int] | None:
    """What the general path takes a head for, in the same form; None for all but an allowed plain request."""
    try:
        found = parse_head(head)
        is_write = found.method == "PUT"
        if found.chunked or not found.keep_alive or is_write != (found.content_length > 0):
            return None
        path, _, query = found.target.partition(b"?")
        host = next(value for name, value in found.headers if name == b"host").decode("latin-1")
        request = Request(found.method, path, query, found.headers, host)
        verified = verify(request, CREDENTIALS, now_s, REGION)
        action = routing.route(request, addressing.resolve(request))
        wanted = checksums.wanted(request)
        said = metadata.from_request(request)
    except (BadHead, S3Error):
        return None
    if action.operation not in (Operation.GET_OBJECT, Operation.HEAD_OBJECT, Operation.PUT_OBJECT) or query:
        return None
    if is_write and (verified.mode is not PayloadMode.UNSIGNED or said != metadata.ObjectMetadata()):
        return None
    if is_write and wanted.algorithm not in (None, Algorithm.CRC64NVME):
        return None
    if conditions.from_headers(request) or (not is_write and found.expects_continue):
        return None
    assert action.bucket is not None
    assert action.key is not None
    return found.method.encode(), f"{action.bucket}\0{action.key}".encode(), len(head)


KEYS = st.text("abcXYZ019/-_.~ %+=:@()", min_size=1, max_size=30).filter(lambda key: not key.endswith("/"))
METHODS = st.sampled_from(["GET", "HEAD"])


@settings(max_examples=300, deadline=None)
@given(KEYS, METHODS, st.sampled_from([EMPTY, UNSIGNED]), st.booleans())
def test_what_botocore_signs_is_recognised(key: str, method: str, payload: str, checksum: bool) -> None:
    headers = {"x-amz-checksum-mode": "ENABLED", "User-Agent": "Boto3/1"} if checksum else {}
    made = signed(f"http://{HOST}/bucket/{quote(key, safe='/~')}", method, headers=headers, payload=payload)
    head, now_s = rendered(made), signing_time(made)
    assert learned(made).recognise(head, now_s) == general(head, now_s) is not None


PUTS = st.fixed_dictionaries(
    {"Content-Length": st.sampled_from(["1", "00017", "123456789012345"])},
    optional={
        "x-amz-checksum-crc64nvme": st.just("AAAAAAAAAAA="),
        "Expect": st.just("100-continue"),
        "User-Agent": st.just("x"),
    },
)


@settings(max_examples=200, deadline=None)
@given(KEYS, PUTS, st.booleans())
def test_a_put_that_says_nothing_else_is_recognised(key: str, headers: dict[str, str], named: bool) -> None:
    if named and "x-amz-checksum-crc64nvme" in headers:
        headers = {**headers, "x-amz-sdk-checksum-algorithm": "CRC64NVME"}
    made = signed(f"http://{HOST}/bucket/{quote(key, safe='/~')}", "PUT", headers=headers, payload=UNSIGNED)
    head, now_s = rendered(made), signing_time(made)
    found = learned(made).recognise(head, now_s)
    assert found == general(head, now_s) is not None
    assert learned(made, may=lambda _, write: not write).recognise(head, now_s) is None


EXTRA = st.sampled_from(
    [
        b"Content-Type: text/plain",
        b"Cache-Control: no-store",
        b"Content-MD5: x",
        b"x-amz-checksum-crc32: AAAAAA==",
        b"x-amz-checksum-crc64nvme: AAAAAAAAAAA=",
        b"x-amz-sdk-checksum-algorithm: CRC64NVME",
        b"x-amz-acl: public-read",
        b"Range: bytes=0-1",
        b"If-None-Match: *",
        b"Content-Length: 0",
        b"Content-Length: 5",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Connection: close",
        b"Connection: Keep-Alive",
        b"Host: other",
        b"x-amz-meta-a: b",
        b"x-amz-checksum-mode: ENABLED",
        b"x-amz-security-token: t",
        b"Accept: */*",
        b"accept: a\tb",
        b"Date: now",
        b"User-Agent:  two  spaces",
        b" folded: x",
        b"X y: z",
    ]
)


@settings(max_examples=800, deadline=None)
@given(
    KEYS,
    st.sampled_from(["GET", "HEAD", "PUT"]),
    st.lists(EXTRA, max_size=3),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=2),
    st.floats(-2000, 2000),
    st.data(),
)
def test_whatever_is_recognised_means_the_same_on_the_general_path(
    key: str,
    method: str,
    extra: list[bytes],
    flips: list[tuple[int, int]],
    skew_s: float,
    data: st.DataObject,
) -> None:
    headers = {"Content-Length": "5"} if method == "PUT" else {}
    url = f"http://{HOST}/bucket/{quote(key, safe='/~()+=:@')}"
    made = signed(url, method, headers=headers, payload=UNSIGNED)
    lines = rendered(made).split(b"\r\n")
    for line in extra:
        lines.insert(data.draw(st.integers(1, len(lines) - 2)), line)
    head = bytearray(b"\r\n".join(lines))
    for at, value in flips:
        head[at % len(head)] = value
    now_s = signing_time(made) + skew_s
    found = learned(made).recognise(bytes(head), now_s)
    if found is not None:
        assert found == general(bytes(head[: found[2]]), now_s)
    elif (
        not extra
        and not flips
        and abs(skew_s) <= limits.MAX_CLOCK_SKEW_S
        and "(" not in key
        and ")" not in key
    ):
        pytest.fail(f"not recognised: {bytes(head)!r}")


@pytest.mark.parametrize("what", ["signature", "path", "method", "payload", "x-amz-date", "scope"])
def test_a_signature_stands_for_one_request(what: str) -> None:
    made = signed(f"http://{HOST}/bucket/key", headers={"Accept": "a"})
    head, now_s = rendered(made), signing_time(made)
    reads = learned(made)
    assert reads.recognise(head, now_s) is not None
    authorization = made.header_bytes(b"authorization") or b""
    last = authorization[-1:]
    changed = {
        "signature": head.replace(authorization, authorization[:-1] + (b"0" if last != b"0" else b"1")),
        "path": head.replace(b"/bucket/key", b"/bucket/kez"),
        "method": head.replace(b"GET", b"HEAD", 1),
        "payload": head.replace(EMPTY.encode(), b"0" * 64),
        "x-amz-date": re.sub(rb"(?i)(x-amz-date: \d+T)\d{6}", rb"\g<1>000000", head),
        "scope": head.replace(b"/us-east-1/", b"/us-east-2/"),
    }[what]
    assert changed != head
    assert reads.recognise(changed, now_s) is None


def test_a_credential_reads_where_it_may() -> None:
    made = signed(f"http://{HOST}/bucket/key")
    asked: list[bytes] = []

    def may(bucket: bytes, write: bool) -> bool:
        assert not write
        asked.append(bucket)
        return False

    assert learned(made, may=may).recognise(rendered(made), signing_time(made)) is None
    assert asked == [b"bucket"]


def test_the_bucket_may_be_the_hosts() -> None:
    made = signed(f"http://{HOST}/a%20b/c")
    found = learned(made, bucket=b"bucket").recognise(rendered(made), signing_time(made))
    assert found is not None
    assert found[1] == b"bucket\0a b/c"


@pytest.mark.parametrize(
    "path", ["/bucket", "/bucket/", "/bucket/dir/", "//key", "/.x/key", "/b/%ff", "/b/%00", "/b/%4"]
)
def test_other_paths_are_left_to_the_general_path(path: str) -> None:
    made = signed(f"http://{HOST}{path}")
    assert learned(made).recognise(rendered(made), signing_time(made)) is None


def test_what_is_learned_is_bounded_and_dropped() -> None:
    made = signed(f"http://{HOST}/bucket/key")
    head, now_s = rendered(made), signing_time(made)
    reads = learned(made)
    for n in range(limits.MAX_SIGNERS + 1):
        reads.learn_host(b"host-%d" % n, b"")
    assert reads.recognise(head, now_s) is None
    reads.learn_host(HOST.encode(), b"")
    assert reads.recognise(head, now_s) is not None
    reads.forget()
    assert reads.recognise(head, now_s) is None
    assert CREDENTIAL.access_key.encode() in head


# --- on the wire -------------------------------------------------------------------------------------------
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
