"""The sockets of the Conductor's feeds: events, replays, manifests, and a look at instances' metrics.

Responsibility: move what comes to `Feed` and `Registry`, and ask where something is missing or silent.

Invariants: every wait ends: replays, manifests and looks at metrics have time limits, a manifest is tried a few times
and then done without. One question at a time goes to each publisher and each instance.

Concurrency: one trio thread. `run` is the only task that starts others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from kvfs.errors import ConfigError
from kvfs.events.event_streams import Engine
from kvfs.events.sockets import Subscriber
from kvfs.limits import MANIFEST_TRIES, MUTE_STREAM_S, PROBE_INTERVAL_S, SILENT_STREAM_S
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.feeds.probes import ProbeFailed, probe
from scheduler.conductor.registry import Registry, streams_of
from scheduler.conductor.sources import Knowledge, Stream, StreamName
from scheduler.conductor.values import Instance

log = logging.getLogger("kvfs.conductor")


class Listener:
    """See the module's header."""

    def __init__(
        self,
        registry: Registry,
        feed: Feed,
        subscriber: Subscriber,
        clock: Callable[[], float],
        authorities: Path | None = None,
    ) -> None:
        """`authorities`: a PEM file of who may sign instances' certificates; None: whom the system trusts."""
        self._authorities = authorities
        self._registry, self._feed, self._subscriber, self._clock = registry, feed, subscriber, clock
        self._asking: set[Engine] = set()
        self._probing: set[str] = set()
        self._asked_s: dict[Engine, float] = {}
        self._tries: Counter[Engine] = Counter()
        """How often in a row an engine's replays did not bring all."""
        self._replays: dict[str, str] = {}
        self._followed: set[StreamName] = set()
        self._changed = trio.Event()
        feed.on_wanted = self.wake

    def wake(self) -> None:
        """Look at once at what is wanted: instances have changed, or a manifest is missing."""
        self._changed.set()

    def follow(self, instance: Instance) -> None:
        """Ask an instance's publishers for what they published before now."""
        for topic, endpoint in (
            (instance.engine_topic, instance.engine_replay),
            (instance.store_topic, instance.store_replay),
        ):
            if topic and endpoint:
                self._replays[topic] = endpoint
                self._subscriber.replay_at(topic, endpoint)
        try:
            if instance.engine_endpoint:
                self._subscriber.connect(instance.engine_topic, instance.engine_endpoint)
            elif instance.engine_topic:
                self._subscriber.listen_for(instance.engine_rank)
        except ConfigError as error:
            log.warning("instance %s: %s", instance.name, error)
        for stream in streams_of(instance):
            self._followed.add(stream.name)
            self._feed.joined(stream.name)
        self.wake()

    def key_of(self, name: StreamName, hash: int) -> bytes | None:
        """Return the key of a block that an engine announced under a hash, by its last 64 bits."""
        return self._feed.key_of(name, hash)

    def sync(self) -> None:
        """Follow no stream that is of no instance now."""
        left = {stream.name for stream in self._registry.streams()}
        for name in left:
            self._feed.regroup(name)
        for name in self._followed - left:
            self._feed.drop(name)
            self._asked_s.pop(Engine(*name), None)
            self._tries.pop(Engine(*name), None)
            if name.topic not in {each.topic for each in left}:
                self._replays.pop(name.topic, None)
                self._subscriber.replay_at(name.topic, "")
                self._subscriber.disconnect(name.topic)
        self._followed &= left

    async def run(self) -> None:
        """Listen, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._subscriber.run)
            nursery.start_soon(self._probe_all, nursery)
            while True:
                self._changed = trio.Event()
                self._ask_where_needed(nursery)
                with trio.move_on_after(PROBE_INTERVAL_S):
                    await self._changed.wait()

    async def _probe_all(self, nursery: trio.Nursery) -> None:
        while True:
            for key, instances in _by_server(self._registry.instances()).items():
                if key not in self._probing:
                    self._probing.add(key)
                    nursery.start_soon(self._probe, key, instances)
            await trio.sleep(PROBE_INTERVAL_S)

    def _ask_where_needed(self, nursery: trio.Nursery) -> None:
        now_s = self._clock()
        for stream in self._registry.streams():
            engine = Engine(*stream.name)
            if engine.topic not in self._replays:
                self._doubt_mute(stream, now_s)
                continue
            if engine in self._asking:
                continue
            asked_s = self._asked_s.get(engine, float("-inf"))
            is_wanted = engine in self._feed.wanted and self._tries[engine] < MANIFEST_TRIES
            if is_wanted and stream.is_store:
                self._feed.wanted.discard(engine)
                self._asking.add(engine)
                nursery.start_soon(self._fetch_manifest, engine)
            elif now_s - (asked_s if is_wanted else max(stream.heard_s, asked_s)) >= SILENT_STREAM_S:
                self._asking.add(engine)
                self._asked_s[engine] = now_s
                nursery.start_soon(self._start_over if is_wanted else self._catch_up, engine)

    def _doubt_mute(self, stream: Stream, now_s: float) -> None:
        """Believe a publisher that cannot be asked no more, once it has owed an event for too long."""
        if stream.knowledge is Knowledge.MUTE or now_s - stream.owed_s < MUTE_STREAM_S:
            return
        log.warning(
            "publisher %s has said nothing for %d s of blocks that its engine made: its blocks do not count",
            stream.name,
            MUTE_STREAM_S,
        )
        self._feed.mute(Engine(*stream.name))

    async def _catch_up(self, engine: Engine) -> bool:
        """Ask for the batches after the last one, and return whether they came; who does not answer is not believed any
        more."""
        try:
            missing = self._feed.streams.catch_up(engine)
            if missing is None:
                return False
            answered = await self._subscriber.fetch(missing)
            if answered:
                self._feed.caught_up(engine)
            else:
                name = StreamName(engine.topic, engine.rank)
                log.warning("publisher %s does not answer: its blocks do not count", name)
                self._feed.silent(engine)
            return answered
        finally:
            self._asking.discard(engine)
            self.wake()

    async def _start_over(self, engine: Engine) -> None:
        """Ask an engine for all that it can replay; after some attempts go on with what comes."""
        self._feed.wanted.discard(engine)
        self._feed.silent(engine)
        if await self._catch_up(engine):
            is_whole = engine not in self._feed.wanted and self._feed.streams.next_of(engine)
            self._tries[engine] = 0 if is_whole else self._tries[engine] + 1

    async def _fetch_manifest(self, engine: Engine) -> None:
        """Have a service publish its blocks again; after some attempts go on with what comes."""
        name = StreamName(engine.topic, engine.rank)
        try:
            for attempt in range(MANIFEST_TRIES):
                stream = self._registry.stream(name)
                if stream is None:
                    return
                epoch = stream.epoch
                if await self._subscriber.fetch_manifest(engine):
                    self._feed.manifest_came(engine, epoch)
                    return
                await trio.sleep(2**attempt)
            log.warning(
                "publisher %s sends no manifest: only blocks that it stores from now on are known", name
            )
        finally:
            self._asking.discard(engine)

    async def _probe(self, key: str, instances: list[Instance]) -> None:
        """Look once at the metrics of an instance, or of the ranks behind one address; if it is there others ask."""
        first = instances[0]
        try:
            ranks = [each.data_parallel_rank for each in instances]
            found = await probe(first.url, ranks, self._authorities)
            for instance, metrics in zip(instances, found, strict=True):
                self._registry.observed(instance.name, metrics)
        except ProbeFailed as error:
            log.debug("instance %s: no metrics: %s", first.name, error)
        finally:
            self._probing.discard(key)


def _by_server(instances: Iterable[Instance]) -> dict[str, list[Instance]]:
    """Group the instances that requests are sent to by who is asked for their metrics."""
    found: dict[str, list[Instance]] = {}
    for each in instances:
        if each.routable:
            found.setdefault(each.server, []).append(each)
    return found
