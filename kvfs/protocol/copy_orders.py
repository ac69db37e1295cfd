"""A Conductor's orders to the stores of its nodes, as JSON: which blocks to fetch from peers, and which to evict next.

Responsibility: the form of an answer to `GET /v1/orders/TOPIC`, which `scheduler.conductor` gives and `tiers.remote`
reads. Fields that a reader does not know are skipped. Concurrency: values never change.

Needs the extra `server` (msgspec).
"""

from __future__ import annotations

import msgspec


class OrderedBlocks(msgspec.Struct, frozen=True):
    """Name blocks of one cache group."""

    namespace: str
    """The digest of their namespace, in hexadecimal; empty of windows and states, whose namespaces nodes alone know."""
    model: str
    """Of windows and states, in hexadecimal: what KV events have as `layers_of`."""
    group: int
    """Of windows and states: what KV events have as `group_idx`; else 0."""
    hashes: list[str]


class OrderedEviction(msgspec.Struct, frozen=True, kw_only=True):
    """Name blocks that others have, too, and that a node is to evict next."""

    id: str
    parts: list[OrderedBlocks]


class OrderedCopy(OrderedEviction, frozen=True, kw_only=True):
    """Name blocks that a node is to fetch from a peer, each part once it has those before."""

    peer: str
    """`HOST:PORT` of the peer's `[cluster] listen`."""


class NodeOrders(msgspec.Struct, frozen=True):
    """Name the open orders of a node; one that was carried out goes once its events say so."""

    orders: list[OrderedCopy]
    cool: list[OrderedEviction] = []
