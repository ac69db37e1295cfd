"""The kernel's own NVMe target (nvmet), in the machine of packaging/rig: files as namespaces, over TCP and RDMA."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvfs.system.fabrics import Transport

RXE: Final = Path("/sys/class/infiniband/rxe0")
CONFIG: Final = Path("/sys/kernel/config/nvmet")
PORTS: Final[dict[Transport, int]] = {"tcp": 1, "rdma": 2}
ADDRESSES: Final[dict[Transport, str]] = {"tcp": "127.0.0.1", "rdma": "10.9.8.7"}
PORT: Final = 4420


def run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, timeout=60)


def add_rxe() -> None:
    """Make an RDMA device: soft-RoCE on an interface that leads nowhere."""
    if RXE.exists():
        return
    for module in ("crc32_generic", "rdma_rxe", "ib_uverbs"):
        run("modprobe", module)
    run("ip", "link", "add", "eth0", "mtu", "4200", "type", "dummy")
    run("ip", "address", "add", f"{ADDRESSES['rdma']}/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    run("rdma", "link", "add", RXE.name, "type", "rxe", "netdev", "eth0")


def start() -> None:
    """Load what is needed, and listen over TCP and over RDMA."""
    for module in ("nvmet", "nvmet-tcp", "nvmet-rdma", "nvme-tcp", "nvme-rdma", "loop"):
        run("modprobe", module)
    if not CONFIG.exists():
        run("mount", "-t", "configfs", "none", "/sys/kernel/config")
    add_rxe()
    for transport, number in PORTS.items():
        port = CONFIG / "ports" / str(number)
        port.mkdir()
        (port / "addr_adrfam").write_text("ipv4")
        (port / "addr_trtype").write_text(transport)
        (port / "addr_traddr").write_text(ADDRESSES[transport])
        (port / "addr_trsvcid").write_text(str(PORT))


@dataclass(frozen=True)
class Exported:
    """A subsystem with one namespace, over one transport."""

    nqn: str
    file: Path
    transport: Transport

    @property
    def _subsystem(self) -> Path:
        return CONFIG / "subsystems" / self.nqn

    @property
    def _link(self) -> Path:
        return CONFIG / "ports" / str(PORTS[self.transport]) / "subsystems" / self.nqn

    def make(self, size_bytes: int) -> None:
        with self.file.open("ab") as file:
            os.truncate(file.fileno(), size_bytes)
        namespace = self._subsystem / "namespaces" / "1"
        namespace.mkdir(parents=True)
        (self._subsystem / "attr_allow_any_host").write_text("1")
        (namespace / "device_path").write_text(str(self.file))
        (namespace / "buffered_io").write_text("1")  # a file in memory has no direct I/O
        (namespace / "enable").write_text("1")
        self.appear()

    def appear(self) -> None:
        """Be reachable (again)."""
        self._link.symlink_to(self._subsystem)

    def vanish(self) -> None:
        """End all connections, and accept none, as a target that is killed."""
        self._link.unlink()

    def remove(self) -> None:
        if self._link.is_symlink():
            self.vanish()
        (self._subsystem / "namespaces" / "1").rmdir()
        self._subsystem.rmdir()
