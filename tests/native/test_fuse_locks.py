"""Locks of the native FUSE loop against a plain model: bytes, and who has them how."""

from __future__ import annotations

import errno
import fcntl
import random
import struct
from dataclasses import dataclass, field

import pytest

from tests.support.fuse_stand import FLUSH, INTERRUPT, OPEN, RELEASE, Stand, open_in, release_in
from tests.support.seeds import SEED

GETLK, SETLK, SETLKW = 31, 32, 33
R, W, UNLOCK = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
END, BYTES = (1 << 64) - 1, 12
"""The last byte of a file for locks; the bytes that the model tells apart, the last of them up to END."""
NODE = 10


def lk_in(owner: int, start: int, end: int, kind: int, *, whole: bool = False, handle: int = 2) -> bytes:
    return struct.pack("<4Q4I", handle, owner, start, end, kind, 0, int(whole), 0)


@dataclass
class Model:
    """Owners' modes by byte, and who waits."""

    held: dict[int, dict[int, int]] = field(default_factory=dict)
    waiting: list[tuple[int, int, range, int]] = field(default_factory=list)
    """(unique, owner, bytes, mode), in order."""

    def conflicts(self, owner: int, where: range, mode: int) -> set[int]:
        return {
            other
            for other, modes in self.held.items()
            for byte in where
            if other != owner and byte in modes and W in (mode, modes[byte])
        }

    def give(self, owner: int, where: range, mode: int) -> None:
        modes = self.held.setdefault(owner, {})
        for byte in where:
            modes.pop(byte, None)
            if mode != UNLOCK:
                modes[byte] = mode

    def granted(self) -> set[int]:
        """Who waits no longer."""
        done: set[int] = set()
        while True:
            ready = [waiter for waiter in self.waiting if not self.conflicts(*waiter[1:])]
            if not ready:
                return done
            self.give(*ready[0][1:])
            self.waiting.remove(ready[0])
            done.add(ready[0][0])

    def is_deadlock(self, owner: int, where: range, mode: int) -> bool:
        seen, look = set(), self.conflicts(owner, where, mode)
        while look:
            other = look.pop()
            if other == owner:
                return True
            if other not in seen:
                seen.add(other)
                for _, waiter, its, kind in self.waiting:
                    look |= self.conflicts(waiter, its, kind) if waiter == other else set()
        return False


@pytest.mark.seeded
@pytest.mark.parametrize("whole", [False, True], ids=["fcntl", "flock"])
def test_locks_are_those_of_the_model(stand: Stand, whole: bool) -> None:
    chance, model = random.Random(SEED), Model()
    stand.sealed(NODE, b"bytes")
    for _ in range(3000):
        waits_of = {owner for _, owner, _, _ in model.waiting}
        owner = chance.choice([owner for owner in range(1, 6) if owner not in waits_of] or [0])
        if owner == 0 or chance.random() < 0.1:
            if model.waiting:
                waiter = chance.choice(model.waiting)
                model.waiting.remove(waiter)
                stand.send(INTERRUPT, 0, struct.pack("<Q", waiter[0]))
                assert stand.reply() == (waiter[0], -errno.EINTR, b"")
            continue
        first, last = sorted((chance.randrange(BYTES), chance.randrange(BYTES)))
        where = range(BYTES) if whole else range(first, last + 1)
        end = END if where.stop == BYTES else where.stop - 1
        mode = chance.choice((R, W, UNLOCK, UNLOCK))
        raw = lk_in(owner, 0 if whole else first, end, mode, whole=whole)
        if chance.random() < 0.2 and mode != UNLOCK:
            found = struct.unpack("<2Q2I", stand.ask(GETLK, NODE, raw))
            assert (found[2] != UNLOCK) == bool(model.conflicts(owner, where, mode))
        elif chance.random() < 0.05 and not whole:
            flushed = stand.send(FLUSH, NODE, struct.pack("<QIIQ", 2, 0, 0, owner))
            model.give(owner, range(BYTES), UNLOCK)
            done = model.granted() | {flushed}
            assert {stand.reply()[:2] for _ in done} == {(unique, 0) for unique in done}
        elif chance.random() < 0.3 and mode != UNLOCK and not model.is_deadlock(owner, where, mode):
            unique = stand.send(SETLKW, NODE, raw)
            if whole and model.conflicts(owner, where, mode):
                model.give(owner, where, UNLOCK)
            model.waiting.append((unique, owner, where, mode))
        else:
            unique = stand.send(SETLK, NODE, raw)
            refused = mode != UNLOCK and bool(model.conflicts(owner, where, mode))
            assert stand.reply() == (unique, -errno.EAGAIN if refused else 0, b"")
            if not refused:
                model.give(owner, where, mode)
        done = model.granted()
        assert {stand.reply()[:2] for _ in done} == {(unique, 0) for unique in done}
        stand.nothing_else()


def test_two_who_wait_for_each_other_are_told(stand: Stand) -> None:
    stand.sealed(NODE, b"bytes")
    stand.ask(SETLK, NODE, lk_in(1, 0, 0, W))
    stand.ask(SETLK, NODE, lk_in(2, 1, 1, W))
    waits = stand.send(SETLKW, NODE, lk_in(1, 1, 1, W))
    with pytest.raises(OSError, match="deadlock"):
        stand.ask(SETLKW, NODE, lk_in(2, 0, 0, W))
    stand.ask(SETLK, NODE, lk_in(2, 0, END, UNLOCK))
    assert stand.reply() == (waits, 0, b"")


def test_locks_end_with_their_handle(stand: Stand) -> None:
    """An open file's RELEASE ends what was taken through it, whoever the owner is."""
    stand.draft(NODE)
    stand.ask(SETLK, NODE, lk_in(1, 0, END, W, handle=4))
    stand.ask(SETLK, NODE, lk_in(7, 0, END, W, whole=True, handle=4))
    for whole in (False, True):
        with pytest.raises(OSError, match="unavailable"):
            stand.ask(SETLK, NODE, lk_in(2, 0, 0, R, whole=whole, handle=6))
    stand.send(RELEASE, NODE, struct.pack("<QIIQ", 4, 0, 2, 7))
    stand.reply()
    for whole in (False, True):
        stand.ask(SETLK, NODE, lk_in(2, 0, 0, R, whole=whole, handle=6))


def test_locks_of_descriptions_of_sealed_bytes_end_with_the_last_that_has_these_open(stand: Stand) -> None:
    """All opens of them have one handle; a description's lock has an owner of its own, of which FLUSH says nothing."""
    stand.sealed(NODE, b"bytes")
    [handle, other] = [struct.unpack_from("<Q", stand.ask(OPEN, NODE, open_in()))[0] for _ in range(2)]
    assert handle == other
    stand.ask(SETLK, NODE, lk_in(1, 0, END, R, handle=handle))
    stand.ask(FLUSH, NODE, struct.pack("<QIIQ", handle, 0, 0, 7))
    for _ in range(2):
        with pytest.raises(OSError, match="unavailable"):
            stand.ask(SETLK, NODE, lk_in(2, 0, 0, W))
        stand.ask(RELEASE, NODE, release_in(handle))
    stand.ask(SETLK, NODE, lk_in(2, 0, 0, W))


def test_versions_of_a_file_have_one_lock(stand: Stand) -> None:
    stand.sealed(NODE, b"old")
    stand.sealed(NODE + 1, b"new")
    stand.loop.node_locks(NODE + 1, 1234)
    stand.loop.node_locks(NODE, 1234)
    stand.ask(SETLK, NODE, lk_in(1, 0, END, R))
    with pytest.raises(OSError, match="unavailable"):
        stand.ask(SETLK, NODE + 1, lk_in(2, 5, 5, W))
    with pytest.raises(OSError, match="Invalid"):
        stand.ask(SETLK, NODE, lk_in(1, 5, 4, W))
