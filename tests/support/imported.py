"""A process that has imported what others begin with, from which they are forked: `imported.py DESCRIPTOR MODULE ...`.

An import takes three quarters of the processor time of an engine's start (17 of 23 s) and of a service's (0.6 s), and
is the same for all. It runs under the engines' python as well, and needs nothing but the standard library.

Reads messages from the socket of that descriptor: JSON, with the descriptors that the new process has as its standard
output (errors go there as well, unless they have one), and further ones under the numbers that it expects:

    {"arguments": [script, ...] or ["-m", module, ...], "environment": {...}, "path": [...], "work": directory,
     "limits": [[resource, [soft, hard]], ...], "descriptors": [number, ...]}    ->    the process's id
    {"wait": id}    ->    the status of a process that has ended, as `os.waitpid` has it

A forked process leads a group of processes and is a zombie until it is waited for, so that its id is nobody else's.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import resource
import runpy
import socket
import sys
import tempfile
from typing import Any, NoReturn

MOST_BYTES = 1 << 18
MOST_DESCRIPTORS = 8


def become(message: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that a message describes, to its end."""
    os.setsid()
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
