"""Options of several commands, and the connection to a running service."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from kvfs.client import Client, connect, discovery

At = Annotated[
    str | None,
    typer.Option("--at", envvar="KVFS_ADDRESS", metavar="ADDRESS", help="A mount or a session socket."),
]
Paths = Annotated[
    list[str], typer.Argument(metavar="PATH...", help="Paths on a mount, or bucket/key with --at.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


Options = TypeVar("Options")


def options_of(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a command of a function of one dataclass, whose fields become the command's parameters."""
    hints = get_type_hints(kind, include_extras=True)
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)  # type: ignore[arg-type]
    ]

    def wrap(function: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            function(kind(**given))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return wrap


def connected(at: str | None) -> Client:
    """Begin a session with the service at `at`, or behind the default mount. Raises NotFound, SessionClosed."""
    return connect(discovery.address(at), client="kvfs command line")
