"""Two processes that share an allocation of the stand-in by its descriptor, and by a legacy handle."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys

from kvfs._native.cuda.driver import Context, Device
from tests.support.cuda_standin import Standin
from tests.support.waits import WAIT_S

SIZE = 4 << 20

IMPORTER = """
import ctypes, socket, sys
from kvfs._native.cuda.driver import open_driver

door = socket.socket(fileno=int(sys.argv[1]))
driver = open_driver(sys.argv[2])
size_bytes, fds, _, _ = socket.recv_fds(door, 8, 1)
allocation = driver.import_allocation(fds[0], int.from_bytes(size_bytes, "little"))
mapping = driver.devices()[0].map(allocation)
seen = ctypes.string_at(mapping.address, 5)
ctypes.memmove(mapping.address + mapping.size_bytes - 4, b"back", 4)
door.send(seen)
door.recv(1)
door.send(ctypes.string_at(mapping.address, 5))
"""

OPENER = """
import ctypes, sys
from kvfs._native.cuda.driver import open_driver

memory = open_driver(sys.argv[1]).devices()[0].retain_context().open_handle(bytes.fromhex(sys.argv[2]))
print(ctypes.string_at(memory.address, 5).decode())
"""


def test_two_processes_share_an_allocation_by_descriptor(standin: Standin, device: Device) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", IMPORTER, str(theirs.fileno()), standin.path]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as importer, mine:
        theirs.close()
        allocation = device.create(SIZE)
        mapping = device.map(allocation)
        ctypes.memmove(mapping.address, b"hello", 5)
        fd = allocation.export()
        socket.send_fds(mine, [SIZE.to_bytes(8, "little")], [fd])
        os.close(fd)
        assert mine.recv(5) == b"hello"
        assert ctypes.string_at(mapping.address + SIZE - 4, 4) == b"back"
        mapping.unmap()
        allocation.release()
        mine.send(b".")
        assert mine.recv(5) == b"hello", "the importer's memory outlives the owner's"
        assert importer.wait(timeout=WAIT_S) == 0


def test_another_process_opens_a_legacy_handle(standin: Standin, context: Context) -> None:
    memory = context.allocate(10_000)
    ctypes.memmove(memory.address, b"hello", 5)
    handle, _ = context.export_handle(memory.address)
    run = [sys.executable, "-c", OPENER, standin.path, handle.hex()]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == "hello\n"
    memory.free()
