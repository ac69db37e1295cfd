"""Names of adapters (LoRA): digests of their files.

Responsibility: name each adapter of an engine by its weights and configuration. An engine reads an adapter's files at
any time, and keeps it under a number of its own.

Invariants: an adapter has one name for the engine's life. After its files have changed nobody knows which of them the
engine read: it loses its name, and its requests are neither loaded nor stored. Concurrency: none.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfs.connectors.common import model_directory, weights_revision
from kvfs.errors import InvalidRequest
from kvfs.limits import MAX_ADAPTERS

log = logging.getLogger("kvfs.connectors")

_State = tuple[tuple[str, int, int, int], ...]


@dataclass(slots=True)
class _Known:
    directory: Path | None = None
    """None while its files are not on this machine."""
    state: _State = ()
    """The state of the files when they were first seen."""
    name: str | None = None


class Adapters:
    """Name the adapters of an engine, by its numbers."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def name(self, request: Any) -> str | None:
        """Return a name for vLLM's LoRARequest that equal adapters share; None where its files are not known."""
        number = int(request.lora_int_id)
        known = self._known.get(number)
        if known is None:
            if len(self._known) >= MAX_ADAPTERS:
                return None
            known = self._known[number] = _Known()
        if known.directory is None:
            self._find(number, known, str(request.lora_path))
        elif known.name is not None and known.state != _state_of(known.directory):
            self._refuse(number, known, "its files have changed since they were first seen")
        return known.name

    def _find(self, number: int, known: _Known, path: str) -> None:
        """Find an adapter's files. A hub's adapter may still be downloading, so the next request looks again."""
        try:
            directory = model_directory(path)
        except InvalidRequest as error:
            log.debug("adapter %d is not kept: %s", number, error)
            return
        known.directory, known.state = directory, _state_of(directory)
        try:
            known.name = weights_revision(directory, (".json",))
        except (InvalidRequest, OSError) as error:
            self._refuse(number, known, str(error))
            return
        if known.state != _state_of(directory):
            self._refuse(number, known, "its files are being changed")

    def _refuse(self, number: int, known: _Known, why: str) -> None:
        known.name = None
        log.error(
            "adapter %d (%s) is not kept from now on: %s; a changed adapter needs a number of its own",
            number,
            known.directory,
            why,
        )


def _state_of(directory: Path) -> _State:
    """Return names, sizes and times of a directory's files; empty for a missing directory."""
    try:
        with os.scandir(directory) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found))
