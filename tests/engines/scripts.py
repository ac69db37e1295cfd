"""Runs scripts of this directory under the engines' python, with kvfs on their path."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tests.engines.engine import vllm
from tests.support.forked import Forked
from tests.support.service import ROOT, Service

TIMEOUT_S = 280
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
}


def run_script(python: str, work: Path, name: str, request: Any, *paths: str, within: Sequence[str]) -> Any:
    """The reply of `run_NAME.py`, run by the command `within`, whose stderr is then in `NAME.log`; `paths` are further
    places of Python modules."""
    reply = work / f"{name}.json"
    done = subprocess.run(
        [*within, python, _script(name), str(reply)],
        input=json.dumps(request) + "\n",
        text=True,
        capture_output=True,
        cwd=work,
        env={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths])},
        timeout=TIMEOUT_S,
    )
    (work / f"{name}.log").write_text(done.stderr)
    return _reply(reply, done.returncode, done.stderr)


def run_vllm_script(
    python: str, work: Path, name: str, request: Any, path: Sequence[str] = (str(ROOT),)
) -> Any:
    """The same by a process that is forked from one which has imported vLLM, with modules of all of `path`; all its
    output is then in `NAME.log`."""
    reply, log = work / f"{name}.json", work / f"{name}.log"
    with tempfile.TemporaryFile() as asked, log.open("wb") as output:
        asked.write(json.dumps(request).encode() + b"\n")
        asked.seek(0)
        process = fork_script(python, work, name, reply, path=path, output=output, asked=asked.fileno())
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
    return _reply(reply, code, log.read_text())


def fork_script(
    python: str, work: Path, name: str, reply: Path, *, path: Sequence[str], output: IO[bytes], asked: int
) -> Forked:
    """Start `run_NAME.py` in a process that has imported vLLM; it reads its request from the descriptor `asked`."""
    return vllm(python).fork(
        [_script(name), str(reply)],
        path=path,
        environment={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(path)},
        work=work,
        output=output,
        pass_fds={0: asked},
    )


def _script(name: str) -> str:
    return str(ROOT / f"tests/engines/run_{name}.py")


def _reply(reply: Path, code: int, log: str) -> Any:
    assert code == 0, log[-6000:]
    assert "sys.excepthook" not in log, log[-6000:]  # an error at the interpreter's end
    return json.loads(reply.read_text())


def said_to_work(log: str, connector: str, service: Service) -> str:
    """The line of a log in which a connector says that its store works. Raises AssertionError without it."""
    wanted = f"{connector}: the store at {service.mount} ("
    said = [line for line in log.splitlines() if wanted in line and " works, " in line]
    assert said, log[-6000:]
    assert "namespace " in said[0]
    return said[0]
