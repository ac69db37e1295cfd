"""Clients that misbehave at the Conductor's door: malformed, huge and slow ones, and some that go away."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
import trio

from kvfs import limits
from kvfs.http.head import Head
from kvfs.http.http_exchange import Exchange
from kvfs.http.input_buffer import InputBuffer
from kvfs.http.transports import Buffer
from kvfs.http.transports import Gone as ClientGone
from kvfs.watch.hub import Hub
from kvfs.watch.panels import Snapshot
from kvfs.watch.window import Window
from scheduler.conductor.door.api import Api
from scheduler.conductor.door.operations import Context
from scheduler.conductor.sources import StreamName
from scheduler.conductor.values import Instance
from tests.support.conductors import Clock, asking, conductor, instance, serving
from tests.support.door_requests import PROMPT, given
from tests.support.waits import until


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/nothing", None, 404, "/openapi.json lists them"),
        ("GET", "/v1/route", None, 405, "there is POST"),
        ("POST", "/v1/explain/x", {}, 405, "there is GET"),
        ("GET", f"/v1/explain/{'x' * 129}", None, 404, "no such path"),
        ("GET", "/v1/explain/nothing", None, 404, "'nothing'"),
        ("POST", "/v1/route", b"{", 400, "the body is not as /openapi.json says"),
        ("POST", "/v1/route", b"\xff\xfe", 400, "the body is not"),
        ("POST", "/v1/route", {"model": "m", "tokens": ["x"]}, 400, r"\$\.tokens\[0\]"),
        ("POST", "/v1/route", {"model": "m", "tokens": [1], "what": 1}, 400, "unknown field `what`"),
        ("POST", "/v1/route", {"tokens": [1]}, 400, "missing required field `model`"),
        ("POST", "/v1/route", {"model": "m", "tokens": [1 << 40]}, 400, "token 0 is 1099511627776"),
        ("POST", "/v1/instances", b"[" * 50_000, 400, "the body is not"),
        ("POST", "/v1/instances/a/role", {"role": "king"}, 400, r"king.*\$\.role"),
        ("POST", "/v1/reservations/x/done", {"cached_tokens": -1}, 404, "'x'"),
        ("POST", "/v1/route", {"model": "m", "length": 1, "ttft_slo_s": -1}, 400, "ttft_slo_s is -1"),
        ("POST", "/v1/match", {"model": "m", "length": 1, "waited_s": -1}, 400, "waited_s is -1"),
        (
            "POST",
            "/v1/match",
            {"model": "m", "length": 1, "output_tokens": 1 << 21},
            400,
            "output_tokens.* 1048576",
        ),
        ("POST", "/v1/instances", given("b", groups=[{"group": 0}]), 400, r"`kind`.*\$\.groups\[0\]"),
        (
            "POST",
            "/v1/instances",
            given("b", engine_rank=1024),
            400,
            "engine_rank is 1024: must be from 0 to 1023",
        ),
        (
            "POST",
            "/v1/instances",
            given("b", store_replay="x" * 1025),
            400,
            "store_replay: the limit is 1024",
        ),
    ],
)
async def test_a_malformed_request_is_answered_with_what_is_wrong(
    method: str, path: str, body: object, status: int, message: str
) -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        found = await asker.ask(method, path, body)
        assert found.status == status
        assert re.search(message, found.json["error"]["message"])
        assert (await asker.ask("GET", "/healthz")).status == 200, "the connection goes on"


async def test_what_is_no_http_is_answered_in_the_same_form() -> None:
    async with serving() as (_, addresses), await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
        await stream.send_all(b"GARBAGE\r\n\r\n")
        answer = b"".join([data async for data in stream])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "BadRequest"


async def test_a_body_over_its_limit_is_refused_before_it_comes() -> None:
    async with serving() as (_, addresses):
        for path, most in (
            ("/v1/instances", limits.MAX_SMALL_BODY_BYTES),
            ("/v1/route", limits.MAX_CONDUCTOR_BODY_BYTES),
        ):
            async with await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
                head = f"POST {path} HTTP/1.1\r\nHost: c\r\nContent-Length: {most + 1}\r\n\r\n"
                await stream.send_all(head.encode())
                answer = await stream.receive_some(4096)
                assert answer.startswith(b"HTTP/1.1 413 ")
                assert f"the limit is {most}".encode() in answer


async def test_a_chunked_body_over_its_limit_is_cut_off() -> None:
    async with serving() as (service, addresses):
        async with await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
            await stream.send_all(
                b"POST /v1/instances HTTP/1.1\r\nHost: c\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            answer = b""
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    try:
                        for _ in range(100):
                            await stream.send_all(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
                    except trio.BrokenResourceError:
                        pass

                nursery.start_soon(send)
                answer = await stream.receive_some(4096)
                nursery.cancel_scope.cancel()
        assert answer.startswith(b"HTTP/1.1 413 ")
        await until(lambda: service._api._bodies_bytes == 0)


async def test_bodies_in_memory_are_bounded_and_an_announced_length_takes_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler.conductor.door.api.CONDUCTOR_BODIES_BYTES", 300_000)
    async with serving() as (service, addresses), AsyncExitStack() as stack:
        slow = []
        for _ in range(8):
            stream = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", addresses.port))
            await stream.send_all(b"POST /v1/route HTTP/1.1\r\nHost: c\r\nContent-Length: 9000000\r\n\r\n[")
            slow.append(stream)
        await until(lambda: service._api._bodies_bytes >= 8)
        asker = await stack.enter_async_context(asking(addresses))
        assert (await asker.ask("GET", "/v1/instances")).status == 200
        big = await asker.ask("POST", "/v1/route", b" " * 250_000)
        assert (big.status, big.json["error"]["code"]) == (503, "SlowDown")
        for stream in slow:
            await stream.aclose()
        await until(lambda: service._api._bodies_bytes == 0)


async def test_a_connection_that_ends_inside_a_body_reserves_nothing() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        body = json.dumps({"model": "m", "tokens": PROMPT}).encode()
        async with await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
            head = f"POST /v1/route HTTP/1.1\r\nHost: c\r\nContent-Length: {len(body)}\r\n\r\n"
            await stream.send_all(head.encode() + body[:-1])
        await until(lambda: service._server.open_connections == 1)
        assert service.conductor.status()["reservations"] == 0


class Transport:
    """A transport that nothing comes from."""

    peer, secure, quiet_s, answered_s = "test", False, 1.0, 0.0

    def fileno(self) -> int:
        return -1

    def wake(self) -> None: ...

    def give_up(self) -> None: ...

    def try_send(self, data: bytes) -> bool:
        return False

    async def receive_into(self, into: memoryview, timeout_s: float, *, idle: bool = False) -> int:
        return 0

    async def send(self, parts: Sequence[Buffer]) -> None: ...

    async def send_file(self, head: bytes, descriptor: int, offset: int, count: int) -> None: ...

    async def close(self, *, linger: bool) -> None: ...


class NobodyFollows:
    def follow(self, instance: Instance) -> None: ...

    def sync(self) -> None: ...

    def key_of(self, name: StreamName, hash: int) -> bytes | None:
        return None


async def never(_: Window) -> Snapshot:
    raise AssertionError("nobody watches")


async def test_what_was_reserved_for_a_client_that_is_gone_ends() -> None:
    made = conductor(Clock(), instance("a"))

    class Gone(Transport):
        async def send(self, parts: Sequence[Buffer]) -> None:
            raise ClientGone("reset")

    async def serve(body: bytes, path: str) -> None:
        transport = Gone()
        source = InputBuffer(transport)
        source.feed(body)
        head = Head("POST", path.encode(), [], len(body), False, False, True)
        with pytest.raises(ClientGone):
            await Api(Context(made, NobodyFollows()), [], Hub(never)).serve(Exchange(head, transport, source))

    one = {"model": "m", "tokens": PROMPT}
    await serve(json.dumps(one).encode(), "/v1/route")
    await serve(json.dumps({"requests": [one, one]}).encode(), "/v1/route_batch")
    assert (made.counts["routed"], made.counts["cancelled"]) == (3, 3)
    assert made.status()["reservations"] == 0
