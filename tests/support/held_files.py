"""Files whose reads, writes and allocations wait until the test lets them go: a slow device, without a clock.

A file system of its own on /dev/fuse, served by a thread of the test: `held()` waits until so many requests are with
it, `let_go()` answers them and all that come later.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvfs.system import linux
from tests.support.waits import WAIT_S

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, RELEASE, FLUSH = 1, 2, 3, 4, 14, 15, 16, 18, 25
INIT, BATCH_FORGET, FALLOCATE = 26, 42, 43
HELD = frozenset((READ, WRITE, FALLOCATE))
IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
DIRECT_IO = 1
SIZE_BYTES = 1 << 20


def _attr(nodeid: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if nodeid == 1 else stat.S_IFREG | 0o600
    return struct.pack("<6Q10I", nodeid, SIZE_BYTES, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


class HeldFiles:
    """Any name that is a number is a file of SIZE_BYTES."""

    def __init__(self, device: int, point: Path) -> None:
        self.point = point
        self._device = device
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, bytes]] = []
        self._open = False

    def path(self, number: int) -> Path:
        return self.point / str(number)

    def held(self, count: int) -> None:
        """Wait until so many requests are held up."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._waiting) >= count, WAIT_S), len(self._waiting)

    def let_go(self) -> None:
        with self._changed:
            self._open = True
            waiting, self._waiting = self._waiting, []
        for unique, opcode, body in waiting:
            self._finish(unique, opcode, body)

    def serve(self, stop: int) -> None:
        while True:
            ready, _, _ = select.select([self._device, stop], [], [])
            if stop in ready:
                return
            try:
                raw = os.read(self._device, 1 << 21)
            except BlockingIOError:
                continue
            except OSError:
                return
            _, opcode, unique, nodeid, *_ = IN_HEADER.unpack_from(raw)
            body = raw[IN_HEADER.size :]
            if opcode in HELD:
                with self._changed:
                    if not self._open:
                        self._waiting.append((unique, opcode, body))
                        self._changed.notify_all()
                        continue
                self._finish(unique, opcode, body)
            elif opcode not in (FORGET, BATCH_FORGET):
                self._reply(unique, *self._answer(opcode, nodeid, body))

    def _finish(self, unique: int, opcode: int, body: bytes) -> None:
        size = struct.unpack_from("<I", body, 16)[0]
        data = {READ: bytes(size), WRITE: struct.pack("<II", size, 0), FALLOCATE: b""}[opcode]
        self._reply(unique, 0, data)

    @staticmethod
    def _answer(opcode: int, nodeid: int, body: bytes) -> tuple[int, bytes]:
        if opcode == INIT:
            return 0, struct.pack("<4IHHIIHHI", 7, 31, 0, 0, 12, 9, SIZE_BYTES, 1, 256, 0, 0) + bytes(28)
        if opcode == LOOKUP:
            number = int(body.rstrip(b"\0"))
            return 0, struct.pack("<4Q2I", 2 + number, 0, 60, 60, 0, 0) + _attr(2 + number)
        if opcode in (GETATTR, SETATTR):
            return 0, struct.pack("<QII", 60, 0, 0) + _attr(nodeid)
        if opcode == OPEN:
            return 0, struct.pack("<QII", 1, DIRECT_IO, 0)
        if opcode in (RELEASE, FLUSH):
            return 0, b""
        return errno.ENOSYS, b""

    def _reply(self, unique: int, error: int, body: bytes) -> None:
        # The kernel has given a request up where the mount ends, perhaps before it has begun.
        with suppress(FileNotFoundError):
            os.write(self._device, OUT_HEADER.pack(OUT_HEADER.size + len(body), -error, unique) + body)


@contextmanager
def held_files(point: Path) -> Iterator[HeldFiles]:
    """Mounted at `point`, a directory. Needs /dev/fuse and the right to mount."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    stop_read, stop_write = os.pipe()
    linux.mount("held", point, "fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0")
    files = HeldFiles(device, point)
    server = threading.Thread(target=files.serve, args=[stop_read])
    server.start()
    try:
        yield files
    finally:
        files.let_go()
        linux.unmount(point, linux.MNT_FORCE | linux.MNT_DETACH)
        os.write(stop_write, b"x")
        server.join()
        for descriptor in (device, stop_read, stop_write):
            os.close(descriptor)
