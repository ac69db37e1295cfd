"""Processes that are forked from one which has imported what they begin with (`imported.py`), one for each test run."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

IMPORT_S: Final = 200.0
"""Two engines' imports beside other tests; a fork takes milliseconds."""
_SCRIPT: Final = Path(__file__).with_name("imported.py")
_NETWORK: Final = "/proc/thread-self/ns/net"
_LIMITS: Final = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


class Forked:
    """A process that is no child of this one: as much of `subprocess.Popen` as the tests use."""

    def __init__(self, pid: int, of: Imported) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._of, self._end = of, os.pidfd_open(pid)
        self._ending = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, a signal's number below zero, or None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._end, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout_s)[0]:
            with self._ending:
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(self._of.ask({"wait": self.pid}))
        return self.returncode

    def __del__(self) -> None:
        os.close(self._end)


class Imported:
    """The process that others are forked from; it ends when this one does, or at `close`."""

    def __init__(self, python: str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(IMPORT_S)
        self._lock = threading.Lock()
        self._network = os.stat(_NETWORK).st_ino
        with control:
            self._process = subprocess.Popen(
                [python, "-P", str(_SCRIPT), str(control.fileno()), *modules],
                pass_fds=[control.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment},
            )

    def ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        """Send a message and return its answer."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
            answer = self._control.recv(64)
        assert answer, "the modules were not imported"
        return int(answer)

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
        """Start a process that writes to `output`, on this thread's host (`network_hosts`); `pass_fds`: numbers of its
        descriptors, and which these are here.

        Errors go there too, unless 2 is one of those.
        """
        descriptors = {1: output.fileno(), **(pass_fds or {})}
        message: dict[str, Any] = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "path": list(path),
            "work": str(work),
            "limits": [(kind, resource.getrlimit(kind)) for kind in _LIMITS],
            "descriptors": list(descriptors),
        }
        with open(_NETWORK, "rb") as network:
            is_elsewhere = os.fstat(network.fileno()).st_ino != self._network
            more = [network.fileno()] if is_elsewhere else []
            message["network"] = is_elsewhere
            return Forked(self.ask(message, [*descriptors.values(), *more]), self)

    def run(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], work: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a process to its end. Raises subprocess.TimeoutExpired for one that takes longer, which is killed."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self.fork(
                arguments,
                path=[str(work)],
                environment=environment,
                work=work,
                output=output,
                pass_fds={2: errors.fileno()},
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            said = [_whole(each) for each in (output, errors)]
        return subprocess.CompletedProcess(arguments, code, *said)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


def _whole(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


_found: dict[tuple[object, ...], Imported] = {}
_finding = threading.Lock()


def imported(python: str, modules: Sequence[str], environment: Mapping[str, str]) -> Imported:
    """Return this run's process that has imported these modules, which it does when it is first wanted."""
    with _finding:
        key = (python, *modules, frozenset(environment.items()))
        if key not in _found:
            _found[key] = Imported(python, modules, environment)
        return _found[key]


def end_imported() -> None:
    """End what `imported` has started."""
    while _found:
        _found.popitem()[1].close()
