"""The wheel beside a real engine: an environment without kvfs's checkout imports connectors and what these import."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.wheels import build_wheel

pytestmark = pytest.mark.engine

PROGRAM = """
import kvfs
import kvfs.connectors.vllm, kvfs.connectors.vllm_tier, kvfs.connectors.transformers
print(kvfs.__file__)
"""


def test_connectors_are_imported_from_the_wheel(engine_python: str, tmp_path: Path) -> None:
    home = tmp_path / "kvfs"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(home)]
    subprocess.run([engine_python, *install, str(build_wheel())], check=True)
    done = subprocess.run(
        [engine_python, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(home), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(home / "kvfs" / "__init__.py")
