"""Ports of tests are nobody else's: of no other process of tests, nor of whoever asks the kernel for any."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.own_ports import own_port

ROOT = Path(__file__).parents[2]
PORTS = "import json; from tests.support.own_ports import own_port; print(json.dumps([own_port() for _ in range(600)]))"


def test_each_process_has_ports_of_its_own_below_those_that_the_kernel_picks() -> None:
    theirs = json.loads(
        subprocess.run(
            [sys.executable, "-c", PORTS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    )
    ours = [own_port() for _ in range(600)]
    assert len(set(ours)) > 80  # others may be in use, or were a moment ago
    assert not {number + rank for number in ours for rank in range(4)} & set(theirs)
    assert not {number + rank for number in ours for rank in range(1, 4)} & set(ours)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(*ours, *theirs) < lowest


def test_a_port_that_somebody_has_is_passed_over() -> None:
    with socket.socket() as taken:
        number = own_port() + 4
        taken.bind(("127.0.0.3", number))
        taken.listen()
        assert number not in {own_port() for _ in range(600)}
