"""A process that has imported vLLM, from which engines are forked; runs under the engines' python.

An import takes three quarters of the processor time of an engine's start (17 of 23 s), and is the same for all.

Reads messages from the socket whose descriptor is the only argument: JSON, with the descriptors that the engine has as
its standard input, output, and further ones under the numbers that it expects:

    {"arguments": [script, ...] or ["-m", module, ...], "environment": {...}, "path": [...], "work": directory,
     "descriptors": [number, ...]}    ->    the engine's process id

An engine leads a group of processes and is a zombie until the next message, so that its id is nobody else's until then.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import runpy
import socket
import sys
import tempfile
from typing import Any, NoReturn

MODULES = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
MOST_BYTES = 1 << 18
MOST_DESCRIPTORS = 8


def become(message: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the engine that a message describes, to its end."""
    os.setsid()
    for own, wanted in zip(descriptors, message["descriptors"], strict=True):
        os.dup2(own, wanted, inheritable=True)
    os.dup2(1, 2)
    for own in set(descriptors) - set(message["descriptors"]):
        os.close(own)
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
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.exit(status)


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_DESCRIPTORS)
        if not data:
            return
        reap()
        child = os.fork()
        if child == 0:
            control.close()
            become(json.loads(data), descriptors)
        for each in descriptors:
            os.close(each)
        control.send(str(child).encode())


if __name__ == "__main__":
    main()
