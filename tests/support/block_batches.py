"""Blocks of a namespace over a client's own session: the protocol's batches, each as one call that answers in the order
of its arguments. Engines have `Client.blocks`, which reads in place and keeps sessions of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from kvfs import limits
from kvfs.client import Client
from kvfs.client.exchange import DraftFile, Exchange, check
from kvfs.errors import NotFound, status_error
from kvfs.namespaces import Namespace
from kvfs.protocol.messages import NO_PARENT, BlockSeal, DigestBatch, Op, SealBlocks


@dataclass(frozen=True, slots=True)
class Block:
    """A block to put: its prefix hash (16 bytes), its bytes, and the prefix hash of the block before it."""

    digest: bytes
    data: bytes
    parent: bytes | None = None


@dataclass(frozen=True, slots=True)
class BlockBatches:
    """An open namespace. It ends with the session that it was opened in."""

    exchange: Exchange
    digest: bytes
    bucket: str
    handle: int

    def match(self, digests: Sequence[bytes]) -> int:
        """Return how many blocks are there without a gap from the first on."""
        return self.exchange.count(self._batch(Op.MATCH, digests))

    def touch(self, digests: Sequence[bytes]) -> int:
        """Count hits; return how many of the blocks were there."""
        return self.exchange.count(self._batch(Op.TOUCH, digests))

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks, parents first; True where the block is new. Raises the error of the first that failed."""
        drafts: list[DraftFile] = []
        seals = []
        try:
            for block in blocks:
                draft = self.exchange.reserve(len(block.data))
                drafts.append(draft)
                draft.write(memoryview(block.data))
                checksum, parent = xxhash.xxh3_64_intdigest(block.data), block.parent or NO_PARENT
                seals.append(BlockSeal(draft.slot, draft.generation, block.digest, parent, checksum))
            results = self.exchange.results(SealBlocks(self.handle, tuple(seals)))
            for block, result in zip(blocks, results, strict=True):
                if result.status != errno.EEXIST:
                    check(result, block.digest.hex())
        except BaseException:
            for draft in drafts:
                self.exchange.abort(draft)
            raise
        return [result.status == 0 for result in results]

    def get(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the blocks' bytes, None for a miss."""
        return [self._get(digest) for digest in digests]

    def _get(self, digest: bytes) -> bytes | None:
        [(entry, descriptor)] = self.exchange.open(self._batch(Op.OPEN_BLOCK, [digest]))
        if descriptor is None:
            error = status_error(entry.status, digest.hex())
            if isinstance(error, NotFound):
                return None
            raise error
        try:
            return os.pread(descriptor, entry.size_bytes, 0)
        finally:
            os.close(descriptor)

    def remove(self, digests: Sequence[bytes]) -> int:
        """Remove blocks; return how many were there."""
        removed = 0
        for result in self.exchange.results(self._batch(Op.REMOVE_BLOCK, digests)):
            if result.status != errno.ENOENT:
                check(result, "removing blocks")
                removed += 1
        return removed

    def _batch(self, op: Op, digests: Sequence[bytes]) -> DigestBatch:
        assert len(digests) <= limits.MAX_BATCH
        return DigestBatch(op, self.handle, b"".join(digests))


def open_blocks(
    client: Client,
    namespace: Namespace | Mapping[str, Any] | None = None,
    *,
    digest: bytes | None = None,
    bucket: str | None = None,
) -> BlockBatches:
    """Open the bucket that is bound to a namespace or a digest, in the client's session."""
    arguments: dict[str, Any] = {"bucket": bucket} if bucket is not None else {}
    if digest is not None:
        arguments["digest"] = digest.hex()
    else:
        assert namespace is not None
        described = namespace.as_mapping() if isinstance(namespace, Namespace) else dict(namespace)
        arguments["description"] = described
    exchange = client._exchange
    found = exchange.control(Op.OPEN_NAMESPACE, **arguments)
    return BlockBatches(exchange, bytes.fromhex(found["digest"]), found["bucket"]["name"], found["handle"])
