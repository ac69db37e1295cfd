"""Small C programs that use a native module from many threads at full speed, also under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.waits import WAIT_S

_ROOT = Path(__file__).parents[2]
_NATIVE = _ROOT / "kvfs" / "_native"


def build(folder: Path, program: str, sources: list[str], *flags: str, name: str = "hammer") -> Path:
    """Build a program of tests/native with sources of kvfs/_native, optimized unless `flags` (of libraries, too) say
    otherwise, and call it by its name: a folder may have several."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    files = [_ROOT / "tests" / "native" / program, *(_NATIVE / source for source in sources)]
    common = ["-D_GNU_SOURCE", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{_NATIVE}"]
    subprocess.run([compiler, *common, *files, *flags, "-o", folder / name], check=True)
    return folder / name


def run(program: Path, rounds: int) -> list[str]:
    """Return the words that a program says, which ends by itself."""
    ran = subprocess.run([program, str(rounds)], capture_output=True, text=True, timeout=WAIT_S)
    return ran.stdout.split()


def run_for_races(folder: Path, program: str, sources: list[str], rounds: int, *flags: str) -> None:
    """Build and run a program under ThreadSanitizer, which is to find nothing."""
    setarch = shutil.which("setarch")
    try:
        built = build(folder, program, sources, "-O1", "-g1", "-fsanitize=thread", *flags)
    except subprocess.CalledProcessError:
        pytest.skip("no ThreadSanitizer")
    if setarch is None:
        pytest.skip("no setarch: ThreadSanitizer wants addresses that are not random")
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    environment.pop("LD_PRELOAD", None)  # another sanitizer's, where this runs under one
    ran = subprocess.run(
        [setarch, "-R", built, str(rounds)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (ran.returncode, ran.stdout[:4]) == (0, "done"), ran.stderr
