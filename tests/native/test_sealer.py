"""The thread that seals blocks, on a table and slots by hand: what it writes, what it leaves to the event loop."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

from kvfs._native.seal.sealer import NEW, THERE, UNINDEXED, Sealer
from kvfs._native.shared import slots
from kvfs._native.shared.table import Table
from tests.support.seal_packets import SEAL, answer_of, keys_of
from tests.support.sessions import MIB
from tests.support.waits import WAIT_S, eventually


@dataclass
class Alone:
    """A table, slots and a sealing thread without a store."""

    table: Table
    folder: int
    sealer: Sealer
    channel: socket.socket
    number: int

    def draft(self, slot: int, data: bytes) -> tuple[int, int]:
        os.close(slots.create(self.folder, slot))
        descriptor = slots.open_slot(self.folder, slot, os.O_RDWR)
        os.pwrite(descriptor, data, 0)
        os.close(descriptor)
        generation = self.table.begin(slot)
        self.sealer.grant(slot, generation, self.number)
        return slot, generation

    def seal(self, draft: tuple[int, int], key: bytes, checksum: int | None = None) -> int:
        flags = 0 if checksum is None else 1
        [status] = answer_of(self.channel, SEAL.pack(*draft, key, bytes(16), flags, 0, checksum or 0))
        return status


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., Alone]]:
    made: list[Alone] = []

    def make(*, entries: int = 64, room: int = 8, largest: int = MIB, ids: int = 100) -> Alone:
        table = Table.create(tmp_path / "table", bytes(16), 64, entries)
        (tmp_path / "slots").mkdir()
        folder = os.open(tmp_path / "slots", os.O_RDONLY)
        sealer = Sealer(table, folder, largest, channels=2, room=room)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(WAIT_S)
        number = sealer.open(theirs.detach(), 1000, 7)
        sealer.give_ids(500, ids)
        made.append(Alone(table, folder, sealer, ours, number))
        return made[-1]

    yield make
    for each in made:
        each.channel.close()
        each.sealer.close()
        each.table.close()
        os.close(each.folder)


def test_the_thread_writes_header_and_entry(alone: Callable[..., Alone]) -> None:
    here = alone()
    [key] = keys_of(1)
    draft = here.draft(3, b"payload")
    assert here.seal(draft, key, xxhash.xxh3_64_intdigest(b"payload")) == 0
    entry, header = here.table.get(key), here.table.read_header(3)
    assert entry is not None
    assert (entry.kind, entry.slot, entry.generation, entry.size_bytes) == (2, 3, draft[1] + 1, 7)
    assert (header.key, header.object_id, header.sequence) == (key, 500, 500)
    assert (header.uid, header.bucket_id) == (1000, 7)
    assert header.checksum == xxhash.xxh3_64_intdigest(b"payload")
    [sealed] = here.sealer.take()
    assert (sealed.outcome, sealed.slot, sealed.generation, sealed.key) == (NEW, *draft, key)
    assert sealed.size_bytes == 7
    assert sealed.has_checksum
    assert here.sealer.take() == []


def test_the_thread_follows_its_writer_where_it_may_run(alone: Callable[..., Alone]) -> None:
    def of_threads() -> list[set[int]]:
        found = []
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # one of an earlier test's, which has ended since
                found.append(os.sched_getaffinity(int(thread)))
        return found

    def seal_on(slot: int, processor: int) -> int:
        """Twice, since the thread moves after its answer."""
        failed = 0
        for at, key in zip((slot, slot + 1), keys_of(2), strict=True):
            seal = SEAL.pack(*here.draft(at, b"data"), key, bytes(16), 0, processor + 1, 0)
            failed += answer_of(here.channel, seal) != [0]
        return failed

    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        pytest.skip("there is one processor")
    here = alone()
    for slot, processor in enumerate(sorted(allowed)[:2]):
        assert seal_on(2 * slot, processor) == 0
        assert {processor} in of_threads()
    assert seal_on(4, 0xFFFFFFF0) == 0  # no machine has it
    assert all(found == allowed for found in of_threads())


def test_a_channel_keeps_its_number_until_the_event_loop_lets_go(alone: Callable[..., Alone]) -> None:
    """Else the end of its session would end the next session's channel."""
    here = alone()
    here.channel.shutdown(socket.SHUT_WR)
    assert here.channel.recv(1) == b""  # the thread has ended it
    numbers: list[int] = []
    for _ in range(2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            if numbers:
                here.sealer.close_channel(here.number)
            numbers.append(here.sealer.open(os.dup(theirs.fileno()), 1000, 7))
    assert numbers == [1 - here.number, here.number]


def test_where_the_thread_has_no_room_the_event_loop_is_asked(alone: Callable[..., Alone]) -> None:
    here = alone(room=2, ids=3)
    drafts = [here.draft(slot, b"x") for slot in range(5)]
    keys = keys_of(5)
    assert [here.seal(drafts[i], keys[i]) for i in (0, 1)] == [0, 0]
    assert here.seal(drafts[2], keys[2]) == errno.EAGAIN
    assert [sealed.key for sealed in here.sealer.take()] == keys[:2]
    assert here.seal(drafts[2], keys[2]) == 0
    assert here.seal(drafts[3], keys[3]) == errno.EAGAIN
    here.sealer.give_ids(900, 1)
    assert here.seal(drafts[3], keys[3]) == 0
    assert [sealed.object_id for sealed in here.sealer.take()] == [502, 900]
    assert here.table.get(keys[4]) is None


def test_a_block_past_the_largest_size_stays_a_draft(alone: Callable[..., Alone]) -> None:
    here = alone(largest=4096)
    [key] = keys_of(1)
    assert here.seal(here.draft(0, bytes(4097)), key) == errno.EFBIG
    assert here.sealer.take() == []
    assert here.table.get(key) is None


def test_a_draft_with_holes_is_for_the_event_loop(alone: Callable[..., Alone]) -> None:
    here, [key] = alone(), keys_of(1)
    draft = here.draft(0, b"x")
    with os.fdopen(slots.open_slot(here.folder, 0, os.O_RDWR), "wb") as file:
        file.truncate(MIB)
    assert here.seal(draft, key) == errno.EAGAIN
    assert here.sealer.take() == []


def test_a_full_table_gives_the_slot_back(alone: Callable[..., Alone]) -> None:
    here = alone(entries=4)
    keys = keys_of(4)
    drafts = [here.draft(slot, b"x") for slot in range(4)]
    assert [here.seal(*pair) for pair in zip(drafts, keys, strict=True)] == [0, 0, 0, errno.ENOSPC]
    assert [sealed.outcome for sealed in here.sealer.take()] == [NEW] * 3 + [UNINDEXED]


def test_nothing_is_sealed_while_the_sealer_is_held(alone: Callable[..., Alone]) -> None:
    here = alone()
    [key] = keys_of(1)
    draft = here.draft(0, b"x")
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(here.seal(draft, key)))
    with here.sealer:
        thread.start()
        here.table.put(key, 2, 9, 2, 1)
    thread.join()
    assert statuses == [errno.EEXIST]
    assert [sealed.outcome for sealed in here.sealer.take()] == [THERE]


def test_what_was_answered_as_sealed_is_pending_until_it_is_taken(alone: Callable[..., Alone]) -> None:
    """The event loop looks while the thread seals, and waits for no lock."""
    here = alone(room=32)
    keys = keys_of(32)
    drafts = [here.draft(slot, b"x") for slot in range(32)]

    def seal() -> None:
        for draft, key in zip(drafts, keys, strict=True):
            assert here.seal(draft, key) == 0

    thread = threading.Thread(target=seal)
    thread.start()
    eventually(lambda: here.sealer.pending == 32, "all are", every_s=0)
    thread.join()
    assert [sealed.key for sealed in here.sealer.take()] == keys
    assert here.sealer.pending == 0
