"""What a run of the tests has beside files: found, and taken away when the run's pytest was cut off.

Responsibility: `guard` starts a process which waits for the end of pytest, even by SIGKILL, and then ends the processes
of the run, takes its mounts and loop devices away, and removes its folders and shared memory. A run that ends by itself
says what it leaves (`tests.support.leftovers`), and ends its guard.

Invariants: what belongs to a run is told by its folders, as in `tests.support.leftovers`, mounts and devices also by
the folder that pytest keeps. The guard is in a session of its own, where no signal to the run's group meets it, and has
no folder of the run in its environment or arguments. A child that was forked from pytest itself has the environment
that pytest began with, and is not found: it asks the kernel to end with its parent
(`tests.support.processes.end_with`).

Concurrency: a process with one thread.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvfs.system import linux
from tests.support.service import ROOT, detach_mounts

MEMORY = Path("/dev/shm")
END_WAIT_S = 30.0
"""For processes that are ending: a killed engine gives back gigabytes first."""
_LOOK_S = 0.01
"""The kernel tells only a parent of an end."""


def guard(folders: Sequence[Path], kept: Path) -> subprocess.Popen[bytes]:
    """Start what takes away all that a run with these folders has, when this process has ended; the files below `kept`
    stay."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid())],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin as told:
        told.write(json.dumps(list(map(str, [kept, *folders]))).encode())
    return process


def take_away(folders: Sequence[Path], kept: Path) -> None:
    """End the processes of a run, and remove all else that is of it, but the files below `kept`."""
    shared: set[Path] = set()
    deadline = time.monotonic() + END_WAIT_S
    while (found := processes(folders[0])) and time.monotonic() < deadline:
        shared |= held_memory(found)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        abort_mounts([kept, *folders])
        time.sleep(_LOOK_S)
    abort_mounts([kept, *folders])
    for folder in (kept, *folders):
        detach_mounts(folder)
        detach_loop_devices(folder)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for path in shared:
        path.unlink(missing_ok=True)


def abort_mounts(folders: Iterable[Path]) -> None:
    """Have every call on a mount of kvfs end, for which a killed service may wait in the kernel."""
    roots = tuple(f"{folder}/" for folder in folders)
    for each in linux.mounts():
        if each.kind.startswith("fuse") and each.point.startswith(roots):
            with suppress(OSError):  # it is gone, or in use
                linux.unmount(Path(each.point), linux.MNT_FORCE)


def detach_loop_devices(folder: Path) -> None:
    """Detach the loop devices over files of a folder."""
    for line in loop_devices():
        if f"{folder}/" in line:
            subprocess.run(["losetup", "--detach", line.split()[0]], capture_output=True)


def processes(folder: Path) -> dict[int, str]:
    """Return id and command of each other process that has `folder` in its environment or in its arguments."""
    mark, found = os.fsencode(folder), {}
    for pid in set(map(int, filter(str.isdecimal, os.listdir("/proc")))) - {os.getpid()}:
        with suppress(OSError):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command and mark in Path(f"/proc/{pid}/environ").read_bytes() + command:
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def loop_devices() -> list[str]:
    """Return loop devices with the files behind them, a line each."""
    if shutil.which("losetup") is None:
        return []
    columns = ["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"]
    return subprocess.run(columns, capture_output=True, text=True, check=True).stdout.splitlines()


def shared_memory() -> list[Path]:
    """Return what processes share by name: POSIX shared memory and semaphores."""
    return [path for path in MEMORY.iterdir() if path.is_file()] if MEMORY.is_dir() else []


def held_memory(pids: Iterable[int]) -> set[Path]:
    """Return the shared memory that processes have mapped."""
    lines: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines |= {
                line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            }
    return {path for path in map(Path, lines) if path.parent == MEMORY}


def main() -> None:
    """Wait until the process with this id, which is the parent, has ended, and take away what it had."""
    run = int(sys.argv[1])
    kept, *folders = map(Path, json.load(sys.stdin))
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(run)
        if os.getppid() == run:  # else it has ended, and its number may be another's
            select.select([ended], [], [])
    take_away(folders, kept)


if __name__ == "__main__":
    main()
