"""The command line: `kvfs serve` runs the service, the other commands talk to one that runs.

Responsibility: arguments in, one call, text out. Every command but `serve`, `bench` and `umount` goes through
`kvfs.client`. A failure is one line on stderr, `kvfs: ...`, and the exit code says of which kind.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 no such name, 4 no service there, 130
interrupted.

Concurrency: none; `serve` hands over to `kvfs.service`. Modules that only one command needs are imported by
that command: `kvfs status` must answer in 0.3 s, and trio, pydantic and rich together take most of that.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvfs import addresses, paths
from kvfs.errors import ConfigError, InvalidRequest, KvfsError, NotFound, SessionClosed

if TYPE_CHECKING:
    from kvfs.client import Client
    from kvfs.service import Running

FAILED, USAGE, NOT_FOUND, NOT_RUNNING, INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    name="kvfs",
    help="A tiered store for the KV cache of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

At = Annotated[
    str | None,
    typer.Option("--at", envvar="KVFS_ADDRESS", metavar="ADDRESS", help="A mount or a session socket."),
]
Paths = Annotated[
    list[str], typer.Argument(metavar="PATH...", help="Paths on a mount, or bucket/key with --at.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> NoReturn:
    """The entry point: run a command and turn its failure into a line and an exit code."""
    try:
        app()
    except KvfsError as error:
        fail(str(error), exit_code(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


def exit_code(error: KvfsError) -> int:
    """The documented exit code of an error."""
    for kind, code in ((NotFound, NOT_FOUND), (SessionClosed, NOT_RUNNING), (ConfigError, USAGE)):
        if isinstance(error, kind):
            return code
    return FAILED


def fail(message: str, code: int) -> NoReturn:
    print(f"kvfs: {message}", file=sys.stderr)
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kvfs {version('kvfs')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- the service -----------------------------------------------------------------------------------------
@app.command()
def serve(
    mount: Annotated[str | None, typer.Option(metavar="DIR", help="Where to mount.")] = None,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Data directory.")] = None,
    dram: Annotated[str | None, typer.Option(metavar="SIZE", help='DRAM capacity, such as "10GiB".')] = None,
    slots: Annotated[int | None, typer.Option(help="Most objects at once.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML configuration.")] = None,
    mode: Annotated[str | None, typer.Option(help="auto, passthrough, native or plain.")] = None,
    no_passthrough: Annotated[bool, typer.Option("--no-passthrough", help="Same as --mode native.")] = False,
    socket: Annotated[str | None, typer.Option(metavar="PATH", help="Session socket.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the service in the foreground until Ctrl-C or SIGTERM."""
    from kvfs.config import load

    if no_passthrough:
        if mode not in (None, "native"):
            raise typer.BadParameter(f"--no-passthrough contradicts --mode {mode}")
        mode = "native"
    settings = load(
        config,
        {
            ("mount", "path"): mount,
            ("mount", "mode"): mode,
            ("store", "data"): data,
            ("dram", "capacity"): dram,
            ("dram", "slots"): slots,
            ("session", "socket"): socket,
            ("log", "level"): log_level,
        },
    )
    import trio

    from kvfs.notify import set_up_logging
    from kvfs.service import run

    set_up_logging(settings.log.level)
    try:
        trio.run(run, settings, _started)
    except BaseExceptionGroup as group:
        raise _only_error(group) from None


def _only_error(error: BaseException) -> BaseException:
    """What a nursery's groups hold, where that is one error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _started(running: Running) -> None:
    from kvfs.config import format_size

    lines = {
        "data": f"{running.data} (store {running.store_id.hex()[:8]})",
        "DRAM": f"{format_size(running.capacity_bytes)} on {running.backing}, {running.max_slots} slots",
        "mount": f"{running.mountpoint}, {running.mode}",
        "session": str(running.socket),
    }
    for name, value in lines.items():
        print(f"{name:8} {value}")
    for lack in running.missing:
        print(f"{'missing':8} {lack}")
    print("ready", flush=True)
    if sys.stdout.isatty():
        _suggest(running)


def _suggest(running: Running) -> None:
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
def umount(
    mount: Annotated[str | None, typer.Argument(help="A kvfs mount, of a running or a dead service.")] = None,
) -> None:
    """Unmount; the service behind it, where there is one, stops cleanly."""
    from mounts.mount import unmount

    where = Path(os.path.abspath(mount)) if mount else addresses.only_mount()
    if where not in addresses.mounts():
        raise NotFound(f"{where}: no kvfs mount")
    unmount(where)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def bench(context: typer.Context) -> None:
    """Measure this machine's doors against its memory; `kvfs bench --help` shows the options."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "bench" / "__init__.py").exists():
        fail(
            "bench: the measurements are in the source checkout (folder bench/), not in an installed kvfs",
            FAILED,
        )
    sys.path.insert(0, str(checkout))
    from bench.command import run_command

    run_command(context.args)


# --- a running service -----------------------------------------------------------------------------------
def _connect(at: str | None) -> Client:
    from kvfs.client import connect

    return connect(at if at is not None else str(addresses.only_mount()))


def _resolve(texts: list[str], at: str | None) -> tuple[Client, list[tuple[bytes, bytes]]]:
    """The session and the (bucket, key) of each path; all must be on one mount."""
    if at is not None and not any(text.startswith("/") for text in texts):
        return _connect(at), [paths.parse(text) for text in texts]
    places = [addresses.locate(text) for text in texts]
    if len({mount for mount, _ in places}) > 1:
        raise InvalidRequest("the paths are on several mounts: one command is for one mount")
    for text, (_, name) in zip(texts, places, strict=True):
        if not name:
            raise InvalidRequest(f"{text}: the mount itself; name a bucket or an object")
    return _connect(at or str(places[0][0])), [paths.parse(name) for _, name in places]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))
