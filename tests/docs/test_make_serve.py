"""`make serve` as its recipe stands, without the set-up before it: it serves ./mnt from ./data until Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.door import need_mount
from tests.support.service import ROOT, detach_mounts, mounts_under, run_kvfs
from tests.support.waits import WAIT_S

MAKE = ["make", "--file", f"{ROOT}/Makefile", "--include-dir", str(ROOT), "--assume-old", "build", "serve"]


@pytest.fixture
def checkout() -> Iterator[Path]:
    """Make a directory whose programs are this environment's; its path is short, for a socket's."""
    need_mount()
    where = Path(tempfile.mkdtemp(prefix="kvfs-make-"))
    programs = where / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, command in (("python", ""), ("kvfs", "-m kvfs ")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" {command}"$@"\n')
        program.chmod(0o755)
    yield where
    detach_mounts(where)
    shutil.rmtree(where)


@pytest.mark.mount
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_serve_serves_until_ctrl_c(checkout: Path) -> None:
    with subprocess.Popen(
        [*MAKE, "ARGS=--dram 32MiB --nvme 16MiB"],
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")},
        start_new_session=True,
    ) as make:
        try:
            assert make.stdout is not None
            shown = []
            for line in make.stdout:
                shown.append(line.strip())
                if shown[-1] == "ready":
                    break
            assert shown[0].startswith(
                f"takes    up to 32 MiB of DRAM, 16 MiB of disk in {checkout}/data/nvme"
            )
            assert shown[-1] == "ready", shown
            (checkout / "mnt" / "demo").mkdir()
            (checkout / "mnt" / "demo" / "object").write_text("served")
            assert run_kvfs("ls", str(checkout / "mnt" / "demo"), timeout_s=WAIT_S).stdout.split() == [
                "object"
            ]
            os.killpg(make.pid, signal.SIGINT)
            make.wait(WAIT_S)
        finally:
            if make.poll() is None:
                os.killpg(make.pid, signal.SIGKILL)
    assert str(checkout / "mnt") not in mounts_under(checkout)
    assert '"clean": true' in (checkout / "data" / "format.json").read_text()
