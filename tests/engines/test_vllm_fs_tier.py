"""vLLM's `fs` offloading tier, its own code in its own processes, stores blocks on the mount and loads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines.scripts import run_vllm_script

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BLOCK_BYTES = 3 * 128 * 1024
NAMES = [f"{i * 0x0123_4567:03x}"[-3:] + f"/{i:02x}_g0/{i:064x}.bin" for i in range(16)]
DIRECTORIES = {"native": True, "python": False}
"""Of blocks stored and loaded by the tier's C extension, and by its fallback in Python."""
FLIPPED = 5


def run(python: str, work: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One process that does all of `requests`, without kvfs."""
    return list(run_vllm_script(python, work, "fs_tier", requests, path=()))


def request(action: str, directory: Path, *, native: bool) -> dict[str, Any]:
    names = {"names": NAMES, "block_bytes": BLOCK_BYTES}
    return {"action": action, "directory": str(directory), "native": native, **names}


def test_the_fs_tier_loads_what_another_process_stored(engine_python: str, work: Path, bucket: Path) -> None:
    places = {bucket / name: native for name, native in DIRECTORIES.items()}
    stored = run(engine_python, work, [request("store", path, native=n) for path, n in places.items()])
    for reply in stored:
        assert reply["direct"], "O_DIRECT is refused: the tier would fall back to its slow path"
        assert reply["found"] == [False] * len(NAMES)
    for path in places:
        assert {file.stat().st_size for file in path.rglob("*.bin")} == {BLOCK_BYTES}
        assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == sorted(
            NAMES
        )

    # The control: a copy with one changed byte.
    copy = work / "fs-copy"
    shutil.copytree(bucket / "native", copy)
    with (copy / NAMES[FLIPPED]).open("r+b") as file:
        file.seek(BLOCK_BYTES // 2)
        file.write(b"\xff")
    loads = [request("load", path, native=not native) for path, native in places.items()]
    *loaded, control = run(engine_python, work, [*loads, request("load", copy, native=True)])
    for reply in loaded:
        assert reply["found"] == [True] * len(NAMES)
        assert reply["right"] == [True] * len(NAMES)
    assert [i for i, right in enumerate(control["right"]) if not right] == [FLIPPED]
