"""One completion: routed, prefilled, decoded, and sent to another engine when one fails.

Responsibility: the legs of a request by its hand-over, retries, what the router is reported.

- By the store and NIXL, the prefill leg comes first and is best effort: whatever becomes of it, the decode engine alone
  is right. By Mooncake and SGLang both legs run at once, and fail together.
- Whether there is a prefill leg is the router's word, but for requests that need one engine; the router is told where
  engines do nothing alone.

Invariants:
- A request goes to another engine at most limits.PROXY_RETRIES times, and never after the first byte of its answer: an
  error event ends the answer then.
- Every request that was routed ends with one `done` or `cancel`. A client that goes away cancels the task: the
  connections to the engines close, which ends their work.
- By NIXL an engine that has prefilled keeps the blocks until the decode engine, once it has the request, reads them or
  gives them up. So a client that goes away between the legs is lingered for: the decode leg begins, and is closed then.

Concurrency: one task for each request, two where legs run at once.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from functools import partial
from time import monotonic

import msgspec
import trio

from kvfs import limits
from kvfs.config.settings import HandOver
from kvfs.http.http_exchange import Exchange
from kvfs.http.server_place import Place, place_of
from kvfs.http.transports import Gone, Stalled
from scheduler.conductor.values import Refused, Routed, RouteRequest, Usage
from scheduler.proxy import handover
from scheduler.proxy.bodies import Asked, Members, decode_body, prefill_body
from scheduler.proxy.handover import Put
from scheduler.proxy.openai_errors import Failure, as_failure
from scheduler.proxy.passed_headers import client_headers
from scheduler.proxy.proxy_metrics import Counts
from scheduler.proxy.relay import COMMENT, NO_USAGE, EngineUsage, EventRelay, is_stream, usage_of
from scheduler.proxy.routers.balance import BY_LOAD
from scheduler.proxy.routers.fallback import RequestRouter
from scheduler.proxy.tokens import Prompt
from scheduler.proxy.upstream.connection import EngineFailed
from scheduler.proxy.upstream.engines import Answer, Engine, Engines
from scheduler.proxy.waiting_line import WaitingLine

log = logging.getLogger("kvfs.proxy")

_ELSEWHERE = frozenset((429, 500, 502, 503, 504))
"""Answers of an engine after which another one is asked."""
_RETRY_AFTER_S = 1.0
_CHOICES = b'"choices"'
"""In events with tokens; comments and errors have none."""


class Completion(msgspec.Struct, eq=False):
    """A client's request for a completion, and what became of it so far."""

    exchange: Exchange
    target: bytes
    headers: bytes
    """Lines for the engines."""
    members: Members
    asked: Asked
    prompt: Prompt
    count: Callable[[int], None]
    """Counts the bytes of an answer that is kept in memory."""
    arrived_s: float = msgspec.field(default_factory=monotonic)
    failed: list[str] = []
    """Engines that the request went to, and is not to go to again."""
    last_error: tuple[int, bytes] | None = None
    prefill_usage: EngineUsage | None = None
    usage: EngineUsage = NO_USAGE
    status: int | None = 200
    """As it was answered; None: it was broken off."""
    is_over: bool = False
    """Whether the router was told that it is done."""


class _Pair(msgspec.Struct, frozen=True):
    """The engines for a request; `prefill` is None where one does both."""

    routed: Routed
    decode: Engine
    prefill: Engine | None


class Legs:
    """See the module's header."""

    def __init__(
        self,
        engines: Engines,
        router: RequestRouter,
        line: WaitingLine,
        counts: Counts,
        kind: HandOver = "store",
    ) -> None:
        self._engines, self._router, self._line = engines, router, line
        self._kind, self.counts = kind, counts
        self._both_legs = kind in handover.BOTH_LEGS

    async def complete(self, request: Completion) -> None:
        """Answer a request. Raises Failure, BadBody, and what the client's connection raises."""
        if self._both_legs:
            handover.check_rooms(request.members)
        for attempt in range(1 + limits.PROXY_RETRIES):
            routed = await self._route(request)
            if routed is None:
                break
            self.counts.events["retries"] += attempt > 0
            try:
                pair = self._pair(request, routed)
                await self._run(request, pair)
            except EngineFailed as error:
                self._router.cancel(routed.id)
                self.counts.events["failed_legs"] += 1
                log.info("request %s: %s", routed.id, error)
                if request.exchange.answered:
                    await self._end_broken(request, error)
                    return
            except BaseException:
                if not request.is_over:
                    self._router.cancel(routed.id)
                raise
            else:
                return
        await self._give_error(request)

    def _end(self, request: Completion, pair: _Pair) -> None:
        """Report what the engines say of the tokens: all that they answered is on its way."""
        request.is_over, routed = True, pair.routed
        prefill = request.prefill_usage
        # Numbers of several answers are sums: nothing is known of one of them.
        usage = NO_USAGE if request.asked.several else request.usage
        cached_tokens = usage.cached_tokens if prefill is None else prefill.cached_tokens
        self._router.done(routed.id, Usage(cached_tokens, usage.output_tokens, prefill is not None))
        # What was predicted is the prefill engine's.
        engine = pair.prefill if prefill is not None else pair.decode if routed.prefill is None else None
        if engine is not None and cached_tokens is not None and routed.degraded != BY_LOAD:
            engine.predicted_tokens += routed.cached_tokens
            engine.cached_tokens += cached_tokens

    async def _route(self, request: Completion) -> Routed | None:
        """Choose engines, once there is room; None where there is none besides those that failed. Raises Failure."""
        found = await self._line.route(partial(self._question, request))
        if not isinstance(found, Refused):
            return found
        if request.failed or not self._engines.any_answers(request.asked.model):
            return None
        raise Failure(429, found.reason, code="no_capacity", retry_after_s=found.retry_after_s)

    def _question(self, request: Completion, deferred_id: str) -> RouteRequest:
        prompt = request.prompt
        # What no cache is read for is routed by its length alone.
        tokens = None if request.asked.one_engine else prompt.tokens
        return RouteRequest(
            model=request.asked.model,
            tokens=tokens,
            length=None if tokens else prompt.length,
            waited_s=monotonic() - request.arrived_s,
            output_tokens=request.asked.output_tokens or None,
            streamed=request.asked.streams,
            exclude=self._excluded(request),
            deferred_id=deferred_id,
            both_legs=self._both_legs,
        )

    def _excluded(self, request: Completion) -> list[str]:
        model = request.asked.model
        down = self._engines.down(model) if self._engines.any_answers(model) else ()
        if not down and not request.failed:
            return []
        return list(dict.fromkeys([*request.failed, *down]))[: limits.MAX_EXCLUDED]

    def _pair(self, request: Completion, routed: Routed) -> _Pair:
        decode = self._engine(request, routed.decode, routed.decode_url, routed.decode_rank)
        skip = ""
        if routed.prefill is None or routed.prefill_url is None or routed.prefill == routed.decode:
            skip = "one_engine"
        elif request.asked.one_engine and not self._both_legs:
            skip = "echo"
        if skip:
            self.counts.skips[skip] += 1
            if skip == "echo":
                self._router.prefill_failed(routed.id)
            return _Pair(routed, decode, None)
        self.counts.events["prefill_legs"] += 1
        prefill = self._engine(request, routed.prefill or "", routed.prefill_url or "", routed.prefill_rank)
        return _Pair(routed, decode, prefill)

    def _engine(self, request: Completion, name: str, url: str, rank: int | None) -> Engine:
        """Return the engine that a router names. Raises EngineFailed with its name, which is excluded then."""
        try:
            return self._engines.at(name, url, rank, request.asked.model)
        except EngineFailed as error:
            request.failed.append(name)
            raise EngineFailed(f"engine {name}: {error}", alive=error.alive) from None

    async def _run(self, request: Completion, pair: _Pair) -> None:
        request.prefill_usage, request.usage = None, NO_USAGE
        if pair.prefill is None:
            await self._decode(request, pair, {})
        elif self._kind in handover.AT_ONCE:
            await self._run_at_once(request, pair, pair.prefill)
        else:
            await self._decode(request, pair, await self._prefill(request, pair, pair.prefill))

    def _failed(self, request: Completion, engine: Engine, error: EngineFailed) -> EngineFailed:
        """Note an engine's failure; return it with the engine's name."""
        request.failed.append(engine.name)
        if not error.alive:
            self._engines.suspect(engine, str(error))
        return EngineFailed(f"engine {engine.name}: {error}", alive=error.alive)

    # --- one leg after the other ---------------------------------------------------------------------------
    async def _prefill(self, request: Completion, pair: _Pair, engine: Engine) -> Put:
        """Have an engine prefill the prompt; return what the decode leg is to know of that, if it did."""
        body = prefill_body(request.members, handover.prefill(self._kind))
        try:
            async with engine.ask("POST", request.target, request.headers, body) as answer:
                if self._kind == "nixl":
                    request.exchange.linger(limits.PROXY_LINGER_S)
                data = await answer.read_all(request.count)
        except EngineFailed as error:
            return self._prefill_failed(pair, str(self._failed(request, engine, error)))
        if answer.status != 200:
            return self._prefill_failed(pair, f"engine {engine.name}: it answered {answer.status}")
        self._router.prefilled(pair.routed.id)
        request.prefill_usage = usage_of(data)
        return handover.after_prefill(data, request.prefill_usage.cached_tokens, pair.routed.prefill_peer)

    def _prefill_failed(self, pair: _Pair, reason: str) -> Put:
        """Have the decode engine compute the prompt; return what it is to know: nothing."""
        self._router.prefill_failed(pair.routed.id)
        self.counts.events["failed_prefills"] += 1
        log.info("request %s is prefilled where it is decoded: %s", pair.routed.id, reason)
        return {}

    async def _decode(self, request: Completion, pair: _Pair, put: Put) -> None:
        """Pass a decode engine's answer to the client. Raises EngineFailed."""
        body = decode_body(request.members, request.asked, put)
        try:
            async with pair.decode.ask("POST", request.target, request.headers, body) as answer:
                if answer.status in _ELSEWHERE:
                    request.last_error = answer.status, await answer.read_all(request.count)
                    raise EngineFailed(f"it answered {answer.status}", alive=True)
                if answer.status == 200 and is_stream(answer):
                    await self._stream(request, pair, answer)
                else:
                    await self._whole(request, pair, answer)
                self._end(request, pair)
                await answer.pass_over_end()
        except EngineFailed as error:
            raise self._failed(request, pair.decode, error) from None

    # --- both legs at once ---------------------------------------------------------------------------------
    async def _run_at_once(self, request: Completion, pair: _Pair, engine: Engine) -> None:
        """Run both legs; before the first byte one failure is that of both. Raises what `_decode` does."""
        prefill_put, decode_put = await self._joined(request, engine)
        failures: list[Exception] = []

        async def prefill() -> None:
            try:
                await self._prefill_beside(request, engine, prefill_put)
                if not request.is_over:
                    self._router.prefilled(pair.routed.id)
            except EngineFailed as error:
                if not request.exchange.answered:
                    failures.append(error)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill)
            try:
                await self._decode(request, pair, decode_put)
            except (EngineFailed, Failure, Gone, Stalled) as error:
                failures.append(error)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]

    async def _joined(self, request: Completion, engine: Engine) -> tuple[Put, Put]:
        """Return what joins the two legs. Raises EngineFailed."""
        bootstrap = handover.bootstrap_at(engine.bootstrap, place_of(engine.address.url).host)
        if self._kind == "sglang":
            number = engine.address.rank
            rank = None if number is None else handover.Rank(number, self._engines.ranks_behind(engine))
            put = handover.sglang_rooms(bootstrap, request.members, partial(secrets.randbits, 63), rank)
            return put, put
        try:
            if engine.bootstrap_id is None:
                answer = await self._engines.get(Place(bootstrap.host, bootstrap.port), b"/query")
                engine.bootstrap_id = handover.engine_id(answer, engine.address.rank or 0)
        except EngineFailed as error:
            raise self._failed(request, engine, error) from None
        return handover.mooncake(bootstrap._replace(engine_id=engine.bootstrap_id), secrets.token_hex(16))

    async def _prefill_beside(self, request: Completion, engine: Engine, put: Put) -> None:
        """Run the prefill leg beside the decode leg; what it answers is not needed. Raises EngineFailed."""
        members, asked = request.members, request.asked
        whole = self._kind == "sglang"
        body = decode_body(members, asked, put) if whole else prefill_body(members, put)
        try:
            async with engine.ask("POST", request.target, request.headers, body) as answer:
                while await answer.read():
                    pass
                if answer.status != 200:
                    raise EngineFailed(f"it answered {answer.status}", alive=True)
        except EngineFailed as error:
            raise self._failed(request, engine, error) from None

    # --- the answer ----------------------------------------------------------------------------------------
    async def _stream(self, request: Completion, pair: _Pair, answer: Answer) -> None:
        """Pass events on as they come, with the last one the end: clients may go then. The head waits for the first:
        until then another engine may answer."""
        relay = EventRelay(drops_usage=not request.asked.wants_usage)
        exchange = request.exchange
        exchange.filler = COMMENT
        sent_s, is_token_seen = 0.0, False
        while not relay.is_done and (data := await answer.read()):
            events = relay.feed(data)
            if not events:
                continue
            now_s = monotonic()
            if not is_token_seen and _CHOICES in events:
                is_token_seen = True
                self._router.first_token(pair.routed.id)
            if exchange.answered:
                self.counts.tokens.observe("streamed", now_s - sent_s)
                sent_s = now_s
                await exchange.send_part(events, last=relay.is_done)
            else:
                self.counts.first_bytes.observe("streamed", now_s - request.arrived_s)
                sent_s = now_s
                await exchange.begin_slowly(200, _headers(pair, answer), events, last=relay.is_done)
        request.usage = relay.usage
        if relay.is_done:
            return
        rest = relay.end()
        if not exchange.answered and not rest:
            raise EngineFailed("it streamed nothing")
        if not exchange.answered:
            await exchange.begin_slowly(200, _headers(pair, answer))
        if rest:
            await exchange.send_part(rest)
        await exchange.end_slowly()

    async def _whole(self, request: Completion, pair: _Pair, answer: Answer) -> None:
        data = await answer.read_all(request.count)
        self.counts.first_bytes.observe("whole", monotonic() - request.arrived_s)
        request.status = answer.status
        if answer.status != 200:
            data = as_failure(answer.status, data)
        else:
            request.usage = usage_of(data)
        await request.exchange.respond(answer.status, _headers(pair, answer), data)

    async def _end_broken(self, request: Completion, error: EngineFailed) -> None:
        """End an answer that began by an error event."""
        request.status = None
        failure = Failure(502, f"the answer ends here: {error}", code="engine_failed")
        await request.exchange.send_part(failure.event())
        await request.exchange.end_slowly()

    async def _give_error(self, request: Completion) -> None:
        """Answer with the last engine's error, if it was one that could speak. Raises Failure."""
        if request.last_error is None:
            raise self._no_engine(request)
        status, data = request.last_error
        request.status = status
        headers = Failure(status, "", retry_after_s=_RETRY_AFTER_S).headers()
        await request.exchange.respond(status, headers, as_failure(status, data))

    def _no_engine(self, request: Completion) -> Failure:
        tried = ", ".join(dict.fromkeys(request.failed))
        message = f"engines failed: {tried}" if tried else "no engine answers"
        return Failure(503, message, code="engines_failed", retry_after_s=_RETRY_AFTER_S)


def _headers(pair: _Pair, answer: Answer) -> list[tuple[str, str]]:
    """Return an answer's headers for the client; where a Conductor chose, with the id under which it says why."""
    routed = pair.routed
    return client_headers(answer.headers, "" if routed.degraded == BY_LOAD else routed.id)
