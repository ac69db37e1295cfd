"""`kvfs device`: what block devices hold, before the NVMe tier is given one.

Responsibility: arguments in, one device looked at or emptied, text out; the rules are `tiers.places.block_devices`'.
Needs no service; a device that one uses is refused as any other in use. Errors are those of `kvfs.cli.main`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvfs.cli.options import Json
from kvfs.cli.output import print_json
from kvfs.config.sizes import format_size
from kvfs.errors import DeviceFailed
from tiers.places import block_devices

app = typer.Typer(no_args_is_help=True, help="Show and empty block devices for the NVMe tier.")

DevicePath = Annotated[Path, typer.Argument(metavar="DEVICE", help="Such as /dev/nvme1n1.")]


@app.command()
def show(device: DevicePath, as_json: Json = False) -> None:
    """Show the size of a block device that nobody uses, and what it holds."""
    try:
        size_bytes, holds = block_devices.describe(device)
    except OSError as error:
        raise DeviceFailed(f"{device}: {error.strerror}") from None
    if as_json:
        print_json({"device": str(device), "size_bytes": size_bytes, "holds": holds})
    else:
        print(f"{device}: {format_size(size_bytes)}, holds {holds}")


@app.command()
def clear(
    device: DevicePath,
    force: Annotated[bool, typer.Option("--force", help="Whatever it holds. All of that is lost.")] = False,
) -> None:
    """Empty a block device that nobody uses, so that a store takes it at its next start."""
    try:
        held = block_devices.clear(device, forced=force)
    except OSError as error:
        raise DeviceFailed(f"{device}: {error.strerror}") from None
    print(f"{device}: held {held}; is empty")
