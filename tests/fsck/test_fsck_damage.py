"""Damage to any file of a store: `kvfs fsck` finds and repairs it, or it is harmless, and what is served is right."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvfs.cli.offline.fsck_command import Exit
from kvfs.formats import (
    RECORD_ALIGNMENT,
    RECORD_HEADER,
    RECORD_MAGIC,
    SEGMENT_DATA_START,
    SEGMENT_HEADER,
    SLOT_HEADER,
    TABLE_HEADER,
    SegmentState,
)
from kvfs.limits import MIB
from tests.support.checked_stores import DURABLE, Life, flip, fsck, live, serve
from tests.support.seeds import SEED
from tiers.model.objects import Name

ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", "5"))


@pytest.fixture(scope="module")
def lived(module_fast_path: Path) -> dict[bool, Life]:
    """A store that was stopped cleanly, and one that was killed."""
    found = {}
    for killed in (False, True):
        found[killed] = live(module_fast_path / str(killed), 7, killed=killed)
        assert fsck(found[killed].path)["exit_code"] == Exit.CLEAN
    return found


@pytest.fixture
def copy(lived: dict[bool, Life], fast_path: Path) -> Callable[[bool], Path]:
    def make(killed: bool) -> Path:
        target = fast_path / "data"
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(lived[killed].path, target, copy_function=_copy_sparse)
        return target

    return make


def _copy_sparse(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        zeros = bytes(1 << 20)
        while piece := old.read(len(zeros)):
            if piece == zeros[: len(piece)]:
                new.seek(len(piece), os.SEEK_CUR)
            else:
                new.write(piece)
        new.truncate()
    shutil.copystat(source, target)


MENDED_BY_A_START = "logged again at the next start"


def check_damage(path: Path, life: Life, before: tuple[dict[Name, bytes], set[bytes]]) -> str:
    """Whether damage is found and repaired, or harmless; which."""
    found = fsck(path, repair=False)
    if found["exit_code"] == Exit.CLEAN:
        assert serve(path, life) == before, "damage that was not found, and did harm"
        return "harmless"
    assert found["exit_code"] in (Exit.LEFT, Exit.DURABLE_LOST), found
    repaired = fsck(path)
    assert [p["what"] for p in repaired["problems"]] == [p["what"] for p in found["problems"]]
    assert all(problem["repaired"] for problem in repaired["problems"]), repaired
    again = [problem for problem in fsck(path)["problems"] if problem["consequence"] != MENDED_BY_A_START]
    assert again == [], (found["problems"], again)
    there, _ = serve(path, life)
    lost = {name for name in before[0].keys() - there.keys() if name.bucket == DURABLE}
    assert bool(lost) <= (repaired["exit_code"] == Exit.DURABLE_LOST), (lost, repaired["problems"])
    if not any(problem["cost"] != "nothing" for problem in repaired["problems"]):
        assert there == before[0], repaired["problems"]
    return "repaired"


def used_places(path: Path) -> list[tuple[Path, int, int]]:
    """(file, start, end) of everything in a data directory that was written."""
    places = []
    for file in sorted((path / "nvme").glob("*.seg")):
        data = file.read_bytes()
        if any(data):
            places.append((file, 0, SEGMENT_DATA_START))
            end = max(SEGMENT_DATA_START, len(data[:-4096].rstrip(b"\0")))
            places.append((file, SEGMENT_DATA_START, end))
            places.append((file, len(data) - 4096, len(data) - 4096 + 100))
    return places


def payloads(path: Path) -> list[tuple[Path, int, int]]:
    """(file, start, end) of each payload that a record of a segment in use has."""
    found = []
    for file in sorted((path / "nvme").glob("*.seg")):
        data = file.read_bytes()
        head, at = SEGMENT_HEADER.decode(data[: SEGMENT_HEADER.size]), SEGMENT_DATA_START
        while head["state"] == SegmentState.IN_USE and at < len(data) - RECORD_HEADER.size:
            raw = RECORD_HEADER.decode(data[at : at + RECORD_HEADER.size])
            if (raw["magic"], raw["segment_sequence"]) != (RECORD_MAGIC, head["segment_sequence"]):
                at += RECORD_ALIGNMENT
                continue
            if raw["payload_bytes"]:
                start = at + raw["payload_offset"]
                found.append((file, start, start + raw["payload_bytes"]))
            at += raw["record_bytes"]  # a footer's has the headers of the others in it
    return found


@pytest.mark.seeded
@pytest.mark.parametrize("killed", [False, True])
def test_any_flipped_byte_of_a_segment_is_found_or_harmless(
    lived: dict[bool, Life], copy: Callable[[bool], Path], killed: bool
) -> None:
    rng = random.Random(SEED)
    life = lived[killed]
    before = serve(copy(killed), life)
    for number in range(ROUNDS):
        path = copy(killed)
        places = used_places(path) if number % 2 else payloads(path)
        file, start, end = rng.choice([place for place in places if place[2] > place[1]])
        offset, mask = rng.randrange(start, end), 1 << rng.randrange(8)
        print(f"{file.name} at {offset}, mask {mask}", flush=True)
        of_payload = any(file == of and first <= offset < last for of, first, last in payloads(path))
        flip(file, offset, mask)
        outcome = check_damage(path, life, before)
        print(outcome)
        assert outcome == "repaired" or not of_payload


def test_both_headers_gone_sets_the_file_aside(lived: dict[bool, Life], copy: Callable[[bool], Path]) -> None:
    path = copy(False)
    before = serve(copy(False), lived[False])
    path = copy(False)
    victim = max((path / "nvme").glob("*.seg"), key=lambda file: len(file.read_bytes().rstrip(b"\0")))
    flip(victim, 20)
    flip(victim, 4096 + 20)
    check_damage(path, lived[False], before)
    assert victim.with_name(victim.name + ".bad").exists()


def test_a_short_file_is_set_aside_after_what_it_holds_was_moved(
    lived: dict[bool, Life], copy: Callable[[bool], Path]
) -> None:
    before = serve(copy(False), lived[False])
    path = copy(False)
    victim = max((path / "nvme").glob("*.seg"), key=lambda file: len(file.read_bytes().rstrip(b"\0")))
    os.truncate(victim, MIB - 4096)
    assert check_damage(path, lived[False], before) == "repaired"
    assert victim.with_name(victim.name + ".bad").exists()


@pytest.mark.parametrize("change", [b"", b"{}", b"segment_bytes"])
def test_the_geometry_is_what_the_segments_say(
    lived: dict[bool, Life], copy: Callable[[bool], Path], change: bytes
) -> None:
    before = serve(copy(False), lived[False])
    path = copy(False)
    geometry = path / "nvme" / "pool.json"
    text = geometry.read_bytes()
    geometry.write_bytes(text.replace(b"1048576", b"2097152") if change == b"segment_bytes" else change)
    assert check_damage(path, lived[False], before) == "repaired"
    assert serve(path, lived[False]) == before


@pytest.mark.seeded
@pytest.mark.parametrize("killed", [False, True])
def test_any_flipped_byte_of_the_index_is_found_or_harmless(
    lived: dict[bool, Life], copy: Callable[[bool], Path], killed: bool
) -> None:
    rng = random.Random(SEED)
    before = serve(copy(killed), lived[killed])
    for _ in range(ROUNDS):
        path = copy(killed)
        file = path / "index" / "data.mdb"
        written = len(file.read_bytes().rstrip(b"\0"))
        offset, mask = rng.randrange(written), 1 << rng.randrange(8)
        print(f"index at {offset}, mask {mask}", flush=True)
        flip(file, offset, mask)
        print(check_damage(path, lived[killed], before))


@pytest.mark.parametrize("part", ["index", "data.mdb"])
def test_a_lost_index_is_built_anew(lived: dict[bool, Life], copy: Callable[[bool], Path], part: str) -> None:
    before = serve(copy(False), lived[False])
    path = copy(False)
    if part == "index":
        shutil.rmtree(path / "index")
    else:
        (path / "index" / "data.mdb").unlink()
    assert check_damage(path, lived[False], before) == "repaired"


@pytest.mark.seeded
def test_any_flipped_byte_of_a_slot_is_found_or_harmless(
    lived: dict[bool, Life], copy: Callable[[bool], Path]
) -> None:
    rng = random.Random(SEED)
    life = lived[True]
    before = serve(copy(True), life)
    outcomes = []
    for number in range(ROUNDS):
        path = copy(True)
        table = path / "dram" / "table"
        head = TABLE_HEADER.decode(table.read_bytes()[: TABLE_HEADER.size])
        slots = [file for file in (path / "dram" / "slots").iterdir() if file.stat().st_size]
        if number % 3:
            end = head["slots_offset"] + head["slots_used"] * SLOT_HEADER.size
            file, offset = table, rng.randrange(head["slots_offset"], end)
        elif number % 2:
            file, offset = table, rng.randrange(512)
        else:
            file = rng.choice(slots)
            offset = rng.randrange(file.stat().st_size)
        print(f"{file} at {offset}", flush=True)
        flip(file, offset, 1 << rng.randrange(8))
        outcomes.append(check_damage(path, life, before))
        print(outcomes[-1])
    assert "repaired" in outcomes
