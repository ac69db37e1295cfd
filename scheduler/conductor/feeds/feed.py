"""What the streams of events say, into the Conductor's index.

Responsibility: events of kvfs's services, which carry keys, and of engines, which carry tokens; what a restart, a gap
or silence means for what is believed.

Invariants:
- A batch of a topic without an instance touches nothing but its count.
- A stream that lost batches is cleared before what comes after the gap. If a kvfs service publishes it, its manifest is
  wanted; an engine has none, so that it is asked for all that it can replay, or its blocks are known from then on.
- Of an engine whose layers have several caches a prefix counts as far as each kind of layers goes on: those of full
  attention have all of its blocks, sliding windows the last ones, recurrent layers the state behind it. So of a store,
  which says of such a model what the layers of each block are.

Concurrency: one thread; I/O is in `scheduler.conductor.feeds.listener`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvfs.events.event_streams import Engine, EventStreams, Missing
from kvfs.events.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvfs.keys import HASH_BYTES
from scheduler.conductor.feeds.engine_hashes import EngineHashes
from scheduler.conductor.feeds.store_windows import StoreWindows
from scheduler.conductor.registry import Registry
from scheduler.conductor.sources import Knowledge, ModelLayers, Place, Stream, StreamName, Window, window_of


class Feed:
    """Follow streams for a registry. Implement `Follower` and `Sink`, of sockets and of its own streams."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry, self._clock = registry, clock
        self.streams = EventStreams(self)
        self._hashes: dict[StreamName, EngineHashes] = {}
        self._windows: dict[StreamName, StoreWindows] = {}
        """Of stores."""
        self.wanted: set[Engine] = set()
        """Streams of which batches were lost: a manifest is wanted, or all that an engine can replay."""
        self.on_wanted: Callable[[], None] = lambda: None

    # --- messages -----------------------------------------------------------------------------------------
    def receive(self, frames: list[bytes]) -> Missing | None:
        """Take a message; return the gap before it, None without one."""
        topic = frames[0].decode(errors="replace") if frames else ""
        if not self._registry.has_topic(topic):
            return None
        return self.streams.receive(frames)

    def replayed(self, engine: Engine, frames: list[bytes]) -> None:
        self.streams.replayed(engine, frames)

    def replay_ended(self, engine: Engine) -> None:
        self.streams.replay_ended(engine)

    def joined(self, name: StreamName) -> None:
        """Note that a stream has instances that it had not: what it said of their model's blocks is wanted again."""
        stream = self._registry.stream(name)
        if stream is not None and stream.has_others:
            stream.has_others = False
            self.wanted.add(Engine(*name))
        self.regroup(name)

    def regroup(self, name: StreamName) -> None:
        """Have a store say again what it has, if its instances say other groups than those by which it was heard."""
        stream = self._registry.stream(name)
        if stream is not None and stream.regrouped:
            windows = self._windows_of(stream)
            for model in stream.regrouped:
                windows.forget(model)
            stream.regrouped.clear()
            self.wanted.add(Engine(*name))
            self.on_wanted()

    def drop(self, name: StreamName) -> None:
        """Follow a stream no more."""
        engine = Engine(*name)
        self.streams.drop(engine)
        self._hashes.pop(name, None)
        self._windows.pop(name, None)
        self.wanted.discard(engine)

    def silent(self, engine: Engine) -> None:
        """Note that a publisher does not answer: what it said is believed no more, and asked for anew."""
        stream = self._registry.stream(StreamName(engine.topic, engine.rank))
        if stream is not None:
            self._clear(stream, Knowledge.UNKNOWN)
            self._registry.forget_layers(stream)
        self.streams.drop(engine)

    def mute(self, engine: Engine) -> None:
        """Note that a publisher said nothing of what its engine has made: its blocks do not count until it speaks."""
        stream = self._registry.stream(StreamName(engine.topic, engine.rank))
        if stream is not None:
            self._registry.counts["mute_streams"] += 1
            # The keys of its hashes stand: its batches may go on where they ended.
            self._registry.cleared(stream, Knowledge.MUTE)

    def caught_up(self, engine: Engine) -> None:
        """Note that a publisher has answered with all that it has published, if only with nothing."""
        stream = self._registry.stream(StreamName(engine.topic, engine.rank))
        if stream is not None:
            stream.heard_s = self._clock()
            if stream.knowledge is Knowledge.UNKNOWN:
                stream.knowledge = Knowledge.CURRENT

    def manifest_came(self, engine: Engine, epoch: int) -> None:
        """Note that a service has published all its blocks again, unless more was lost meanwhile."""
        stream = self._registry.stream(StreamName(engine.topic, engine.rank))
        if stream is not None and stream.epoch == epoch:
            stream.knowledge = Knowledge.CURRENT

    # --- events -------------------------------------------------------------------------------------------
    def restarted(self, engine: Engine) -> None:
        stream = self._registry.stream(StreamName(engine.topic, engine.rank))
        if stream is not None:
            self._clear(stream, Knowledge.CURRENT)
            self._registry.forget_layers(stream)
            stream.began_s = self._clock()

    def lost(self, engine: Engine, batches: int) -> None:
        stream = self._registry.stream(StreamName(engine.topic, engine.rank))
        if stream is None:
            return
        self._registry.counts["lost_batches"] += batches
        self._clear(stream, Knowledge.PARTIAL)
        self.wanted.add(engine)
        self.on_wanted()

    def apply(self, engine: Engine, event: KVEvent) -> None:
        stream = self._registry.stream(StreamName(engine.topic, engine.rank))
        if stream is None:
            return
        stream.heard_s = stream.event_s = self._clock()
        stream.events += 1
        stream.owed_s = float("inf")
        if stream.knowledge in (Knowledge.UNKNOWN, Knowledge.MUTE):
            stream.knowledge = Knowledge.CURRENT
        if isinstance(event, AllBlocksCleared):
            self._clear(stream, Knowledge.CURRENT)
        elif stream.is_store:
            self._of_store(stream, event)
        elif (place := self._place(stream, event)) is None:
            self._registry.counts["other_group_events"] += 1
        else:
            self._of_engine(stream, place, event)

    def _place(self, stream: Stream, event: BlockStored | BlockRemoved) -> Place | None:
        """Return where an engine's blocks are, as their group of layers has said what it is; None for layers that are
        not followed, and for all but the first group where an engine does not say what it has."""
        group = event.group_idx or 0
        if isinstance(event, BlockStored) and event.kv_cache_spec_kind is not None:
            [layers] = stream.layers.values()
            window = _window_of(
                event,
                layers.block_tokens,
                event.chunk_tokens or layers.chunk_tokens.get(group),
                is_beside=False,
            )
            # Of recurrent layers vLLM can keep the state at a prompt's end, too, as a shorter block of the same group.
            if window is None or stream.groups.get(group, window) != window:
                return None
            if not window.blocks and not layers.has_full:
                return None
            self._registry.layers_are(stream, group, window)
        known = stream.groups.get(group, None if group or stream.groups else Window())
        return None if known is None else Place(event.medium or GPU, known)

    def _of_store(self, stream: Stream, event: BlockStored | BlockRemoved) -> None:
        model = event.layers_of or b""
        if model and model in stream.unused:
            self._registry.drop_layers(stream, model)
            self._windows_of(stream).empty(model)
        layers = stream.layers.get(model)
        if model and layers is None:
            stream.has_others = True
            return
        keys = _keys(event.block_hashes)
        self._registry.counts["store_blocks_malformed"] += len(event.block_hashes) - len(keys)
        place = Place(event.medium or GPU, model=model)
        if isinstance(event, BlockStored):
            parent = next(iter(_keys([event.parent_block_hash])), None)
            if not event.group_idx and (layers is None or layers.has_full):
                self._registry.stored(stream, place, b"".join(keys), parent)
            else:
                self._window_stored(stream, event, keys, parent, layers)
        elif event.group_idx:
            for change in self._windows_of(stream).removed(event, keys):
                self._registry.removed(stream, change.place, b"".join(change.gone))
        else:
            self._registry.removed(stream, place, b"".join(keys))

    def _window_stored(
        self,
        stream: Stream,
        event: BlockStored,
        keys: list[bytes],
        parent: bytes | None,
        layers: ModelLayers | None,
    ) -> None:
        """Count a store's blocks of windows or states beside those by whose keys prompts are looked up."""
        number = event.group_idx or 0
        window = None
        if layers is not None:
            window = _window_of(event, layers.block_tokens, event.chunk_tokens, is_beside=number > 0)
        if layers is None or window is None or not _counts(layers, number, window, parent):
            self._registry.counts["other_group_events"] += 1
            return
        anchors = keys if number == layers.keyed_group else [] if parent is None else [parent, *keys]
        there = self._windows_of(stream).stored(window, event, keys, anchors, layers)
        self._registry.removed(stream, there.place, b"".join(there.gone))
        # Also without keys: that such layers are there is what full attention is limited by.
        self._registry.stored(stream, there.place, b"".join(there.keys), None)

    def _windows_of(self, stream: Stream) -> StoreWindows:
        found = self._windows.get(stream.name)
        if found is None:
            found = self._windows[stream.name] = StoreWindows(self._registry.counts)
        stream.window_blocks = found
        return found

    def _of_engine(self, stream: Stream, place: Place, event: BlockStored | BlockRemoved) -> None:
        hashes = self._hashes_of(stream)
        if isinstance(event, BlockStored):
            keys, parent, gone = hashes.stored(place, event)
            if gone:
                self._registry.removed(stream, place, gone)
            if keys:
                self._registry.stored(stream, place, keys, parent)
        else:
            self._registry.removed(stream, place, hashes.removed(place, event))

    def _hashes_of(self, stream: Stream) -> EngineHashes:
        found = self._hashes.get(stream.name)
        if found is None:
            [(pool, _)] = self._registry.users_of(stream.name)
            counts = self._registry.counts
            found = EngineHashes(pool.namespace, pool.weights, counts, has_full=pool.has_full)
            self._hashes[stream.name] = found
        return found

    def key_of(self, name: StreamName, hash: int) -> bytes | None:
        """Return the key of a block that an engine announced under this hash, by its last 64 bits."""
        hashes = self._hashes.get(name)
        return None if hashes is None else hashes.key_of(hash)

    def _clear(self, stream: Stream, knowledge: Knowledge) -> None:
        hashes = self._hashes.get(stream.name)
        if hashes is not None:
            hashes.clear()
        if stream.name in self._windows:
            self._windows[stream.name].clear()
        self._registry.cleared(stream, knowledge)


def _counts(layers: ModelLayers, number: int, window: Window, parent: bytes | None) -> bool:
    """Return whether a store's blocks of a group limit prompts: they say beside what they lie, and are of those layers
    that instances say, if any says which there are."""
    has_anchor = parent is not None or not layers.has_full
    is_said = not layers.groups or layers.in_store.get(number) == window
    return window.blocks > 0 and has_anchor and is_said


def _keys(hashes: Iterable[bytes | int | None]) -> list[bytes]:
    """Return those that are keys of blocks."""
    return [each for each in hashes if isinstance(each, bytes) and len(each) == HASH_BYTES]


def _window_of(
    event: BlockStored, block_tokens: int, chunk_tokens: int | None, *, is_beside: bool
) -> Window | None:
    """Return what an event's layers read before a boundary, beside full attention with blocks of so many tokens."""
    said = event.kv_cache_spec_kind, event.block_size, event.kv_cache_spec_sliding_window, chunk_tokens
    return window_of(*said, block_tokens, is_beside=is_beside)
