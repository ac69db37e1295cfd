"""A Python for which a wheel is wanted and that is not here: left out, and a failure in CI."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.service import ROOT
from tests.support.waits import WAIT_S
from tests.support.wheels import build_wheel

MISSING = "3.99"
PYTHON = """#!/bin/sh
case $* in
*bdist_wheel*) mkdir -p dist && touch dist/kvfs-0-cp0-any.whl ;;
*version_info*) echo 0 ;;
esac
"""
"""A Python of version 0 that has what building needs, and builds an empty wheel."""


def build(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build for a Python that is missing, then for one that is there."""
    (home / "packaging").mkdir(exist_ok=True)
    shutil.copy(ROOT / "packaging" / "wheel", home / "packaging")
    (home / "python").write_text(PYTHON)
    (home / "python").chmod(0o755)
    return subprocess.run(
        [home / "packaging" / "wheel", MISSING, home / "python"],
        env={**{name: value for name, value in os.environ.items() if name != "CI"}, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_the_others_are_built_without_it(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert (done.returncode, done.stdout) == (0, "dist/kvfs-0-cp0-any.whl\n")
    assert f"no Python {MISSING} with its headers and venv here" in done.stderr


def test_in_ci_it_is_a_failure(tmp_path: Path) -> None:
    done = build(tmp_path, CI="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no Python {MISSING} with its headers and venv here" in done.stderr


def test_nobody_waits_for_another_build_to_hear_of_it(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    with (tmp_path / "build" / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = build(tmp_path, CI="1")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("1", AssertionError)])
def test_what_tests_it_skips_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if ci:
        monkeypatch.setenv("CI", ci)
    with pytest.raises((AssertionError, pytest.skip.Exception), match=f"no Python {MISSING}") as raised:
        build_wheel(MISSING)
    assert raised.type is outcome


def test_ci_asks_for_each_python_so() -> None:
    """Whoever runs it by hand has no CI in the environment."""
    assert "phase test-wheel env CI=1 make test-wheel " in (ROOT / ".ci" / "run").read_text()
