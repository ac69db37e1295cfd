"""Sources of blocks that are cleared, many at once: their blocks count nowhere at once, and are swept step by step."""

from __future__ import annotations

import random

import pytest

from kvfs._native.cluster.index import SPARE_SOURCES, ClusterIndex
from kvfs.events.kv_events import GPU
from kvfs.keys import prefix_hashes
from kvfs.namespace_groups import FULL_KINDS
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.sources import (
    ALL_BLOCKS,
    Knowledge,
    Place,
    Sources,
    Stream,
    StreamName,
    Window,
    window_of,
)
from scheduler.conductor.values import RouteRequest
from tests.support.conductors import NAMESPACE, Clock, conductor, instance


def test_at_most_as_many_sources_are_cleared_in_one_pass_as_there_are_columns_to_spare() -> None:
    index, draw = ClusterIndex(1_000_000), random.Random(1)
    sources = Sources(index)
    streams = [Stream(StreamName(f"engine-{n}", 0)) for n in range(200)]
    for stream in streams:
        stream.sources[Place(GPU)] = sources.take()
        index.add(stream.sources[Place(GPU)], draw.randbytes(16 * 100))
    lost = [sources.clear(stream, Knowledge.UNKNOWN) for stream in streams]
    assert lost == [False] * SPARE_SOURCES + [True] * (200 - SPARE_SOURCES)
    assert [bool(stream.sources) for stream in streams] == [not each for each in lost]
    passes = 0
    while len(index):
        assert index.unswept_sources == min(SPARE_SOURCES, len(index) // 100)
        sources.sweep(Clock())
        passes += 1
    assert passes == 4
    taken = [sources.take() for _ in range(1024 - SPARE_SOURCES)]
    assert len(set(taken)) == len(taken)


def held(made: Conductor, prompt: list[int]) -> set[int]:
    return set(made.match(RouteRequest(model="m", tokens=prompt)).values())


@pytest.mark.parametrize("window", [None, Window(3)])
def test_all_streams_may_be_cleared_and_come_again_before_anything_is_swept(window: Window | None) -> None:
    """Without and with a window beside full attention, which has to go on as far."""
    names = [f"i{n}" for n in range(100)]
    made = conductor(Clock(), *map(instance, names))
    prompt = list(range(640))
    hashes = prefix_hashes(NAMESPACE, prompt)
    for _ in range(3):
        for name in names:
            stream = made.registry.stream(StreamName(f"engine-{name}", 0))
            assert stream is not None
            made.registry.stored(stream, Place(GPU), hashes, None)
            if window is not None:
                made.registry.layers_are(stream, 1, window)
                assert made.match(RouteRequest(model="m", tokens=prompt))[name] == 0
                made.registry.stored(stream, Place(GPU, window), hashes, None)
        assert held(made, prompt) == {640}
        for stream in made.registry.streams():
            made.registry.cleared(stream, Knowledge.UNKNOWN)
            assert made._index.unswept_sources <= SPARE_SOURCES
        assert held(made, prompt) == {0}
    while len(made._index):
        made.tick()
    assert made.counts["over_limit"] == 0


def test_blocks_of_a_source_that_no_number_is_left_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.conductor.sources.MAX_BLOCK_SOURCES", 3)
    made = conductor(Clock(), instance("a"), instance("b"))
    prompt = list(range(640))
    hashes = prefix_hashes(NAMESPACE, prompt)
    for name in "ab":
        stream = made.registry.stream(StreamName(f"engine-{name}", 0))
        assert stream is not None
        made.registry.stored(stream, Place(GPU), hashes, None)
    assert made.counts["over_limit"] == 40
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 640, "b": 0}


@pytest.mark.parametrize(
    ("own_tokens", "read"),
    [
        (48, Window(ALL_BLOCKS)),
        (16, Window(ALL_BLOCKS, parts=3)),
        (144, Window(ALL_BLOCKS, 3)),
        (32, None),
        (0, None),
    ],
)
def test_of_further_groups_of_full_attention_all_blocks_are_read(
    own_tokens: int, read: Window | None
) -> None:
    for kind in FULL_KINDS:
        assert window_of(kind, own_tokens, None, None, 48, is_beside=True) == read
        assert window_of(kind, own_tokens, None, None, 48, is_beside=False) == Window()
