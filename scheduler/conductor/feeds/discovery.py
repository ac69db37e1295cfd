"""Instances from a file that an orchestrator writes.

Responsibility: read it when it changes, and register, change and remove instances accordingly. Instances that were
registered otherwise are left alone.

Invariants: a label that an instance was given stands until the file gives it another role than before. A file that is
missing, unreadable or wrong changes nothing and is logged once. One instance that is refused does not keep the others
out.

Concurrency: one trio task.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import msgspec
import trio

from kvfs.errors import KvfsError
from kvfs.limits import INSTANCES_FILE_INTERVAL_S, MAX_CONDUCTOR_INSTANCES, MAX_SMALL_BODY_BYTES
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.values import Instance

log = logging.getLogger("kvfs.conductor")

_MOST_BYTES = MAX_CONDUCTOR_INSTANCES * MAX_SMALL_BODY_BYTES


class Registrar(Protocol):
    """Add and remove instances."""

    def add(self, instance: Instance) -> None:
        """Add an instance. Raises Exists, InvalidRequest, LimitExceeded."""

    def remove(self, name: str) -> None:
        """Remove an instance. Raises NotFound."""

    def role(self, name: str) -> Role:
        """Return the label of an instance. Raises NotFound."""
        ...

    def set_role(self, name: str, role: Role) -> None:
        """Label an instance. Raises NotFound."""


class InstancesFile:
    """Keep a Conductor's instances as a file says."""

    def __init__(self, path: Path, registrar: Registrar) -> None:
        self._path, self._registrar = path, registrar
        self._mine: dict[str, Instance] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._fault = ""

    async def run(self) -> None:
        """Look at the file again and again, until cancelled."""
        while True:
            self.look()
            await trio.sleep(INSTANCES_FILE_INTERVAL_S)

    def look(self) -> None:
        """Read the file if it has changed."""
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp == self._stamp:
                return
            if found.st_size > _MOST_BYTES:
                raise OSError(f"{found.st_size} bytes, the limit is {_MOST_BYTES}")
            wanted = msgspec.json.decode(self._path.read_bytes(), type=list[Instance])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._log(f"{self._path}: {error}; the instances stay as they are")
            return
        self._stamp, self._fault = stamp, ""
        self._apply({instance.name: instance for instance in wanted})

    def _apply(self, wanted: dict[str, Instance]) -> None:
        labels: dict[str, tuple[Role, Role]] = {}
        for name in [name for name, instance in self._mine.items() if wanted.get(name) != instance]:
            before = self._mine.pop(name)
            try:
                labels[name] = before.role, self._registrar.role(name)
                self._registrar.remove(name)
            except KvfsError as error:
                log.info("%s: %s", self._path, error)
        for name, instance in wanted.items():
            if name not in self._mine:
                try:
                    self._registrar.add(instance)
                except KvfsError as error:
                    log.error("%s: %s", self._path, error)
                else:
                    self._mine[name] = instance
                    declared, label = labels.get(name, (instance.role, instance.role))
                    if declared == instance.role != label:
                        self._registrar.set_role(name, label)

    def _log(self, fault: str) -> None:
        if fault != self._fault:
            self._fault = fault
            log.error("%s", fault)
