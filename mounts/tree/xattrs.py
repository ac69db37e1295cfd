"""Extended attributes of the mount: figures of an object, and its pin.

| name | where | value |
|---|---|---|
| `user.kvfs.tier` | files | where the bytes are: `dram`, `nvme`, `cold`, or `draft` while being written |
| `user.kvfs.hits` | files | how often the object was opened or read |
| `user.kvfs.state` | files | `sealed` or `draft` |
| `user.kvfs.pin` | files, writable | `1` or `0`: a pinned object is never evicted |
| `user.kvfs.socket` | the root | path of the session socket |
| `user.kvfs.class` | buckets | `cache` or `durable` |
| `user.kvfs.large` | buckets, writable | `1` or `0`: whether files may be larger than DRAM takes |
| `user.kvfs.namespace` | buckets, writable once | the namespace's digest in hex; set as its JSON description |

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import InvalidRequest, NoAttribute, NotPermitted, Unsupported
from kvfs.keys import Namespace
from mounts.kernel.nodes import Node, NodeTable
from tiers.model.objects import Bucket
from tiers.store.store import Store

PREFIX = b"user.kvfs."
LARGE_NAME = PREFIX + b"large"


@dataclass(eq=False)
class ExtendedAttributes:
    """Extended attributes, read and set by node."""

    _store: Store
    _nodes: NodeTable
    _socket: Path | None

    def get(self, node: Node, name: bytes) -> bytes:
        """Read an attribute. Raises NoAttribute."""
        value = self.all(node).get(name)
        if value is None:
            raise NoAttribute(f"no attribute {name.decode(errors='replace')}")
        return value()

    def list(self, node: Node) -> list[bytes]:
        """List the attributes that `cp -a` and `mv` should copy: a pin. The others only inform (as on CephFS)."""
        return [PREFIX + b"pin"] if not node.directory and self._pinned(node) else []

    def all(self, node: Node) -> dict[bytes, Callable[[], bytes]]:
        """Return the node's attributes, each read only when asked for."""
        if node.parent is None:
            return {PREFIX + b"socket": lambda: str(self._socket).encode()} if self._socket else {}
        if node.directory:
            return self._of_bucket(self._store.bucket(node.component)) if node.parent.parent is None else {}
        return {
            PREFIX + b"tier": lambda: node.info.tier.encode() if node.info else b"draft",
            PREFIX + b"hits": lambda: str(self._hits(node)).encode(),
            PREFIX + b"state": lambda: b"draft" if node.draft else b"sealed",
            PREFIX + b"pin": lambda: b"1" if self._pinned(node) else b"0",
        }

    @staticmethod
    def _of_bucket(bucket: Bucket) -> dict[bytes, Callable[[], bytes]]:
        found = {
            PREFIX + b"class": lambda: b"durable" if bucket.durable else b"cache",
            LARGE_NAME: lambda: b"1" if bucket.large else b"0",
        }
        namespace = bucket.namespace
        if namespace is not None:
            found[PREFIX + b"namespace"] = lambda: namespace.hex().encode()
        return found

    def _hits(self, node: Node) -> int:
        entry = self._store.table.get(node.info.key.digest) if node.info else None
        return entry.hits if entry else 0

    @staticmethod
    def _pinned(node: Node) -> bool:
        return node.draft.pinned if node.draft else bool(node.info and node.info.pinned)

    def set(self, node: Node, name: bytes, value: bytes) -> None:
        """Set an attribute. Raises Unsupported for a foreign name, NotPermitted for one that only informs."""
        if not name.startswith(PREFIX):
            raise Unsupported(f"attribute {name.decode(errors='replace')}: only user.kvfs.* exist here")
        if name == PREFIX + b"pin" and not node.directory:
            self._set_pin(node, value)
        elif name == PREFIX + b"namespace" and _is_bucket(node):
            self._store.set_bucket(node.component, namespace=Namespace.from_json(value))
        elif name == LARGE_NAME and _is_bucket(node):
            self._store.set_bucket(node.component, large=_flag(name, value))
        else:
            raise NotPermitted(f"attribute {name.decode(errors='replace')} cannot be set here")

    def _set_pin(self, node: Node, value: bytes) -> None:
        pinned = _flag(PREFIX + b"pin", value)
        if node.draft is not None:
            node.draft.pinned = pinned
        elif node.linked:
            self._store.set_attributes(self._nodes.name(node), pinned=pinned)


def _is_bucket(node: Node) -> bool:
    return node.parent is not None and node.parent.parent is None


def _flag(name: bytes, value: bytes) -> bool:
    if value.strip() not in (b"0", b"1"):
        raise InvalidRequest(f"{name.decode()} is 0 or 1, not {value[:16]!r}")
    return value.strip() == b"1"
