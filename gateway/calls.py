"""One request on its way through the gateway: what an operation gets, and what it answers.

Responsibility: the values between `gateway.handler`, which speaks HTTP, and the operations, which do not: a call in,
an answer out. A body is read through `Body`, so operations run in tests without a socket.

Concurrency: one task per call.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gateway import bodies, conditions
from gateway.backend import Backend
from gateway.credentials import check_right
from gateway.errors import S3Error
from gateway.found import Found
from gateway.metadata import ObjectMetadata
from gateway.owners import Owners
from gateway.request import Request
from gateway.room import Holding
from gateway.routing import Action, Operation
from gateway.settings import GatewaySettings
from gateway.signing import Verified
from gateway.upload_counts import UploadCounts
from kvfs import limits
from kvfs._native.receiver import Receiver
from kvfs.credentials import RightName

Headers = Sequence[tuple[str, str]]
T = TypeVar("T")

_BUCKET_OWNER = b"x-amz-expected-bucket-owner"
_SOURCE_OWNER = b"x-amz-source-expected-bucket-owner"


class Body(Protocol):
    """The bytes after a request's head."""

    async def receive_into(self, into: memoryview) -> int:
        """At least one byte, 0 at the end."""
        ...

    async def receive_file(self, descriptor: int, receiver: Receiver, holding: Holding | None = None) -> bool:
        """All of it into an empty file, if that goes without Python; else nothing is done, and False. `holding`: its
        room, which grows on the way."""
        ...

    @property
    def received_bytes(self) -> int: ...

    @property
    def body_done(self) -> bool: ...

    def give_up(self) -> None:
        """End it as if it had stalled."""
        ...


class Held:
    """What is in hand of one document."""

    __slots__ = ("_documents", "_owner", "size_bytes")

    def __init__(self, documents: Documents, owner: str) -> None:
        self._documents = documents
        self._owner = owner
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Raises S3Error SlowDown."""
        self._documents.add(self._owner, size_bytes)
        self.size_bytes += size_bytes


class Documents:
    """The documents that a process has in hand, by owner: their bytes are bounded."""

    def __init__(self) -> None:
        self._by_owner: Counter[str] = Counter()

    def add(self, owner: str, size_bytes: int) -> None:
        """Raises S3Error SlowDown."""
        own = self._by_owner[owner] + size_bytes
        most = limits.DOCUMENTS_BYTES
        total = self._by_owner.total() + size_bytes
        if own > most // limits.OWNER_SHARE_OF_DOCUMENTS or total > most:
            raise S3Error(
                "SlowDown", "Documents of requests under way take all the memory there is for them."
            )
        self._by_owner[owner] = own

    @contextmanager
    def hold(self, owner: str) -> Iterator[Held]:
        held = Held(self, owner)
        try:
            yield held
        finally:
            self._by_owner[owner] -= held.size_bytes
            if not self._by_owner[owner]:
                del self._by_owner[owner]


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
    documents: Documents
    uploads: UploadCounts
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

    @asynccontextmanager
    async def read(self, document: bodies.Document[T]) -> AsyncIterator[T]:
        """What the body's document means; its memory counts until the context ends. Raises S3Error as the document
        does, SlowDown where others' documents take the memory there is for them, and what a checked body raises."""
        from gateway.receiving import DocumentSink, receive

        with self.documents.hold(self.owner) as held:
            await receive(self, DocumentSink(document, held))
            yield document.finish()


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
