"""The engines behind the proxy: which answer, what each is busy with, and requests to them.

Responsibility: send a request to an engine over its pool, watch over engines with requests, and end all requests of one
that does not answer.

Invariants:
- An engine with requests that was silent for limits.HEALTH_INTERVAL_S has limits.HEALTH_TIMEOUT_S to answer a probe or
  send anything else; else all requests under way there end with `EngineFailed`, within 2 s of its last byte. One that
  works on a long prompt answers probes and goes on.
- What comes of it while a probe is on its way counts as an answer to that: an engine that is busy is late at /health.
- An engine that failed one request is probed at once. While it is down it gets no requests, unless all are; those under
  way there go on while it sends anything, and it is probed until it answers.

Concurrency: one trio thread; a task for each engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import trio

from kvfs import limits
from kvfs.config.server_urls import check_server_url
from kvfs.errors import NotFound
from kvfs.http.server_place import Place, place_of
from kvfs.http.transports import Buffer
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.values import unless_awaited
from scheduler.proxy.upstream.connection import Dialer, EngineFailed, UpstreamConnection
from scheduler.proxy.upstream.connection_pool import Pool

log = logging.getLogger("kvfs.proxy")

RANK_HEADER: Final = b"x-data-parallel-rank"
"""Tells an engine of several data-parallel ranks which of them a request is for."""
_NO_ANSWER: Final = f"it did not answer a probe for {limits.HEALTH_TIMEOUT_S:g} s"


class EngineAddress(NamedTuple):
    """Where an engine is and what it is for."""

    url: str
    role: Role = "both"
    name: str = ""
    """What a router calls it; its URL where that is empty."""
    draining: bool = False
    """Whether it takes no more requests, as its Conductor says."""
    model: str = ""
    """The one that its Conductor has it for; empty: none has, and it serves what it lists."""
    rank: int | None = None
    """The data-parallel rank that it is, of several behind its URL; None: it is all there is."""

    @property
    def place(self) -> tuple[str, int | None]:
        """Return where requests go."""
        return self.url, self.rank


def is_engine_url(url: str) -> bool:
    """Return whether `url`, which a router names, is one that settings may name, but for a "/" at its end."""
    try:
        check_server_url(url.removesuffix("/"))
    except ValueError:
        return False
    return True


class Engine:
    """One engine. `down` says why it gets no requests; empty while it answers."""

    def __init__(self, address: EngineAddress, dialer: Dialer, answers: Callable[[Engine], bool]) -> None:
        """`answers`: whether any engine like it does; where none does, requests try this one though it is down."""
        self._answers = answers
        self.name = address.name or address.url
        self.become(address)
        self.down = ""
        self.requests = 0
        self.predicted_tokens = self.cached_tokens = 0
        """Of prompts: cached as its router said, and as it says itself."""
        self.pool = Pool(place_of(address.url), dialer)
        self._busy: set[UpstreamConnection] = set()
        self._heard_s = monotonic()
        self.was_heard = False
        """Whether anything came from it since that was asked."""
        self._suspected = trio.Event()
        self.removed = trio.CancelScope()
        self.models: frozenset[str] | None = None
        """What it lists; None: it has not said."""
        self.listed_s = float("-inf")
        """When it was last asked for that."""
        self.tokenize_fault = ""
        """Why it does not tokenize, as the log says."""
        self.tokenize_logged_s = -limits.LOG_INTERVAL_S
        self.bootstrap = ""
        """`HOST:PORT` of its bootstrap server, for Mooncake and SGLang; without HOST: its own, empty: at their port."""
        self.bootstrap_id: str | None = None
        """What Mooncake's bootstrap server calls it, once that was asked."""
        self._place_lines = b"Host: %b\r\n" % urlsplit(address.url).netloc.encode()
        if address.rank is not None:
            self._place_lines += b"%b: %d\r\n" % (RANK_HEADER, address.rank)

    @property
    def silent_s(self) -> float:
        """Return for how long nothing has come from it."""
        return monotonic() - self._heard_s

    def become(self, address: EngineAddress) -> None:
        """Take another role at the same place, or drain."""
        self.address = address
        self.prefills, self.decodes = address.role != "decode", address.role != "prefill"

    def serves(self, model: str) -> bool:
        """Return whether it may serve a model; of an empty name nobody knows."""
        if not model or self.address.model:
            return not model or self.address.model == model
        return self.models is None or model in self.models

    @property
    def refusal(self) -> str:
        """Return why it gets no request; empty: it gets one."""
        return self.down if self.down and self._answers(self) else ""

    def heard(self) -> None:
        """Note that the engine sent something just now."""
        self._heard_s = monotonic()
        self.was_heard = True

    def ask(self, method: str, target: bytes, headers: bytes, body: Buffer = b"") -> Answer:
        """Return the answer to a request, which is sent when the answer is entered.

        `headers` are lines, each with its end.
        """
        head = b"%b %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n" % (
            *(method.encode(), target, self._place_lines, headers, len(body)),
        )
        return Answer(self, [head, body] if body else [head])

    async def begin(self, parts: Sequence[Buffer]) -> UpstreamConnection:
        """Send a request, on a new connection if the engine closed a kept one just then. Raises EngineFailed."""
        fresh = False
        while True:
            connection = await self.pool.take(fresh=fresh)
            self._busy.add(connection)
            try:
                if self.refusal:
                    raise EngineFailed(self.down)
                await connection.begin(parts, limits.ENGINE_FIRST_BYTE_S)
            except BaseException as error:
                await self.end(connection)
                if fresh or not isinstance(error, EngineFailed) or not connection.ended_unused:
                    raise
                fresh = True
            else:
                self.heard()
                return connection

    async def end(self, connection: UpstreamConnection) -> None:
        """Take a connection back, which is closed unless its answer is whole."""
        self._busy.discard(connection)
        await self.pool.put(connection)

    def suspect(self, reason: str) -> None:
        """Give it no requests until it answers a probe, which is sent at once."""
        if not self.down:
            log.warning("engine %s is out: %s; it has %d requests", self.name, reason, self.requests)
        self.down = reason
        self.bootstrap_id, self.listed_s = None, float("-inf")
        self._suspected.set()

    async def wait(self) -> bool:
        """Wait for the time of the next look, or until it is suspected; return whether to probe it."""
        with trio.move_on_after(limits.HEALTH_INTERVAL_S):
            await self._suspected.wait()
            self._suspected = trio.Event()
            return True
        return self.silent_s >= (
            limits.HEALTH_INTERVAL_S if self.requests or self.down else limits.HEALTH_IDLE_S
        )

    def end_requests(self) -> None:
        """End all requests there: it is down."""
        for connection in self._busy:
            connection.end(self.down)

    def bring_back(self) -> None:
        """Let the engine get requests again, and log that where it got none."""
        self.heard()
        if self.down:
            log.warning("engine %s answers again", self.name)
        self.down = ""


class Answer:
    """An engine's answer, as a context: its head has come at the begin; `read` returns its body.

    Raises EngineFailed, also when the engine goes down meanwhile. At the end what the engine still does is ended.
    """

    _connection: UpstreamConnection
    status: int
    headers: list[tuple[bytes, bytes]]

    def __init__(self, engine: Engine, parts: Sequence[Buffer]) -> None:
        self._engine, self._parts = engine, parts

    async def __aenter__(self) -> Answer:
        engine = self._engine
        if engine.refusal:
            raise EngineFailed(engine.down)
        engine.requests += 1
        try:
            self._connection = connection = await engine.begin(self._parts)
        except BaseException:
            engine.requests -= 1
            raise
        self.status, self.headers = connection.status, connection.headers
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.requests -= 1
        await self._engine.end(self._connection)

    @property
    def is_whole(self) -> bool:
        """Return whether all of the body has been read."""
        return self._connection.is_whole

    async def read(self) -> bytes:
        """Return the next piece of the body, b"" at its end. Raises EngineFailed."""
        data = await self._connection.read(limits.ENGINE_SILENCE_S)
        self._engine.heard()
        return data

    async def pass_over_end(self) -> None:
        """Read what ends the body, so that the connection can be used again, if it comes soon and nothing else does."""
        with suppress(EngineFailed):
            await self._connection.read(limits.ENGINE_END_S)

    async def read_all(self, count: Callable[[int], None] | None = None) -> bytes:
        """Return the whole body; `count` is called with the bytes of each piece. Raises EngineFailed."""
        pieces, size_bytes = [], 0
        while piece := await self.read():
            if count is not None:
                count(len(piece))
            pieces.append(piece)
            size_bytes += len(piece)
            if size_bytes > limits.MAX_PROXY_ANSWER_BYTES:
                raise EngineFailed(f"its answer has over {limits.MAX_PROXY_ANSWER_BYTES} bytes", alive=True)
            if self.is_whole:
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Engines:
    """All engines of a proxy, by their names."""

    def __init__(
        self,
        addresses: Iterable[EngineAddress],
        unreachable: Callable[[str], None],
        authorities: Path | None = None,
        bootstraps: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`unreachable` is called with the name of an engine that goes down; `authorities`: see Dialer; `bootstraps`:
        by engine's URL, its bootstrap server."""
        self._bootstraps, self._unused_bootstraps = bootstraps, set(bootstraps)
        self._dialer = Dialer(authorities)
        self._unreachable = unreachable
        self._nursery: trio.Nursery | None = None
        self._by_name: dict[str, Engine] = {}
        self._down: set[str] = set()
        self.awaited: Collection[str] = ()
        """Engines that a Conductor asks what they are, and that have never said it."""
        for address in addresses:
            self._add(address)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._by_name.values())

    def at(self, name: str, url: str, rank: int | None, model: str) -> Engine:
        """Return the engine that a router names; one that was not known, or is elsewhere now, is watched from here on.

        Raises EngineFailed for what is no URL, and where all engines are busy that there may be.
        """
        engine = self._by_name.get(name)
        if engine is not None and engine.address.url == url and engine.address.rank == rank:
            return engine
        if not is_engine_url(url):
            raise EngineFailed(f"{url!r} is no http(s)://HOST:PORT", alive=True)
        if engine is None and len(self._by_name) >= limits.MAX_PROXY_ENGINES:
            unused = next((each for each in self if not each.requests), None)
            if unused is None:
                raise EngineFailed(f"{limits.MAX_PROXY_ENGINES} engines are in use", alive=True)
            self._remove(unused)
        if engine is not None:
            self._remove(engine)
        return self._add(EngineAddress(url, name=name, model=model, rank=rank))

    def follow(self, addresses: Iterable[EngineAddress]) -> None:
        """Watch a router's engines, and no other that it named; those of the start stay unless it names them too."""
        wanted = {each.name: each for each in addresses if is_engine_url(each.url)}
        urls = {each.url for each in wanted.values()}
        for engine in list(self):
            address = wanted.get(engine.name)
            if address is not None and address.place == engine.address.place:
                engine.become(address)
            elif address is not None or engine.address.name or engine.address.url in urls:
                self._remove(engine)
        for name, address in wanted.items():
            if name not in self._by_name and len(self._by_name) < limits.MAX_PROXY_ENGINES:
                self._add(address)
        self._log_unused_bootstraps()

    def _log_unused_bootstraps(self) -> None:
        """Log of each bootstrap server once that it is of no engine that was ever named, or is waited for."""
        for url in self._unused_bootstraps.difference(self.awaited):
            self._unused_bootstraps.discard(url)
            log.warning(
                "[proxy] bootstraps: %r is no engine that is known; it counts if one with this URL comes", url
            )

    def _add(self, address: EngineAddress) -> Engine:
        engine = Engine(address, self._dialer, self._any_like)
        url = address.url.removesuffix("/")
        engine.bootstrap = self._bootstraps.get(url, "")
        self._unused_bootstraps.discard(url)
        self._by_name[engine.name] = engine
        if self._nursery is not None:
            self._nursery.start_soon(self._watch, engine)
        return engine

    def _remove(self, engine: Engine) -> None:
        """Watch over an engine no more; its requests go on."""
        del self._by_name[engine.name]
        self._down.discard(engine.name)
        engine.removed.cancel()

    # --- of a model; an empty name is every one's -----------------------------------------------------------
    def check_model(self, model: str) -> None:
        """Check that there may be an engine for a model. Raises NotFound, NotReady."""
        if self._by_name and not self.serving(model):
            missing = NotFound(f"model {model[: limits.MAX_NAME_BYTES]!r}: no engine serves it")
            raise unless_awaited(missing, self.awaited)

    def serving(self, model: str) -> list[Engine]:
        """Return the engines that may serve a model, down ones too.

        A name that none has goes to those that no Conductor labels: what it means they say themselves.
        """
        found = [engine for engine in self if engine.serves(model)]
        return found or [engine for engine in self if not engine.address.model]

    def down(self, model: str = "") -> Collection[str]:
        """Return the names of engines that do not answer."""
        if not model or not self._down:
            return self._down
        return [engine.name for engine in self.serving(model) if engine.down]

    def any_answers(self, model: str = "") -> bool:
        """Return whether an engine that takes requests is not down; also where none is known yet."""
        if not self._down:
            return True
        takes = [engine for engine in self.serving(model) if not engine.address.draining]
        return not takes or not all(engine.down for engine in takes)

    def _any_like(self, which: Engine) -> bool:
        """Return whether each model of an engine has one that is not down."""
        models = [which.address.model] if which.address.model else which.models or [""]
        return all(self.any_answers(model) for model in models)

    def alive(self, exclude: Collection[str] = (), model: str = "") -> list[Engine]:
        """Return the engines that answer; where none does, all: to try one costs less than to wait for its probe."""
        anyway = not self.any_answers(model)
        return [
            engine
            for engine in self.serving(model)
            if (anyway or not engine.down) and not engine.address.draining and engine.name not in exclude
        ]

    def least_busy(self, exclude: Collection[str] = (), model: str = "") -> Engine | None:
        """Return one of `alive`, None without one."""
        return min(self.alive(exclude, model), key=lambda engine: engine.requests, default=None)

    def suspect(self, engine: Engine, reason: str) -> None:
        """Give no requests to an engine that failed, until it answers a probe, nor to the ranks behind its address."""
        if not engine.down:
            self._unreachable(engine.name)
        for each in [engine, *self._siblings_of(engine)]:
            if self._by_name.get(each.name) is each:
                self._down.add(each.name)
            if each is engine or not each.down:
                each.suspect(reason)

    def ranks_behind(self, engine: Engine) -> int:
        """Return how many data-parallel ranks are behind an engine's address, whose numbers begin at 0."""
        return 1 + max(each.address.rank or 0 for each in [engine, *self._siblings_of(engine)])

    def _siblings_of(self, engine: Engine) -> list[Engine]:
        """Return the other data-parallel ranks behind an engine's address."""
        url, rank = engine.address.place
        if rank is None:
            return []
        ranks = (each for each in self if each is not engine and each.address.rank is not None)
        return [each for each in ranks if each.address.url == url]

    def take_heard(self) -> list[str]:
        """Return the names of engines that sent something since this was called last."""
        names = [engine.name for engine in self if engine.was_heard]
        for name in names:
            self._by_name[name].was_heard = False
        return names

    async def get(self, place: Place, target: bytes) -> bytes:
        """Ask an engine or a server beside it, on a connection of its own. Raises EngineFailed."""
        connection = await self._dialer.connect(place)
        try:
            head = b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (target, place.host.encode())
            await connection.begin([head], limits.HEALTH_TIMEOUT_S)
            pieces = b""
            while piece := await connection.read(limits.HEALTH_TIMEOUT_S):
                pieces += piece
                if len(pieces) > limits.PROXY_BODY_PIECE_BYTES:
                    raise EngineFailed(
                        f"its answer has over {limits.PROXY_BODY_PIECE_BYTES} bytes", alive=True
                    )
            if connection.status >= 500:
                raise EngineFailed(f"{target.decode()} is {connection.status}")
            return pieces
        finally:
            await connection.close()

    async def run(self) -> None:
        """Watch over all engines until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._dialer.sweeper.run)
            for engine in self:
                self._nursery.start_soon(self._watch, engine)

    async def _watch(self, engine: Engine) -> None:
        try:
            with engine.removed:
                while True:
                    if await engine.wait():
                        await self._look_at(engine)
                    else:
                        await engine.pool.expire()
        finally:
            await engine.pool.close()

    async def _look_at(self, engine: Engine) -> None:
        began_s = monotonic()
        reason = await self._probe(engine)
        if not reason:
            self._down.discard(engine.name)
            engine.bring_back()
            return
        is_heard = engine.silent_s < monotonic() - began_s
        if not engine.down and not (is_heard and reason == _NO_ANSWER):
            self.suspect(engine, reason)
        await engine.pool.expire(0.0)
        if not is_heard:
            engine.end_requests()

    async def _probe(self, engine: Engine) -> str:
        """Return what is wrong with an engine; empty if it answers."""
        with trio.move_on_after(limits.HEALTH_TIMEOUT_S):
            try:
                await self.get(place_of(engine.address.url), b"/health")
            except EngineFailed as error:
                return str(error)
            return ""
        return _NO_ANSWER
