"""KV events on sockets: publishers, subscribers, and replays."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio

from kvfs.config.settings import EventSettings
from kvfs.errors import ConfigError
from kvfs.events.engine_index import EngineIndex
from kvfs.events.event_streams import Engine
from kvfs.events.sockets import Publisher, Subscriber
from tests.support.kv_events import ENGINE, TOPIC, known, store_event
from tests.support.waits import WAIT_S, until

pytest.importorskip("msgspec.msgpack")


async def test_a_subscriber_fetches_what_was_said_before_it_came() -> None:
    async with AsyncExitStack() as stack:
        index = EngineIndex()
        subscriber = stack.enter_context(Subscriber(index, "tcp://127.0.0.1:*"))
        publisher = stack.enter_context(
            Publisher(subscriber.endpoint, topic=TOPIC, replay_endpoint="tcp://127.0.0.1:*")
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        assert publisher.replay_endpoint is not None
        subscriber._replays[TOPIC] = publisher.replay_endpoint
        nursery.start_soon(publisher.serve_replays)
        # Nobody runs the subscriber yet: ZeroMQ drops these, as it does while a connection is not there.
        for block in range(5):
            publisher.publish([store_event([block])])
        nursery.start_soon(subscriber.run)

        async def keep_publishing() -> None:
            while True:
                publisher.publish([store_event([99])])
                await trio.sleep(0.01)

        nursery.start_soon(keep_publishing)
        await until(lambda: index.match(ENGINE, [0, 1, 2, 3, 4, 99]) == 6)
        assert index.counts["lost"] == 0
        nursery.cancel_scope.cancel()


async def test_a_subscriber_does_without_a_replay_that_nobody_gives() -> None:
    async with AsyncExitStack() as stack:
        index = EngineIndex()
        subscriber = stack.enter_context(
            Subscriber(index, "tcp://127.0.0.1:*", replays={TOPIC: "no endpoint"})
        )
        publisher = stack.enter_context(Publisher(subscriber.endpoint, topic=TOPIC))
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(subscriber.run)
        publisher.sequence = 7

        async def keep_publishing() -> None:
            while True:
                publisher.publish([store_event([publisher.sequence])])
                await trio.sleep(0.01)

        nursery.start_soon(keep_publishing)
        await until(lambda: len(known(index)) > 3)
        assert index.counts["lost"] >= 7
        nursery.cancel_scope.cancel()


async def test_a_publisher_without_manifests_ends_the_replay_of_one_that_is_asked_for() -> None:
    async with AsyncExitStack() as stack:
        subscriber = stack.enter_context(Subscriber(EngineIndex(), "tcp://127.0.0.1:*"))
        publisher = stack.enter_context(
            Publisher(subscriber.endpoint, topic=TOPIC, replay_endpoint="tcp://127.0.0.1:*")
        )
        subscriber.replay_at(TOPIC, str(publisher.replay_endpoint))
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(subscriber.run)
        nursery.start_soon(publisher.serve_replays)
        with trio.fail_after(WAIT_S):
            assert await subscriber.fetch_manifest(Engine(TOPIC, 0))
        nursery.cancel_scope.cancel()


def test_an_endpoint_that_cannot_be_had_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\[events\] endpoint 'tcp://\*:nonsense'"):
        Publisher("tcp://*:nonsense")


def test_a_replay_needs_something_to_replay() -> None:
    with pytest.raises(ValueError, match="nothing to replay"):
        EventSettings(replay="tcp://*:5558")
