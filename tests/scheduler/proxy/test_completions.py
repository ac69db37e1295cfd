"""Completions through the proxy, in front of engines that behave: both legs, streams, usage, what is passed on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvfs import limits
from scheduler.proxy.handler import _PASSED
from tests.support.stub_engines import PROMPT, WORDS, Stand, proxy_stand
from tests.support.waits import until

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


def used(stand: Stand) -> list[str]:
    """The role of the engine of each leg."""
    return [engine.role for engine in stand.engines for _ in engine.completions]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompt_is_prefilled_and_decoded_apart(path: str, stream: bool) -> None:
    async with proxy_stand("prefill", "decode") as stand:
        body = {"model": "m", "stream": stream, "max_tokens": 5, "seed": 7, "stop": ["z"], **PATHS[path]}
        answer = await stand.ask(path, body)
        assert answer.status == 200
        [first], [second] = (engine.completions for engine in stand.engines)
        added = ("kv_transfer_params", "stream_options")
        assert {key: value for key, value in second.body.items() if key not in added} == body
        assert first.body["max_tokens"] == 1
        assert "stop" not in first.body
        assert "stream" not in first.body
        assert first.body["seed"] == 7
        assert first.body.get("messages") == body.get("messages")
        assert first.headers[b"x-request-id"] == second.headers[b"x-request-id"]
        if stream:
            assert len(answer.events()) == 6
            assert answer.events()[-1] == "[DONE]"
        else:
            assert answer.json()["choices"][0]["text"] == "".join(WORDS[:5])


async def test_a_short_prompt_goes_to_the_decode_engine_alone() -> None:
    async with proxy_stand("prefill", "decode") as stand:
        await stand.ask("/v1/completions", {"prompt": "short"})
        assert used(stand) == ["decode"]


@pytest.mark.parametrize("more", [{"echo": True}, {"prompt_logprobs": 0}])
async def test_what_no_cache_has_is_computed_by_one_engine(more: dict[str, Any]) -> None:
    async with proxy_stand("prefill", "decode") as stand:
        await stand.ask("/v1/completions", {"prompt": PROMPT, **more})
        assert used(stand) == ["decode"]


async def test_the_usage_that_a_client_did_not_ask_for_is_left_out() -> None:
    async with proxy_stand() as stand:
        body = {"prompt": "p", "stream": True, "max_tokens": 2}
        answer = await stand.ask("/v1/completions", body)
        assert [json.loads(each)["choices"][0]["text"] for each in answer.events()[:-1]] == WORDS[:2]
        asked = await stand.ask("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert json.loads(asked.events()[-2])["usage"]["completion_tokens"] == 2
        assert asked.events()[:2] == answer.events()[:2]


async def test_events_that_come_in_pieces_go_on_as_whole_ones() -> None:
    async with proxy_stand() as stand:
        stand.engines[0].behaviour = "cut"
        answer = await stand.ask("/v1/completions", {"prompt": "p", "stream": True, "max_tokens": 20, "n": 2})
        events = [json.loads(each)["choices"][0] for each in answer.events()[:-1]]
        assert [each["text"] for each in events if each["index"] == 1] == WORDS[:20]
        assert all(piece.endswith(b"\n\n") for piece in answer.pieces)


async def test_tools_stay_with_the_prompt_and_are_not_called_by_its_prefill() -> None:
    async with proxy_stand("prefill", "decode") as stand:
        tools = [{"type": "function", "function": {"name": "f"}}]
        body = {**PATHS["/v1/chat/completions"], "tools": tools, "tool_choice": "required", "n": 3}
        answer = await stand.ask("/v1/chat/completions", body)
        assert len(answer.json()["choices"]) == 3
        prefill, decode = (engine.completions[0].body for engine in stand.engines)
        assert prefill["tools"] == tools
        assert prefill["tool_choice"] == "none"
        assert "n" not in prefill
        assert decode["tool_choice"] == "required"


async def test_clients_do_not_speak_to_connectors() -> None:
    async with proxy_stand("prefill", "decode") as stand:
        evil = {"kv_transfer_params": {"remote_host": "evil"}, "bootstrap_host": "evil", "routed_dp_rank": 3}
        await stand.ask("/v1/completions", {"prompt": PROMPT, **evil})
        await stand.ask("/v1/completions", {"prompt": "p", **evil})
        for path in ("/v1/responses", "/v1/embeddings", "/tokenize"):
            assert (await stand.ask(path, {"input": "p", **evil})).status == 200
        said = [asked.body for engine in stand.engines for asked in engine.asked]
        assert len(said) == 6
        assert not any(word in json.dumps(said) for word in ("evil", "dp_rank"))


async def test_what_is_passed_on_is_json_or_a_form_so_that_nothing_is_hidden_from_the_proxy() -> None:
    async with proxy_stand() as stand:
        for body in (b"[]", b'{"input": NaN, "kv_transfer_params": {}}', b"\xff"):
            refused = await stand.ask("/v1/responses", body)
            assert refused.status == 400
            assert "must be a JSON object" in refused.json()["error"]["message"]
        assert not stand.engines[0].asked


async def test_other_paths_are_passed_on_and_administration_is_not() -> None:
    async with proxy_stand() as stand:
        answer = await stand.ask("/version?x=1", method="GET")
        assert answer.json() == {"path": "/version", "method": "GET"}
        for path in ("/sleep", "/v1/load_lora_adapter", "/reset_prefix_cache", "/nothing", "/is_sleeping"):
            refused = await stand.ask(path, {})
            assert refused.status == 404
            assert refused.json()["error"]["type"] == "not_found_error"
        assert (await stand.ask("/v1/completions", method="GET")).status == 405


async def test_a_kept_answer_is_looked_for_at_each_engine() -> None:
    """Whichever has it answers. What nobody has is 404, and 503 while one that may have it does not answer."""
    async with proxy_stand("both", "both", "both") as stand:
        stand.engines[0].keeps_answers = False
        for method, path in (("GET", "/v1/responses/r1"), ("POST", "/v1/responses/r1/cancel")):
            answer = await stand.ask(path, method=method)
            assert answer.json() == {"path": path, "method": method}
        stand.engines[1].die()
        assert (await stand.ask("/v1/responses/r1", method="GET")).status == 200
        stand.engines[2].keeps_answers = False
        refused = await stand.ask("/v1/responses/r1", method="GET")
        assert (refused.status, refused.headers[b"retry-after"]) == (503, b"1")
        asked = [[each.path for each in engine.asked] for engine in stand.engines]
        assert asked[0] == ["/v1/responses/r1", "/v1/responses/r1/cancel", *["/v1/responses/r1"] * 2]
        for path in (
            "/v1/responses/",
            "/v1/responses/r1/more",
            "/v1/responses/r1/cancel/more",
            "/v1/responses/%2e",
        ):
            assert (await stand.ask(path, method="GET")).status == 404
        assert [[each.path for each in engine.asked] for engine in stand.engines] == asked


async def test_a_response_that_no_engine_has_is_not_found() -> None:
    async with proxy_stand("both", "both") as stand:
        for engine in stand.engines:
            engine.keeps_answers = False
        refused = await stand.ask("/v1/responses/r1", method="GET")
        assert (refused.status, refused.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("path", sorted(_PASSED))
async def test_what_engines_serve_beside_completions_is_passed_on(path: bytes) -> None:
    async with proxy_stand() as stand:
        assert (await stand.ask(path.decode(), {"input": "p"})).status == 200
        assert [each.path for each in stand.engines[0].asked] == [path.decode()]


async def test_bearer_tokens_are_passed_on_or_checked() -> None:
    body = {"prompt": "p"}
    async with proxy_stand() as stand:
        await stand.ask("/v1/completions", body, headers={"Authorization": "Bearer mine"})
        assert stand.engines[0].completions[0].headers[b"authorization"] == b"Bearer mine"
    async with proxy_stand(bearer_tokens=("one", "two")) as stand:
        for wrong in ({}, {"Authorization": "Bearer on"}, {"Authorization": "one"}):
            refused = await stand.ask("/v1/completions", body, headers=wrong)
            assert refused.status == 401
        answer = await stand.ask("/v1/completions", body, headers={"Authorization": "Bearer two"})
        assert answer.status == 200
        assert b"authorization" not in stand.engines[0].completions[0].headers
        assert (await stand.ask("/health", method="GET")).status == 200


BAD_BODIES = {
    "no JSON": (b"{", None),
    "no object": (b"[1]", None),
    "empty": (b"", None),
    "deep": (b"[" * 100_000, None),
    "stream is no boolean": (b'{"prompt": "p", "stream": "yes"}', "stream"),
    "max_tokens is no number": (b'{"prompt": "p", "max_tokens": "x"}', "max_tokens"),
}


@pytest.mark.parametrize(("body", "param"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_malformed_bodies_are_refused_by_name(body: bytes, param: str | None) -> None:
    async with proxy_stand() as stand:
        answer = await stand.ask("/v1/completions", body)
        assert answer.status == 400
        assert answer.json()["error"]["param"] == param
        assert stand.engines[0].asked == []


async def test_a_body_over_the_limit_is_refused_before_it_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_PROXY_BODY_BYTES", 1000)
    async with proxy_stand() as stand:
        answer = await stand.ask("/v1/completions", b"x" * 1001)
        assert answer.status == 413


async def test_an_engine_s_refusal_is_passed_on_in_openai_s_form() -> None:
    async with proxy_stand("both", "both") as stand:
        for engine in stand.engines:
            engine.behaviour = "wrong"
        answer = await stand.ask("/v1/completions", {"prompt": "p"})
        assert answer.status == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert sum(len(engine.completions) for engine in stand.engines) == 1


async def test_requests_go_to_the_least_busy_engine_in_turn() -> None:
    async with proxy_stand("both", "both", "both") as stand:
        for _ in range(9):
            await stand.ask("/v1/completions", {"prompt": PROMPT})
        assert [len(engine.completions) for engine in stand.engines] == [3, 3, 3]


async def test_connections_are_used_again() -> None:
    async with proxy_stand() as stand:
        await until(
            lambda: all(each.models is not None for each in stand.proxy.engines)
        )  # a question of its own
        asker = await stand.asker()
        before = stand.engines[0].accepted
        async with asker.stream:
            for _ in range(5):
                assert (await asker.ask("/v1/completions", {"prompt": "p"})).status == 200
        assert stand.engines[0].accepted <= before + 1
