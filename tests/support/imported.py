"""A process that has imported what others begin with, from which they are forked: `imported.py DESCRIPTOR MODULE ...`.

An import takes three quarters of the processor time of an engine's start (17 of 23 s) and of a service's (0.6 s), and
is the same for all. It runs under the engines' python as well, and needs nothing but the standard library.

Reads messages from the socket of that descriptor: JSON, with the descriptors that the new process has as its standard
output (errors go there as well, unless they have one), and further ones under the numbers that it expects:

    {"arguments": [script, ...] or ["-m", module, ...], "environment": {...}, "path": [...], "work": directory,
     "limits": [[resource, [soft, hard]], ...], "descriptors": [number, ...],
     "network": whether one more descriptor is that of its network}    ->    the process's id
    {"wait": id}    ->    the status of a process that has ended, as `os.waitpid` has it

A forked process leads a group of processes and is a zombie until it is waited for, so that its id is nobody else's.
What multiprocessing would spawn there is forked too: vLLM spawns each server's core and each rank of an engine.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing.util
import os
import random
import resource
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Final, NoReturn

MOST_BYTES = 1 << 18
MOST_DESCRIPTORS = 8
CLONE_NEWNET: Final = 0x40000000
SPAWNED = "--multiprocessing-fork"
"""Of what multiprocessing starts, its own resource tracker is without it."""
_spawn: Final = multiprocessing.util.spawnv_passfds


def fork_spawned(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start what multiprocessing would spawn, and return its id."""
    if SPAWNED not in args:
        return _spawn(path, args, passfds)
    child = os.fork()
    if child == 0:
        be_spawned(args, passfds)
    return child


def be_spawned(arguments: Sequence[str], passed: Sequence[int]) -> NoReturn:
    """Be the process that multiprocessing wants, to its end: with no more of the one that it is forked from than is
    imported."""
    # Objects of the other process that are collected here would close descriptors of this one.
    gc.freeze()
    # What libuv has of its own is closed by number in each process that is forked from this one (its
    # uv__signal_global_reinit): the numbers stay taken.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, *passed}:
        os.dup2(nothing, descriptor)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    random.seed()
    program = arguments.index("-c") + 1
    sys.argv = ["-c", *arguments[program + 1 :]]
    status = 1
    try:
        exec(arguments[program], {})
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def become(message: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that a message describes, to its end."""
    os.setsid()
    if message["network"]:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptors.pop(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in tests that run in the background
    for own, wanted in zip(descriptors, message["descriptors"], strict=True):
        os.dup2(own, wanted, inheritable=True)
    if 2 not in message["descriptors"]:
        os.dup2(1, 2)
    for own in set(descriptors) - set(message["descriptors"]):
        os.close(own)
    for kind, bounds in message["limits"]:
        resource.setrlimit(kind, bounds)
    os.chdir(message["work"])
    os.environ.clear()
    os.environ.update(message["environment"])
    tempfile.tempdir = None
    random.seed()
    sys.path[:0] = message["path"]
    status = 1
    try:
        first, *rest = message["arguments"]
        if first == "-m":
            module, *rest = rest
            sys.argv = [module, *rest]
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *rest]
            runpy.run_path(first, run_name="__main__")
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.exit(status)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    multiprocessing.util.spawnv_passfds = fork_spawned
    gc.freeze()  # a collection in a forked process would copy the pages of all that was imported
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_DESCRIPTORS)
        if not data:
            return
        message = json.loads(data)
        if "wait" in message:
            _, status = os.waitpid(message["wait"], 0)
            control.send(str(status).encode())
            continue
        child = os.fork()
        if child == 0:
            control.close()
            become(message, descriptors)
        for each in descriptors:
            os.close(each)
        control.send(str(child).encode())


if __name__ == "__main__":
    main()
