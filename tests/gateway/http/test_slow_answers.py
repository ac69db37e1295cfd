"""Answers that begin before their operation has ended, on a clock that runs as fast as the test; what boto3 makes of
them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from xml.etree import ElementTree

import boto3
import pytest
import trio
from botocore.config import Config
from botocore.exceptions import ClientError

from gateway.app.slow_answers import DECLARATION, stream_slow_answer
from gateway.xml.writer import document
from kvfs import limits
from kvfs.http.head import parse_head
from kvfs.http.http_exchange import Exchange
from kvfs.http.transports import Gone
from tests.support.waits import WAIT_S

RESULT = document("CompleteMultipartUploadResult", ["<ETag>&quot;0123-2&quot;</ETag>"])
FAILURE = document("Error", ["<Code>InvalidPart</Code><Message>gone</Message>"], namespace="")


class Client:
    """What a transport is to an exchange: it keeps what was sent, until it is gone."""

    peer, secure = "test", False

    def __init__(self) -> None:
        self.sent = b""
        self.sent_at: list[float] = []
        self.gone = False

    async def send(self, parts: Sequence[bytes]) -> None:
        await trio.lowlevel.checkpoint()
        if self.gone:
            raise Gone("the client has gone")
        self.sent += b"".join(parts)
        self.sent_at.append(trio.current_time())


def exchange_with(client: Client, first: str = "POST /b/k?uploadId=1 HTTP/1.1", *lines: str) -> Exchange:
    head = "\r\n".join([first, "Host: h", "Content-Length: 0", *lines]) + "\r\n\r\n"
    return Exchange(parse_head(head.encode()), client, None)  # type: ignore[arg-type]


async def answer(
    client: Client, seconds: float, *, fails: bool = False, exchange: Exchange | None = None
) -> bytes | None:
    async def work() -> bytes:
        await trio.sleep(seconds)
        if fails:
            raise ValueError("gone")
        return RESULT

    def body_of(outcome: bytes | Exception) -> bytes:
        return FAILURE if isinstance(outcome, Exception) else outcome

    return await stream_slow_answer(
        exchange or exchange_with(client), work, [("x-amz-request-id", "7")], body_of
    )


def body_in(sent: bytes) -> bytes:
    """Join the body of an answer in chunks that has ended."""
    head, _, rest = sent.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        assert rest[count : count + 2] == b"\r\n"
        if not count:
            assert rest == b"\r\n"
            return body
        body += rest[:count]
        rest = rest[count + 2 :]


async def test_what_ends_soon_is_not_begun(autojump_clock: trio.testing.MockClock) -> None:
    client = Client()
    assert await answer(client, limits.SLOW_ANSWER_S / 2) == RESULT
    with pytest.raises(ValueError, match="gone"):
        await answer(client, limits.SLOW_ANSWER_S / 2, fails=True)
    assert client.sent == b""


@pytest.mark.parametrize("fails", [False, True])
async def test_what_takes_long_is_begun_and_kept_alive(
    autojump_clock: trio.testing.MockClock, fails: bool
) -> None:
    client, began = Client(), trio.current_time()
    assert await answer(client, 95, fails=fails) is None
    body = body_in(client.sent)
    assert client.sent.startswith(b"HTTP/1.1 200 ")
    assert b"x-amz-request-id: 7\r\n" in client.sent
    assert body.startswith(DECLARATION + b" ")
    assert ElementTree.fromstring(body).tag.rpartition("}")[2] == (
        "Error" if fails else "CompleteMultipartUploadResult"
    )
    silences = [
        after - before for before, after in zip([began, *client.sent_at], client.sent_at, strict=False)
    ]
    assert max(silences) <= limits.SLOW_ANSWER_S + 0.01


@pytest.mark.parametrize(
    "head", [("POST /b/k?uploadId=1 HTTP/1.0",), ("POST /b/k?uploadId=1 HTTP/1.1", "Connection: close")]
)
async def test_who_cannot_take_chunks_reads_to_the_end(
    autojump_clock: trio.testing.MockClock, head: tuple[str, ...]
) -> None:
    client = Client()
    assert await answer(client, 95, exchange=exchange_with(client, *head)) is None
    lines, _, body = client.sent.partition(b"\r\n\r\n")
    assert b"chunked" not in lines
    assert b"\r\nConnection: close" in lines
    assert ElementTree.fromstring(body).tag.endswith("CompleteMultipartUploadResult")


async def test_http_1_0_is_not_answered_in_chunks_even_if_it_stays(
    autojump_clock: trio.testing.MockClock,
) -> None:
    client = Client()
    exchange = exchange_with(client, "POST /b/k?uploadId=1 HTTP/1.0", "Connection: keep-alive")
    assert await answer(client, 95, exchange=exchange) is None
    assert b"chunked" not in client.sent
    assert not exchange.keep_alive


async def test_a_client_that_has_gone_ends_the_operation(autojump_clock: trio.testing.MockClock) -> None:
    client, ended = Client(), []

    async def work() -> bytes:
        try:
            await trio.sleep(1000)
        finally:
            ended.append(trio.current_time())
        return RESULT

    client.gone = True
    began = trio.current_time()
    with pytest.raises(Gone):
        await stream_slow_answer(exchange_with(client), work, [], lambda outcome: b"")
    assert ended[0] - began < 2 * limits.SLOW_ANSWER_S


# --- boto3 ---------------------------------------------------------------------------------------------------
def boto3_gets(sent: bytes, call: Callable[[object], object]) -> object:
    """What boto3 makes of an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                data = b""
                while b"</CompleteMultipartUpload>" not in data:
                    data += connection.recv(1 << 16)
                connection.sendall(sent)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
            config=Config(retries={"max_attempts": 0}, read_timeout=WAIT_S),
        )
        try:
            return call(client)
        finally:
            thread.join()


def complete(client: object) -> object:
    return client.complete_multipart_upload(  # type: ignore[attr-defined]
        Bucket="b", Key="k", UploadId="1", MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": "x"}]}
    )


@pytest.mark.parametrize("fails", [False, True])
async def test_boto3_understands_it(autojump_clock: trio.testing.MockClock, fails: bool) -> None:
    client = Client()
    await answer(client, 95, fails=fails)
    look: Callable[[], Awaitable[object]] = lambda: trio.to_thread.run_sync(boto3_gets, client.sent, complete)  # noqa: E731
    if fails:
        with pytest.raises(ClientError, match="InvalidPart"):
            await look()
    else:
        assert (await look())["ETag"] == '"0123-2"'  # type: ignore[index]
