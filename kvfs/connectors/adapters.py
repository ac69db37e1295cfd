"""What adapters are: their files' digest, for as long as these stay what an engine may have read.

Responsibility: name each adapter of an engine (LoRA) by its weights and configuration. An engine reads an adapter's
files when it likes, and keeps it by a number of its own.

Invariants: an adapter has one name for the engine's life. Where its files change meanwhile, nobody knows which ones
were computed with: then it has none, and its requests are neither loaded nor stored. Concurrency: none.
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
    """None where its files are not here."""
    state: _State = ()
    """Of the files, when they were first seen."""
    name: str | None = None


class Adapters:
    """The adapters that an engine was asked for, by its number for each."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def name(self, request: Any) -> str | None:
        """Of vLLM's LoRARequest: a name that equal adapters share, or None where what it is cannot be known."""
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
        """An adapter of the hub may be on its way here: the next request looks again."""
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
    """Empty for a directory that is not there."""
    try:
        with os.scandir(directory) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found))
