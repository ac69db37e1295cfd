"""vLLM with `KVFSConnector`: a Gemma 3 with sliding windows beside full attention, by cache groups.

Two engines live through the whole module. `filler` computes in steps of 96 tokens, which is more than the window, and
less than its prompts; `hitter`, which has no prefix cache of its own, loads. Outputs are those of an engine without any
cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvfs.limits import CONNECTOR_WINDOWS
from tests.engines.engine import BLOCK_TOKENS, Engine, Engines, Run, same_output, whole_blocks
from tests.engines.tiny_gemma import HEAD_DIM, KV_HEADS, LAYERS, VOCABULARY, WINDOW, write_model
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service, has_written, run_kvfs
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

GROUPS = 3
BLOCK_BYTES = LAYERS // GROUPS * 2 * KV_HEADS * HEAD_DIM * BLOCK_TOKENS * 4
"""Of one group; with one group for all layers a block is three times as large."""
WINDOW_BLOCKS = WINDOW // BLOCK_TOKENS
CHECKPOINT = CONNECTOR_WINDOWS * WINDOW_BLOCKS * BLOCK_TOKENS
JUNCTION = 1500 // BLOCK_TOKENS * BLOCK_TOKENS
ANSWER = 16

_rng = random.Random(93)


def tokens(count: int) -> list[int]:
    return [_rng.randrange(2, VOCABULARY) for _ in range(count)]


ROOT = tokens(1999)
STORED = {
    "under a window": tokens(50),
    "of a window and a little": tokens(71),
    "of whole blocks": tokens(320),
    "root": ROOT,
    "other": tokens(411),
}
BRANCHES = {f"branch {i}": ROOT[:1500] + tokens(60 + i) for i in range(2)}
CHANGED = {"root, a token of the window changed": [*ROOT[:1970], ROOT[1970] ^ 3, *ROOT[1971:]]}
LATER = {f"later {count}": tokens(count) for count in (90, 203, 517)}
LONG = {"long": tokens(1990)}
ALL = {**STORED, **BRANCHES, **CHANGED, **LATER, **LONG}
CROWD = {f"crowd {count}": tokens(count) for count in range(33, 105, 6)}
CROWD_ANSWER = 70


def connector(service: Service, *, watched: bool = False, **extra: str) -> dict[str, Any]:
    return {
        "kv_connector": "WatchedConnector" if watched else "KVFSConnector",
        "kv_connector_module_path": "tests.engines.watched_connector" if watched else "kvfs.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": str(service.mount), **extra},
    }


@pytest.fixture(scope="module")
def gemma(engine_python: str, work: Path) -> Engines:
    write_model(work / "gemma/model")
    return Engines(engine_python, work / "gemma")


def start(gemma: Engines, label: str, settings: dict[str, Any] | None, **more: Any) -> Engine:
    return gemma.start(label, None, connector=settings, model_tokens=4096, **more)


def contents(service: Service) -> dict[str, dict[str, int]]:
    """The blocks of each namespace's bucket, by name, and their sizes."""
    with service.client() as client:
        names = [each.name for each in client.buckets() if each.namespace]
        return {
            name: {e.name: e.size_bytes for e in client.list(f"{name}/kv/") if e.is_block} for name in names
        }


def new_blocks(service: Service, before: set[str]) -> dict[str, dict[str, int]]:
    return {name: sizes for name, sizes in contents(service).items() if name not in before}


def total_bytes(blocks: dict[str, dict[str, int]]) -> int:
    return sum(size for sizes in blocks.values() for size in sizes.values())


@pytest.fixture(scope="module")
def before(service: Service) -> set[str]:
    """The buckets of other modules' engines."""
    return set(contents(service))


@pytest.fixture(scope="module")
def both(gemma: Engines, service: Service, before: set[str]) -> Iterator[tuple[Engine, Engine]]:
    settings = connector(service)
    with (
        start(gemma, "filler", settings, prefix_caching=True, batched_tokens=96) as filler,
        start(gemma, "hitter", settings) as hitter,
    ):
        yield filler, hitter


@pytest.fixture(scope="module")
def runs(gemma: Engines, both: tuple[Engine, Engine]) -> dict[str, Run]:
    filler, hitter = both
    with start(gemma, "plain", None) as plain:
        reference = plain.generate(ALL, max_tokens=ANSWER)
        crowd = plain.generate(CROWD, max_tokens=CROWD_ANSWER)
    filled = filler.generate(STORED, max_tokens=ANSWER)
    return {
        "reference": reference,
        "crowd": crowd,
        "filler": filled,
        "hitter": hitter.generate(STORED, max_tokens=ANSWER),
    }


def wrong(run: Run, runs: dict[str, Run], reference: str = "reference") -> list[str]:
    """Prompts whose outputs are not those without a cache."""
    return [name for name in run.names if not same_output(run.output(name), runs[reference].output(name))]


def all_hits(run: Run, prompts: dict[str, list[int]]) -> bool:
    return all(run.cached(name) == whole_blocks(prompt) for name, prompt in prompts.items())


def test_outputs_are_those_without_a_cache(runs: dict[str, Run]) -> None:
    assert wrong(runs["filler"], runs) + wrong(runs["hitter"], runs) == []


def test_the_second_engine_computes_no_whole_block(runs: dict[str, Run]) -> None:
    assert all_hits(runs["hitter"], STORED), runs["hitter"].cached_tokens
    assert set(runs["filler"].cached_tokens) == {0}
    assert runs["hitter"].counts["failed_blocks"] == runs["filler"].counts["dropped_blocks"] == 0


def test_blocks_of_windows_are_loaded_for_the_last_window_only(runs: dict[str, Run]) -> None:
    blocks = [whole_blocks(prompt) // BLOCK_TOKENS for prompt in STORED.values()]
    expected = sum(count + 2 * min(count, WINDOW_BLOCKS) for count in blocks)
    assert runs["hitter"].counts["loaded_blocks"] == expected


@pytest.mark.usefixtures("runs")
def test_each_group_has_a_namespace_of_its_own(service: Service, before: set[str]) -> None:
    known = sum((len(prompt) + ANSWER - 1) // BLOCK_TOKENS for prompt in STORED.values())
    eventually(lambda: max(map(len, new_blocks(service, before).values())) == known, "all is sealed")
    found = new_blocks(service, before)
    assert len(found) == GROUPS
    assert {size for sizes in found.values() for size in sizes.values()} == {BLOCK_BYTES}
    full, *windows = sorted(map(len, found.values()), reverse=True)
    assert windows[0] == windows[1] < full / 2


def test_a_branch_goes_on_at_a_checkpoint_and_the_next_one_where_it_began(
    both: tuple[Engine, Engine], runs: dict[str, Run]
) -> None:
    _, hitter = both
    first, second = BRANCHES
    run = hitter.generate({first: BRANCHES[first]}, max_tokens=ANSWER)
    assert run.cached_tokens == [CHECKPOINT]
    assert wrong(run, runs) == []
    run = hitter.generate({second: BRANCHES[second]}, max_tokens=ANSWER)
    assert run.cached_tokens == [JUNCTION]
    assert wrong(run, runs) == []


def test_a_token_that_changes_in_the_window_is_computed(
    both: tuple[Engine, Engine], runs: dict[str, Run]
) -> None:
    _, hitter = both
    run = hitter.generate(CHANGED, max_tokens=ANSWER)
    assert wrong(run, runs) == []
    assert run.cached_tokens == [JUNCTION], "where the branches began there is a window"
    [name] = CHANGED
    assert run.output(name)[0] != runs["reference"].output("root")[0], "the change changes the output"


def test_blocks_of_one_group_that_are_evicted_make_a_miss_of_all(
    both: tuple[Engine, Engine], runs: dict[str, Run], service: Service, before: set[str]
) -> None:
    """What is left of the other groups is not used alone, and what is missing is stored again."""
    _, hitter = both
    name = min(found := new_blocks(service, before), key=lambda each: len(found[each]))
    with service.client() as client:
        for block in found[name]:
            client.remove(block)
    run = hitter.generate(STORED, max_tokens=ANSWER)
    assert set(run.cached_tokens) == {0}
    assert wrong(run, runs) == []

    def is_shared() -> bool:
        return all_hits(hitter.generate(STORED, max_tokens=ANSWER), STORED)

    eventually(is_shared, "all is stored again")
    assert wrong(hitter.generate(STORED, max_tokens=ANSWER), runs) == []


def test_a_token_of_a_long_prompt_takes_two_fifths_of_the_bytes_of_all_layers(
    gemma: Engines, both: tuple[Engine, Engine], runs: dict[str, Run], service: Service, before: set[str]
) -> None:
    """Against one cache for all layers, which a user may ask vLLM for."""
    _, hitter = both
    had = total_bytes(new_blocks(service, before))
    assert wrong(hitter.generate(LONG, max_tokens=ANSWER), runs) == []
    blocks = (len(LONG["long"]) + ANSWER - 1) // BLOCK_TOKENS
    generated = blocks - whole_blocks(LONG["long"]) // BLOCK_TOKENS
    windows = generated + WINDOW_BLOCKS + blocks // (CHECKPOINT // BLOCK_TOKENS) * WINDOW_BLOCKS
    expected = (blocks + (GROUPS - 1) * windows) * BLOCK_BYTES
    eventually(lambda: total_bytes(new_blocks(service, before)) - had == expected, "all is sealed")
    there = set(contents(service))
    with start(gemma, "single", connector(service), one_cache=True) as engine:
        assert wrong(engine.generate(LONG, max_tokens=ANSWER), runs) == []
        whole = blocks * GROUPS * BLOCK_BYTES
        eventually(lambda: total_bytes(new_blocks(service, there)) == whole, "all is sealed")
    assert expected / whole <= 0.4


def test_a_block_that_goes_between_match_and_load_begins_its_request_anew(
    gemma: Engines, service: Service, runs: dict[str, Run]
) -> None:
    """Of a window's group, and of full attention's, in turn; afterwards the engine, which began after all was stored,
    loads what engines before it stored."""
    settings, lose = connector(service, watched=True), {"KVFS_TEST_LOSE_GROUPS": "0,2"}
    with start(gemma, "losing", settings, environment=lose) as engine:
        run = engine.generate(STORED, max_tokens=ANSWER)
        assert run.counts["failed_blocks"] == len(STORED)
        assert wrong(run, runs) == []
        assert set(run.finish) == {"length"}

        def is_shared() -> bool:
            return all_hits(engine.generate(STORED, max_tokens=ANSWER), STORED)

        eventually(is_shared, "what was lost is stored again")
        assert wrong(engine.generate(STORED, max_tokens=ANSWER), runs) == []


def test_a_cache_too_small_for_the_batch(gemma: Engines, service: Service, runs: dict[str, Run]) -> None:
    """Requests are preempted, their blocks are given to others, and they come back from the store."""
    settings = connector(service, watched=True)
    with gemma.start(
        "preempted", None, connector=settings, model_tokens=1024, batched_tokens=96, cache_blocks=50
    ) as engine:
        first, second = (engine.generate(CROWD, max_tokens=CROWD_ANSWER) for _ in range(2))
    assert first.counts["resumed"] > 0
    assert wrong(first, runs, "crowd") + wrong(second, runs, "crowd") == []
    assert {*first.finish, *second.finish} == {"length"}


def test_the_service_is_killed_between_match_and_load(
    gemma: Engines, service: Service, runs: dict[str, Run], both: tuple[Engine, Engine], work: Path
) -> None:
    filler, hitter = both
    gate, settings = work / "gate-hybrid", connector(service, watched=True)
    with (
        start(gemma, "outage", settings, environment={"KVFS_TEST_GATE": str(gate)}) as engine,
        ThreadPoolExecutor() as pool,
    ):
        loading = pool.submit(engine.generate, STORED, max_tokens=ANSWER)
        eventually(Path(f"{gate}.reached").exists, "the engine is about to load", 300)
        service.kill()
        storing = pool.submit(filler.generate, LATER, max_tokens=ANSWER)
        Path(f"{gate}.go").touch()
        while_down = hitter.generate(STORED, max_tokens=ANSWER)
        service.restart()
        results = [storing.result(), loading.result(), while_down]
    for run in results:
        assert wrong(run, runs) == []
        assert set(run.finish) == {"length"}

    def is_shared() -> bool:
        filler.generate(LATER, max_tokens=ANSWER)
        return all_hits(hitter.generate(LATER, max_tokens=ANSWER), LATER)

    eventually(is_shared, "new prompts are shared again")


def test_what_is_on_nvme_alone_is_loaded_after_a_restart(
    both: tuple[Engine, Engine], runs: dict[str, Run], service: Service
) -> None:
    _, hitter = both
    with service.client() as client:
        eventually(lambda: has_written(client, 0), "all is on NVMe")
    service.stop()
    dropped = run_kvfs("drop", str(service.data))
    assert dropped.returncode == 0, dropped.stderr
    service.restart()

    def is_loaded() -> bool:
        run = hitter.generate(STORED, max_tokens=ANSWER)
        assert wrong(run, runs) == []
        return all_hits(run, STORED)

    eventually(is_loaded, "the engine has found the service again")
    with service.client() as client:
        assert client.status()["promotions"] > 0


def test_each_tensor_parallel_rank_has_its_own_shard_of_each_group(
    gemma: Engines, service: Service, runs: dict[str, Run]
) -> None:
    """Two workers, each with half of the heads: a hit is one of all groups on both, and of one whose weights change in
    memory nothing is kept until the reset."""
    others, cores = set(contents(service)), {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with start(gemma, "tensor-parallel", connector(service), tensor_parallel=2, environment=cores) as engine:
        first, second = (engine.generate(STORED, max_tokens=ANSWER) for _ in range(2))
        found = new_blocks(service, others)
        engine.change_weights(2.0, rank=1)
        changed = engine.generate(STORED, max_tokens=ANSWER)
        assert new_blocks(service, others) == found
        assert engine.reset()
        third, fourth = (engine.generate(STORED, max_tokens=ANSWER) for _ in range(2))
    assert set(first.cached_tokens) == set(third.cached_tokens) == {0}
    assert all_hits(second, STORED)
    assert all_hits(fourth, STORED)
    assert wrong(first, runs) + wrong(second, runs) == []
    assert len(wrong(changed, runs)) == len(STORED), "the change changes every output"
    for name in STORED:
        assert same_output(third.output(name), changed.output(name))
        assert same_output(fourth.output(name), changed.output(name))
    assert len(found) == 2 * GROUPS
    assert {size for sizes in found.values() for size in sizes.values()} == {BLOCK_BYTES // 2}
