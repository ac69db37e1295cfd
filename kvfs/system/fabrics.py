"""NVMe over Fabrics: what of it this machine is connected to, and connecting by nvme-cli.

Responsibility: a connection as a value, its arguments checked before anything is asked, the kernel's view of
controllers and namespaces (sysfs), and one call of `nvme` with a bound. What lies on a namespace is `tiers.places`'.

Invariants: a call that fails leaves no connection. Concurrency: blocking calls of one command, none of the service.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvfs.errors import ConfigError, DeviceFailed, DeviceMissing, NotFound

Transport = Literal["tcp", "rdma"]

SYSFS: Final = Path("/sys/class")
MAX_NQN_BYTES: Final = 223
"""include/linux/nvme.h, NVMF_NQN_FIELD_LEN less what closes the text."""
DEFAULT_PORT: Final = 4420
_CONNECT_S: Final = 5.0
"""How long a target may take to accept a connection: a switch that relearns a path takes a second."""
_COMMAND_S: Final = 60.0
"""How long one call of `nvme` may take: the kernel gives up on an admin command then (`nvme_core.admin_timeout`)."""
_NAMESPACES_S: Final = 10.0
"""How long the kernel may take to make block devices of a controller's namespaces."""


@dataclass(frozen=True, slots=True)
class Target:
    """Says which subsystem to connect to, where, and how."""

    nqn: str
    address: str
    port: int = DEFAULT_PORT
    transport: Transport = "tcp"
    host_nqn: str | None = None
    """By which the target knows this machine. None: that of /etc/nvme/hostnqn."""
    reconnect_delay_s: int = 2
    """Between two attempts of the kernel to reach a target that is gone."""
    loss_timeout_s: int = -1
    """After which the kernel takes the block devices away; -1: never, so that a store goes on by itself."""

    def check(self) -> None:
        """Raise ConfigError for what cannot be connected to."""
        for name, nqn in (("NQN", self.nqn), ("host NQN", self.host_nqn)):
            if nqn is not None and not (nqn.startswith("nqn.") and len(nqn.encode()) <= MAX_NQN_BYTES):
                raise ConfigError(
                    f"{name} {nqn!r}: such a name begins with `nqn.` and has at most {MAX_NQN_BYTES} bytes"
                )
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port {self.port}: 1 to 65535")
        if self.reconnect_delay_s < 1:
            raise ConfigError(f"a reconnect delay of {self.reconnect_delay_s} s: at least 1")
        if self.loss_timeout_s < -1:
            raise ConfigError(f"a loss timeout of {self.loss_timeout_s} s: at least 0, or -1 for never")


@dataclass(frozen=True, slots=True)
class Controller:
    """Describes one connection, as the kernel has it."""

    name: str
    """Such as nvme0."""
    nqn: str
    transport: str
    address: str
    """As the kernel says it: traddr=10.0.0.2,trsvcid=4420."""
    state: str
    """live, connecting, resetting, deleting, dead."""
    devices: tuple[Path, ...]
    """Its namespaces' block devices."""


def controllers(sysfs: Path = SYSFS) -> list[Controller]:
    """List the connections over fabrics, by name; drives of this machine's own are none."""
    found = []
    for folder in sorted((sysfs / "nvme").glob("nvme*")):
        transport = _read(folder / "transport")
        if transport not in ("", "pcie"):
            found.append(
                Controller(
                    folder.name,
                    _read(folder / "subsysnqn"),
                    transport,
                    _read(folder / "address"),
                    _read(folder / "state"),
                    _devices(folder, sysfs),
                )
            )
    return found


def _devices(folder: Path, sysfs: Path) -> tuple[Path, ...]:
    """Return the block devices of a controller's namespaces. With native multipath sysfs has a path's (nvme0c1n1) below
    the controller, and the namespace's own (nvme0n1) below its subsystem."""
    names = {path.name for path in folder.glob("nvme*n*")}
    for subsystem in (sysfs / "nvme-subsystem").glob("nvme-subsys*"):
        if (subsystem / folder.name).exists():
            names |= {path.name for path in subsystem.glob("nvme*n*")}
    plain = {name for name in names if "c" not in name.removeprefix("nvme")}
    return tuple(Path("/dev") / name for name in sorted(plain))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def connect(target: Target) -> Controller:
    """Connect, and wait until the namespaces are block devices.

    Raises ConfigError for wrong arguments, DeviceMissing without nvme-cli, DeviceFailed where the kernel has no such
    transport, or the target cannot be reached or refuses.
    """
    target.check()
    if target.transport == "tcp":
        _reach(target)
    if not Path("/dev/nvme-fabrics").exists():
        _run(["modprobe", f"nvme-{target.transport}"], f"the kernel has no NVMe over {target.transport}")
    arguments = [
        *("--transport", target.transport),
        *("--traddr", target.address),
        *("--trsvcid", str(target.port)),
        *("--nqn", target.nqn),
        *("--reconnect-delay", str(target.reconnect_delay_s)),
        *("--ctrl-loss-tmo", str(target.loss_timeout_s)),
        *([] if target.host_nqn is None else ["--hostnqn", target.host_nqn]),
    ]
    said = _run(
        ["nvme", "connect", *arguments, "--output-format", "json"],
        f"{target.nqn} at {target.address} port {target.port}",
    )
    try:
        name = str(json.loads(said)["device"])
    except (ValueError, KeyError, TypeError):
        raise DeviceFailed(f"nvme connect said {said!r}, and no device") from None
    return _when_there(name)


def _when_there(name: str) -> Controller:
    deadline = time.monotonic() + _NAMESPACES_S
    while True:
        found = next((each for each in controllers() if each.name == name), None)
        if found is not None and found.devices and all(device.exists() for device in found.devices):
            return found
        if time.monotonic() > deadline:
            disconnect_controller(name)
            raise DeviceFailed(f"{name} has no namespace after {_NAMESPACES_S:.0f} s")
        time.sleep(0.05)


def disconnect(nqn: str) -> list[Controller]:
    """End all connections to a subsystem; return what they were. Raises NotFound where there is none, DeviceMissing,
    DeviceFailed."""
    found = [each for each in controllers() if each.nqn == nqn]
    if not found:
        raise NotFound(f"no connection to {nqn}")
    for each in found:
        disconnect_controller(each.name)
    return found


def disconnect_controller(name: str) -> None:
    """End one connection, whoever uses its devices."""
    _run(["nvme", "disconnect", "--device", name], name)


def _reach(target: Target) -> None:
    """Raise DeviceFailed where nobody accepts: the kernel tries that for minutes."""
    try:
        socket.create_connection((target.address, target.port), timeout=_CONNECT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise DeviceFailed(f"{target.address} port {target.port}: {why}") from None


def _run(command: list[str], what: str) -> str:
    """Run a program; return what it says. Raises DeviceMissing, DeviceFailed with its last line."""
    if shutil.which(command[0]) is None:
        package = {"nvme": "nvme-cli", "modprobe": "kmod"}[command[0]]
        raise DeviceMissing(f"{command[0]} is missing: apt-get install {package}")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S
        )
    except subprocess.TimeoutExpired:
        raise DeviceFailed(f"{what}: no end after {_COMMAND_S:.0f} s") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise DeviceFailed(f"{what}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout
