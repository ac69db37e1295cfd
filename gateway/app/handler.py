"""From an HTTP exchange to an operation and back: authentication, routing, rights, errors.

Responsibility: what every request goes through. Order: request id, signature, address, action, right, operation; so
nobody unauthenticated learns what is there, and no body is asked for before all of that.

Invariants: every exchange is answered once, or its connection closes. A failure is answered with an S3 error document;
an internal one, unforeseen or of the store, shows the client nothing but the request id, under which the log has it
with its trace. Signatures, keys and credentials are never logged.

Concurrency: one task per exchange.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from gateway.app.fast_path import FastPath
from gateway.app.metrics import Counters
from gateway.app.slow_answers import stream_slow_answer
from gateway.auth import sigv4
from gateway.backend.backend import Backend
from gateway.backend.bucket_owners import Owners
from gateway.call.call import Answer, AnyAnswer, Call, FileAnswer, HeadAnswer, document_answer
from gateway.call.document_budget import DocumentBudget
from gateway.call.large_transfer import LargeAnswer
from gateway.call.settings import GatewaySettings
from gateway.call.upload_counts import UploadCounts
from gateway.operations import (
    bucket_configurations,
    buckets,
    complete_multipart,
    copy_object,
    delete_objects,
    get_object,
    list_objects,
    match_blocks,
    multipart,
    put_object,
    tagging,
)
from gateway.operations.uploads import all_uploads
from gateway.protocol import addressing, routing
from gateway.protocol.action import Action, Operation
from gateway.protocol.errors import S3Error, from_kvfs
from gateway.protocol.plain_put import PlainPut
from gateway.protocol.request import Request
from gateway.xml import responses
from kvfs.config.credentials import RightName
from kvfs.errors import BucketNotFound, KvfsError
from kvfs.http.http_exchange import BodyLost, Exchange, Headers
from kvfs.http.transports import Gone, Stalled

log = logging.getLogger("kvfs.gateway")

_OPERATIONS: dict[Operation, Callable[[Call], Awaitable[AnyAnswer | LargeAnswer]]] = {
    Operation.LIST_BUCKETS: buckets.list_buckets,
    Operation.CREATE_BUCKET: buckets.create_bucket,
    Operation.HEAD_BUCKET: buckets.head_bucket,
    Operation.DELETE_BUCKET: buckets.delete_bucket,
    Operation.GET_BUCKET_LOCATION: buckets.get_location,
    Operation.LIST_OBJECTS: list_objects.list_objects,
    Operation.LIST_OBJECTS_V2: list_objects.list_objects_v2,
    Operation.LIST_OBJECT_VERSIONS: list_objects.list_object_versions,
    Operation.LIST_MULTIPART_UPLOADS: multipart.list_uploads,
    Operation.DELETE_OBJECTS: delete_objects.delete_objects,
    Operation.MATCH: match_blocks.match,
    Operation.GET_OBJECT: get_object.get_object,
    Operation.HEAD_OBJECT: get_object.head_object,
    Operation.PUT_OBJECT: put_object.put_object,
    Operation.COPY_OBJECT: copy_object.copy_object,
    Operation.DELETE_OBJECT: put_object.delete_object,
    Operation.GET_OBJECT_ATTRIBUTES: get_object.get_object_attributes,
    Operation.GET_OBJECT_TAGGING: tagging.get_tagging,
    Operation.PUT_OBJECT_TAGGING: tagging.put_tagging,
    Operation.DELETE_OBJECT_TAGGING: tagging.delete_tagging,
    Operation.CREATE_MULTIPART_UPLOAD: multipart.create,
    Operation.UPLOAD_PART: multipart.upload_part,
    Operation.UPLOAD_PART_COPY: multipart.upload_part_copy,
    Operation.COMPLETE_MULTIPART_UPLOAD: complete_multipart.complete,
    Operation.ABORT_MULTIPART_UPLOAD: multipart.abort,
    Operation.LIST_PARTS: multipart.list_parts,
    Operation.GET_BUCKET_CONFIGURATION: bucket_configurations.get_configuration,
    Operation.GET_BUCKET_ACL: bucket_configurations.get_bucket_acl,
    Operation.PUT_BUCKET_ACL: bucket_configurations.put_bucket_acl,
    Operation.GET_BUCKET_TAGGING: tagging.get_bucket_tagging,
    Operation.PUT_BUCKET_TAGGING: tagging.put_bucket_tagging,
    Operation.DELETE_BUCKET_TAGGING: tagging.delete_bucket_tagging,
    Operation.GET_OBJECT_ACL: bucket_configurations.get_object_acl,
    Operation.PUT_OBJECT_ACL: bucket_configurations.put_object_acl,
}
_PLAIN = frozenset((Operation.GET_OBJECT, Operation.HEAD_OBJECT, Operation.PUT_OBJECT))
_MOST_ROUTES = 4_096
_SLOW = frozenset({Operation.COMPLETE_MULTIPART_UPLOAD, Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY})
"""Operations whose answer, a document, may have to begin before they end."""
_XML = ("Content-Type", "application/xml")


class _Route(NamedTuple):
    """What a request asks for, the right that it takes, and the function that does it with the operation's name."""

    action: Action
    right: RightName | None
    operation: Callable[[Call], Awaitable[AnyAnswer | LargeAnswer]]
    name: str


class Handler:
    """The application of `kvfs.http.connection`."""

    def __init__(
        self,
        backend: Backend,
        settings: GatewaySettings,
        *,
        counters: Counters,
        fast_path: FastPath,
        owners: Owners,
    ) -> None:
        self.counters = counters
        self._backend = backend
        self._owners = owners
        self._settings = settings
        self._fast_path = fast_path
        self._next_id = secrets.randbits(64)
        self._documents = DocumentBudget()
        self._uploads = UploadCounts(partial(all_uploads, backend))
        self._routes: dict[tuple[str, bytes, str], _Route] = {}

    def replace_settings(self, settings: GatewaySettings) -> None:
        """Replace the settings for all requests that begin from here on."""
        self._settings = settings
        self._routes.clear()
        self._fast_path.reset()

    def refuse(self, status: int, message: str) -> tuple[Headers, bytes]:
        """Return headers and body of the answer to bytes that are no request."""
        code = {501: "NotImplemented", 431: "RequestHeaderSectionTooLarge"}.get(status, "BadRequest")
        request_id = self._request_id()
        self.counters.failed(code)
        body = responses.error(S3Error(code, message), "", request_id)
        return [("x-amz-request-id", request_id), _XML], body

    async def serve(self, exchange: Exchange) -> None:
        """Answer one exchange. Raises Gone, Stalled where the client is not there to be answered."""
        began_s = time.perf_counter()
        try:
            await self._serve(exchange)
        finally:
            if exchange.operation:
                self.counters.latencies.observe(exchange.operation, time.perf_counter() - began_s)

    async def _serve(self, exchange: Exchange) -> None:
        request_id = self._request_id()
        request = request_of(exchange)
        answer: AnyAnswer | LargeAnswer | None
        try:
            if isinstance(exchange.recognised, PlainPut):
                self._count(exchange, Operation.PUT_OBJECT.value)
                self.counters.front_writes += 1
                answer = await put_object.put_plain(self._backend, exchange.recognised, exchange)
            else:
                answer = await self._answer(exchange, request, request_id)
        except Gone:
            raise
        except Exception as error:
            if isinstance(error, BodyLost | Stalled):
                exchange.keep_alive = False
            answer = self._failure(error, request, request_id)
        if answer is not None:
            await self._send(exchange, answer, request_id)

    async def _answer(
        self, exchange: Exchange, request: Request, request_id: str
    ) -> AnyAnswer | LargeAnswer | None:
        """Return the answer to a request; None where it was sent already."""
        settings = self._settings
        routing.refuse_unsigned(request)
        verified = sigv4.verify(request, settings.credentials, time.time(), settings.region)
        exchange.signed = True
        action, right, operation, name = self._route(request)
        head = exchange.head
        call = Call(
            request,
            action,
            verified,
            self._backend,
            self._owners,
            settings,
            exchange,
            request_id,
            self._documents,
            self._uploads,
            None if head.chunked else head.content_length,
            exchange.secure,
        )
        if right is not None:
            await call.need_right(right, call.bucket)
        self._count(exchange, name)
        plain = action.operation in _PLAIN and not verified.presigned
        if plain and settings is self._settings:
            self._fast_path.learn(request, verified, settings)
        if action.operation in _SLOW:
            return await self._slowly(call, operation, exchange)
        return await operation(call)

    def _count(self, exchange: Exchange, operation: str) -> None:
        exchange.operation = operation
        self.counters.requests[operation] += 1

    async def _slowly(
        self, call: Call, operation: Callable[[Call], Awaitable[AnyAnswer | LargeAnswer]], exchange: Exchange
    ) -> AnyAnswer | LargeAnswer | None:
        request_id = call.request_id

        def body_of(outcome: AnyAnswer | LargeAnswer | Exception) -> bytes:
            if isinstance(outcome, Answer):
                return outcome.body
            assert isinstance(outcome, Exception), outcome
            return self._failure(outcome, call.request, request_id).body

        headers = [("x-amz-request-id", request_id), ("x-amz-id-2", request_id), _XML]
        return await stream_slow_answer(exchange, lambda: operation(call), headers, body_of)

    def _route(self, request: Request) -> _Route:
        """Find what a request asks for, and remember it of plain reads, which no header changes."""
        settings = self._settings
        key = None
        if not request.raw_query and request.method in ("GET", "HEAD"):
            key = request.method, request.raw_path, request.host
            known = self._routes.get(key)
            if known is not None:
                return known
        address = addressing.resolve(request, settings.domains, settings.default_bucket)
        action = routing.route(request, address)
        wanted = action.operation
        found = _Route(action, wanted.right, _OPERATIONS[wanted], wanted.value)
        if key is not None:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            self._routes[key] = found
        return found

    def _failure(self, cause: Exception, request: Request, request_id: str) -> Answer:
        """Make the answer to a request that failed, and log what the answer does not say of the cause."""
        error = _as_s3(cause, request)
        self.counters.failed(error.code)
        if error.code == "InternalError":
            log.error("request %s: %s failed", request_id, request.method, exc_info=cause)
        elif error.status >= 500 and error.code != "NotImplemented":
            log.warning("request %s: %s: %s", request_id, error.code, cause)
        headers = list(error.headers.items())
        if error.status == 304:
            return document_answer(304, headers)
        resource = request.raw_path.decode("latin-1")
        return document_answer(error.status, headers, responses.error(error, resource, request_id))

    async def _send(self, exchange: Exchange, answer: AnyAnswer | LargeAnswer, request_id: str) -> None:
        headers = [("x-amz-request-id", request_id), ("x-amz-id-2", request_id), *answer.headers]
        if isinstance(answer, FileAnswer):
            try:
                await exchange.respond_file(
                    answer.status, headers, answer.descriptor, answer.offset, answer.size_bytes
                )
            finally:
                answer.close()
            self.counters.sent_bytes += answer.size_bytes
        elif isinstance(answer, LargeAnswer):
            try:
                await answer.send(exchange, headers)
            finally:
                answer.close()
            self.counters.sent_bytes += answer.size_bytes
        elif isinstance(answer, HeadAnswer):
            await exchange.respond_head(answer.status, headers, answer.size_bytes)
        else:
            if answer.is_xml and answer.body:
                headers.append(_XML)
            await exchange.respond(answer.status, headers, answer.body)

    def _request_id(self) -> str:
        self._next_id = (self._next_id + 1) & 0xFFFF_FFFF_FFFF_FFFF
        return f"{self._next_id:016X}"


def request_of(exchange: Exchange) -> Request:
    """Make the request as the pure modules see it."""
    head = exchange.head
    path, _, query = head.target.partition(b"?")
    host = next((value for name, value in head.headers if name == b"host"), b"")
    return Request(head.method, path, query, head.headers, host.decode("latin-1"), exchange.peer)


def _as_s3(error: Exception, request: Request) -> S3Error:
    match error:
        case S3Error():
            return error
        case BodyLost():
            return S3Error("IncompleteBody", str(error))
        case Stalled():
            return S3Error("RequestTimeout")
        case BucketNotFound():
            return S3Error("NoSuchBucket")
        case KvfsError():
            return from_kvfs(error, request.raw_path.decode("latin-1").lstrip("/"))
        case _:
            return S3Error("InternalError")
