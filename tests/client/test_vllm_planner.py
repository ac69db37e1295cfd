"""The scheduler's half of the vLLM connector against a plain model: every step's loads and stores, for any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.connectors.vllm_scheduler import Planner, Step
from kvfs.errors import DeadlinePassed
from kvfs.keys import split_keys
from kvfs.limits import CONNECTOR_RETRY_S
from tests.support.vllm_planners import (
    BLOCK,
    RANKS,
    Clock,
    FakeLink,
    FakeRequest,
    keys_of,
    no_extra,
    planner,
    stored_blocks,
    tokens_of,
)

__all__ = ["no_extra"]


def test_a_hit_is_a_hit_on_every_rank() -> None:
    link = FakeLink()
    made, tokens = planner(link), tokens_of(5 * BLOCK + 3)
    keys = keys_of(tokens)
    assert link.store is not None
    link.store.keys = {*keys[0, 0], *keys[0, 1][:3]}
    request = FakeRequest("r", tokens)
    assert made.match(request, 0) == (3 * BLOCK, True)
    assert made.match(request, 2 * BLOCK) == (BLOCK, True)
    assert made.match(request, 3 * BLOCK) == (0, False)
    made.match(request, BLOCK)
    made.allocated(request, [[10, 11, 12, 13, 14, 15]], 2 * BLOCK)
    [load] = made.plan([]).loads
    assert load.block_ids == [11, 12]
    assert {rank: list(split_keys(k)) for rank, k in load.keys.items()} == {r: keys[r][1:3] for r in RANKS}
    assert made.plan([]).loads == []


def test_the_block_of_the_last_token_is_never_loaded() -> None:
    link = FakeLink()
    made, tokens = planner(link), tokens_of(2 * BLOCK)
    assert link.store is not None
    link.store.keys = {key for keys in keys_of(tokens).values() for key in keys}
    assert made.match(FakeRequest("r", tokens), 0) == (BLOCK, True)
    assert made.match(FakeRequest("longer", [*tokens, 1]), 0) == (2 * BLOCK, True)


def test_nothing_matches_or_is_stored_without_a_store() -> None:
    link = FakeLink()
    made, request = planner(link), FakeRequest("r", tokens_of(3 * BLOCK))
    link.store, link.is_up = None, False
    assert made.match(request, 0) == (0, False)
    assert made.plan([Step("r", 0, 3 * BLOCK, [1, 2, 3])]).stores == []
    unready = Planner(link, BLOCK, store_generated=True, is_async=True)  # type: ignore[arg-type]
    assert unready.match(request, 0) == (0, False)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_whole_known_block_is_stored_once_and_no_other(data: st.DataObject) -> None:
    """Chunks of any size, preemptions, tokens that are generated, blocks that vanish from the store."""
    link = FakeLink()
    made = planner(link)
    assert link.store is not None
    tokens = tokens_of(data.draw(st.integers(1, 6 * BLOCK)))
    request = FakeRequest("r", tokens)
    made.match(request, 0)
    computed, blocks = 0, list(range(100, 120))
    for _ in range(12):
        action = data.draw(st.sampled_from(["compute", "compute", "generate", "preempt", "vanish"]))
        if action == "generate":
            request.all_token_ids.append(data.draw(st.integers(0, 999)))
        elif action == "preempt":
            computed, blocks = 0, [block + 100 for block in blocks]
        elif action == "vanish" and link.store.keys:
            link.store.keys.discard(data.draw(st.sampled_from(sorted(link.store.keys))))
        else:
            before = computed
            # Speculation computes past what is known.
            computed = min(computed + data.draw(st.integers(1, 2 * BLOCK)), request.num_tokens + 3)
            plan = made.plan([Step("r", before, computed, blocks)])
            keys = keys_of(request.all_token_ids)
            whole = min(computed, request.num_tokens) // BLOCK
            for run in plan.stores:
                first = blocks.index(run.block_ids[0])
                assert first + len(run.block_ids) <= whole
                for rank in RANKS:
                    assert list(split_keys(run.keys[rank])) == keys[rank][first : first + len(run.block_ids)]
                    assert run.parents[rank] == (keys[rank][first - 1] if first else None)
                    link.store.keys.update(split_keys(run.keys[rank]))
            taken = stored_blocks(plan)
            assert len(taken) == len(set(taken))
            fresh = range(before // BLOCK, whole)
            assert all(keys[rank][i] in link.store.keys for rank in RANKS for i in fresh), (
                "a new block is missing"
            )
            computed = min(computed, request.num_tokens)


def test_prompts_alone_are_stored_where_that_is_asked_for() -> None:
    made = planner(FakeLink(), store_generated=False)
    request = FakeRequest("r", tokens_of(BLOCK + 1))
    made.match(request, 0)
    request.all_token_ids += tokens_of(3 * BLOCK)
    assert stored_blocks(made.plan([Step("r", 0, 4 * BLOCK, [1, 2, 3, 4])])) == [1]


def test_a_step_stores_all_its_blocks_however_many() -> None:
    """A prompt with one token to answer has no next step."""
    made = planner(FakeLink())
    prompts = {f"r{i}": tokens_of(700 * BLOCK, seed=i) for i in range(3)}
    for name, tokens in prompts.items():
        made.match(FakeRequest(name, tokens), 0)
    plan = made.plan([Step(name, 0, 700 * BLOCK, list(range(700))) for name in prompts])
    assert [len(run.block_ids) for run in plan.stores] == [700] * 3


def test_a_request_that_ended_is_stored_no_more() -> None:
    made, request = planner(FakeLink()), FakeRequest("r", tokens_of(2 * BLOCK))
    made.match(request, 0)
    assert made.finished(request) is None
    assert made.plan([Step("r", 0, 2 * BLOCK, [1, 2])]).stores == []
    assert made.counts["stored_blocks"] == 0


# --- loads that fail -------------------------------------------------------------------------------------------
def loading(made: Planner, name: str, tokens: Sequence[int]) -> Any:
    """A request, and its load, if there is one."""
    request = FakeRequest(name, tokens)
    hits, _ = made.match(request, 0)
    assert hits is not None
    made.allocated(request, [list(range(10, 20))], hits)
    return request, made.plan([]).loads


def test_a_load_that_failed_is_a_miss_for_its_request() -> None:
    """Evicted, or of a store that does not answer: the engine would ask again for ever."""
    link, tokens = FakeLink(), tokens_of(5 * BLOCK + 3)
    made = planner(link)
    assert link.store is not None
    link.store.keys = {key for keys in keys_of(tokens).values() for key in keys}
    request, [load] = loading(made, "r", tokens)
    other, _ = loading(made, "s", tokens)
    made.failed({999})
    assert made.match(request, 0) == (5 * BLOCK, True), "another one's blocks"
    made.failed(set(load.block_ids[2:3]))
    assert made.match(request, 0) == (0, False)
    assert made.match(request, 2 * BLOCK) == (0, False)
    assert loading(made, "t", tokens)[1], "what is in DRAM is still read"
    assert link.store.trials == []
    made.finished(request)
    made.finished(other)
    assert loading(made, "r", tokens)[1], "another request of that name"


def test_lower_tiers_are_a_miss_for_all_until_they_work_again() -> None:
    link, tokens, clock = FakeLink(), tokens_of(5 * BLOCK + 3), Clock()
    made, keys = planner(link, clock=clock), keys_of(tokens)
    store = link.store
    assert store is not None
    store.keys = {key for each in keys.values() for key in each}
    store.below = {keys[0, 1][2], keys[0, 1][3], keys[0, 0][4]}
    request, [load] = loading(made, "r", tokens)
    assert len(load.block_ids) == 5
    made.failed(set(load.block_ids[2:]))
    [trial] = store.trials
    for name in "abc":
        assert made.match(FakeRequest(name, tokens), 0) == (2 * BLOCK, True), "what is in DRAM"
    trial.set_exception(DeadlinePassed("no answer"))
    assert made.match(FakeRequest("d", tokens), 0) == (2 * BLOCK, True)
    clock.now_s += CONNECTOR_RETRY_S
    assert made.match(FakeRequest("e", tokens), 0) == (2 * BLOCK, True)
    assert len(store.trials) == 2
    store.trials[1].set_result(1)
    assert made.match(FakeRequest("f", tokens), 0) == (5 * BLOCK, True)
    assert made.match(request, 0) == (0, False)
    # Blocks that are evicted meanwhile say nothing.
    _, [load] = loading(made, "g", tokens)
    made.failed(set(load.block_ids))
    assert len(store.trials) == 3
    store.trials[2].set_result(0)
    store.keys -= store.below
    clock.now_s += CONNECTOR_RETRY_S
    for _ in range(2):
        made.match(FakeRequest("h", tokens), 0)
    store.keys |= store.below
    assert made.match(FakeRequest("i", tokens), 0) == (5 * BLOCK, True)
