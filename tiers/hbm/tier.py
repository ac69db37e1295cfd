"""The HBM tier: the pool of one device's memory that one uid's processes share.

Responsibility: grant slots, seal and free them, and reuse one only when nobody can read or write it any more
(docs/hbm.md). The bytes are the clients': they map segments, copy, and ask for the seal once the device has completed.

Invariants:
- Generations: odd while draft or free, even while sealed; a generation is handed out once.
- A sealed slot is reused only after its generation has moved and no living process has it leased; a draft's slot only
  after its client has aborted it, or is off the device (`tiers.hbm.clients`).
- Used bytes are those of slots, with those that wait for reuse; segments take more of the device, and never pass the
  capacity.

Concurrency: one thread (the service's) calls the tier. Making a segment is a call of the driver; nothing waits for a
client.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvfs import limits
from kvfs._native.hbm.hazards import Generations
from kvfs.errors import InvalidRequest, LimitExceeded, NotFound, ObjectTooLarge, Superseded
from tiers.hbm.allocator import Place, SlotAllocator
from tiers.hbm.clients import PoolClient, Standing
from tiers.hbm.device_segments import DeviceSegment, DeviceSegments
from tiers.hbm.driver_ports import DeviceHolders, Listing, NoHolders, SegmentMaker
from tiers.hbm.handover import ExpectedChecksum, HandedBlock, is_adoptable
from tiers.hbm.size_classes import slot_bytes_for
from tiers.model.tier import Extent, Sealed, SealHeader, Usage


def _draw_token() -> bytes:
    return secrets.token_bytes(limits.HBM_SEGMENT_TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class _Draft:
    client: PoolClient
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Held:
    """Describes a slot that was freed while somebody had it leased."""

    generation: int
    uid: int
    slot_bytes: int


class HbmTier:
    """See the module's header."""

    name = "hbm"

    def __init__(
        self,
        maker: SegmentMaker,
        capacity_bytes: int,
        *,
        holders: DeviceHolders | None = None,
        segment_bytes: int = limits.HBM_SEGMENT_BYTES,
        max_slots: int = limits.HBM_SLOTS,
        clock: Callable[[], float] = time.monotonic,
        make_token: Callable[[], bytes] = _draw_token,
    ) -> None:
        """Make a tier without segments; `make_token` says by what each one will be known after a restart."""
        self.device = maker.device
        self.generations = Generations(max_slots)
        self._segments = DeviceSegments(maker, capacity_bytes, segment_bytes, make_token)
        self._allocator = SlotAllocator(segment_bytes, max_slots)
        self._holders = holders or NoHolders()
        self._clock = clock
        self._clients: list[PoolClient] = []
        self._drafts: dict[int, _Draft] = {}
        self._sealed: dict[int, Sealed] = {}
        self._held: dict[int, _Held] = {}

    # --- clients ----------------------------------------------------------------------------------------
    def attach(self, pid: int, pidfd: int, token: int = 0) -> PoolClient:
        """Add a client; its descriptor is then the tier's. Raises LimitExceeded."""
        if len(self._clients) >= limits.HBM_CLIENTS:
            os.close(pidfd)
            raise LimitExceeded(f"HBM tier {self.device}: {limits.HBM_CLIENTS} clients, which is the limit")
        client = PoolClient(pid, pidfd, token)
        self._clients.append(client)
        return client

    def detach(self, client: PoolClient) -> None:
        """Remove a client that has completed its work and unmapped all segments: its drafts and leases end."""
        client.ended_s = client.exited_s = self._clock()
        self._remove_client(client)

    def detach_left(self, pid: int, tokens: Container[int]) -> None:
        """Remove clients of a process whose sessions were lost, and which it says it has left as `detach` wants."""
        for client in [each for each in self._clients if each.pid == pid and each.token in tokens]:
            self.detach(client)

    def end(self, client: PoolClient) -> None:
        """Note that a client's session has ended, and nothing is known of its work: `sweep` looks at it from now on."""
        if client.ended_s is None:
            client.ended_s = self._clock()

    def map_segment(self, client: PoolClient, number: int) -> tuple[int, bytes]:
        """Return a segment's descriptor, which stays the tier's, and its token; the client counts as one who has it
        mapped. Raises NotFound, Superseded."""
        self._check_active(client)
        segment = self._segments.get(number)
        if segment is None or segment.fd < 0:
            raise NotFound(f"HBM tier {self.device} has no segment {number}")
        segment.clients.add(client)
        return segment.fd, segment.token

    def unmapped(self, client: PoolClient, number: int) -> None:
        """Note that a client has unmapped a segment. Raises InvalidRequest while it has drafts there."""
        if any(self._allocator.place(slot).segment == number for slot in client.drafts):
            raise InvalidRequest(f"segment {number} has drafts of this client")
        if segment := self._segments.get(number):
            self._segments.unmap(segment, client)

    def to_unmap(self, client: PoolClient) -> list[int]:
        """List the segments that a client has mapped and that are released: the device has their memory until it unmaps
        them."""
        return [segment.number for segment in self._segments if segment.fd < 0 and client in segment.clients]

    def _check_active(self, client: PoolClient) -> None:
        if client.ended_s is not None:
            raise Superseded(f"the session of process {client.pid} with the HBM tier has ended")

    def _remove_client(self, client: PoolClient) -> None:
        for slot in list(client.drafts):
            self._end_draft(slot)
        for segment in self._segments:
            self._segments.unmap(segment, client)
        self._clients.remove(client)
        client.close()
        for number in client.blocked:
            self._reopen(number)

    @property
    def clients(self) -> int:
        """Return how many clients there are, with those that have ended and are still waited for."""
        return len(self._clients)

    @property
    def segment_bytes(self) -> int:
        """Return the size of a segment."""
        return self._allocator.segment_bytes

    @property
    def physical_bytes(self) -> int:
        """Return what the tier takes of the device."""
        return self._segments.physical_bytes

    # --- drafts -----------------------------------------------------------------------------------------
    def reserve(self, size_bytes: int, client: PoolClient) -> Extent:
        """Reserve a draft of this size, with any bytes in it. Raises NoSpace, ObjectTooLarge, Superseded."""
        self._check_active(client)
        if size_bytes > self._largest_object_bytes:
            raise ObjectTooLarge(
                f"{size_bytes} bytes; the HBM tier takes objects up to {self._largest_object_bytes}"
            )
        slot = self._allocator.take(size_bytes)
        if slot is None:
            self._allocator.add(self._segments.make().number)
            slot = self._allocator.take(size_bytes)
            assert slot is not None
        self._drafts[slot] = _Draft(client, size_bytes)
        client.drafts.add(slot)
        return self._next_draft(slot)

    def _next_draft(self, slot: int) -> Extent:
        """Move a free slot to a generation that it never had."""
        generation = self.generations.get(slot)
        generation += 2 if generation % 2 else 1
        self.generations.set(slot, generation)
        return Extent(slot, generation)

    @property
    def _largest_object_bytes(self) -> int:
        return min(self._allocator.segment_bytes, self._segments.capacity_bytes)

    def place(self, extent: Extent) -> Place:
        """Return where a draft or a sealed extent is. Raises Superseded."""
        known = extent.slot in self._drafts or extent.slot in self._sealed
        if not known or self.generations.get(extent.slot) != extent.generation:
            raise Superseded(f"slot {extent.slot} no longer holds generation {extent.generation}")
        return self._allocator.place(extent.slot)

    def _checked_draft(self, draft: Extent, client: PoolClient) -> _Draft:
        known = self._drafts.get(draft.slot)
        if (
            known is None
            or known.client is not client
            or self.generations.get(draft.slot) != draft.generation
        ):
            raise Superseded(f"slot {draft.slot} is no longer draft {draft.generation} of this client")
        self._check_active(client)
        return known

    def seal(
        self, draft: Extent, client: PoolClient, header: SealHeader, checksum: int | None = None
    ) -> Sealed:
        """Make a draft immutable, which its client has completed. `checksum`: the payload's XXH3-64 if known. Raises
        Superseded."""
        known = self._checked_draft(draft, client)
        self._drop_draft(draft.slot)
        return self._publish(draft, header, known.size_bytes, checksum)

    def _publish(self, draft: Extent, header: SealHeader, size_bytes: int, checksum: int | None) -> Sealed:
        extent = Extent(draft.slot, draft.generation + 1)
        self._sealed[extent.slot] = Sealed(extent, header, size_bytes, checksum, time.time_ns())
        self.generations.set(extent.slot, extent.generation)
        return self._sealed[extent.slot]

    def abort(self, draft: Extent, client: PoolClient) -> None:
        """Free a draft whose client has completed, or never began, what it writes. Raises Superseded."""
        self._checked_draft(draft, client)
        self._end_draft(draft.slot)

    def _end_draft(self, slot: int) -> None:
        self._drop_draft(slot)
        self._free_slot(slot)

    def _drop_draft(self, slot: int) -> None:
        self._drafts.pop(slot).client.drafts.remove(slot)

    # --- sealed extents ---------------------------------------------------------------------------------
    def _checked(self, extent: Extent) -> Sealed:
        sealed = self._sealed.get(extent.slot)
        if sealed is None or sealed.extent != extent:
            raise Superseded(f"slot {extent.slot} no longer holds generation {extent.generation}")
        return sealed

    def held(self, extent: Extent) -> bool:
        """Return whether anybody has the extent leased now. Raises Superseded."""
        self._checked(extent)
        return self._is_leased(extent.slot, extent.generation)

    def _is_leased(self, slot: int, generation: int) -> bool:
        return any(client.has_leased(slot, generation) for client in self._clients)

    def checksum(self, extent: Extent) -> int | None:
        """Return the payload's XXH3-64, None where nobody has computed it. Raises Superseded."""
        return self._checked(extent).checksum

    def sealed(self) -> Iterator[Sealed]:
        """Yield every sealed extent, in slot order."""
        return (self._sealed[slot] for slot in sorted(self._sealed))

    def free(self, extent: Extent, *, charge_uid: int = 0) -> int:
        """Free a sealed extent; return the bytes that stay held, charged to `charge_uid`, 0 if all are free."""
        self._checked(extent)
        del self._sealed[extent.slot]
        self.generations.set(extent.slot, extent.generation + 1)  # before the look at the leases
        if not self._is_leased(extent.slot, extent.generation):
            self._free_slot(extent.slot)
            return 0
        slot_bytes = self._allocator.place(extent.slot).slot_bytes
        self._held[extent.slot] = _Held(extent.generation, charge_uid, slot_bytes)
        return slot_bytes

    def charged_bytes(self, uid: int) -> int:
        """Return the held bytes that are charged to `uid`."""
        return sum(held.slot_bytes for held in self._held.values() if held.uid == uid)

    def _free_slot(self, slot: int) -> None:
        number = self._allocator.free(slot).segment
        segment = self._segments.get(number)
        assert segment is not None
        if segment.retiring:
            self._release_empty(segment)

    def _release_empty(self, segment: DeviceSegment) -> None:
        if not self._allocator.taken_in(segment.number):
            self._allocator.remove(segment.number)
            self._segments.release(segment)

    # --- restart ----------------------------------------------------------------------------------------
    def segment_of(self, token: bytes) -> int | None:
        """Return the number of the segment that is known by this token; None where there is none."""
        segment = self._segments.of_token(token)
        return None if segment is None else segment.number

    def adopt(
        self,
        client: PoolClient,
        fd: int,
        token: bytes,
        blocks: Sequence[HandedBlock],
        expected: ExpectedChecksum,
    ) -> list[Sealed | None]:
        """Take over a segment that a client has had mapped since before a restart; the descriptor is then the tier's.
        Return what is sealed of `blocks`, None for each that is dropped. Raises NoSpace, InvalidRequest, Superseded."""
        try:
            segment = self._adopt_segment(client, fd, token)
        except BaseException:
            os.close(fd)
            raise
        if segment.fd != fd:
            os.close(fd)
        if segment.fd < 0:
            return [None] * len(blocks)
        adopted = list(self._adopt_blocks(segment, blocks, expected))
        self._release_empty(segment)
        return adopted

    def _adopt_segment(self, client: PoolClient, fd: int, token: bytes) -> DeviceSegment:
        self._check_active(client)
        segment = self._segments.of_token(token)
        if segment is None:
            segment = self._segments.adopt(fd, token)
            self._allocator.adopt(segment.number)
        elif not segment.adopted:
            raise InvalidRequest(f"segment {segment.number} was made by this service")
        if segment.fd >= 0:
            segment.clients.add(client)
        return segment

    def _adopt_blocks(
        self, segment: DeviceSegment, blocks: Sequence[HandedBlock], expected: ExpectedChecksum
    ) -> Iterator[Sealed | None]:
        places = {slot: self._allocator.place(slot) for slot in self._allocator.slots_in(segment.number)}
        slots = {place.offset_bytes: slot for slot, place in places.items()}
        sizes = [place.slot_bytes for place in places.values()]
        sizes += [slot_bytes_for(block.size_bytes) for block in blocks[:1]]
        for block in blocks:
            if (slot := slots.get(block.offset_bytes)) is not None:
                yield self._same_block(slot, block)
            elif is_adoptable(block, sizes[0], self._allocator.segment_bytes, expected):
                sealed = self._adopt_block(Place(segment.number, block.offset_bytes, sizes[0]), block)
                if sealed is not None:
                    slots[block.offset_bytes] = sealed.extent.slot
                yield sealed
            else:
                yield None

    def _same_block(self, slot: int, block: HandedBlock) -> Sealed | None:
        """Return what another client has handed back before, if it is this block."""
        sealed = self._sealed.get(slot)
        same = sealed is not None and (sealed.header.key, sealed.checksum) == (
            block.header.key,
            block.checksum,
        )
        return sealed if same else None

    def _adopt_block(self, place: Place, block: HandedBlock) -> Sealed | None:
        slot = self._allocator.adopt_slot(place)
        if slot is None:
            return None
        return self._publish(self._next_draft(slot), block.header, block.size_bytes, block.checksum)

    # --- time -------------------------------------------------------------------------------------------
    def sweep(self) -> int:
        """Free what is no longer leased, and what ended clients can no longer write; return the bytes that became
        free."""
        before = self._allocator.taken_bytes
        listing = self._holders.listing(self.device)
        for client in self._clients:
            client.look(listing, self._clock)
        self._sweep_ended([client for client in self._clients if client.ended_s is not None], listing)
        if any(client.wants_listing for client in self._clients):
            self._holders.ask(self.device)
        for slot, held in list(self._held.items()):
            if not self._is_leased(slot, held.generation):
                del self._held[slot]
                self._free_slot(slot)
        return before - self._allocator.taken_bytes

    def _sweep_ended(self, ended: list[PoolClient], listing: Listing | None) -> None:
        now_s = self._clock()
        for client in ended:
            match client.standing(listing, now_s):
                case Standing.OFF_DEVICE:
                    self._remove_client(client)
                case Standing.HUNG:
                    self._block(client)

    def _block(self, client: PoolClient) -> None:
        """Take the segments that a hung client may write out of use."""
        numbers = {self._allocator.place(slot).segment for slot in client.drafts}
        for number in numbers - client.blocked:
            self._allocator.close(number)
        client.blocked |= numbers

    def _reopen(self, number: int) -> None:
        segment = self._segments.get(number)
        blocked = any(number in client.blocked for client in self._clients)
        if segment is not None and not segment.retiring and not blocked:
            self._allocator.reopen(number)

    # --- capacity ---------------------------------------------------------------------------------------
    def resize(self, capacity_bytes: int) -> list[Sealed]:
        """Set the capacity. Where it is less, free what is in surplus segments, and return that; a segment's memory is
        the device's again once nobody has a slot in it leased, a draft there, or it mapped."""
        self._segments.capacity_bytes = capacity_bytes
        staying = [segment for segment in self._segments if not segment.retiring]
        surplus = len(staying) - capacity_bytes // self._allocator.segment_bytes
        if surplus <= 0:
            return []
        staying.sort(key=lambda segment: self._allocator.taken_in(segment.number))
        return [sealed for segment in staying[:surplus] for sealed in self._retire(segment)]

    def _retire(self, segment: DeviceSegment) -> list[Sealed]:
        self._allocator.close(segment.number)
        slots = self._allocator.slots_in(segment.number)
        freed = [sealed for slot in slots if (sealed := self._sealed.get(slot)) is not None]
        for sealed in freed:
            self.free(sealed.extent)
        segment.retiring = True
        self._release_empty(segment)
        return freed

    def usage(self) -> Usage:
        """Measure what is used."""
        return Usage(
            capacity_bytes=self._segments.capacity_bytes,
            used_bytes=self._allocator.taken_bytes,
            held_bytes=sum(held.slot_bytes for held in self._held.values()),
            slots=len(self._allocator),
            max_slots=self._allocator.max_slots,
            largest_object_bytes=self._largest_object_bytes,
        )

    def describe(self) -> dict[str, Any]:
        """Return what `status` shows."""
        usage = self.usage()
        waiting: Counter[int] = Counter()
        blocked: Counter[int] = Counter()
        for client in self._clients:
            if client.ended_s is not None:
                waiting[client.pid] += sum(self._allocator.place(slot).slot_bytes for slot in client.drafts)
            if client.blocked:
                blocked[client.pid] += len(client.blocked) * self._allocator.segment_bytes
        return {
            "device": self.device,
            "capacity_bytes": usage.capacity_bytes,
            "segment_bytes": self._segments.physical_bytes,
            "used_bytes": usage.used_bytes,
            "held_bytes": usage.held_bytes,
            "clients": len(self._clients),
            "clients_listed": sum(client.was_listed for client in self._clients),
            "quarantined_bytes_by_pid": dict(waiting),
            "blocked_bytes_by_pid": dict(blocked),
        }

    def close(self) -> None:
        """Stop. What clients have mapped stays theirs."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self._segments.close()
