"""HTTP/1.1 at the S3 endpoint: framing, smuggling, pipelining, 100-continue, early refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs.http.head import BadHead, parse_head
from kvfs.http.transfer_chunks import BadChunk, ChunkedReader
from tests.support.gateway import Gateway, gateway
from tests.support.raw_s3 import UNSIGNED, RawClient, raw_client, signed_head

BUCKET = "wire"


# --- heads -------------------------------------------------------------------------------------------------
def head(*lines: str, first: str = "PUT /b/k HTTP/1.1", host: str = "Host: h") -> bytes:
    return ("\r\n".join([first, *([host] if host else []), *lines]) + "\r\n\r\n").encode("latin-1")


def test_a_head_is_parsed_with_its_target_untouched() -> None:
    found = parse_head(
        head("Content-Length: 12", "X-Amz-Meta-A:  b \t", first="PUT /b//%2F/../k?x=%20 HTTP/1.1")
    )
    assert found.target == b"/b//%2F/../k?x=%20"
    assert (b"x-amz-meta-a", b"b") in found.headers
    assert (found.method, found.content_length, found.chunked, found.keep_alive) == ("PUT", 12, False, True)


def test_http_1_0_and_connection_close_end_the_connection() -> None:
    assert not parse_head(head(first="GET / HTTP/1.0")).keep_alive
    assert not parse_head(head("Connection: close")).keep_alive


BAD_HEADS = {
    "CL and TE": (head("Content-Length: 5", "Transfer-Encoding: chunked"), 400),
    "two CL": (head("Content-Length: 5", "Content-Length: 5"), 400),
    "two CL that differ": (head("Content-Length: 5", "Content-Length: 6"), 400),
    "CL list": (head("Content-Length: 5, 5"), 400),
    "signed CL": (head("Content-Length: +5"), 400),
    "negative CL": (head("Content-Length: -5"), 400),
    "hex CL": (head("Content-Length: 0x5"), 400),
    "huge CL": (head("Content-Length: " + "9" * 30), 400),
    "TE gzip": (head("Transfer-Encoding: gzip"), None),
    "TE gzip, chunked": (head("Transfer-Encoding: gzip, chunked"), 501),
    "TE twice": (head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), None),
    "TE in 1.0": (head("Transfer-Encoding: chunked", first="PUT / HTTP/1.0"), 400),
    "bare LF": (b"GET / HTTP/1.1\nHost: h\r\n\r\n", 400),
    "bare CR": (b"GET / HTTP/1.1\r\nHost: h\rX: y\r\n\r\n", 400),
    "NUL": (head("X: a\0b"), 400),
    "folded": (head("X: a", " b"), 400),
    "space before colon": (head("Content-Length : 5"), 400),
    "no host": (head(host=""), 400),
    "two hosts": (head("Host: other"), 400),
    "no method": (b" / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "not HTTP": (b"hello\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\n", None),
    "high bytes in the target": (b"GET /\xff HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "too many headers": (head(*[f"X-{n}: y" for n in range(limits.MAX_HEADERS + 1)]), 431),
}


@pytest.mark.parametrize(("data", "status"), BAD_HEADS.values(), ids=BAD_HEADS)
def test_a_head_that_two_servers_could_read_differently_is_refused(data: bytes, status: int | None) -> None:
    with pytest.raises(BadHead) as error:
        parse_head(data)
    assert status is None or error.value.status == status


@given(st.binary(max_size=300))
def test_any_head_is_parsed_or_refused(data: bytes) -> None:
    try:
        found = parse_head(data + b"\r\n\r\n")
    except BadHead:
        return
    assert found.method
    assert found.target


# --- chunked bodies ----------------------------------------------------------------------------------------
def decode(data: bytes, cuts: list[int]) -> tuple[bytes, int]:
    """The payload, and how many bytes of `data` were consumed, fed in pieces."""
    reader, payload, buffer, at = ChunkedReader(), b"", b"", 0
    edges = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    for edge in edges:
        buffer, at = buffer + data[at:edge], edge
        while not reader.done:
            step = reader.step(memoryview(buffer), 1 << 20)
            payload += buffer[: step.payload]
            buffer = buffer[step.consumed :]
            if not step.consumed:
                break
    return payload, at - len(buffer) if reader.done else -1


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    st.lists(st.integers(0, 400)),
    st.binary(max_size=9),
)
def test_a_chunked_body_comes_out_however_it_is_cut(parts: list[bytes], cuts: list[int], rest: bytes) -> None:
    chunks = [f"{len(part):x};ext=1\r\n".encode() + part + b"\r\n" for part in parts]
    wire = b"".join(chunks) + b"0\r\nX-Trailer: y\r\n\r\n"
    assert decode(wire + rest, cuts) == (b"".join(parts), len(wire))


@given(st.binary(max_size=120), st.lists(st.integers(0, 120), max_size=6))
def test_any_chunked_body_is_decoded_or_refused(data: bytes, cuts: list[int]) -> None:
    try:
        payload, _ = decode(data, cuts)
    except BadChunk:
        return
    assert len(payload) <= len(data)


@pytest.mark.parametrize(
    "data",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloX0\r\n\r\n",
        b"-5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"\r\nhello\r\n",
        b"5 5\r\nhello\r\n",
        b"f" * 17 + b"\r\n",
        b"5;" + b"a" * limits.MAX_CHUNK_LINE_BYTES + b"\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
    ],
)
def test_a_chunk_that_two_servers_could_read_differently_is_refused(data: bytes) -> None:
    with pytest.raises(BadChunk):
        decode(data, [])


# --- on the wire -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway() as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found
        assert not found.service.complaints()


@pytest.fixture
def raw(door: Gateway) -> Iterator[RawClient]:
    with raw_client(door) as client:
        yield client


def test_requests_in_one_packet_are_answered_in_order(door: Gateway, raw: RawClient) -> None:
    puts = [signed_head(door, "PUT", f"/{BUCKET}/pipe-{n}", body=b"x" * n) + b"x" * n for n in range(5)]
    gets = [signed_head(door, "GET", f"/{BUCKET}/pipe-{n}") for n in range(5)]
    raw.send(b"".join(puts + gets))
    assert [raw.response().status for _ in puts] == [200] * 5
    assert [raw.response().body for _ in gets] == [b"x" * n for n in range(5)]


def test_a_request_byte_by_byte(door: Gateway, raw: RawClient) -> None:
    for byte in signed_head(door, "PUT", f"/{BUCKET}/slow", body=b"abc") + b"abc":
        raw.send(bytes((byte,)))
    assert raw.response().status == 200
    assert raw.ask("GET", f"/{BUCKET}/slow").body == b"abc"


def test_a_body_in_chunks_of_http(door: Gateway, raw: RawClient) -> None:
    """Send chunks as boto3 wraps them around aws-chunked; a plain one needs its length."""
    wire = b"4;chunk-signature=x\r\nwxyz\r\n0\r\n\r\n"
    del wire
    inner = b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:NhCmhg==\r\n\r\n"
    outer = (
        b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (inner[:7], inner[7:]))
        + b"0\r\n\r\n"
    )
    said = {
        "x-amz-decoded-content-length": "5",
        "x-amz-trailer": "x-amz-checksum-crc32",
        "content-encoding": "aws-chunked",
    }
    request = signed_head(
        door,
        "PUT",
        f"/{BUCKET}/chunked",
        headers=said,
        unsigned={"Transfer-Encoding": "chunked"},
        body=None,
        payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    )
    raw.send(request + outer)
    assert raw.response().status == 200
    found = raw.ask("GET", f"/{BUCKET}/chunked")
    assert found.body == b"hello"
    assert "content-encoding" not in found.headers


def test_a_chunked_body_without_its_length_is_411(door: Gateway, raw: RawClient) -> None:
    request = signed_head(
        door, "PUT", f"/{BUCKET}/k", body=None, unsigned={"Transfer-Encoding": "chunked"}, payload=UNSIGNED
    )
    raw.send(request)
    answer = raw.response()
    assert (answer.status, answer.code) == (411, "MissingContentLength")
    assert answer.headers["connection"] == "close"
    raw.send(b"5\r\nhello\r\n0\r\n\r\n")
    assert raw.at_end()


def test_continue_comes_before_the_body(door: Gateway, raw: RawClient) -> None:
    raw.send(signed_head(door, "PUT", f"/{BUCKET}/k", body=b"hello", unsigned={"Expect": "100-continue"}))
    assert raw.response().status == 100
    raw.send(b"hello")
    assert raw.response().status == 200
    assert raw.ask("GET", f"/{BUCKET}/k").body == b"hello"


def test_continue_comes_before_an_empty_body_too(door: Gateway, raw: RawClient) -> None:
    """Else botocore reads the next answer on this connection wrong."""
    raw.send(signed_head(door, "PUT", f"/{BUCKET}/k", body=b"", unsigned={"Expect": "100-continue"}))
    assert [raw.response().status, raw.response().status] == [100, 200]
    raw.send(signed_head(door, "PUT", "/nowhere/k", body=b"", unsigned={"Expect": "100-continue"}))
    answer = raw.response()
    assert (answer.status, answer.headers["connection"]) == (404, "close")


REFUSED = {
    "wrong secret": ({"secret": "wrong-secret-0123456789"}, BUCKET, 403, "SignatureDoesNotMatch"),
    "unknown key": ({"access": "NOBODY"}, BUCKET, 403, "InvalidAccessKeyId"),
    "no bucket": ({}, "nowhere", 404, "NoSuchBucket"),
    "reserved bucket": ({}, ".kvfs-s3", 404, "NoSuchBucket"),
    "bad digest header": ({"headers": {"Content-MD5": "x"}}, BUCKET, 400, "InvalidDigest"),
}


@pytest.mark.parametrize(("options", "bucket", "status", "code"), REFUSED.values(), ids=REFUSED)
def test_who_is_refused_is_not_asked_for_the_body(
    door: Gateway, raw: RawClient, options: dict[str, object], bucket: str, status: int, code: str
) -> None:
    body = bytes(1 << 20)
    request = signed_head(
        door,
        "PUT",
        f"/{bucket}/k",
        body=body,
        payload=UNSIGNED,
        unsigned={"Expect": "100-continue"},
        **options,  # type: ignore[arg-type]
    )
    raw.send(request)
    answer = raw.response()
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["connection"] == "close"
    assert raw.at_end()


def test_a_small_body_of_a_refused_request_is_read_away(door: Gateway, raw: RawClient) -> None:
    for _ in range(3):
        answer = raw.ask("PUT", "/nowhere/k", b"x" * 1000)
        assert (answer.status, answer.code) == (404, "NoSuchBucket")
    assert raw.ask("GET", f"/{BUCKET}?location").status == 200


def test_a_large_body_of_a_refused_request_ends_the_connection_after_the_answer(
    door: Gateway, raw: RawClient
) -> None:
    body = bytes(4 << 20)
    raw.send(signed_head(door, "PUT", "/nowhere/k", body=body, payload=UNSIGNED))
    with pytest.raises((ConnectionError, EOFError)):  # noqa: PT012 - whichever meets the end first
        raw.send(body)
        assert raw.response().status == 404
        raw.send(signed_head(door, "GET", "/"))
        raw.response()


def test_what_is_no_request_is_answered_and_closed(door: Gateway, raw: RawClient) -> None:
    raw.send(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc")
    answer = raw.response()
    assert (answer.status, answer.code) == (400, "BadRequest")
    assert raw.at_end()


def test_headers_without_end_are_refused(raw: RawClient) -> None:
    raw.send(b"GET / HTTP/1.1\r\nX: " + b"a" * limits.MAX_HEAD_BYTES)
    assert raw.response().status == 431
    assert raw.at_end()


def test_a_smuggled_request_is_never_served(door: Gateway, raw: RawClient) -> None:
    """The body of a refused request is no request."""
    inner = signed_head(door, "PUT", f"/{BUCKET}/smuggled", body=b"")
    answer = raw.ask("PUT", "/nowhere/k", inner)
    assert answer.status == 404
    assert raw.ask("GET", f"/{BUCKET}/smuggled").status == 404


def test_head_has_a_length_and_no_body(door: Gateway, raw: RawClient) -> None:
    raw.ask("PUT", f"/{BUCKET}/h", b"x" * 77)
    assert raw.ask("HEAD", f"/{BUCKET}/h").headers["content-length"] == "77"
    missing = raw.ask("HEAD", f"/{BUCKET}/missing")
    assert missing.status == 404
    assert raw.ask("GET", f"/{BUCKET}/h").body == b"x" * 77


def test_an_anonymous_request_is_refused(door: Gateway, raw: RawClient) -> None:
    raw.send(f"GET /{BUCKET}/h HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = raw.response()
    assert (answer.status, answer.code) == (403, "AccessDenied")


@given(data=st.binary(max_size=400))
def test_any_bytes_are_answered_or_closed(door: Gateway, data: bytes) -> None:
    with raw_client(door) as client:
        client.send(data + b"\r\n\r\n")
        client.socket.shutdown(1)
        try:
            while True:
                assert client.response().status >= 400
        except (EOFError, ConnectionResetError):
            pass
