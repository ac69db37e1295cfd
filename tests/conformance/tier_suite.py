"""The ports `WritableTier` and `ReadableTier`, as tests: `class TestMyTier(TierSuite)` with a fixture `make_tier`.

`make_tier(capacity_bytes, max_slots)` makes a fresh tier of that size, as often as asked, and closes it after
the test. `TierSuite` uses nothing but the two ports of `tiers.model.ports`. `ExtentSuite`, the part of it that needs no
descriptors of drafts and leases, holds for a tier on any device that gives `write` and `read_into`.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import pytest
import trio
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvfs.errors import NoSpace, ObjectTooLarge, Superseded, WriterActive
from tests.support.waits import WAIT_S
from tiers.model.ports import Lease, ReadableTier, WritableTier
from tiers.model.tier import Extent, Kind, Sealed, SealHeader, StoreKey, object_key

MIB = 1 << 20
CAPACITY = 16 * MIB
SLOTS = 256


class Tier(WritableTier, ReadableTier, Protocol):
    """Both ports, and an end."""

    def close(self) -> None: ...


MakeTier = Callable[[int, int], Tier]


def block_header(number: int) -> SealHeader:
    """A header whose every field differs from its default and from the next number's."""
    return SealHeader(
        key=StoreKey(Kind.BLOCK, number.to_bytes(16, "little")),
        object_id=number + 7,
        sequence=number + 1_000_000_007,
        parent=(number + 1).to_bytes(16, "big"),
        flags=number % 251,
        uid=1000 + number,
        bucket_id=2000 + number,
    )


@runtime_checkable
class WrittenInPlace(Protocol):
    """A tier whose drafts are no files."""

    def write(self, draft: Extent, payload: bytes) -> None:
        """Write a draft from its first byte on. Raises Superseded."""
        ...


def write(tier: Tier, draft: Extent, payload: bytes) -> None:
    if isinstance(tier, WrittenInPlace):
        tier.write(draft, payload)
        return
    fd = tier.open_draft(draft)
    try:
        assert os.pwrite(fd, payload, 0) == len(payload)
    finally:
        os.close(fd)


def put(tier: Tier, payload: bytes, number: int = 1) -> Sealed:
    draft = tier.reserve(len(payload))
    write(tier, draft, payload)
    return tier.seal(draft, block_header(number))


async def read(lease: Lease, offset: int = 0, size_bytes: int | None = None) -> bytes:
    buffer = bytearray(lease.size_bytes if size_bytes is None else size_bytes)
    count = await lease.read_into(offset, memoryview(buffer))
    return bytes(buffer[:count])


async def contents(tier: Tier, extent: Extent) -> bytes:
    with tier.lease(extent) as lease:
        return await read(lease)


async def checksum_of(tier: Tier, extent: Extent) -> int:
    """The checksum may follow the seal by a moment."""
    with trio.fail_after(WAIT_S):
        while (value := tier.checksum(extent)) is None:  # noqa: ASYNC110 the tier has no event to wait for
            await trio.sleep(0.001)
    return value


class ExtentSuite:
    """Inherit where drafts and leases are no descriptors, and give a `make_tier` fixture."""

    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> Tier:
        return make_tier(CAPACITY, SLOTS)

    # --- reserve, write, seal ---------------------------------------------------------------------------

    async def test_what_was_sealed_is_read(self, tier: Tier) -> None:
        for size_bytes in (0, 1, 4095, 4096, 4097, MIB + 13):
            payload = random.Random(size_bytes).randbytes(size_bytes)
            sealed = put(tier, payload)
            assert sealed.size_bytes == size_bytes
            assert await contents(tier, sealed.extent) == payload

    async def test_reads_at_offsets_are_short_only_at_the_end(self, tier: Tier) -> None:
        payload = bytes(range(256)) * 40
        with tier.lease(put(tier, payload).extent) as lease:
            assert lease.size_bytes == len(payload)
            assert await read(lease, 5000, 100) == payload[5000:5100]
            assert await read(lease, len(payload) - 10, 100) == payload[-10:]
            assert await read(lease, len(payload), 100) == b""

    def test_a_lease_closes_twice(self, tier: Tier) -> None:
        lease = tier.lease(put(tier, b"x").extent)
        lease.close()
        lease.close()

    def test_generations_tell_drafts_from_sealed_extents(self, tier: Tier) -> None:
        draft = tier.reserve()
        assert draft.generation % 2 == 1
        assert tier.seal(draft, block_header(1)).extent == Extent(draft.slot, draft.generation + 1)

    def test_nothing_is_readable_before_the_seal(self, tier: Tier) -> None:
        draft = tier.reserve(100)
        write(tier, draft, b"draft")
        assert list(tier.sealed()) == []
        for extent in (
            draft,
            Extent(draft.slot, draft.generation + 1),
            Extent(draft.slot, draft.generation - 1),
        ):
            with pytest.raises(Superseded):
                tier.lease(extent)

    def test_the_header_is_kept(self, tier: Tier) -> None:
        sealed = [put(tier, bytes(number), number) for number in range(5)]
        listed = list(tier.sealed())
        assert [entry.extent.slot for entry in listed] == sorted(entry.extent.slot for entry in sealed)
        by_slot = {entry.extent.slot: entry for entry in listed}
        for entry in sealed:
            found = by_slot[entry.extent.slot]
            assert (found.extent, found.header, found.size_bytes) == (
                entry.extent,
                entry.header,
                entry.size_bytes,
            )

    async def test_an_object_key_is_kept(self, tier: Tier) -> None:
        header = SealHeader(object_key(77), object_id=77, sequence=2**63)
        tier.seal(tier.reserve(), header)
        assert [entry.header for entry in tier.sealed()] == [header]

    def test_a_draft_ends_once(self, tier: Tier) -> None:
        sealed, aborted = tier.reserve(), tier.reserve()
        tier.seal(sealed, block_header(1))
        tier.abort(aborted)
        for draft in (sealed, aborted):
            with pytest.raises(Superseded):
                tier.seal(draft, block_header(2))
            with pytest.raises(Superseded):
                tier.abort(draft)
            with pytest.raises(Superseded):
                write(tier, draft, b"late")

    # --- the end of an extent ---------------------------------------------------------------------------

    def test_nothing_stays_of_an_aborted_draft(self, tier: Tier) -> None:
        before = tier.usage()
        draft = tier.reserve(MIB)
        write(tier, draft, b"x" * MIB)
        tier.abort(draft)
        after = tier.usage()
        assert (after.used_bytes, after.slots, after.held_bytes) == (before.used_bytes, before.slots, 0)
        assert list(tier.sealed()) == []

    def test_a_freed_extent_is_superseded(self, tier: Tier) -> None:
        first = put(tier, b"first").extent
        assert tier.free(first) == 0
        second = put(tier, b"second").extent
        assert second != first
        for call in (tier.lease, tier.free, tier.held, tier.checksum):
            with pytest.raises(Superseded):
                call(first)
        with pytest.raises(Superseded):
            tier.lease(Extent(second.slot, second.generation + 2))

    def test_free_frees_the_bytes(self, tier: Tier) -> None:
        before = tier.usage()
        sealed = put(tier, b"x" * MIB)
        during = tier.usage()
        assert during.used_bytes - before.used_bytes >= MIB
        assert during.slots == before.slots + 1
        assert tier.free(sealed.extent) == 0
        assert tier.usage() == before

    async def test_a_reader_keeps_its_bytes(self, tier: Tier) -> None:
        payload = b"old" * 100_000
        sealed = put(tier, payload)
        lease = tier.lease(sealed.extent)
        assert tier.held(sealed.extent)
        held_bytes = tier.free(sealed.extent, charge_uid=42)
        assert held_bytes >= len(payload)
        assert tier.charged_bytes(42) == tier.usage().held_bytes == held_bytes
        refilled = [put(tier, b"new" * 100_000, number) for number in range(4)]
        assert await read(lease) == payload
        assert tier.sweep() == 0
        lease.close()
        assert tier.sweep() == held_bytes
        assert tier.charged_bytes(42) == tier.usage().held_bytes == 0
        for entry in refilled:
            assert await contents(tier, entry.extent) == b"new" * 100_000

    def test_held_says_who_is_there_now(self, tier: Tier) -> None:
        sealed = put(tier, b"x" * MIB)  # large enough that its checksum may be in the making
        assert not tier.held(sealed.extent)
        with tier.lease(sealed.extent):
            assert tier.held(sealed.extent)
        assert not tier.held(sealed.extent)

    # --- capacity ---------------------------------------------------------------------------------------

    def test_an_object_too_large_is_refused(self, tier: Tier) -> None:
        usage = tier.usage()
        assert 0 < usage.largest_object_bytes <= usage.capacity_bytes
        tier.abort(tier.reserve(usage.largest_object_bytes))
        with pytest.raises(ObjectTooLarge, match=str(usage.largest_object_bytes)):
            tier.reserve(usage.largest_object_bytes + 1)

    def test_used_bytes_never_pass_the_capacity(self, tier: Tier) -> None:
        extents: list[Extent] = []

        def fill() -> None:
            for number in range(SLOTS):
                extents.append(put(tier, b"x" * MIB, number).extent)
                assert tier.usage().used_bytes <= tier.usage().capacity_bytes

        with pytest.raises(NoSpace):
            fill()
        assert len(extents) >= CAPACITY // MIB // 2
        tier.free(extents.pop())
        put(tier, b"y" * MIB)

    def test_reservations_count(self, tier: Tier) -> None:
        drafts: list[Extent] = []

        def reserve_all() -> None:
            for _ in range(SLOTS):
                drafts.append(tier.reserve(MIB))

        with pytest.raises(NoSpace):
            reserve_all()
        assert len(drafts) <= CAPACITY // MIB
        for draft in drafts:
            write(tier, draft, b"x" * MIB)
        assert tier.usage().used_bytes <= tier.usage().capacity_bytes
        for draft in drafts:
            tier.abort(draft)

    def test_held_bytes_count(self, tier: Tier) -> None:
        leases: list[Lease] = []

        def hold() -> None:
            for number in range(SLOTS):
                sealed = put(tier, b"x" * MIB, number)
                leases.append(tier.lease(sealed.extent))
                tier.free(sealed.extent)

        with pytest.raises(NoSpace):
            hold()
        assert tier.usage().used_bytes >= len(leases) * MIB
        for lease in leases:
            lease.close()
        assert tier.sweep() >= len(leases) * MIB
        put(tier, b"x" * MIB)

    def test_slots_run_out(self, make_tier: MakeTier) -> None:
        tier = make_tier(CAPACITY, 8)
        drafts = [tier.reserve() for _ in range(8)]
        assert (tier.usage().slots, tier.usage().max_slots) == (8, 8)
        with pytest.raises(NoSpace):
            tier.reserve()
        tier.abort(drafts[3])
        assert tier.reserve().slot == drafts[3].slot


class TierSuite(ExtentSuite):
    """Inherit, and give a `make_tier` fixture."""

    def test_a_lease_is_a_descriptor(self, tier: Tier) -> None:
        payload = bytes(range(256)) * 40
        with tier.lease(put(tier, payload).extent) as lease:
            assert os.pread(lease.fileno(), 100, 256) == payload[256:356]

    def test_a_lease_cannot_be_written_through(self, tier: Tier) -> None:
        with tier.lease(put(tier, b"sealed").extent) as lease, pytest.raises(OSError, match="Bad file"):
            os.pwrite(lease.fileno(), b"x", 0)

    def test_a_writer_blocks_the_seal(self, tier: Tier) -> None:
        draft = tier.reserve(100)
        fd = tier.open_draft(draft)
        os.pwrite(fd, b"one", 0)
        with pytest.raises(WriterActive):
            tier.seal(draft, block_header(1))
        os.pwrite(fd, b"two", 0)
        os.close(fd)
        with tier.lease(tier.seal(draft, block_header(1)).extent) as lease:
            assert os.pread(lease.fileno(), 10, 0) == b"two"

    def test_a_writable_mapping_blocks_the_seal(self, tier: Tier) -> None:
        draft = tier.reserve(4096)
        fd = tier.open_draft(draft)
        os.ftruncate(fd, 4096)
        mapping = mmap.mmap(fd, 4096)
        os.close(fd)
        with pytest.raises(WriterActive):
            tier.seal(draft, block_header(1))
        mapping[:5] = b"bytes"
        mapping.close()
        with tier.lease(tier.seal(draft, block_header(1)).extent) as lease:
            assert os.pread(lease.fileno(), 5, 0) == b"bytes"

    async def test_the_checksum_is_the_payloads(self, tier: Tier) -> None:
        for size_bytes in (0, 10, 300_000, 2 * MIB):
            payload = random.Random(size_bytes).randbytes(size_bytes)
            sealed = put(tier, payload)
            assert await checksum_of(tier, sealed.extent) == xxhash.xxh3_64_intdigest(payload)

    def test_an_aborted_drafts_writer_keeps_to_itself(self, tier: Tier) -> None:
        draft = tier.reserve(4096)
        fd = tier.open_draft(draft)
        os.pwrite(fd, b"old" * 1000, 0)
        tier.abort(draft)
        sealed = [put(tier, b"new", number) for number in range(3)]
        os.pwrite(fd, b"late" * 1000, 0)
        for entry in sealed:
            with tier.lease(entry.extent) as lease:
                assert os.pread(lease.fileno(), 10, 0) == b"new"
        os.close(fd)
        tier.sweep()
        assert tier.usage().held_bytes == 0

    def test_a_mapping_outlives_its_descriptor(self, tier: Tier) -> None:
        payload = b"mapped" * 10_000
        sealed = put(tier, payload)
        with tier.lease(sealed.extent) as lease:
            mapping = mmap.mmap(lease.fileno(), len(payload), prot=mmap.PROT_READ)
        assert tier.held(sealed.extent)
        assert tier.free(sealed.extent) > 0
        for number in range(4):
            put(tier, b"other!" * 10_000, number)
        assert mapping[:] == payload
        mapping.close()
        assert tier.sweep() > 0
        assert tier.usage().held_bytes == 0

    def test_a_recycled_slot_reads_zeros_where_nothing_was_written(self, tier: Tier) -> None:
        extents = [put(tier, b"\xff" * MIB, number).extent for number in range(4)]
        for extent in extents:
            tier.free(extent)
        for _ in extents:
            draft = tier.reserve()
            fd = tier.open_draft(draft)
            assert os.fstat(fd).st_size == 0
            os.ftruncate(fd, MIB)
            os.pwrite(fd, b"end", MIB - 3)
            os.close(fd)
            sealed = tier.seal(draft, block_header(1))
            with tier.lease(sealed.extent) as lease:
                assert os.pread(lease.fileno(), MIB, 0) == bytes(MIB - 3) + b"end"

    def test_a_draft_that_grew_too_large_is_not_sealed(self, tier: Tier) -> None:
        draft = tier.reserve()
        fd = tier.open_draft(draft)
        os.ftruncate(fd, tier.usage().largest_object_bytes + 1)
        os.close(fd)
        with pytest.raises(ObjectTooLarge):
            tier.seal(draft, block_header(1))
        tier.abort(draft)

    # --- everything at once -----------------------------------------------------------------------------

    @pytest.mark.seeded
    def test_against_a_model(self, make_tier: MakeTier) -> None:
        class Machine(_TierMachine):
            def __init__(self) -> None:
                super().__init__(make_tier(CAPACITY, 32))

        run_state_machine_as_test(
            Machine,
            settings=settings(max_examples=25, stateful_step_count=40, deadline=None),
        )


class _TierMachine(RuleBasedStateMachine):
    """A tier beside a dictionary: drafts, sealed extents and readers come and go in any order."""

    drafts: Bundle[Extent] = Bundle("drafts")
    extents: Bundle[Extent] = Bundle("extents")
    readers: Bundle[tuple[Lease | None, bytes]] = Bundle("readers")

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self.tier = tier
        self.written: dict[Extent, bytes] = {}
        self.live: dict[Extent, bytes] = {}
        self.seen: set[Extent] = set()
        self.open_leases: list[Lease] = []
        self.number = 0

    def teardown(self) -> None:
        for lease in self.open_leases:
            lease.close()
        self.tier.close()

    @rule(target=drafts, size_bytes=st.sampled_from([0, 1, 4096, 100_000]))
    def reserve(self, size_bytes: int) -> Extent:
        try:
            draft = self.tier.reserve(size_bytes)
        except NoSpace:
            assert self.tier.usage().slots == 32
            return Extent(0, 0)
        assert draft not in self.seen, "a generation was handed out twice"
        self.seen.add(draft)
        self.written[draft] = b""
        return draft

    @rule(draft=drafts, size_bytes=st.integers(0, 20_000), byte=st.integers(0, 255))
    def write(self, draft: Extent, size_bytes: int, byte: int) -> None:
        if draft not in self.written:
            with pytest.raises(Superseded):
                self.tier.open_draft(draft)
            return
        payload = bytes([byte]) * size_bytes
        write(self.tier, draft, payload)
        self.written[draft] = payload + self.written[draft][len(payload) :]

    @rule(target=extents, draft=consumes(drafts))
    def seal(self, draft: Extent) -> Extent:
        if draft not in self.written:
            with pytest.raises(Superseded):
                self.tier.seal(draft, block_header(1))
            return draft
        self.number += 1
        extent = self.tier.seal(draft, block_header(self.number)).extent
        self.live[extent] = self.written.pop(draft)
        return extent

    @rule(draft=drafts)
    def abort(self, draft: Extent) -> None:
        if self.written.pop(draft, None) is None:
            with pytest.raises(Superseded):
                self.tier.abort(draft)
        else:
            self.tier.abort(draft)

    @rule(target=readers, extent=extents)
    def lease(self, extent: Extent) -> tuple[Lease | None, bytes]:
        if extent not in self.live:
            with pytest.raises(Superseded):
                self.tier.lease(extent)
            return None, b""
        lease = self.tier.lease(extent)
        self.open_leases.append(lease)
        return lease, self.live[extent]

    @rule(reader=readers)
    def read(self, reader: tuple[Lease | None, bytes]) -> None:
        lease, payload = reader
        if lease:
            assert os.pread(lease.fileno(), MIB, 0) == payload

    @rule(reader=consumes(readers))
    def end_lease(self, reader: tuple[Lease | None, bytes]) -> None:
        lease, _ = reader
        if lease:
            lease.close()
            self.open_leases.remove(lease)

    @rule(extent=extents)
    def free(self, extent: Extent) -> None:
        if self.live.pop(extent, None) is None:
            with pytest.raises(Superseded):
                self.tier.free(extent)
        else:
            self.tier.free(extent, charge_uid=5)

    @rule()
    def sweep(self) -> None:
        self.tier.sweep()
        if not self.open_leases:
            assert self.tier.usage().held_bytes == 0

    @invariant()
    def accounts_balance(self) -> None:
        usage = self.tier.usage()
        assert usage.used_bytes <= usage.capacity_bytes
        assert usage.slots == len(self.written) + len(self.live)
        assert usage.held_bytes == self.tier.charged_bytes(5) + self.tier.charged_bytes(0)
        assert {entry.extent for entry in self.tier.sealed()} == set(self.live)
