"""`kvfs cluster`: the machines that blocks are read from, and tasks that bring blocks to them.

Responsibility: arguments in, calls of `kvfs.client`, text out; errors are those of `kvfs.cli.main`. A task is the
service's: what follows it here may end before. Concurrency: none.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvfs import limits
from kvfs.cli import lazy
from kvfs.cli.options import At, Json, connected
from kvfs.cli.output import print_json
from kvfs.client import Client
from kvfs.errors import InvalidRequest, KvfsError, SessionClosed, Unsupported

app = typer.Typer(
    no_args_is_help=True, help="Show the machines that blocks are read from, and bring blocks to them."
)

To = Annotated[
    str, typer.Option("--to", metavar="HOST:PORT", help="A peer, as `kvfs cluster status` names it.")
]
OfBucket = Annotated[
    str | None, typer.Option("--bucket", metavar="NAME", help="Only the blocks of this bucket here.")
]
OfNamespace = Annotated[
    str | None, typer.Option("--namespace", metavar="HEX", help="Only the blocks of this namespace.")
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait/--no-wait", help="Follow the task to its end; Ctrl-C ends the following, and not the task."
    ),
]


@app.command("status")
def status(at: At = None, as_json: Json = False) -> None:
    """Show each peer, whether it is asked now, and what was read from it; and the tasks under way."""
    with connected(at) as client:
        found = _cluster(client)
    if as_json:
        print_json(found)
    else:
        lazy.load("kvfs.cli.status_page").cluster_page(found)


@app.command("tasks")
def tasks(at: At = None, as_json: Json = False) -> None:
    """Show the tasks under way, and the last one of each kind that has ended since the service's start."""
    with connected(at) as client:
        found = _cluster(client)["tasks"]
    if as_json:
        print_json(found)
    else:
        lazy.load("kvfs.cli.status_page").tasks_page(found)


@app.command("copy")
def copy(
    to: To, bucket: OfBucket = None, namespace: OfNamespace = None, wait: Wait = True, at: At = None
) -> None:
    """Copy the blocks of namespaces that are bound to buckets here to another machine."""
    with connected(at) as client:
        begun = client.copy_blocks(to, bucket=bucket, namespace=_digest(namespace))
        _show(client, begun, wait=wait)


@app.command("move")
def move(
    to: To, bucket: OfBucket = None, namespace: OfNamespace = None, wait: Wait = True, at: At = None
) -> None:
    """Copy blocks of caches to another machine, and remove here what that one has then."""
    with connected(at) as client:
        begun = client.move_blocks(to, bucket=bucket, namespace=_digest(namespace))
        _show(client, begun, wait=wait)


@app.command("drain")
def drain(wait: Wait = True, at: At = None) -> None:
    """Bring the blocks that this machine alone has to other machines; meanwhile it fetches none."""
    with connected(at) as client:
        _show(client, client.drain(), wait=wait)


@app.command("cancel")
def cancel(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="copy, move or drain")],
    at: At = None,
) -> None:
    """Cancel a task under way; what it has brought stays there, and what a move has removed is not here again."""
    with connected(at) as client:
        _print_line(client.cancel_task(kind) | {"state": "is cancelled"})


def _cluster(client: Client) -> dict[str, Any]:
    found: dict[str, Any] | None = client.status().get("cluster")
    if found is None:
        raise Unsupported("this service has no [cluster]")
    return found


def _digest(namespace: str | None) -> bytes | None:
    try:
        return None if namespace is None else bytes.fromhex(namespace)
    except ValueError:
        raise InvalidRequest(f"--namespace {namespace}: 32 hexadecimal digits are wanted") from None


def _show(client: Client, begun: Mapping[str, Any], *, wait: bool) -> None:
    """Follow a task to its end, or say that it has begun. Raises KvfsError of a task that failed."""
    if not wait:
        _print_line(begun)
        return
    try:
        ended = _follow(client, begun)
    except KeyboardInterrupt:
        name = begun["name"]
        print(
            f"\nthe task goes on: `kvfs cluster tasks` shows it, `kvfs cluster cancel {name}` ends it",
            file=sys.stderr,
        )
        raise
    lazy.load("kvfs.cli.status_page").tasks_page([ended])
    if ended["state"] != "done":
        raise KvfsError(f"{ended['name']} {ended['number']} {ended['state']}: {ended['said']}")


def _follow(client: Client, begun: Mapping[str, Any]) -> Mapping[str, Any]:
    """Wait for a task's end, and return how it ended; on a terminal its progress is shown meanwhile."""
    is_terminal, task = sys.stderr.isatty(), begun
    while task["state"] == "runs":
        if is_terminal:
            line = lazy.load("kvfs.cli.status_page").task_line(task)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        time.sleep(limits.TASK_FOLLOW_S)
        found = {each["name"]: each for each in _cluster(client)["tasks"]}.get(begun["name"])
        if found is None or found["number"] != begun["number"]:
            raise SessionClosed("the service has begun another task of this kind, or has started anew")
        task = found
    if is_terminal:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return task


def _print_line(task: Mapping[str, Any]) -> None:
    print(lazy.load("kvfs.cli.status_page").task_line(task))
