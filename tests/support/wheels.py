"""Wheels of kvfs as `make wheel` builds them, in environments of their own.

Concurrency: any process; `packaging/wheel` builds one at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.service import ROOT

BUILD_WAIT_S: Final = 600.0


def build_wheel(python: str = sys.executable) -> Path:
    """Build the wheel for a version of Python, or for an interpreter; skip where there is none, but not in CI."""
    done = subprocess.run(
        [ROOT / "packaging" / "wheel", python],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_WAIT_S,
    )
    if f"no Python {python}" in done.stderr and "CI" not in os.environ:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return ROOT / done.stdout.split()[-1]


def install_wheel(
    wheel: Path, python: str, home: Path, *, extra: str = "", options: Sequence[str] = ()
) -> Path:
    """Install a wheel and what it requires into a new environment at `home`; return its folder of programs.

    The tests' pip does it, and compiles nothing: what is never imported is most of it.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", home], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    done = subprocess.run(
        [
            *pip,
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-compile",
            *options,
            f"{wheel}{extra}",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if "Could not find a version" in done.stderr and "CI" not in os.environ:
        pytest.skip("pip reaches no package index, which has what the client needs")
    assert done.returncode == 0, done.stderr
    return home / "bin"
