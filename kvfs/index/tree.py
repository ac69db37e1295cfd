"""Ordered byte strings of any length over LMDB, whose own keys end at 511 bytes.

Responsibility: get, put, remove and seek by name inside the caller's transaction, in exact byte order across short and
long names. It knows no buckets and no values.

Layout: a name of fewer than 511 bytes is a key of `heads`. A longer one is cut: its first 511 bytes are a
key of `heads` whose value is a node id (8 bytes, big-endian), and the rest lives in `tails` under `node id +
rest`. A rest of 503 bytes or more is cut again in the same way. So every cost stays logarithmic where 100,000 names
of a deep directory share their first 511 bytes: one row with all of them would be rewritten for each.

Invariants:
- A key of full length (511 in `heads`, 8 + 503 in `tails`) is always a node; a shorter one is always a name.
  Hence a node sorts exactly where the names under it do.
- No node is empty: the last name out removes the node, upwards.
- `tails` key `bytes(8)` holds the last node id given out; ids start at 1 and are not reused.

Concurrency: none of its own; one transaction at a time, all from the service's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import lmdb

from kvfs.errors import Corrupt

Txn: TypeAlias = "lmdb.Transaction[bytes]"
HEAD_BYTES: Final = 511
"""LMDB's largest key as it is shipped. The cut is part of the format, not asked of the library."""
NODE_BYTES: Final = 8
TAIL_BYTES: Final = HEAD_BYTES - NODE_BYTES

_LAST_NODE: Final = bytes(NODE_BYTES)


class Found(NamedTuple):
    """A name and its value."""

    name: bytes
    value: bytes


class NameTree:
    """Read and change the two databases of a tree, in the transaction given."""

    def __init__(self, heads: lmdb._Database, tails: lmdb._Database) -> None:
        self.heads = heads
        self.tails = tails

    def get(self, txn: Txn, name: bytes) -> bytes | None:
        """Return the value of a name, or None."""
        if len(name) < HEAD_BYTES:
            return txn.get(name, db=self.heads)
        _, leaf = self._descend(txn, name)
        return None if leaf is None else txn.get(leaf, db=self.tails)

    def put(self, txn: Txn, name: bytes, value: bytes) -> bytes | None:
        """Store `value`; return the value that it replaced."""
        if len(name) < HEAD_BYTES:
            return txn.replace(name, value, db=self.heads)
        db, key, rest = self.heads, name[:HEAD_BYTES], name[HEAD_BYTES:]
        while True:
            node = txn.get(key, db=db)
            if node is None:
                node = self._new_node(txn)
                txn.put(key, node, db=db)
            db = self.tails
            if len(rest) < TAIL_BYTES:
                return txn.replace(node + rest, value, db=db)
            key, rest = node + rest[:TAIL_BYTES], rest[TAIL_BYTES:]

    def put_many(self, txn: Txn, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Store each value under its name."""
        with txn.cursor(db=self.heads) as cursor:
            cursor.putmulti([pair for pair in pairs if len(pair[0]) < HEAD_BYTES])
        for name, value in pairs:
            if len(name) >= HEAD_BYTES:
                self.put(txn, name, value)

    def remove(self, txn: Txn, name: bytes) -> bytes | None:
        """Remove the name; return its value."""
        if len(name) < HEAD_BYTES:
            return txn.pop(name, db=self.heads)
        steps, leaf = self._descend(txn, name)
        value = None if leaf is None else txn.pop(leaf, db=self.tails)
        if value is None:
            return None
        for db, key, node in reversed(steps):
            with txn.cursor(db=self.tails) as cursor:
                if cursor.set_range(node) and cursor.key().startswith(node):
                    break
            txn.delete(key, db=db)
        return value

    def _descend(
        self, txn: Txn, name: bytes
    ) -> tuple[list[tuple[lmdb._Database, bytes, bytes]], bytes | None]:
        """Return the nodes on the way to a long name as (database, key, node id), and its key in `tails`."""
        steps: list[tuple[lmdb._Database, bytes, bytes]] = []
        db, key, rest = self.heads, name[:HEAD_BYTES], name[HEAD_BYTES:]
        while True:
            node = txn.get(key, db=db)
            if node is None:
                return steps, None
            steps.append((db, key, node))
            if len(rest) < TAIL_BYTES:
                return steps, node + rest
            db, key, rest = self.tails, node + rest[:TAIL_BYTES], rest[TAIL_BYTES:]

    def _new_node(self, txn: Txn) -> bytes:
        last = txn.get(_LAST_NODE, db=self.tails) or _LAST_NODE
        node = (int.from_bytes(last, "big") + 1).to_bytes(NODE_BYTES, "big")
        txn.put(_LAST_NODE, node, db=self.tails)
        return node

    def first_in_node(self, txn: Txn, node: bytes, target: bytes) -> Found | None:
        """Return the first name at or after `target` among the rests under `node`."""
        if len(node) != NODE_BYTES:
            raise Corrupt(f"name index: a node of {len(node)} bytes instead of {NODE_BYTES}")
        with txn.cursor(db=self.tails) as cursor:
            found = cursor.set_range(node + target[:TAIL_BYTES])
            while found:
                key = cursor.key()
                if not key.startswith(node):
                    return None
                chunk = key[NODE_BYTES:]
                if len(chunk) < TAIL_BYTES:
                    return Found(chunk, cursor.value())
                rest = target[TAIL_BYTES:] if chunk == target[:TAIL_BYTES] else b""
                inner = self.first_in_node(txn, cursor.value(), rest)
                if inner is not None:
                    return Found(chunk + inner.name, inner.value)
                found = cursor.next()
        return None


class NameScan:
    """A forward cursor over a tree. `name` is valid after `seek` or `step` returned True."""

    def __init__(self, tree: NameTree, txn: Txn) -> None:
        self._tree = tree
        self._txn = txn
        self._cursor = txn.cursor(db=tree.heads)
        self._long_value: bytes | None = None
        self.name = b""

    def seek(self, target: bytes) -> bool:
        """Stand on the first name at or after `target`, which is not empty and may have any length."""
        found = self._cursor.set_range(target[:HEAD_BYTES])
        while found:
            head = self._cursor.key()
            if len(head) < HEAD_BYTES:
                self.name, self._long_value = head, None
                return True
            rest = target[HEAD_BYTES:] if head == target[:HEAD_BYTES] else b""
            inner = self._tree.first_in_node(self._txn, self._cursor.value(), rest)
            if inner is not None:
                self.name, self._long_value = head + inner.name, inner.value
                return True
            found = self._cursor.next()
        return False

    def step(self) -> bool:
        """Stand on the next name."""
        if self._long_value is not None:
            return self.seek(self.name + b"\0")
        if not self._cursor.next():
            return False
        head = self._cursor.key()
        if len(head) >= HEAD_BYTES:
            return self.seek(head)
        self.name = head
        return True

    def page(self, target: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """Return at most `count` names from `target` on, each with its value.

        Short names come from LMDB's own iterator, which is faster than `step`.
        """
        page: list[tuple[bytes, bytes]] = []
        found = self.seek(target)
        while found and len(page) < count:
            if self._long_value is not None:
                page.append((self.name, self._long_value))
                found = self.step()
                continue
            found = False
            for head, value in self._cursor.iternext():
                if len(head) >= HEAD_BYTES:
                    found = self.seek(head)
                    break
                page.append((head, value))
                if len(page) == count:
                    break
        return page

    def value(self) -> bytes:
        """Return the value of `name`."""
        return self._cursor.value() if self._long_value is None else self._long_value
