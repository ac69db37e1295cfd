"""`kvfs ls`, `stat`, `pin`, `unpin`, `evict` and `rm`: names of a running service.

Responsibility: arguments in, calls of `kvfs.client`, text out; errors are those of `kvfs.cli.main`. Concurrency: none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from kvfs import paths
from kvfs.cli import output
from kvfs.cli.options import At, Json, Paths, connected
from kvfs.client import Client, discovery
from kvfs.client.results import Entry
from kvfs.config.sizes import format_size, parse_size
from kvfs.errors import InvalidRequest

app = typer.Typer()


@app.command()
def ls(
    path: Annotated[
        str | None,
        typer.Argument(
            help="A bucket, directory or object; the working directory on a mount, else all buckets."
        ),
    ] = None,
    long: Annotated[bool, typer.Option("-l", help="Show mode, owner, size, hits and time.")] = False,
    recursive: Annotated[
        bool, typer.Option("-r", "-R", help="All keys below, not only the next level.")
    ] = False,
    at: At = None,
    as_json: Json = False,
) -> None:
    """List names, in byte order."""
    if path is None and at is None and discovery.mount_here() is not None:
        path = "."
    if path is None or _is_root(path, at):
        with connected(at or path) as client:
            output.buckets(client.buckets(), long=long, as_json=as_json)
        return
    client, [name] = _resolve([path], at)
    with client:
        found = client.stat(name)
        if found.is_directory:
            prefix = name.rstrip("/") + "/"
            listed = client.list(prefix, delimiter=None if recursive else "/")
            entries = [entry for entry in listed if entry.name != prefix]
            output.entries(entries, prefix, long=long, as_json=as_json)
            _note_hidden(path, entries)
        else:
            output.entries([found], "", long=long, as_json=as_json)


def _note_hidden(directory: str, entries: list[Entry]) -> None:
    """Say which keys keep a directory on the mount from being removed, where it does not show them."""
    hidden = sum(not paths.is_path(entry.key.encode()) for entry in entries)
    if hidden:
        print(
            f"a mount cannot show {hidden} of these: `kvfs rm -r {directory}` removes the directory",
            file=sys.stderr,
        )


@app.command()
def stat(names: Paths, at: At = None, as_json: Json = False) -> None:
    """Show all attributes of names."""
    client, resolved = _resolve(names, at)
    with client:
        found = [client.stat(name) for name in resolved]
    if as_json:
        output.print_json([output.entry_object(entry) for entry in found])
    else:
        for entry in found:
            output.entry(entry)


@app.command()
def pin(names: Paths, at: At = None) -> None:
    """Keep objects from being evicted."""
    _for_each(names, at, Client.pin)


@app.command()
def unpin(names: Paths, at: At = None) -> None:
    """Allow objects to be evicted again."""
    _for_each(names, at, Client.unpin)


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
    """Evict objects by name, or by policy until --bytes are free; print the bytes that became free."""
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
    _for_each(names, at, partial(_remove, recursive=recursive))


def _for_each(names: list[str], at: str | None, do: Callable[[Client, str], None]) -> None:
    client, resolved = _resolve(names, at)
    with client:
        for name in resolved:
            do(client, name)


def _remove(client: Client, name: str, recursive: bool) -> None:
    found = client.stat(name)
    if not found.is_directory:
        client.remove(name)
        return
    directory = name.rstrip("/") + "/"
    if recursive:
        # In reverse: a marker `a/` sorts before the names in the directory.
        for entry in reversed(list(client.list(directory))):
            if entry.key:
                client.remove(entry.name)
    if "/" not in name.rstrip("/"):
        client.remove_bucket(name.rstrip("/"))
    elif not recursive:
        client.remove(directory)


def _is_root(path: str, at: str | None) -> bool:
    """Return whether `path` is a mount itself."""
    return (at is None or path.startswith("/")) and discovery.locate(path)[1] == ""


def _resolve(texts: list[str], at: str | None) -> tuple[Client, list[str]]:
    """Begin a session for these paths, all on one mount; return it with the `bucket/key` of each path."""
    if at is not None and not any(text.startswith("/") for text in texts):
        return connected(at), texts
    places = [discovery.locate(text) for text in texts]
    mounts = {mount for mount, _ in places}
    if len(mounts) > 1:
        raise InvalidRequest(
            f"the paths lie on several mounts ({', '.join(map(str, mounts))}): one at a time"
        )
    for text, (_, name) in zip(texts, places, strict=True):
        if not name:
            raise InvalidRequest(f"{text}: is the mount itself; name a bucket or an object in it")
    return connected(at or str(mounts.pop())), [name for _, name in places]
