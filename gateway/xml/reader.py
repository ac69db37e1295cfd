"""XML documents of strangers, read as their bytes come, within bounds.

Responsibility: bytes in, the children of the root out, one at a time, each a small tree that its taker owns. What no
operation of S3 needs is refused where it begins: a DTD (and so entities of a document's own), depth, long texts and
tags, more elements than the operation has, and documents longer than it takes.

Invariants: a reader holds one child of the root, and 64 KiB of what is not parsed. No object here refers to itself, so
all of it is freed with its last reference, without a collector. Namespaces are not looked at.

Concurrency: one owner; `feed` takes 0.3 ms of 4 KiB at the worst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from xml.parsers import expat

from gateway.protocol.errors import S3Error
from kvfs.limits import MAX_XML_DEPTH, MAX_XML_TEXT_CHARACTERS, MAX_XML_TOKEN_BYTES


def malformed(reason: str | None = None) -> S3Error:
    """Make the error of a document that is not what the operation takes."""
    return S3Error("MalformedXML", reason)


@dataclass(slots=True)
class Node:
    """An element; its text is that before its first child."""

    name: str
    text: str = ""
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shape:
    """The root and the bounds of an operation's document."""

    root: str
    most_bytes: int
    most_elements: int


class XmlReader:
    """See the module's header."""

    def __init__(self, shape: Shape, take: Callable[[Node], None]) -> None:
        """Begin a document; `take` is called with each complete child of the root, and may raise S3Error."""
        self._shape = shape
        self._fed_bytes = 0
        builder = _Builder(shape, take)
        self._parser = parser = expat.ParserCreate(namespace_separator="}")
        parser.buffer_text = True
        parser.StartElementHandler = builder.start
        parser.EndElementHandler = builder.end
        parser.CharacterDataHandler = builder.text
        parser.StartDoctypeDeclHandler = _refuse_doctype

    def feed(self, data: bytes) -> None:
        """Parse more of the document. Raises S3Error MalformedXML, MaxMessageLengthExceeded, and what `take` raises."""
        self._fed_bytes += len(data)
        if self._fed_bytes > self._shape.most_bytes:
            raise too_long(self._shape.most_bytes)
        self._parse(data, False)
        if self._fed_bytes - self._parser.CurrentByteIndex > MAX_XML_TOKEN_BYTES:
            raise malformed(f"A tag or comment has at most {MAX_XML_TOKEN_BYTES} bytes.")

    def finish(self) -> None:
        """End the document. Raises as `feed`."""
        self._parse(b"", True)

    def _parse(self, data: bytes, final: bool) -> None:
        try:
            self._parser.Parse(data, final)
        except (expat.ExpatError, ValueError, LookupError):
            raise malformed() from None


def too_long(most_bytes: int) -> S3Error:
    """Make the error of a document over the operation's limit."""
    return S3Error("MaxMessageLengthExceeded", f"This operation's document has at most {most_bytes} bytes.")


def _refuse_doctype(*_: object) -> None:
    raise malformed("A document type is not taken.")


class _Builder:
    """The elements that are open, outermost first."""

    __slots__ = ("_elements_left", "_open", "_root", "_take", "_text_left")

    def __init__(self, shape: Shape, take: Callable[[Node], None]) -> None:
        self._root = shape.root
        self._elements_left = shape.most_elements
        self._text_left = MAX_XML_TEXT_CHARACTERS
        self._open: list[Node] = []
        self._take = take

    def start(self, name: str, _: object) -> None:
        node = Node(name.rpartition("}")[2])
        self._elements_left -= 1
        if self._elements_left < 0:
            raise malformed("The document has more elements than this operation takes.")
        if not self._open and node.name != self._root:
            raise malformed(f"The document is to be a {self._root}.")
        if len(self._open) >= MAX_XML_DEPTH:
            raise malformed(f"Elements are at most {MAX_XML_DEPTH} deep.")
        if len(self._open) > 1:
            self._open[-1].children.append(node)
        self._open.append(node)
        self._text_left = MAX_XML_TEXT_CHARACTERS

    def text(self, data: str) -> None:
        node = self._open[-1]
        if len(self._open) == 1 or node.children:
            return
        self._text_left -= len(data)
        if self._text_left < 0:
            raise malformed(f"The text of {node.name} is over {MAX_XML_TEXT_CHARACTERS} characters.")
        node.text += data

    def end(self, _: str) -> None:
        node = self._open.pop()
        if len(self._open) == 1:
            self._take(node)
