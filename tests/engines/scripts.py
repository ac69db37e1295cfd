"""Runs a script of this directory under the engines' python, with kvfs on its path."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.service import ROOT, Service

TIMEOUT_S = 280
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
}


def run_script(
    python: str, work: Path, name: str, request: dict[str, Any], *paths: str, within: Sequence[str] = ()
) -> dict[str, Any]:
    """The reply of `run_NAME.py`, whose stderr is then in `NAME.log`; `paths` are further places of Python modules,
    `within` a command that runs it."""
    reply = work / f"{name}.json"
    done = subprocess.run(
        [*within, python, str(ROOT / f"tests/engines/run_{name}.py"), str(reply)],
        input=json.dumps(request) + "\n",
        text=True,
        capture_output=True,
        cwd=work,
        env={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths])},
        timeout=TIMEOUT_S,
    )
    (work / f"{name}.log").write_text(done.stderr)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "sys.excepthook" not in done.stderr, done.stderr[-6000:]  # an error at the interpreter's end
    return dict(json.loads(reply.read_text()))


def said_to_work(log: str, connector: str, service: Service) -> str:
    """The line of a log in which a connector says that its store works. Raises AssertionError without it."""
    wanted = f"{connector}: the store at {service.mount} ("
    said = [line for line in log.splitlines() if wanted in line and " works, " in line]
    assert said, log[-6000:]
    assert "namespace " in said[0]
    return said[0]
