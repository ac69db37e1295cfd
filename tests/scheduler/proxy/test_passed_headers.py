"""Headers that go through the proxy, and those that do not: of one connection, and what steers past its choice."""

from __future__ import annotations

import pytest

from scheduler.proxy.passed_headers import client_headers
from tests.support.stub_engines import PROMPT, proxy_stand

PASSED = {
    "X-Mine": "1",
    "Cookie": "a=b",
    "Accept": "text/event-stream",
    "X-Overridden": "no",
    "Traceparent": "00-1",
}
KEPT = {
    "Connection": "keep-alive, X-Hop , x-other",
    "X-Hop": "1",
    "X-Other": "2",
    "Proxy-Connection": "keep-alive",
    "Keep-Alive": "timeout=5",
    "TE": "trailers",
    "Proxy-Authorization": "Basic x",
    "Accept-Encoding": "br",
    "X-Override-Bootstrap-Host": "evil",
    "X-OVERRIDE-RID": "another's",
    "x-override-routed-dp-rank": "3",
    "X-Data-Parallel-Rank": "3",
    "X-Data-Parallel-Host-Port": "evil:1",
    "X-Prefiller-Host-Port": "evil:1",
    "X-Encoder-Hosts-Ports": "evil:1",
    "X-KV-Cache-Source-Host-Port": "evil:1",
    "X-Gateway-Destination-Endpoint": "evil:1",
}
BODY = {"model": "m", "prompt": PROMPT}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses"])
async def test_a_client_s_headers_go_to_each_engine_but_for_those_of_its_connection_and_those_that_steer(
    path: str,
) -> None:
    async with proxy_stand("prefill", "decode") as stand:
        assert (await stand.ask(path, BODY, headers=PASSED | KEPT)).status == 200
        asked = [each for engine in stand.engines for each in engine.asked]
        assert len(asked) == (2 if path == "/v1/completions" else 1)
        for each in asked:
            passed = {name.lower().encode(): value.encode() for name, value in PASSED.items()}
            assert {name: value for name, value in each.headers.items() if name in passed} == passed
            assert set(each.headers) - set(passed) == {b"host", b"content-length", b"x-request-id"}


def test_an_engine_s_headers_go_to_the_client_but_for_those_of_its_connection() -> None:
    own = [
        (b"content-type", b"text/event-stream"),
        (b"x-mine", b"\xe9"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]
    kept = [
        (b"connection", b"close, x-hop"),
        (b"connection", b"X-Other"),
        *(
            (name, b"1")
            for name in (b"x-hop", b"x-other", b"transfer-encoding", b"content-length", b"date", b"server")
        ),
        *((name, b"1") for name in (b"keep-alive", b"proxy-authenticate", b"trailer", b"upgrade")),
    ]
    found = client_headers([*kept, *own])
    assert found == [(name.decode(), value.decode("latin-1")) for name, value in own]


@pytest.mark.parametrize("id", ["", "a\r\nset-cookie: b", "a\n", "\xe9", "a\x7f"])
def test_a_conductor_s_id_is_named_unless_it_is_no_header(id: str) -> None:
    engine_says = [(b"x-kvfs-route", b"its own"), (b"x-mine", b"1")]
    assert client_headers(engine_says, id) == [("x-mine", "1")]
    assert client_headers(engine_says, "0f-1") == [("x-mine", "1"), ("x-kvfs-route", "0f-1")]
