"""vLLM, unmodified, loads what another vLLM process stored, after the service was killed and after DRAM was lost.

The service, the stored prompts and the reference are those of `test_vllm.py`. One more engine process lives
through three starts of the service, without a prefix cache of its own; each time it must not compute what was
stored before, and its outputs are those of the reference, which has no cache at all:

- **killed**: by SIGKILL, with all of DRAM: every byte comes from the slots that the start took over.
- **emptied**: stopped, and its memory given back: every byte comes from NVMe.
- **lost**: killed, DRAM and the name index lost: names and bytes come from the log on NVMe alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvfs.system import linux
from tests.engines.engine import (
    NEW_TAILS,
    PROMPTS,
    STORED,
    VARIANTS,
    Engine,
    Engines,
    Run,
    same_output,
    whole_blocks,
)
from tests.engines.tiny_llama import LAYERS
from tests.support.door import ON_DIRECTORY
from tests.support.service import Service, run_kvfs
from tests.support.waits import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

HITS = {**STORED, **NEW_TAILS}


def kill(service: Service) -> None:
    service.kill()


def empty(service: Service) -> None:
    service.stop()
    dropped = run_kvfs("drop", str(service.data))
    assert dropped.returncode == 0, dropped.stderr


def lose(service: Service) -> None:
    service.kill()
    linux.unmount(service.data / "dram", linux.MNT_DETACH)
    shutil.rmtree(service.data / "dram")
    shutil.rmtree(service.data / "index")


@dataclass(frozen=True)
class Case:
    end: Callable[[Service], None]
    tier: bytes
    """Where the stored files are when the next service has started."""
    said: str
    """In the log of that start."""
    miss: str
    """A prompt that nobody stored: each case has its own, since the engine stores what it computes."""


CASES = {
    "killed": Case(kill, b"dram", r"taken over: [1-9]\d* objects", "other 69, token 0 changed"),
    "emptied": Case(
        empty, b"nvme", r"taken over: 0 objects.*\n.*names from the index", "other 69, token 1 changed"
    ),
    "lost": Case(
        lose, b"nvme", r"taken over: 0 objects.*\n.*[1-9]\d* names rebuilt", "other 69, token 2 changed"
    ),
}


@dataclass(frozen=True)
class Loaded:
    """A run after a start, and the service around it."""

    case: Case
    run: Run
    log: str
    tiers_before: dict[Path, bytes]
    tiers_after: dict[Path, bytes]
    before: dict[str, Any]
    after: dict[str, Any]

    def read_from_nvme(self) -> tuple[int, int]:
        """Objects brought up, and reads of the device, during the run."""
        reads = self.after["tiers"][1]["reads"] - self.before["tiers"][1]["reads"]
        return self.after["promotions"] - self.before["promotions"], reads


def status(service: Service) -> dict[str, Any]:
    with service.client() as client:
        return client.status()


def is_written(service: Service) -> bool:
    nvme = status(service)["tiers"][1]
    return bool(nvme["write_behind"] + nvme["backlog"] == 0)


def tiers_of(files: list[Path]) -> dict[Path, bytes]:
    return {path: os.getxattr(path, "user.kvfs.tier") for path in files}


@pytest.fixture(scope="module")
def files(bucket: Path, store: Run) -> list[Path]:
    """Every file that the first engine stored."""
    return sorted(path for path in (bucket / "kv").rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def engine(engines: Engines, bucket: Path, files: list[Path]) -> Iterator[Engine]:
    """The engine process that lives through every start."""
    with engines.start("restarts", bucket / "kv") as running:
        yield running


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, service: Service, engine: Engine, files: list[Path]) -> Loaded:
    case = CASES[request.param]
    eventually(lambda: is_written(service), "everything is on NVMe")
    case.end(service)
    known = len(service.log())
    service.restart()
    before, tiers_before = status(service), tiers_of(files)
    run = engine.generate({**HITS, case.miss: {**PROMPTS, **VARIANTS}[case.miss]})
    log = service.log()[known:]
    return Loaded(case, run, log, tiers_before, tiers_of(files), before, status(service))


def test_the_start_found_the_files_where_it_should(loaded: Loaded) -> None:
    assert set(loaded.tiers_before.values()) == {loaded.case.tier}
    assert re.search(loaded.case.said, loaded.log), loaded.log


def test_the_engine_loads_what_was_stored_before(loaded: Loaded) -> None:
    cached = {name: loaded.run.cached(name) for name in HITS}
    assert cached == {name: whole_blocks(prompt) for name, prompt in HITS.items()}
    assert len(loaded.run.loaded) == LAYERS * len(HITS)


def test_the_engine_computes_what_nobody_stored(loaded: Loaded) -> None:
    assert loaded.run.cached(loaded.case.miss) == 0


def test_every_byte_came_from_the_tier_that_had_it(loaded: Loaded) -> None:
    used = {Path(path) for path in loaded.run.loaded}
    assert used
    assert {loaded.tiers_after[path] for path in used} == {b"dram"}
    promotions, reads = loaded.read_from_nvme()
    if loaded.case.tier == b"dram":
        assert (promotions, reads) == (0, 0)
    else:
        assert promotions == len(used)
        assert reads >= len(used)
    assert loaded.after["hits"] - loaded.before["hits"] >= len(loaded.run.loaded)


def test_the_outputs_are_those_without_a_cache(loaded: Loaded, reference: Run) -> None:
    wrong = [
        name for name in loaded.run.names if not same_output(loaded.run.output(name), reference.output(name))
    ]
    assert wrong == []
