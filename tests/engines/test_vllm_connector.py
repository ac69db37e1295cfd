"""vLLM with `KVFSConnector`: blocks by prefix hash through the native client, between engines that run at once.

Two engines live through the whole module, so that each starts once. `filler` stores what it computes, `hitter`, which
has no prefix cache of its own, loads it. Its outputs are those of `reference`, an engine without any cache
(`test_vllm.py` shows that they depend on every token of the prompt).
"""

from __future__ import annotations

import queue
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.events.engine_index import EngineIndex
from kvfs.events.event_streams import Engine as EventStream
from kvfs.events.sockets import Subscriber
from tests.engines.engine import (
    BLOCK_TOKENS,
    PROMPTS,
    VARIANTS,
    Engine,
    Engines,
    Run,
    same_output,
    whole_blocks,
)
from tests.engines.scripts import run_vllm_script, said_to_work
from tests.engines.tiny_llama import HEAD_DIM, KV_HEADS, LAYERS, VOCABULARY
from tests.support.door import ON_DIRECTORY
from tests.support.own_ports import own_port
from tests.support.service import Service, has_written
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * BLOCK_TOKENS * 4

FILLER = EventStream("filler", 0)

_rng = random.Random(84)
ROOTS = [[_rng.randrange(2, VOCABULARY) for _ in range(400)] for _ in range(3)]


def shared_prefixes() -> dict[str, list[int]]:
    """20 prompts over three roots: each shares an odd number of tokens with another, and goes on by itself."""
    prompts = {}
    for number in range(20):
        root, shared = ROOTS[number % 3], 37 + 2 * _rng.randrange(170)
        tail = [_rng.randrange(2, VOCABULARY) for _ in range(1 + 2 * _rng.randrange(30))]
        prompts[f"{shared} of root {number % 3}, {len(tail)} more"] = root[:shared] + tail
    return prompts


SHARED = shared_prefixes()
LATER = {
    f"later {tokens}": [_rng.randrange(2, VOCABULARY) for _ in range(tokens)] for tokens in (70, 131, 200)
}
"""Prompts that nobody stored before the weights of an engine change."""


def connector(service: Service, *, watched: bool = False, **extra: str) -> dict[str, Any]:
    return {
        "kv_connector": "WatchedConnector" if watched else "KVFSConnector",
        "kv_connector_module_path": "tests.engines.watched_connector" if watched else "kvfs.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": str(service.mount), **extra},
    }


@pytest.fixture(scope="module")
def index() -> EngineIndex:
    """Of what the filler's events say it holds itself."""
    return EngineIndex()


@pytest.fixture(scope="module")
def events(index: EngineIndex) -> Iterator[dict[str, Any]]:
    """An engine's settings for events that a subscriber here follows."""
    replay, stop, tokens = f"tcp://127.0.0.1:{own_port()}", trio.CancelScope(), queue.SimpleQueue[Any]()
    with Subscriber(index, "tcp://127.0.0.1:*", replays={FILLER.topic: replay}) as subscriber:

        async def follow() -> None:
            tokens.put(trio.lowlevel.current_trio_token())
            with stop:
                await subscriber.run()

        thread = threading.Thread(target=trio.run, args=[follow])
        thread.start()
        token = tokens.get()
        yield {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": FILLER.topic,
            "endpoint": subscriber.endpoint,
            "replay_endpoint": replay,
        }
        trio.from_thread.run_sync(stop.cancel, trio_token=token)
        thread.join()


def namespace_buckets(service: Service) -> set[str]:
    """Buckets of namespaces, whoever's: the service lasts for all modules."""
    with service.client() as client:
        return {bucket.name for bucket in client.buckets() if bucket.namespace}


@pytest.fixture(scope="module")
def buckets_of_others(service: Service) -> set[str]:
    """What other modules' engines opened before this one's."""
    return namespace_buckets(service)


@pytest.fixture(scope="module")
def both(
    engines: Engines, service: Service, buckets_of_others: set[str], events: dict[str, Any]
) -> Iterator[tuple[Engine, Engine]]:
    settings = connector(service)
    with (
        engines.start(
            "filler", None, connector=settings, prefix_caching=True, batched_tokens=96, events=events
        ) as filler,
        engines.start("hitter", None, connector=settings) as hitter,
    ):
        yield filler, hitter


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Iterator[Engine]:
    """An engine without any cache."""
    with engines.start("no-cache-84", None) as engine:
        yield engine


@pytest.fixture(scope="module")
def runs(both: tuple[Engine, Engine], plain: Engine) -> dict[str, Run]:
    filler, hitter = both
    with ThreadPoolExecutor() as pool:
        no_cache = pool.submit(plain.generate, {**SHARED, **PROMPTS, **VARIANTS, **LATER})
        filled = filler.generate(SHARED)
        hit = hitter.generate(SHARED)
        return {"reference": no_cache.result(), "filler": filled, "hitter": hit}


@pytest.mark.usefixtures("runs")
def test_the_log_says_that_the_store_works(both: tuple[Engine, Engine], service: Service) -> None:
    """On vLLM's own logger, which shows it without any setting."""
    for engine in both:
        assert "INFO" in said_to_work(engine.log(), "vllm", service)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("who", ["filler", "hitter"])
def test_outputs_are_those_without_a_cache(runs: dict[str, Run], who: str, name: str) -> None:
    assert same_output(runs[who].output(name), runs["reference"].output(name))


def test_the_second_engine_computes_no_whole_block(runs: dict[str, Run]) -> None:
    loaded = {name: runs["hitter"].cached(name) for name in SHARED}
    assert loaded == {name: whole_blocks(prompt) for name, prompt in SHARED.items()}
    assert runs["hitter"].counts["failed_blocks"] == 0
    assert runs["hitter"].counts["loaded_blocks"] == sum(loaded.values()) // BLOCK_TOKENS


def test_what_is_stored_is_stored_once(
    runs: dict[str, Run], service: Service, buckets_of_others: set[str]
) -> None:
    """Shared prefixes are one block each, and what the second engine generated was there already."""
    assert runs["filler"].counts["dropped_blocks"] == 0
    assert runs["hitter"].counts["stored_blocks"] <= len(SHARED)
    [bucket] = namespace_buckets(service) - buckets_of_others
    with service.client() as client:
        entries = [entry for entry in client.list(f"{bucket}/kv/") if not entry.is_directory]
    assert {entry.size_bytes for entry in entries} == {BLOCK_BYTES}
    prompts = {tuple(prompt[: i + BLOCK_TOKENS]) for prompt in SHARED.values() for i in block_starts(prompt)}
    assert len(entries) >= len(prompts)


def test_the_index_knows_what_the_engine_holds_itself(runs: dict[str, Run], index: EngineIndex) -> None:
    blocks = {tuple(prompt[: i + BLOCK_TOKENS]) for prompt in SHARED.values() for i in block_starts(prompt)}

    def held() -> int:
        [found] = [each for each in index.status()["engines"] if each["topic"] == FILLER.topic]
        return int(found["blocks"])

    eventually(lambda: held() >= len(blocks), "all blocks of the prompts are known", 20)
    assert index.counts["lost"] == 0


def block_starts(prompt: list[int]) -> range:
    return range(0, len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS)


def all_hits(run: Run, prompts: dict[str, list[int]]) -> bool:
    return all(run.cached(name) == whole_blocks(prompt) for name, prompt in prompts.items())


def differing(run: Run, reference: Run) -> list[str]:
    return [name for name in run.names if not same_output(run.output(name), reference.output(name))]


def wrong(run: Run, runs: dict[str, Run]) -> list[str]:
    """Prompts whose outputs are not those without a cache."""
    return differing(run, runs["reference"])


@pytest.fixture(scope="module")
def layered(engines: Engines, service: Service, runs: dict[str, Run]) -> Iterator[Engine]:
    """An engine that loads layer by layer within the step."""
    settings = connector(service, load="layers", store="prompt")
    with engines.start("layers", None, connector=settings, batched_tokens=128) as engine:
        yield engine


def test_layer_by_layer_loads_give_the_same(layered: Engine, runs: dict[str, Run]) -> None:
    run = layered.generate(SHARED)
    assert all_hits(run, SHARED)
    assert wrong(run, runs) == []
    assert run.counts["failed_blocks"] == 0


def test_weights_that_change_in_memory_end_sharing_until_the_reset(
    layered: Engine, plain: Engine, both: tuple[Engine, Engine], runs: dict[str, Run]
) -> None:
    """An engine whose weights are changed where they are computes everything, and others never see what it makes."""
    _, hitter = both
    prompts = {**SHARED, **LATER}
    before = layered.generate({"short": PROMPTS["under one block"]}).counts
    for engine in (layered, plain):
        engine.change_weights(2.0)
    changed = plain.generate(prompts)
    assert len(wrong(changed, runs)) == len(prompts), "the change changes every output"
    run = layered.generate(prompts)
    assert differing(run, changed) == []
    assert run.counts["loaded_blocks"] == before["loaded_blocks"]
    assert run.counts["stored_blocks"] == before["stored_blocks"]
    assert run.counts["weights_changed"] == 1
    assert len(re.findall("the weights in memory are not those", layered.log())) == 1
    clean = hitter.generate(LATER)
    assert wrong(clean, runs) == []
    assert set(clean.cached_tokens) == {0}, "nothing of the changed engine's was stored"
    # From the reset on it keeps what it makes, for itself.
    assert layered.reset()
    first, second = layered.generate(prompts), layered.generate(prompts)
    assert differing(first, changed) + differing(second, changed) == []
    assert {first.cached(name) for name in LATER} == {0}, "the clean engine has stored them"
    assert all_hits(second, prompts)
    assert second.counts["weights_changed"] == 1
    clean = hitter.generate(prompts)
    assert wrong(clean, runs) == []
    assert all_hits(clean, prompts)
    # And the same again, the other way round.
    for engine in (layered, plain):
        engine.change_weights(0.5)
    assert wrong(layered.generate(prompts), runs) == []
    assert layered.reset()
    assert wrong(layered.generate(prompts), runs) + wrong(layered.generate(prompts), runs) == []


def test_each_tensor_parallel_rank_has_its_own_shard(
    engines: Engines, service: Service, runs: dict[str, Run]
) -> None:
    """Two workers, each with half of the heads: what one engine of one worker stored is not taken for theirs."""
    settings, cores = connector(service), {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with engines.start(
        "tensor-parallel", None, connector=settings, tensor_parallel=2, environment=cores
    ) as engine:
        first, second = engine.generate(SHARED), engine.generate(SHARED)
        # The weights of one rank change: what the other computes depends on them, too.
        before = stored_blocks(service)
        engine.change_weights(2.0, rank=0)
        changed = engine.generate({**SHARED, **LATER})
        assert stored_blocks(service) == before
        assert engine.reset()
        third, fourth = (engine.generate({**SHARED, **LATER}) for _ in range(2))
    assert set(first.cached_tokens) == {0}
    assert all_hits(second, SHARED)
    assert wrong(first, runs) + wrong(second, runs) == []
    assert len(wrong(changed, runs)) == len(changed.names)
    assert {third.cached(name) for name in LATER} == {0}
    assert differing(third, changed) + differing(fourth, changed) == []
    assert all_hits(fourth, {**SHARED, **LATER})


def stored_blocks(service: Service) -> int:
    with service.client() as client:
        names = [each.name for each in client.buckets() if each.namespace]
        return sum(entry.is_block for name in names for entry in client.list(f"{name}/kv/"))


def test_context_parallelism_is_refused_by_scheduler_and_workers(
    engine_python: str, work: Path, service: Service
) -> None:
    found = run_vllm_script(engine_python, work, "refusals", {"address": str(service.mount)})
    assert found.pop("plain") == {"SCHEDULER": "", "WORKER": ""}
    assert found == {
        setting: dict.fromkeys(
            ("SCHEDULER", "WORKER"), f"InvalidRequest: {setting} = 2: context parallelism is not supported"
        )
        for setting in ("decode_context_parallel_size", "prefill_context_parallel_size")
    }


def test_a_cache_too_small_for_the_batch(engines: Engines, service: Service, runs: dict[str, Run]) -> None:
    """Requests are preempted, their blocks are given to others, and they come back from the store."""
    settings = connector(service, watched=True)
    with engines.start("preempted", None, connector=settings, cache_blocks=34) as engine:
        run = engine.generate({**SHARED, **PROMPTS})
    assert run.counts["resumed"] > 0
    assert wrong(run, runs) == []
    assert set(run.finish) == {"length"}


@pytest.mark.parametrize("load", ["async", "layers"])
def test_a_block_that_goes_between_match_and_load_is_computed(
    engines: Engines, service: Service, runs: dict[str, Run], load: str
) -> None:
    """Nothing of a block that failed to load is used, nor of those behind it."""
    settings = connector(service, watched=True, load=load)
    lose = {"KVFS_TEST_LOSE": "1"}
    with engines.start(f"losing-{load}", None, connector=settings, environment=lose) as engine:
        run = engine.generate(SHARED)
    assert run.counts["failed_blocks"] > 0
    assert wrong(run, runs) == []
    assert set(run.finish) == {"length"}


def test_blocks_that_do_not_come_up_are_computed(
    engines: Engines, service: Service, runs: dict[str, Run], both: tuple[Engine, Engine], work: Path
) -> None:
    """They lie on NVMe alone, and the service stops answering after their requests were told that they are hits."""
    both[1].generate(SHARED)  # what an earlier test removed is there again
    with service.client() as client:
        eventually(lambda: has_written(client, len(SHARED)), "blocks are on NVMe")
        dram = client.status()["tiers"][0]
        assert client.evict(size_bytes=dram["capacity_bytes"]) > 0
    gate, settings = work / "silent", connector(service, watched=True)
    at_gate = {"KVFS_TEST_GATE": str(gate)}
    with (
        engines.start("silent", None, connector=settings, environment=at_gate) as engine,
        ThreadPoolExecutor() as pool,
    ):
        loading = pool.submit(engine.generate, SHARED)
        eventually(Path(f"{gate}.reached").exists, "the engine is about to load", 90)
        with service.paused():
            Path(f"{gate}.go").touch()
            run = loading.result()
    assert wrong(run, runs) == []
    assert set(run.finish) == {"length"}
    assert all_hits(both[1].generate(SHARED), SHARED)


def test_the_service_is_killed_in_the_middle_of_a_batch(
    engines: Engines, service: Service, runs: dict[str, Run], both: tuple[Engine, Engine], work: Path
) -> None:
    """Killed after one engine was promised blocks and before it loads them, started again while all go on."""
    filler, hitter = both
    hitter.generate(SHARED)  # what an earlier test removed is there again
    gate, settings = work / "gate", connector(service, watched=True)
    at_gate = {"KVFS_TEST_GATE": str(gate)}
    with (
        engines.start("outage", None, connector=settings, environment=at_gate) as engine,
        ThreadPoolExecutor() as pool,
    ):
        loading = pool.submit(engine.generate, {**SHARED, **PROMPTS})
        eventually(Path(f"{gate}.reached").exists, "the engine is about to load", 90)
        service.kill()
        storing = pool.submit(filler.generate, VARIANTS)
        Path(f"{gate}.go").touch()
        while_down = hitter.generate(SHARED)
        service.restart()
        results = [storing.result(), loading.result(), while_down]
    for run in results:
        assert wrong(run, runs) == []
        assert set(run.finish) == {"length"}
    # What lay in DRAM was loaded in place while no service ran, and is there with the new one.
    assert all_hits(while_down, SHARED)
    assert all_hits(hitter.generate(SHARED), SHARED)
    # The engines that lived through it store again.
    fresh = {"fresh": [_rng.randrange(2, VOCABULARY) for _ in range(131)]}

    def is_shared() -> bool:
        filler.generate(fresh)
        return all_hits(hitter.generate(fresh), fresh)

    eventually(is_shared, "a new prompt is shared again", 30)
