"""Blocks in a GPU's memory that processes of one uid share: leased, and added, by their prefix hashes.

Responsibility: one process's place in a pool of the service: find blocks and lease them, reserve drafts and seal them,
map segments as they are needed. Bytes are the caller's to copy, on the device, and checksums to compute there.

Invariants:
- What is leased is not reused until `release`, which the caller calls once no copy from it is under way.
- A draft is sealed, or aborted, once the device has completed what was started into it.
- A pool whose session is lost stays lost: what is mapped stays so until `close`, or until a restarted service has taken
  it over for another place. No call waits longer than its timeout.

Concurrency: any thread; segments are mapped one at a time. `close` comes after all other calls. A forked child makes a
place of its own.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs import limits
from kvfs._native.cuda.driver import Context, Driver
from kvfs._native.hbm.hazards import ClientHazards
from kvfs.client.exchange import Exchange
from kvfs.client.kept_blocks import KeptSegment, KnownBlock, KnownBlocks
from kvfs.client.session import batches, choose_keys, digests_text
from kvfs.client.transport import Deadline, Transport, close_all
from kvfs.errors import Busy, KvfsError, Superseded
from kvfs.keys import split_keys
from kvfs.protocol.messages import Op

log = logging.getLogger("kvfs.client")
Left = deque[str]
"""Tokens of places that this process has left, which the service has not been told of: one for all places."""


def no_places() -> Left:
    """Return an empty list for the places that will be left: there are no more than HBM_CLIENTS at once."""
    return deque(maxlen=limits.HBM_CLIENTS)


class PoolBlock(NamedTuple):
    """Describes a block that is leased: what is known of it, and the lease."""

    key: bytes
    slot: int
    generation: int
    address: int
    size_bytes: int
    checksum: int
    """XXH3-64 with which it was sealed."""
    lease: int


class PoolDraft(NamedTuple):
    """Describes a draft of a block, and where its bytes are to be."""

    key: bytes
    slot: int
    generation: int
    address: int
    size_bytes: int


Checksums = Callable[[Sequence[tuple[int, int]]], Sequence[int]]
"""Returns the XXH3-64 of ranges of device memory (address, bytes), at most MAX_BATCH of them. Raises KvfsError."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """Names a place whose session is lost, no copy uses any more, and what computes checksums in it."""

    pool: DevicePool
    checksums: Checksums


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
        self._mapped: dict[int, KeptSegment] = {}
        self._known = KnownBlocks()
        self._unreported: dict[bytes, None] = {}
        self._report_s = 0.0
        self.is_closed = False
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
    def start(self) -> str:
        """Return the mark of the service's start, empty of one that takes no segment over."""
        return str(self._transport.hello.details.get("pools", ""))

    @property
    def regions(self) -> list[tuple[int, int]]:
        """Return what is mapped: (address, bytes)."""
        mappings = [segment.mapping for segment in list(self._mapped.values())]
        return [(mapping.address, mapping.size_bytes) for mapping in mappings]

    def lease(self, keys: bytes, *, timeout_s: float) -> list[PoolBlock | None]:
        """Lease the blocks that are in the pool; None for each other one. The service is asked for those alone that
        this process has not heard of; `report` tells it of the others. Raises SessionClosed, DeadlinePassed, and what
        `kvfs.errors.from_cuda` does; then nothing is leased."""
        leased = [self._lease_known(key) for key in split_keys(keys)]
        unknown = [row for row, block in enumerate(leased) if block is None]
        try:
            for row, block in zip(unknown, self._ask(choose_keys(keys, unknown), timeout_s), strict=True):
                leased[row] = block
        except BaseException:
            self.release(each for each in leased if each is not None)
            raise
        self._known.add(KnownBlock(*block[:-1]) for row in unknown if (block := leased[row]) is not None)
        return leased

    def _lease_known(self, key: bytes) -> PoolBlock | None:
        known = self._known.get(key)
        if known is None or (lease := self._publish(known.slot, known.generation)) is None:
            return None
        if len(self._unreported) < limits.MAX_BATCH:
            self._unreported[key] = None
        return PoolBlock(*known, lease)

    def _publish(self, slot: int, generation: int) -> int | None:
        """Lease a slot; None where its block was evicted since, or more are leased than one process may."""
        try:
            return self._hazards.publish(slot, generation)
        except (Superseded, Busy):
            return None

    def _ask(self, keys: bytes, timeout_s: float) -> Iterator[PoolBlock | None]:
        """Ask the service for blocks, and lease those that it has, one by one."""
        exchange = Exchange(self._transport, timeout_s)
        for some in batches(keys, limits.MAX_BATCH):
            for key, row in zip(split_keys(some), self._find(exchange, some), strict=True):
                yield row and self._lease_one(exchange, key, *row)

    def _find(self, exchange: Exchange, keys: bytes) -> list[Any]:
        answer = exchange.control(Op.HBM_FIND, namespace=self._handle, digests=digests_text(keys))
        return list(answer["blocks"])

    @property
    def owes_report(self) -> bool:
        """Return whether the service is to be told of leases; every CLIENT_REPORT_S is enough."""
        return bool(self._unreported) and time.monotonic() >= self._report_s

    def report(self, *, timeout_s: float) -> None:
        """Tell the service, for eviction, of blocks that were leased without asking it since the last report: MAX_BATCH
        at most, each once. Raises SessionClosed, DeadlinePassed."""
        keys, self._unreported = b"".join(list(self._unreported)), {}
        self._report_s = time.monotonic() + limits.CLIENT_REPORT_S
        if keys:
            self._find(Exchange(self._transport, timeout_s), keys)

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
        lease = self._publish(slot, generation)
        if lease is None:
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
        self._known.add(
            KnownBlock(*draft._replace(generation=draft.generation + 1), checksum)
            for draft, checksum, is_sealed in zip(drafts, checksums, sealed, strict=True)
            if is_sealed
        )
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
                result, descriptors = exchange.described(Op.HBM_MAP, segment=segment)
                try:
                    self._mapped[segment] = self._import(str(result.get("token", "")), *descriptors)
                finally:
                    close_all(descriptors)
            return self._mapped[segment].mapping.address

    def _import(self, token: str, descriptor: int) -> KeptSegment:
        with self._driver.import_allocation(descriptor, self._segment_bytes) as allocation:
            mapping = self._context.device.map(allocation)
        return KeptSegment.of(mapping, token, descriptor, len(self._mapped))

    # --- restart ------------------------------------------------------------------------------------------
    def take_over(self, earlier: Earlier, *, timeout_s: float) -> int:
        """Hand back the segments of an earlier service's place, as far as there is time; return how many blocks the
        service took over. Those segments are this place's then, the others stay the earlier one's to close. Raises what
        the service answers, NoSpace for a segment without room among it, and what `checksums` does."""
        deadline, adopted, before = Deadline.after(timeout_s), 0, earlier.pool
        for number, blocks in before._known.in_segments(before._mapped, before._is_sealed).items():
            if deadline.left_s <= 0:
                break
            adopted += self._hand_back(earlier, number, blocks, Exchange(self._transport, deadline.left_s))
        return adopted

    def _is_sealed(self, block: KnownBlock) -> bool:
        """Return whether the service had a block sealed when it ended: who was granted its slot since may still write
        there."""
        lease = self._publish(block.slot, block.generation)
        if lease is not None:
            self._hazards.clear(lease)
        return lease is not None

    def _hand_back(
        self, earlier: Earlier, number: int, blocks: Sequence[KnownBlock], exchange: Exchange
    ) -> int:
        segment = earlier.pool._mapped[number]
        checksums = earlier.checksums([(block.address, block.size_bytes) for block in blocks])
        answer = exchange.sent(
            Op.HBM_ADOPT,
            segment.descriptor,
            namespace=self._handle,
            token=segment.token,
            blocks=[
                [block.address - segment.mapping.address, block.size_bytes, block.key.hex(), f"{found:016x}"]
                for block, found in zip(blocks, checksums, strict=True)
            ],
        )
        rows = [(*row, block) for row, block in zip(answer["blocks"], blocks, strict=True) if row]
        if not rows:
            return 0
        adopted = rows[0][2]
        with self._mapping:
            if adopted not in self._mapped:
                self._mapped[adopted] = earlier.pool._mapped.pop(number)
            start = self._mapped[adopted].mapping.address
        self._known.add(
            block._replace(slot=slot, generation=generation, address=start + offset)
            for slot, generation, _, offset, block in rows
        )
        return len(rows)

    def close(self, *, timeout_s: float) -> None:
        """Unmap everything and leave the pool, after all copies from and to it have ended. A service that does not
        hear of that now is told when the next place is taken. Closing twice is harmless."""
        is_left, self.is_closed = self.is_closed, True
        try:
            while self._mapped:
                self._mapped.popitem()[1].close()
            if is_left:
                return
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
    earlier: Earlier | None = None,
) -> DevicePool | None:
    """Attach to the pool of the context's device for the blocks of a namespace; None where the service shares no memory
    of it. `begin` connects, `namespace` are the arguments of OPEN_NAMESPACE. Raises as they do, LimitExceeded.

    Once there is a session, `earlier` is closed, after a service that was started since has taken over what it takes.
    """
    deadline = Deadline.after(timeout_s)
    transport = begin(deadline.left_s)
    try:
        details = transport.hello.details
        is_here = context.device.uuid in details.get("devices", ())
        if earlier is not None and not (is_here and details.get("pools", "") not in ("", earlier.pool.start)):
            _end(earlier)  # before the service hears that the place was left
        if not is_here:
            transport.close()
            return None
        pool = DevicePool(transport, namespace, driver, context, left, deadline)
        if earlier is not None and not earlier.pool.is_closed:
            _hand_over(pool, earlier, deadline)
        return pool
    except BaseException:
        transport.close()
        raise
    finally:
        if earlier is not None:
            _end(earlier)


def _end(earlier: Earlier) -> None:
    with suppress(KvfsError, OSError):  # a lost context has ended it
        earlier.pool.close(timeout_s=0)


def _hand_over(pool: DevicePool, earlier: Earlier, deadline: Deadline) -> None:
    """Have a new place take over what it can. Raises what ended its session."""
    try:
        adopted = pool.take_over(earlier, timeout_s=deadline.left_s)
        log.info("%d blocks in GPU memory outlived their service", adopted)
    except (KvfsError, OSError) as error:
        log.info("blocks in GPU memory are not taken over: %s", error)
        if not pool.is_open:
            with suppress(KvfsError, OSError):
                pool.close(timeout_s=0)
            raise
