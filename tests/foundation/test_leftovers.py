"""A run that leaves something behind is red, and says what; one that leaves nothing has the result of its tests; and of
one that is killed nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.system import linux
from tests.support.door import need_mount
from tests.support.processes import task_state
from tests.support.run_remains import MEMORY, processes
from tests.support.service import ROOT, mounts_under
from tests.support.waits import eventually

COMMAND = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_one.py"]
CONFTEST = """
import pytest
from tests.support import leftovers

leftovers.END_WAIT_S = 1.0

def pytest_configure(config):
    config.pluginmanager.register(leftovers.Run(), "run")

@pytest.fixture
def shared(request):
    return request.config.pluginmanager.get_plugin("run")._watch.shared
"""
TESTS = {
    "nothing": """
import tempfile
def test():
    with tempfile.TemporaryDirectory():
        pass
""",
    "a file": """
import tempfile
def test():
    tempfile.mkstemp(prefix="left-")
""",
    "a file in memory": """
import os, tempfile
def test():
    tempfile.mkstemp(prefix="left-", dir=os.environ["FAST_TMPDIR"])
""",
    "a mount in what pytest keeps": """
from kvfs.system import linux
def test(tmp_path):
    linux.mount("left", tmp_path, "tmpfs", 0, "size=4096")
""",
    "a process": """
import subprocess
def test():
    subprocess.Popen(["sleep", "4242"], start_new_session=True)
""",
    "shared memory": """
import subprocess, sys, time
CODE = '''
import _posixshmem, mmap, os, time
fd = _posixshmem.shm_open(f"/left-{os.getpid()}", os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(fd, 4096)
mapped = mmap.mmap(fd, 4096)
time.sleep(4242)
'''
def test(shared):
    child = subprocess.Popen([sys.executable, "-c", CODE])
    while not any(str(child.pid) in path.name for path in shared):
        time.sleep(0.01)
    child.kill()
    child.wait()
""",
}
SAID = {
    "nothing": "",
    "a file": r"^file .*/left-",
    "a file in memory": rf"^file {MEMORY}/.*/left-",
    "a mount in what pytest keeps": r"^mount .*/kept/.*",
    "a process": r"^process (?P<pid>\d+): sleep 4242",
    "shared memory": rf"^shared memory (?P<path>{MEMORY}/left-\d+)",
}


def environ(path: Path) -> dict[str, str]:
    """Return that of a run below another: it keeps its folders there, and clears away nobody else's."""
    (path / "kept").mkdir()
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DEBUG_TEMPROOT": str(path / "kept")}


@pytest.mark.parametrize("what", TESTS)
def test_what_a_run_leaves_makes_it_red(tmp_path: Path, what: str) -> None:
    if what.startswith("a mount") and not linux.may_mount():
        pytest.skip("mounting needs root")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(TESTS[what])
    run = subprocess.run(COMMAND, cwd=tmp_path, env=environ(tmp_path), capture_output=True, text=True)
    assert " 1 passed" in run.stdout
    found = re.search(SAID[what], run.stdout, re.MULTILINE)
    assert found, run.stdout
    if "pid" in found.groupdict():
        os.kill(int(found["pid"]), signal.SIGKILL)
    if "path" in found.groupdict():
        Path(found["path"]).unlink()
    assert ("left behind" in run.stdout, run.returncode) == ((False, 0) if what == "nothing" else (True, 1))
    assert mounts_under(tmp_path) == []
    assert re.search(r"^at most [\d.]+ GB more in ", run.stdout, re.MULTILINE)


CUT_OFF = """
import json, os, signal, subprocess, sys
from tests.support.service import Service
from tests.support.sessions import fork, session_server
from tests.support.tmpfs import private_tmpfs

def test(tmp_path):
    with Service() as service, session_server() as server, private_tmpfs(tmp_path / "mounted", 1 << 20):
        waits = fork(lambda pipe: pipe.recv(1), uid=1001, gid=1001)
        sleeps = subprocess.Popen(["sleep", "4242"], start_new_session=True)
        pids = [service.pid, server.child.pid, waits.pid, sleeps.pid]
        folders = [os.environ["TMPDIR"], os.environ["FAST_TMPDIR"]]
        with open("had", "w") as file:
            json.dump([pids, folders, str(tmp_path)], file)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.mount
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    need_mount()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(CUT_OFF)
    with (tmp_path / "said").open("w") as said:  # no pipe, which what is left would keep open
        code = subprocess.call(COMMAND, cwd=tmp_path, env=environ(tmp_path), stdout=said, stderr=said)
    assert code == -signal.SIGKILL, (tmp_path / "said").read_text()
    pids, folders, kept = json.loads((tmp_path / "had").read_text())
    eventually(lambda: not any(map(runs, pids)), "the processes of the run have ended")
    eventually(lambda: not any(map(os.path.exists, folders)), f"{folders} are gone")
    for folder in map(Path, folders):
        assert (processes(folder), mounts_under(folder)) == ({}, [])
    assert (os.path.isdir(kept), mounts_under(Path(kept))) == (True, [])


def runs(pid: int) -> bool:
    """Return whether there is such a process, which is nobody's child here, and so may stay a zombie for a while."""
    try:
        return task_state(Path(f"/proc/{pid}")) not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
