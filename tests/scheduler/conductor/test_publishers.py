"""Publishers that a Conductor learns from over real sockets: it starts later, misses batches, sees a restart."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import trio

from kvfs.events.kv_events import CPU, AllBlocksCleared, BlockStored, Replay, first_sequence
from kvfs.events.sockets import Publisher
from kvfs.keys import prefix_hashes, split_keys
from scheduler.conductor.values import RouteRequest
from tests.support.conductors import NAMESPACE, instance, serving
from tests.support.waits import until


def event(prompt: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=[*split_keys(prefix_hashes(NAMESPACE, prompt))],
        parent_block_hash=None,
        token_ids=[],
        block_size=16,
        lora_id=None,
        medium=CPU,
        lora_name=None,
    )


class Store:
    """A publisher that speaks as a kvfs service does, and answers for manifests."""

    def __init__(self, endpoint: str, topic: str = "node", *, replay: Replay | None = None) -> None:
        self.blocks: list[list[int]] = []
        self.publisher = Publisher(endpoint, topic=topic, replay_endpoint="tcp://127.0.0.1:*", replay=replay)
        self.publisher.on_manifest = self.publish_all
        self.publisher.publish([AllBlocksCleared()])

    def store(self, prompt: list[int]) -> None:
        self.blocks.append(prompt)
        self.publisher.publish([event(prompt)])

    def publish_all(self) -> None:
        for prompt in self.blocks:
            self.publisher.publish([event(prompt)])
        self.publisher.manifest_published()


def prompts(count: int) -> list[list[int]]:
    return [[n * 1000 + k for k in range(16)] for n in range(1, count + 1)]


async def test_a_conductor_that_starts_later_learns_all_by_replay_and_its_successor_too() -> None:
    """Killed and started anew: nothing is kept on disk, all comes from the publishers."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        store: Store | None = None
        endpoint = "tcp://127.0.0.1:*"
        for attempt in range(2):
            async with serving(events=endpoint) as (service, addresses):
                endpoint = addresses.events
                if store is None:
                    store = Store(endpoint)
                    stack.enter_context(store.publisher)
                    nursery.start_soon(store.publisher.serve_replays)
                    for prompt in prompts(5):
                        store.store(prompt)
                service.add(
                    instance("a", store_topic="node", store_replay=store.publisher.replay_endpoint or "")
                )

                def held(number: int, service: Any = service) -> int:
                    found = service.conductor.match(RouteRequest(model="m", tokens=prompts(number)[-1]))
                    return int(found["a"])

                await until(lambda: held(5) == 16)
                assert [held(n) for n in range(1, 6)] == [16] * 5
                [shown] = [s for s in service.conductor.status()["streams"] if s["stream"] == "node"]
                assert shown["knowledge"] == "current"
                assert service.conductor.counts["lost_batches"] == 0, attempt
        nursery.cancel_scope.cancel()


async def test_what_no_replay_brings_comes_by_a_manifest() -> None:
    async with serving() as (service, addresses):
        store = Store(addresses.events, replay=Replay(max_batches=2))
        with store.publisher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.publisher.serve_replays)
                for prompt in prompts(9):
                    store.store(prompt)
                service.add(
                    instance("a", store_topic="node", store_replay=store.publisher.replay_endpoint or "")
                )

                def held() -> list[int]:
                    match = service.conductor.match
                    return [match(RouteRequest(model="m", tokens=prompt))["a"] for prompt in prompts(9)]

                await until(lambda: held() == [16] * 9)
                await until(
                    lambda: (
                        "partial" not in [each["knowledge"] for each in service.conductor.status()["streams"]]
                    )
                )
                assert service.conductor.counts["lost_batches"] > 0
                nursery.cancel_scope.cancel()


async def test_a_publisher_that_restarts_without_replay_leaves_no_stale_block() -> None:
    async with serving() as (service, addresses), trio.open_nursery() as nursery:
        service.add(instance("a", store_topic="node"))

        def held(prompt: list[int]) -> bool:
            return service.conductor.match(RouteRequest(model="m", tokens=prompt))["a"] > 0

        old, new = prompts(2)
        for prompt in (old, new):
            first = first_sequence(time.time())  # else it may go on where the one before ended
            with Publisher(addresses.events, topic="node", sequence=first) as publisher:

                async def publish(publisher: Publisher = publisher, prompt: list[int] = prompt) -> None:
                    while True:
                        publisher.publish([event(prompt)])
                        await trio.sleep(0.01)

                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as publishing:
                        publishing.start_soon(publish)
                        await until(lambda prompt=prompt: held(prompt))
                        scope.cancel()
        assert not held(old)
        nursery.cancel_scope.cancel()
