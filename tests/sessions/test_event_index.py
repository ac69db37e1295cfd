"""KV events: the form of messages, and what an index makes of them however many are lost."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfs.errors import InvalidRequest
from kvfs.events.engine_index import EngineIndex
from kvfs.events.event_streams import Engine, Missing
from kvfs.events.kv_events import (
    CPU,
    GPU,
    STORAGE,
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Replay,
    decode_batch,
    encode_batch,
    first_sequence,
    sequence_frame,
    start_of,
)
from tests.support.kv_events import ENGINE, TOPIC, known, message, store_event

msgpack = pytest.importorskip("msgspec.msgpack")

hashes = st.binary(min_size=16, max_size=16) | st.integers(0, (1 << 64) - 1)
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=4),
    parent_block_hash=st.none() | hashes,
    token_ids=st.lists(st.integers(0, 1 << 31), max_size=8),
    block_size=st.integers(1, 512),
    lora_id=st.none() | st.integers(0, 9),
    medium=st.sampled_from([None, GPU, CPU, STORAGE]),
    lora_name=st.none() | st.text(max_size=4),
    group_idx=st.none() | st.integers(0, 3),
)
removed = st.builds(BlockRemoved, block_hashes=st.lists(hashes, max_size=4), medium=st.none() | st.just(GPU))
batches = st.builds(
    Batch,
    ts=st.floats(0, 2e9),
    events=st.lists(stored | removed | st.builds(AllBlocksCleared), max_size=4),
    data_parallel_rank=st.none() | st.integers(0, 7),
)


# --- the form ----------------------------------------------------------------------------------------------
@given(batches)
def test_a_batch_reads_back_as_it_was_written(batch: Batch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


def test_an_event_is_a_map_with_its_type_and_without_defaults() -> None:
    raw = msgpack.decode(encode_batch(Batch(1.0, [store_event([7])], 3)))
    assert raw == [
        1.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        ],
        3,
    ]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            ["BlockStored", [1, 2], 9, [5] * 32, 16, None, "GPU"],
            BlockStored([1, 2], 9, [5] * 32, 16, None, "GPU", None),
        ),
        (["BlockStored", [1], None, [5] * 16, 16, 3], BlockStored([1], None, [5] * 16, 16, 3, None, None)),
        (["BlockRemoved", [1]], BlockRemoved([1], None)),
        (["AllBlocksCleared"], AllBlocksCleared()),
        ({"type": "AllBlocksCleared", "new_field": 1}, AllBlocksCleared()),
        (
            {"type": "BlockRemoved", "block_hashes": [b"h"], "medium": "CPU", "x": {}},
            BlockRemoved([b"h"], "CPU"),
        ),
        (["BlockMoved", [1]], None),
        ({"type": "BlockMoved"}, None),
    ],
)
def test_arrays_and_fields_of_other_releases_are_read(raw: object, expected: KVEvent | None) -> None:
    events = decode_batch(msgpack.encode([1.0, [raw]])).events
    assert events == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91",
        msgpack.encode({"ts": 1}),
        msgpack.encode([1.0]),
        msgpack.encode([1.0, [7]]),
        msgpack.encode([1.0, [{"type": "BlockRemoved", "medium": "GPU"}]]),
        msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [1.5], "medium": "GPU"}]]),
        msgpack.encode([1.0, [["BlockRemoved", "abc"]]]),
    ],
)
def test_what_is_no_batch_is_an_error_that_names_it(payload: bytes) -> None:
    with pytest.raises(InvalidRequest, match="KV events"):
        decode_batch(payload)


@example(b"\x92\x00\x91\xa5\x00\x00\x00\x00\x80")  # a tag that is no UTF-8
@given(st.binary(max_size=64))
def test_any_bytes_are_a_batch_or_that_error(payload: bytes) -> None:
    with suppress(InvalidRequest):
        decode_batch(payload)


def test_a_replay_is_bounded_in_batches_and_in_bytes() -> None:
    past = Replay(max_batches=3, max_size_bytes=100)
    for sequence in range(5):
        past.add(sequence, bytes(10))
    assert [frames[0][-1] for frames in past.since(0)] == [2, 3, 4]
    assert [frames[0][-1] for frames in past.since(4)] == [4]
    past.add(5, bytes(95))
    assert (len(past), past.size_bytes) == (1, 95)


# --- the index ---------------------------------------------------------------------------------------------
class FakeEngine:
    """An engine's cache, its stream on the way to an index, and what it remembers of it."""

    def __init__(self, rng: random.Random, remembers: int, *, is_store: bool = False) -> None:
        self.rng, self.remembers, self.is_store = rng, remembers, is_store
        self.time_s = 0.0
        self.wire: deque[list[bytes]] = deque()
        self.restart()

    def restart(self) -> None:
        self.held: set[BlockHash] = set()
        self.sequence = first_sequence(self.time_s) if self.is_store else 0
        self.past = Replay(max_batches=self.remembers)

    def step(self, loss: float) -> bool:
        """Change the cache and send what says so; whether it was lost. An engine's first message is not: what had
        the same numbers before it started anew is otherwise taken for what continues. A store's may be."""
        choice = self.rng.random()
        event: KVEvent
        if choice < 0.6:
            blocks = [self.rng.randrange(40) for _ in range(self.rng.randrange(1, 4))]
            self.held.update(blocks)
            event = store_event(blocks)
        elif choice < 0.97:
            gone = self.rng.sample(sorted(self.held, key=str), min(len(self.held), 2))
            self.held.difference_update(gone)
            event = BlockRemoved(gone, GPU)
        else:
            self.held.clear()
            event = AllBlocksCleared()
        self.time_s += 1
        frames = message(self.sequence, event, time_s=self.time_s)
        self.past.add(self.sequence, frames[2])
        is_lost = (self.is_store or self.sequence > 0) and self.rng.random() < loss
        self.sequence += 1
        if not is_lost:
            self.wire.append(frames)
        return is_lost

    def replay(self, index: EngineIndex, missing: Missing) -> None:
        for frames in self.past.since(missing.sequence):
            index.replayed(missing.engine, [TOPIC.encode(), *frames])
        index.replay_ended(missing.engine)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    loss=st.sampled_from([0.0, 0.1, 0.5]),
    remembers=st.sampled_from([0, 3, 500]),
    restarts=st.sampled_from([0.0, 0.05]),
    is_store=st.booleans(),
)
def test_an_index_never_believes_in_a_block_that_is_gone(
    seed: int, loss: float, remembers: int, restarts: float, is_store: bool
) -> None:
    """After everything that was sent has arrived and replays have ended: a subset of the truth, all of it if nothing
    can be forgotten. Replays overtake the stream, and then ask for nothing that was not lost."""
    rng = random.Random(seed)
    engine, index = FakeEngine(rng, remembers, is_store=is_store), EngineIndex()
    missing: Missing | None = None
    losses = 0

    def deliver(count: int) -> None:
        nonlocal missing
        for _ in range(min(count, len(engine.wire))):
            missing = index.receive(engine.wire.popleft()) or missing

    for _ in range(60):
        if rng.random() < restarts:
            engine.restart()
            losses += 1  # a replay that is asked of the engine from before may answer what was not asked
        losses += engine.step(loss)
        deliver(rng.choice([0, 1, 2]))
        if missing is not None and rng.random() < 0.3:
            engine.replay(index, missing)
            missing = None
        if rng.random() < 0.2:
            losses += engine.step(0)
            while engine.wire or missing is not None:
                deliver(60)
                if missing is not None:
                    wanted, missing = missing, None
                    engine.replay(index, wanted)
            assert known(index) <= engine.held
            assert remembers < 500 or restarts or known(index) == engine.held
    assert remembers < 500 or index.counts["gaps"] <= losses


def test_a_replay_that_overtakes_the_stream_is_no_new_start() -> None:
    index = EngineIndex()
    missing = index.receive(message(2, store_event([2]), time_s=2))
    assert missing == Missing(ENGINE, 0)
    for sequence in range(6):
        index.replayed(ENGINE, [b"", *message(sequence, store_event([sequence]), time_s=sequence)][1:])
    index.replay_ended(ENGINE)
    for sequence in range(3, 5):
        assert index.receive(message(sequence, store_event([sequence]), time_s=sequence)) is None
    assert known(index) == set(range(6))
    assert index.counts == {"batches": 6, "gaps": 1, "lost": 0, "malformed": 0, "over_limit": 0}
    assert index.receive(message(0, store_event([30]), time_s=9)) is None
    assert known(index) == {30}, "the engine started anew"


def test_an_engine_that_starts_anew_is_followed_from_its_start() -> None:
    index = EngineIndex()
    for sequence in range(3):
        assert index.receive(message(sequence, store_event([sequence]))) is None
    assert index.receive(message(0, store_event([77]))) is None
    assert index.holders(77) == [ENGINE]
    assert index.holders(2) == []
    assert index.counts["gaps"] == 0


@pytest.mark.parametrize(
    "later_s", [0.001, 1e6, -1.0], ids=["a-millisecond-later", "days-later", "clock-put-back"]
)
def test_a_store_that_starts_anew_is_seen_whatever_is_lost(later_s: float) -> None:
    began_s = 1.8e9
    before, now = first_sequence(began_s), first_sequence(began_s + later_s)
    index = EngineIndex()
    for sequence in range(3):
        assert index.receive(message(before + sequence, store_event([sequence]))) is None
    missing = index.receive(message(now + 3, store_event([30])))  # what an engine's number 3 would continue
    assert (missing, known(index)) == (Missing(ENGINE, now), set())
    index.replay_ended(ENGINE)
    assert (known(index), index.counts["lost"]) == ({30}, 3)


def test_a_replay_says_that_a_store_started_anew() -> None:
    before, now = first_sequence(1.8e9), first_sequence(1.8e9 + 1)
    index = EngineIndex()
    assert index.receive(message(before, store_event([1]))) is None
    assert index._streams.catch_up(ENGINE) == Missing(ENGINE, before + 1)
    for sequence in range(2):
        index.replayed(ENGINE, message(now + sequence, store_event([10 + sequence])))
    index.replay_ended(ENGINE)
    assert (known(index), index.counts["lost"]) == ({10, 11}, 0)
    for sequence in range(3):  # the stream brings what the replay brought before it
        assert index.receive(message(now + sequence, store_event([10 + sequence]))) is None
    assert (known(index), index.counts["batches"]) == ({10, 11, 12}, 4)


def test_a_stream_may_outrun_the_bits_that_count() -> None:
    last, index = start_of((1 << 40) - 1) + (1 << 22) - 1, EngineIndex()
    for sequence in (last, last + 1):
        index.receive(message(sequence, store_event([sequence - last])))
        index.replay_ended(ENGINE)
    assert known(index) == {0, 1}


def test_streams_and_media_and_groups_are_told_apart() -> None:
    index = EngineIndex()
    index.receive(message(0, store_event([1]), topic="a"))
    index.receive(message(0, store_event([1], CPU), topic="b"))
    index.receive(message(0, store_event([1], None, group=1), rank=2))
    index.receive(message(1, store_event([1, 2], group=0), rank=2))
    assert index.holders(1) == [Engine("a", 0), Engine(TOPIC, 2)]
    assert index.holders(1, CPU) == [Engine("b", 0)]
    index.receive(message(2, BlockRemoved([1], GPU, group_idx=0), rank=2))
    assert index.holders(1) == [Engine("a", 0), Engine(TOPIC, 2)], "the other group still has it"
    index.receive(message(3, BlockRemoved([1], GPU, group_idx=1), rank=2))
    assert index.holders(1) == [Engine("a", 0)]
    assert index.match(Engine(TOPIC, 2), [2, 1]) == 0, "the other group has not the block that it reads"


def test_an_index_has_limits() -> None:
    index = EngineIndex(max_blocks=3)
    index.receive(message(0, store_event([1, 2, 3, 4, 5])))
    assert sum(bool(index.holders(block)) for block in range(9)) == 3
    assert index.counts["over_limit"] == 2
    index.receive([b"only one frame"])
    index.receive([b"\xff", sequence_frame(0), b""])
    for sequence in (1 << 63, (1 << 64) - 1):  # a number after it would have no frame to ask with
        assert index.receive(message(sequence, store_event([6]))) is None
    assert index.counts["malformed"] == 4
