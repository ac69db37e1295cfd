"""Commands whose modules are loaded when they are called.

Responsibility: the one place that imports by name, so that `kvfs --help` and short commands load nothing of the
service, and the modules of commands import at their top. A command whose packages are not installed names the extra
that has them.

Invariants: a command's line in `kvfs --help` is the first line of its own help (a test compares them).
Concurrency: none.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from kvfs.errors import ConfigError

SERVER_EXTRA = "kvfs[server]"
_EXTRAS = {"zmq": "kvfs[server,events]"}
_OWN = ("kvfs", "tiers", "mounts", "gateway", "scheduler")


class LazyCommand(TyperCommand):
    """Stand for a command, or a group of them, until it is called."""

    def __init__(self, name: str, module: str, help_line: str, *, is_group: bool = False) -> None:
        super().__init__(name, help=help_line)
        self._module = module
        self._is_group = is_group

    def load(self) -> TyperCommand | TyperGroup:
        """Import the module and return its command, or its group. Raises ConfigError, as `load`."""
        group = get_group(load(self._module).app)
        command = group if self._is_group else group.commands[self.name or ""]
        assert isinstance(command, TyperCommand | TyperGroup)
        return command

    def make_context(self, *args: Any, **options: Any) -> Any:
        return self.load().make_context(*args, **options)


def application(commands: list[LazyCommand], **options: Any) -> typer.Typer:
    """Make an application of `commands`, in their order, with the `options` of `typer.Typer`."""

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            for command in commands:
                self.add_command(command)

    return typer.Typer(cls=Group, **options)


def load_from(directory: Path, module: str) -> Any:
    """Import a module in `directory`, outside the installed packages."""
    sys.path.insert(0, str(directory))
    return import_module(module)


def load(module: str) -> Any:
    """Import a module that a command needs. Raises ConfigError without the packages or libraries that it uses."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "kvfs").partition(".")[0] in _OWN:
            raise
        extra = _EXTRAS.get(error.name or "", SERVER_EXTRA)
        raise ConfigError(
            f"this command is the service's, which needs {error.name}: pip install '{extra}'"
        ) from None
    except ImportError as error:
        if error.path is None or error.path.endswith(".py"):
            raise
        raise ConfigError(f"{error} (docs/install.md lists the system's libraries)") from None
