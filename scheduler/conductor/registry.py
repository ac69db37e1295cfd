"""Instances and the streams that speak of them.

Responsibility: registration in pools by model; which topic belongs to whom; changes of blocks from the streams to the
index; what instances say of themselves.

Invariants:
- Nothing is believed for longer than it is known: a stream with a gap is cleared, an instance that fails requests is
  passed over, one that started anew has nothing.
- A topic that no instance is registered for is counted and named in the status.

Concurrency: one thread. Time is that of the clock it is given.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable

from kvfs._native.cluster.index import ClusterIndex
from kvfs.errors import Exists, InvalidRequest, LimitExceeded, NotFound
from kvfs.keys import HASH_BYTES
from kvfs.limits import (
    FOREIGN_TOKENS,
    MAX_BLOCK_TOKENS,
    MAX_CONDUCTOR_INSTANCES,
    MAX_ENGINE_GROUPS,
    MAX_ENGINE_STREAMS,
    MAX_NAME_BYTES,
    MAX_UNREGISTERED_TOPICS,
    MAX_URL_BYTES,
    MAX_WINDOW_TOKENS,
    UNREACHABLE_S,
)
from kvfs.namespace_groups import group_in
from kvfs.namespaces import Namespace
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.pool import Member, Options, Pool
from scheduler.conductor.sources import Knowledge, Place, Sources, Stream, StreamName, Window
from scheduler.conductor.values import EngineMetrics, Instance, first_full, unless_awaited

log = logging.getLogger("kvfs.conductor")

_ENDPOINT = re.compile(r"tcp://([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


class Registry:
    """See the module's header."""

    def __init__(
        self, index: ClusterIndex, options: Options, clock: Callable[[], float], counts: Counter[str]
    ) -> None:
        self.counts = counts
        self.awaited: set[str] = set()
        """URLs of engines that are asked what they are and have never said it."""
        self.unregistered: Counter[str] = Counter()
        """Batches of topics without an instance."""
        self._index, self._options, self._clock = index, options, clock
        self._sources = Sources(index)
        self._pools: dict[str, Pool] = {}
        self._members: dict[str, tuple[Pool, Member]] = {}
        self._streams: dict[StreamName, Stream] = {}
        self._topics: set[str] = set()

    # --- instances ----------------------------------------------------------------------------------------
    def add(self, instance: Instance) -> None:
        """Register an instance; the same registration again changes nothing.

        Raises InvalidRequest for one that does not share its pool's blocks, Exists, LimitExceeded.
        """
        known = self._members.get(instance.name)
        if known is not None:
            if known[1].instance == instance:
                return
            raise Exists(f"instance {instance.name!r} is registered with other values: delete it first")
        others = [member.instance for _, member in self._members.values()]
        _check_instance(instance, others)
        _check_rank(instance, others)
        if len(self._members) >= MAX_CONDUCTOR_INSTANCES:
            raise LimitExceeded(f"{MAX_CONDUCTOR_INSTANCES} instances are registered, which is the limit")
        pool = self._pools.get(instance.model)
        if pool is None:
            pool = Pool(instance, self._options, self._index)
        pool.check(instance)
        expected = self._sources.take()
        streams = [self._streams.setdefault(each.name, each) for each in streams_of(instance)]
        self._topics |= {stream.name.topic for stream in streams}
        for stream in streams:
            stream.expecting.add(expected)
            self._expect_layers(stream, pool, instance)
            self.unregistered.pop(str(stream.name), None)
        self._pools[instance.model] = pool
        self._members[instance.name] = pool, pool.join(instance, expected, streams)

    def remove(self, name: str) -> None:
        """Remove an instance without reservations, and the streams that no other has. Raises NotFound."""
        pool, member = self.member(name)
        pool.part(member)
        del self._members[name]
        self._sources.release(member.expected)
        still = {stream.name for _, other in self._members.values() for stream in other.streams}
        for stream in member.streams:
            stream.expecting.discard(member.expected)
            if stream.name not in still:
                for source in stream.sources.values():
                    self._sources.release(source)
                del self._streams[stream.name]
            else:
                self._expect_layers(stream, pool)
                users = {each.cache_model for each, _ in self.users_of(stream.name)}
                stream.unused = stream.layers.keys() - users
        self._topics = {stream.topic for stream in self._streams}
        if not pool.members:
            del self._pools[pool.model]

    def _expect_layers(self, stream: Stream, pool: Pool, *new: Instance) -> None:
        """Have a stream's blocks of a pool's model be of the groups that its instances say.

        What counts stays until none of them says it; then it is what the last one says.
        """
        model, own, known = pool.cache_model, pool.layers_of(), stream.layers.get(pool.cache_model)
        users = [each.layers for at, each in self.users_of(stream.name) if at.cache_model == model]
        said = [each for each in (*users, *map(pool.layers_of, new)) if each.groups]
        is_outdated = model in stream.unused and known is not None and not known.are_keyed_as(own)
        stream.unused.discard(model)
        if known is None or is_outdated:
            is_heard = bool(said or is_outdated) and any(each.model == model for each in stream.windows)
        elif said and not any(known.are_said_by(each) for each in said):
            is_heard = True
        else:
            return
        self._sources.expect(stream, model, said[-1] if said else own)
        if is_heard:
            stream.regrouped.add(model)
            self._rebuild_users_of(stream)

    def drop_layers(self, stream: Stream, model: bytes) -> None:
        """Follow the blocks of a model no more of which no instance is left."""
        self._sources.drop(stream, model)
        stream.unused.discard(model)

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Give an instance no more requests, or some again; its blocks stay known. Raises NotFound."""
        pool, member = self.member(name)
        member.draining = draining
        pool.refresh(self._clock())

    def set_role(self, name: str, role: Role) -> None:
        """Change the label of an instance; its requests go on and its cache is kept. Raises NotFound."""
        pool, member = self.member(name)
        member.role, member.relabels_to = role, None
        pool.refresh(self._clock())
        pool.rebuild()

    def instances(self) -> list[Instance]:
        """Return all instances."""
        return [member.instance for _, member in self._members.values()]

    def members(self) -> list[tuple[Pool, Member]]:
        """Return all instances with their pools."""
        return list(self._members.values())

    def pools(self) -> list[Pool]:
        """Return all pools."""
        return list(self._pools.values())

    def streams(self) -> list[Stream]:
        """Return all streams of events."""
        return list(self._streams.values())

    def pool(self, model: str) -> Pool:
        """Return the pool of a model. Raises NotFound, NotReady."""
        try:
            return self._pools[model]
        except KeyError:
            missing = NotFound(f"model {model[:MAX_NAME_BYTES]!r}: no instance of it is registered")
            raise unless_awaited(missing, self.awaited) from None

    def member(self, name: str) -> tuple[Pool, Member]:
        """Return an instance and its pool. Raises NotFound."""
        try:
            return self._members[name]
        except KeyError:
            raise NotFound(f"instance {name[:MAX_NAME_BYTES]!r} is not registered") from None

    # --- what instances say of themselves, and clients of them ----------------------------------------------
    def unreachable(self, instance: str) -> None:
        """Choose an instance that failed no more until it answers again, for UNREACHABLE_S at most, nor the other ranks
        behind its address."""
        known = self._members.get(instance)
        if known is not None:
            now_s = self._clock()
            for pool, member in self._behind_address_of(*known):
                member.unreachable_until_s = now_s + UNREACHABLE_S
                pool.refresh(now_s)
            self.counts["unreachable"] += 1

    def _behind_address_of(self, pool: Pool, member: Member) -> list[tuple[Pool, Member]]:
        """Return an instance and the other data-parallel ranks behind its address."""
        ranks = (each for each in self._members.values() if _are_ranks(each[1].instance, member.instance))
        return [(pool, member), *(each for each in ranks if each[1] is not member)]

    def set_down(self, pool: Pool, member: Member, reason: str) -> None:
        """Give an instance no more requests, or some again where `reason` is empty: it does not answer, or it does."""
        name = member.instance.name
        if pool.members.get(name) is not member:  # removed meanwhile: its slot may be another one's
            return
        if not member.down:
            log.warning("instance %s is out: %s", name, reason)
            self.counts["unreachable"] += 1
        elif not reason:
            log.warning("instance %s answers again", name)
        member.down = reason
        pool.planner.take_work(member.slot, takes=member.takes_work(self._clock()))

    def heard(self, instances: Iterable[str]) -> None:
        """Note that a proxy has received bytes of answers of these instances; others are passed over."""
        for name in instances:
            known = self._members.get(name)
            if known is not None:
                known[1].was_heard = True

    def observed(self, instance: str, metrics: EngineMetrics) -> None:
        """Note what an instance says of itself: it answers, and where it started anew its cache is empty."""
        known = self._members.get(instance)
        if known is None:
            return
        pool, member = known
        now_s = self._clock()
        if member.unreachable_until_s > float("-inf"):
            member.unreachable_until_s = float("-inf")
            pool.refresh(now_s)
        before, member.seen = member.seen, metrics
        restarted = (
            None not in (before.started_s, metrics.started_s) and before.started_s != metrics.started_s
        )
        for stream in member.streams[: bool(member.instance.engine_topic)]:
            # Events of the new process may have come first.
            if (restarted and stream.began_s < member.probed_s) or (
                metrics.is_asleep and not before.is_asleep
            ):
                self.cleared(stream, Knowledge.CURRENT)
                self.counts["restarts_seen"] += 1
        member.probed_s = now_s
        self._count_foreign(pool, member, metrics)

    def _count_foreign(self, pool: Pool, member: Member, metrics: EngineMetrics) -> None:
        """Count requests that others sent, such as those from before a restart, as load of the batch."""
        if metrics.requests is None:
            return
        foreign = max(metrics.requests - member.requests, 0)
        added = foreign - member.foreign
        pool.planner.add_active(member.slot, added, added * FOREIGN_TOKENS)
        member.foreign = foreign

    def judged(self, pool: Pool, member: Member) -> None:
        """Let a changed judgement of trust count."""
        name = member.instance.name
        if member.trust.distrusted:
            log.warning("instance %s had less cached than its events said: its blocks do not count", name)
        else:
            log.info("instance %s has what its events say again", name)
        pool.rebuild()

    # --- changes of blocks --------------------------------------------------------------------------------
    def stream(self, name: StreamName) -> Stream | None:
        """Return a registered stream; count another one."""
        found = self._streams.get(name)
        if found is None:
            self._count_unregistered(str(name))
        return found

    def _count_unregistered(self, topic: str) -> None:
        self.counts["unregistered_batches"] += 1
        topic = topic[:MAX_NAME_BYTES]
        known = topic in self.unregistered
        if not known and len(self.unregistered) >= MAX_UNREGISTERED_TOPICS:
            return
        self.unregistered[topic] += 1
        if not known:
            log.warning("KV events of topic %r come, but no instance is registered for it", topic)

    def has_topic(self, topic: str) -> bool:
        """Return whether an instance is registered for a topic; count a batch of another one."""
        if topic in self._topics:
            return True
        self._count_unregistered(topic)
        return False

    def users_of(self, name: StreamName) -> list[tuple[Pool, Member]]:
        """Return the instances that a stream speaks of."""
        return [
            (pool, member)
            for pool, member in self._members.values()
            if any(stream.name == name for stream in member.streams)
        ]

    def stored(self, stream: Stream, place: Place, hashes: bytes, parent: bytes | None) -> None:
        """Note that a place of a stream holds these blocks; what is announced is expected no more."""
        source = stream.sources.get(place)
        if source is None:
            try:
                source = self._sources.assign(stream, place)
            except LimitExceeded:
                self.counts["over_limit"] += len(hashes) // HASH_BYTES
                return
            self._rebuild_users_of(stream)
        self.counts["over_limit"] += self._index.add(source, hashes, parent)
        for expected in stream.expecting:
            self._index.remove(expected, hashes)

    def layers_are(self, stream: Stream, group: int, window: Window) -> None:
        """Note what a group of an engine's layers reads before a boundary."""
        known = stream.groups.get(group)
        if known == window or (known is None and len(stream.groups) >= MAX_ENGINE_GROUPS):
            return
        stream.groups[group] = window
        self._sources.limit(stream)
        self._rebuild_users_of(stream)

    def forget_layers(self, stream: Stream) -> None:
        """Note that an engine may have started with other layers."""
        self._sources.forget_layers(stream)

    def removed(self, stream: Stream, place: Place, hashes: bytes) -> None:
        """Take blocks of one place out of the index, as their stream says."""
        source = stream.sources.get(place)
        if source is not None:
            self._index.remove(source, hashes)

    def cleared(self, stream: Stream, knowledge: Knowledge) -> None:
        """Note that a stream's caches are empty, or that nothing is known of them any more."""
        changed = self._sources.clear(stream, knowledge)
        for _, member in self.users_of(stream.name):
            changed = changed or member.trust.distrusted
            member.trust.reset()
        if changed:
            self._rebuild_users_of(stream)

    def _rebuild_users_of(self, stream: Stream) -> None:
        for pool in {id(pool): pool for pool, _ in self.users_of(stream.name)}.values():
            pool.rebuild()

    def sweep(self) -> None:
        """Do a part of what clearing left to be done. To be called often."""
        self._sources.sweep(self._clock)


def streams_of(instance: Instance) -> list[Stream]:
    """Make the streams that speak of an instance: its engine's and its store's."""
    streams = []
    if instance.engine_topic:
        streams.append(Stream(StreamName(instance.engine_topic, instance.engine_rank)))
    if instance.store_topic:
        streams.append(Stream(StreamName(instance.store_topic, 0), is_store=True))
    return streams


def _are_ranks(one: Instance, other: Instance) -> bool:
    """Return whether instances are data-parallel ranks behind one address."""
    return one.url == other.url and None not in (one.data_parallel_rank, other.data_parallel_rank)


def _check_rank(instance: Instance, others: Iterable[Instance]) -> None:
    """Check that the ranks behind one address differ in their number, and are of one model: its pool checks the rest.

    Raises InvalidRequest naming the difference, LimitExceeded.
    """
    rank = instance.data_parallel_rank
    if rank is not None and not 0 <= rank < MAX_ENGINE_STREAMS:
        raise LimitExceeded(
            f"instance {instance.name!r}: data_parallel_rank is {rank}: must be from 0 to {MAX_ENGINE_STREAMS - 1}"
        )
    for other in others:
        if not _are_ranks(instance, other):
            continue
        if rank == other.data_parallel_rank:
            raise InvalidRequest(
                f"instance {instance.name!r}: {other.name!r} is rank {rank} of {other.url} already"
            )
        if instance.model != other.model:
            raise InvalidRequest(
                f"instance {instance.name!r}: model is {instance.model!r}, but {other.model!r} in rank "
                f"{other.data_parallel_rank} behind the same address"
            )


def _check_instance(instance: Instance, others: Iterable[Instance]) -> None:
    for name in ("name", "model", "engine_topic", "store_topic", "weights", "store_peer"):
        value = getattr(instance, name)
        if len(value.encode()) > MAX_NAME_BYTES or not value.isprintable():
            raise InvalidRequest(
                f"instance: {name} {value[:40]!r} must be printable, of {MAX_NAME_BYTES} bytes at most"
            )
    if not instance.name or not instance.model:
        raise InvalidRequest("instance: name and model cannot be empty")
    is_url = instance.url.startswith(("http://", "https://")) or not instance.routable
    if len(instance.url) > MAX_URL_BYTES or not is_url:
        raise InvalidRequest(
            f"instance {instance.name!r}: url must be http:// or https://, of {MAX_URL_BYTES} bytes at most"
        )
    if instance.engine_endpoint and not _ENDPOINT.fullmatch(instance.engine_endpoint[:MAX_URL_BYTES]):
        raise InvalidRequest(
            f"instance {instance.name!r}: engine_endpoint {instance.engine_endpoint[:100]!r} is not tcp://HOST:PORT"
        )
    if instance.engine_endpoint and (not instance.engine_topic or instance.engine_rank):
        raise InvalidRequest(
            f"instance {instance.name!r}: engine_endpoint wants an engine_topic of its own, and engine_rank 0"
        )
    for name in ("engine_endpoint", "engine_replay", "store_replay"):
        if len(getattr(instance, name)) > MAX_URL_BYTES:
            raise LimitExceeded(f"instance {instance.name!r}: {name}: the limit is {MAX_URL_BYTES} bytes")
    if not 0 <= instance.engine_rank < MAX_ENGINE_STREAMS:
        raise LimitExceeded(
            f"instance {instance.name!r}: engine_rank is {instance.engine_rank}: must be from 0 to "
            f"{MAX_ENGINE_STREAMS - 1}"
        )
    _check_groups(instance)
    own = {stream.name: stream.is_store for stream in streams_of(instance)}
    if len(own) < bool(instance.engine_topic) + bool(instance.store_topic):
        raise InvalidRequest(f"instance {instance.name!r}: engine_topic and store_topic are the same")
    for other in others:
        for stream in streams_of(other):
            if stream.name in own and not (stream.is_store and own[stream.name]):
                raise InvalidRequest(
                    f"instance {instance.name!r}: the stream {str(stream.name)!r} is that of {other.name!r}; each "
                    "engine needs a topic of its own"
                )


def _check_groups(instance: Instance) -> None:
    """Raises InvalidRequest naming the first group that cannot be, LimitExceeded."""
    if len(instance.groups) > MAX_ENGINE_GROUPS:
        raise LimitExceeded(
            f"instance {instance.name!r}: {len(instance.groups)} groups: the limit is {MAX_ENGINE_GROUPS}"
        )
    keyed = group_in(Namespace.from_mapping(instance.namespace))
    full = first_full(instance.groups)
    if full is not None and keyed is not None and not keyed.is_full:
        raise InvalidRequest(
            f"instance {instance.name!r}: groups: {full.group} is of {full.kind}, but the namespace is of "
            f"{keyed.kind}: it must be that of full attention"
        )
    if keyed is not None and keyed.is_further:
        raise InvalidRequest(
            f"instance {instance.name!r}: namespace: it is of a further group of full attention: it must be that of "
            "the first"
        )
    numbers = Counter(each.group for each in instance.groups)
    for each in instance.groups:
        where = f"instance {instance.name!r}: groups: {each.group}"
        if not 0 <= each.group < MAX_ENGINE_GROUPS or numbers[each.group] > 1:
            raise InvalidRequest(f"{where}: must be a number below {MAX_ENGINE_GROUPS} that no other has")
        for name, limit in (
            ("block_tokens", MAX_BLOCK_TOKENS),
            ("window_tokens", MAX_WINDOW_TOKENS),
            ("chunk_tokens", MAX_WINDOW_TOKENS),
        ):
            tokens = getattr(each, name)
            if tokens is not None and not 1 <= tokens <= limit:
                raise InvalidRequest(f"{where}: {name} is {tokens}: must be from 1 to {limit}")
        for name in ("kind", "layers"):
            if len(getattr(each, name).encode()) > MAX_NAME_BYTES:
                raise LimitExceeded(f"{where}: {name}: the limit is {MAX_NAME_BYTES} bytes")
