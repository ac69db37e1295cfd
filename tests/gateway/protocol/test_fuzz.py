"""Bytes of strangers, made up by hypothesis, and by atheris where it is installed (`pip install atheris`).

KVFS_TEST_FUZZ_S: how long atheris works on each target (default: 4 s).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzz_targets import TARGETS
from tests.support.service import ROOT

FUZZ_S = int(os.environ.get("KVFS_TEST_FUZZ_S", "4"))
START_S = 60


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_is_left_of_them(name: str) -> None:
    """Every beginning of a seed, and every seed without one byte, or with another one."""
    target = TARGETS[name]
    for seed in target.seeds:
        for at in range(len(seed) + 1):
            target.run(seed[:at])
            target.run(seed[:at] + seed[at + 1 :])
            for byte in b"\0\r\n %;=\xff":
                target.run(seed[:at] + bytes([byte]) + seed[at + 1 :])


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
def test_mixtures_of_seeds(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    pieces = st.one_of(
        st.binary(max_size=8),
        st.sampled_from(target.seeds).flatmap(
            lambda seed: st.tuples(st.integers(0, len(seed)), st.integers(0, 80)).map(
                lambda cut: seed[cut[0] : cut[0] + cut[1]]
            )
        ),
    )
    target.run(b"".join(data.draw(st.lists(pieces, max_size=8))))


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.timeout(FUZZ_S + START_S + 10)
def test_what_atheris_makes_up(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.run_fuzz", name, str(tmp_path), f"-max_total_time={FUZZ_S}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=FUZZ_S + START_S,
    )
    found = {file.name: file.read_bytes() for file in tmp_path.glob("found-*")}
    assert (done.returncode, found) == (0, {}), done.stderr[-4000:]
    assert "DONE" in done.stderr or "Done" in done.stderr, done.stderr[-4000:]
