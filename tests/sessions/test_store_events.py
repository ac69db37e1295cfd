"""KV events of the store: what it publishes against its table, and the service that publishes and follows."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from trio.abc import Instrument

from kvfs._native.shared.table import TIER_DRAM, TIER_NVME
from kvfs.config.settings import EventSettings
from kvfs.errors import ConfigError
from kvfs.events.engine_index import EngineIndex
from kvfs.events.event_streams import Engine
from kvfs.events.kv_events import (
    CPU,
    STORAGE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Replay,
    decode_batch,
)
from kvfs.events.sockets import Publisher, Subscriber
from kvfs.limits import MIB
from kvfs.namespace_groups import CHUNK, KIND, LAYERS, WINDOW, group_in
from kvfs.namespaces import Namespace
from tests.support.block_batches import Block, open_blocks
from tests.support.kv_events import ENGINE, TOPIC, store_event
from tests.support.service import Service
from tests.support.stores import BOUND, NAMESPACE, draft_of
from tests.support.waits import WAIT_S, until
from tiers.device.threads import thread_device
from tiers.events.publisher import open_events
from tiers.events.store_events import BlockEvents
from tiers.recovery.start import NvmeOptions, StoreOptions, open_store, start_store
from tiers.store.store import Store

pytest.importorskip("msgspec.msgpack")


def digest(number: int) -> bytes:
    return bytes([1]) * 8 + number.to_bytes(8, "big")


def put_chain(store: Store, numbers: range, size_bytes: int = MIB) -> None:
    for number in numbers:
        parent = digest(number - 1) if number > numbers.start else None
        store.seal_block(draft_of(store, bytes(size_bytes)), BOUND, digest(number), parent=parent, uid=0)


def places(store: Store, bit: int) -> set[bytes]:
    return {key for key, entry in store.table.items() if entry.tiers & bit}


async def publish_until(heard: Callable[[], bool], publisher: Publisher) -> None:
    """Publish until this was heard: ZeroMQ drops what is said while a connection is not there."""
    with trio.fail_after(WAIT_S):
        while not heard():
            publisher.publish([])
            await trio.sleep(0.01)


async def test_every_tier_of_every_block_is_told(tmp_path: Path) -> None:
    """Taken over, sealed, written to NVMe, demoted, removed: what a subscriber knows is what the table says."""
    device = thread_device()
    with open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, max_slots=64, backing="directory")) as before:
        before.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
        put_chain(before, range(100, 104))
        before.close(keep=True)
    store = await start_store(
        StoreOptions(
            tmp_path,
            dram_bytes=16 * MIB,
            backing="directory",
            nvme=NvmeOptions(device, 64 * MIB, segment_bytes=MIB),
        )
    )
    async with AsyncExitStack() as stack:
        index = EngineIndex()
        subscriber = stack.enter_context(Subscriber(index, "tcp://127.0.0.1:*"))
        publisher = Publisher(subscriber.endpoint, topic=TOPIC, replay_endpoint="tcp://127.0.0.1:*")
        events = BlockEvents(store, stack.enter_context(publisher))
        subscriber._replays[TOPIC] = str(publisher.replay_endpoint)
        nursery = await stack.enter_async_context(trio.open_nursery())
        for task in (subscriber.run, store.run, events.run):
            nursery.start_soon(task)
        put_chain(store, range(9))
        await until(lambda: len(places(store, TIER_NVME)) == 13)
        store.evict(4 * MIB)
        store.remove_block(digest(3))
        put_chain(store, range(50, 52))

        def agrees() -> bool:
            everything = [digest(n) for n in range(110)]
            return all(
                {d for d in everything if index.holders(d, medium)} == places(store, bit)
                for medium, bit in ((CPU, TIER_DRAM), (STORAGE, TIER_NVME))
            )

        await publish_until(agrees, publisher)  # something has to arrive after all else
        assert places(store, TIER_NVME) - places(store, TIER_DRAM), "nothing was demoted"
        assert events.status()["hashes"] > 13
        nursery.cancel_scope.cancel()
    assert store.block_listeners == []
    await store.finish()
    store.close()
    await device.aclose()


async def test_a_manifest_brings_all_blocks_again_to_who_lost_them(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        options = StoreOptions(tmp_path, dram_bytes=16 * MIB, max_slots=64, backing="directory")
        store = stack.enter_context(open_store(options))
        store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
        index = EngineIndex()
        subscriber = stack.enter_context(Subscriber(index, "tcp://127.0.0.1:*"))
        publisher = stack.enter_context(
            Publisher(
                subscriber.endpoint,
                topic=TOPIC,
                replay_endpoint="tcp://127.0.0.1:*",
                replay=Replay(max_batches=1),
            )
        )
        subscriber.replay_at(TOPIC, str(publisher.replay_endpoint))
        put_chain(store, range(6), 64)
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(BlockEvents(store, publisher).run)
        await until(lambda: publisher.sequence == 2)  # before the subscriber runs: ZeroMQ drops them
        store.remove_block(digest(5))
        nursery.start_soon(subscriber.run)
        put_chain(store, range(50, 51), 64)
        await publish_until(lambda: bool(index.status()["engines"]), publisher)
        asked = [subscriber.fetch_manifest, subscriber.fetch_manifest]
        done: list[bool] = []

        async def ask(fetch: Callable[[Engine], Awaitable[bool]]) -> None:
            done.append(await fetch(ENGINE))

        for fetch in asked:
            nursery.start_soon(ask, fetch)
        await until(lambda: index.match(ENGINE, [digest(n) for n in range(5)], CPU) == 5)
        assert index.holders(digest(5), CPU) == []
        await until(lambda: done == [True, True])
        nursery.cancel_scope.cancel()


async def test_a_chain_of_blocks_is_one_event(tmp_path: Path) -> None:
    with open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, max_slots=64, backing="directory")) as store:
        store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
        past = Replay()
        with Publisher("inproc://chain", replay=past) as publisher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(BlockEvents(store, publisher).run)
                await until(lambda: len(past) == 1)
                put_chain(store, range(3), 64)
                put_chain(store, range(10, 12), 64)
                store.remove_block(digest(2))
                store.remove_block(digest(1))
                await until(lambda: len(past) == 2)
                nursery.cancel_scope.cancel()
        first, second = (decode_batch(frames[1]) for frames in past.since(0))
        assert first.events == [AllBlocksCleared()]
        one, two, gone = second.events
        assert isinstance(one, BlockStored)
        assert isinstance(two, BlockStored)
        assert isinstance(gone, BlockRemoved)
        assert one.block_hashes == [digest(0), digest(1), digest(2)]
        assert two.block_hashes == [digest(10), digest(11)]
        assert gone.block_hashes == [digest(2), digest(1)]
        assert (one.medium, one.block_size, one.ownership) == (CPU, NAMESPACE.block_tokens, "kvfs")


async def test_blocks_of_cache_groups_are_told_with_what_their_layers_read(tmp_path: Path) -> None:
    """Also of a bucket that is removed before its last events are sent, and of one that a start took over."""
    plain = NAMESPACE.as_mapping()
    full = Namespace.from_mapping({**plain, "extra": {KIND: "FullAttentionSpec", LAYERS: "1"}})
    window = Namespace.from_mapping(
        {**plain, "extra": {KIND: "SlidingWindowSpec", WINDOW: "64", LAYERS: "2"}}
    )
    chunk = Namespace.from_mapping(
        {**plain, "extra": {KIND: "ChunkedLocalAttentionSpec", CHUNK: "128", LAYERS: "3"}}
    )
    layers, windowed, chunked = group_in(full), group_in(window), group_in(chunk)
    assert layers is not None
    assert windowed is not None
    assert chunked is not None
    with open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, max_slots=64, backing="directory")) as store:
        buckets = {BOUND: NAMESPACE, b"full": full, b"window": window, b"chunk": chunk}
        for name, namespace in buckets.items():
            store.create_bucket(name, uid=0, gid=0, namespace=namespace)

        def put(bucket: bytes, number: int, parent: int | None) -> None:
            before = None if parent is None else digest(parent)
            store.seal_block(draft_of(store, bytes(64)), bucket, digest(number), parent=before, uid=0)

        put(b"full", 1, None)
        put(b"window", 101, 1)
        past = Replay()
        with Publisher("inproc://groups", replay=past) as publisher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(BlockEvents(store, publisher).run)
                await until(lambda: len(past) == 2)
                put(b"full", 2, 1)
                put(b"window", 102, 2)  # is no continuation of the event of the block that it lies beside
                put(b"chunk", 201, 2)
                put(BOUND, 3, None)
                for number in (102, 101, 2):
                    store.remove_block(digest(number))
                store.remove_bucket(b"window")
                await until(lambda: len(past) == 3)
                nursery.cancel_scope.cancel()
    first, second = (decode_batch(frames[1]).events for frames in list(past.since(0))[1:])
    stored = [each for each in [*first, *second] if isinstance(each, BlockStored)]
    told = {
        each.block_hashes[0]: (
            each.group_idx,
            each.kv_cache_spec_kind,
            each.kv_cache_spec_sliding_window,
            each.chunk_tokens,
        )
        for each in stored
    }
    of_window, of_full = (windowed.number, "sliding_window", 64, None), (None, "full_attention", None, None)
    assert told == {
        digest(1): of_full,
        digest(101): of_window,
        digest(2): of_full,
        digest(102): of_window,
        digest(201): (chunked.number, "chunked_local_attention", None, 128),
        digest(3): (None, None, None, None),
    }
    assert [each.parent_block_hash for each in stored if each.group_idx] == [digest(1), digest(2), digest(2)]
    assert {each.layers_of for each in stored[:-1]} == {layers.model}
    assert stored[-1].layers_of is None
    assert [each for each in second if isinstance(each, BlockRemoved)] == [
        BlockRemoved([digest(102), digest(101)], CPU, windowed.number, "LOCAL", "kvfs", layers.model),
        BlockRemoved([digest(2)], CPU, None, "LOCAL", "kvfs", layers.model),
    ]


async def test_blocks_that_go_before_they_were_told_are_told_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that took over more than a batch of blocks tells of them bit by bit."""
    monkeypatch.setattr("tiers.events.store_events.MAX_EVENT_HASHES", 4)
    with open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, max_slots=64, backing="directory")) as store:
        for name in (BOUND, b"late"):
            store.create_bucket(name, uid=0, gid=0, namespace=NAMESPACE)
        put_chain(store, range(8), 64)
        store.seal_block(draft_of(store, bytes(64)), b"late", digest(50), parent=None, uid=0)
        past = Replay()

        class RemoveBetweenBatches(Instrument):
            """Removes a block after the first batch of those that were there: a task might run after the last."""

            def after_task_step(self, task: trio.lowlevel.Task) -> None:
                if len(past) == 2 and digest(50) in store.table:
                    store.remove_block(digest(50))

        with Publisher("inproc://late", replay=past) as publisher:
            trio.lowlevel.add_instrument(RemoveBetweenBatches())
            async with trio.open_nursery() as nursery:
                events = BlockEvents(store, publisher)
                nursery.start_soon(events.run)
                await until(lambda: events.published == 9)  # those that stay, and the one that went
                nursery.cancel_scope.cancel()
    told = [event for frames in past.since(0) for event in decode_batch(frames[1]).events]
    there: set[BlockHash] = set()
    for event in told:
        if isinstance(event, BlockStored):
            there |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            there -= set(event.block_hashes)
    assert there == {digest(number) for number in range(8)}


async def test_a_burst_is_cut_into_batches_and_none_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.events.store_events.MAX_EVENT_HASHES", 4)
    with open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, max_slots=64, backing="directory")) as store:
        store.create_bucket(BOUND, uid=0, gid=0, namespace=NAMESPACE)
        past = Replay()
        with Publisher("inproc://burst", replay=past) as publisher:
            async with trio.open_nursery() as nursery:
                events = BlockEvents(store, publisher)
                nursery.start_soon(events.run)
                await until(lambda: len(past) == 1)
                for start in range(0, 30, 10):
                    put_chain(store, range(start, start + 10), 64)
                    await until(lambda start=start: events.published == start + 10)
                nursery.cancel_scope.cancel()
        sizes = [
            sum(len(e.block_hashes) for e in decode_batch(frames[1]).events if isinstance(e, BlockStored))
            for frames in past.since(1)
        ]
        assert sum(sizes) == 30
        assert max(sizes) == 4


def test_without_the_extra_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tiers.events.event_sockets", "tiers.events.store_events", "kvfs.events.sockets"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with (
        open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, max_slots=64, backing="directory")) as store,
        pytest.raises(ConfigError, match=r"needs zmq: pip install 'kvfs\[events\]'"),
        open_events(EventSettings(engines="tcp://127.0.0.1:*"), store),
    ):
        pass


async def test_nothing_is_open_without_settings(tmp_path: Path) -> None:
    with (
        open_store(StoreOptions(tmp_path, dram_bytes=16 * MIB, max_slots=64, backing="directory")) as store,
        open_events(EventSettings(), store) as door,
    ):
        assert door.status() == {}
        await door.run()
        assert store.block_listeners == []


@pytest.mark.mount
async def test_the_service_publishes_and_follows(tmp_path: Path) -> None:
    from tests.support.door import need_mount

    need_mount()
    index = EngineIndex()
    config = tmp_path / "kvfs.toml"
    with Subscriber(index, "tcp://127.0.0.1:*") as subscriber:
        config.write_text(
            f'[events]\npublish = "{subscriber.endpoint}"\nreplay = "tcp://127.0.0.1:*"\n'
            'engines = "tcp://127.0.0.1:*"\n'
        )
        with Service(arguments=["--config", str(config)]) as service, service.client() as client:
            said = client.status()["events"]
            subscriber._replays["kvfs"] = said["published"]["replay"]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(subscriber.run)
                put = open_blocks(client, NAMESPACE).put
                numbers = itertools.count(1)
                with trio.fail_after(WAIT_S):
                    while not index.holders(
                        digest(1), CPU
                    ):  # ZeroMQ drops what is said before it is connected
                        await trio.to_thread.run_sync(put, [Block(digest(next(numbers)), b"bytes")])
                        await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            with Publisher(said["engines"]["endpoint"], topic=TOPIC) as engine:
                with trio.fail_after(WAIT_S):
                    while not client.status()["events"]["engines"]["engines"]:
                        engine.publish([store_event([1, 2])])
                        await trio.sleep(0.01)
