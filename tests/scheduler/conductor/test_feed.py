"""Events into the Conductor: order, gaps, restarts, engines' tokens, strangers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs import limits
from kvfs.events.event_streams import Engine, Missing
from kvfs.events.kv_events import (
    CPU,
    GPU,
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    encode_batch,
    sequence_frame,
)
from kvfs.keys import prefix_hashes, split_keys
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.feeds.engine_hashes import NOTHING, EngineHashes
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.feeds.probes import parse_metrics
from scheduler.conductor.sources import Place, StreamName
from scheduler.conductor.values import EngineMetrics, Routed, RouteRequest
from tests.support.conductors import BLOCK_TOKENS, NAMESPACE, Clock, conductor, instance


def message(topic: str, sequence: int, *events: KVEvent, rank: int = 0) -> list[bytes]:
    batch = encode_batch(Batch(float(sequence), list(events), rank))
    return [topic.encode(), sequence_frame(sequence), batch]


def stored(
    hashes: list[BlockHash], tokens: list[int], parent: BlockHash | None = None, **values: Any
) -> BlockStored:
    given = {"lora_id": None, "lora_name": None, "medium": GPU, "block_size": BLOCK_TOKENS, **values}
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, **given)


def of_store(prompt: list[int], medium: str = CPU) -> BlockStored:
    return stored([*split_keys(prefix_hashes(NAMESPACE, prompt))], [], medium=medium)


PROMPT = list(range(100, 100 + 5 * BLOCK_TOKENS))


class Stand:
    """A Conductor that follows instance `a` with engine topic `engine-a` and store topic `node`."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.conductor: Conductor = conductor(self.clock, instance("a", store_topic="node"), instance("b"))
        self.feed = Feed(self.conductor.registry, self.clock)

    def held(self, prompt: list[int], name: str = "a") -> int:
        """How many blocks of a prompt the index has for an instance."""
        return self.conductor.match(RouteRequest(model="m", tokens=prompt))[name] // BLOCK_TOKENS

    def stream(self, topic: str) -> dict[str, Any]:
        [found] = [each for each in self.conductor.status()["streams"] if each["stream"] == topic]
        return dict(found)


def test_an_engine_s_tokens_are_hashed_anew_and_found_again_by_its_own_hashes() -> None:
    stand = Stand()
    stand.feed.receive(message("engine-a", 0, stored([1, 2], PROMPT[: 2 * BLOCK_TOKENS])))
    stand.feed.receive(
        message("engine-a", 1, stored([3], PROMPT[2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS], parent=2))
    )
    assert (stand.held(PROMPT), stand.held(PROMPT, "b")) == (3, 0)
    stand.feed.receive(message("engine-a", 2, BlockRemoved([2], GPU)))
    assert stand.held(PROMPT) == 1
    stand.feed.receive(message("engine-a", 3, AllBlocksCleared()))
    assert stand.held(PROMPT) == 0
    assert stand.stream("engine-a")["knowledge"] == "current"
    assert (stand.stream("engine-a")["events"], stand.stream("node")["events"]) == (4, 0)


def test_a_block_in_two_media_of_an_engine_is_there_until_both_have_dropped_it() -> None:
    stand = Stand()
    first = PROMPT[:BLOCK_TOKENS]
    stand.feed.receive(message("engine-a", 0, stored([1], first), stored([1], first, medium=CPU)))
    stand.feed.receive(message("engine-a", 1, BlockRemoved([1], GPU)))
    assert stand.held(PROMPT) == 1
    stand.feed.receive(message("engine-a", 2, BlockRemoved([1], CPU)))
    assert stand.held(PROMPT) == 0


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (stored([1], PROMPT[:16], lora_name="adapter"), "engine_blocks_not_by_tokens"),
        (stored([1], PROMPT[:16], extra_keys=[["image"]]), "engine_blocks_not_by_tokens"),
        (stored([2], PROMPT[16:32], parent=1), "engine_blocks_without_parent"),
        (stored([1], PROMPT[:32], block_size=32), "engine_blocks_of_other_size"),
        (stored([1, 2], PROMPT[:16]), "engine_blocks_malformed"),
        (stored([1], [-1] * 16), "engine_blocks_malformed"),
        (stored([1], PROMPT[:16], group_idx=1), "other_group_events"),
    ],
)
def test_what_has_no_key_is_counted_and_is_a_miss(event: BlockStored, count: str) -> None:
    stand = Stand()
    stand.feed.receive(message("engine-a", 0, event))
    assert stand.held(PROMPT) == 0
    assert stand.conductor.counts[count] > 0


def test_extra_keys_that_say_nothing_do_not_matter() -> None:
    stand = Stand()
    stand.feed.receive(message("engine-a", 0, stored([1, 2], PROMPT[:32], extra_keys=[None, None])))
    assert stand.held(PROMPT) == 2


def test_weights_begin_the_chain_of_an_engine() -> None:
    counts: Counter[str] = Counter()
    hashes = EngineHashes(NAMESPACE, "w", counts, max_blocks=3)
    keys, parent, _ = hashes.stored(Place(GPU), stored([1, 2], PROMPT[:32]))
    assert (keys, parent) == (prefix_hashes(NAMESPACE, PROMPT[:32], extra=[b"w\0", None]), None)
    assert hashes.stored(Place(GPU), stored([3, 4], PROMPT[32:64], parent=2)) == NOTHING
    assert counts == {"engine_blocks_over_limit": 2}
    assert hashes.stored(Place(GPU), stored([3], PROMPT[32:48], parent=2))[1] == keys[16:]


def test_a_store_s_hashes_are_taken_as_they_are() -> None:
    stand = Stand()
    event = of_store(PROMPT)
    event.block_hashes.extend([7, b"short"])
    stand.feed.receive(message("node", 0, AllBlocksCleared(), event))
    assert stand.held(PROMPT) == 5
    assert stand.conductor.counts["store_blocks_malformed"] == 2
    stand.feed.receive(message("node", 1, BlockRemoved([event.block_hashes[3]], CPU)))
    assert stand.held(PROMPT) == 3


# --- gaps, restarts ------------------------------------------------------------------------------------------
def test_an_engine_that_restarts_without_a_replay_is_not_believed_to_have_its_old_blocks() -> None:
    stand = Stand()
    for n in range(3):
        stand.feed.receive(message("engine-a", n, stored([n], PROMPT[:BLOCK_TOKENS])))
    stand.feed.receive(message("engine-a", 0, stored([9], [5] * BLOCK_TOKENS)))
    assert (stand.held(PROMPT), stand.held([5] * BLOCK_TOKENS)) == (0, 1)


def test_an_idle_engine_that_restarts_says_so_by_its_start_time() -> None:
    """No event comes of it: vLLM sends them in a step."""
    stand = Stand()
    stand.conductor.registry.observed("a", EngineMetrics(started_s=100.0))
    stand.feed.receive(message("engine-a", 0, stored([1], PROMPT[:BLOCK_TOKENS])))
    stand.feed.receive(message("node", 0, of_store(PROMPT)))
    stand.clock.now_s += 1
    stand.conductor.registry.observed("a", EngineMetrics(started_s=100.0))
    assert stand.conductor.counts["restarts_seen"] == 0
    stand.clock.now_s += 1
    stand.conductor.registry.observed("a", EngineMetrics(started_s=107.0))
    assert stand.conductor.counts["restarts_seen"] == 1
    assert stand.stream("engine-a")["blocks"] == {"GPU": 0}
    assert stand.held(PROMPT) == 5, "its node's store goes on"


def test_a_restart_that_events_have_shown_already_clears_nothing_twice() -> None:
    stand = Stand()
    stand.feed.receive(message("engine-a", 0, stored([1], PROMPT[:BLOCK_TOKENS])))
    stand.conductor.registry.observed("a", EngineMetrics(started_s=100.0))
    stand.clock.now_s += 1
    stand.feed.receive(message("engine-a", 1, stored([1], PROMPT[:BLOCK_TOKENS])))
    stand.feed.receive(message("engine-a", 0, stored([1, 2], PROMPT[: 2 * BLOCK_TOKENS])))
    stand.clock.now_s += 1
    stand.conductor.registry.observed("a", EngineMetrics(started_s=107.0))
    assert stand.held(PROMPT) == 2


def test_a_restart_clears_what_came_after_lost_batches() -> None:
    stand = Stand()
    stand.feed.receive(message("engine-a", 0, stored([1], PROMPT[:BLOCK_TOKENS])))
    stand.clock.now_s += 1
    stand.conductor.registry.observed("a", EngineMetrics(started_s=100.0))
    stand.clock.now_s += 1
    missing = stand.feed.receive(message("engine-a", 5, stored([1], PROMPT[:BLOCK_TOKENS])))
    assert missing is not None
    stand.feed.replay_ended(missing.engine)
    assert stand.held(PROMPT) == 1
    stand.clock.now_s += 1
    stand.conductor.registry.observed("a", EngineMetrics(started_s=107.0))
    assert stand.held(PROMPT) == 0


@pytest.mark.parametrize("restart", ["by events", "by its start time", "cleared"])
def test_an_engine_with_empty_caches_is_not_expected_to_have_what_it_made_before(restart: str) -> None:
    stand = Stand()
    stand.conductor.registry.observed("a", EngineMetrics(started_s=100.0))
    stand.feed.receive(message("engine-a", 0, stored([7], [7] * BLOCK_TOKENS)))
    stand.clock.now_s += 1
    stand.conductor.registry.observed("a", EngineMetrics(started_s=100.0))

    def predicted() -> int:
        routed = stand.conductor.route(RouteRequest(model="m", tokens=PROMPT, exclude=["b"]))
        assert isinstance(routed, Routed)
        stand.conductor.done(routed.id)
        return routed.cached_tokens // BLOCK_TOKENS

    assert predicted() == 0
    assert predicted() == (len(PROMPT) - 1) // BLOCK_TOKENS, "its events may be on their way"
    if restart == "by events":
        stand.feed.receive(message("engine-a", 0, stored([7], [7] * BLOCK_TOKENS)))
    elif restart == "cleared":
        stand.feed.receive(message("engine-a", 1, AllBlocksCleared()))
    else:
        stand.conductor.registry.observed("a", EngineMetrics(started_s=107.0))
    assert predicted() == 0


def test_a_sleeping_engine_has_nothing() -> None:
    stand = Stand()
    stand.conductor.registry.observed("a", EngineMetrics())
    stand.feed.receive(message("engine-a", 0, stored([1], PROMPT[:BLOCK_TOKENS])))
    stand.conductor.registry.observed("a", EngineMetrics(is_asleep=True))
    assert stand.held(PROMPT) == 0


def test_a_gap_of_a_store_clears_it_and_wants_its_manifest() -> None:
    stand = Stand()
    stand.feed.receive(message("node", 0, of_store(PROMPT)))
    missing = stand.feed.receive(message("node", 5, of_store([1] * BLOCK_TOKENS)))
    assert missing == Missing(Engine("node", 0), 1)
    stand.feed.replay_ended(missing.engine)
    assert (stand.held(PROMPT), stand.held([1] * BLOCK_TOKENS)) == (0, 1)
    assert stand.stream("node")["knowledge"] == "partial"
    assert stand.feed.wanted == {Engine("node", 0)}
    epoch = stand.stream("node")["epoch"]
    stand.feed.manifest_came(Engine("node", 0), epoch - 1)
    assert stand.stream("node")["knowledge"] == "partial", "more was lost meanwhile"
    stand.feed.manifest_came(Engine("node", 0), epoch)
    assert stand.stream("node")["knowledge"] == "current"


def test_a_gap_of_an_engine_clears_it_and_all_that_it_can_replay_is_wanted() -> None:
    stand = Stand()
    stand.feed.receive(message("engine-a", 0, stored([1], PROMPT[:BLOCK_TOKENS])))
    missing = stand.feed.receive(message("engine-a", 2, stored([2], [1] * BLOCK_TOKENS)))
    assert missing is not None
    stand.feed.replay_ended(missing.engine)
    assert (stand.held(PROMPT), stand.held([1] * BLOCK_TOKENS)) == (0, 1)
    assert stand.feed.wanted == {missing.engine}
    assert stand.conductor.counts["lost_batches"] == 1


def test_a_silent_publisher_is_not_believed_and_begins_anew() -> None:
    stand = Stand()
    stand.feed.receive(message("node", 0, of_store(PROMPT)))
    stand.feed.silent(Engine("node", 0))
    assert (stand.held(PROMPT), stand.stream("node")["knowledge"]) == (0, "unknown")
    assert stand.feed.streams.catch_up(Engine("node", 0)) == Missing(Engine("node", 0), 0)
    stand.feed.replayed(Engine("node", 0), message("node", 0, of_store(PROMPT)))
    stand.feed.replay_ended(Engine("node", 0))
    assert (stand.held(PROMPT), stand.stream("node")["knowledge"]) == (5, "current")


def test_a_stranger_s_batches_touch_nothing_but_their_count(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand()
    for n in range(limits.MAX_ENGINE_STREAMS + 5):
        stand.feed.receive(message(f"stranger-{n}", 3, of_store(PROMPT)))
    stand.feed.receive(message("engine-a", 0, stored([1], PROMPT[:BLOCK_TOKENS]), rank=3))
    stand.feed.receive([])
    stand.feed.receive([b"engine-a", b"no number", b""])
    assert stand.held(PROMPT) == 0
    status = stand.conductor.status()
    assert len(status["unregistered"]) == limits.MAX_UNREGISTERED_TOPICS
    assert "stranger-0" in caplog.text
    assert status["counts"]["unregistered_batches"] > limits.MAX_ENGINE_STREAMS
    stand.feed.receive(message("engine-b", 0, stored([1], PROMPT[:BLOCK_TOKENS])))
    assert stand.held(PROMPT, "b") == 1


def test_an_instance_that_comes_again_begins_with_nothing() -> None:
    stand = Stand()
    stand.feed.receive(message("engine-a", 4, stored([1], PROMPT[:BLOCK_TOKENS])))
    stand.feed.replay_ended(Engine("engine-a", 0))
    stand.conductor.remove("a")
    for topic in ("engine-a", "node"):
        stand.feed.drop(StreamName(topic, 0))
    stand.conductor.registry.add(instance("a", store_topic="node"))
    assert stand.held(PROMPT) == 0
    stand.feed.receive(message("engine-a", 0, stored([2], PROMPT[16:32], parent=1)))
    assert stand.conductor.counts["engine_blocks_without_parent"] == 1


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), loss=st.sampled_from([0.0, 0.2]), doubled=st.sampled_from([0.0, 0.2]))
def test_the_index_never_believes_in_a_block_that_is_gone(seed: int, loss: float, doubled: float) -> None:
    """Batches are dropped, doubled, and come again; the publisher restarts; a replay may be cut short. After a batch
    that is in order, what is believed is a subset of the truth."""
    rng, stand = random.Random(seed), Stand()
    blocks = [[n] * BLOCK_TOKENS for n in range(12)]
    truth: set[int] = set()
    past: list[list[bytes]] = []
    sequence = 0

    def check() -> None:
        assert {n for n in range(12) if stand.held(blocks[n])} <= truth
        if not loss and not doubled:
            assert {n for n in range(12) if stand.held(blocks[n])} == truth

    for _ in range(60):
        choice = rng.random()
        if choice < 0.03:
            truth, past, sequence = set(), [], 0
        event: KVEvent
        if choice < 0.6 or not truth:
            new = rng.randrange(12)
            truth.add(new)
            event = stored([new], blocks[new])
        elif choice < 0.97:
            gone = rng.choice(sorted(truth))
            truth.discard(gone)
            event = BlockRemoved([gone], GPU)
        else:
            truth.clear()
            event = AllBlocksCleared()
        frames = message("engine-a", sequence, event)
        past.append(frames)
        sequence += 1
        if rng.random() < loss and sequence > 1:
            continue
        missing = stand.feed.receive(frames)
        if missing is not None:
            for old in past[missing.sequence + rng.choice((0, 0, 1)) :]:
                if rng.random() > 0.1 * bool(loss):
                    stand.feed.replayed(missing.engine, old)
            stand.feed.replay_ended(missing.engine)
        if rng.random() < doubled and sequence > 1:
            again = stand.feed.receive(frames)
            if again is not None:
                stand.feed.replay_ended(again.engine)
        check()


# --- metrics -------------------------------------------------------------------------------------------------
def test_the_metrics_of_engines_are_read() -> None:
    text = """# HELP vllm:num_requests_running Number
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0
process_start_time_seconds 1.7e+09
"""
    assert parse_metrics(text) == EngineMetrics(started_s=1.7e9, requests=6, is_asleep=True)
    assert parse_metrics('sglang:num_running_reqs{a="}"} 4\nprocess_start_time_seconds NaN\n\x00{{{ \n') == (
        EngineMetrics(started_s=None, requests=4)
    )
    assert parse_metrics("") == EngineMetrics()


def test_requests_from_before_a_restart_count_as_load() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"), instance("b"))
    made.registry.observed("a", EngineMetrics(requests=40))
    status = {each["name"]: each for each in made.status()["instances"]}
    assert (status["a"]["active_requests"], status["b"]["active_requests"]) == (40, 0)
    made.registry.observed("a", EngineMetrics(requests=1))
    assert made.status()["instances"][0]["active_tokens"] == limits.FOREIGN_TOKENS
