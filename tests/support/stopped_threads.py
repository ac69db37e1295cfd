"""Threads of a service that stand still while the others go on. Source: ptrace(2)."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
WAIT_ALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.tgkill.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int]


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread: a stopped one that took it would keep it."""
    _check(_libc.tgkill(pid, pid, number), pid)


@contextmanager
def native_threads_stopped(pid: int) -> Iterator[None]:
    """Stop the native threads of a service, those that wait for the kernel among them; its event loop goes on."""
    native = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if _is_native(task)]
    for thread in native:
        _trace(SEIZE, thread)
        _trace(INTERRUPT, thread)
        os.waitpid(thread, WAIT_ALL)
    try:
        yield
    finally:
        for thread in native:
            _trace(DETACH, thread)


def _is_native(task: Path) -> bool:
    """Return whether a thread takes no signals, as native ones do (kvfs/_native/shared/mutex.h)."""
    blocked = re.search(r"^SigBlk:\s*(\w+)", (task / "status").read_text(), re.MULTILINE)
    assert blocked is not None
    return bool(int(blocked[1], 16) >> signal.SIGTERM - 1 & 1) and (task / "comm").read_text() == "python\n"


def _trace(what: int, thread: int) -> None:
    _check(_libc.ptrace(what, thread, None, None), thread)


def _check(result: int, thread: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"thread {thread}")
