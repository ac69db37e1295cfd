"""vLLM with `KVFSConnector`: an LFM2 with short convolutions beside full attention, whose state is kept.

`filler` computes in steps of 96 tokens and keeps the state of each, beside that of a prompt's last whole block;
`hitter` loads. vLLM keeps states only with a prefix cache of its own, so each engine that is to load is a new one.
Outputs are those of an engine without any cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine import BLOCK_TOKENS, Engine, Engines, Run, whole_blocks
from tests.engines.test_vllm_hybrid import (
    ALL,
    ANSWER,
    CROWD,
    CROWD_ANSWER,
    LATER,
    LONG,
    STORED,
    all_hits,
    connector,
    contents,
    new_blocks,
    wrong,
)
from tests.engines.tiny_lfm2 import CONVOLVED, HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, write_model
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

GROUPS = 3
GROUP_LAYERS = LAYERS // GROUPS
ATTENTION_BYTES = GROUP_LAYERS * 2 * KV_HEADS * HEAD_DIM * BLOCK_TOKENS * 4
STATE_BYTES = GROUP_LAYERS * (CONVOLVED - 1) * HIDDEN * 4
STEP = 96
BRANCH_ENDS = (1500, 1970)
BRANCHES = {f"until {end}": [*LONG["long"][:end], *LATER["later 90"]] for end in BRANCH_ENDS}


@pytest.fixture(scope="module")
def lfm2(engine_python: str, work: Path) -> Engines:
    write_model(work / "lfm2/model")
    return Engines(engine_python, work / "lfm2")


def start(lfm2: Engines, label: str, settings: dict[str, Any] | None, **more: Any) -> Engine:
    more = {"model_tokens": 4096, "prefix_caching": settings is not None, **more}
    return lfm2.start(label, None, connector=settings, native_layers=True, **more)


@pytest.fixture(scope="module")
def before(service: Service) -> set[str]:
    """The buckets of other modules' engines."""
    return set(contents(service))


@pytest.fixture(scope="module")
def filler(lfm2: Engines, service: Service, before: set[str]) -> Iterator[Engine]:
    with start(lfm2, "state filler", connector(service), batched_tokens=STEP, retained_tokens=STEP) as engine:
        yield engine


@pytest.fixture(scope="module")
def hitter(lfm2: Engines, service: Service, before: set[str]) -> Iterator[Engine]:
    with start(lfm2, "state hitter", connector(service)) as engine:
        yield engine


@pytest.fixture(scope="module")
def runs(lfm2: Engines, filler: Engine, hitter: Engine) -> dict[str, Run]:
    with start(lfm2, "stateless", None) as plain:
        reference = plain.generate(ALL, max_tokens=ANSWER)
        crowd = plain.generate(CROWD, max_tokens=CROWD_ANSWER)
        branches = plain.generate(BRANCHES, max_tokens=ANSWER)
    filled = filler.generate(STORED, max_tokens=ANSWER)
    return {
        "reference": reference,
        "crowd": crowd,
        "branches": branches,
        "filler": filled,
        "hitter": hitter.generate(STORED, max_tokens=ANSWER),
    }


def test_outputs_are_those_without_a_cache(runs: dict[str, Run]) -> None:
    assert wrong(runs["filler"], runs) + wrong(runs["hitter"], runs) == []


def test_the_second_engine_computes_no_whole_block(runs: dict[str, Run]) -> None:
    assert all_hits(runs["hitter"], STORED), runs["hitter"].cached_tokens
    assert set(runs["filler"].cached_tokens) == {0}


def test_of_a_state_the_last_one_is_loaded(runs: dict[str, Run]) -> None:
    blocks = [whole_blocks(prompt) // BLOCK_TOKENS for prompt in STORED.values()]
    expected = sum(count + (GROUPS - 1) * min(count, 1) for count in blocks)
    assert runs["hitter"].counts["loaded_blocks"] == expected
    assert runs["hitter"].counts["failed_blocks"] == 0


def test_states_are_stored_where_steps_end_and_without_what_pads_them(
    service: Service, filler: Engine, runs: dict[str, Run], before: set[str]
) -> None:
    def counts() -> list[int]:
        return sorted(map(len, new_blocks(service, before).values()))

    known = sum((len(prompt) + ANSWER - 1) // BLOCK_TOKENS for prompt in STORED.values())
    eventually(lambda: counts()[-1] == known, "all is sealed")
    had = counts()
    assert wrong(filler.generate(LONG, max_tokens=ANSWER), runs) == []
    whole, total = whole_blocks(LONG["long"]), len(LONG["long"]) + ANSWER - 1
    ends = {*range(STEP, total + 1, STEP), whole}
    states, blocks = len(ends), total // BLOCK_TOKENS
    expected = [had[0] + states, had[1] + states, had[2] + blocks]
    eventually(lambda: counts() == expected, f"{had} became {expected}")
    sizes = [set(blocks.values()) for blocks in new_blocks(service, before).values()]
    assert sorted(sizes, key=max) == [{STATE_BYTES}, {STATE_BYTES}, {ATTENTION_BYTES}]


def test_another_end_goes_on_where_a_step_of_the_first_one_ended(
    hitter: Engine, runs: dict[str, Run]
) -> None:
    run = hitter.generate(BRANCHES, max_tokens=ANSWER)
    assert wrong(run, runs, "branches") == []
    assert run.cached_tokens == [end // STEP * STEP for end in BRANCH_ENDS]


def test_a_block_that_goes_between_match_and_load_begins_its_request_anew(
    lfm2: Engines, service: Service, runs: dict[str, Run]
) -> None:
    """Of each group in turn."""
    settings, lose = connector(service, watched=True), {"KVFS_TEST_LOSE_GROUPS": "0,1,2"}
    with start(lfm2, "state losing", settings, environment=lose) as engine:
        run = engine.generate(STORED, max_tokens=ANSWER)
    assert run.counts["failed_blocks"] == len(STORED)
    assert wrong(run, runs) == []
    assert set(run.finish) == {"length"}


def test_a_cache_too_small_for_the_batch(lfm2: Engines, service: Service, runs: dict[str, Run]) -> None:
    """Requests are preempted, their blocks are given to others, and they come back from the store."""
    settings = connector(service, watched=True)
    with start(
        lfm2, "state preempted", settings, batched_tokens=STEP, cache_blocks=40, model_tokens=1024
    ) as engine:
        first, second = (engine.generate(CROWD, max_tokens=CROWD_ANSWER) for _ in range(2))
    assert first.counts["resumed"] > 0
    assert wrong(first, runs, "crowd") + wrong(second, runs, "crowd") == []
    assert {*first.finish, *second.finish} == {"length"}


def test_an_engine_whose_states_cannot_be_kept_says_so_once_and_computes(
    lfm2: Engines, service: Service, runs: dict[str, Run]
) -> None:
    """Without prefix caching vLLM keeps none."""
    had = contents(service)
    with start(lfm2, "keeps no states", connector(service), prefix_caching=False) as engine:
        both = [engine.generate(STORED, max_tokens=ANSWER) for _ in range(2)]
        said = [line for line in engine.log().splitlines() if "nothing is loaded or stored" in line]
    assert [wrong(each, runs) for each in both] == [[], []]
    assert len(said) == 1, said
    assert "mamba_cache_mode is 'none'" in said[0]
    assert {count for each in both for name, count in each.counts.items() if "blocks" in name} == {0}
    assert contents(service) == had


def test_states_that_are_evicted_make_a_miss_of_all_and_the_rest_outlives_a_kill(
    lfm2: Engines, service: Service, runs: dict[str, Run], before: set[str]
) -> None:
    """Without the states of one group no attention is used; after a kill and a new start all that is left is a hit."""
    found = new_blocks(service, before)
    name = min(found, key=lambda each: max(found[each].values()))
    with service.client() as client:
        for block in found[name]:
            client.remove(block)
    with start(lfm2, "stateless hitter", connector(service)) as engine:
        run = engine.generate(STORED, max_tokens=ANSWER)
        assert set(run.cached_tokens) == {0}
        assert wrong(run, runs) == []
        eventually(
            lambda: len(new_blocks(service, before).get(name, ())) == len(STORED), "states are stored again"
        )
    service.kill()
    service.restart()
    with start(lfm2, "after the kill", connector(service)) as engine:
        run = engine.generate(STORED, max_tokens=ANSWER)
        assert all_hits(run, STORED), run.cached_tokens
        assert wrong(run, runs) == []
