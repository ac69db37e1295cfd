"""One request on its way through the gateway: what an operation gets, and what it answers.

Responsibility: the values between `gateway.handler`, which speaks HTTP, and the operations, which do not: a call in,
an answer out. A body is read through `Body`, so operations run in tests without a socket.

Concurrency: one task per call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway import conditions
from gateway.backend import Backend
from gateway.credentials import check_right
from gateway.errors import S3Error
from gateway.found import Found
from gateway.metadata import ObjectMetadata
from gateway.owners import Owners
from gateway.request import Request
from gateway.routing import Action, Operation
from gateway.settings import GatewaySettings
from gateway.signing import Verified
from kvfs import limits
from kvfs._native.receiver import Receiver
from kvfs.credentials import RightName

Headers = Sequence[tuple[str, str]]

_BUCKET_OWNER = b"x-amz-expected-bucket-owner"
_SOURCE_OWNER = b"x-amz-source-expected-bucket-owner"


class Body(Protocol):
    """The bytes after a request's head."""

    async def receive_into(self, into: memoryview) -> int:
        """At least one byte, 0 at the end."""
        ...

    async def receive_file(self, descriptor: int, receiver: Receiver) -> bool:
        """All of it into an empty file, if that goes without Python; else nothing is done, and False."""
        ...


@dataclass(slots=True)
class Answer:
    """A status, headers and a small body."""

    status: int = 200
    headers: Headers = ()
    body: bytes = b""


@dataclass(slots=True)
class Document(Answer):
    """An answer whose body is XML."""


@dataclass(slots=True)
class FileAnswer:
    """Bytes of a sealed slot; whoever sends it closes the descriptor, which is the lease."""

    status: int
    headers: Headers
    descriptor: int
    offset: int
    size_bytes: int

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(slots=True)
class HeadAnswer:
    """The headers of what a GET would bring."""

    status: int
    headers: Headers
    size_bytes: int


AnyAnswer = Answer | FileAnswer | HeadAnswer


@dataclass(slots=True)
class Call:
    """An authenticated request."""

    request: Request
    action: Action
    verified: Verified
    backend: Backend
    owners: Owners
    settings: GatewaySettings
    body: Body
    request_id: str
    content_length: int | None
    """Of the body on the wire; None where HTTP chunks it."""
    secure: bool = False
    _conditions: conditions.Conditions | None = field(default=None)

    @property
    def bucket(self) -> str:
        assert self.action.bucket is not None
        return self.action.bucket

    @property
    def key(self) -> str:
        assert self.action.key is not None
        return self.action.key

    @property
    def owner(self) -> str:
        return self.verified.credential.owner_id

    @property
    def resource(self) -> str:
        return "/".join(part for part in (self.action.bucket, self.action.key) if part is not None)

    @property
    def conditions(self) -> conditions.Conditions:
        if self._conditions is None:
            self._conditions = conditions.from_headers(self.request)
        return self._conditions

    async def need_right(self, right: RightName, bucket: str, *, of_source: bool = False) -> None:
        """Raises S3Error AccessDenied (also where the bucket's owner is not the one that the request expects),
        NoSuchBucket for the gateway's own. A bucket that is to be made has no owner who could refuse."""
        if bucket.startswith("."):
            raise S3Error("NoSuchBucket", detail={"BucketName": bucket})
        credential = self.verified.credential
        check_right(credential, right, bucket)
        if credential.rights is None and self.action.operation is not Operation.CREATE_BUCKET:
            await self.owners.check_entry(credential, bucket)
        expected = self.request.header(_SOURCE_OWNER if of_source else _BUCKET_OWNER)
        if expected is not None:
            await self.owners.check_expected(expected, bucket)

    async def read_document(self) -> bytes:
        """A body of XML or JSON, whole. Raises S3Error EntityTooLarge, and what a checked body raises."""
        from gateway.receiving import MemorySink, receive

        sink = MemorySink(limits.MAX_XML_BODY_BYTES)
        await receive(self, sink)
        return bytes(sink.data)


def no_such_key(key: str) -> S3Error:
    return S3Error("NoSuchKey", detail={"Key": key})


@dataclass(frozen=True, slots=True)
class Stored:
    """An object with its metadata read."""

    found: Found
    metadata: ObjectMetadata
    etag: str
    inline: bytes = b""
    """The body, where the object is a marker."""

    @property
    def size_bytes(self) -> int:
        return len(self.inline) if self.found.marker else self.found.size_bytes

    @property
    def modified_s(self) -> int:
        return self.found.mtime_ns // 1_000_000_000
