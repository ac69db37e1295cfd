"""`kvfs top`: what a store or a Conductor does, as it changes.

Responsibility: arguments in, one call of `kvfs.cli.top`; errors are those of `kvfs.cli.main`. Concurrency: none here.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvfs.cli.top.frame import print_frame
from kvfs.cli.top.sources import source_at
from kvfs.cli.top.terminal import show

app = typer.Typer()


@app.command()
def top(
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            envvar="KVFS_ADDRESS",
            metavar="ADDRESS",
            help="A mount, a session socket, or the URL of a Conductor or of a gateway's admin port.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the figures since the start, and end.")] = False,
) -> None:
    """Show figures of a store or a Conductor as they change, until q; without a terminal once."""
    source = source_at(at)
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print_frame(source.once())
    else:
        show(source)
