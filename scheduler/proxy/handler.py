"""From a client's exchange to an answer: who may ask, what is served, how much at once, errors.

Responsibility: bearer tokens, paths, bodies within a budget, and the form of every error. Completions go to
`scheduler.proxy.completion`, lists of models to `scheduler.proxy.model_lists`; the other paths of OpenAI's interface
are passed on to an engine; what changes an engine (adapters, sleep, caches) is not served here.

Invariants: every exchange is answered once, or its connection closes. While a client waits, its connection is watched:
when it goes, so does all that was done for it, without a retry.

Concurrency: one task for each exchange.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Collection
from itertools import count

import trio
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvfs import limits
from kvfs.errors import InvalidRequest, KvfsError, NotFound, NotReady
from kvfs.http.bearer_tokens import BearerTokens
from kvfs.http.http_exchange import BodyLost, Exchange, Headers
from kvfs.http.transports import Buffer, Gone, Stalled, breathe
from scheduler.proxy.bodies import BadBody, asked, parse, passed
from scheduler.proxy.client_watch import ClientWatch
from scheduler.proxy.completion import Completion, Legs
from scheduler.proxy.model_lists import ModelLists, is_list
from scheduler.proxy.openai_errors import Failure, as_failure
from scheduler.proxy.passed_headers import client_headers, engine_lines
from scheduler.proxy.relay import COMMENT, ends_event, is_stream
from scheduler.proxy.tokens import BYTES_A_TOKEN, Prompt, Tokenizer
from scheduler.proxy.upstream.connection import EngineFailed
from scheduler.proxy.upstream.engines import Engine, Engines

log = logging.getLogger("kvfs.proxy")

_COMPLETIONS = frozenset((b"/v1/completions", b"/v1/chat/completions"))
_PASSED = frozenset(
    (
        *(b"/v1/embeddings", b"/v2/embed", b"/pooling", b"/classify", b"/generative_scoring"),
        *(b"/v1/score", b"/score", b"/v1/rerank", b"/v2/rerank", b"/rerank"),
        *(b"/v1/responses", b"/v1/responses/render", b"/cohere/v2/chat", b"/cohere/v2/chat/render"),
        *(b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/messages/render"),
        *(b"/v1/completions/render", b"/v1/completions/derender", b"/v1/chat/completions/batch"),
        *(b"/v1/chat/completions/render", b"/v1/chat/completions/derender"),
        *(b"/v1/audio/transcriptions", b"/v1/audio/translations"),
        *(b"/tokenize", b"/detokenize", b"/tokenizer_info", b"/version"),
    )
)
"""What vLLM 0.32 serves to clients beside completions."""
_KEPT = re.compile(rb"/v1/responses/(?!render$)[\w.-]+(?:/cancel)?")
"""Names a response that an engine has kept (OpenAI's Responses)."""
_METHODS = frozenset(("GET", "POST"))
_MAX_REQUEST_ID_BYTES = 128
_METRICS = [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)]


class Memory:
    """The bytes of all bodies and answers that are kept."""

    size_bytes = 0


class Held:
    """The bytes of one request, until the end of its context."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes. Raises Failure."""
        if self._memory.size_bytes + size_bytes > limits.PROXY_MEMORY_BYTES:
            raise Failure(503, "requests under way take all the memory there is for them", retry_after_s=1)
        self._memory.size_bytes += size_bytes
        self.size_bytes += size_bytes

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.size_bytes -= self.size_bytes


class Handler:
    """The application of `kvfs.http.connection`."""

    def __init__(
        self,
        engines: Engines,
        legs: Legs,
        tokenizer: Tokenizer | None,
        models: ModelLists,
        metrics: Callable[[], bytes],
        bearer_tokens: Collection[str] = (),
    ) -> None:
        """`tokenizer`: None where the router needs no tokens. Without `bearer_tokens` engines check the client's."""
        self._engines, self._legs, self._tokenizer, self._metrics = engines, legs, tokenizer, metrics
        self._counts, self._models = legs.counts, models
        self._bearers = BearerTokens(bearer_tokens)
        self.memory = Memory()
        self.watch = ClientWatch()
        self.in_flight = 0
        self._id = secrets.token_hex(8).encode()
        self._numbers = count()

    def refuse(self, status: int, message: str) -> tuple[Headers, bytes]:
        """Return headers and body of the answer to bytes that are no request."""
        failure = Failure(status, message)
        return failure.headers(), failure.body()

    async def serve(self, exchange: Exchange) -> None:
        """Answer one exchange. Raises Gone, Stalled where the client is not there to be answered."""
        self.in_flight += 1
        try:
            await self._serve(exchange)
        except (Failure, BadBody, KvfsError, BodyLost, Stalled) as error:
            if isinstance(error, BodyLost | Stalled):
                exchange.keep_alive = False
            await self._fail(exchange, _as_failure(error))
        except (Gone, trio.Cancelled) as error:
            self._counts.outcomes["gone"] += isinstance(error, Gone) or exchange.abandoned
            raise
        except Exception:
            log.exception("%s: %s failed", exchange.peer, exchange.head.method)
            await self._fail(exchange, Failure(500, "internal error"))
        finally:
            self.in_flight -= 1

    async def _fail(self, exchange: Exchange, failure: Failure) -> None:
        """Answer with an error. Raises Gone where the answer has begun: all that is left is to break it off."""
        if exchange.answered:
            self._counts.outcomes["broken"] += 1
            raise Gone(str(failure))
        self._counts.end(failure.status)
        await exchange.respond(failure.status, failure.headers(), failure.body())

    async def _serve(self, exchange: Exchange) -> None:
        path = exchange.head.target.partition(b"?")[0]
        if path == b"/health":
            await self._health(exchange)
            return
        self._authorize(exchange)
        if path == b"/metrics":
            await exchange.respond(200, _METRICS, self._metrics())
            return
        lists, kept = is_list(path), _KEPT.fullmatch(path) is not None
        if path not in _COMPLETIONS and path not in _PASSED and not lists and not kept:
            raise Failure(404, f"{path.decode('latin-1')} is not served", code="unknown_url")
        wanted = ("POST",) if path in _COMPLETIONS else ("GET",) if lists else _METHODS
        if exchange.head.method not in wanted:
            raise Failure(405, f"{exchange.head.method} is not served at {path.decode('latin-1')}")
        if self.in_flight > limits.MAX_PROXY_REQUESTS:
            raise Failure(503, f"{limits.MAX_PROXY_REQUESTS} requests are in flight", retry_after_s=1)
        with Held(self.memory) as held:
            body: Buffer | None = self._received(exchange, held)
            if body is None:
                body = await self._receive(exchange, held)
            watched = self.watch.add(exchange)
            try:
                if path in _COMPLETIONS:
                    await self._complete(exchange, body, held)
                elif lists:
                    await self._list_models(exchange, path)
                elif kept:
                    await self._pass_to_keeper(exchange, body)
                else:
                    await self._pass(exchange, body)
            finally:
                self.watch.remove(watched)

    async def _health(self, exchange: Exchange) -> None:
        """Answer whether any engine does; names and addresses are nobody's business here."""
        engines = [not engine.down for engine in self._engines]
        body = {"engines": len(engines), "answering": sum(engines), "in_flight": self.in_flight - 1}
        headers = [("Content-Type", "application/json")]
        await exchange.respond(200 if any(engines) else 503, headers, json.dumps(body).encode())

    def _authorize(self, exchange: Exchange) -> None:
        """Check the client's bearer token. Raises Failure."""
        if not self._bearers.allow(exchange.head):
            raise Failure(401, "the bearer token is missing or wrong", code="invalid_api_key")
        exchange.signed = True

    def _received(self, exchange: Exchange, held: Held) -> bytes | None:
        """Return a body that came with its head, None where there is more to come. Raises Failure."""
        if exchange.head.content_length > limits.MAX_PROXY_BODY_BYTES:
            return None
        whole = exchange.received_body()
        if whole is not None:
            held.add(len(whole))
        return whole

    async def _receive(self, exchange: Exchange, held: Held) -> Buffer:
        """Receive a body. Raises Failure, BodyLost, Stalled, Gone."""
        most = limits.MAX_PROXY_BODY_BYTES
        body, piece = bytearray(), memoryview(bytearray(_piece_bytes(exchange)))
        while max(len(body), exchange.head.content_length) <= most:
            size_bytes = await exchange.receive_into(piece)
            held.add(size_bytes)
            body += piece[:size_bytes]
            if not size_bytes or exchange.body_done:
                return body
            await breathe()
        raise Failure(413, f"the body has over {most} bytes", code="body_too_large")

    def _headers(self, exchange: Exchange) -> bytes:
        """Return the lines of the client's headers for an engine, with an id of the request."""
        headers = exchange.head.headers
        lines = engine_lines(headers, has_bearer=not self._bearers)
        given = b""
        for name, value in headers:
            if name == b"x-request-id":
                given = given or value
        if not given or len(given) > _MAX_REQUEST_ID_BYTES:
            given = b"kvfs-%b-%x" % (self._id, next(self._numbers))
        return b"%bx-request-id: %b\r\n" % (lines, given)

    async def _complete(self, exchange: Exchange, body: Buffer, held: Held) -> None:
        members = parse(body)
        wanted = asked(members)
        headers = self._headers(exchange)
        if self._tokenizer is None:
            prompt = Prompt(None, len(body) // BYTES_A_TOKEN + 1)
        else:
            prompt = await self._tokenizer.prompt(members, headers)
        request = Completion(exchange, exchange.head.target, headers, members, wanted, prompt, held.add)
        await self._legs.complete(request)
        if request.status is None:
            self._counts.outcomes["broken"] += 1
        else:
            self._counts.end(request.status)

    async def _list_models(self, exchange: Exchange, path: bytes) -> None:
        """Answer with the models of all engines, or with one of them. Raises Failure, NotFound."""
        status, data = await self._models.answer(path, self._headers(exchange))
        self._counts.end(status)
        body = data if status == 200 else as_failure(status, data)
        await exchange.respond(status, [("Content-Type", "application/json")], body)

    async def _pass(self, exchange: Exchange, body: Buffer) -> None:
        """Pass a request on to an engine of its model, and the answer back. Raises Failure, NotFound."""
        failed: list[str] = []
        model, body = passed(body, _content_type(exchange))
        self._engines.check_model(model)
        for _ in range(1 + limits.PROXY_RETRIES):
            engine = self._engines.least_busy(failed, model)
            if engine is None:
                break
            try:
                self._counts.end(await self._pass_to(exchange, body, engine))
                return
            except EngineFailed as error:
                failed.append(engine.name)
                self._engine_failed(exchange, engine, error)
        raise Failure(503, f"engines failed: {', '.join(failed) or 'none answers'}", retry_after_s=1)

    def _engine_failed(self, exchange: Exchange, engine: Engine, error: EngineFailed) -> None:
        """Note that an engine failed at what was passed on to it. Raises Failure where its answer has begun."""
        if not error.alive:
            self._engines.suspect(engine, str(error))
        self._counts.events["failed_legs"] += 1
        if exchange.answered:
            raise Failure(502, f"engine {engine.name}: {error}") from None

    async def _pass_to_keeper(self, exchange: Exchange, body: Buffer) -> None:
        """Pass on what is asked of a kept response to the engine that has it: each is asked, until one does. Raises
        Failure, BadBody."""
        _, body = passed(body, _content_type(exchange))
        failed = [engine.name for engine in self._engines if engine.down]
        for engine in [each for each in self._engines if not each.down]:
            try:
                status = await self._pass_to(exchange, body, engine, only_if_kept=True)
            except EngineFailed as error:
                self._engine_failed(exchange, engine, error)
                status = 500
            if status < 500 and status != 404:
                self._counts.end(status)
                return
            if status != 404:
                failed.append(engine.name)
        if failed:
            raise Failure(
                503, f"engines that may have it do not answer: {', '.join(failed)}", retry_after_s=1
            )
        raise Failure(404, "no engine has this response")

    async def _pass_to(
        self, exchange: Exchange, body: Buffer, engine: Engine, *, only_if_kept: bool = False
    ) -> int:
        """Return the status of the answer, which is passed on unless it says that the engine has not got what it was to
        have kept, or failed at it. Raises EngineFailed."""
        head = exchange.head
        async with engine.ask(head.method, head.target, self._headers(exchange), body) as answer:
            if only_if_kept and (answer.status == 404 or answer.status >= 500):
                await answer.read_all()
                return answer.status
            data = await answer.read()
            if answer.status >= 400:
                while len(data) < limits.PROXY_BODY_PIECE_BYTES and (piece := await answer.read()):
                    data += piece
                body = as_failure(answer.status, data)
                await exchange.respond(answer.status, Failure(answer.status, "").headers(), body)
                return answer.status
            if answer.is_whole:
                await exchange.respond(answer.status, client_headers(answer.headers), data)
                return answer.status
            await exchange.begin_slowly(answer.status, client_headers(answer.headers), data)
            has_events = is_stream(answer)
            while True:
                exchange.filler = COMMENT if has_events and ends_event(data) else b""
                if not (data := await answer.read()):
                    break
                await exchange.send_part(data)
            await exchange.end_slowly()
            return answer.status


def _content_type(exchange: Exchange) -> bytes:
    return next((value.lower() for name, value in exchange.head.headers if name == b"content-type"), b"")


def _piece_bytes(exchange: Exchange) -> int:
    """Return how much of a body is received at once: all of a small one."""
    known = exchange.head.content_length
    return min(known, limits.PROXY_BODY_PIECE_BYTES) or limits.SMALL_BODY_BYTES


def _as_failure(error: Exception) -> Failure:
    match error:
        case Failure():
            return error
        case BadBody():
            return Failure(400, str(error), param=error.param)
        case NotFound():
            return Failure(404, str(error), code="model_not_found", param="model")
        case NotReady():
            return Failure(503, str(error), retry_after_s=limits.ENGINE_ASK_INTERVAL_S)
        case InvalidRequest():
            return Failure(400, str(error))
        case BodyLost():
            return Failure(400, str(error))
        case Stalled():
            return Failure(408, "the body did not come in time")
    return Failure(503, str(error))
