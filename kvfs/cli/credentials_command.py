"""`kvfs credentials`: add, list and remove the access keys of the S3 door.

Responsibility: arguments in, one edit of the configuration file, text out. A running service reads the file again at
SIGHUP. A secret is printed once, by the `add` that makes it. It is never an argument, which every user of the machine
can read; one from standard input is not printed. Errors are those of `kvfs.cli.main`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr, ValidationError

from kvfs.cli.options import Json
from kvfs.cli.output import print_json
from kvfs.config import credential_file
from kvfs.config.credentials import RIGHTS, Credential, new_access_key, new_secret_key, parse_rights
from kvfs.config.load import load
from kvfs.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Add, list and remove access keys of the S3 door.")

ConfigFile = Annotated[
    Path,
    typer.Option("--config", envvar="KVFS_CONFIG", metavar="FILE", help="The TOML configuration to edit."),
]


@app.command()
def add(
    config: ConfigFile,
    access_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Access key; made if not given.")
    ] = None,
    secret_stdin: Annotated[
        bool, typer.Option("--secret-stdin", help="Read the secret key from standard input; else it is made.")
    ] = False,
    owner: Annotated[str, typer.Option(help="Whom its objects belong to; the access key if not given.")] = "",
    rights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB[=RIGHT,...]",
            help="Rights (read, write, list) on buckets that match, whoever owns them; may be repeated. "
            "If none is given: all, on the owner's buckets.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add an access key, and print it with its secret if that was made here."""
    credential = _credential(
        access_key or new_access_key(),
        sys.stdin.readline().rstrip("\n") if secret_stdin else new_secret_key(),
        owner,
        rights,
    )
    credential_file.add(config, credential)
    shown = {"access_key": credential.access_key}
    if not secret_stdin:
        shown["secret_key"] = credential.secret
    if as_json:
        print_json(shown)
    else:
        for name, value in shown.items():
            print(f"{name:10} {value}")


def _credential(access_key: str, secret_key: str, owner: str, rights: list[str] | None) -> Credential:
    try:
        return Credential(
            access_key=access_key,
            secret_key=SecretStr(secret_key),
            owner=owner,
            rights={glob: frozenset(granted) for glob, granted in parse_rights(rights).items()}
            if rights
            else None,
        )
    except ValidationError as error:
        reasons = (f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors())
        raise ConfigError("; ".join(reasons)) from None


@app.command("list")
def list_(config: ConfigFile, as_json: Json = False) -> None:
    """List the access keys, their owners and rights; never a secret."""
    rows: list[dict[str, Any]] = [
        {
            "access_key": credential.access_key,
            "owner": credential.owner_id,
            "rights": None
            if credential.rights is None
            else {
                glob: [right for right in RIGHTS if right in granted]
                for glob, granted in credential.rights.items()
            },
        }
        for credential in load(config).s3.credentials
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        rights = row["rights"]
        granted = "its owner's buckets"
        if rights is not None:
            granted = "  ".join(f"{glob}={','.join(names)}" for glob, names in rights.items())
        print(f"{row['access_key']:<20}  {row['owner']:<20}  {granted}")


@app.command()
def remove(
    access_key: Annotated[str, typer.Argument(metavar="ACCESS_KEY")],
    config: ConfigFile,
) -> None:
    """Remove an access key."""
    credential_file.remove(config, access_key)
