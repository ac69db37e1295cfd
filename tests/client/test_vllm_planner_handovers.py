"""The hand-over from a prefill engine to a decode engine: the last block that is named, and the wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from kvfs.limits import CONNECTOR_HANDOVER_S
from tests.support.vllm_planners import (
    BLOCK,
    RANKS,
    Clock,
    FakeLink,
    FakeRequest,
    keys_of,
    namespaces,
    no_extra,
    planner,
    prefilled,
    tokens_of,
)

__all__ = ["no_extra"]


@pytest.mark.parametrize("step", [None, 5 * BLOCK + 3])
@pytest.mark.parametrize("tokens", [700 * BLOCK, 700 * BLOCK + 1, 12_500, 2 * BLOCK])
def test_a_prefill_leg_hands_over_all_blocks_that_the_decode_engine_can_load(
    tokens: int, step: int | None
) -> None:
    link, prompt = FakeLink(), tokens_of(tokens)
    assert link.store is not None
    params, stored = prefilled(planner(link), prompt, step=step)
    named, decode = keys_of(prompt)[0, 0][(tokens - 1) // BLOCK - 1], planner(link)
    digest = namespaces()[0, 0].digest.hex()
    assert params == {
        "do_remote_prefill": True,
        "kvfs": {"namespace": digest, "last_block": named.hex()},
    }
    link.store.keys |= stored
    assert prefilled(planner(link), prompt, step=step) == (params, set()), "all was there"
    assert decode.match(FakeRequest("r", prompt, params), 0) == ((tokens - 1) // BLOCK * BLOCK, True)
    assert (decode.counts["handovers"], decode.counts["late_handovers"]) == (1, 0)


def test_an_answer_names_no_block_where_some_are_not_stored() -> None:
    """The decode engine would wait for them."""
    tokens, link = tokens_of(3 * BLOCK + 1), FakeLink()
    made = planner(link)
    unnamed = {"do_remote_prefill": True}
    assert prefilled(made, tokens_of(BLOCK))[0] == unnamed, "not one block to load"
    assert made.finished(FakeRequest("ended before it began", tokens, {"do_remote_decode": True})) == unnamed
    link.is_up = False
    assert prefilled(made, tokens) == (unnamed, set())
    link.is_up = True
    made.match(request := FakeRequest("running", tokens, {"do_remote_decode": True}), 0)
    made.reset()
    assert made.finished(request) == unnamed
    assert prefilled(made, tokens)[0].keys() == {"do_remote_prefill", "kvfs"}


def test_a_decode_engine_asks_again_while_a_named_block_is_under_way() -> None:
    """Blocks are sealed one after the other, rank by rank; the engine goes on when the last one is there."""
    link, clock, tokens = FakeLink(), Clock(), tokens_of(5 * BLOCK + 3)
    assert link.store is not None
    params, _ = prefilled(planner(link), tokens)
    made, request, keys = planner(link, clock=clock), FakeRequest("r", tokens, params), keys_of(tokens)
    for block in range(5):
        for rank in RANKS:
            assert made.match(request, 0) == (None, False)
            clock.now_s += CONNECTOR_HANDOVER_S / 20
            link.store.keys.add(keys[rank][block])
    assert made.match(request, 0) == (5 * BLOCK, True)
    link.store.keys.clear()
    assert made.match(request, 0) == (0, False), "after a preemption nothing is on its way"
    assert made.counts == {**made.counts, "queries": 2, "handovers": 1, "late_handovers": 0}
    # What the engine has itself need not be there.
    assert made.match(FakeRequest("s", tokens, params), 5 * BLOCK) == (0, False)


def test_a_decode_engine_goes_on_with_what_is_there_when_the_wait_is_over() -> None:
    link, clock, tokens = FakeLink(), Clock(), tokens_of(5 * BLOCK + 3)
    assert link.store is not None
    params, _ = prefilled(planner(link), tokens)
    made, request = planner(link, clock=clock), FakeRequest("r", tokens, params)
    link.store.keys = {key for keys in keys_of(tokens).values() for key in keys[:2]}
    assert made.match(request, 0) == (None, False)
    clock.now_s += CONNECTOR_HANDOVER_S * 0.99
    assert made.match(request, 0) == (None, False)
    clock.now_s += CONNECTOR_HANDOVER_S * 0.02
    assert made.match(request, 0) == (2 * BLOCK, True)
    clock.now_s -= CONNECTOR_HANDOVER_S
    assert made.match(request, 0) == (2 * BLOCK, True), "a request waits once"
    assert made.counts["late_handovers"] == 1
    # During an outage nothing is sealed.
    link.is_up = False
    assert made.match(FakeRequest("s", tokens, params), 0) == (2 * BLOCK, True)


def test_a_hand_over_from_an_engine_that_shares_nothing_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, tokens = FakeLink(), tokens_of(3 * BLOCK + 3)
    other, made = planner(link), planner(link)
    other.set_namespaces(namespaces(), "memory other")
    params, _ = prefilled(other, tokens)
    for name in ("r", "s"):
        assert made.match(FakeRequest(name, tokens, params), 0) == (0, False)
    [record] = caplog.records
    assert params["kvfs"]["namespace"] in record.getMessage()


@pytest.mark.parametrize(
    "params",
    [
        None,
        "text",
        [],
        {},
        {"kvfs": None},
        {"kvfs": "00" * 16},
        {"kvfs": {}},
        {"kvfs": {"last_block": None}},
        {"kvfs": {"last_block": 3}},
        {"kvfs": {"last_block": "zz" * 16}},
        {"kvfs": {"last_block": "00" * 15}},
        {"kvfs": {"last_block": "00" * 17, "namespace": [1]}},
        {"do_remote_decode": False, "do_remote_prefill": True},
    ],
)
def test_parameters_that_say_nothing_hold_nothing_up(params: Any) -> None:
    made, tokens = planner(FakeLink()), tokens_of(3 * BLOCK)
    request = FakeRequest("r", tokens, params)
    assert made.match(request, 0) == (0, False)
    assert made.finished(request) is None
    assert made.counts["handovers"] == 0
