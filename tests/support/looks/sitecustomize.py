"""Notes each look of a process into a directory: Python loads this first where PYTHONPATH leads here.

A line "PID CALL PATH" for each, in the file that KVFS_TEST_LOOKS names, of paths under KVFS_TEST_UNDER.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_UNDER, _NOTES = os.environ["KVFS_TEST_UNDER"], os.environ["KVFS_TEST_LOOKS"]
_CALLS = ("stat", "lstat", "statvfs", "access", "readlink", "getxattr", "listxattr", "setxattr", "pathconf")
_notes = os.open(_NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _note(call: str, path: object) -> None:
    if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(_UNDER):
        os.write(_notes, f"{os.getpid()} {call} {os.fsdecode(path)}\n".encode())


def _noting(name: str) -> Any:
    call = getattr(os, name)

    def look(path: Any, *arguments: Any, **named: Any) -> Any:
        _note(name, path)
        return call(path, *arguments, **named)

    return look


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    """What is opened, listed or changed is an audit event, whoever calls it."""
    if event.startswith(("open", "os.")) and arguments:
        _note(event, arguments[0])


for _name in _CALLS:
    setattr(os, _name, _noting(_name))
sys.addaudithook(_heard)
