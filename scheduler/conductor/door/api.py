"""The HTTP door of the Conductor: requests to operations, answers as JSON.

Responsibility: who may ask (a bearer token), which operation, its body within its limit, errors that name what is
wrong.

Invariants: nobody without a token learns more than that the service and its page are there. Bodies in memory are
bounded in all; an announced length takes no room before its bytes come. An unforeseen error shows the client nothing.

Concurrency: one task per connection; operations run on the trio thread between two awaits, so that each sees one state.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from time import monotonic
from typing import Any
from urllib.parse import unquote

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvfs.errors import Exists, InvalidRequest, KvfsError, NotFound, NotReady
from kvfs.http.bearer_tokens import BearerTokens
from kvfs.http.http_exchange import BodyLost, Exchange, Headers
from kvfs.http.transports import Gone, Stalled, breathe
from kvfs.limits import (
    CONDUCTOR_BODIES_BYTES,
    DOCUMENT_PIECE_BYTES,
    ENGINE_ASK_INTERVAL_S,
    MAX_NAME_BYTES,
    ROUTE_BATCH_TURN,
)
from kvfs.system.latencies import Latencies
from kvfs.system.metrics import exposition
from kvfs.watch.hub import Hub
from kvfs.watch.page import page_file
from scheduler.conductor.door.conductor_metrics import ConductorCollector
from scheduler.conductor.door.mooncake import ALL_OPERATIONS
from scheduler.conductor.door.openapi import FIXED, document
from scheduler.conductor.door.operations import (
    ROUTE_BATCH,
    BatchAnswer,
    Context,
    ErrorAnswer,
    ErrorBody,
    Operation,
    Reply,
    RouteBatch,
    RoutedBatch,
    check_batch,
)
from scheduler.conductor.values import Refused, Routed

log = logging.getLogger("kvfs.conductor")

_JSON = ("Content-Type", "application/json")
_TEXT = ("Content-Type", "text/plain; charset=utf-8")
_METRICS = ("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
_STATUSES: tuple[tuple[type[KvfsError], int], ...] = (
    (NotFound, 404),
    (Exists, 409),
    (InvalidRequest, 400),
    (NotReady, 503),
)
_encode = msgspec.json.Encoder().encode
Answer = Reply | tuple[Headers, bytes] | None
"""None: the stream of events."""


class Rejected(Exception):
    """A request is answered with an error before it reaches its operation."""

    def __init__(self, status: int, code: str, message: str, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class Api:
    """Answer exchanges; `refuse` answers what is no request."""

    def __init__(self, context: Context, tokens: Sequence[str], hub: Hub) -> None:
        self._context = context
        self._hub = hub
        self._tokens = BearerTokens(tokens)
        self._bodies_bytes = 0
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.latencies = Latencies()

    async def serve(self, exchange: Exchange) -> None:
        """Answer one exchange, with an error's status and JSON where it fails."""
        began_s = monotonic()
        try:
            reply = await self._reply(exchange)
        except Rejected as error:
            self.errors[error.code] += 1
            await self._fail(exchange, error.status, error.code, str(error), error.headers)
        except KvfsError as error:
            code = type(error).__name__
            self.errors[code] += 1
            status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
            again = [("Retry-After", f"{ENGINE_ASK_INTERVAL_S:.0f}")] if isinstance(error, NotReady) else []
            await self._fail(exchange, status, code, str(error), again)
        except (Gone, Stalled, BodyLost):
            raise
        except Exception:
            log.exception("%s: %s %r failed", exchange.peer, exchange.head.method, exchange.head.target[:200])
            self.errors["InternalError"] += 1
            await self._fail(exchange, 500, "InternalError", "see the log of the service")
        else:
            try:
                await self._answer(exchange, reply)
            except (Gone, Stalled):
                self._cancel_for(reply)
                raise
        if exchange.operation:
            self.requests[exchange.operation] += 1
            self.latencies.observe(exchange.operation, monotonic() - began_s)

    def refuse(self, status: int, message: str) -> tuple[Headers, bytes]:
        """Return headers and JSON body of an answer to what is no request."""
        return [_JSON], _encode(ErrorAnswer(ErrorBody("BadRequest", message)))

    # --- a request ----------------------------------------------------------------------------------------
    async def _reply(self, exchange: Exchange) -> Answer:
        path = exchange.head.target.partition(b"?")[0].decode("ascii")
        method = exchange.head.method
        if path == "/healthz" and method in ("GET", "HEAD"):
            return [_TEXT], b"ok\n"
        page = page_file(path)
        if page is not None and method in ("GET", "HEAD"):
            return page
        self._check_token(exchange)
        if path == "/openapi.json" and method in ("GET", "HEAD"):
            return [_JSON], _document(bool(self._tokens))
        if path == "/metrics" and method in ("GET", "HEAD"):
            return [_METRICS], self._metrics()
        if path == "/v1/events" and method == "GET":
            return None
        operation, argument = _find(method, path)
        exchange.operation = operation.name
        body = await self._body(exchange, operation)
        if operation is ROUTE_BATCH:
            return await self._route_batch(body)
        reply = operation.run(self._context, argument, body)
        return _packed(reply) if operation.packs and _is_packed(exchange) else reply

    def _check_token(self, exchange: Exchange) -> None:
        if not self._tokens.allow(exchange.head):
            raise Rejected(
                401,
                "Unauthorized",
                "a bearer token of the configuration is wanted",
                ("WWW-Authenticate", "Bearer"),
            )
        exchange.signed = True

    async def _body(self, exchange: Exchange, operation: Operation) -> Any:
        most = operation.max_body_bytes
        if exchange.head.content_length > most:
            raise _too_large(operation, exchange.head.content_length)
        packed = operation.packs and _is_packed(exchange)
        whole = exchange.received_body()
        if whole is not None:  # gone before another body comes
            return _decoded(operation, whole, packed=packed)
        data = bytearray()
        try:
            while not exchange.body_done:
                wanted = min(max(len(data), DOCUMENT_PIECE_BYTES), exchange.head.content_length or most)
                piece = bytearray(wanted)
                self._take(len(piece))
                try:
                    count = await exchange.receive_into(memoryview(piece))
                finally:
                    self._bodies_bytes -= len(piece)
                if not count:
                    break
                data += memoryview(piece)[:count]
                self._bodies_bytes += count
                if len(data) > most:
                    raise _too_large(operation, len(data))
            return _decoded(operation, data, packed=packed)
        finally:
            self._bodies_bytes -= len(data)

    def _take(self, count: int) -> None:
        if self._bodies_bytes + count > CONDUCTOR_BODIES_BYTES:
            raise Rejected(
                503,
                "SlowDown",
                f"bodies in memory reach {CONDUCTOR_BODIES_BYTES} bytes",
                ("Retry-After", "1"),
            )
        self._bodies_bytes += count

    async def _route_batch(self, body: RouteBatch) -> Reply:
        check_batch(body)
        answers: list[BatchAnswer] = []
        for number, request in enumerate(body.requests):
            try:
                found = self._context.conductor.route(request)
            except KvfsError as error:
                self._cancel(answers)
                raise type(error)(f"requests[{number}]: {error}") from None
            answers.append(
                BatchAnswer(refused=found) if isinstance(found, Refused) else BatchAnswer(routed=found)
            )
            if number % ROUTE_BATCH_TURN == ROUTE_BATCH_TURN - 1:
                await breathe()
        return Reply(200, RoutedBatch(answers))

    def _metrics(self) -> bytes:
        collector = ConductorCollector(
            self._context.conductor.status(), self.requests, self.errors, self.latencies.status()
        )
        return exposition(collector).encode()

    # --- its answer ---------------------------------------------------------------------------------------
    async def _answer(self, exchange: Exchange, reply: Answer) -> None:
        if reply is None:
            await self._hub.serve(exchange)
        elif not isinstance(reply, Reply):
            headers, body = reply
            await exchange.respond(200, headers, body)
        elif reply.value is None:
            await exchange.respond(reply.status, [])
        else:
            named = [_JSON]
            if reply.retry_after_s is not None:
                named.append(("Retry-After", str(math.ceil(reply.retry_after_s))))
            await exchange.respond(reply.status, named, _encode(reply.value))

    def _cancel_for(self, reply: Answer) -> None:
        """Cancel what was reserved for a client that is gone."""
        value = reply.value if isinstance(reply, Reply) else None
        if isinstance(value, Routed):
            self._context.conductor.cancel(value.id)
        elif isinstance(value, RoutedBatch):
            self._cancel(value.answers)

    def _cancel(self, answers: Sequence[BatchAnswer]) -> None:
        for each in answers:
            if each.routed is not None:
                self._context.conductor.cancel(each.routed.id)

    async def _fail(
        self,
        exchange: Exchange,
        status: int,
        code: str,
        message: str,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        if not exchange.answered:
            body = _encode(ErrorAnswer(ErrorBody(code, message)))
            await exchange.respond(status, [_JSON, *headers], body)


def _find(method: str, path: str) -> tuple[Operation, str]:
    """Return the operation of a request, and the argument in its path. Raises Rejected."""
    exact = _ROUTES.get(path)
    argument = ""
    if path in FIXED:
        raise _not_allowed(method, path, ("GET",))
    if exact is None:
        parts = path.split("/")
        if len(parts) in (4, 5):
            argument = unquote(parts[3])
            exact = _ROUTES.get("/".join([*parts[:3], "{}", *parts[4:]]))
    if exact is None or len(argument) > MAX_NAME_BYTES:
        raise Rejected(404, "NotFound", f"{path[:100]}: no such path; /openapi.json lists them")
    found = exact.get(method)
    if found is None:
        raise _not_allowed(method, path, exact)
    return found, argument


def _not_allowed(method: str, path: str, methods: Iterable[str]) -> Rejected:
    allowed = ", ".join(methods)
    message = f"{method} {path[:100]}: there is {allowed}"
    return Rejected(405, "MethodNotAllowed", message, ("Allow", allowed))


def _is_packed(exchange: Exchange) -> bool:
    """Return whether a body is MessagePack."""
    given = next((value for name, value in exchange.head.headers if name == b"content-type"), b"")
    return given.partition(b";")[0].strip().lower() in (b"application/msgpack", b"application/x-msgpack")


def _packed(reply: Reply) -> tuple[Headers, bytes]:
    return [("Content-Type", "application/msgpack")], msgspec.msgpack.encode(reply.value)


def _decoded(operation: Operation, data: bytes | bytearray, *, packed: bool = False) -> Any:
    if operation.body is None or (operation.optional_body and not data):
        return None
    try:
        if packed:
            return msgspec.msgpack.decode(data, type=operation.body)
        return _decoder(operation.name).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{operation.name}: the body is not as /openapi.json says: {error}") from None


def _too_large(operation: Operation, count: int) -> Rejected:
    message = f"{operation.name}: a body of {count} bytes or more, the limit is {operation.max_body_bytes}"
    return Rejected(413, "BodyTooLarge", message)


@cache
def _decoder(name: str) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(next(each.body for each in ALL_OPERATIONS if each.name == name))


@cache
def _document(secured: bool) -> bytes:
    return _encode(document(secured=secured))


_ROUTES: dict[str, dict[str, Operation]] = {}
for _each in ALL_OPERATIONS:
    _ROUTES.setdefault(_each.path, {})[_each.method] = _each
