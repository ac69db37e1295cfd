"""`kvfs conductor run` and `kvfs conductor status`: the service that routes, and what it knows.

Responsibility: arguments in, one call of `scheduler.conductor`, or one question over HTTP, text out; errors are those
of `kvfs.cli.main`. Concurrency: none; `run` runs a trio loop until it ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import trio
import typer

from kvfs.cli.options import Json
from kvfs.cli.output import print_json
from kvfs.cli.top.frame import print_frame
from kvfs.cli.top.sources import Events
from kvfs.config.load import load
from kvfs.errors import KvfsError
from kvfs.system.linux import raise_file_limit
from kvfs.system.notify import set_up_logging
from scheduler.conductor.door.conductor_service import Addresses, run_conductor

app = typer.Typer(
    help="Choose the instance for each request; run it, or show what it knows.", no_args_is_help=True
)


@app.command()
def run(
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where it answers.")] = None,
    events: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="Where publishers of KV events connect.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="An engine, which is asked what it is, or dns+http://NAME:PORT for all of a name; repeatable.",
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="One that prefills; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="One that decodes; repeatable.")
    ] = None,
    instances: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file of instances that are not asked.")
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Routing policy.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML configuration, with the tokens.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Route requests in the foreground until Ctrl-C or SIGTERM."""
    flags = {
        ("conductor", "listen"): listen,
        ("conductor", "events"): events,
        ("conductor", "engines"): engine or None,
        ("conductor", "prefill"): prefill or None,
        ("conductor", "decode"): decode or None,
        ("conductor", "instances"): instances,
        ("conductor", "policy"): policy,
        ("log", "level"): log_level,
    }
    settings = load(config, flags)
    set_up_logging(settings.log.level)
    raise_file_limit()
    try:
        trio.run(run_conductor, settings.conductor, _show_started)
    except* KvfsError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _show_started(addresses: Addresses) -> None:
    print(f"HTTP     {addresses.http}\nevents   {addresses.events}\nready", flush=True)


@app.command()
def status(
    at: Annotated[str, typer.Option("--at", metavar="URL", help="Where the Conductor answers.")] = (
        "http://127.0.0.1:9200"
    ),
    as_json: Json = False,
) -> None:
    """Show instances, queues, hit ratios and what is wrong; a token comes from $KVFS_CONDUCTOR_TOKEN."""
    source = Events(at.rstrip("/"))
    if as_json:
        print_json(source.json("/v1/instances"))
    else:
        print_frame(source.once())
