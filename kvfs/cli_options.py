"""What several commands share: options, and the connection to a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvfs import addresses

if TYPE_CHECKING:
    from kvfs.client import Client

At = Annotated[
    str | None,
    typer.Option("--at", envvar="KVFS_ADDRESS", metavar="ADDRESS", help="A mount or a session socket."),
]
Paths = Annotated[
    list[str], typer.Argument(metavar="PATH...", help="Paths on a mount, or bucket/key with --at.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def connected(at: str | None) -> Client:
    """A session with the service at `at`, or behind the only mount. Raises NotFound, SessionClosed."""
    from kvfs.client import connect

    return connect(at if at is not None else addresses.only_mount(), client="kvfs command line")
