"""Blocks in a GPU's memory that processes of one uid share: leased, and added, by their prefix hashes.

Responsibility: one process's place in a pool of the service: find blocks and lease them, reserve drafts and seal them,
map segments as they are needed. Bytes are the caller's to copy, on the device, and checksums to compute there.

Invariants:
- What is leased is not reused until `release`, which the caller calls once no copy from it is under way.
- A draft is sealed, or aborted, once the device has completed what was started into it.
- A pool whose session is lost stays lost: what is mapped stays so until `close`. No call waits longer than its timeout.

Concurrency: any thread; segments are mapped one at a time. `close` comes after all other calls. A forked child makes a
place of its own.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvfs import limits
from kvfs._native.cuda.driver import Context, Driver, Mapping
from kvfs._native.hbm.hazards import ClientHazards
from kvfs.client.exchange import Exchange
from kvfs.client.session import batches, digests_text, split_keys
from kvfs.client.transport import Deadline, Transport, close_all
from kvfs.errors import Busy, KvfsError, Superseded
from kvfs.protocol.messages import Op

Left = deque[str]
"""Tokens of places that this process has left, which the service has not been told of: one for all places."""


def no_places() -> Left:
    """Return an empty list for the places that will be left: there are no more than HBM_CLIENTS at once."""
    return deque(maxlen=limits.HBM_CLIENTS)


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """Describes a block that is leased."""

    key: bytes
    slot: int
    generation: int
    address: int
    size_bytes: int
    checksum: int
    """XXH3-64 with which it was sealed."""
    lease: int


@dataclass(frozen=True, slots=True)
class PoolDraft:
    """Describes a draft of a block, and where its bytes are to be."""

    key: bytes
    slot: int
    generation: int
    address: int
    size_bytes: int


class DevicePool:
    """See the module's header; `attach_pool` makes it."""

    def __init__(
        self,
        transport: Transport,
        namespace: dict[str, Any],
        driver: Driver,
        context: Context,
        left: Left,
        deadline: Deadline,
    ) -> None:
        """Attach to the pool of the context's device; the transport is then this object's. Raises what the service
        answers."""
        self._transport, self._driver, self._context, self._left = transport, driver, context, left
        self._mapping = threading.Lock()
        self._mapped: dict[int, Mapping] = {}
        exchange = Exchange(transport, deadline.left_s)
        self._handle = exchange.control(Op.OPEN_NAMESPACE, **namespace)["handle"]
        self._token = secrets.token_hex(limits.HBM_TOKEN_BYTES)
        attached, descriptors = self._attach(exchange)
        try:
            generations, hazards = descriptors
            self._hazards = ClientHazards(generations, hazards)
        finally:
            close_all(descriptors)
        self._segment_bytes = int(attached["segment_bytes"])
        self._forget(self._token)

    def _attach(self, exchange: Exchange) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Ask for a place, and tell of those that were left; one that was not answered counts among these."""
        told = list(self._left)
        self._left.append(self._token)
        try:
            answer = exchange.described(
                Op.HBM_ATTACH,
                device=self._context.device.uuid,
                token=self._token,
                left=[[token] for token in told],
            )
        except KvfsError:
            if self._transport.is_open:  # it was refused
                self._forget(self._token)
            raise
        self._forget(*told)
        return answer

    def _forget(self, *tokens: str) -> None:
        for token in tokens:
            with suppress(ValueError):
                self._left.remove(token)

    @property
    def is_open(self) -> bool:
        """Return whether the session is there; once it is not, only `release` and `close` make sense."""
        return self._transport.is_open

    @property
    def regions(self) -> list[tuple[int, int]]:
        """Return what is mapped: (address, bytes)."""
        return [(mapping.address, mapping.size_bytes) for mapping in list(self._mapped.values())]

    def lease(self, keys: bytes, *, timeout_s: float) -> list[PoolBlock | None]:
        """Lease the blocks that are in the pool; None for each other one. Raises SessionClosed, DeadlinePassed, what
        `kvfs.errors.from_cuda` does; then nothing is leased."""
        exchange, leased = Exchange(self._transport, timeout_s), list[PoolBlock | None]()
        try:
            for some in batches(keys, limits.MAX_BATCH):
                rows = exchange.control(Op.HBM_FIND, namespace=self._handle, digests=digests_text(some))[
                    "blocks"
                ]
                for key, row in zip(split_keys(some), rows, strict=True):
                    leased.append(row and self._lease_one(exchange, key, *row))
        except BaseException:
            self.release(each for each in leased if each is not None)
            raise
        return leased

    def _lease_one(
        self,
        exchange: Exchange,
        key: bytes,
        slot: int,
        generation: int,
        segment: int,
        offset: int,
        size_bytes: int,
        checksum: str,
    ) -> PoolBlock | None:
        try:
            lease = self._hazards.publish(slot, generation)
        except (Superseded, Busy):  # evicted since, or more are leased than one process may
            return None
        try:
            address = self._map(exchange, segment) + offset
        except BaseException:
            self._hazards.clear(lease)
            raise
        return PoolBlock(key, slot, generation, address, size_bytes, int(checksum, 16), lease)

    def release(self, blocks: Iterable[PoolBlock]) -> None:
        """End leases, once nothing copies from these blocks any more."""
        for block in blocks:
            self._hazards.clear(block.lease)

    def reserve(self, keys: bytes, *, timeout_s: float) -> list[PoolDraft | None]:
        """Reserve drafts for blocks that the service has and that are worth a slot; None for each other one. Raises as
        `lease`, and AccessDenied."""
        exchange, drafts = Exchange(self._transport, timeout_s), list[PoolDraft | None]()
        for some in batches(keys, limits.MAX_BATCH):
            rows = exchange.control(Op.HBM_RESERVE, namespace=self._handle, digests=digests_text(some))[
                "drafts"
            ]
            for key, row in zip(split_keys(some), rows, strict=True):
                if row is None:
                    drafts.append(None)
                    continue
                slot, generation, segment, offset, size_bytes = row
                address = self._map(exchange, segment) + offset
                drafts.append(PoolDraft(key, slot, generation, address, size_bytes))
        return drafts

    def seal(self, drafts: Sequence[PoolDraft], checksums: Sequence[int], *, timeout_s: float) -> list[bool]:
        """Seal drafts with the checksums that the device computed; False for each that the service refused."""
        exchange, sealed = Exchange(self._transport, timeout_s), list[bool]()
        for at in range(0, len(drafts), limits.MAX_BATCH):
            seals = [
                [draft.slot, draft.generation, draft.key.hex(), f"{checksum:016x}"]
                for draft, checksum in zip(
                    drafts[at : at + limits.MAX_BATCH], checksums[at : at + limits.MAX_BATCH], strict=True
                )
            ]
            answer = exchange.control(Op.HBM_SEAL, namespace=self._handle, seals=seals)
            sealed += [status == 0 for status in answer["statuses"]]
        return sealed

    def abort(self, drafts: Sequence[PoolDraft], *, timeout_s: float) -> None:
        """Give drafts back into which nothing is copied any more."""
        exchange = Exchange(self._transport, timeout_s)
        for at in range(0, len(drafts), limits.MAX_BATCH):
            some = [[draft.slot, draft.generation] for draft in drafts[at : at + limits.MAX_BATCH]]
            exchange.control(Op.HBM_ABORT, drafts=some)

    def drop(self, blocks: Sequence[PoolBlock], *, timeout_s: float) -> int:
        """Have blocks dropped whose bytes on the device are wrong; return how many were there still."""
        exchange, dropped = Exchange(self._transport, timeout_s), 0
        for at in range(0, len(blocks), limits.MAX_BATCH):
            rows = [
                [block.slot, block.generation, block.key.hex()]
                for block in blocks[at : at + limits.MAX_BATCH]
            ]
            dropped += exchange.control(Op.HBM_DROP, namespace=self._handle, blocks=rows)["count"]
        return dropped

    def _map(self, exchange: Exchange, segment: int) -> int:
        """Return where a segment is mapped."""
        with self._mapping:
            if segment not in self._mapped:
                _, descriptors = exchange.described(Op.HBM_MAP, segment=segment)
                try:
                    allocation = self._driver.import_allocation(descriptors[0], self._segment_bytes)
                finally:
                    close_all(descriptors)
                with allocation:
                    self._mapped[segment] = self._context.device.map(allocation)
            return self._mapped[segment].address

    def close(self, *, timeout_s: float) -> None:
        """Unmap everything and leave the pool, after all copies from and to it have ended. A service that does not
        hear of that now is told when the next place is taken."""
        try:
            while self._mapped:
                self._mapped.popitem()[1].unmap()
            self._left.append(self._token)
            if self._transport.is_open:
                Exchange(self._transport, timeout_s).control(Op.HBM_DETACH)
                self._forget(self._token)
        finally:
            self._transport.close()


def attach_pool(
    begin: Callable[[float], Transport],
    namespace: dict[str, Any],
    driver: Driver,
    context: Context,
    left: Left,
    *,
    timeout_s: float,
) -> DevicePool | None:
    """Attach to the pool of the context's device for the blocks of a namespace; None where the service shares no memory
    of it. `begin` connects, `namespace` are the arguments of OPEN_NAMESPACE. Raises as they do, LimitExceeded."""
    deadline = Deadline.after(timeout_s)
    transport = begin(deadline.left_s)
    try:
        if context.device.uuid not in transport.hello.details.get("devices", ()):
            transport.close()
            return None
        return DevicePool(transport, namespace, driver, context, left, deadline)
    except BaseException:
        transport.close()
        raise
