"""What `make` says of itself and of its set-up, and what it removes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.support.service import ROOT
from tests.support.terminal import on_a_terminal
from tests.support.waits import WAIT_S

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

MAKEFILES: Final = ("Makefile", "engines.mk")
INNER: Final = {"help", "checks", "lint", "annotations", "types", "imports", "stubs", "pytest"}
"""Targets that are parts of `make test`, and help itself."""
PYTHON: Final = """#!/bin/sh
[ "$2" = venv ] && mkdir -p "$4/bin" && cp "$0" "$4/bin/python"
exit 0
"""
"""A Python that makes virtual environments of itself, and does nothing else."""
BUILD: Final = """
import sys
from pathlib import Path
import Cython.Build

def cythonize(extensions, **_):
    for extension in extensions[:3]:
        source = Path(sys.argv[-1]) / f"{extension.name}.c"
        source.write_text("int nothing;")
        extension.sources = [str(source)]
    return extensions[:3]

Cython.Build.cythonize = cythonize
exec(compile(Path("setup.py").read_text(), "setup.py", "exec"))
"""


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    return subprocess.run(
        ["make", "--file", f"{ROOT}/Makefile", "--include-dir", str(ROOT), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )


def test_help_lists_what_there_is() -> None:
    there = set()
    for name in MAKEFILES:
        for targets in re.findall(r"(?m)^\.PHONY: (.+)$", (ROOT / name).read_text()):
            there |= set(targets.split())
    shown = make(ROOT, "help").stdout
    listed = set(re.findall(r"(?m)^make (\S+)", shown)) | set(re.findall(r"; (test-\w+):", shown))
    assert listed == there - INNER
    assert {"engines", "test-engines", "serve"} <= listed


def test_clean_removes_what_was_built_and_no_data(tmp_path: Path) -> None:
    environments = [".venv/bin", ".venv-engines/bin", ".venv-peers/bin"]
    built = [*environments, "build/lib", "dist", "kvfs.egg-info", "kvfs/__pycache__"]
    kept = ["data/nvme", "data/__pycache__", "mnt/__pycache__", "kvfs/_native/shared"]
    for name in (*built, *kept):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "kvfs/_native/shared/table.so").touch()
    (tmp_path / "kvfs/_native/shared/table.pyx").touch()
    make(tmp_path, "clean")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not any(path.glob("*"))}
    assert left == {*kept[:-1], "kvfs/_native/shared/table.pyx"}


def test_the_set_up_says_how_far_it_is_and_does_nothing_twice(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "setup.cfg", "kvfs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "packaging").mkdir()
    (tmp_path / "python").write_text(PYTHON)
    system = tmp_path / "packaging" / "system"
    system.write_text(f'#!/bin/sh\n[ "$1" != python ] || echo {tmp_path}/python\n')
    for program in (tmp_path / "python", system):
        program.chmod(0o755)
    told = [line for line in make(tmp_path, "build").stderr.splitlines() if line.startswith("kvfs: ")]
    assert told == [
        f"kvfs: set-up, {number} of 4: {what}"
        for number, what in enumerate(("system packages", ".venv", "Python packages", "native modules"), 1)
    ]
    assert make(tmp_path, "build").stderr == ""


def test_the_build_says_on_a_terminal_which_module_begins(tmp_path: Path) -> None:
    options = ["--quiet", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path)]
    told = [line for line in on_a_terminal("-c", BUILD, *options).splitlines() if line.startswith("kvfs: ")]
    # Several threads build, so one that began earlier may say so later.
    assert sorted(line.partition(": kvfs._native.")[0] for line in told) == [
        f"kvfs: {number} of 3" for number in (1, 2, 3)
    ]
