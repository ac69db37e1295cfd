"""One request on its way through the gateway: the arguments of an operation, and its answer.

Responsibility: the values between `gateway.app.handler`, which speaks HTTP, and the operations, which do not: a call
in, an answer out. A body is read through `Body`, so operations run in tests without a socket.

Concurrency: one task per call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Protocol

from gateway.auth.credentials import check_right
from gateway.auth.sigv4 import Verified
from gateway.backend.backend import Backend
from gateway.backend.body_budget import Arriving
from gateway.backend.bucket_owners import Owners
from gateway.call.document_budget import DocumentBudget
from gateway.call.settings import GatewaySettings
from gateway.call.upload_counts import UploadCounts
from gateway.protocol import conditions
from gateway.protocol.action import Action, Operation
from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request
from kvfs._native.s3.receiver import Receiver
from kvfs.config.credentials import RightName
from kvfs.http.http_exchange import BodyRoom, Headers

_BUCKET_OWNER = b"x-amz-expected-bucket-owner"
_SOURCE_OWNER = b"x-amz-source-expected-bucket-owner"


class Body(Arriving, Protocol):
    """The bytes after a request's head."""

    async def receive_into(self, into: memoryview) -> int:
        """Receive at least one byte, 0 at the end."""
        ...

    async def receive_file(self, descriptor: int, receiver: Receiver, room: BodyRoom | None = None) -> bool:
        """Receive all of it into an empty file natively; return False, with nothing done, where that is not possible.

        `room`: the room that the file has in the tier, which grows on the way.
        """
        ...


@dataclass(slots=True)
class Answer:
    """A status, headers and a small body."""

    status: int = 200
    headers: Headers = ()
    body: bytes = b""
    is_xml: bool = False


def document_answer(status: int = 200, headers: Headers = (), body: bytes = b"") -> Answer:
    """Make an answer whose body is XML."""
    return Answer(status, headers, body, is_xml=True)


@dataclass(slots=True)
class FileAnswer:
    """Bytes of a sealed slot; the sender closes the descriptor, which is the lease."""

    status: int
    headers: Headers
    descriptor: int
    offset: int
    size_bytes: int

    def close(self) -> None:
        """Close the descriptor."""
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
    documents: DocumentBudget
    uploads: UploadCounts
    content_length: int | None
    """The length of the body on the wire; None where HTTP chunks it."""
    secure: bool = False
    _conditions: conditions.Conditions | None = field(default=None)

    @property
    def bucket(self) -> str:
        """Return the bucket of an action that has one."""
        assert self.action.bucket is not None
        return self.action.bucket

    @property
    def key(self) -> str:
        """Return the key of an action that has one."""
        assert self.action.key is not None
        return self.action.key

    @property
    def owner(self) -> str:
        """Return the id of who signed the request."""
        return self.verified.credential.owner_id

    @property
    def resource(self) -> str:
        """Return bucket and key as errors name them: `bucket/key`, the bucket alone, or nothing."""
        return "/".join(part for part in (self.action.bucket, self.action.key) if part is not None)

    @property
    def conditions(self) -> conditions.Conditions:
        """Return the request's conditions, parsed once. Raises S3Error."""
        if self._conditions is None:
            self._conditions = conditions.from_headers(self.request)
        return self._conditions

    async def need_right(self, right: RightName, bucket: str, *, of_source: bool = False) -> None:
        """Check a right on a bucket, and that its owner admits the caller; a bucket that is to be made has no owner.

        Raises S3Error AccessDenied (also where the bucket's owner is not the one that the request expects),
        NoSuchBucket for the gateway's own.
        """
        if bucket.startswith("."):
            raise S3Error("NoSuchBucket", detail={"BucketName": bucket})
        credential = self.verified.credential
        check_right(credential, right, bucket)
        if credential.rights is None and self.action.operation is not Operation.CREATE_BUCKET:
            await self.owners.check_entry(credential, bucket)
        expected = self.request.header(_SOURCE_OWNER if of_source else _BUCKET_OWNER)
        if expected is not None:
            await self.owners.check_expected(expected, bucket)


def no_such_key(key: str) -> S3Error:
    """Make the error of a key that is not there."""
    return S3Error("NoSuchKey", detail={"Key": key})
