"""What a run of the tests takes at its most, and what it leaves behind.

Responsibility: give a run two folders of its own, on disk and in memory, below which all lies that its tests make; at
its end name what is still there: files, mounts, loop devices, processes, shared memory. A run that leaves any is red.

Invariants: a process belongs to the run whose folder it has in its environment, shared memory to the run of whose
processes one had it mapped: runs beside each other do not count each other's. What pytest keeps lies elsewhere, without
a mount in it at the end.

Concurrency: in the process that controls the run; a thread looks how full the file systems are, and what is shared.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.run_remains import (
    END_WAIT_S,
    MEMORY,
    guard,
    held_memory,
    loop_devices,
    processes,
    shared_memory,
)
from tests.support.service import detach_mounts, mounts_under

FAST_VARIABLE = "FAST_TMPDIR"
"""Where temporary files lie in memory, as TMPDIR says where they lie on disk."""
TSAN_FILE = "tsan.rodata."
"""Begins a file that ThreadSanitizer makes and unlinks as a process starts: one that is killed meanwhile leaves it."""
_SAMPLE_S = 0.5


class Run:
    """The folders of one run, as a plugin of the pytest process that controls it."""

    def __init__(self) -> None:
        self._left: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._folders = [_folder(None)]
        if (fast := Path(os.environ.get(FAST_VARIABLE, MEMORY))).is_dir():
            self._folders.append(_folder(fast))
        temporary: pytest.TempPathFactory = vars(session.config)["_tmp_path_factory"]
        self._kept = temporary.getbasetemp()
        self._guard = guard(self._folders, self._kept)
        for variable, folder in zip(("TMPDIR", FAST_VARIABLE), self._folders, strict=False):
            os.environ[variable] = str(folder)
        tempfile.tempdir = os.environ["TMPDIR"]
        self._watch = Watch(self._folders)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        yield
        self._watch.end()
        self._left = self._end()
        self._guard.kill()
        self._guard.wait()
        if self._left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"at most {self._watch.peaks()}")
        if self._left:
            terminalreporter.section("left behind", red=True)
            for each in self._left:
                terminalreporter.write_line(each)

    def _end(self) -> list[str]:
        deadline = time.monotonic() + END_WAIT_S
        while (left := list(self._there())) and time.monotonic() < deadline:
            time.sleep(_SAMPLE_S)
        for folder in (self._kept, *self._folders):
            detach_mounts(folder)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        return left

    def _there(self) -> Iterator[str]:
        """Yield what there is of the run, a line each."""
        yield from (f"process {pid}: {command}" for pid, command in processes(self._folders[0]).items())
        for folder in (self._kept, *self._folders):
            yield from (f"mount {point}" for point in mounts_under(folder))
        roots = tuple(map(str, self._folders))
        yield from (f"loop device {each}" for each in loop_devices() if any(root in each for root in roots))
        for folder in self._folders:
            yield from (f"file {path}" for path in folder.iterdir() if not path.name.startswith(TSAN_FILE))
        yield from (f"shared memory {path}" for path in self._watch.shared if path.exists())


def _folder(parent: Path | None) -> Path:
    """Make a folder with a short name, since paths of sockets have 107 bytes, in which other users may write."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    folder.chmod(0o1777)
    return folder


class Watch:
    """How much fuller the file systems of a run's folders became, at most, and the shared memory of its processes."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.shared: set[Path] = set()
        self._folders = folders
        self._before = {folder: shutil.disk_usage(folder).used for folder in folders}
        self._most = dict.fromkeys(folders, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        strangers = set(shared_memory())
        while not self._ended.wait(_SAMPLE_S):
            for folder, before in self._before.items():
                used = shutil.disk_usage(folder).used - before
                self._most[folder] = max(self._most[folder], used)
            if strangers != (there := set(shared_memory()) - self.shared):
                self.shared |= held_memory(processes(self._folders[0]))
                strangers = there - self.shared

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def peaks(self) -> str:
        parts = (f"{most / 1e9:.1f} GB more in {folder.parent}" for folder, most in self._most.items())
        return ", ".join(parts)
