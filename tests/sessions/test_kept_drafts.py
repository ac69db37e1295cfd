"""Puts into slots that keep the bytes of an earlier block: readers see whole blocks, each its own key's."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest
import xxhash

import kvfs
from kvfs.protocol.messages import BlockSeal, Control, ControlAnswer, DigestBatch, Op, Reserve, SealBlocks
from tests.support.session_answers import ALICE, DESCRIPTION, descriptors, digest, extents, results
from tests.support.sessions import MIB, SERVICE_GID, RawClient, Server, fork, session_server
from tests.support.stores import NAMESPACE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs a private tmpfs")

SIZE = 256 << 10
KEPT = 12
"""Slots of this size: more than the tests ask for, and within what the tier lets free ones keep."""
KEYS = [bytes([number]) * 16 for number in range(1, 7)]
ROUNDS = 150


@pytest.fixture
def server() -> Iterator[Server]:
    with session_server(dram_bytes=64 * MIB) as running:
        yield running


def leave_kept_slots(server: Server) -> None:
    """Leave KEPT free slots with bytes that nobody has read, and no draft: those that a client reserves ahead take such
    slots, and are dropped when its session ends, which is some time after it has closed."""
    with RawClient(server) as raw:
        [opened] = raw.ask(Control(Op.OPEN_NAMESPACE, {"description": DESCRIPTION}))
        assert isinstance(opened.answer, ControlAnswer)
        handle = opened.answer.result["handle"]
        payload = bytes(SIZE)
        checksum = xxhash.xxh3_64_intdigest(payload)  # else a thread has the slots open to compute it
        answers = raw.ask(Reserve((SIZE,) * KEPT, kept=True))
        for descriptor in descriptors(answers):
            assert os.write(descriptor, payload) == SIZE
            os.close(descriptor)
        keys = list(map(digest, range(KEPT)))
        seals = [
            BlockSeal(draft.slot, draft.generation, key, checksum=checksum)
            for draft, key in zip(extents(answers), keys, strict=True)
        ]
        done = raw.ask(SealBlocks(handle, tuple(seals)), DigestBatch(Op.REMOVE_BLOCK, handle, b"".join(keys)))
        assert [result.status for result in results(done)] == [0] * 2 * KEPT


def kept_sizes(server: Server, count: int = 4) -> list[int]:
    """Ask for drafts with bytes; return how many each has. They are dropped a while after the return."""
    with RawClient(server) as raw:
        [answer] = raw.ask(Reserve((SIZE,) * count, kept=True))
        for descriptor in answer.descriptors:
            os.close(descriptor)
        return [entry.size_bytes for entry in extents([answer])]


def test_only_who_may_read_the_whole_tier_gets_a_slot_with_bytes(server: Server) -> None:
    leave_kept_slots(server)
    assert kept_sizes(server) == [SIZE] * 4
    assert fork(lambda _: kept_sizes(server), uid=ALICE, gid=ALICE).result() == [0] * 4
    member = fork(lambda _: kept_sizes(server), uid=ALICE, gid=ALICE, groups=(SERVICE_GID,))
    assert member.result() == [SIZE] * 4


def test_a_draft_that_was_asked_for_without_them_has_no_bytes(server: Server) -> None:
    leave_kept_slots(server)
    with RawClient(server) as raw:
        [answer] = raw.ask(Reserve((SIZE,) * 8))
        assert [entry.size_bytes for entry in extents([answer])] == [0] * 8
        for descriptor in answer.descriptors:
            assert os.fstat(descriptor).st_size == 0
            os.close(descriptor)
    assert kept_sizes(server) == [SIZE] * 4


def test_a_block_of_another_size_has_nothing_of_the_one_before(server: Server) -> None:
    with server.connect() as client, client.blocks(NAMESPACE) as blocks:
        into = bytearray(2 * SIZE)
        for number in range(60):
            size = (SIZE, SIZE, SIZE // 2, SIZE + 1, 1, SIZE - 1)[number % 6]
            payload = bytes([number + 1]) * size
            key = os.urandom(16)
            assert blocks.put([key], [payload]) == [True]
            if number % 3:  # what was read is emptied
                assert blocks.get_into([key], [into]) == [size]
                assert into[:size] == payload
            [view] = blocks.get([key])
            assert view is not None
            assert bytes(view) == payload
            view.release()
            blocks.remove([key])
            assert blocks.put([key], [bytes([255]) * SIZE]) == [True]
            blocks.remove([key])


def test_a_reader_sees_a_keys_own_bytes_or_a_miss(server: Server) -> None:
    """Each round gives the keys new slots, mostly of other keys, while others read them and hold views."""

    def read(pipe: socket.socket) -> tuple[int, int]:
        into, seen, wrong = bytearray(SIZE), 0, 0
        pipe.setblocking(False)
        with server.connect() as client, client.blocks(NAMESPACE) as blocks:
            pipe.send(b"ready")
            said = False
            while True:
                for key in KEYS:
                    if blocks.get_into([key], [into]) == [SIZE]:
                        seen, wrong = seen + 1, wrong + (into != key * (SIZE // 16))
                for key, view in zip(KEYS, blocks.get(KEYS), strict=True):
                    if view is not None:
                        seen, wrong = seen + 1, wrong + (bytes(view) != key * (SIZE // 16))
                        view.release()
                if seen and not said:
                    said = True
                    pipe.send(b"seen")
                try:
                    pipe.recv(1)
                except BlockingIOError:
                    continue
                return seen, wrong

    readers = [fork(read) for _ in range(2)]
    for reader in readers:
        reader.wait_for(b"ready")
    payloads = [key * (SIZE // 16) for key in KEYS]
    with server.connect() as client, client.blocks(NAMESPACE) as blocks:
        silent, number = {reader.pipe for reader in readers}, 0
        while number < ROUNDS or silent:  # a reader may come to run late
            silent.difference_update(select.select(list(silent), [], [], 0)[0])
            shift = number % len(KEYS)
            keys = KEYS[shift:] + KEYS[:shift]
            blocks.put(keys, payloads[shift:] + payloads[:shift])
            blocks.remove(keys[: 1 + number % len(KEYS)])
            number += 1
    for reader in readers:
        reader.wait_for(b"seen")
        reader.pipe.send(b"x")
    found = [reader.result() for reader in readers]
    assert all(seen > 0 for seen, _ in found)
    assert [wrong for _, wrong in found] == [0, 0]


def test_a_view_outlives_its_block_and_the_next_in_its_slot(server: Server) -> None:
    with server.connect() as client, client.blocks(NAMESPACE) as blocks:
        for number in range(20):
            key = os.urandom(16)
            blocks.put([key], [bytes([number]) * SIZE])
            [view] = blocks.get([key])
            assert isinstance(view, kvfs.View)
            blocks.remove([key])
            blocks.put(KEYS, [b"\xff" * SIZE] * len(KEYS))
            assert bytes(view) == bytes([number]) * SIZE
            view.release()
            blocks.remove(KEYS)
