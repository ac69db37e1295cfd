"""Listings in the native loop: names that were read ahead, answered reply by reply."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

import pytest

from kvfs._native.fuse import loop as fuse_loop
from kvfs.errors import Superseded
from tests.support.fuse_stand import (
    ATTR,
    ENTRY,
    READDIRPLUS,
    ROOT,
    Stand,
    read_in,
)
from tests.support.seeds import SEED

FH, FROM = 5, 2
REPLY_BYTES = 4096
"""The least that the kernel asks for."""


@dataclass(frozen=True)
class Entry:
    nodeid: int
    ino: int
    offset: int
    kind: int
    name: bytes


def parse(body: bytes) -> list[Entry]:
    found, at, head = [], 0, ENTRY.size + ATTR.size
    while at < len(body):
        nodeid = ENTRY.unpack_from(body, at)[0]
        ino, offset, length, kind = struct.unpack_from("<QQII", body, at + head)
        name = body[at + head + 24 : at + head + 24 + length]
        end = (head + 24 + length + 7) & ~7
        assert not any(body[at + head + 24 + length : at + end]), "padding shows what was in the buffer"
        found.append(Entry(nodeid, ino, offset, kind, name))
        at += end
    assert at == len(body)
    return found


def names_of(count: int, first: int = 0) -> list[tuple[bytes, int, bool]]:
    """Every third is a directory, and every third a symbolic link."""
    return [
        (b"%05d%s" % (i, b"" if i % 3 else b"/"), 1000 + i, i % 3 == 1) for i in range(first, first + count)
    ]


def kind_of(tail: bytes, link: bool) -> int:
    """As DT_DIR, DT_REG and DT_LNK."""
    return 4 if tail.endswith(b"/") else 10 if link else 8


def ask(stand: Stand, offset: int, size: int = REPLY_BYTES, *, fh: int = FH) -> list[Entry]:
    return parse(stand.ask(READDIRPLUS, ROOT, read_in(fh, offset, size)))


def called(stand: Stand, offset: int, *, fh: int = FH) -> int:
    """The unique of a READDIRPLUS that came as a call."""
    unique = stand.send(READDIRPLUS, ROOT, read_in(fh, offset, REPLY_BYTES))
    (call,) = stand.calls(1)
    assert (call.opcode, call.unique, call.other) == (fuse_loop.READDIRPLUS, unique, fh)
    assert (call.offset, call.size, call.nodeid) == (offset, REPLY_BYTES, ROOT)
    return unique


def test_names_that_were_read_ahead_are_answered_without_the_library(stand: Stand) -> None:
    stand.loop.listing_open(FH, FROM)
    names = names_of(60)
    unique = called(stand, FROM)
    stand.loop.listing_fill(FH, FROM, names, False)
    stand.loop.answer_listing(unique, FH, FROM, REPLY_BYTES)
    answered, error, body = stand.reply()
    assert (answered, error) == (unique, 0)
    found = parse(body)
    assert len(found) == REPLY_BYTES // len(body[: len(body) // len(found)])
    while len(found) < len(names):
        found += ask(stand, found[-1].offset)
    assert [(each.name, each.ino) for each in found] == [
        (tail.removesuffix(b"/"), ino) for tail, ino, _ in names
    ]
    assert [each.offset for each in found] == list(range(FROM + 1, FROM + 1 + len(names)))
    assert [each.kind for each in found] == [kind_of(tail, link) for tail, _, link in names]
    assert {each.nodeid for each in found} == {0}, "the kernel would count a lookup"
    unique = called(stand, found[-1].offset)
    stand.loop.listing_fill(FH, found[-1].offset, [], True)
    stand.loop.answer_listing(unique, FH, found[-1].offset, REPLY_BYTES)
    assert stand.reply() == (unique, 0, b"")
    assert ask(stand, found[-1].offset) == []
    assert stand.loop.stats()["relayed"] == 0
    stand.loop.listing_close(FH)


def test_what_comes_with_attributes_is_the_librarys_and_begins_another_walk(stand: Stand) -> None:
    stand.loop.listing_open(FH, FROM)
    stand.loop.listing_fill(FH, FROM, names_of(3), True)
    assert len(ask(stand, FROM)) == 3
    stand.send(READDIRPLUS, ROOT, read_in(FH, 0, REPLY_BYTES))
    assert stand.relayed().opcode == READDIRPLUS
    unique = called(stand, FROM)
    stand.loop.answer_status(unique, 0)
    assert stand.reply()[0] == unique
    stand.loop.listing_close(FH)


def test_handles_without_a_listing_are_relayed(stand: Stand) -> None:
    stand.loop.listing_open(FH, FROM)
    stand.loop.listing_open(FH + 1024, FROM)  # with the same hash
    stand.loop.listing_fill(FH + 1024, FROM, names_of(1), True)
    stand.loop.listing_close(FH)
    stand.loop.listing_close(FH)
    stand.send(READDIRPLUS, ROOT, read_in(FH, FROM, REPLY_BYTES))
    assert stand.relayed().opcode == READDIRPLUS
    assert len(ask(stand, FROM, fh=FH + 1024)) == 1
    with pytest.raises(Superseded):
        stand.loop.listing_fill(FH, FROM, names_of(1), True)


def test_an_answer_that_nothing_was_filled_for_is_an_error(stand: Stand) -> None:
    stand.loop.listing_open(FH, FROM)
    unique = called(stand, FROM)
    stand.loop.listing_fill(FH, FROM, names_of(3), False)
    stand.loop.answer_listing(unique, FH, FROM + 3, REPLY_BYTES)
    assert stand.reply()[:2] == (unique, -116)


def test_a_name_that_is_too_long_is_refused(stand: Stand) -> None:
    stand.loop.listing_open(FH, FROM)
    stand.loop.listing_fill(FH, FROM, [(b"n" * 255 + b"/", 1, False), (b"m" * 255, 2, True)], True)
    assert [len(each.name) for each in ask(stand, FROM)] == [255, 255]
    with pytest.raises(ValueError, match="256 bytes"):
        stand.loop.listing_fill(FH, FROM, [(b"n" * 256, 1, False)], True)


@pytest.mark.seeded
@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
def test_any_place_among_the_names_is_answered(stand: Stand, seed: int) -> None:
    """In any order, with replies of any size, and names of any length."""
    order = random.Random(seed)
    first = FROM + order.randrange(1000)
    names = [
        (
            bytes(order.choices(b"abc", k=order.randint(1, 255))) + b"/" * order.randint(0, 1),
            order.randrange(1 << 64),
            order.random() < 0.5,
        )
        for _ in range(order.randint(1, 300))
    ]
    stand.loop.listing_open(FH, FROM)
    stand.loop.listing_fill(FH, first, names, True)
    for _ in range(100):
        offset = order.randint(first, first + len(names))
        found = ask(stand, offset, order.randint(408, 20_000))
        expected = names[offset - first :][: len(found)]
        assert [(each.name, each.ino, each.kind) for each in found] == [
            (tail.removesuffix(b"/"), ino, kind_of(tail, link)) for tail, ino, link in expected
        ]
        assert [each.offset for each in found] == list(range(offset + 1, offset + 1 + len(found)))
        assert found or offset == first + len(names)
    stand.loop.answer_status(called(stand, first + len(names) + 1), 0)
