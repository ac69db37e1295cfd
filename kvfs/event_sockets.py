"""ZeroMQ sockets for KV events, on trio.

Responsibility: move frames. `Publisher` numbers batches, sends them and answers requests for replays; `Subscriber`
binds where engines connect, feeds an `EngineIndex`, and fetches what it misses. As vLLM does, an endpoint with `*`
(or ipc, inproc) is bound and a concrete one connected to by whoever publishes; a subscriber binds.

Invariants: sending never waits (a PUB socket drops what a slow subscriber does not take, which that one's gap
detection finds); every replay ends within REPLAY_WAIT_S. Concurrency: one trio thread. A ZeroMQ descriptor says only
that the socket's state *changed*, so each is read until it would block before it is waited for.

Needs the extra `events` (pyzmq).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import trio
import zmq

from kvfs.engine_index import Engine, EngineIndex, Missing
from kvfs.errors import ConfigError, InvalidRequest
from kvfs.events import END_OF_REPLAY, Batch, KVEvent, Replay, encode_batch, sequence_frame, sequence_of
from kvfs.limits import EVENT_QUEUE_BATCHES, MAX_EVENT_BYTES, REPLAY_WAIT_S

log = logging.getLogger("kvfs.events")


class _Sockets:
    """Sockets of one context, closed together."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def _open(self, kind: int, endpoint: str, *, bind: bool) -> zmq.Socket[bytes]:
        """Raises ConfigError."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(EVENT_QUEUE_BATCHES)
        socket.maxmsgsize = MAX_EVENT_BYTES
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"[events] endpoint {endpoint!r}: {error.strerror}") from None
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """What a socket was bound to, its port chosen."""
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


class Publisher(_Sockets):
    """Sends batches, and those of the recent past again to whoever asks."""

    def __init__(
        self,
        endpoint: str,
        *,
        topic: str = "",
        replay_endpoint: str | None = None,
        replay: Replay | None = None,
    ) -> None:
        super().__init__()
        self._topic = topic.encode()
        self._past = Replay() if replay is None else replay
        self.sequence = 0
        """Of the next batch."""
        try:
            self._sender = self._open(zmq.PUB, endpoint, bind=_is_bound(endpoint))
            self._replayer = (
                None if replay_endpoint is None else self._open(zmq.ROUTER, replay_endpoint, bind=True)
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def endpoint(self) -> str:
        return endpoint_of(self._sender)

    @property
    def replay_endpoint(self) -> str | None:
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
            # What a peer that went away does not take is dropped by ZeroMQ; one that does not read makes the
            # socket refuse, and gets no more.
            with suppress(zmq.Again):
                self._answer(frames)

    def _answer(self, frames: list[bytes]) -> None:
        assert self._replayer is not None
        try:
            if len(frames) != 3 or frames[1]:
                raise InvalidRequest(f"KV events: replay request of {len(frames)} frames, not 3")
            first = sequence_of(frames[2])
        except InvalidRequest as error:
            log.warning("%s", error)
            return
        for sequence, payload in self._past.since(first):
            self._replayer.send_multipart([frames[0], b"", self._topic, sequence, payload], zmq.NOBLOCK)
        self._replayer.send_multipart([frames[0], b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)


class Subscriber(_Sockets):
    """Feeds an index from the engines that connect to `endpoint`."""

    def __init__(
        self, index: EngineIndex, endpoint: str, *, replays: Mapping[str, str] | None = None, topic: str = ""
    ) -> None:
        """`replays`: by topic, where an engine answers requests for replays. `topic`: only those that begin so."""
        super().__init__()
        self.index = index
        self._replays = dict(replays or {})
        try:
            self._socket = self._open(zmq.SUB, endpoint, bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())

    @property
    def endpoint(self) -> str:
        return endpoint_of(self._socket)

    async def run(self) -> None:
        """Receive, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                missing = self.index.receive(await _receive(self._socket))
                if missing is not None:
                    nursery.start_soon(self._fetch, missing)

    async def _fetch(self, missing: Missing) -> None:
        """Ask for a replay and take it in, or go on without."""
        endpoint = self._replays.get(missing.engine.topic)
        try:
            if endpoint is not None:
                with trio.move_on_after(REPLAY_WAIT_S):
                    await self._replay_from(endpoint, missing)
        finally:
            self.index.replay_ended(missing.engine)

    async def _replay_from(self, endpoint: str, missing: Missing) -> None:
        try:
            socket = self._open(zmq.DEALER, _of_rank(endpoint, missing.engine), bind=False)
        except ConfigError as error:
            log.warning("no replay of %s: %s", missing.engine, error)
            return
        try:
            socket.send_multipart([b"", sequence_frame(missing.sequence)], zmq.NOBLOCK)
            while True:
                frames = await _receive(socket)
                if len(frames) > 2 and frames[2] == END_OF_REPLAY:
                    return
                self.index.replayed(missing.engine, frames[1:])
        finally:
            socket.close()


def _of_rank(endpoint: str, engine: Engine) -> str:
    """vLLM's data-parallel ranks answer on consecutive ports."""
    start, _, port = endpoint.rpartition(":")
    return f"{start}:{int(port) + engine.rank}" if engine.rank and port.isdigit() else endpoint
