"""Tiers larger than the machine: refused before anything is made, with sizes that then work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.config.sizes import parse_size
from tests.support.powerless import FINDS_NO_PROGRAMS, Powerless, without_rights
from tests.support.service import ROOT, Service, run_kvfs
from tests.support.tmpfs import private_tmpfs

MIB = 1 << 20
DISK_MIB = 160
IN_DIRECTORY = '[dram]\nbacking = "directory"\n'


@pytest.fixture
def disk() -> Iterator[Path]:
    """Mount a filesystem of DISK_MIB; yield its only directory, with a short path, for a socket's."""
    base = Path(tempfile.mkdtemp(prefix="kvfs-disk-"))
    try:
        with private_tmpfs(base / "disk", DISK_MIB * MIB) as disk:
            (disk / "d").mkdir()
            yield disk / "d"
    finally:
        shutil.rmtree(base)


def refused(*arguments: str, powerless: bool = False) -> str:
    """Start in vain; return the error."""
    if not powerless:
        done = run_kvfs("serve", "--no-mount", *arguments)
    else:
        command = without_rights([sys.executable, "-m", "kvfs", "serve", "--no-mount", *arguments])
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **FINDS_NO_PROGRAMS}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert not done.stdout
    return done.stderr


def sizes(message: str) -> list[str]:
    return re.findall(r"'(\d[\d.]*(?: [KMGT]iB)?)'", message.rpartition(";")[2])


def test_more_dram_than_memory_is_refused_with_what_there_is(tmp_path: Path) -> None:
    memory = Path("/proc/meminfo").read_text()
    total_bytes = int(re.findall(r"MemTotal: +(\d+)", memory)[0]) << 10
    message = refused(f"--data={tmp_path / 'data'}", "--dram=900TiB", "--nvme=0")
    found = re.search(
        r"\[dram\] capacity = '900 TiB': there are (.+) of memory here, (.+) of it free now; ", message
    )
    assert found is not None, message
    shown_bytes, free_bytes = (parse_size(each) for each in found.groups())
    assert 0 < free_bytes <= shown_bytes <= total_bytes * 1.05
    assert not (tmp_path / "data").exists()
    (proposed,) = sizes(message)
    with Service(mode="off", dram=proposed) as service, service.client() as client:
        assert client.status()["tiers"][0]["capacity_bytes"] == parse_size(proposed) // 4096 * 4096


def test_more_nvme_than_disk_is_refused_with_what_fits(disk: Path) -> None:
    message = refused(f"--data={disk / 'data'}", "--dram=16MiB", "--nvme=1GiB")
    assert (
        f"[nvme] capacity = '1 GiB': the filesystem of {disk}/data/nvme has {DISK_MIB} MiB free, and "
        "0 B in segment files" in message
    )
    assert sizes(message) == [f"{DISK_MIB * 9 // 10} MiB"]
    assert list(disk.iterdir()) == []
    with Service(mode="off", dram="16MiB", nvme=sizes(message)[0], base=disk) as service:
        assert_keeps(service, 8 * MIB)
        service.stop()
        # All its segment files are there: a larger tier says what they take.
        message = refused(f"--data={disk / 'data'}", "--dram=16MiB", "--nvme=1GiB")
        assert re.search(
            r"has [\d.]+ MiB free, and 14\d(\.\d)? MiB in segment files; '14\d MiB' is possible", message
        )


@pytest.mark.parametrize("powerless", [False, True])
def test_a_dram_tier_in_a_directory_is_held_against_its_disk(disk: Path, powerless: bool) -> None:
    """With `backing = "directory"`, and where the service may not mount."""
    (config := disk / "kvfs.toml").write_text("# nothing\n" if powerless else IN_DIRECTORY)
    options = (f"--config={config}", f"--data={disk / 'data'}", "--nvme=0")
    message = refused(*options, "--dram=320MiB", powerless=powerless)
    assert (
        f"[dram] capacity = '320 MiB' (in a plain directory): the filesystem of {disk}/data has "
        f"{DISK_MIB} MiB free, and 0 B in slots; '{DISK_MIB * 9 // 10 - 1} MiB' is possible" in message
    )
    assert list(disk.iterdir()) == [config]
    start_with(disk, config, powerless, dram=sizes(message)[0], nvme="0")


@pytest.mark.parametrize("powerless", [False, True])
def test_tiers_on_one_disk_are_added_up(disk: Path, powerless: bool) -> None:
    (config := disk / "kvfs.toml").write_text("# nothing\n" if powerless else IN_DIRECTORY)
    options = (f"--config={config}", f"--data={disk / 'data'}")
    message = refused(*options, "--dram=120MiB", "--nvme=120MiB", powerless=powerless)
    assert (
        "[dram] capacity = '120 MiB' (in a plain directory) and [nvme] capacity = '120 MiB': the filesystem of "
        f"{disk}/data has {DISK_MIB} MiB free, and 0 B in slots and segment files; "
        "[dram] capacity = '71 MiB' with [nvme] capacity = '71 MiB' is possible" in message
    )
    assert list(disk.iterdir()) == [config]
    start_with(disk, config, powerless, dram="71MiB", nvme="71MiB")


def start_with(disk: Path, config: Path, powerless: bool, *, dram: str, nvme: str) -> None:
    """Start with what was proposed, fill the DRAM tier, and start again over what it kept."""
    kind, environment = (Powerless, FINDS_NO_PROGRAMS) if powerless else (Service, {})
    arguments = ("--config", str(config))
    with kind(
        mode="off", dram=dram, nvme=nvme, arguments=arguments, environment=environment, base=disk
    ) as service:
        assert_keeps(service, parse_size(dram) * 3 // 4)
        service.stop()
        service.start()
        with service.client() as client:
            assert client.get("bucket/0") == bytes(MIB)


def assert_keeps(service: Service, size_bytes: int) -> None:
    with service.client() as client:
        client.create_bucket("bucket")
        for number in range(size_bytes // MIB):
            client.put(f"bucket/{number}", bytes(MIB))
        assert client.get("bucket/0") == bytes(MIB)


def test_the_default_of_a_tier_in_a_directory_fits_its_disk(disk: Path) -> None:
    """Make no more of it than the disk has, however much memory there is."""
    (config := disk / "kvfs.toml").write_text(IN_DIRECTORY)
    command = [
        sys.executable,
        "-m",
        "kvfs",
        "serve",
        "--no-mount",
        f"--config={config}",
        f"--data={disk / 'data'}",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        ready = any(line == "ready\n" for line in process.stdout)
        process.terminate()
    share = f"{DISK_MIB // 4 - 1} MiB"
    assert first.startswith(f"takes    up to {share} of DRAM, "), first
    assert ready
