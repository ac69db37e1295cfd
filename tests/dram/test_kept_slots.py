"""Free slots that keep their pages for the next block: nobody sees the new bytes as the old object's.

Whoever has read a slot may have its pages in flight (a pipe, a socket, a device) after he has closed it, where no
lease shows them. Every way to take such a reference is tried here, alone and in any order.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
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

from kvfs import limits
from kvfs._native.shared import slots as native
from kvfs.errors import NoSpace
from tests.conformance.tier_suite import block_header
from tests.support.waits import WAIT_S
from tiers.dram import tmpfs
from tiers.dram.tier import DramTier
from tiers.model.tier import Extent

pytestmark = [pytest.mark.mount, pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")]

KIB = 1 << 10
MIB = 1 << 20
SIZE = 64 * KIB
CAPACITY = 32 * MIB
MOST_KEPT = CAPACITY // limits.KEPT_PAGES_SHARE_OF_DRAM
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def tier() -> Iterator[DramTier]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-kept-"))
    tier = open_tier(base)
    yield tier
    tier.close()
    shutil.rmtree(base)


def open_tier(base: Path) -> DramTier:
    return DramTier.open(base / "dram", CAPACITY, store_id=bytes(16), max_slots=512, mode="tmpfs")


def put(tier: DramTier, payload: bytes) -> Extent:
    """Put a block as a writer does who takes slots with bytes of another."""
    draft = tier.reserve(kept_bytes=len(payload))
    fd = tier.open_draft(draft)
    if tier.kept(draft) not in (0, len(payload)):
        os.ftruncate(fd, 0)
    assert os.pwrite(fd, payload, 0) == len(payload)
    os.close(fd)
    return tier.seal(draft, block_header(draft.generation), 7).extent


def takes_kept(tier: DramTier) -> int:
    """How many bytes the next draft of this size has."""
    draft = tier.reserve(kept_bytes=SIZE)
    kept = tier.kept(draft)
    tier.abort(draft)
    return kept


# --- ways to take a reference to pages, each closed again ------------------------------------------------------
class Pipe:
    """A pipe with the first pages of a slot in flight."""

    def __init__(self) -> None:
        self.end, self.inlet = os.pipe()

    def read(self) -> bytes:
        os.close(self.inlet)
        data = os.read(self.end, SIZE)
        os.close(self.end)
        return data


def splice(fd: int) -> Pipe:
    pipe = Pipe()
    assert os.splice(fd, pipe.inlet, 4096, offset_src=0) == 4096
    return pipe


def vmsplice(fd: int) -> Pipe:
    pipe = Pipe()
    with mmap.mmap(fd, SIZE, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as mapping:
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(SIZE), 1, mmap.MAP_SHARED, fd, ctypes.c_long(0))
        vector = (ctypes.c_void_p * 2)(address, 4096)
        assert len(mapping) == SIZE
        assert libc.vmsplice(pipe.inlet, vector, ctypes.c_ulong(1), 0) == 4096
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(SIZE))
    return pipe


FLIGHTS: dict[str, Callable[[int], Pipe]] = {"splice": splice, "vmsplice": vmsplice}


@pytest.mark.parametrize("how", FLIGHTS)
def test_what_is_in_flight_stays_when_the_slot_is_reused(tier: DramTier, how: str) -> None:
    """Nobody has the slot open any more, and no lease shows the reader."""
    takes_kept(tier)
    extent = put(tier, b"old!" * (SIZE // 4))
    with tier.lease(extent) as lease:
        pipe = FLIGHTS[how](lease.fileno())
    assert tier.free(extent) == 0
    for _ in range(3):
        put(tier, b"new!" * (SIZE // 4))
    assert pipe.read() == b"old!" * 1024


def test_a_slot_that_nobody_has_read_keeps_its_pages(tier: DramTier) -> None:
    assert takes_kept(tier) == 0
    extent = put(tier, b"a" * SIZE)
    used = tier.usage().used_bytes
    assert tier.free(extent) == 0
    assert used - tier.usage().used_bytes == SIZE, "kept pages count as free"
    assert takes_kept(tier) == SIZE
    assert takes_kept(tier) == SIZE, "an aborted draft's slot keeps them, too"
    again = put(tier, b"b" * SIZE)
    assert again.slot == extent.slot
    with tier.lease(again) as lease:
        assert os.pread(lease.fileno(), 2 * SIZE, 0) == b"b" * SIZE


def read(fd: int) -> None:
    os.pread(fd, 1, 0)


def map_and_close(fd: int) -> None:
    mmap.mmap(fd, SIZE, prot=mmap.PROT_READ).close()


@pytest.mark.parametrize("use", [read, map_and_close, native.mark_read])
def test_a_slot_that_somebody_has_used_is_emptied(tier: DramTier, use: Callable[[int], None]) -> None:
    takes_kept(tier)
    extent = put(tier, b"a" * SIZE)
    with tier.lease(extent) as lease:
        use(lease.fileno())
    tier.free(extent)
    assert takes_kept(tier) == 0
    tier.free(put(tier, b"b" * SIZE))
    assert takes_kept(tier) == SIZE, "what was emptied counts as unread again"


def test_a_draft_that_its_writer_has_mapped_is_emptied(tier: DramTier) -> None:
    """A device may write into the mapping's pages after the writer has ended."""
    takes_kept(tier)
    draft = tier.reserve(kept_bytes=SIZE)
    fd = tier.open_draft(draft)
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE) as mapping:
        mapping[:] = bytes(SIZE)
    os.close(fd)
    tier.free(tier.seal(draft, block_header(1)).extent)
    assert takes_kept(tier) == 0


def test_the_services_own_copies_are_no_use(tier: DramTier) -> None:
    takes_kept(tier)
    draft = tier.reserve(SIZE)
    fd = tier.open_draft(draft)
    os.pwrite(fd, b"a" * SIZE, 0)
    os.close(fd)
    extent = tier.seal(draft, block_header(1)).extent  # without a checksum: the tier's thread reads it
    tier.checksums.wait(WAIT_S)
    os.close(tier.open_copy(extent))
    tier.free(extent)
    assert takes_kept(tier) == SIZE


def test_a_draft_of_no_kept_size_is_empty(tier: DramTier) -> None:
    takes_kept(tier)
    tier.free(put(tier, b"a" * SIZE))
    for draft in (tier.reserve(), tier.reserve(SIZE), tier.reserve(kept_bytes=SIZE - 1)):
        assert (tier.kept(draft), tier.draft_bytes(draft)) == (0, 0)


def test_kept_pages_are_bounded_and_make_room_for_what_is_asked_for(tier: DramTier) -> None:
    takes_kept(tier)
    extents = [put(tier, b"a" * SIZE) for _ in range(64)]
    free_bytes = tier.usage().capacity_bytes - tier.usage().used_bytes
    for extent in extents:
        tier.free(extent)
    assert sum(path.stat().st_blocks * 512 for path in tier.directory.iterdir()) == MOST_KEPT
    drafts = [tier.reserve(kept_bytes=SIZE) for _ in range(64)]
    assert sum(map(tier.kept, drafts)) == MOST_KEPT
    for draft in drafts:
        tier.abort(draft)
    whole = (free_bytes + 64 * SIZE) // tier.largest_object_bytes
    reserved = [tier.reserve(tier.largest_object_bytes) for _ in range(whole)]
    with pytest.raises(NoSpace):
        tier.reserve(tier.largest_object_bytes)
    for draft in reserved:
        tier.abort(draft)
    assert takes_kept(tier) == 0, "they gave their pages up"


def test_sizes_that_nobody_asks_for_are_not_kept(tier: DramTier) -> None:
    sizes = [SIZE + n * 4096 for n in range(limits.MAX_KEPT_SIZES + 2)]
    for size in sizes:
        tier.abort(tier.reserve(kept_bytes=size))
    for size in sizes:
        tier.free(put(tier, bytes(size)))
    kept = [size for size in reversed(sizes) if tier.kept(tier.reserve(kept_bytes=size))]
    assert kept == sizes[: -limits.MAX_KEPT_SIZES - 1 : -1]


def test_the_last_slots_are_found_among_those_that_keep_pages(tier: DramTier) -> None:
    takes_kept(tier)
    slots = tier.usage().max_slots
    tier.free(put(tier, b"a" * SIZE))
    drafts = [tier.reserve() for _ in range(slots)]
    assert all(tier.draft_bytes(draft) == 0 for draft in drafts)


def test_a_stop_that_keeps_the_tier_drops_kept_pages() -> None:
    base = Path(tempfile.mkdtemp(prefix="kvfs-kept-"))
    tier = open_tier(base)
    takes_kept(tier)
    tier.free(put(tier, b"a" * SIZE))
    tier.close(keep=True)
    assert sum(path.stat().st_blocks for path in tier.directory.iterdir()) == 0
    open_tier(base).close()
    assert not tmpfs.is_mounted(base / "dram")
    shutil.rmtree(base)


def test_a_mount_that_hides_reads_keeps_nothing(tier: DramTier) -> None:
    """As one of an earlier service was mounted; `resize` shows them again."""
    flags = 2 | 4 | 8 | 32
    assert libc.mount(b"none", os.fsencode(tier.root), None, ctypes.c_ulong(flags | 1024), None) == 0
    directory = os.open(tier.directory, os.O_RDONLY)
    assert not native.shows_reads(directory)
    tmpfs.resize(tier.root, CAPACITY, inodes=1000)
    assert native.shows_reads(directory)
    os.close(directory)


# --- any order -------------------------------------------------------------------------------------------------
class KeptSlotsMachine(RuleBasedStateMachine):
    """Blocks come and go, and readers take leases, mappings and pages in flight: each keeps its block's bytes."""

    blocks: Bundle[tuple[Extent, bytes]] = Bundle("blocks")
    readers: Bundle[tuple[Callable[[], bytes], bytes]] = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="kvfs-kept-"))
        self.tier = open_tier(self.base)
        self.number = 0
        self.live: list[tuple[Callable[[], bytes], bytes]] = []

    def teardown(self) -> None:
        found = [look() == expected for look, expected in self.live]
        self.tier.close()
        shutil.rmtree(self.base)
        assert all(found)

    @rule(target=blocks, size=st.sampled_from([SIZE, 20 * KIB]))
    def put(self, size: int) -> tuple[Extent, bytes]:
        self.number += 1
        word = self.number.to_bytes(4, "big")
        return put(self.tier, word * (size // 4)), word

    @rule(block=consumes(blocks))
    def free(self, block: tuple[Extent, bytes]) -> None:
        self.tier.free(block[0])

    @rule(block=blocks, how=st.sampled_from(["splice", "lease", "mapping", "copy"]))
    def read(self, block: tuple[Extent, bytes], how: str) -> None:
        extent, word = block
        with self.tier.lease(extent) as lease:
            fd = os.dup(lease.fileno())
        assert os.pread(fd, 4096, 4096) == word * 1024 if how == "copy" else True
        if how == "splice":
            self.live.append((splice(fd).read, word * 1024))
        elif how == "mapping":
            mapping = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
            self.live.append((lambda: mapping[:], word * 1024))
        elif how == "lease":
            held = os.dup(fd)
            self.live.append((lambda: _read_and_close(held), word * 1024))
        os.close(fd)

    @rule()
    def abort(self) -> None:
        self.tier.abort(self.tier.reserve(kept_bytes=SIZE))

    @rule()
    def end_a_reader(self) -> None:
        if self.live:
            look, expected = self.live.pop(0)
            assert look() == expected
        self.tier.sweep()

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        usage = self.tier.usage()
        assert usage.used_bytes <= usage.capacity_bytes
        kept = self.tier._accounting.kept
        assert 0 <= kept.total + kept.drafts_total <= MOST_KEPT


def _read_and_close(fd: int) -> bytes:
    data = os.pread(fd, 4096, 0)
    os.close(fd)
    return data


@pytest.mark.seeded
def test_readers_keep_their_bytes_in_any_order() -> None:
    run_state_machine_as_test(
        KeptSlotsMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


# --- pages ahead of demand -------------------------------------------------------------------------------------
async def test_slots_are_filled_ahead_where_pages_come_slowly(
    tier: DramTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FILL_WORTH_BYTES_S", 1 << 60)
    assert takes_kept(tier) == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.filler.run)
        with trio.fail_after(WAIT_S):
            while tier.filler.filled_bytes < MOST_KEPT // 2:  # noqa: ASYNC110 the tier has no event to wait for
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    drafts = [tier.reserve(kept_bytes=SIZE) for _ in range(MOST_KEPT // 2 // SIZE + 1)]
    assert [tier.kept(draft) for draft in drafts] == [SIZE] * (MOST_KEPT // 2 // SIZE) + [0]
    assert tier.usage().used_bytes >= MOST_KEPT // 2
    for draft in drafts:
        tier.abort(draft)
    with tier.lease(put(tier, b"a" * SIZE)) as lease:
        assert os.pread(lease.fileno(), 2 * SIZE, 0) == b"a" * SIZE


async def test_one_slot_tells_that_pages_come_fast(tier: DramTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILL_WORTH_BYTES_S", 1)
    for _ in range(10):
        tier.reserve(kept_bytes=SIZE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.filler.run)
        with trio.fail_after(WAIT_S):
            while not tier.filler.filled_bytes:  # noqa: ASYNC110 the tier has no event to wait for
                await trio.sleep(0.001)
        for _ in range(10):
            tier.reserve(kept_bytes=SIZE)
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert tier.filler.filled_bytes == SIZE


async def test_nothing_is_filled_in_a_tier_that_is_nearly_full(
    tier: DramTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FILL_WORTH_BYTES_S", 1 << 60)
    while tier.usage().capacity_bytes - tier.usage().used_bytes >= MOST_KEPT:
        put(tier, bytes(SIZE))
    takes_kept(tier)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.filler.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert tier.filler.filled_bytes == 0
