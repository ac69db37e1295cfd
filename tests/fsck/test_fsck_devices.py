"""fsck of a store whose segments lie on block devices: what it finds, repairs, and leaves."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs import formats
from kvfs.cli.offline.fsck_command import Exit, _check
from kvfs.limits import MIB
from tests.support.loop_devices import LoopDevice, MakeLoop
from tests.support.loop_devices import make_loop as make_loop
from tests.support.one_store import Life, look
from tiers.places.geometry import Geometry, read_geometry, write_geometry

DISK = 17 * MIB


@pytest.fixture
def lived(tmp_path: Path, make_loop: MakeLoop) -> tuple[Life, list[LoopDevice]]:
    """A store on two devices that was stopped and has lost its DRAM, so that only they have its objects."""
    loops = [make_loop(DISK), make_loop(DISK)]
    life = Life(tmp_path / "data", 11, tuple(loop.path for loop in loops))
    trio.run(lambda: life.run(60, killed=False, settled=True))
    shutil.rmtree(tmp_path / "data" / "dram")
    return life, loops


def fsck(life: Life, *, repair: bool = True, devices: tuple[Path, ...] = ()) -> dict[str, Any]:
    return _check(life.path, life.path / "nvme", repair, devices=devices)


def shown(life: Life) -> dict[Any, bytes]:
    found = trio.run(look, life.path, life.devices)
    assert not life.expected.judge(found, damaged=True), life.history
    return found


def segments_of(loop: LoopDevice) -> list[int]:
    """Where the segments begin that were written to, the one with the most bytes first."""
    held = loop.file.read_bytes()
    starts = range(formats.DEVICE_SEGMENTS_START, DISK, MIB)
    fill = {start: len(held[start : start + MIB - 4096].rstrip(b"\0")) for start in starts}
    return sorted((start for start in starts if fill[start] > 3 * 4096), key=lambda start: -fill[start])


def test_whole_devices_are_clean(lived: tuple[Life, list[LoopDevice]]) -> None:
    life, loops = lived
    held = [loop.file.read_bytes() for loop in loops]
    for repair in (False, True):
        report = fsck(life, repair=repair)
        assert (report["exit_code"], report["problems"]) == (Exit.CLEAN, [])
        assert report["bytes_verified"] > 0
    assert [loop.file.read_bytes() for loop in loops] == held
    assert shown(life) == life.expected.values


def test_a_payload_that_changed_costs_its_object(lived: tuple[Life, list[LoopDevice]]) -> None:
    life, loops = lived
    loop = max(loops, key=lambda loop: len(segments_of(loop)))
    start = segments_of(loop)[0]
    chance = random.Random(5)
    for _ in range(4):
        loop.write(start + chance.randrange(3 * 4096, MIB // 2), chance.randbytes(64))
    report = fsck(life)
    assert report["exit_code"] in (Exit.REPAIRED, Exit.DURABLE_LOST), report
    place = f"{loop.path} from {start}"
    assert any(place in problem["where"] for problem in report["problems"]), (place, report["problems"])
    assert fsck(life)["exit_code"] == Exit.CLEAN
    assert len(shown(life)) >= len(life.expected.values) // 2


def test_a_segment_without_a_header_is_emptied(lived: tuple[Life, list[LoopDevice]]) -> None:
    life, loops = lived
    loop = max(loops, key=lambda loop: len(segments_of(loop)))
    start = segments_of(loop)[0]
    for at in formats.SEGMENT_HEADER_COPIES:
        loop.write(start + at + 20, b"\xff\xff")
    assert fsck(life)["exit_code"] in (Exit.REPAIRED, Exit.DURABLE_LOST)
    assert not any(loop.file.read_bytes()[start : start + 3 * 4096])
    assert fsck(life)["exit_code"] == Exit.CLEAN
    shown(life)


@pytest.mark.parametrize("said", ["nothing", "rubbish", "old names"])
def test_what_pool_json_should_say_is_on_the_devices(lived: tuple[Life, list[LoopDevice]], said: str) -> None:
    life, _ = lived
    folder = life.path / "nvme"
    known = read_geometry(folder)
    if said == "nothing":
        (folder / "pool.json").unlink()
    elif said == "rubbish":
        (folder / "pool.json").write_text("{")
    else:
        names = (Path("/dev/gone0"), Path("/dev/gone1"))
        write_geometry(folder, Geometry(known.store_id, known.segment_bytes, names))
    report = fsck(life, devices=life.devices)
    if said != "old names":
        assert report["exit_code"] == Exit.REPAIRED
        assert read_geometry(folder) == known
    assert fsck(life, devices=life.devices)["exit_code"] == Exit.CLEAN
    assert shown(life) == life.expected.values
    assert read_geometry(folder) == known, "a start writes down how devices are named"
