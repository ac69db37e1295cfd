"""ZeroMQ sockets for KV events, on trio.

Responsibility: move frames. `Publisher` numbers batches, sends them and answers requests for replays and manifests;
`Subscriber` binds where engines connect, or connects to one that binds, feeds a `Follower`, and fetches both. As with
vLLM, a publisher binds an endpoint with `*` (or ipc, inproc) and connects to a concrete one.

Invariants: sending never waits (a PUB socket drops batches for a slow subscriber, which detects the gap); every replay
ends within REPLAY_WAIT_S. Concurrency: one trio thread. A ZeroMQ descriptor signals only that the socket's state
*changed*, so each is read until it would block before it is waited for.

Needs the extra `events` (pyzmq).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, Self

import msgspec
import trio
import zmq

from kvfs.errors import ConfigError, InvalidRequest
from kvfs.events.event_streams import Engine, Missing
from kvfs.events.kv_events import (
    END_OF_REPLAY,
    MANIFEST,
    Batch,
    KVEvent,
    Replay,
    encode_batch,
    sequence_frame,
    sequence_of,
)
from kvfs.limits import (
    MANIFEST_WAIT_S,
    MAX_EVENT_BATCHES,
    MAX_EVENT_BYTES,
    MAX_MANIFEST_REQUESTS,
    REPLAY_WAIT_S,
)

log = logging.getLogger("kvfs.events")

_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class _Sockets:
    """Open sockets of one context and close them together."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def _open(self, kind: int, endpoint: str, *, bind: bool) -> zmq.Socket[bytes]:
        """Open a socket. Raises ConfigError."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = "[" in endpoint
        socket.set_hwm(MAX_EVENT_BATCHES)
        socket.maxmsgsize = MAX_EVENT_BYTES
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"[events] endpoint {endpoint!r}: {error.strerror}") from None
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


async def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    while True:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            await trio.lowlevel.wait_readable(socket.fileno())


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    """Return the endpoint of a bound socket, with its port."""
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


class Publisher(_Sockets):
    """Send batches, and answer requests for recent ones.

    `sequence`: the number of the first; 0 as engines, `kv_events.first_sequence` to be known after a restart.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        topic: str = "",
        replay_endpoint: str | None = None,
        replay: Replay | None = None,
        sequence: int = 0,
    ) -> None:
        super().__init__()
        self._topic = topic.encode()
        self._past = Replay() if replay is None else replay
        self.sequence = sequence
        """The sequence number of the next batch."""
        self.on_manifest: Callable[[], None] | None = None
        """Called when somebody asks for all that is there; `manifest_published` answers."""
        self._wants_manifest: list[bytes] = []
        try:
            self._sender = self._open(zmq.PUB, endpoint, bind=_is_bound(endpoint))
            self._replayer = (
                None if replay_endpoint is None else self._open(zmq.ROUTER, replay_endpoint, bind=True)
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def topic(self) -> str:
        """Return the topic as text."""
        return self._topic.decode()

    @property
    def endpoint(self) -> str:
        """Return the address on which subscribers connect, its port resolved."""
        return endpoint_of(self._sender)

    @property
    def replay_endpoint(self) -> str | None:
        """Return the address that answers requests for replays; None where there is none."""
        return None if self._replayer is None else endpoint_of(self._replayer)

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Send one batch; never waits."""
        payload = encode_batch(Batch(time.time(), list(events), 0))
        self._past.add(self.sequence, payload)
        self._sender.send_multipart([self._topic, sequence_frame(self.sequence), payload], zmq.NOBLOCK)
        self.sequence += 1

    async def serve_replays(self) -> None:
        """Answer requests for replays, until cancelled."""
        if self._replayer is None:
            return
        while True:
            frames = await _receive(self._replayer)
            # ZeroMQ drops what a closed peer does not take; for one that does not read, the socket refuses: it gets
            # no more.
            with suppress(zmq.Again):
                self._answer(frames)

    def _answer(self, frames: list[bytes]) -> None:
        assert self._replayer is not None
        try:
            if len(frames) != 3 or frames[1]:
                raise InvalidRequest(f"KV events: replay request of {len(frames)} frames, not 3")
            if frames[2] == MANIFEST and self.on_manifest is not None:
                self._wants_manifest = [*self._wants_manifest[1 - MAX_MANIFEST_REQUESTS :], frames[0]]
                self.on_manifest()
                return
            first = sequence_of(frames[2])
        except InvalidRequest as error:
            log.warning("%s", error)
            return
        for sequence, payload in self._past.since(first):
            self._replayer.send_multipart([frames[0], b"", self._topic, sequence, payload], zmq.NOBLOCK)
        self._replayer.send_multipart([frames[0], b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)

    def manifest_published(self) -> None:
        """Answer who asked for a manifest: everything that is there has been published again."""
        assert self._replayer is not None
        asked, self._wants_manifest = self._wants_manifest, []
        for peer in asked:
            with suppress(zmq.Again):
                self._replayer.send_multipart([peer, b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)


class Follower(Protocol):
    """Take the messages of streams (`kvfs.events.event_streams`)."""

    def receive(self, frames: list[bytes]) -> Missing | None:
        """Take a message of a stream; return the gap before it, None without one."""

    def replayed(self, engine: Engine, frames: list[bytes]) -> None:
        """Take one message of a replay."""

    def replay_ended(self, engine: Engine) -> None:
        """End a replay, or go on without one."""


class Subscriber(_Sockets):
    """Feed a follower from the publishers that connect to `endpoint`."""

    def __init__(
        self, follower: Follower, endpoint: str, *, replays: Mapping[str, str] | None = None, topic: str = ""
    ) -> None:
        """Bind. `replays`: by topic, where an engine answers requests for replays. `topic`: the prefix of topics."""
        super().__init__()
        self._follower = follower
        self._topic = topic.encode()
        self._replays = dict(replays or {})
        self._ranks: dict[int, zmq.Socket[bytes]] = {}
        """By data-parallel rank."""
        self._connected: dict[str, tuple[str, zmq.Socket[bytes], trio.CancelScope]] = {}
        """By the topic that is given to what comes."""
        self._nursery: trio.Nursery | None = None
        try:
            self._socket = self._listen(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def endpoint(self) -> str:
        """Return the address on which publishers connect, its port resolved."""
        return endpoint_of(self._socket)

    def _listen(self, endpoint: str) -> zmq.Socket[bytes]:
        """Bind where publishers connect. Raises ConfigError."""
        socket = self._open(zmq.SUB, endpoint, bind=True)
        socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        return socket

    def listen_for(self, rank: int) -> None:
        """Bind also where publishers of a data-parallel rank connect: vLLM adds the rank to the port, and has ranks on
        TCP alone. Raises ConfigError."""
        if rank == 0 or rank in self._ranks or not self.endpoint.startswith("tcp://"):
            return
        self._ranks[rank] = socket = self._listen(_of_rank(self.endpoint, rank))
        if self._nursery is not None:
            self._nursery.start_soon(self._follow, self._nursery, socket, trio.CancelScope())

    async def run(self) -> None:
        """Receive, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            for socket in self._ranks.values():
                self._nursery.start_soon(self._follow, self._nursery, socket, trio.CancelScope())
            for topic, (_, socket, scope) in self._connected.items():
                self._nursery.start_soon(self._follow, self._nursery, socket, scope, topic)
            await self._follow(self._nursery, self._socket, trio.CancelScope())

    async def _follow(
        self, nursery: trio.Nursery, socket: zmq.Socket[bytes], scope: trio.CancelScope, topic: str = ""
    ) -> None:
        """Take the messages of one socket; with `topic`, as those of that one."""
        with scope, socket:
            while True:
                frames = await _receive(socket)
                missing = self._follower.receive(_named(topic, frames) if topic else frames)
                await trio.lowlevel.checkpoint()  # publishers may be faster than this loop for long
                if missing is not None:
                    nursery.start_soon(self.fetch, missing)

    def connect(self, topic: str, endpoint: str) -> None:
        """Take the messages of a publisher that binds `endpoint` as those of rank 0 of `topic`. Raises ConfigError."""
        if topic in self._connected and self._connected[topic][0] == endpoint:
            return
        self.disconnect(topic)
        socket, scope = self._open(zmq.SUB, endpoint, bind=False), trio.CancelScope()
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._connected[topic] = endpoint, socket, scope
        if self._nursery is not None:
            self._nursery.start_soon(self._follow, self._nursery, socket, scope, topic)

    def disconnect(self, topic: str) -> None:
        """Take no more messages as those of a topic."""
        if topic in self._connected:
            _, socket, scope = self._connected.pop(topic)
            scope.cancel()
            if self._nursery is None:
                socket.close()

    def replay_at(self, topic: str, endpoint: str) -> None:
        """Set where the publisher of a topic answers; nowhere with an empty endpoint."""
        if endpoint:
            self._replays[topic] = endpoint
        else:
            self._replays.pop(topic, None)

    async def fetch(self, missing: Missing) -> bool:
        """Ask for a replay and take it, or go on without one; return whether it came to its end."""
        endpoint, done = self._replays.get(missing.engine.topic), False
        try:
            if endpoint is not None:
                with trio.move_on_after(REPLAY_WAIT_S):
                    done = await self._ask(endpoint, missing.engine, sequence_frame(missing.sequence))
        finally:
            self._follower.replay_ended(missing.engine)
        return done

    async def fetch_manifest(self, engine: Engine) -> bool:
        """Have a kvfs service publish all its blocks again, in its stream; return whether it has."""
        endpoint, done = self._replays.get(engine.topic), False
        if endpoint is not None:
            with trio.move_on_after(MANIFEST_WAIT_S):
                done = await self._ask(endpoint, engine, MANIFEST)
        return done

    async def _ask(self, endpoint: str, engine: Engine, what: bytes) -> bool:
        """Ask where a publisher answers, and take what it replays; return whether that came to its end."""
        try:
            socket = self._open(zmq.DEALER, _of_rank(endpoint, engine.rank), bind=False)
        except ConfigError as error:
            log.warning("no replay of %s: %s", engine, error)
            return False
        try:
            socket.send_multipart([b"", what], zmq.NOBLOCK)
            while True:
                frames = await _receive(socket)
                if len(frames) > 2 and frames[2] == END_OF_REPLAY:
                    return True
                replayed = frames[1:]
                if engine.topic in self._connected:
                    replayed = _named(engine.topic, replayed)
                self._follower.replayed(engine, replayed)
                await trio.lowlevel.checkpoint()
        finally:
            socket.close()


def _named(topic: str, frames: list[bytes]) -> list[bytes]:
    """Return a message as one of rank 0 of a topic; a malformed one as it is."""
    try:
        _, sequence, payload = frames
        ts, events, *_ = _parts(payload)
    except (ValueError, msgspec.MsgspecError):
        return [topic.encode(), *frames[1:]]
    return [topic.encode(), sequence, msgspec.msgpack.encode((ts, events, 0))]


def _of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: those of vLLM have consecutive ports."""
    start, _, port = endpoint.rpartition(":")
    return f"{start}:{int(port) + rank}" if rank and port.isdigit() else endpoint
