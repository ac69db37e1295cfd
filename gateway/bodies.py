"""Documents that clients send, read strictly.

Responsibility: XML of CompleteMultipartUpload, DeleteObjects, PutObjectTagging and CreateBucket, the tags of a header,
and the JSON of `?match`. Invariants: the parser takes no DTD, so no entities of a document's own; a document is at most
MAX_XML_BODY_BYTES, which whoever receives it checks before it comes here; what has another root, misses an element or
has one twice is MalformedXML. Namespaces are not looked at, and elements that S3 may add are passed over.

Concurrency: pure functions; 1,000 keys to delete take 3 ms, 10,000 parts 90 ms, so that large documents are read in a
thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final
from urllib.parse import parse_qsl
from xml.etree.ElementTree import Element, ParseError

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import fromstring

from gateway import checksums
from gateway.checksums import Algorithm
from gateway.conditions import parse_size, parse_time
from gateway.errors import S3Error, argument
from gateway.etag import unquote
from gateway.request import is_escaped
from kvfs.limits import (
    MAX_DELETE_KEYS,
    MAX_MATCH_HASHES,
    MAX_PARTS,
    MAX_TAG_KEY_CHARACTERS,
    MAX_TAG_VALUE_CHARACTERS,
    MAX_TAGS,
    MAX_XML_BODY_BYTES,
)

_ALGORITHMS: Final = {algorithm.element: algorithm for algorithm in Algorithm}
_TAG_TEXT: Final = re.compile(r"[\w\s+\-=.:/@]*\Z")
_INTEGER: Final = re.compile(r"-?[0-9]+\Z")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class PartClaim:
    """A part as CompleteMultipartUpload names it."""

    number: int
    etag: str
    """Unquoted."""
    checksums: dict[Algorithm, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeleteClaim:
    """An object as DeleteObjects names it; the key is not checked."""

    key: str
    version_id: str | None = None
    etag: str | None = None
    size_bytes: int | None = None
    modified_s: int | None = None


@dataclass(frozen=True, slots=True)
class DeleteRequest:
    """What DeleteObjects asks for. `quiet`: only errors are answered."""

    objects: list[DeleteClaim]
    quiet: bool


def complete_multipart_upload(body: bytes) -> list[PartClaim]:
    """The parts in order. Raises S3Error MalformedXML, InvalidPartOrder, InvalidArgument, NotImplemented (checksum)."""
    parts = [_part(node) for node in _children(_root(body, "CompleteMultipartUpload"), "Part")]
    if not 1 <= len(parts) <= MAX_PARTS:
        raise _malformed(f"{len(parts)} parts: 1 to {MAX_PARTS} are possible.")
    if any(after.number <= before.number for before, after in pairwise(parts)):
        raise S3Error("InvalidPartOrder")
    return parts


def _part(node: Element) -> PartClaim:
    texts = _texts(node)
    number, etag = texts.get("PartNumber", "").strip(), texts.get("ETag")
    if etag is None or not _INTEGER.match(number):
        raise _malformed("A Part has a PartNumber and an ETag.")
    if len(number) > 10 or not 1 <= int(number) <= MAX_PARTS:
        raise S3Error(
            "InvalidArgument",
            f"A part number is an integer from 1 to {MAX_PARTS}.",
            detail={"ArgumentName": "PartNumber", "ArgumentValue": number},
        )
    return PartClaim(int(number), unquote(etag), _part_checksum(number, texts))


def _part_checksum(number: str, texts: dict[str, str]) -> dict[Algorithm, bytes]:
    """At most one. Raises S3Error InvalidArgument, NotImplemented."""
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


def delete(body: bytes) -> DeleteRequest:
    """What to delete. Raises S3Error MalformedXML (also for none, or more than 1,000 objects), InvalidArgument."""
    root = _root(body, "Delete")
    objects = []
    for node in _children(root, "Object"):
        texts = _texts(node)
        if not texts.get("Key"):
            raise _malformed("An Object has a Key.")
        objects.append(_delete_claim(texts))
    if not 1 <= len(objects) <= MAX_DELETE_KEYS:
        raise _malformed(f"{len(objects)} objects: 1 to {MAX_DELETE_KEYS} are possible.")
    quiet = [(node.text or "").strip().lower() for node in _children(root, "Quiet")]
    if len(quiet) > 1 or not set(quiet) <= {"true", "false", ""}:
        raise _malformed("Quiet is true or false, and given once.")
    return DeleteRequest(objects, quiet == ["true"])


def _delete_claim(texts: dict[str, str]) -> DeleteClaim:
    etag, size, time = (texts.get(name) for name in ("ETag", "Size", "LastModifiedTime"))
    return DeleteClaim(
        texts["Key"],
        texts.get("VersionId"),
        None if etag is None else unquote(etag),
        None if size is None else parse_size(size.strip(), "Size"),
        None if time is None else parse_time(time.strip(), "LastModifiedTime"),
    )


def tagging(body: bytes) -> dict[str, str]:
    """The tags of PutObjectTagging. Raises S3Error MalformedXML, InvalidTag, BadRequest (more than 10)."""
    sets = list(_children(_root(body, "Tagging"), "TagSet"))
    if len(sets) != 1:
        raise _malformed("Tagging has one TagSet.")
    pairs = []
    for node in _children(sets[0], "Tag"):
        texts = _texts(node)
        if "Key" not in texts or "Value" not in texts:
            raise _malformed("A Tag has a Key and a Value.")
        pairs.append((texts["Key"], texts["Value"]))
    return _tags(pairs)


def tagging_header(text: str) -> dict[str, str]:
    """`x-amz-tagging: a=1&b=2`. Raises S3Error InvalidArgument, InvalidTag, BadRequest (more than 10)."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_TAGS + 1)
    except ValueError:
        pairs = [("", "")]
    keys = [key for key, _ in pairs]
    if "" in keys or len(set(keys)) != len(keys) or not is_escaped(text):
        raise argument("x-amz-tagging", text, "Tags in a header are query parameters, each key once")
    return _tags(pairs)


def _tags(pairs: list[tuple[str, str]]) -> dict[str, str]:
    if len(pairs) > MAX_TAGS:
        raise S3Error("BadRequest", f"{len(pairs)} tags: an object has at most {MAX_TAGS}.")
    tags: dict[str, str] = {}
    for key, value in pairs:
        if key in tags:
            raise S3Error("InvalidTag", "A tag key is given twice.", detail={"TagKey": key})
        named = 1 <= len(key) <= MAX_TAG_KEY_CHARACTERS and not key.lower().startswith("aws:")
        if not named or not _TAG_TEXT.match(key):
            raise S3Error("InvalidTag", "The key of a tag is invalid.", detail={"TagKey": key})
        if len(value) > MAX_TAG_VALUE_CHARACTERS or not _TAG_TEXT.match(value):
            raise S3Error("InvalidTag", "The value of a tag is invalid.", detail={"TagValue": value})
        tags[key] = value
    return tags


def create_bucket_configuration(body: bytes) -> str | None:
    """The LocationConstraint; None without. Raises S3Error MalformedXML, NotImplemented (directory buckets, tags)."""
    if not body:
        return None
    texts = _texts(_root(body, "CreateBucketConfiguration"))
    for name in ("Location", "Bucket", "Tags"):
        if name in texts:
            raise S3Error("NotImplemented", f"{name} of a new bucket is not implemented.")
    return texts.get("LocationConstraint", "").strip() or None


def match(body: bytes) -> list[bytes]:
    """The prefix hashes of `?match`: `{"hashes": ["<32 hex>", ...]}` in order. Raises S3Error InvalidRequest."""
    try:
        hashes = json.loads(body)["hashes"]
        if len(hashes) <= MAX_MATCH_HASHES and all(_DIGEST.match(text) for text in hashes):
            return [bytes.fromhex(text) for text in hashes]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise S3Error(
        "InvalidRequest",
        f'The body is to be {{"hashes": [...]}} with at most {MAX_MATCH_HASHES} of 32 lower-case hex digits.',
    )


# --- XML -----------------------------------------------------------------------------------------------------
def _malformed(reason: str | None = None) -> S3Error:
    return S3Error("MalformedXML", reason)


def _root(body: bytes, name: str) -> Element:
    if len(body) > MAX_XML_BODY_BYTES:
        raise S3Error("MaxMessageLengthExceeded", f"A document has at most {MAX_XML_BODY_BYTES} bytes.")
    try:
        root: Element = fromstring(body, forbid_dtd=True)
    except (ParseError, DefusedXmlException, ValueError, LookupError):
        raise _malformed() from None
    if _name(root) != name:
        raise _malformed(f"The document is to be a {name}.")
    return root


def _name(node: Element) -> str:
    """Without its namespace."""
    return node.tag.rpartition("}")[2]


def _children(node: Element, name: str) -> Iterator[Element]:
    return (child for child in node if _name(child) == name)


def _texts(node: Element) -> dict[str, str]:
    """The text of each child, which has another name than the others."""
    found = {_name(child): child.text or "" for child in node}
    if len(found) != len(node):
        raise _malformed(f"An element of {_name(node)} is given twice.")
    return found
