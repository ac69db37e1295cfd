"""Hand-overs of other connectors: what they get is what their own routers send, as recorded in their sources."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from kvfs import limits
from kvfs.cli.proxy_command import proxy_options
from kvfs.config.load import load
from kvfs.config.settings import HandOver
from kvfs.errors import ConfigError
from kvfs.http.http_exchange import Exchange
from kvfs.http.server_place import Place, place_of
from kvfs.limits import PREFILL_LEG_TOKENS
from scheduler.conductor.conductor import Conductor
from scheduler.proxy import handover
from tests.scheduler.proxy.test_failures import ended
from tests.support.conductors import Clock, conductor, hears, instance
from tests.support.processor_waits import within
from tests.support.stub_engines import PROMPT, Stand, proxy_stand
from tests.support.waits import WAIT_S, until

NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
BOTH_AT_ONCE: list[HandOver] = ["mooncake", "sglang"]


def bodies(stand: Stand) -> list[dict[str, object]]:
    return [engine.completions[0].body for engine in stand.engines]


async def test_nixl_passes_the_blocks_places_on() -> None:
    async with proxy_stand("prefill", "decode", hand_over="nixl") as stand:
        stand.engines[0].prefill_params = NIXL
        assert (await stand.ask("/v1/completions", {"prompt": PROMPT})).status == 200
        prefill, decode = bodies(stand)
        assert prefill["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        assert decode["kv_transfer_params"] == NIXL


def note_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> trio.Event:
    """Return what is set as soon as a method of any exchange was called."""
    called = trio.Event()
    method = getattr(Exchange, name)

    def noting(exchange: Exchange, *arguments: Any) -> None:
        method(exchange, *arguments)
        called.set()

    monkeypatch.setattr(Exchange, name, noting)
    return called


LEFT_BETWEEN: list[tuple[HandOver, bool]] = [("store", False), ("nixl", True), ("nixl", False)]


@pytest.mark.parametrize(("hand_over", "ends"), LEFT_BETWEEN)
async def test_blocks_that_wait_for_a_client_that_left_are_given_up(
    hand_over: HandOver, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has prefilled for NIXL keeps them until the decode engine speaks of them: it is sent the request,
    if the prefill leg `ends` in time. By the store nothing waits, and there is no decode leg."""
    left, lingers = note_calls(monkeypatch, "abandon"), note_calls(monkeypatch, "linger")
    if ends:
        monkeypatch.setattr(limits, "PROXY_LINGER_S", 2 * WAIT_S)
    async with proxy_stand("prefill", "decode", hand_over=hand_over) as stand:
        prefill, decode = stand.engines
        prefill.prefill_params, prefill.behaviour, decode.behaviour = NIXL, "pause_after_the_head", "pause"
        asker = await stand.asker()
        await asker.send("/v1/completions", {"prompt": PROMPT})
        await (lingers if hand_over == "nixl" else prefill.began).wait()
        await trio.aclose_forcefully(asker.stream)
        await left.wait()
        if ends:
            prefill.go.set()
            await until(lambda: bool(decode.completions))
            assert decode.completions[0].body["kv_transfer_params"] == NIXL
        else:
            await until(prefill.completions[0].gone.is_set)
            assert not decode.completions


async def test_the_store_s_connector_names_its_last_block() -> None:
    async with proxy_stand("prefill", "decode") as stand:
        named = {"do_remote_prefill": True, "kvfs": {"namespace": "ab", "last_block": "cd"}}
        stand.engines[0].prefill_params = named
        await stand.ask("/v1/completions", {"prompt": PROMPT})
        prefill, decode = bodies(stand)
        assert prefill["kv_transfer_params"] == {"do_remote_decode": True}
        assert decode["kv_transfer_params"] == named


def test_a_prefill_leg_that_says_nothing_adds_nothing() -> None:
    for answer in (b"", b"[]", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 5}'):
        assert handover.after_prefill(answer, None) == {}


def test_sglang_s_room_says_which_rank_prefills() -> None:
    where = handover.Bootstrap("h", 8998)
    for number in (0, 5, handover.MAX_ROOM, (1 << 63) - 1):
        put = handover.sglang(where, number, handover.Rank(3, 8))
        assert put["bootstrap_room"] % 8 == 3
        assert 0 <= put["bootstrap_room"] <= handover.MAX_ROOM


def test_mooncake_s_engine_is_the_one_of_its_rank() -> None:
    answer = json.dumps({"0": {"engine_id": "a", "worker_addr": {}}, "1": {"engine_id": "b"}}).encode()
    assert [handover.engine_id(answer, rank) for rank in (0, 1, 2)] == ["a", "b", ""]
    assert handover.engine_id(b"nonsense") == ""


@pytest.mark.parametrize(
    ("setting", "host", "port"),
    [("", "e", 8998), (":9000", "e", 9000), ("b:9000", "b", 9000), ("[::1]:9000", "::1", 9000)],
)
def test_a_bootstrap_server_is_at_the_engine_s_host_unless_another_is_named(
    setting: str, host: str, port: int
) -> None:
    found = handover.bootstrap_at(setting, "e")
    assert found == handover.Bootstrap(host, port)
    address = handover.mooncake(found, "t")[1]["kv_transfer_params"]["remote_bootstrap_addr"]
    assert place_of(address) == Place(host, port)


async def bootstrap_server(stand: Stand, nursery: trio.Nursery) -> None:
    """Answer Mooncake's /query, and have the prefill engines named with it."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        body = json.dumps({"0": {"engine_id": "engine-p"}}).encode()
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, serve, [listener])
    place = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    for engine in stand.proxy.engines:
        if engine.address.role == "prefill":
            engine.bootstrap = place


@pytest.mark.parametrize("kind", BOTH_AT_ONCE)
@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_at_once_are_joined(kind: HandOver, stream: bool) -> None:
    async with proxy_stand("prefill", "decode", hand_over=kind) as stand, trio.open_nursery() as nursery:
        await bootstrap_server(stand, nursery)
        # Neither engine answers before both have their leg.
        for engine in stand.engines:
            engine.behaviour = "pause"
        nursery.start_soon(go_with_both, stand)
        answer = await stand.ask("/v1/completions", {"prompt": PROMPT, "stream": stream, "max_tokens": 3})
        assert answer.status == 200
        prefill, decode = bodies(stand)
        if kind == "sglang":
            assert prefill == decode
            assert prefill["bootstrap_host"] == "127.0.0.1"
        else:
            first, second = prefill["kv_transfer_params"], decode["kv_transfer_params"]
            assert isinstance(first, dict)
            assert isinstance(second, dict)
            assert first["transfer_id"] == second["transfer_id"]
            assert (first["do_remote_decode"], second["do_remote_prefill"]) == (True, True)
            assert second["remote_engine_id"] == "engine-p"
            assert second["remote_bootstrap_addr"].startswith("http://127.0.0.1:")
            assert prefill["max_tokens"] == 1
        await ended(stand)
        nursery.cancel_scope.cancel()


async def go_with_both(stand: Stand) -> None:
    await until(lambda: all(engine.completions for engine in stand.engines))
    for engine in stand.engines:
        engine.go.set()


@pytest.mark.parametrize("kind", BOTH_AT_ONCE)
async def test_a_dead_leg_does_not_keep_the_other_hanging(kind: HandOver) -> None:
    async with (
        proxy_stand("prefill", "prefill", "decode", "decode", hand_over=kind) as stand,
        trio.open_nursery() as nursery,
    ):
        await bootstrap_server(stand, nursery)
        _, dead, *decodes = stand.engines
        dead.behaviour = "die_before"
        for engine in decodes:
            engine.behaviour = "pause"
        decodes[0].go.set()
        with within(2.0), trio.fail_after(WAIT_S):
            answer = await stand.ask("/v1/completions", {"prompt": PROMPT})
        assert answer.status == 200
        assert decodes[1].completions[0].gone.is_set(), "the leg that waited for the dead one was ended"
        await ended(stand)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def sglang_stand(router: Conductor | None = None, **options: Any) -> AsyncIterator[Stand]:
    """Engines that are started for one side each, and do nothing without a room."""
    async with proxy_stand("prefill", "decode", hand_over="sglang", router=router, **options) as stand:
        for engine in stand.engines:
            engine.needs_room = True
            if router is not None:
                router.registry.add(instance(engine.role, url=engine.url, role=engine.role))
        prefill, decode = stand.engines
        decode.behaviour, decode.prefiller = "joined", prefill
        yield stand


@pytest.mark.parametrize("conducted", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_short_prompts_have_both_of_sglang_s_legs(conducted: bool, stream: bool) -> None:
    """An engine that is started for one side does nothing without a room, however little there is to compute."""
    made = conductor(Clock()) if conducted else None
    async with sglang_stand(made) as stand:
        prompt = list(range(PREFILL_LEG_TOKENS // 4))
        if made is not None:
            hears(made, "engine-decode", prompt)
        asked: list[dict[str, object]] = [
            {"prompt": prompt},
            {"prompt": "x", "echo": True},
            {"prompt": "x", "logprobs": 2},
        ]
        for body in asked:
            answer = await stand.ask("/v1/completions", {"model": "m", "stream": stream, **body})
            assert answer.status == 200, answer.body
        await ended(stand)
        legs = [[leg.body for leg in engine.completions] for engine in stand.engines]
        assert legs[0] == legs[1]
        assert len({body["bootstrap_room"] for body in legs[0]}) == 3


async def test_each_of_several_prompts_has_a_room() -> None:
    async with sglang_stand() as stand:
        for prompt, rooms in ((["a", "b", "c"], 3), ([[1, 2], [3]], 2), (["a"], 1)):
            assert (await stand.ask("/v1/completions", {"prompt": prompt})).status == 200
            prefill, decode = (engine.completions[-1].body for engine in stand.engines)
            assert prefill == decode
            assert decode["bootstrap_host"] == ["127.0.0.1"] * rooms
            assert decode["bootstrap_port"] == [handover.BOOTSTRAP_PORT] * rooms
            assert len(set(decode["bootstrap_room"])) == len(decode["bootstrap_room"]) == rooms


async def test_bootstrap_servers_are_those_of_a_conductor_s_instances_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = conductor(Clock())
    made.registry.awaited.add("http://late:1")
    bootstraps = {f"http://{name}:1": "b:9" for name in ("late", "stranger")}
    async with sglang_stand(made, bootstraps=bootstraps) as stand:
        prefill, decode = stand.engines
        bootstraps[prefill.url] = "10.0.0.7:9000"
        assert (await stand.ask("/v1/completions", {"model": "m", "prompt": PROMPT})).status == 200
        body = decode.completions[0].body
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("10.0.0.7", 9000)
        said = "[proxy] bootstraps: 'http://stranger:1' is no engine that is known"
        await until(lambda: said in caplog.text)
        made.registry.awaited.clear()
        await until(lambda: "'http://late:1'" in caplog.text)
        assert caplog.text.count("[proxy] bootstraps") == 2


CHECKED: dict[str, tuple[dict[tuple[str, str], Any], str]] = {
    "named": ({("proxy", "engines"): ["http://e:1"]}, ""),
    "a stranger": (
        {("proxy", "engines"): ["http://other:1"]},
        "'http://e:1' is none of engines, prefill and",
    ),
    "a Conductor elsewhere may name it": ({("proxy", "conductor"): "http://c:1"}, ""),
    "one in the process may": ({("proxy", "conduct"): True, ("proxy", "engines"): ["http://other:1"]}, ""),
}


@pytest.mark.parametrize(("flags", "fault"), CHECKED.values(), ids=CHECKED)
def test_a_bootstrap_server_of_no_engine_is_refused_unless_it_may_come(
    flags: dict[tuple[str, str], Any], fault: str
) -> None:
    settings = load(None, {("proxy", "bootstraps"): {"http://e:1": "e:9000"}, **flags})
    if fault:
        with pytest.raises(ConfigError, match=re.escape(f"[proxy] bootstraps: {fault}")):
            proxy_options(settings)
    else:
        assert proxy_options(settings).bootstraps == {"http://e:1": "e:9000"}


def test_a_bootstrap_server_has_its_engine_s_url() -> None:
    with pytest.raises(ConfigError, match=r"bootstraps.*must be http://HOST:PORT"):
        load(None, {("proxy", "bootstraps"): {"e:1": "e:9000"}})


async def test_what_rooms_cannot_carry_is_refused_before_any_engine_is_asked() -> None:
    async with sglang_stand() as stand:
        for body, named in (
            ({"prompt": "x", "n": 2}, "n"),
            ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
            ({"prompt": ["x"] * (limits.MAX_PROXY_ROOMS + 1)}, "prompt"),
        ):
            answer = await stand.ask("/v1/completions", body)
            error = answer.json()["error"]
            assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", named)
        assert "room" in error["message"]
        assert not any(engine.completions for engine in stand.engines)
        assert (await stand.ask("/v1/completions", {"prompt": "x", "n": 1, "echo": True})).status == 200


async def test_one_engine_of_sglang_that_does_both_needs_no_room() -> None:
    async with proxy_stand("both", hand_over="sglang") as stand:
        assert (await stand.ask("/v1/completions", {"prompt": "x"})).status == 200
        assert "bootstrap_room" not in stand.engines[0].completions[0].body


async def test_sglang_s_decode_engine_gets_nothing_without_a_prefill_engine() -> None:
    async with proxy_stand("decode", hand_over="sglang") as stand:
        answer = await stand.ask("/v1/completions", {"prompt": PROMPT})
        assert (answer.status, answer.headers[b"retry-after"]) == (429, b"1")
        assert not stand.engines[0].completions
