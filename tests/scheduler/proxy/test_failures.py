"""Engines that die, stall and answer nonsense, and clients that go away."""

from __future__ import annotations

import json

import pytest
import trio

from kvfs import limits
from tests.support.processor_waits import within
from tests.support.stub_engines import PROMPT, WORDS, Stand, StubEngine, leave, proxy_stand
from tests.support.waits import WAIT_S, until

BODY = {"prompt": "p", "max_tokens": 5}
STREAM = {**BODY, "stream": True}
FAILING = ["die_before", "die_in_the_head", "garbage", "huge_head", "busy"]


def one_of(stand: Stand) -> tuple[StubEngine, StubEngine]:
    """The engine that has a request, and the other."""
    first, second = stand.engines
    return (first, second) if first.completions else (second, first)


def behave(stand: Stand, behaviour: str) -> None:
    for engine in stand.engines:
        engine.behaviour = behaviour


async def ended(stand: Stand) -> None:
    """Nothing is under way any more, in the proxy and in the account of its router."""
    await until(lambda: stand.proxy.handler.in_flight == 0)
    assert not any(engine.requests for engine in stand.proxy.engines)
    assert stand.proxy.load._reserved == {}
    assert not any(stand.proxy.load._tokens.values())
    assert not any(stand.proxy.load._requests.values())


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("behaviour", FAILING)
async def test_a_request_goes_elsewhere_before_its_first_byte(
    behaviour: str, body: dict[str, object]
) -> None:
    async with proxy_stand("both", "both") as stand:
        broken, other = stand.engines
        broken.behaviour = behaviour
        for _ in range(4):
            answer = await stand.ask("/v1/completions", body)
            assert answer.status == 200
        assert len(other.completions) == 4
        assert broken.completions
        await ended(stand)


async def test_an_answer_that_is_not_streamed_is_made_again_when_it_breaks_off() -> None:
    async with proxy_stand("both", "both") as stand:
        stand.engines[0].behaviour = stand.engines[1].behaviour = "die_after"
        stand.engines[0].behaviour = "well"
        for _ in range(2):
            answer = await stand.ask("/v1/completions", BODY)
            assert answer.json()["choices"][0]["text"] == "".join(WORDS[:5])


@pytest.mark.parametrize("behaviour", FAILING)
async def test_a_request_is_retried_twice_and_no_more(behaviour: str) -> None:
    async with proxy_stand("both", "both", "both", "both") as stand:
        behave(stand, behaviour)
        answer = await stand.ask("/v1/completions", STREAM)
        assert answer.status == 503
        assert answer.headers[b"retry-after"]
        assert answer.json()["error"]["message"]
        assert sum(len(engine.completions) for engine in stand.engines) == 1 + limits.PROXY_RETRIES
        await ended(stand)


async def test_an_engine_alone_says_itself_why_it_takes_no_request() -> None:
    async with proxy_stand() as stand:
        behave(stand, "busy")
        answer = await stand.ask("/v1/completions", STREAM)
        assert (answer.status, answer.headers[b"retry-after"]) == (503, b"1")
        assert answer.json()["error"]["message"] == "overloaded"
        assert len(stand.engines[0].completions) == 1


async def test_after_the_first_byte_the_stream_ends_with_an_error_event() -> None:
    async with proxy_stand("both", "both") as stand:
        behave(stand, "die_after")
        asker = await stand.asker()
        async with asker.stream:
            answer = await asker.ask("/v1/completions", STREAM)
            *events, last = answer.events()
            assert [json.loads(each)["choices"][0]["text"] for each in events] == WORDS[:2]
            assert json.loads(last)["error"]["code"] == "engine_failed"
            assert sum(len(engine.completions) for engine in stand.engines) == 1
            behave(stand, "well")
            assert (await asker.ask("/v1/completions", BODY)).status == 200
        await ended(stand)


async def test_an_event_without_end_is_not_kept() -> None:
    async with proxy_stand() as stand:
        behave(stand, "huge_event")
        answer = await stand.ask("/v1/completions", STREAM)
        assert answer.status == 503
        await ended(stand)


async def test_the_prefill_leg_may_fail() -> None:
    async with proxy_stand("prefill", "decode") as stand:
        prefill, decode = stand.engines
        for behaviour in (*FAILING, "wrong", "die_after"):
            prefill.behaviour = behaviour
            answer = await stand.ask("/v1/completions", {**STREAM, "prompt": PROMPT})
            assert answer.events()[-1] == "[DONE]", behaviour
        assert len(decode.completions) == len(FAILING) + 2
        await ended(stand)


async def test_a_kept_connection_that_the_engine_closed_is_no_failure() -> None:
    async with proxy_stand() as stand:
        stand.engines[0].closes_second = True
        for _ in range(5):
            assert (await stand.ask("/v1/completions", BODY)).status == 200
        assert stand.proxy.counts.events["failed_legs"] == 0


async def test_a_connection_that_was_unused_for_long_is_not_used_again() -> None:
    async with proxy_stand() as stand:
        await stand.ask("/v1/completions", BODY)
        [engine] = stand.proxy.engines
        await until(lambda: engine.pool.idle > 0)
        before = set(engine.pool._idle)
        for connection in before:
            connection.used_s -= limits.ENGINE_IDLE_S
        assert (await stand.ask("/v1/completions", BODY)).status == 200
        assert before.isdisjoint(engine.pool._idle)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_an_engine_that_freezes_is_out_within_two_seconds(body: dict[str, object]) -> None:
    """It takes connections and answers nothing, as a stopped process does."""
    async with proxy_stand("both", "both") as stand:
        for engine in stand.engines:
            engine.frozen = engine is stand.engines[0]
        with within(2.0):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(ask_well, stand, body)
        assert len(stand.engines[1].completions) == 4
        with within(0.3):  # it is known to be out
            await ask_well(stand, body)
        stand.engines[0].frozen = False
        await until(lambda: not stand.proxy.engines.down())
        await ended(stand)


async def ask_well(stand: Stand, body: dict[str, object]) -> None:
    answer = await stand.ask("/v1/completions", body)
    assert answer.status == 200


async def test_an_engine_that_freezes_inside_a_stream_is_noticed_within_two_seconds() -> None:
    async with proxy_stand("both", "both") as stand:
        behave(stand, "pause_inside")
        asker = await stand.asker()
        async with asker.stream:
            await asker.send("/v1/completions", STREAM)
            first = await asker.first_bytes()
            busy, _ = one_of(stand)
            busy.frozen = True
            with within(2.0), trio.fail_after(WAIT_S):
                answer = await asker.rest(first)
        assert json.loads(answer.events()[-1])["error"]["code"] == "engine_failed"
        await until(busy.completions[0].gone.is_set)
        await ended(stand)


async def test_an_engine_that_computes_for_long_is_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HEALTH_INTERVAL_S", "HEALTH_TIMEOUT_S"):
        monkeypatch.setattr(limits, name, 0.05)
    async with proxy_stand() as stand:
        [engine] = stand.engines
        engine.behaviour = "pause"
        asker = await stand.asker()
        async with asker.stream:
            await asker.send("/v1/completions", BODY)
            await until(lambda: engine.accepted > 6)
            engine.go.set()
            assert (await asker.answer()).status == 200


async def test_an_engine_that_streams_and_is_late_at_health_still_gets_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HEALTH_INTERVAL_S", 0.0)
    monkeypatch.setattr(limits, "HEALTH_TIMEOUT_S", 0.2)
    async with proxy_stand() as stand:
        [engine] = stand.engines
        engine.behaviour, engine.health_late = "trickle", True
        asker = await stand.asker()
        async with asker.stream:
            await asker.send("/v1/completions", STREAM)
            await asker.first_bytes()
            asked = engine.health_asked
            await until(lambda: engine.health_asked > asked + 3)
            assert not stand.proxy.engines.down()
            engine.healthy = engine.health_late = False
            await until(lambda: bool(stand.proxy.engines.down()))


async def test_an_engine_that_dies_and_comes_back_gets_requests_again() -> None:
    async with proxy_stand("both", "both") as stand:
        first, second = stand.engines
        first.die()
        for _ in range(3):
            await ask_well(stand, BODY)
        assert set(stand.proxy.engines.down()) == {first.url}
        await stand.restart(first)
        await until(lambda: not stand.proxy.engines.down())
        before = len(first.completions)
        for _ in range(4):
            await ask_well(stand, BODY)
        assert len(first.completions) == before + 2
        assert len(second.completions) == 5


async def test_without_engines_the_answer_says_when_to_come_again() -> None:
    async with proxy_stand() as stand:
        stand.engines[0].die()
        for _ in range(2):
            answer = await stand.ask("/v1/completions", BODY)
            assert (answer.status, answer.headers[b"retry-after"]) == (503, b"1")
            assert answer.json()["error"]["message"]
        assert (await stand.ask("/health", method="GET")).status == 503
        assert (await stand.ask("/v1/models", method="GET")).status == 503


async def test_one_engine_alone_is_tried_before_its_probe_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_stand() as stand:
        [engine] = stand.engines
        engine.die()
        monkeypatch.setattr(limits, "HEALTH_INTERVAL_S", 1000.0)
        assert (await stand.ask("/v1/completions", BODY)).status == 503
        await stand.restart(engine)
        await ask_well(stand, BODY)
        assert stand.proxy.engines.down(), "no probe has said so"


async def test_one_engine_alone_that_freezes_costs_each_request_its_probe() -> None:
    async with proxy_stand() as stand:
        stand.engines[0].frozen = True
        for _ in range(2):
            with trio.fail_after(WAIT_S):
                answer = await stand.ask("/v1/completions", BODY)
            assert answer.status == 503
        stand.engines[0].frozen = False
        await ask_well(stand, BODY)


# --- clients that go away ------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_goes_away_ends_its_work_at_once(role: str, how: str) -> None:
    """While an engine says nothing at all, in either leg; nobody tries again for it."""
    async with proxy_stand("prefill", "decode") as stand:
        silent = stand.engines[role == "decode"]
        silent.behaviour = "pause"
        asker = await stand.asker()
        await asker.send("/v1/completions", {**STREAM, "prompt": PROMPT})
        await until(lambda: bool(silent.completions))
        await leave(asker.stream, how)
        with within(0.5), trio.fail_after(WAIT_S):
            await silent.completions[0].gone.wait()
        await ended(stand)
        assert len(silent.completions) == 1
        assert bool(stand.engines[1].completions) == (role == "decode")
        assert stand.proxy.counts.outcomes["gone"] == 1


async def test_a_client_that_goes_away_inside_a_stream() -> None:
    async with proxy_stand() as stand:
        [engine] = stand.engines
        engine.behaviour = "pause_inside"
        asker = await stand.asker()
        await asker.send("/v1/completions", STREAM)
        await asker.first_bytes()
        await trio.aclose_forcefully(asker.stream)
        with within(0.5), trio.fail_after(WAIT_S):
            await engine.completions[0].gone.wait()
        await ended(stand)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_client_that_ends_its_sending_half_is_not_gone(body: dict[str, object]) -> None:
    """It looks like one that closed its connection until it takes what it is sent."""
    async with proxy_stand() as stand:
        [engine] = stand.engines
        engine.behaviour = "pause"
        asker = await stand.asker()
        async with asker.stream:
            await asker.send("/v1/completions", body)
            await asker.stream.send_eof()
            await until(lambda: bool(engine.completions))
            with trio.fail_after(WAIT_S):
                assert await asker.stream.receive_some(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
            engine.go.set()
            assert (await asker.answer()).status == 200
            assert await asker.stream.receive_some(1) == b""
        await ended(stand)
        assert stand.proxy.counts.outcomes["gone"] == 0


async def test_a_client_that_ends_its_sending_half_inside_a_stream_gets_the_rest() -> None:
    async with proxy_stand() as stand:
        stand.engines[0].behaviour = "pause_inside"
        asker = await stand.asker()
        async with asker.stream:
            await asker.send("/v1/completions", STREAM)
            first = await asker.first_bytes()
            await asker.stream.send_eof()
            with trio.fail_after(WAIT_S):
                first.feed(await asker.stream.receive_some(65536))
            assert first.pieces[-1] == b":\n\n", "a comment, which it passes over"
            stand.engines[0].go.set()
            answer = await asker.rest(first)
        events = [each for each in answer.events() if each != ":"]
        assert [json.loads(each)["choices"][0]["text"] for each in events[:-1]] == WORDS[:5]
        await ended(stand)


async def test_a_client_that_ends_its_sending_half_while_it_takes_nothing_gets_whole_events() -> None:
    """What it is asked by would stand inside what waits to be sent."""
    async with proxy_stand() as stand:
        asker = await stand.asker()
        async with asker.stream:
            stand.engines[0].behaviour = "large"
            await asker.send("/v1/completions", STREAM)
            first = await asker.first_bytes()
            # All buffers are full once the engine waits to send.
            await until(lambda: stand.proxy.handler.in_flight == 1 and stand.engines[0].waits())
            await asker.stream.send_eof()
            answer = await asker.rest(first)
        events = [json.loads(each) for each in answer.events() if each not in (":", "[DONE]")]
        assert [each["choices"][0]["index"] for each in events] == list(range(400))
        assert answer.events()[-1] == "[DONE]"
        await ended(stand)


async def test_what_a_client_sends_ahead_is_answered_after() -> None:
    async with proxy_stand() as stand:
        [engine] = stand.engines
        engine.behaviour = "pause"
        asker = await stand.asker()
        async with asker.stream:
            await asker.send("/v1/completions", BODY)
            await asker.send("/v1/models", method="GET")
            await until(lambda: bool(engine.completions))
            engine.go.set()
            data = b""
            while b'"object":"list"' not in data:
                data += await asker.stream.receive_some(65536)
            assert data.count(b"HTTP/1.1 200") == 2
