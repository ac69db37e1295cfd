"""`kvfs nvmeof` without a fabric: arguments, what the kernel's files say, programs that are missing or fail. With one:
`make test-rig`."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs.errors import ConfigError, DeviceFailed, DeviceMissing, NotFound
from kvfs.system import fabrics
from kvfs.system.fabrics import Controller, Target, controllers
from tests.support.service import run_kvfs

NQN = "nqn.2026-01.example:kv"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_connections_are_what_the_kernel_says(tmp_path: Path) -> None:
    nvme, subsystems = tmp_path / "nvme", tmp_path / "nvme-subsystem"
    write(nvme / "nvme0", transport="pcie", subsysnqn="nqn.drive", address="0000:01:00.0", state="live")
    write(nvme / "nvme0" / "nvme0n1")
    at = "traddr=10.0.0.2,trsvcid=4420"
    write(nvme / "nvme1", transport="tcp", subsysnqn=NQN, address=at, state="live")
    write(nvme / "nvme1" / "nvme1n1")
    write(nvme / "nvme1" / "nvme1n2")
    write(nvme / "nvme2", transport="rdma", subsysnqn=NQN + "2", address=at, state="connecting")
    write(nvme / "nvme2" / "nvme2c2n1")
    write(subsystems / "nvme-subsys2" / "nvme2n1")
    (subsystems / "nvme-subsys2" / "nvme2").symlink_to(nvme / "nvme2")
    both = (Path("/dev/nvme1n1"), Path("/dev/nvme1n2"))
    assert controllers(tmp_path) == [
        Controller("nvme1", NQN, "tcp", at, "live", both),
        Controller("nvme2", NQN + "2", "rdma", at, "connecting", (Path("/dev/nvme2n1"),)),
    ]
    assert controllers(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nqn": "kv"}, "NQN 'kv': such a name begins with `nqn.`"),
        ({"nqn": "nqn." + "x" * 220}, "at most 223 bytes"),
        ({"host_nqn": "me"}, "host NQN 'me'"),
        ({"port": 0}, "port 0: 1 to 65535"),
        ({"port": 65536}, "port 65536: 1 to 65535"),
        ({"reconnect_delay_s": 0}, "a reconnect delay of 0 s: at least 1"),
        ({"loss_timeout_s": -2}, "a loss timeout of -2 s"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fabrics.connect(replace(Target(NQN, "127.0.0.1"), **change))  # type: ignore[arg-type]


def test_a_target_that_nobody_is_at_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = run_kvfs("nvmeof", "connect", NQN, "--address", "127.0.0.1", "--port", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kvfs: 127.0.0.1 port {port}: Connection refused\n"


def test_no_connection_is_no_error_but_to_end_it() -> None:
    if controllers():
        pytest.skip("this machine has some")
    assert run_kvfs("nvmeof", "list").stdout == ""
    assert run_kvfs("nvmeof", "list", "--json").stdout == "[]\n"
    done = run_kvfs("nvmeof", "disconnect", NQN)
    assert (done.returncode, done.stderr) == (3, f"kvfs: no connection to {NQN}\n")


def programs(monkeypatch: pytest.MonkeyPatch, folder: Path, **scripts: str) -> None:
    """Have nothing but these programs on PATH."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text("#!/bin/sh\n" + script + "\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.path.exists("/dev/nvme-fabrics"):
        pytest.skip("this kernel has NVMe over Fabrics")
    target = Target(NQN, "127.0.0.1", transport="rdma")
    programs(monkeypatch, tmp_path / "nothing")
    with pytest.raises(DeviceMissing, match="modprobe is missing: apt-get install kmod"):
        fabrics.connect(target)
    programs(monkeypatch, tmp_path / "no-module", modprobe="echo 'FATAL: no such module' >&2; exit 1")
    with pytest.raises(DeviceFailed, match="the kernel has no NVMe over rdma: FATAL: no such module"):
        fabrics.connect(target)
    programs(monkeypatch, tmp_path / "no-nvme", modprobe="exit 0")
    with pytest.raises(DeviceMissing, match="nvme is missing: apt-get install nvme-cli"):
        fabrics.connect(target)
    programs(
        monkeypatch,
        tmp_path / "fails",
        modprobe="exit 0",
        nvme="echo one; echo 'could not add it' >&2; exit 1",
    )
    with pytest.raises(DeviceFailed, match=f"{NQN} at 127.0.0.1 port 4420: could not add it"):
        fabrics.connect(target)
    programs(monkeypatch, tmp_path / "odd", modprobe="exit 0", nvme="echo connected")
    with pytest.raises(DeviceFailed, match="and no device"):
        fabrics.connect(target)
    with pytest.raises(NotFound):
        fabrics.disconnect(NQN)
