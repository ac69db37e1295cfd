"""Hazards: nothing is reused while it is leased, at any order of accesses, and no peer takes memory from another."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from kvfs import limits
from kvfs._native.hbm.hazards import ClientHazards, Generations, Hazards
from kvfs.errors import Busy, InvalidRequest, Superseded
from tests.support import hammers

PROGRAM, SOURCES = "hazards_hammer.c", ["hbm/hazards_core.c"]


def test_nothing_leased_is_reused(tmp_path: Path) -> None:
    """Blocks are leased and reused at full speed."""
    said = hammers.run(hammers.build(tmp_path, PROGRAM, SOURCES), 400_000)
    assert said[0] == "done"
    assert int(said[2]) > 0, "nothing was read"


@pytest.mark.parametrize("side", ["CLIENT", "SERVICE"])
def test_both_sides_have_to_look(tmp_path: Path, side: str) -> None:
    """The program finds what it is there to find."""
    assert hammers.run(hammers.build(tmp_path, PROGRAM, SOURCES, f"-DBREAK_{side}"), 40_000_000) == ["torn"]


def test_no_data_race(tmp_path: Path) -> None:
    """ThreadSanitizer sees reads of a slot ordered before its reuse, and writes before reads."""
    hammers.run_for_races(tmp_path, PROGRAM, SOURCES, 20_000)


def test_a_lease_names_slot_and_generation() -> None:
    generations, hazards = Generations(8), Hazards(2)
    client = ClientHazards(generations.fd, hazards.fd)
    generations.set(3, 6)
    for slot, generation in ((3, 4), (3, 7), (3, 8), (2, 6), (8, 6), (0, 0), (3, (1 << 44) + 6)):
        with pytest.raises(Superseded):
            client.publish(slot, generation)
    place = client.publish(3, 6)
    assert hazards.name(3, 6)
    assert not hazards.name(3, 4)
    assert not hazards.name(2, 6)
    again = client.publish(3, 6)
    with pytest.raises(Busy, match="all 2 leases"):
        client.publish(3, 6)
    client.clear(place)
    assert hazards.name(3, 6), "leased twice, ended once"
    client.clear(again)
    assert not hazards.name(3, 6)
    for wrong in (place, 2):
        with pytest.raises(InvalidRequest, match="no lease"):
            client.clear(wrong)


def test_a_refused_lease_leaves_no_hazard() -> None:
    generations, hazards = Generations(1), Hazards(1)
    client = ClientHazards(generations.fd, hazards.fd)
    generations.set(0, 2)
    with pytest.raises(Superseded):
        client.publish(0, 4)
    assert not hazards.name(0, 4)
    assert client.publish(0, 2) == 0


def test_clients_cannot_write_generations_or_take_memory_away() -> None:
    generations, hazards = Generations(8), Hazards()
    assert os.fstat(hazards.fd).st_size == limits.HBM_HAZARDS * 8
    for fd in (generations.fd, hazards.fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(PermissionError):
        os.pwrite(generations.fd, b"\2", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(generations.fd, 0)
    copy = os.open(f"/proc/self/fd/{generations.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(copy, b"\2", 0)
    os.close(copy)


def test_foreign_memory_is_refused() -> None:
    generations, hazards = Generations(1), Hazards(1)
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 64)
    with pytest.raises((InvalidRequest, OSError)):
        ClientHazards(plain, hazards.fd)
    with pytest.raises((InvalidRequest, OSError)):
        ClientHazards(generations.fd, plain)
    os.close(plain)
    with pytest.raises(InvalidRequest, match="words"):
        Generations(0)
    with pytest.raises(InvalidRequest, match="slot 1 of 1"):
        generations.set(1, 2)
