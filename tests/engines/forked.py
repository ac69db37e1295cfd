"""Engines that are forked from one process which has imported vLLM (`imported.py`), one for each run of tests."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.engines.run_engine import ENVIRONMENT
from tests.support.service import ROOT

IMPORT_S = 200.0
"""Two engines' imports beside other tests; a fork takes milliseconds."""


class Forked:
    """A process that is no child of this one: as much of `subprocess.Popen` as tests of engines use."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return 0 if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> None:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._end, signal.SIGKILL)

    def _has_ended(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._end], [], [], timeout_s)[0])

    def __del__(self) -> None:
        os.close(self._end)


class Imported:
    """The process that engines are forked from; it ends when this one does, or at `close`."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(IMPORT_S)
        self._lock = threading.Lock()
        with control:
            self._process = subprocess.Popen(
                [python, str(ROOT / "tests/engines/imported.py"), str(control.fileno())],
                pass_fds=[control.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment, "PYTHONPATH": ""},
            )

    def fork(
        self,
        arguments: Sequence[str],
        *,
        path: Sequence[str],
        environment: Mapping[str, str],
        work: Path,
        output: IO[bytes],
        pass_fds: Mapping[int, int] | None = None,
    ) -> Forked:
        """Start an engine that writes to `output`; `pass_fds`: numbers of its descriptors, and which these are here."""
        source, sink = os.pipe()
        descriptors = {0: source, 1: output.fileno(), **(pass_fds or {})}
        message = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "path": list(path),
            "work": str(work),
            "descriptors": list(descriptors),
        }
        try:
            with self._lock:
                socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors.values()))
                pid = self._control.recv(64)
        finally:
            os.close(source)
        assert pid, "vLLM was not imported"
        return Forked(int(pid), os.fdopen(sink, "wb"))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


_found: dict[str, Imported] = {}
_finding = threading.Lock()


def imported(python: str) -> Imported:
    """Return this run's process, which imports when it is first wanted."""
    with _finding:
        if python not in _found:
            _found[python] = Imported(python, ENVIRONMENT)
        return _found[python]


def end_imported() -> None:
    """End what `imported` has started."""
    while _found:
        _found.popitem()[1].close()
