"""From an HTTP exchange to an operation and back: authentication, routing, rights, errors.

Responsibility: what every request goes through. Order: request id, signature, address, action, right, operation; so
nobody unauthenticated learns what is there, and no body is asked for before all of that.

Invariants: every exchange is answered once, or its connection closes. A failure is an S3 error document; one that
nobody foresaw is logged with its request id, and says no more than that. Signatures, keys and credentials are never
logged.

Concurrency: one task per exchange.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from gateway import (
    addressing,
    buckets,
    completing,
    configurations,
    copying,
    deleting,
    documents,
    listings,
    matching,
    multipart,
    reading,
    routing,
    signing,
    tagging,
    writing,
)
from gateway.backend import Backend
from gateway.calls import AnyAnswer, Call, Document, Documents, FileAnswer, HeadAnswer, Headers
from gateway.connection import BodyLost, Exchange
from gateway.counters import Counters
from gateway.errors import S3Error, from_kvfs
from gateway.front import Front
from gateway.large import LargeAnswer
from gateway.owners import Owners
from gateway.patience import patiently
from gateway.request import Request
from gateway.routing import Action, Operation, Right
from gateway.settings import GatewaySettings
from gateway.transports import Gone, Stalled
from gateway.upload_counts import UploadCounts
from gateway.uploads import all_uploads
from kvfs.credentials import RightName
from kvfs.errors import BucketNotFound, KvfsError

log = logging.getLogger("kvfs.gateway")

_OPERATIONS: dict[Operation, Callable[[Call], Awaitable[AnyAnswer | LargeAnswer]]] = {
    Operation.LIST_BUCKETS: buckets.list_buckets,
    Operation.CREATE_BUCKET: buckets.create_bucket,
    Operation.HEAD_BUCKET: buckets.head_bucket,
    Operation.DELETE_BUCKET: buckets.delete_bucket,
    Operation.GET_BUCKET_LOCATION: buckets.get_location,
    Operation.LIST_OBJECTS: listings.list_objects,
    Operation.LIST_OBJECTS_V2: listings.list_objects_v2,
    Operation.LIST_OBJECT_VERSIONS: listings.list_object_versions,
    Operation.LIST_MULTIPART_UPLOADS: multipart.list_uploads,
    Operation.DELETE_OBJECTS: deleting.delete_objects,
    Operation.MATCH: matching.match,
    Operation.GET_OBJECT: reading.get_object,
    Operation.HEAD_OBJECT: reading.head_object,
    Operation.PUT_OBJECT: writing.put_object,
    Operation.COPY_OBJECT: copying.copy_object,
    Operation.DELETE_OBJECT: writing.delete_object,
    Operation.GET_OBJECT_ATTRIBUTES: reading.get_object_attributes,
    Operation.GET_OBJECT_TAGGING: tagging.get_tagging,
    Operation.PUT_OBJECT_TAGGING: tagging.put_tagging,
    Operation.DELETE_OBJECT_TAGGING: tagging.delete_tagging,
    Operation.CREATE_MULTIPART_UPLOAD: multipart.create,
    Operation.UPLOAD_PART: multipart.upload_part,
    Operation.UPLOAD_PART_COPY: multipart.upload_part_copy,
    Operation.COMPLETE_MULTIPART_UPLOAD: completing.complete,
    Operation.ABORT_MULTIPART_UPLOAD: multipart.abort,
    Operation.LIST_PARTS: multipart.list_parts,
    Operation.GET_BUCKET_CONFIGURATION: configurations.get_configuration,
    Operation.GET_BUCKET_ACL: configurations.get_bucket_acl,
    Operation.PUT_BUCKET_ACL: configurations.put_bucket_acl,
    Operation.GET_BUCKET_TAGGING: tagging.get_bucket_tagging,
    Operation.PUT_BUCKET_TAGGING: tagging.put_bucket_tagging,
    Operation.DELETE_BUCKET_TAGGING: tagging.delete_bucket_tagging,
    Operation.GET_OBJECT_ACL: configurations.get_object_acl,
    Operation.PUT_OBJECT_ACL: configurations.put_object_acl,
}
_RIGHTS: dict[Right, RightName] = {Right.READ: "read", Right.WRITE: "write", Right.LIST: "list"}
_PLAIN = frozenset((Operation.GET_OBJECT, Operation.HEAD_OBJECT, Operation.PUT_OBJECT))
_MOST_ROUTES = 4_096
_SLOW = frozenset({Operation.COMPLETE_MULTIPART_UPLOAD, Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY})
"""Their answer may have to begin before they end; it is a document."""
_XML = ("Content-Type", "application/xml")


class _Route(NamedTuple):
    """What a request asks for, the right that it takes, and who does it under which name."""

    action: Action
    right: RightName | None
    operation: Callable[[Call], Awaitable[AnyAnswer | LargeAnswer]]
    name: str


class Handler:
    """The application of `gateway.connection`."""

    def __init__(
        self,
        backend: Backend,
        settings: GatewaySettings,
        *,
        counters: Counters | None = None,
        front: Front | None = None,
        owners: Owners | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: seconds since 1970, which signatures are checked against."""
        self.counters = counters or Counters()
        self._backend = backend
        self._owners = owners or Owners(backend)
        self._settings = settings
        self._front = front
        self._clock = clock
        self._next_id = secrets.randbits(64)
        self._documents = Documents()
        self._uploads = UploadCounts(partial(all_uploads, backend))
        self._routes: dict[tuple[str, bytes, str], _Route] = {}

    def replace_settings(self, settings: GatewaySettings) -> None:
        """For requests that begin from here on."""
        self._settings = settings
        self._routes.clear()
        if self._front is not None:
            self._front.forget()

    def refuse(self, status: int, message: str) -> tuple[Headers, bytes]:
        """The answer to what is no request."""
        code = {501: "NotImplemented", 431: "RequestHeaderSectionTooLarge"}.get(status, "BadRequest")
        request_id = self._request_id()
        self.counters.failed(code)
        body = documents.error(S3Error(code, message), "", request_id)
        return [("x-amz-request-id", request_id), _XML], body

    async def serve(self, exchange: Exchange) -> None:
        """Answer one exchange. Raises Gone, Stalled where the client is not there to be answered."""
        request_id = self._request_id()
        request = request_of(exchange)
        answer: AnyAnswer | LargeAnswer | None
        try:
            if exchange.plain is not None:
                self.counters.requests[Operation.PUT_OBJECT.value] += 1
                self.counters.front_writes += 1
                answer = await writing.put_plain(self._backend, exchange.plain, exchange)
            else:
                answer = await self._answer(exchange, request, request_id)
        except (S3Error, KvfsError, BodyLost, Stalled) as error:
            if isinstance(error, BodyLost | Stalled):
                exchange.keep_alive = False
            answer = self._failure(_as_s3(error, request), request, request_id)
        except Gone:
            raise
        except Exception:
            log.exception("request %s: %s failed", request_id, request.method)
            answer = self._failure(S3Error("InternalError"), request, request_id)
        if answer is not None:
            await self._send(exchange, answer, request_id)

    async def _answer(
        self, exchange: Exchange, request: Request, request_id: str
    ) -> AnyAnswer | LargeAnswer | None:
        """None where it is sent already."""
        settings = self._settings
        routing.refuse_unsigned(request)
        verified = signing.verify(request, settings.credentials, self._clock(), settings.region)
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
        self.counters.requests[name] += 1
        plain = action.operation in _PLAIN and not verified.presigned
        if self._front is not None and plain and settings is self._settings:
            self._front.learn(request, verified, settings)
        if action.operation in _SLOW:
            return await self._slowly(call, operation, exchange)
        return await operation(call)

    async def _slowly(
        self, call: Call, operation: Callable[[Call], Awaitable[AnyAnswer | LargeAnswer]], exchange: Exchange
    ) -> AnyAnswer | LargeAnswer | None:
        request_id = call.request_id

        def body_of(outcome: AnyAnswer | LargeAnswer | Exception) -> bytes:
            if isinstance(outcome, Document):
                return outcome.body
            assert isinstance(outcome, Exception), outcome
            if not isinstance(outcome, S3Error | KvfsError):
                log.error("request %s: %s failed", request_id, call.request.method, exc_info=outcome)
                outcome = S3Error("InternalError")
            failure = self._failure(_as_s3(outcome, call.request), call.request, request_id)
            assert isinstance(failure, Document)
            return failure.body

        headers = [("x-amz-request-id", request_id), ("x-amz-id-2", request_id), _XML]
        return await patiently(exchange, lambda: operation(call), headers, body_of)

    def _route(self, request: Request) -> _Route:
        """What is asked for; of plain reads, which no header changes, remembered."""
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
        found = _Route(action, _RIGHTS.get(wanted.right), _OPERATIONS[wanted], wanted.value)
        if key is not None:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            self._routes[key] = found
        return found

    def _failure(self, error: S3Error, request: Request, request_id: str) -> AnyAnswer:
        self.counters.failed(error.code)
        if error.status >= 500 and error.code not in ("NotImplemented", "InternalError"):
            log.warning("request %s: %s", request_id, error)
        headers = list(error.headers.items())
        if error.status == 304:
            return Document(304, headers)
        resource = request.raw_path.decode("latin-1")
        return Document(error.status, headers, documents.error(error, resource, request_id))

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
            if isinstance(answer, Document) and answer.body:
                headers.append(_XML)
            await exchange.respond(answer.status, headers, answer.body)

    def _request_id(self) -> str:
        self._next_id = (self._next_id + 1) & 0xFFFF_FFFF_FFFF_FFFF
        return f"{self._next_id:016X}"


def request_of(exchange: Exchange) -> Request:
    """The request as the pure modules see it."""
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
    raise AssertionError(error)
