"""Engines share blocks of equal weights alone: over resets, a worker's word of other weights, and adapters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.connectors.vllm_scheduler import Planner, Step
from kvfs.keys import split_keys
from tests.support.vllm_planners import (
    BLOCK,
    FakeLink,
    FakeRequest,
    namespaces,
    no_extra,
    planner,
    stored_blocks,
    stored_keys,
    tokens_of,
)

__all__ = ["no_extra"]


def whole_prompt(made: Planner, name: str, tokens: Sequence[int]) -> Any:
    """The plan of a step that computes a prompt."""
    made.match(FakeRequest(name, tokens), 0)
    blocks = len(tokens) // BLOCK
    return made.plan([Step(name, 0, len(tokens), list(range(blocks)))])


def test_engines_share_blocks_exactly_if_their_weights_in_memory_are_equal() -> None:
    link, tokens = FakeLink(), tokens_of(4 * BLOCK + 1)
    one, same, other = (planner(link) for _ in range(3))
    for made, weights in ((one, "memory a"), (same, "memory a"), (other, "memory b")):
        made.set_namespaces(namespaces(), weights)
    assert link.store is not None
    link.store.keys |= stored_keys(whole_prompt(one, "r", tokens))
    assert same.match(FakeRequest("r", tokens), 0) == (4 * BLOCK, True)
    assert other.match(FakeRequest("r", tokens), 0) == (0, False)
    assert not stored_keys(whole_prompt(other, "r", tokens)) & link.store.keys


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_blocks_of_one_epoch_are_never_those_of_another(data: st.DataObject) -> None:
    """Engines that reset at any time, with requests under way: what a key finds is of the weights it is stored for.

    The model: each engine's weights are a number, each request has the numbers of the weights that computed it.
    """
    link = FakeLink()
    assert link.store is not None
    weights, truth = [0, 0], dict[bytes, set[int]]()
    engines = [planner(link), planner(link)]
    for made in engines:
        made.set_namespaces(namespaces(), "memory")
    prompts = [tokens_of(5 * BLOCK + 1, seed) for seed in range(2)]
    running: list[tuple[int, str, int, set[int]]] = []
    names = itertools.count()
    for _ in range(16):
        engine = data.draw(st.integers(0, 1))
        made, action = engines[engine], data.draw(st.sampled_from(["begin", "go on", "reset"]))
        if action == "reset":
            weights[engine] = next(names) + 1
            made.reset()
        elif action == "begin":
            request = FakeRequest(f"r{next(names)}", data.draw(st.sampled_from(prompts)))
            hits, _ = made.match(request, 0)
            assert hits is not None
            made.allocated(request, [list(range(6))], hits)
            taken = {
                key for run in made.plan([]).loads for keys in run.keys.values() for key in split_keys(keys)
            }
            assert all(truth[key] == {weights[engine]} for key in taken), "blocks of other weights"
            running.append((engine, request.request_id, hits, {weights[engine]} if hits else set()))
        elif running:
            engine, name, computed, by = running.pop(data.draw(st.integers(0, len(running) - 1)))
            after = computed + data.draw(st.integers(1, 3 * BLOCK))
            by.add(weights[engine])
            for key in stored_keys(engines[engine].plan([Step(name, computed, after, list(range(6)))])):
                truth.setdefault(key, set(by))
                assert by == truth[key] == {weights[engine]}, "a block of other weights is stored"
                link.store.keys.add(key)
            running.append((engine, name, min(after, 5 * BLOCK + 1), by))


def test_nothing_is_matched_or_stored_from_a_workers_word_to_the_next_epoch() -> None:
    link, tokens = FakeLink(), tokens_of(3 * BLOCK + 1)
    made = planner(link)
    assert link.store is not None
    link.store.keys |= stored_keys(whole_prompt(made, "r", tokens))
    made.match(FakeRequest("running", tokens_of(3 * BLOCK, seed=1)), 0)
    made.end_epoch(0)
    assert made.match(FakeRequest("s", tokens), 0) == (0, False)
    assert made.plan([Step("running", 0, 3 * BLOCK, [1, 2, 3])]).stores == []
    made.reset()
    assert made.plan([Step("running", 0, 3 * BLOCK, [1, 2, 3])]).stores == [], "begun before"
    made.end_epoch(0)  # late, of a step before the reset
    plan = whole_prompt(made, "t", tokens)
    assert len(stored_blocks(plan)) == 3
    assert plan.epoch == 1


def test_requests_on_blocks_that_the_engine_kept_over_a_reset_are_left_alone() -> None:
    link, tokens = FakeLink(), tokens_of(4 * BLOCK + 1)
    made = planner(link)
    made.reset(has_old_blocks=True)
    request = FakeRequest("r", tokens)
    assert made.match(request, 2 * BLOCK) == (0, False)
    assert made.plan([Step("r", 2 * BLOCK, 4 * BLOCK, [1, 2, 3, 4])]).stores == []
    assert len(stored_blocks(whole_prompt(made, "computed whole", tokens))) == 4
    made.reset()
    made.match(request, 2 * BLOCK)
    assert stored_blocks(made.plan([Step("r", 2 * BLOCK, 4 * BLOCK, [1, 2, 3, 4])])) == [1, 2, 3, 4]


def test_requests_of_an_adapter_that_may_be_any_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_extra", lambda self, tracked, first, last, size: None)
    made = planner(FakeLink())
    assert made.match(FakeRequest("r", tokens_of(3 * BLOCK)), 0) == (0, False)
    assert whole_prompt(made, "r", tokens_of(3 * BLOCK)).stores == []
