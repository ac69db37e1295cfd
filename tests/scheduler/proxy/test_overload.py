"""Three times as many requests as engines can take, with a Conductor that knows their speed.

Engines prefill 1,000 tokens in 0.2 s, one prompt after the other: two of them 10 requests a second.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from statistics import quantiles

import trio

from kvfs._native.cluster.index import ClusterIndex
from kvfs.limits import CONDUCTOR_TICK_S, MAX_INDEXED_BLOCKS
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.pool import Options
from scheduler.routing.admission import Slo
from scheduler.routing.cost import CostModel
from tests.support.conductors import instance
from tests.support.stub_engines import Stand, proxy_stand

PROMPT_TOKENS, PREFILL_TOKEN_S, STEP_S = 1_000, 0.0002, 0.005
CAPACITY_REQUESTS_S = 2 / (PROMPT_TOKENS * PREFILL_TOKEN_S)
LOAD, LOAD_S = 3.0, 5.0
TTFT_SLO_S = 1.0
NOISE_S = 0.5
"""What a busy machine adds to a first token."""
COSTS = CostModel(
    prefill_fixed_s=0.0,
    prefill_token_s=PREFILL_TOKEN_S,
    prefill_pair_s=0.0,
    kv_token_bytes=1,
    host_bytes_s=1e12,
    network_bytes_s=1e12,
    step_fixed_s=STEP_S,
    step_context_s=0.0,
    step_request_s=0.0,
    kv_capacity_tokens=10**7,
)


@dataclass
class Outcomes:
    """What clients saw."""

    ttfts_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    """How long refusals took."""


async def ask(stand: Stand, number: int, outcomes: Outcomes) -> None:
    first = number * PROMPT_TOKENS
    prompt = list(range(first, first + PROMPT_TOKENS))
    asker = await stand.asker()
    async with asker.stream:
        began_s = trio.current_time()
        await asker.send("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 3, "stream": True})
        answer = await asker.first_bytes()
        took_s = trio.current_time() - began_s
        await asker.rest(answer)
    if answer.status == 200:
        assert answer.events()[-1] == "[DONE]"
        outcomes.ttfts_s.append(took_s)
        return
    assert answer.status == 429
    assert int(answer.headers[b"retry-after"]) >= 1
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "no_capacity")
    outcomes.refused_s.append(took_s)


async def test_at_three_times_capacity_the_admitted_keep_their_first_token() -> None:
    """The others are refused at once, before any engine has worked for them."""
    options = Options(costs=COSTS, slo=Slo(ttft_s=TTFT_SLO_S), fitted=False)
    made = Conductor(ClusterIndex(MAX_INDEXED_BLOCKS), options, time.monotonic)
    outcomes, arrivals = Outcomes(), random.Random(7)

    async def tick() -> None:
        while True:
            made.tick()
            await trio.sleep(CONDUCTOR_TICK_S)

    async with proxy_stand("both", "both", router=made) as stand, trio.open_nursery() as ticking:
        for number, engine in enumerate(stand.engines):
            engine.behaviour, engine.prefill_token_s, engine.step_s = "timed", PREFILL_TOKEN_S, STEP_S
            made.registry.add(instance(f"i{number}", url=engine.url))
        ticking.start_soon(tick)
        end_s, number = trio.current_time() + LOAD_S, 0
        async with trio.open_nursery() as clients:
            while trio.current_time() < end_s:
                clients.start_soon(ask, stand, number, outcomes)
                number += 1
                await trio.sleep(arrivals.expovariate(LOAD * CAPACITY_REQUESTS_S))
        admitted = len(outcomes.ttfts_s)
        assert sum(len(engine.completions) for engine in stand.engines) == admitted
        ticking.cancel_scope.cancel()
    assert admitted + len(outcomes.refused_s) == number
    assert admitted >= 0.7 * CAPACITY_REQUESTS_S * LOAD_S, "what there is room for is admitted"
    assert admitted <= CAPACITY_REQUESTS_S * (LOAD_S + TTFT_SLO_S + NOISE_S)
    assert quantiles(outcomes.ttfts_s, n=20)[-1] <= TTFT_SLO_S + NOISE_S
    assert quantiles(outcomes.refused_s, n=2)[0] <= NOISE_S
