"""Plain requests that are recognised without Python: each means the same as on the general path."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha256
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.auth.sigv4 import PayloadMode, verify
from gateway.protocol import addressing, checksums, conditions, metadata, routing
from gateway.protocol.action import Operation
from gateway.protocol.checksums import Algorithm
from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request
from kvfs import limits
from kvfs._native.s3.fast_path import Reads
from kvfs.http.head import BadHead, parse_head
from tests.support.raw_s3 import UNSIGNED
from tests.support.s3 import CREDENTIAL, CREDENTIALS, HOST, REGION, signed, signing_time

EMPTY = sha256(b"").hexdigest()


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
