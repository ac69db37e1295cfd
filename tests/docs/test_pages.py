"""What README.md and docs/ show works as it is printed: `tests.support.pages` says what is done with which block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.config.load import load
from kvfs.limits import MIB
from tests.support.door import need_mount
from tests.support.loop_devices import MakeLoop
from tests.support.loop_devices import make_loop as make_loop
from tests.support.pages import PAGES, Block, blocks_of
from tests.support.service import ROOT, Service
from tests.support.traces import small_trace, write_trace

LOOPBACK_UP: Final = """
import fcntl, os, socket, struct, sys

SIOCSIFFLAGS, IFF_UP = 0x8914, 1
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""A new network namespace has its loopback interface down."""
NAMESPACES: Final = ("unshare", "--mount", "--net", sys.executable, "-c", LOOPBACK_UP)
ALONE: Final = """
awk '$0 ~ " - fuse.kvfs " && $5 != ENVIRON["KVFS_TEST_MOUNT"] { print $5 }' /proc/self/mountinfo | xargs -r umount -l
exec bash -euo pipefail -c "trap 'jobs -p | xargs -r kill' EXIT; $1"
"""
"""In namespaces of its own a page has the service under test as the only one, which commands without a path mean, and
each port that it names, whatever else runs here; what it leaves in the background ends with it."""
RUN_PYTHON: Final = """
import json, sys

names = {"__name__": "__main__"}
for page, line, code in json.load(sys.stdin):
    exec(compile("\\n" * (line - 1) + code, page, "exec"), names)
"""
WITH_BLOCKS: Final = [page for page in PAGES if blocks_of(page)]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    need_mount()
    with Service(mode="auto", dram="64MiB", nvme="64MiB") as running:
        yield running


@pytest.fixture
def reader(service: Service, tmp_path: Path) -> Path:
    """The directory of somebody who follows a page: a checkout with a service, and a trace."""
    (tmp_path / "mnt").symlink_to(service.mount)
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    (tmp_path / "etc").mkdir()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    kvfs = programs / "kvfs"
    kvfs.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m kvfs "$@"\n')
    kvfs.chmod(0o755)
    for name in ("trace.jsonl", "trace.jsonl.zst"):
        write_trace(tmp_path / name, small_trace(requests=60))
    return tmp_path


def run(
    command: list[str], service: Service, reader: Path, text: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KVFS_ADDRESS"}
    path = os.pathsep.join([str(reader / ".venv" / "bin"), os.environ["PATH"]])
    return subprocess.run(
        command,
        input=text,
        cwd=reader,
        env={**environment, "PATH": path, "PYTHONPATH": str(ROOT), "KVFS_TEST_MOUNT": str(service.mount)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.mount
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_what_a_page_shows_works(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(page) if not block.reason]
    for block in blocks:
        if block.language == "json":
            json.loads(block.code)
        if block.language == "toml":
            (tmp_path / "kvfs.toml").write_text(block.code)
            (tmp_path / "kvfs.toml").chmod(0o600)
            load(tmp_path / "kvfs.toml")
            (tmp_path / "kvfs.toml").unlink()
    programs = [block for block in blocks if block.language in ("sh", "python")]
    if programs:
        service, reader = request.getfixturevalue("service"), request.getfixturevalue("reader")
        run_programs(programs, service, reader)


WORKS = "works, a block went there and back in "
"""What a connector says at its start."""


def run_programs(blocks: list[Block], service: Service, reader: Path) -> None:
    def here(block: Block) -> str:
        return block.code.replace("/mnt/kvfs", str(service.mount)).replace("/etc/kvfs", str(reader / "etc"))

    for block in blocks:
        if block.language == "sh":
            done = run([*NAMESPACES, "bash", "-c", ALONE, "bash", here(block)], service, reader)
            assert done.returncode == 0, f"{block.where}\n{done.stdout}{done.stderr}"
    programs = [(block.where, block.line, here(block)) for block in blocks if block.language == "python"]
    if programs:
        done = run(
            [sys.executable, "-c", RUN_PYTHON],
            service,
            reader,
            json.dumps(programs),
        )
        unexpected = [line for line in done.stderr.splitlines() if WORKS not in line]
        assert (done.returncode, unexpected) == (0, [])


@pytest.mark.mount
def test_commands_for_devices_work_on_one(make_loop: MakeLoop, service: Service, reader: Path) -> None:
    loop = make_loop(16 * MIB)
    [block] = [block for block in blocks_of(ROOT / "docs" / "devices.md") if "kvfs device" in block.code]
    commands = block.code.replace("/dev/nvme1n1", str(loop.path))
    done = run(["bash", "-euo", "pipefail", "-c", commands], service, reader)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{loop.path}: 16 MiB, holds nothing" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "\n```\nls\n```\n",
        "\n```console\n$ ls\n```\n",
        "a line\n\n    an indented block\n",
        "<!-- not run: -->\n```c\n```\n",
    ],
)
def test_a_block_that_is_neither_run_nor_marked_is_found(text: str) -> None:
    with pytest.raises(AssertionError):
        blocks_of(ROOT / "README.md", text)


def test_a_marked_block_has_its_reason() -> None:
    [block] = blocks_of(
        ROOT / "README.md", "Text.\n\n<!-- not run: needs a GPU -->\n```sh\nnvidia-smi\n```\n"
    )
    assert (block.line, block.language, block.code, block.reason) == (5, "sh", "nvidia-smi\n", "needs a GPU")
