"""The service is killed at random instants while a worker of its gateway starts: no traceback, and no orphan.

KVFS_TEST_SEED repeats a run, KVFS_TEST_KILLS says how many kills there are.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.gateway import Gateway, gateway, until
from tests.support.seeds import SEED, rounds
from tests.support.waits import WAIT_S

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

KILLS: Final = int(os.environ.get("KVFS_TEST_KILLS", rounds(2, 4)))
ORPHAN_WAIT_S: Final = 20.0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill_in_a_start(door: Gateway, chance: random.Random, start_s: float) -> set[int]:
    """Kill a worker, and the service at an instant of its successor's start; all workers that there were."""
    seen = set(door.worker_pids())
    os.kill(chance.choice(sorted(seen)), signal.SIGKILL)
    before = set(seen)

    def has_successor() -> bool:
        seen.update(door.worker_pids())
        return bool(seen - before)

    until(has_successor, door)
    end = time.monotonic() + chance.random() * 1.2 * start_s
    while time.monotonic() < end:  # no wait for anything: this instant is what is tried
        seen.update(door.worker_pids())
        time.sleep(0.002)
    os.kill(door.service.pid, signal.SIGKILL)
    door.service.running.wait(WAIT_S)
    return seen


@pytest.mark.seeded
def test_a_worker_whose_service_is_killed_while_it_starts_ends_without_a_word() -> None:
    need_mount()
    with gateway(dram="64MiB", settings="workers = 2") as door:
        began = time.monotonic()
        first = set(door.worker_pids())
        os.kill(min(first), signal.SIGKILL)
        until(
            lambda: "starting another" in door.service.log() and len(set(door.worker_pids()) - first) == 1,
            door,
        )
        [successor] = set(door.worker_pids()) - first
        until(lambda: b"python" in Path(f"/proc/{successor}/cmdline").read_bytes(), door)
        start_s = min(max(time.monotonic() - began, 0.5), 2.0)
        for number in range(KILLS):
            where = f"KVFS_TEST_SEED={SEED}, kill {number}"
            seen = kill_in_a_start(door, random.Random(f"{SEED}/{number}"), start_s)
            deadline = time.monotonic() + ORPHAN_WAIT_S
            while left := [pid for pid in seen if is_running(pid)]:
                assert time.monotonic() < deadline, (
                    f"{where}: {left} outlive the service\n{door.service.log()}"
                )
                time.sleep(0.01)
            log = door.service.log()
            assert "Traceback" not in log, f"{where}:\n{log[-4000:]}"
            door.service.restart()
