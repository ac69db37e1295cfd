"""`kvfs nvmeof`: connect to namespaces that other machines export by NVMe over Fabrics, for `[nvme] device`.

Responsibility: arguments in, nvme-cli called once (`kvfs.system.fabrics`), text out. Needs root, as that does. Errors
are those of `kvfs.cli.main`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfs.cli.options import Json
from kvfs.cli.output import print_json
from kvfs.config.sizes import format_size
from kvfs.errors import ConfigError
from kvfs.system import fabrics
from kvfs.system.fabrics import Controller, Target, Transport
from tiers.places import block_devices

app = typer.Typer(
    no_args_is_help=True, help="Connect to devices that other machines export by NVMe over Fabrics."
)

Nqn = Annotated[str, typer.Argument(metavar="NQN", help="The subsystem's name, nqn.…")]


@app.command()
def connect(
    nqn: Nqn,
    address: Annotated[str, typer.Option(metavar="HOST", help="The target's address.")],
    port: Annotated[int, typer.Option(help="Its port.")] = fabrics.DEFAULT_PORT,
    transport: Annotated[Transport, typer.Option(help="tcp or rdma.")] = "tcp",
    host_nqn: Annotated[
        str | None, typer.Option(metavar="NQN", help="This machine's name; default: /etc/nvme/hostnqn.")
    ] = None,
    reconnect_delay: Annotated[
        int, typer.Option(metavar="S", help="Seconds between two attempts to reach a target that is gone.")
    ] = 2,
    loss_timeout: Annotated[
        int, typer.Option(metavar="S", help="Seconds until it is given up; -1: never.")
    ] = -1,
    as_json: Json = False,
) -> None:
    """Connect to a subsystem, and print its block devices."""
    target = Target(nqn, address, port, transport, host_nqn, reconnect_delay, loss_timeout)
    _show([fabrics.connect(target)], as_json)


@app.command("list")
def list_connections(as_json: Json = False) -> None:
    """List the connections, and what their devices are."""
    _show(fabrics.controllers(), as_json)


@app.command()
def disconnect(
    nqn: Nqn,
    force: Annotated[bool, typer.Option("--force", help="Also where a device is in use.")] = False,
) -> None:
    """End the connections to a subsystem whose devices nobody uses."""
    if not force:
        for controller in fabrics.controllers():
            for device in controller.devices if controller.nqn == nqn else ():
                with block_devices.claimed(device):
                    pass
    for ended in fabrics.disconnect(nqn):
        print(f"{ended.name}: disconnected from {nqn}")


def _show(found: list[Controller], as_json: bool) -> None:
    if as_json:
        print_json([_described(each) for each in found])
        return
    for each in found:
        print(f"{each.name}: {each.nqn} over {each.transport}, {each.address}, {each.state}")
        for path in each.devices:
            size_bytes, holds = _describe(path)
            print(f"  {path}: {'' if size_bytes is None else format_size(size_bytes) + ', '}{holds}")


def _described(controller: Controller) -> dict[str, Any]:
    devices = [(path, *_describe(path)) for path in controller.devices]
    names = ("device", "size_bytes", "holds")
    return {
        **asdict(controller),
        "devices": [dict(zip(names, (str(path), size, holds), strict=True)) for path, size, holds in devices],
    }


def _describe(path: Path) -> tuple[int | None, str]:
    """Return size and content of a device; of one in use that it is."""
    try:
        return block_devices.describe(path)
    except ConfigError as error:
        return None, str(error).rpartition("': ")[2]
