"""A prompt of 20,000 tokens through the proxy: tokenized, hashed, in both legs whole; and how large bodies may be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvfs import limits
from scheduler.conductor.conductor import Conductor
from tests.support.conductors import BLOCK_TOKENS, Clock, conductor, hears, instance, serving, tokens
from tests.support.stub_engines import Stand, proxy_stand
from tests.support.waits import WAIT_S, until

TOKENS = tokens(7, 20_000)
TEXT = "word " * len(TOKENS)
HELD = 1_000 * BLOCK_TOKENS
"""Tokens of the prompt that the prefill engine has."""
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "text": ("/v1/completions", {"prompt": TEXT}),
    "tokens": ("/v1/completions", {"prompt": TOKENS}),
}


@asynccontextmanager
async def stand_with(where: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Stand, Conductor]]:
    """Run a prefill and a decode engine, and a Conductor that knows what the first one has."""
    if where == "in the process":
        made = conductor(Clock())
        async with proxy_stand("prefill", "decode", router=made) as stand:
            yield introduced(stand, made), made
    else:
        monkeypatch.setattr(limits, "CONDUCTOR_WAIT_S", WAIT_S)
        async with (
            serving() as (service, addresses),
            proxy_stand("prefill", "decode", conductor=addresses.http) as stand,
        ):
            yield introduced(stand, service.conductor), service.conductor


def introduced(stand: Stand, made: Conductor) -> Stand:
    for engine in stand.engines:
        engine.tokens = lambda body: TOKENS
        made.registry.add(instance(engine.role, url=engine.url, role=engine.role))
    hears(made, "engine-prefill", TOKENS[:HELD])
    stand.engines[0].cached_tokens = HELD
    return stand


@pytest.mark.parametrize("where", ["in the process", "elsewhere"])
@pytest.mark.parametrize("kind", BODIES)
async def test_a_long_prompt_is_routed_by_all_its_tokens_and_is_whole_in_both_legs(
    kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = BODIES[kind]
    async with stand_with(where, monkeypatch) as (stand, made):
        answer = await stand.ask(path, {"model": "m", "max_tokens": 3, "stream": True, **asked})
        assert answer.status == 200
        assert answer.events()[-1] == "[DONE]"
        await until(lambda: made.counts["done"] == 1)
        [row] = made.log.all()
        assert (row.tokens, row.prefill, row.decode) == (len(TOKENS), "prefill", "decode")
        assert (row.predicted_tokens, row.cached_tokens) == (HELD, HELD)
        for engine in stand.engines:
            [leg] = engine.completions
            assert {name: leg.body[name] for name in asked} == asked
        assert made.counts["without_tokens"] == 0
        hears(made, "engine-prefill", TOKENS)
        assert (await stand.ask(path, {"model": "m", "max_tokens": 3, **asked})).status == 200
        await until(lambda: made.counts["done"] == 2)
        reusable = (len(TOKENS) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert made.log.all()[1].predicted_tokens == reusable, "all but the block of the last token"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_is_taken_up_to_its_limit_and_refused_beyond(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"model": "m", "prompt": TOKENS}).encode()
    async with proxy_stand() as stand:
        for spare_bytes, status in ((0, 200), (-1, 413)):
            monkeypatch.setattr(limits, "MAX_PROXY_BODY_BYTES", len(body) + spare_bytes)
            asker = await stand.asker()
            async with asker.stream:
                size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
                head = f"POST /v1/completions HTTP/1.1\r\nHost: p\r\n{size}\r\n\r\n".encode()
                sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
                await asker.stream.send_all(head + sent)
                answer = await asker.answer()
            assert answer.status == status, answer.body
        [leg] = stand.engines[0].completions
        assert leg.body["prompt"] == TOKENS
        assert stand.proxy.handler.memory.size_bytes == 0


async def test_bodies_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy_stand() as stand:
        body = {"model": "m", "prompt": TOKENS}
        monkeypatch.setattr(limits, "PROXY_MEMORY_BYTES", len(json.dumps(body)) - 1)
        refused = await stand.ask("/v1/completions", body)
        assert (refused.status, refused.headers[b"retry-after"]) == (503, b"1")
        assert not stand.engines[0].completions
        assert stand.proxy.handler.memory.size_bytes == 0
        assert (await stand.ask("/v1/completions", {**body, "prompt": "p"})).status == 200
