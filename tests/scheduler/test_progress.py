"""What takes long shows on a terminal's stderr how far it is, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service import ROOT, run_kvfs
from tests.support.traces import small_trace, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, small_trace(requests=60))
    return path


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        (["replay", "--policy", "lru-leaf", "--capacity", "50"], ["read trace.jsonl", "lru-leaf 50"]),
        (["plan", "--instances", "2"], ["read trace.jsonl", "simulate splits of the instances"]),
        (["simulate", "--prefill", "1", "--decode", "1"], ["read trace.jsonl", "simulate"]),
    ],
    ids=lambda value: value[0],
)
def test_steps_show_on_a_terminal_alone(trace: Path, command: list[str], steps: list[str]) -> None:
    shown = on_a_terminal(command[0], str(trace), *command[1:])
    assert [step for step in steps if step not in shown] == []
    piped = run_kvfs(command[0], str(trace), *command[1:])
    assert (piped.returncode, piped.stderr) == (0, "")


def on_a_terminal(*arguments: str) -> str:
    """Run `kvfs ARGUMENTS` with a terminal as its stderr; what it wrote there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "TERM": "xterm"}
    command = [sys.executable, "-m", "kvfs", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            shown = b""
            while chunk := read_some(terminal.fileno()):
                shown += chunk
    assert process.returncode == 0, shown
    return shown.decode()


def read_some(terminal: int) -> bytes:
    """The next bytes; none once nobody has the other end open."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
