"""`kvfs bucket`: make, list and remove buckets.

Responsibility: arguments in, one call of `kvfs.client`, text out; errors are those of `kvfs.cli.main`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from kvfs.cli import output
from kvfs.cli.options import At, Json, connected

app = typer.Typer(no_args_is_help=True, help="Make, list and remove buckets.")

Name = Annotated[str, typer.Argument(metavar="BUCKET")]


class BucketClass(StrEnum):
    """The class of a bucket."""

    CACHE = "cache"
    DURABLE = "durable"


class Admission(StrEnum):
    """The objects of a cache bucket that are written to NVMe."""

    ALL = "all"
    GHOST = "ghost"


@app.command()
def create(
    name: Name,
    class_: Annotated[
        BucketClass,
        typer.Option("--class", help="durable: on the device before a write is answered, and never evicted."),
    ] = BucketClass.CACHE,
    admission: Annotated[
        Admission, typer.Option(help="ghost: NVMe takes only what is read, or written again.")
    ] = Admission.ALL,
    large: Annotated[
        bool,
        typer.Option(
            "--large", help="Files go to NVMe as they are written, and may be larger than DRAM takes."
        ),
    ] = False,
    mode: Annotated[str, typer.Option(help="Access rights, octal.")] = "755",
    at: At = None,
) -> None:
    """Make a bucket."""
    try:
        bits = int(mode, 8)
    except ValueError:
        raise typer.BadParameter(f"--mode {mode}: not octal") from None
    with connected(at) as client:
        client.create_bucket(
            name,
            mode=bits,
            durable=class_ is BucketClass.DURABLE,
            admits_all=admission is Admission.ALL,
            large=large,
        )


@app.command("list")
def list_(at: At = None, as_json: Json = False) -> None:
    """List all buckets."""
    with connected(at) as client:
        output.buckets(client.buckets(), long=True, as_json=as_json)


@app.command("rm")
def remove(name: Name, at: At = None) -> None:
    """Remove an empty bucket."""
    with connected(at) as client:
        client.remove_bucket(name)
