"""A Redis or Valkey server for figures of the directory.

Concurrency: the server is a process of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from bench.ports import free_ports
from kvfs.errors import DeviceMissing


@contextmanager
def directory_server(what: str) -> Iterator[int]:
    """Run one that keeps nothing; yield its port. Raises DeviceMissing, which says `what` needs it."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise DeviceMissing(f"bench: {what} needs redis-server or valkey-server")
    [port] = free_ports(1)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-bench-") as folder,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process,
    ):
        try:
            yield port
        finally:
            process.terminate()
