"""Edits of `[[s3.credentials]]` in a TOML configuration file.

Responsibility: add and remove credentials and keep the rest of the file, comments included.

Invariants: an edited file has mode 0600 and its former owner, and is replaced whole and synced: a reader sees the old
one or the new one. A link stays a link. No secret is part of a message.

Concurrency: an edit holds `flock` on the file's directory, so that two at once both count.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT

from kvfs.config.credentials import RIGHTS, Credential
from kvfs.config.load import load
from kvfs.errors import ConfigError, Exists, LimitExceeded, NotFound
from kvfs.limits import MAX_CREDENTIALS


def add(file: Path, credential: Credential) -> None:
    """Append a credential; make the file if it is missing. Raises ConfigError, Exists, LimitExceeded."""

    def change(document: tomlkit.TOMLDocument) -> None:
        present = _entries(document, file)
        if any(entry.get("access_key") == credential.access_key for entry in present):
            raise Exists(f"{file}: access key {credential.access_key} is there already")
        if len(present) >= MAX_CREDENTIALS:
            raise LimitExceeded(f"{file}: {len(present)} credentials, the limit is {MAX_CREDENTIALS}")
        present.append(_table(credential))

    _edit(file, change)


def remove(file: Path, access_key: str) -> None:
    """Remove a credential. Raises ConfigError, NotFound."""

    def change(document: tomlkit.TOMLDocument) -> None:
        present = _entries(document, file)
        keys = [entry.get("access_key") for entry in present]
        if access_key not in keys:
            raise NotFound(f"{file}: no access key {access_key}")
        del present[keys.index(access_key)]
        if not present:
            # An empty array of tables would be written as a key, which `add` could not append to.
            section: Any = document["s3"]
            del section["credentials"]

    _edit(file, change)


def _table(credential: Credential) -> Any:
    table = tomlkit.table()
    table["access_key"] = credential.access_key
    table["secret_key"] = credential.secret
    if credential.owner:
        table["owner"] = credential.owner
    if credential.rights is not None:
        rights = tomlkit.inline_table()
        for glob, granted in credential.rights.items():
            rights[glob] = [right for right in RIGHTS if right in granted]
        table["rights"] = rights
    table.add(tomlkit.nl())
    return table


def _entries(document: tomlkit.TOMLDocument, file: Path) -> AoT:
    """Return `[[s3.credentials]]`; make it if it is missing."""
    section: Any = document.setdefault("s3", tomlkit.table(is_super_table=True))
    entries = section.setdefault("credentials", tomlkit.aot()) if isinstance(section, dict) else None
    if not isinstance(entries, AoT):
        raise ConfigError(f"{file}: s3.credentials must be written as [[s3.credentials]] sections")
    return entries


def _edit(file: Path, change: Callable[[tomlkit.TOMLDocument], None]) -> None:
    file = file.resolve()
    try:
        with _locked(file.parent):
            text = file.read_text() if file.exists() else ""
            document = tomlkit.parse(text)
            change(document)
            _replace(file, tomlkit.dumps(document))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None


def _replace(file: Path, text: str) -> None:
    """Write a new file, check that it loads, sync it, and rename it to `file`."""
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
            with suppress(FileNotFoundError, PermissionError):
                found = file.stat()
                os.fchown(out.fileno(), found.st_uid, found.st_gid)
        load(Path(name))
        os.rename(name, file)
    except ConfigError as error:
        os.unlink(name)
        raise ConfigError(str(error).replace(name, str(file))) from None
    except BaseException:
        os.unlink(name)
        raise
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
