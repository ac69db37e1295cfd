"""vLLM's prefill apart from its decode: one engine answers one token, the other goes on with the blocks in the store.

The prompt has more blocks than the connector stores at once. It is computed once: what the prefill engine goes on with
itself, from its own cache, is the reference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.engine import BLOCK_TOKENS, Engine, Engines, Run, same_output, whole_blocks
from tests.engines.test_vllm_connector import connector
from tests.engines.tiny_llama import VOCABULARY
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

MODEL_TOKENS = 20_480
CACHE_BLOCKS = 1_400
_rng = random.Random(88)
PROMPT = [_rng.randrange(2, VOCABULARY) for _ in range(20_000)]
ASKED = {"do_remote_decode": True}


@pytest.fixture(scope="module")
def pair(engines: Engines, service: Service) -> Iterator[tuple[Engine, Engine]]:
    settings: dict[str, Any] = {
        "connector": connector(service, revision="handover"),  # a namespace of its own
        "model_tokens": MODEL_TOKENS,
        "batched_tokens": MODEL_TOKENS,
        "cache_blocks": CACHE_BLOCKS,
    }
    with (
        engines.start("prefill", None, prefix_caching=True, **settings) as prefill,
        engines.start("decode", None, **settings) as decode,
    ):
        yield prefill, decode


def names_beside(service: Service, block: str) -> list[str]:
    """Return the names of all blocks of the namespace that has this one; none while it is nowhere."""
    with service.client() as client:
        for bucket in client.buckets():
            if bucket.namespace:
                names = [f"{entry.bucket}/{entry.key}" for entry in client.list(f"{bucket.name}/kv/")]
                if any(name.endswith(block) for name in names):
                    return names
    return []


@pytest.fixture(scope="module")
def handed_over(pair: tuple[Engine, Engine], service: Service) -> dict[str, Run]:
    """The prefill leg, and the whole request once its blocks are there: the decode engine waits 50 ms for them."""
    prefill, decode = pair
    first = prefill.generate({"long": PROMPT}, max_tokens=1, params=ASKED)
    [params] = first.kv_transfer_params
    assert params is not None
    last, blocks = params["kvfs"]["last_block"], whole_blocks(PROMPT) // BLOCK_TOKENS
    eventually(lambda: len(names_beside(service, last)) >= blocks, "all blocks are stored")
    second = decode.generate({"long": PROMPT}, params=first.kv_transfer_params[0])
    return {"prefill": first, "decode": second, "reference": prefill.generate({"long": PROMPT})}


def test_the_decode_engine_computes_no_whole_block_of_a_long_prompt(handed_over: dict[str, Run]) -> None:
    blocks, counts = whole_blocks(PROMPT) // BLOCK_TOKENS, handed_over["decode"].counts
    assert blocks > 512
    assert counts["loaded_blocks"] == counts["hit_blocks"] == blocks
    assert (counts["failed_blocks"], counts["late_handovers"], counts["handovers"]) == (0, 0, 1)
    assert handed_over["prefill"].counts["dropped_blocks"] == 0
    assert same_output(handed_over["decode"].output("long"), handed_over["reference"].output("long"))
    [token] = handed_over["prefill"].tokens[0]
    assert token == handed_over["decode"].tokens[0][0]


def test_usage_is_the_prefill_engines(pair: tuple[Engine, Engine], handed_over: dict[str, Run]) -> None:
    prefill, decode = pair
    assert handed_over["decode"].cached("long") == handed_over["prefill"].cached("long") == 0
    # Another question after the same 10,000 tokens.
    prompt = PROMPT[:10_000] + [_rng.randrange(2, VOCABULARY) for _ in range(300)]
    first = prefill.generate({"next": prompt}, max_tokens=1, params=ASKED)
    assert first.cached("next") == 10_000 // BLOCK_TOKENS * BLOCK_TOKENS
    second = decode.generate({"next": prompt}, params=first.kv_transfer_params[0])
    assert second.cached("next") == first.cached("next")
    assert decode.generate({"next": prompt}).cached("next") == whole_blocks(prompt), "what it did not compute"
    assert decode.generate({"long": PROMPT}).cached("long") == whole_blocks(PROMPT)
    assert same_output(second.output("next"), prefill.generate({"next": prompt}).output("next"))


def test_what_never_comes_is_computed(
    pair: tuple[Engine, Engine], handed_over: dict[str, Run], service: Service
) -> None:
    """The named block is evicted between the legs: the wait for it ends."""
    _, decode = pair
    [params] = handed_over["prefill"].kv_transfer_params
    assert params is not None
    name = params["kvfs"]["last_block"]
    [found] = [each for each in names_beside(service, name) if each.endswith(name)]
    with service.client() as client:
        client.remove(found)
    run = decode.generate({"long": PROMPT}, params=params)
    assert same_output(run.output("long"), handed_over["reference"].output("long"))
    assert run.counts["late_handovers"] == 1
    assert run.counts["failed_blocks"] == 0
