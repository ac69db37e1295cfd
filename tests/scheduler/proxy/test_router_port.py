"""What the proxy asks a router and reports to it, with a router that writes it down; and going on without one."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from kvfs import limits
from kvfs.config.settings import HandOver
from kvfs.errors import InvalidRequest, NotFound
from scheduler.conductor.conductor import WITHOUT_TOKENS
from scheduler.conductor.values import NOTHING_SAID, Refused, Routed, RouteRequest, Usage
from tests.scheduler.proxy.test_handover import NIXL
from tests.support.conductors import Clock, conductor, hears, instance
from tests.support.stub_engines import (
    BEHAVIOURS,
    Asked,
    Stand,
    StubEngine,
    begin_stream,
    event,
    leave,
    proxy_stand,
    send_chunk,
)
from tests.support.waits import WAIT_S, until

CHAT = "/v1/chat/completions"


class NotingRouter:
    """Route to the given engines, and write down what is reported."""

    def __init__(self) -> None:
        self.stand: Stand | None = None
        self.requests: list[RouteRequest] = []
        self.reports: list[tuple[Any, ...]] = []
        self.cached_tokens = 0
        self.prefill_peer = ""
        self.answer: Routed | Refused | Exception | None = None

    def route(self, request: RouteRequest) -> Routed | Refused:
        self.requests.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        assert self.stand is not None
        prefill, decode = self.stand.engines
        return Routed(
            id=f"r{len(self.requests)}",
            decode="D",
            decode_url=decode.url,
            prefill="P",
            prefill_url=prefill.url,
            prefill_peer=self.prefill_peer,
            cached_tokens=self.cached_tokens,
        )

    def prefilled(self, id: str) -> None:
        self.reports.append(("prefilled", id))

    def prefill_failed(self, id: str) -> None:
        self.reports.append(("prefill_failed", id))

    def first_token(self, id: str) -> None:
        self.reports.append(("first_token", id))

    def done(self, id: str, usage: Usage = NOTHING_SAID) -> None:
        self.reports.append(("done", id, usage))

    def cancel(self, id: str) -> None:
        self.reports.append(("cancel", id))

    def unreachable(self, instance: str) -> None:
        self.reports.append(("unreachable", instance))


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)], **more}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_reported_of_a_request(stream: bool) -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        stand.engines[0].cached_tokens, stand.engines[1].cached_tokens = 320, 992
        body = chat("q", model="m", max_tokens=3, stream=stream)
        assert (await stand.ask(CHAT, body)).status == 200
        [request] = router.requests
        assert (request.model, request.output_tokens, request.streamed) == ("m", 3, stream)
        assert list(request.tokens or ()) == list(range(1000))
        # The true number is the prefill engine's: what the decode engine found is what that has just stored.
        # Nobody sees the first token of an answer that comes whole.
        first_token = [("first_token", "r1")] if stream else []
        assert router.reports == [("prefilled", "r1"), *first_token, ("done", "r1", Usage(320, 3, True))]
        assert stand.engines[1].completions[0].body["kv_transfer_params"] == {
            "do_remote_prefill": True,
            "remote_prefill_cached_tokens": 320,
        }


@pytest.mark.parametrize("peer", ["", "10.0.0.1:9400"])
async def test_a_decode_engine_is_told_whose_store_has_the_blocks(peer: str) -> None:
    """By the router: what a client says of it goes nowhere."""
    router, named = NotingRouter(), {"namespace": "ab", "last_block": "cd"}
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand, router.prefill_peer = stand, peer
        stand.engines[0].prefill_params = {"do_remote_prefill": True, "kvfs": named}
        body = chat("q", kv_transfer_params={"kvfs": {"source": "10.0.0.9:9400"}})
        assert (await stand.ask(CHAT, body)).status == 200
        told = stand.engines[1].completions[0].body["kv_transfer_params"]
        assert told == {"do_remote_prefill": True, "kvfs": {**named, **({"source": peer} if peer else {})}}
        # An engine that has not stored all of it names nothing, so there is nothing to fetch.
        stand.engines[0].prefill_params = {"do_remote_prefill": True}
        assert (await stand.ask(CHAT, body)).status == 200
        assert stand.engines[1].completions[1].body["kv_transfer_params"] == {"do_remote_prefill": True}


async def test_a_prefill_leg_that_the_router_names_is_run_however_much_its_engine_has() -> None:
    """The engine that answers may have nothing of it."""
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        stand.engines[0].cached_tokens = router.cached_tokens = 992
        await stand.ask(CHAT, chat("q"))
        assert [len(engine.completions) for engine in stand.engines] == [1, 1]
        assert router.reports[-1] == ("done", "r1", Usage(992, 4, True))


@pytest.mark.parametrize("behaviour", ["die_before", "busy", "wrong", "die_after"])
async def test_a_prefill_leg_that_fails_is_reported_as_such(behaviour: str) -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        stand.engines[0].behaviour, stand.engines[1].cached_tokens = behaviour, 16
        assert (await stand.ask(CHAT, chat("q", stream=True))).status == 200
        reports = [report for report in router.reports if report[0] != "unreachable"]
        assert reports == [
            ("prefill_failed", "r1"),
            ("first_token", "r1"),
            ("done", "r1", Usage(16, 4, False)),
        ]
        assert stand.proxy.counts.events["failed_prefills"] == 1


async def test_a_prefill_leg_that_is_left_out_is_reported_as_failed() -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        assert (await stand.ask(CHAT, chat("q", prompt_logprobs=0))).status == 200
        assert (router.requests[0].tokens, router.requests[0].length) == (None, 1000)
        assert router.reports == [("prefill_failed", "r1"), ("done", "r1", Usage(0, 4, False))]


SEVERAL: dict[str, dict[str, Any]] = {
    "n": {"prompt": "p", "n": 2},
    "best of": {"prompt": "p", "best_of": 2},
    "texts": {"prompt": ["a", "b"]},
    "tokens": {"prompt": [[1, 2], [3]]},
}


@pytest.mark.parametrize("body", SEVERAL.values(), ids=SEVERAL)
async def test_numbers_of_several_answers_are_not_reported_as_those_of_one(body: dict[str, Any]) -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        await stand.ask("/v1/completions", body)
        assert router.reports.pop() == ("done", "r1", Usage(0, None, True))
        stand.engines[0].behaviour = "wrong"
        await stand.ask("/v1/completions", body)
        assert router.reports[-1] == ("done", "r2", Usage(None, None, False))


@pytest.mark.parametrize("body", [{"prompt": ["a"]}, {"prompt": [1, 2], "n": 1}, {"prompt": "[1", "n": None}])
async def test_one_answer_is_counted_however_it_is_asked_for(body: dict[str, Any]) -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        await stand.ask("/v1/completions", body)
        assert router.reports[-1] == ("done", "r1", Usage(0, 4, True))


async def error_event(engine: StubEngine, stream: trio.SocketStream, asked: Asked) -> bool:
    await begin_stream(stream)
    await send_chunk(stream, b": wait\n\n")
    await send_chunk(stream, event({"error": {"message": "out of memory"}}))
    await stream.send_all(b"0\r\n\r\n")
    return True


async def test_a_stream_without_tokens_has_no_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BEHAVIOURS, "error_event", error_event)
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        stand.engines[1].behaviour = "error_event"
        assert (await stand.ask(CHAT, chat("q", stream=True))).status == 200
        assert router.reports == [("prefilled", "r1"), ("done", "r1", Usage(0, None, True))]


async def end_late(engine: StubEngine, stream: trio.SocketStream, asked: Asked) -> bool:
    """Pause between the last event and the end of the stream."""
    await begin_stream(stream)
    for each in engine.events(asked):
        await send_chunk(stream, each)
    await engine.go.wait()
    await stream.send_all(b"0\r\n\r\n")
    return True


async def leave_at_the_last_event(stand: Stand, how: str) -> None:
    """Do as OpenAI's own client does."""
    asker = await stand.asker()
    await asker.send(CHAT, chat("q", stream=True, stream_options={"include_usage": True}))
    answer = await asker.first_bytes()
    while not answer.body.endswith(b"[DONE]\n\n"):
        answer.feed(await asker.stream.receive_some(65536))
    await leave(asker.stream, how)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_at_the_last_event_was_answered(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BEHAVIOURS, "end_late", end_late)
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand, engine = stand, stand.engines[1]
        engine.behaviour = "end_late"
        await leave_at_the_last_event(stand, how)
        await trio.testing.wait_all_tasks_blocked()
        assert router.reports[-1] == ("done", "r1", Usage(0, 4, True))
        engine.go.set()
        await until(lambda: stand.proxy.handler.in_flight == 0)
        connections = engine.accepted
        await stand.ask(CHAT, chat("q"))
        await until(lambda: stand.proxy.handler.in_flight == 0)
        assert engine.accepted == connections, "the engine's connection is used again"
        assert [report[0] for report in router.reports if report[0] in ("done", "cancel")] == ["done", "done"]
        assert stand.proxy.counts.outcomes == {"answered": 2}


async def test_an_engine_that_does_not_end_its_stream_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BEHAVIOURS, "end_late", end_late)
    monkeypatch.setattr(limits, "ENGINE_END_S", 0.01)
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand, engine = stand, stand.engines[1]
        engine.behaviour = "end_late"
        await leave_at_the_last_event(stand, "close")
        with trio.fail_after(WAIT_S):
            await engine.completions[0].gone.wait()
        await until(lambda: stand.proxy.handler.in_flight == 0)
        assert [report[0] for report in router.reports] == ["prefilled", "first_token", "done"]
        assert stand.proxy.counts.outcomes == {"answered": 1}


async def test_an_engine_that_fails_is_excluded_and_reported() -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        stand.engines[1].behaviour = "die_before"
        assert (await stand.ask(CHAT, chat("q"))).status == 503
        assert [request.exclude for request in router.requests] == [[], ["D"], ["D"]]
        assert ("unreachable", "D") in router.reports
        assert [report for report in router.reports if report[0] in ("cancel", "done")] == [
            ("cancel", f"r{n}") for n in (1, 2, 3)
        ]


@pytest.mark.parametrize("hand_over", ["store", "nixl"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_goes_away_before_its_answer_is_cancelled_on_each_leg(
    leg: str, hand_over: HandOver
) -> None:
    """The decode leg's request is the engine's by then, which lets go of what it was handed as it aborts it."""
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router, hand_over=hand_over) as stand:
        router.stand = stand
        slow = stand.engines[leg == "decode"]
        slow.behaviour = "pause"
        stand.engines[0].prefill_params = NIXL if hand_over == "nixl" else None
        asker = await stand.asker()
        await asker.send(CHAT, chat("q"))
        await until(lambda: bool(slow.completions))
        await trio.aclose_forcefully(asker.stream)
        await until(lambda: ("cancel", "r1") in router.reports)
        await until(slow.completions[0].gone.is_set)
        assert len(router.requests) == 1
        assert (("prefilled", "r1") in router.reports) == (leg == "decode")
        assert [len(engine.completions) for engine in stand.engines] == [1, int(leg == "decode")]
        if leg == "decode" and hand_over == "nixl":
            assert slow.completions[0].body["kv_transfer_params"] == NIXL


REFUSALS = {
    "no room": (Refused(reason="no room", retry_after_s=2.5), 429, b"3"),
    "no pool": (NotFound("no instances of model x"), 404, None),
    "malformed": (InvalidRequest("tokens: too many"), 400, None),
}


@pytest.mark.parametrize(("answer", "status", "retry_after"), REFUSALS.values(), ids=REFUSALS)
async def test_what_a_router_refuses_the_client_is_told(
    answer: Any, status: int, retry_after: bytes | None
) -> None:
    router = NotingRouter()
    router.answer = answer
    async with proxy_stand(router=router) as stand:
        refused = await stand.ask(CHAT, chat("q"))
        assert refused.status == status
        assert refused.headers.get(b"retry-after") == retry_after
        assert refused.json()["error"]["message"] == (
            answer.reason if isinstance(answer, Refused) else str(answer)
        )


async def test_without_its_router_the_proxy_goes_on_by_load() -> None:
    router = NotingRouter()
    router.answer = ConnectionResetError("killed")
    async with proxy_stand("both", "both", router=router) as stand:
        for _ in range(4):
            assert (await stand.ask(CHAT, chat("q"))).status == 200
        assert [len(engine.completions) for engine in stand.engines] == [2, 2]


# --- tokens --------------------------------------------------------------------------------------------------
async def test_a_conversation_is_routed_by_what_is_known_of_it() -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        said = ["a" * 400, "b" * 40, "c" * 40, "d" * 40]
        for engine in stand.engines:
            engine.tokens = lambda body: list(range(100 * len(body["messages"])))
        tokenizer = stand.proxy.tokenizer
        assert tokenizer is not None
        await stand.ask(CHAT, chat(said[0]))
        await stand.ask(CHAT, chat(said[0]))
        assert tokenizer.asked == 1
        await stand.ask(CHAT, chat(*said[:3]))
        second = router.requests[2].tokens
        assert second is not None
        assert list(second[:100]) == list(range(100))
        assert set(second[100:]) == {0}
        await until(lambda: tokenizer.asked == 2)
        await until(lambda: len(tokenizer.cache._entries) == 2)
        await stand.ask(CHAT, chat(*said[:3]))
        assert list(router.requests[3].tokens or ()) == list(range(300))
        # Another template, or other words, are another prompt.
        await stand.ask(CHAT, chat(said[0], chat_template_kwargs={"thinking": True}))
        await stand.ask(CHAT, chat("e" + said[0][1:]))
        assert tokenizer.asked == 4


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": "p", "cache_salt": "s"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
)
async def test_prompts_whose_keys_are_more_than_tokens_have_none(body: dict[str, Any]) -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        await stand.ask(CHAT if "messages" in body else "/v1/completions", body)
        assert router.requests[0].tokens is None
        assert router.requests[0].length


async def test_token_ids_are_taken_as_they_are() -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        await stand.ask("/v1/completions", {"prompt": [5, 6, 7]})
        assert router.requests[0].tokens == [5, 6, 7]
        assert not [asked for engine in stand.engines for asked in engine.asked if asked.path == "/tokenize"]


@pytest.mark.parametrize("tokens", [[], ["x"], [-1], [None], [1 << 70]])
async def test_nonsense_from_tokenize_costs_the_tokens_alone(tokens: list[Any]) -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        for engine in stand.engines:
            engine.tokens = lambda body: tokens
        assert (await stand.ask(CHAT, chat("q"))).status == 200


async def test_failures_to_tokenize_are_counted_and_logged_once_until_it_works_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = conductor(Clock())
    async with proxy_stand(router=made) as stand:
        [engine] = stand.engines
        made.registry.add(instance("i1", url=engine.url))
        hears(made, "engine-i1", list(range(160)))
        await until(lambda: [each.name for each in stand.proxy.engines] == ["i1"])
        engine.tokenize_status = 404
        for n in range(3):
            assert (await stand.ask(CHAT, chat(f"q{n}", model="m"))).status == 200
        last = made.log.all()[-1]
        assert made.explain(last.id)["degraded"] == WITHOUT_TOKENS
        assert "without tokens" in made.explain(last.id)["words"]
        assert made.counts["without_tokens"] == made.counts["degraded"] == 3
        engine.tokenize_status = 400  # of the prompt, not of the engine
        await stand.ask(CHAT, chat("q3", model="m"))
        engine.tokenize_status = 200
        for n in range(2):
            await stand.ask(CHAT, chat(f"r{n}", model="m"))
        assert b"kvfs_proxy_tokenize_failures_total 4.0" in stand.proxy.metrics()
        assert made.counts["without_tokens"] == 4
    said = [each.getMessage() for each in caplog.records if "tokenize" in each.getMessage()]
    assert [("does not tokenize" in each, "tokenizes again" in each) for each in said] == [
        (True, False),
        (False, True),
    ]
    assert "404" in said[0]


async def test_what_is_remembered_is_bounded() -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        tokenizer = stand.proxy.tokenizer
        assert tokenizer is not None
        tokenizer.cache._most_bytes = 10_000
        for n in range(10):
            await stand.ask(CHAT, chat(f"q{n}"))
        assert 0 < tokenizer.cache.size_bytes <= 10_000
        await stand.ask(CHAT, chat("q9"))
        assert tokenizer.asked == 10
        await stand.ask(CHAT, chat("q0"))
        assert tokenizer.asked == 11
