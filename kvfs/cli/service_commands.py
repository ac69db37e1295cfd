"""`kvfs serve`, `gateway`, `umount` and `drop`: run the service, end it, and free the memory that it keeps.

Responsibility: arguments in, one call of `kvfs.service`, the gateway's supervisor or the mount, text out; errors
are those of `kvfs.cli.main`. Concurrency: none; `serve` and `gateway` run a trio loop until they end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import trio
import typer

from gateway.app.supervisor import run_alone
from gateway.app.worker_settings import worker_settings
from kvfs import limits
from kvfs.cli.options import At, options_of
from kvfs.client import discovery
from kvfs.client.transport import socket_path
from kvfs.config.load import load
from kvfs.config.sizes import format_size
from kvfs.errors import NotFound, NotPermitted
from kvfs.service import Running, Takes, drop_kept, run
from kvfs.system.notify import set_up_logging
from mounts.mount_point import abort, answers, unmount

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `kvfs serve`; None leaves the configuration's value."""

    mount: Annotated[str | None, typer.Option(metavar="DIR", help="Where to mount.")] = None
    no_mount: Annotated[
        bool, typer.Option("--no-mount", help="Serve clients and S3 only; needs neither FUSE nor root.")
    ] = False
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Data directory.")] = None
    dram: Annotated[str | None, typer.Option(metavar="SIZE", help='DRAM capacity, such as "10GiB".')] = None
    slots: Annotated[
        int | None, typer.Option(help="Most objects in DRAM at once; default: one for 64 KiB.")
    ] = None
    nvme: Annotated[
        str | None, typer.Option(metavar="SIZE", help='NVMe capacity, preallocated; "0": none.')
    ] = None
    hbm: Annotated[
        str | None, typer.Option(metavar="SIZE", help="GPU memory for blocks, of each GPU; default: none.")
    ] = None
    keep: Annotated[
        bool | None, typer.Option("--keep/--no-keep", help="Leave the objects in memory for the next start.")
    ] = None
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML configuration.")] = None
    mode: Annotated[str | None, typer.Option(help="auto, passthrough, native, plain or off.")] = None
    no_passthrough: Annotated[bool, typer.Option("--no-passthrough", help="Same as --mode native.")] = False
    socket: Annotated[str | None, typer.Option(metavar="PATH", help="Session socket.")] = None
    s3: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve S3 there; credentials are in the file.")
    ] = None
    workers: Annotated[int | None, typer.Option(help="Processes that serve S3.")] = None
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None

    def settings(self) -> dict[tuple[str, str], Any]:
        """Return the values that replace the configuration's, by section and key. Raises BadParameter."""
        if self.no_passthrough and self.mode not in (None, "native"):
            raise typer.BadParameter(f"--no-passthrough contradicts --mode {self.mode}")
        if self.no_mount and (self.no_passthrough or self.mount or self.mode not in (None, "off")):
            raise typer.BadParameter("--no-mount contradicts --mount, --mode and --no-passthrough")
        return {
            ("mount", "path"): self.mount,
            ("mount", "mode"): "off" if self.no_mount else "native" if self.no_passthrough else self.mode,
            ("store", "data"): self.data,
            ("hbm", "capacity"): self.hbm,
            ("dram", "capacity"): self.dram,
            ("dram", "slots"): self.slots,
            ("dram", "keep"): self.keep,
            ("nvme", "capacity"): self.nvme,
            ("session", "socket"): self.socket,
            ("s3", "listen"): self.s3,
            ("s3", "workers"): self.workers,
            ("log", "level"): self.log_level,
        }


@app.command()
@options_of(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Run the service in the foreground until Ctrl-C or SIGTERM."""
    settings = load(options.config, options.settings())
    set_up_logging(settings.log.level)
    _run(run, settings, _show_started, _show_takes)


def _run(function: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """Run a trio loop; raise a single error of its nurseries without their groups."""
    try:
        trio.run(function, *arguments)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


def _show_takes(takes: Takes) -> None:
    disk = (
        f"{format_size(takes.nvme_bytes)} of disk in {takes.nvme_where}"
        if takes.nvme_bytes
        else "no NVMe tier"
    )
    print(
        f"{'takes':8} up to {format_size(takes.dram_bytes)} of DRAM, {disk}; other sizes: --dram SIZE, --nvme SIZE",
        flush=True,
    )


def _show_started(running: Running) -> None:
    lines = {
        "data": f"{running.data} (store {running.store_id.hex()[:8]})",
        "DRAM": f"{format_size(running.capacity_bytes)} on {running.backing}, {running.max_slots} slots",
        "NVMe": f"{format_size(running.nvme_bytes)} by {running.nvme_io}" if running.nvme_bytes else "none",
        "mount": f"{running.mountpoint}, {running.mode}" if running.mountpoint else "none",
        "session": str(running.socket),
        "S3": running.s3 or "none",
    }
    if running.gpus:
        lines["GPU"] = f"{format_size(running.gpu_bytes)} of each of {running.gpus}"
    if running.page is not None:
        lines["page"] = running.page
    for name, value in lines.items():
        print(f"{name:8} {value}")
    for lack in running.missing:
        print(f"{'missing':8} {lack}")
    print("ready", flush=True)
    if sys.stdout.isatty():
        _suggest(running)


def _suggest(running: Running) -> None:
    if running.mountpoint is None:
        print(
            f"\ntry, in another terminal:\n  {sys.argv[0]} status --at {running.data}\nstop with Ctrl-C",
            flush=True,
        )
        return
    where = os.path.relpath(running.mountpoint)
    where = where if len(where) < len(str(running.mountpoint)) else str(running.mountpoint)
    print(
        f"""
try, in another terminal:
  mkdir {where}/demo && cp README.md {where}/demo/ && cat {where}/demo/README.md
  {sys.argv[0]} status
  {sys.argv[0]} ls {where}/demo
stop with Ctrl-C""",
        flush=True,
    )


@app.command()
def gateway(
    s3: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to serve S3.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the port.")] = None,
    admin: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the page, /healthz and /metrics are.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML configuration, with the credentials.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    at: At = None,
) -> None:
    """Serve S3 in front of a running service, in the foreground until Ctrl-C or SIGTERM."""
    flags = {
        ("s3", "listen"): s3,
        ("s3", "workers"): workers,
        ("s3", "admin"): admin,
        ("log", "level"): log_level,
    }
    settings = load(config, flags)
    address = discovery.address(at)
    socket = socket_path(address, timeout_s=limits.CLIENT_TIMEOUT_S)
    shared = worker_settings(settings.s3, socket, settings.log.level, settings.file)
    set_up_logging(settings.log.level)

    def started(listening: object) -> None:
        print(f"S3       {listening}\nready", flush=True)

    _run(run_alone, shared, settings.s3.workers, started)


@app.command()
def umount(
    mount: Annotated[str | None, typer.Argument(help="A kvfs mount, of a running or a dead service.")] = None,
) -> None:
    """Unmount; the service behind it, where there is one, stops cleanly."""
    where = Path(os.path.abspath(mount)) if mount else discovery.default_mount()
    before = discovery.mounts().count(where)
    if before == 0:
        raise NotFound(f"{where}: no kvfs mount")
    if answers(where):
        unmount(where)
    else:
        abort(where)
    if discovery.mounts().count(where) >= before:
        raise NotPermitted(
            f"{where} is still mounted: only root and the user who runs the service unmount it"
        )


@app.command()
def drop(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data directory of a stopped service.")],
) -> None:
    """Free the memory of the objects that a stopped service keeps for its next start."""
    print(f"{format_size(drop_kept(Path(os.path.abspath(data))))} freed")
