"""The wheel beside a real engine: an environment without kvfs's checkout imports connectors and what these import."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.engine import vllm
from tests.support.forked import IMPORT_S
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
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROGRAM)
    with log.open("wb") as output:
        process = vllm(engine_python).fork(
            [str(program)],
            path=[str(home)],
            environment={**os.environ, "PYTHONPATH": str(home), "HF_HUB_OFFLINE": "1"},
            work=tmp_path,
            output=output,
        )
    assert process.wait(IMPORT_S) == 0, log.read_text()
    assert str(home / "kvfs" / "__init__.py") in log.read_text().splitlines()
