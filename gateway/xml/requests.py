"""Documents that clients send, read strictly.

Responsibility: XML of CompleteMultipartUpload, DeleteObjects, PutObjectTagging, PutBucketTagging and CreateBucket, and
the JSON of `?match`. A `Document` takes bytes as they come and returns what they mean at the end, so a long one is
neither kept nor read in one go.

Invariants: a document is bounded by what S3 allows for its operation (`gateway.xml.reader`); what has another root,
misses an element or has one twice is MalformedXML. Elements that S3 may add are passed over.

Concurrency: one owner for each document; 1,000 keys to delete take 8 ms, 10,000 parts 100 ms, in many pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from gateway.protocol import checksums, tags
from gateway.protocol.checksums import Algorithm
from gateway.protocol.conditions import parse_size, parse_time
from gateway.protocol.errors import S3Error, argument
from gateway.protocol.etag import unquote
from gateway.xml.reader import Node, Shape, XmlReader, too_long
from gateway.xml.reader import malformed as _malformed
from kvfs.limits import (
    MAX_BUCKET_TAGS,
    MAX_DELETE_ELEMENTS,
    MAX_DELETE_KEYS,
    MAX_DOCUMENT_BYTES,
    MAX_MATCH_DOCUMENT_BYTES,
    MAX_MATCH_HASHES,
    MAX_PART_ELEMENTS,
    MAX_PARTS,
    MAX_SMALL_DOCUMENT_BYTES,
    MAX_SMALL_DOCUMENT_ELEMENTS,
    MAX_TAGS,
)

T = TypeVar("T", covariant=True)

_COMPLETE: Final = Shape("CompleteMultipartUpload", MAX_DOCUMENT_BYTES, MAX_PARTS * MAX_PART_ELEMENTS)
_DELETE: Final = Shape("Delete", MAX_DOCUMENT_BYTES, MAX_DELETE_KEYS * MAX_DELETE_ELEMENTS)
_TAGGING: Final = Shape("Tagging", MAX_SMALL_DOCUMENT_BYTES, MAX_SMALL_DOCUMENT_ELEMENTS)
_CREATE: Final = Shape("CreateBucketConfiguration", MAX_SMALL_DOCUMENT_BYTES, MAX_SMALL_DOCUMENT_ELEMENTS)

_ALGORITHMS: Final = {algorithm.element: algorithm for algorithm in Algorithm}
_INTEGER: Final = re.compile(r"-?[0-9]+\Z")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class PartReference:
    """A part as CompleteMultipartUpload names it."""

    number: int
    etag: str
    """Unquoted."""
    checksums: dict[Algorithm, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """An object as DeleteObjects names it; the key is not checked."""

    key: str
    version_id: str | None = None
    etag: str | None = None
    size_bytes: int | None = None
    modified_s: int | None = None


@dataclass(frozen=True, slots=True)
class DeleteRequest:
    """The request of a DeleteObjects; `quiet`: only errors are answered."""

    objects: list[ObjectReference]
    quiet: bool


class Document(Protocol[T]):
    """A body that is read as it comes. Its methods raise S3Error."""

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises S3Error."""

    def finish(self) -> T:
        """Return what the document means."""
        ...


class _Consumer(Protocol[T]):
    """A reader of a root's children."""

    def take(self, node: Node) -> None: ...

    def result(self) -> T: ...


class _Xml(Generic[T]):
    def __init__(self, shape: Shape, consumer: _Consumer[T], *, may_be_empty: bool = False) -> None:
        self._consumer = consumer
        self._reader = XmlReader(shape, consumer.take)
        self._is_document = not may_be_empty

    def feed(self, data: bytes) -> None:
        self._is_document = True
        self._reader.feed(data)

    def finish(self) -> T:
        if self._is_document:
            self._reader.finish()
        return self._consumer.result()


# --- parts ---------------------------------------------------------------------------------------------------
def complete_multipart_upload() -> Document[list[PartReference]]:
    """Read the parts in order.

    Raises S3Error MalformedXML, InvalidPartOrder, InvalidArgument, NotImplemented (checksum).
    """
    return _Xml(_COMPLETE, _Parts())


class _Parts:
    def __init__(self) -> None:
        self._parts: list[PartReference] = []

    def take(self, node: Node) -> None:
        if node.name != "Part":
            return
        part = _part(node)
        if len(self._parts) >= MAX_PARTS:
            raise _malformed(f"1 to {MAX_PARTS} parts are possible.")
        if self._parts and part.number <= self._parts[-1].number:
            raise S3Error("InvalidPartOrder")
        self._parts.append(part)

    def result(self) -> list[PartReference]:
        if not self._parts:
            raise _malformed(f"1 to {MAX_PARTS} parts are possible.")
        return self._parts


def _part(node: Node) -> PartReference:
    texts = _texts(node)
    number, etag = texts.get("PartNumber", "").strip(), texts.get("ETag")
    if etag is None or not _INTEGER.match(number):
        raise _malformed("A Part has a PartNumber and an ETag.")
    if len(number) > 10 or not 1 <= int(number) <= MAX_PARTS:
        raise argument("PartNumber", number, f"A part number is an integer from 1 to {MAX_PARTS}")
    return PartReference(int(number), unquote(etag), _part_checksum(number, texts))


def _part_checksum(number: str, texts: dict[str, str]) -> dict[Algorithm, bytes]:
    """Read at most one checksum. Raises S3Error InvalidArgument, NotImplemented."""
    found = {}
    for name, text in texts.items():
        if name in _ALGORITHMS:
            try:
                found[_ALGORITHMS[name]] = checksums.parse(_ALGORITHMS[name], text.strip())
            except S3Error:
                raise argument(name, text, f"The checksum of part {number} is invalid") from None
        elif name.startswith("Checksum"):
            raise S3Error("NotImplemented", f"{name} is not implemented.")
    if len(found) > 1:
        raise S3Error("InvalidArgument", f"Part {number} has more than one checksum.")
    return found


# --- deletions -----------------------------------------------------------------------------------------------
def delete() -> Document[DeleteRequest]:
    """Read what to delete. Raises S3Error MalformedXML (also for none, or more than 1,000 objects), InvalidArgument."""
    return _Xml(_DELETE, _Deletions())


class _Deletions:
    def __init__(self) -> None:
        self._objects: list[ObjectReference] = []
        self._quiet: bool | None = None

    def take(self, node: Node) -> None:
        if node.name == "Object":
            texts = _texts(node)
            if not texts.get("Key"):
                raise _malformed("An Object has a Key.")
            if len(self._objects) >= MAX_DELETE_KEYS:
                raise _malformed(f"1 to {MAX_DELETE_KEYS} objects are possible.")
            self._objects.append(_object_reference(texts))
        elif node.name == "Quiet":
            text = node.text.strip().lower()
            if self._quiet is not None or text not in ("true", "false", ""):
                raise _malformed("Quiet is true or false, and given once.")
            self._quiet = text == "true"

    def result(self) -> DeleteRequest:
        if not self._objects:
            raise _malformed(f"1 to {MAX_DELETE_KEYS} objects are possible.")
        return DeleteRequest(self._objects, self._quiet is True)


def _object_reference(texts: dict[str, str]) -> ObjectReference:
    etag, size, time = (texts.get(name) for name in ("ETag", "Size", "LastModifiedTime"))
    return ObjectReference(
        texts["Key"],
        texts.get("VersionId"),
        None if etag is None else unquote(etag),
        None if size is None else parse_size(size.strip(), "Size"),
        None if time is None else parse_time(time.strip(), "LastModifiedTime"),
    )


# --- tags ----------------------------------------------------------------------------------------------------
def tagging() -> Document[dict[str, str]]:
    """Read the tags of an object. Raises S3Error MalformedXML, InvalidTag, BadRequest (more than 10)."""
    return _Xml(_TAGGING, _TagSet(MAX_TAGS))


def bucket_tagging() -> Document[dict[str, str]]:
    """Read the tags of a bucket. Raises S3Error MalformedXML, InvalidTag, BadRequest (more than 50)."""
    return _Xml(_TAGGING, _TagSet(MAX_BUCKET_TAGS))


class _TagSet:
    def __init__(self, most: int) -> None:
        self._most = most
        self._sets: list[Node] = []

    def take(self, node: Node) -> None:
        if node.name == "TagSet":
            self._sets.append(node)

    def result(self) -> dict[str, str]:
        if len(self._sets) != 1:
            raise _malformed("Tagging has one TagSet.")
        pairs = []
        for node in _children(self._sets[0], "Tag"):
            texts = _texts(node)
            if "Key" not in texts or "Value" not in texts:
                raise _malformed("A Tag has a Key and a Value.")
            pairs.append((texts["Key"], texts["Value"]))
        return tags.check(pairs, self._most)


# --- buckets -------------------------------------------------------------------------------------------------
def create_bucket_configuration() -> Document[str | None]:
    """Read the LocationConstraint; None without.

    Raises S3Error MalformedXML, NotImplemented (directory buckets, tags).
    """
    return _Xml(_CREATE, _Location(), may_be_empty=True)


class _Location:
    def __init__(self) -> None:
        self._found: list[str] = []

    def take(self, node: Node) -> None:
        if node.name in ("Location", "Bucket", "Tags"):
            raise S3Error("NotImplemented", f"{node.name} of a new bucket is not implemented.")
        if node.name == "LocationConstraint":
            if self._found:
                raise _malformed("LocationConstraint is given twice.")
            self._found.append(node.text.strip())

    def result(self) -> str | None:
        return self._found[0] or None if self._found else None


# --- matching ------------------------------------------------------------------------------------------------
def match() -> Document[list[bytes]]:
    """Read the prefix hashes of `?match`: `{"hashes": ["<32 hex>", ...]}` in order. Raises S3Error InvalidRequest,
    MaxMessageLengthExceeded."""
    return _Match()


class _Match:
    def __init__(self) -> None:
        self._body = bytearray()

    def feed(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > MAX_MATCH_DOCUMENT_BYTES:
            raise too_long(MAX_MATCH_DOCUMENT_BYTES)

    def finish(self) -> list[bytes]:
        # What is no such document is refused before it is read: a list of lists would take a hundred times its bytes.
        body = self._body
        if body.count(b"{") + body.count(b"[") <= _MATCH_BRACKETS and body.count(b",") < MAX_MATCH_HASHES:
            try:
                hashes = json.loads(body)["hashes"]
                if all(_DIGEST.match(text) for text in hashes):
                    return [bytes.fromhex(text) for text in hashes]
            except (ValueError, TypeError, KeyError):
                pass
        raise S3Error(
            "InvalidRequest",
            f'The body is to be {{"hashes": [...]}} with at most {MAX_MATCH_HASHES} of 32 lower-case hex digits.',
        )


_MATCH_BRACKETS: Final = 2


# --- nodes ---------------------------------------------------------------------------------------------------
def _children(node: Node, name: str) -> Iterator[Node]:
    return (child for child in node.children if child.name == name)


def _texts(node: Node) -> dict[str, str]:
    """Return the text of each child, which has another name than the others."""
    found = {child.name: child.text for child in node.children}
    if len(found) != len(node.children):
        raise _malformed(f"An element of {node.name} is given twice.")
    return found
