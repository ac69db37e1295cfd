"""Values at the edge of every field that an S3 request has: each is stored as it came, or refused.

A refusal is a 4xx or NotImplemented with a code; afterwards everything that was stored is there, a killed service
starts again, and `kvfs fsck` finds nothing.
"""

from __future__ import annotations

import socket
from base64 import b64encode
from collections.abc import Iterator, Mapping
from email.header import decode_header, make_header
from hashlib import md5
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.gateway import ACCESS, REGION, SECRET, Gateway, gateway
from tests.support.raw_s3 import UNSIGNED, RawClient, Response, signed_head
from tests.support.service import run_kvfs

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""botocore leaves sockets to the garbage collector."""

BODY = bytes(range(256)) * 40
SECOND = 10**9
NUMBERS = (
    *("", "0", "1", "-1", "-0", "+1", " 1", "1 ", "01", "1.0", "1e3", "0x1", "abc", "NaN", "\u0663", "1,2"),
    *("999", "1000", "1001", "10000", "10001", "2147483647", "2147483648", "4294967295", "4294967296"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616"),
    *("-9223372036854775809", "9" * 400, "1_000"),
)
DATES = (
    *("Thu, 01 Jan 1970 00:00:00 GMT", "Wed, 31 Dec 1969 23:59:59 GMT", "Mon, 01 Jan 1601 00:00:00 GMT"),
    *("Sun, 07 Feb 2106 06:28:16 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 GMT"),
    *("Sat, 01 Jan 10000 00:00:00 GMT", "Thu, 01 Jan 0001 00:00:00 +2359", "Fri, 31 Dec 9999 23:59:59 -2359"),
    *(
        "Thu, 01 Jan 1970 00:00:00 -9999",
        "Thu, 99 Jan 1970 99:99:99 GMT",
        "0",
        "-1",
        "",
        "1970-01-01T00:00:00Z",
    ),
    *("2262-04-11T23:47:17Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "x" * 3000),
)
TIMES_NS = (-1, -(2**63), 0, 2**31 * SECOND, 2**32 * SECOND + 5, 2**63 - 1)


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    need_mount()
    with gateway(
        dram="64MiB", nvme="128MiB", settings="workers = 1\n", arguments=("--slots", "4096")
    ) as found:
        s3 = found.client()
        for bucket in ("cache", "durable"):
            with found.service.client() as client:
                client.create_bucket(bucket, durable=bucket == "durable")
            s3.put_object(Bucket=bucket, Key="witness", Body=BODY, Metadata={"mtime": "1.5"})
        yield found
        check_start(found)


class Door:
    """A connection that is made again when the endpoint has closed it, as it may after a refusal."""

    def __init__(self, found: Gateway) -> None:
        self.gateway = found
        self.client = RawClient(found)

    def ask(self, method: str, path: str, body: bytes = b"", **options: object) -> Response:
        head = signed_head(self.gateway, method, path, body=body, **options)  # type: ignore[arg-type]
        return self.send(head + body, head_only=method == "HEAD")

    def send(self, data: bytes, *, head_only: bool = False, ends: bool = False) -> Response:
        """`ends`: nothing follows, whatever was announced. What is closed without a word is a Response of status 0."""
        try:
            self.client.send(data)
            if ends:
                self.client.socket.shutdown(socket.SHUT_WR)
            found = self.client.response(head_only=head_only)
        except (EOFError, ConnectionError):
            found = Response(0, {}, b"")
        if ends or not found.status or found.headers.get("connection", "") == "close":
            self.client.close()
            self.client = RawClient(self.gateway)
        return found


@pytest.fixture
def raw(door: Gateway) -> Iterator[Door]:
    made = Door(door)
    yield made
    made.client.close()


def check(answer: Response, what: object) -> bool:
    """Whether it was taken; else it was refused clearly."""
    assert 200 <= answer.status < 500 or answer.status == 501, (what, answer)
    if answer.status >= 400 and answer.body:
        assert answer.code, (what, answer)
    return answer.status < 300


def witness(door: Door, bucket: str = "durable") -> None:
    found = door.ask("GET", f"/{bucket}/witness")
    assert (found.status, found.body, found.headers["x-amz-meta-mtime"]) == (200, BODY, "1.5")


def check_start(found: Gateway) -> None:
    """Everything that the endpoint shows is there after a kill, without a complaint, and fsck agrees."""
    service = found.service
    before = contents(found)
    assert service.running.poll() is None, service.log()
    service.kill()
    service.restart()
    with service.client() as client:
        for name in before:
            if name.startswith("durable/") and not name.endswith("/"):
                client.stat(name)
    assert "Traceback" not in service.log(), service.log()
    service.stop()
    done = run_kvfs("fsck", "--data", str(service.data), "--check-only")
    assert done.returncode == 0, done.stdout + done.stderr


def contents(found: Gateway) -> set[str]:
    s3 = found.client()
    return {
        f"{bucket}/{entry['Key']}"
        for bucket in ("cache", "durable")
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        for entry in page.get("Contents", [])
    }


# --- objects ---------------------------------------------------------------------------------------------------
def test_headers_of_a_put_come_back_or_are_refused(door: Gateway, raw: Door) -> None:
    long = [("a" * length, "1") for length in (1, 240, 2000, 3000)]
    values = [
        *NUMBERS,
        *DATES,
        "\u00fc",
        "1.5",
        "-1.5",
        "1700000000.123456789",
        "x" * 2030,
        "x" * 2060,
        "x" * 9000,
    ]
    cases: list[tuple[str, str]] = [
        *((f"x-amz-meta-{name}", value) for name in ("mtime", "mode", "uid", "mtime-ns") for value in values),
        *((f"x-amz-meta-{name}", value) for name, value in long),
        *(("expires", value) for value in DATES),
        *((name, value) for name in ("cache-control", "content-language") for value in ("", "x" * 5000)),
        *(("content-type", value) for value in ("", "x" * 5000, "a/b; c=\u00e9")),
    ]
    taken = 0
    for number, (name, value) in enumerate(cases):
        key, sent = f"/durable/put-{number}", value.encode().decode("latin-1")
        if not check(raw.ask("PUT", key, b"bytes", headers={name: sent}), (name, value)):
            continue
        taken += 1
        found = raw.ask("GET", key)
        assert (found.status, found.body) == (200, b"bytes"), (name, value)
        shown = found.headers.get(name, "")
        if not value.isascii() and name.startswith("x-amz-meta-"):
            shown = str(make_header(decode_header(shown)))
            assert shown == value, (name, value)
        elif value.strip():
            assert shown == sent.strip(), (name, value)
    assert taken > len(cases) // 2
    witness(raw)


@pytest.mark.parametrize("way", ["PUT", "part", "POST"])
def test_a_length_is_a_number_that_fits(door: Gateway, raw: Door, way: str) -> None:
    upload = door.client().create_multipart_upload(Bucket="durable", Key="length")["UploadId"]
    path = {
        "PUT": "/durable/length",
        "part": f"/durable/length?partNumber=1&uploadId={upload}",
        "POST": "/durable?delete=",
    }[way]
    for length in NUMBERS:
        if not length.isascii():
            continue  # the header's bytes are not what is asked here
        said = {"Content-Length": length}
        method = "POST" if way == "POST" else "PUT"
        head = signed_head(door, method, path, body=None, payload=UNSIGNED, unsigned=said)
        answer = raw.send(head, ends=True)  # of its body nothing comes
        if answer.status:
            check(answer, length)
        if answer.status == 200:
            assert length.strip().strip("0") == "", length
    for length, body in (("0", b""), ("1", b"x"), ("01", b"x")):
        head = signed_head(
            door, "PUT", "/durable/length", body=None, payload=UNSIGNED, unsigned={"Content-Length": length}
        )
        if check(raw.send(head + body), length):
            assert raw.ask("GET", "/durable/length").body == body
    for length in NUMBERS:
        said = {
            "x-amz-decoded-content-length": length.encode().decode("latin-1"),
            "content-encoding": "aws-chunked",
        }
        chunked = b"0\r\n\r\n"
        head = signed_head(
            door,
            "PUT",
            "/durable/decoded",
            body=chunked,
            payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
            headers=said,
        )
        check(raw.send(head + chunked, ends=True), length)
    door.client().abort_multipart_upload(Bucket="durable", Key="length", UploadId=upload)
    witness(raw)


def test_checksums_tags_and_names_at_their_edges(door: Gateway, raw: Door) -> None:
    right = b64encode(md5(b"bytes", usedforsecurity=False).digest()).decode()
    md5s = (
        "",
        "=",
        "A",
        right[:-1],
        right + "=",
        right.lower(),
        right * 100,
        b64encode(b"").decode(),
        "\u00fc",
        " " + right,
    )
    for value in (right, *md5s):
        taken = check(
            raw.ask(
                "PUT", "/durable/md5", b"bytes", headers={"Content-MD5": value.encode().decode("latin-1")}
            ),
            value,
        )
        assert taken or value.strip() != right
    for count in (0, 1, 10, 11, 1000):
        check(
            raw.ask(
                "PUT",
                "/durable/tags",
                b"",
                headers={"x-amz-tagging": "&".join(f"k{i}=v" for i in range(count))},
            ),
            count,
        )
    for key, value in (
        ("k" * 128, "v" * 256),
        ("k" * 129, "v"),
        ("k", "v" * 257),
        ("", "v"),
        ("k", ""),
        ("%", "%zz"),
        ("aws:x", "v"),
    ):
        if check(
            raw.ask("PUT", "/durable/tags", b"", headers={"x-amz-tagging": f"{key}={value}"}), (key, value)
        ):
            assert raw.ask("GET", "/durable/tags").headers.get("x-amz-tagging-count") == "1"
    keys = (
        *(
            "a" * 255,
            "a" * 256,
            "a" * 1019,
            "a" * 1020,
            "/".join(["a" * 250] * 4),
            "%00",
            "%FF",
            "%F4%90%80%80",
        ),
        *(".", "..", "a//b", "a/", "a/../b", "%0A", "%7F", "+", "%2B", "\u00fc" * 100),
    )
    for key in keys:
        path = f"/durable/edge-{quote(key, safe='/%+')}"
        if check(raw.ask("PUT", path, b"bytes" if not key.endswith("/") else b""), key):
            assert raw.ask("GET", path).status == 200, key
    witness(raw)


# --- reads -----------------------------------------------------------------------------------------------------
def test_ranges_and_conditions_of_a_read(door: Gateway, raw: Door) -> None:
    for bucket in ("cache", "durable"):
        for first in NUMBERS:
            for value in (
                f"bytes={first}-",
                f"bytes=-{first}",
                f"bytes=0-{first}",
                f"bytes={first}-{first}",
                f"bytes=1-1,{first}-",
                first,
            ):
                found = raw.ask(
                    "GET", f"/{bucket}/witness", headers={"Range": value.encode().decode("latin-1")}
                )
                assert found.status in (200, 206, 400, 416), (value, found)
                if found.status == 206:
                    span, _, size = found.headers["content-range"].removeprefix("bytes ").partition("/")
                    begin, _, end = span.partition("-")
                    assert (int(size), found.body) == (len(BODY), BODY[int(begin) : int(end) + 1]), value
                if found.status == 200:
                    assert found.body == BODY
    for name in ("If-Modified-Since", "If-Unmodified-Since"):
        for date in DATES:
            for method in ("GET", "HEAD"):
                assert raw.ask(method, "/durable/witness", headers={name: date}).status in (200, 304, 412), (
                    date
                )
    for value in NUMBERS:
        for method in ("GET", "HEAD"):
            check(raw.ask(method, f"/durable/witness?partNumber={quote(value)}"), value)
    for name in ("response-expires", "response-content-type", "response-cache-control"):
        for value in (*DATES, "\r\nx: y", "\0", "x" * 4000):
            check(raw.ask("GET", f"/durable/witness?{name}={quote(value, safe='')}"), value)
    witness(raw)


def test_times_of_another_door_are_shown(door: Gateway, raw: Door) -> None:
    for bucket in ("cache", "durable"):
        for number, time_ns in enumerate(TIMES_NS):
            with door.service.client() as client:
                client.put(f"{bucket}/time-{number}", BODY, mtime_ns=time_ns)
            for method in ("GET", "HEAD"):
                found = raw.ask(method, f"/{bucket}/time-{number}")
                assert found.status == 200, (time_ns, found)
                assert found.headers["last-modified"].endswith("GMT"), (time_ns, found)
                for date in (DATES[0], found.headers["last-modified"]):
                    for name in ("If-Modified-Since", "If-Unmodified-Since"):
                        again = raw.ask(method, f"/{bucket}/time-{number}", headers={name: date})
                        assert again.status in (200, 304, 412), (time_ns, date, again)
            copied = {"x-amz-copy-source": f"/{bucket}/time-{number}"}
            assert raw.ask("PUT", f"/{bucket}/copy-{number}", headers=copied).status == 200
        for listing in ("?list-type=2&prefix=time-", "?prefix=time-"):
            assert raw.ask("GET", f"/{bucket}{listing}").body.count(b"<LastModified>") == len(TIMES_NS)


def test_numbers_of_a_listing(door: Gateway, raw: Door) -> None:
    for value in NUMBERS:
        text = quote(value)
        for query in (
            f"max-keys={text}",
            f"list-type=2&max-keys={text}",
            f"uploads=&max-uploads={text}",
            f"list-type={text}",
            f"list-type=2&continuation-token={text}",
            f"list-type=2&encoding-type={text}&fetch-owner={text}",
            f"versions=&max-keys={text}",
            f"uploads=&upload-id-marker={text}&key-marker={text}",
        ):
            check(raw.ask("GET", f"/durable?{query}"), query)
    for length in (0, 1023, 1024, 1025, 5000):
        for name in ("prefix", "delimiter", "marker", "start-after", "continuation-token", "key-marker"):
            for extra in ("", "&list-type=2", "&uploads="):
                check(raw.ask("GET", f"/durable?{name}={'a' * length}{extra}"), (name, length))
    witness(raw)


# --- multipart -------------------------------------------------------------------------------------------------
def test_numbers_of_a_multipart_upload(door: Gateway, raw: Door) -> None:
    s3 = door.client()
    upload = s3.create_multipart_upload(Bucket="durable", Key="parts")["UploadId"]
    source = {"x-amz-copy-source": "/durable/witness"}
    for value in NUMBERS:
        text, header = quote(value), value.encode().decode("latin-1")
        check(raw.ask("PUT", f"/durable/parts?partNumber={text}&uploadId={upload}", b"part"), value)
        check(raw.ask("PUT", f"/durable/parts?partNumber={text}&uploadId={upload}", headers=source), value)
        for query in (f"max-parts={text}", f"part-number-marker={text}"):
            check(raw.ask("GET", f"/durable/parts?uploadId={upload}&{query}"), query)
        for span in (f"bytes=0-{header}", f"bytes={header}-{header}", f"bytes=-{header}", header):
            said = {**source, "x-amz-copy-source-range": span}
            check(raw.ask("PUT", f"/durable/parts?partNumber=7&uploadId={upload}", headers=said), span)
        part = f"<Part><PartNumber>{value}</PartNumber><ETag>x</ETag></Part>"
        document = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>"
        assert raw.ask("POST", f"/durable/parts?uploadId={upload}", document.encode()).status in (400, 404), (
            value
        )
    for date in DATES:
        for name in ("modified", "unmodified"):
            said = {**source, f"x-amz-copy-source-if-{name}-since": date}
            check(raw.ask("PUT", "/durable/copied", headers=said), date)
    s3.abort_multipart_upload(Bucket="durable", Key="parts", UploadId=upload)
    for sizes in ((0,), (1,), (1, 1), (5 << 20, 0), (5 << 20, 1)):
        complete(door, raw, sizes)
    witness(raw)


def complete(door: Gateway, raw: Door, sizes: tuple[int, ...]) -> None:
    """An upload of such parts is completed whole or refused."""
    upload = door.client().create_multipart_upload(Bucket="durable", Key="whole")["UploadId"]
    parts = []
    for number, size in enumerate(sizes, 1):
        found = raw.ask("PUT", f"/durable/whole?partNumber={number}&uploadId={upload}", b"p" * size)
        assert check(found, sizes)
        parts.append(f"<Part><PartNumber>{number}</PartNumber><ETag>{found.headers['etag']}</ETag></Part>")
    document = f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>"
    found = raw.ask("POST", f"/durable/whole?uploadId={upload}", document.encode())
    assert found.status == 200 or found.code == "EntityTooSmall", (sizes, found)
    if found.status == 200:
        assert raw.ask("GET", "/durable/whole").body == b"p" * sum(sizes)
    else:
        door.client().abort_multipart_upload(Bucket="durable", Key="whole", UploadId=upload)


# --- presigned -------------------------------------------------------------------------------------------------
def presigned(door: Gateway, changes: Mapping[str, str]) -> bytes:
    request = AWSRequest("GET", f"{door.url}/durable/witness")
    request.context["client_config"] = None
    S3SigV4QueryAuth(Credentials(ACCESS, SECRET), "s3", REGION, expires=60).add_auth(request)
    target = str(request.url).removeprefix(door.url)
    path, _, query = target.partition("?")
    fields = dict(field.partition("=")[::2] for field in query.split("&")) | dict(changes)
    target = f"{path}?{'&'.join(f'{name}={value}' for name, value in fields.items())}"
    return f"GET {target} HTTP/1.1\r\nHost: {door.host}:{door.port}\r\n\r\n".encode("latin-1")


def test_a_presigned_request_says_when_it_ends(door: Gateway, raw: Door) -> None:
    assert raw.send(presigned(door, {})).status == 200
    for value in NUMBERS:
        found = raw.send(presigned(door, {"X-Amz-Expires": quote(value)}))
        assert 400 <= found.status < 500, (value, found)
        assert found.code, (value, found)
    dates = (
        "19691231T235959Z",
        "00010101T000000Z",
        "99991231T235959Z",
        "20260229T000000Z",
        "20261301T000000Z",
        "",
        "0",
        "x" * 2000,
    )
    for date in dates:
        found = raw.send(presigned(door, {"X-Amz-Date": date}))
        assert 400 <= found.status < 500, (date, found)
        assert found.code, (date, found)
    for expires in (1, 604800, 604801, 2**63, 2**64, -1, 0):
        request = AWSRequest("GET", f"{door.url}/durable/witness")
        request.context["client_config"] = None
        S3SigV4QueryAuth(Credentials(ACCESS, SECRET), "s3", REGION, expires=expires).add_auth(request)
        target = str(request.url).removeprefix(door.url)
        found = raw.send(f"GET {target} HTTP/1.1\r\nHost: {door.host}:{door.port}\r\n\r\n".encode())
        assert (found.status == 200) == (1 <= expires <= 604800), (expires, found)
    witness(raw)
