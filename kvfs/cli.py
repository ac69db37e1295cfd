"""The command line: `kvfs serve` runs the service, the other commands talk to one that runs.

Responsibility: arguments in, one call, text out. Every command but `serve`, `drop`, `fsck`, `bench`, `replay`,
`simulate`, `plan`, `credentials` and `umount` goes through `kvfs.client`. A failure is one line on stderr,
`kvfs: ...`, and the exit code says of which kind.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 no such name, 4 no service there, 130
interrupted. `kvfs fsck` has its own (`kvfs.cli_fsck`).

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

from kvfs import addresses, cli_bucket, cli_credentials
from kvfs.cli_fsck import fsck
from kvfs.cli_options import At, Json, Paths, connected
from kvfs.errors import (
    ConfigError,
    InvalidRequest,
    KvfsError,
    NotFound,
    NotPermitted,
    SessionClosed,
    find_shortage,
)

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

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A .jsonl or .jsonl.zst request trace.")]
TtftSlo = Annotated[
    str | None, typer.Option(metavar="TIME", help='Longest time to the first token, such as "30s".')
]
TbtSlo = Annotated[
    str | None, typer.Option(metavar="TIME", help='Longest time between tokens, such as "60ms".')
]
DecodeFactor = Annotated[float, typer.Option(help="Decode steps take this many times as long.")]
ModelName = Annotated[str, typer.Option(help="A model of the cost table.")]
DeviceName = Annotated[str, typer.Option(help="A device of the cost table.")]
Devices = Annotated[int, typer.Option(help="Devices of an instance.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Plot to FILE (.png, .svg, .pdf).")
]


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
    except BaseException as error:
        shortage = find_shortage(error)
        if shortage is None:
            raise
        fail(str(shortage) or "not enough memory", FAILED)
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


app.add_typer(cli_bucket.app, name="bucket")
app.add_typer(cli_credentials.app, name="credentials")


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
    nvme: Annotated[
        str | None, typer.Option(metavar="SIZE", help='NVMe capacity, preallocated; "0": none.')
    ] = None,
    keep: Annotated[
        bool | None, typer.Option("--keep/--no-keep", help="Leave the objects in memory for the next start.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML configuration.")] = None,
    mode: Annotated[str | None, typer.Option(help="auto, passthrough, native or plain.")] = None,
    no_passthrough: Annotated[bool, typer.Option("--no-passthrough", help="Same as --mode native.")] = False,
    socket: Annotated[str | None, typer.Option(metavar="PATH", help="Session socket.")] = None,
    s3: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve S3 there; credentials are in the file.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that serve S3.")] = None,
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
            ("dram", "keep"): keep,
            ("nvme", "capacity"): nvme,
            ("session", "socket"): socket,
            ("s3", "listen"): s3,
            ("s3", "workers"): workers,
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
    from kvfs.sizes import format_size

    lines = {
        "data": f"{running.data} (store {running.store_id.hex()[:8]})",
        "DRAM": f"{format_size(running.capacity_bytes)} on {running.backing}, {running.max_slots} slots",
        "NVMe": f"{format_size(running.nvme_bytes)} by {running.nvme_io}" if running.nvme_bytes else "none",
        "mount": f"{running.mountpoint}, {running.mode}",
        "session": str(running.socket),
        "S3": running.s3 or "none",
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
def gateway(
    s3: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to serve S3.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the port.")] = None,
    admin: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where /healthz and /metrics are.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML configuration, with the credentials.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    at: At = None,
) -> None:
    """Serve S3 in front of a running service, in the foreground until Ctrl-C or SIGTERM."""
    import trio

    from gateway.supervisor import run_alone, worker_settings
    from kvfs import limits
    from kvfs.config import load
    from kvfs.notify import set_up_logging
    from kvfs.transport import socket_path

    flags = {
        ("s3", "listen"): s3,
        ("s3", "workers"): workers,
        ("s3", "admin"): admin,
        ("log", "level"): log_level,
    }
    settings = load(config, flags)
    address = at if at is not None else addresses.only_mount()
    socket = socket_path(address, timeout_s=limits.CLIENT_TIMEOUT_S)
    told = worker_settings(settings.s3, socket, settings.log.level, settings.file)
    set_up_logging(settings.log.level)

    def started(listening: object) -> None:
        print(f"S3       {listening}\nready", flush=True)

    try:
        trio.run(run_alone, told, settings.s3.workers, started)
    except BaseExceptionGroup as group:
        raise _only_error(group) from None


@app.command()
def umount(
    mount: Annotated[str | None, typer.Argument(help="A kvfs mount, of a running or a dead service.")] = None,
) -> None:
    """Unmount; the service behind it, where there is one, stops cleanly."""
    from mounts.mount import abort, answers, unmount

    where = Path(os.path.abspath(mount)) if mount else addresses.only_mount()
    before = addresses.mounts().count(where)
    if before == 0:
        raise NotFound(f"{where}: no kvfs mount")
    if answers(where):
        unmount(where)
    else:
        abort(where)
    if addresses.mounts().count(where) >= before:
        raise NotPermitted(
            f"{where} is still mounted: only root and the user who runs the service unmount it"
        )


@app.command()
def drop(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data directory of a stopped service.")],
) -> None:
    """Give back the memory of the objects that a stopped service keeps for its next start."""
    from kvfs.service import drop_kept
    from kvfs.sizes import format_size

    print(f"{format_size(drop_kept(Path(os.path.abspath(data))))} given back")


app.command()(fsck)


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


# --- scheduling, without a service ------------------------------------------------------------------------
@app.command()
def simulate(
    trace: TraceFile,
    policy: Annotated[
        str,
        typer.Option(help="default, kvcache-centric, local, least-queued, round-robin or random."),
    ] = "default",
    queue: Annotated[str, typer.Option(help="fcfs or length-aware.")] = "fcfs",
    admission: Annotated[str, typer.Option(help="none, early or default.")] = "none",
    prefill: Annotated[int, typer.Option(help="Prefill instances.")] = 8,
    decode: Annotated[int, typer.Option(help="Decode instances; 0 leaves decoding out.")] = 8,
    speed: Annotated[float, typer.Option(help="Arrivals this many times as fast.")] = 1.0,
    ttft_slo: TtftSlo = "30s",
    tbt_slo: TbtSlo = None,
    decode_factor: DecodeFactor = 1.0,
    cache_blocks: Annotated[int, typer.Option(help="DRAM cache of a prefill instance, in blocks.")] = 5859,
    model: ModelName = "llama3-70b",
    device: DeviceName = "a800-80g",
    devices: Devices = 8,
    network: Annotated[
        str | None, typer.Option(metavar="RATE", help='What a node sends, such as "100Gbit".')
    ] = None,
    fitted: Annotated[
        bool, typer.Option("--fitted", help="Policies learn the costs instead of knowing them.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random policy.")] = 0,
    plot: PlotFile = None,
    as_json: Json = False,
) -> None:
    """Replay a request trace over simulated instances, with the scheduler's own policies deciding."""
    from scheduler.command import run_simulate

    run_simulate(
        trace,
        policy=policy,
        queue=queue,
        admission=admission,
        prefill=prefill,
        decode=decode,
        speed=speed,
        ttft_slo=ttft_slo,
        tbt_slo=tbt_slo,
        decode_factor=decode_factor,
        cache_blocks=cache_blocks,
        model=model,
        device=device,
        devices=devices,
        network=network,
        fitted=fitted,
        seed=seed,
        plot=plot,
        as_json=as_json,
    )


@app.command()
def plan(
    trace: TraceFile,
    model: ModelName = "llama3-70b",
    device: DeviceName = "a800-80g",
    devices: Devices = 8,
    instances: Annotated[int, typer.Option(help="Instances in all, for prefill and decode.")] = 16,
    dram: Annotated[str, typer.Option(metavar="SIZE", help="DRAM for blocks, per instance.")] = "480GiB",
    nvme: Annotated[str, typer.Option(metavar="SIZE", help="NVMe for blocks, per instance.")] = "0",
    network: Annotated[str, typer.Option(metavar="RATE", help="What a node sends.")] = "87GB/s",
    speed: Annotated[float, typer.Option(help="Arrivals this many times as fast.")] = 1.0,
    ttft_slo: TtftSlo = "30s",
    tbt_slo: TbtSlo = "100ms",
    decode_factor: DecodeFactor = 1.0,
    plot: PlotFile = None,
    as_json: Json = False,
) -> None:
    """Say whether keeping and moving KV cache pays for a request trace, and what it takes."""
    from scheduler.command import run_plan

    run_plan(
        trace,
        model=model,
        device=device,
        devices=devices,
        instances=instances,
        dram=dram,
        nvme=nvme,
        network=network,
        speed=speed,
        ttft_slo=ttft_slo,
        tbt_slo=tbt_slo,
        decode_factor=decode_factor,
        plot=plot,
        as_json=as_json,
    )


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A request trace, .jsonl or .jsonl.zst.")],
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="lru-leaf, s3-fifo, arc, min or default; all.")
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="Blocks, or a share of the footprint such as 5%; comma-separated."),
    ] = None,
    measure_from: Annotated[float, typer.Option(help="Count hits from this share of the requests on.")] = 0.0,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Show what eviction policies would have hit of a request trace; needs no service."""
    from scheduler.replay_command import run

    run(
        trace,
        policies=policy or [],
        capacities=capacity or [],
        measure_from=measure_from,
        as_json=as_json,
        plot_file=plot,
    )


# --- a running service -----------------------------------------------------------------------------------
@app.command()
def status(
    at: At = None,
    as_json: Json = False,
    as_metrics: Annotated[bool, typer.Option("--metrics", help="Print Prometheus metrics instead.")] = False,
) -> None:
    """Show what runs, how full it is and what it has done."""
    if as_json and as_metrics:
        raise typer.BadParameter("give either --json or --metrics")
    with connected(at) as client:
        found = client.status()
    if as_json:
        _print_json(found)
        return
    if as_metrics:
        from kvfs.metrics import exposition

        print(exposition(found), end="")
        return
    from kvfs.show import status_table

    status_table(found)


@app.command()
def ls(
    path: Annotated[
        str | None, typer.Argument(help="A bucket, directory or object; all buckets without it.")
    ] = None,
    long: Annotated[bool, typer.Option("-l", help="Show mode, owner, size, hits and time.")] = False,
    recursive: Annotated[
        bool, typer.Option("-r", "-R", help="All keys below, not only the next level.")
    ] = False,
    at: At = None,
    as_json: Json = False,
) -> None:
    """List names, in byte order."""
    from kvfs import show

    if path is None or _is_root(path, at):
        with connected(at or path) as client:
            show.buckets(client.buckets(), long=long, as_json=as_json)
        return
    client, [name] = _resolve([path], at)
    with client:
        found = client.stat(name)
        if found.is_directory:
            prefix = name.rstrip("/") + "/"
            listed = client.list(prefix, delimiter=None if recursive else "/")
            show.entries(
                (entry for entry in listed if entry.name != prefix), prefix, long=long, as_json=as_json
            )
        else:
            show.entries([found], "", long=long, as_json=as_json)


@app.command()
def stat(names: Paths, at: At = None, as_json: Json = False) -> None:
    """Show all that is known of a name."""
    from kvfs import show

    client, resolved = _resolve(names, at)
    with client:
        found = [client.stat(name) for name in resolved]
    if as_json:
        _print_json([show.entry_object(entry) for entry in found])
    else:
        for entry in found:
            show.entry(entry)


@app.command()
def pin(names: Paths, at: At = None) -> None:
    """Keep objects from being evicted."""
    client, resolved = _resolve(names, at)
    with client:
        for name in resolved:
            client.pin(name)


@app.command()
def unpin(names: Paths, at: At = None) -> None:
    """Let objects be evicted again."""
    client, resolved = _resolve(names, at)
    with client:
        for name in resolved:
            client.unpin(name)


@app.command()
def evict(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH...]", help="Exactly these objects.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="By policy, until this much is free.")
    ] = None,
    at: At = None,
) -> None:
    """Evict objects by name, or by policy until --bytes are free; says how much became free."""
    from kvfs.sizes import format_size, parse_size

    if bool(names) == (size is not None):
        raise typer.BadParameter("give either paths or --bytes")
    if names:
        client, resolved = _resolve(names, at)
        with client:
            freed = client.evict(*resolved)
    else:
        try:
            wanted = parse_size(size or "")
        except ValueError as error:
            raise typer.BadParameter(f"--bytes {size}: {error}") from None
        with connected(at) as client:
            freed = client.evict(size_bytes=wanted)
    print(f"{format_size(freed)} freed")


@app.command()
def rm(
    names: Paths,
    recursive: Annotated[
        bool, typer.Option("-r", "-R", help="Directories and buckets with all in them.")
    ] = False,
    at: At = None,
) -> None:
    """Remove objects; an empty bucket or directory too."""
    client, resolved = _resolve(names, at)
    with client:
        for name in resolved:
            _remove(client, name, recursive)


def _remove(client: Client, name: str, recursive: bool) -> None:
    found = client.stat(name)
    if not found.is_directory:
        client.remove(name)
        return
    directory = name.rstrip("/") + "/"
    if recursive:
        # The last first: a marker `a/` sorts before what is in the directory.
        for entry in reversed(list(client.list(directory))):
            if entry.key:
                client.remove(entry.name)
    if "/" not in name.rstrip("/"):
        client.remove_bucket(name.rstrip("/"))
    elif not recursive:
        client.remove(directory)


def _is_root(path: str, at: str | None) -> bool:
    """Whether `path` is a mount itself."""
    return (at is None or path.startswith("/")) and addresses.locate(path)[1] == ""


def _resolve(texts: list[str], at: str | None) -> tuple[Client, list[str]]:
    """A session, and the `bucket/key` of each path; all must be on one mount."""
    if at is not None and not any(text.startswith("/") for text in texts):
        return connected(at), texts
    places = [addresses.locate(text) for text in texts]
    mounts = {mount for mount, _ in places}
    if len(mounts) > 1:
        raise InvalidRequest(
            f"the paths lie on several mounts ({', '.join(map(str, mounts))}): one at a time"
        )
    for text, (_, name) in zip(texts, places, strict=True):
        if not name:
            raise InvalidRequest(f"{text}: is the mount itself; name a bucket or an object in it")
    return connected(at or str(mounts.pop())), [name for _, name in places]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    main()
