"""What `kvfs fsck` says was lost is what a start then misses, repaired or not, and `--check-only` writes nothing."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvfs.cli.offline.fsck_command import Exit, _check
from kvfs.limits import MIB
from tests.support.damage import damage_one_place, damage_payload, damage_rows, damage_slot
from tests.support.one_store import Life, look
from tests.support.seeds import SEED
from tests.support.service import run_kvfs
from tiers.model.objects import Name

ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", "3"))


def fsck(path: Path, *, repair: bool) -> dict[str, Any]:
    return _check(path, path / "nvme", repair)


def tree(path: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below, bit for bit, and when it was last changed."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


KINDS: Final = {
    "place": 4,
    "payload": 2,
    "odd length": 1,
    "index": 1,
    "rows": 3,
    "slots": 2,
    "place, index": 2,
    "payload, index": 1,
    "place, rows": 3,
    "payload, rows": 2,
    "slots, rows": 2,
    "slots, index": 1,
    "place, slots": 1,
}


def damage(path: Path, kinds: str, chance: random.Random) -> str:
    """Damage that a start survives, of one kind or of two together."""
    done = []
    for kind in kinds.split(", "):
        segments = sorted(file for file in (path / "nvme").iterdir() if file.suffix != ".json")
        if kind == "place":
            done.append(damage_one_place(segments, chance))
        elif kind == "index":
            shutil.rmtree(path / "index")
            done.append("index lost")
        elif kind == "odd length":
            file = chance.choice([file for file in segments if file.suffix == ".seg"])
            os.truncate(file, chance.randrange(MIB))
            done.append(f"{file.name} has {file.stat().st_size} bytes")
        elif kind == "payload":
            done.append(damage_payload([file for file in segments if file.suffix == ".seg"], chance))
        elif kind == "rows":
            done.append(damage_rows(path / "index", chance))
        else:
            done.append(damage_slot(path / "dram", chance))
    return ", ".join(done)


@pytest.mark.seeded
@pytest.mark.parametrize("killed", [False, True])
def test_what_it_says_was_lost_is_what_a_start_misses(fast_path: Path, killed: bool) -> None:
    counts: Counter[str] = Counter()
    original, path = fast_path / "original", fast_path / "data"
    life = Life(original, SEED)
    trio.run(lambda: life.run(20, killed=False))
    trio.run(lambda: life.run(20, killed=killed, settled=True))
    for number in range(ROUNDS):
        chance = random.Random(f"{SEED}/{number}/{killed}")
        shutil.copytree(original, path)
        if chance.random() < 0.5:
            shutil.rmtree(path / "dram")
        shutil.copytree(path, fast_path / "whole")
        before = trio.run(look, fast_path / "whole")
        shutil.rmtree(fast_path / "whole")
        [kinds] = chance.choices([*KINDS], [*KINDS.values()])
        where = f"KVFS_TEST_SEED={SEED}, round {number}, killed {killed}: {damage(path, kinds, chance)}"
        check_round(fast_path, path, before, kinds, where, counts)
        shutil.rmtree(path)
    shutil.rmtree(original)
    print(dict(counts))


def check_round(
    fast_path: Path, path: Path, before: dict[Name, bytes], kinds: str, where: str, counts: Counter[str]
) -> None:
    was = tree(path)
    found = fsck(path, repair=False)
    assert tree(path) == was, f"{where}: --check-only wrote"
    shutil.copytree(path, fast_path / "plain")
    plain = trio.run(look, fast_path / "plain")
    shutil.rmtree(fast_path / "plain")
    compare(found, before, plain, f"{where}, not repaired")
    check_flag(found, before, plain, kinds, where)
    repaired = fsck(path, repair=True)
    assert set(repaired["lost"]) == set(found["lost"]), where
    assert all(problem["repaired"] for problem in repaired["problems"]), (where, repaired)
    again = fsck(path, repair=False)
    assert again["problems"] == [], (where, found["problems"], again["problems"])
    assert again["exit_code"] == Exit.CLEAN
    compare(repaired, before, trio.run(look, path), f"{where}, repaired")
    if found["problems"]:
        durable = any(name.startswith("durable/") for name in found["lost"])
        if leaves_no_trace(where):  # or it was never answered for
            durable = durable and any(problem["cost"] == "durable" for problem in found["problems"])
        durable |= "durable objects may be lost" in found["result"]
        assert found["exit_code"] == (Exit.DURABLE_LOST if durable else Exit.LEFT), (where, found)
        assert repaired["exit_code"] == (Exit.DURABLE_LOST if durable else Exit.REPAIRED), (where, found)
    counts["clean" if not found["problems"] else "unknown" if found["may_have_lost_more"] else "known"] += 1
    counts["lost"] += len(found["lost"])


def leaves_no_trace(where: str) -> bool:
    """Whether the end of the log may be gone without a record that tells."""
    return "killed True" in where and "zeroed" in where


def missed_and_said(
    found: dict[str, Any], before: dict[Name, bytes], after: dict[Name, bytes]
) -> tuple[set[str], set[str]]:
    there = {str(name) for name in before}
    return {str(name) for name in before if name not in after}, there & set(found["lost"])


def compare(found: dict[str, Any], before: dict[Name, bytes], after: dict[Name, bytes], where: str) -> None:
    for name, value in after.items():
        assert before.get(name) == value, f"{where}: {name} shows something else: {found['problems']}"
    missed, said = missed_and_said(found, before, after)
    assert said <= missed, f"{where}: {said - missed} are there: {found['problems']}"
    unnamed = set() if found["may_have_lost_more"] else missed - said
    if leaves_no_trace(where):  # of what a cache had not synced
        unnamed = {name for name in unnamed if name.startswith("durable/")}
    assert not unnamed, f"{where}: said {said}, missed {missed}: {found['problems']}"


def check_flag(
    found: dict[str, Any], before: dict[Name, bytes], after: dict[Name, bytes], kinds: str, where: str
) -> None:
    """`may_have_lost_more` is set only where nothing that is left can name what is missing."""
    if not found["may_have_lost_more"]:
        return
    missed, said = missed_and_said(found, before, after)
    where = f"{where}: unnamed {missed - said}: {found['problems']}"
    assert kinds not in ("payload",), where
    unknown = missed - said
    if kinds in ("index", "payload, index", "slots, index"):
        assert unknown or kinds.startswith("slots"), f"{where}: all is named"
    if "place" in kinds and "index" not in kinds and "rows" not in kinds:
        assert all(name.startswith("blocks/") for name in unknown), where
    if kinds in ("rows", "payload, rows"):
        assert any(
            "row" in problem["what"] and problem["cost"] != "nothing" for problem in found["problems"]
        ), where
        assert not unknown, where


def test_it_writes_no_format_and_ends_in_no_traceback(fast_path: Path) -> None:
    trio.run(lambda: Life(fast_path, 1).run(5, killed=False))
    for file in (fast_path / "nvme").glob("*.seg"):
        os.truncate(file, MIB - 777)
    done = run_kvfs("fsck", "--data", str(fast_path), "--check-only")
    assert done.returncode in (Exit.LEFT, Exit.DURABLE_LOST), done
    (fast_path / "format.json").unlink()
    was = tree(fast_path)
    done = run_kvfs("fsck", "--data", str(fast_path), "--check-only")
    assert done.returncode == Exit.CANNOT_RUN
    assert "format.json" in done.stderr
    assert tree(fast_path) == was
