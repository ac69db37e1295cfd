"""What `kvfs fsck` says was lost is what a start then misses, repaired or not, and `--check-only` writes nothing."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvfs.cli_fsck import Exit, _check
from kvfs.formats import RECORD_HEADER, SEGMENT_DATA_START, RecordType
from kvfs.limits import MIB
from tests.support.crash_harness import fast_directory
from tests.support.one_store import Life, damage_one_place, look
from tests.support.service import run_kvfs
from tiers.model import Name

SEED: Final = int(os.environ.get("KVFS_TEST_SEED", random.SystemRandom().randrange(1 << 15)))
STORES: Final = int(os.environ.get("KVFS_TEST_STORES", "2"))
ROUNDS: Final = int(os.environ.get("KVFS_TEST_ROUNDS", "4"))


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvfs-fsck-", dir=fast_directory()))
    yield path
    shutil.rmtree(path)


def fsck(path: Path, *, repair: bool) -> dict[str, Any]:
    return _check(path, path / "nvme", repair)


def tree(path: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below, bit for bit, and when it was last changed."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def damage(path: Path, chance: random.Random) -> str:
    """One of the kinds that a start survives."""
    nvme = [file for file in (path / "nvme").iterdir() if file.suffix != ".json"]
    kind = chance.choice(["place", "place", "payload", "odd length", "index lost"])
    if kind == "place":
        return damage_one_place(nvme, chance)
    if kind == "index lost":
        shutil.rmtree(path / "index")
        return kind
    if kind == "odd length":
        file = chance.choice([file for file in nvme if file.suffix == ".seg"])
        os.truncate(file, chance.randrange(MIB))
        return f"{file.name} has {file.stat().st_size} bytes"
    what = damage_payload([file for file in nvme if file.suffix == ".seg"], chance)
    if chance.random() < 0.5:
        shutil.rmtree(path / "index")
        what += ", index lost"
    return what


def damage_payload(files: list[Path], chance: random.Random) -> str:
    """Flip a byte of a payload, whose record's header holds."""
    places = []
    for file in files:
        data = file.read_bytes()
        for at in range(SEGMENT_DATA_START, len(data) - RECORD_HEADER.size, 512):
            if data[at : at + 4] == b"KVFR":
                raw = RECORD_HEADER.decode(data[at : at + RECORD_HEADER.size])
                if raw["type"] == RecordType.DATA and raw["payload_bytes"]:
                    places.append((file, at + raw["payload_offset"] + chance.randrange(raw["payload_bytes"])))
    file, at = chance.choice(places)
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return f"{file.name} payload at {at}"


@pytest.mark.parametrize("killed", [False, True])
def test_what_it_says_was_lost_is_what_a_start_misses(base: Path, killed: bool) -> None:
    print(f"KVFS_TEST_SEED={SEED}")
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + STORES):
        original, path = base / "original", base / "data"
        life = Life(original, seed)
        trio.run(lambda: life.run(20, killed=False))  # noqa: B023 run at once
        trio.run(lambda: life.run(20, killed=killed, settled=True))  # noqa: B023 run at once
        for number in range(ROUNDS):
            chance = random.Random(f"{seed}/{number}/{killed}")
            shutil.copytree(original, path)
            if chance.random() < 0.5:
                shutil.rmtree(path / "dram")
            shutil.copytree(path, base / "whole")
            before = trio.run(look, base / "whole")
            shutil.rmtree(base / "whole")
            what = damage(path, chance)
            where = f"KVFS_TEST_SEED={seed}, round {number}, killed {killed}: {what}"
            check_round(base, path, before, where, counts)
            shutil.rmtree(path)
        shutil.rmtree(original)
    print(dict(counts))


def check_round(base: Path, path: Path, before: dict[Name, bytes], where: str, counts: Counter[str]) -> None:
    was = tree(path)
    found = fsck(path, repair=False)
    assert tree(path) == was, f"{where}: --check-only wrote"
    shutil.copytree(path, base / "plain")
    plain = trio.run(look, base / "plain")
    shutil.rmtree(base / "plain")
    compare(found, before, plain, f"{where}, not repaired")
    repaired = fsck(path, repair=True)
    assert set(repaired["lost"]) == set(found["lost"]), where
    assert all(problem["repaired"] for problem in repaired["problems"]), (where, repaired)
    again = fsck(path, repair=False)
    assert again["problems"] == [], (where, found["problems"], again["problems"])
    assert again["exit_code"] == Exit.CLEAN
    compare(repaired, before, trio.run(look, path), f"{where}, repaired")
    if found["problems"]:
        durable = any(name.startswith("durable/") for name in found["lost"])
        assert found["exit_code"] == (Exit.DURABLE_LOST if durable else Exit.LEFT), (where, found)
        assert repaired["exit_code"] == (Exit.DURABLE_LOST if durable else Exit.REPAIRED), (where, found)
    counts["clean" if not found["problems"] else "unknown" if found["may_have_lost_more"] else "known"] += 1
    counts["lost"] += len(found["lost"])


def compare(found: dict[str, Any], before: dict[Name, bytes], after: dict[Name, bytes], where: str) -> None:
    for name, value in after.items():
        assert before.get(name) == value, f"{where}: {name} shows something else: {found['problems']}"
    missed = {str(name) for name in before if name not in after}
    said = {name for name in found["lost"] if name in {str(each) for each in before}}
    if found["may_have_lost_more"]:
        assert said <= missed, f"{where}: {said - missed} are there: {found['problems']}"
    else:
        assert said == missed, f"{where}: said {said}, missed {missed}: {found['problems']}"


def test_it_writes_no_format_and_ends_in_no_traceback(tmp_path: Path) -> None:
    trio.run(lambda: Life(tmp_path, 1).run(5, killed=False))
    for file in (tmp_path / "nvme").glob("*.seg"):
        os.truncate(file, MIB - 777)
    done = run_kvfs("fsck", "--data", str(tmp_path), "--check-only")
    assert done.returncode in (Exit.LEFT, Exit.DURABLE_LOST), done
    (tmp_path / "format.json").unlink()
    was = tree(tmp_path)
    done = run_kvfs("fsck", "--data", str(tmp_path), "--check-only")
    assert done.returncode == Exit.CANNOT_RUN
    assert "format.json" in done.stderr
    assert tree(tmp_path) == was
