"""A bare handler of PUTs: what it takes to receive a body into a file and to checksum it.

Responsibility: the baseline of `s3.put_1m` and `s3.put_64k`. Of each request it reads the head as far as
Content-Length, receives the body into a new file, computes the CRC64NVME of each piece while that is in the processor's
cache, renames the file and answers with the checksum. It knows no signatures, owners, names or limits.

`python -m bench.put_handler DIRECTORY` prints its port. Concurrency: one thread, an epoll loop.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from awscrt.checksums import crc64nvme

from kvfs.limits import KIB

PIECE_BYTES = 256 * KIB
"""As many as the gateway's receiver takes at once."""
_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


@dataclass(slots=True)
class _Body:
    file: int
    left_bytes: int
    checksum: int = 0


class _Connection:
    """One client, which sends one request after the other."""

    def __init__(self, sock: socket.socket, directory: int, buffer: memoryview) -> None:
        self.sock, self._directory, self._buffer = sock, directory, buffer
        self._name = f"put-{sock.fileno()}"
        self._head = b""
        self._body: _Body | None = None

    def receive(self) -> bool:
        """Take what has come; return False once the client has gone."""
        try:
            got = self.sock.recv_into(self._buffer)
        except ConnectionError:
            got = 0
        if not got:
            return False
        at = 0
        while at < got:
            at = self._take_head(at, got) if self._body is None else self._take_body(self._body, at, got)
        return True

    def _take_head(self, at: int, end: int) -> int:
        before = len(self._head)
        self._head += self._buffer[at:end]
        found = self._head.find(_END)
        if found < 0:
            return end
        head = self._head[:found].lower()
        length = int(head[head.index(_LENGTH) + len(_LENGTH) :].partition(b"\r\n")[0])
        self._head = b""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._body = _Body(os.open(self._name, flags, 0o600, dir_fd=self._directory), length)
        return at + found + len(_END) - before

    def _take_body(self, body: _Body, at: int, end: int) -> int:
        end = min(end, at + body.left_bytes)
        piece = self._buffer[at:end]
        body.checksum = crc64nvme(piece, body.checksum)
        os.write(body.file, piece)
        body.left_bytes -= len(piece)
        if not body.left_bytes:
            os.close(body.file)
            os.rename(self._name, "put", src_dir_fd=self._directory, dst_dir_fd=self._directory)
            self.sock.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nx-crc: %016x\r\n\r\n" % body.checksum)
            self._body = None
        return end


def serve(directory: Path) -> None:
    """Answer PUTs until the process is ended; print the port first."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    buffer = memoryview(bytearray(PIECE_BYTES))
    connections: dict[int, _Connection] = {}
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, select.epoll() as poll:
        poll.register(listener, select.EPOLLIN)
        print(f"port {listener.getsockname()[1]}", flush=True)
        while True:
            for fd, _ in poll.poll():
                if fd == listener.fileno():
                    sock = listener.accept()[0]
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connections[sock.fileno()] = _Connection(sock, folder, buffer)
                    poll.register(sock, select.EPOLLIN)
                elif not connections[fd].receive():
                    poll.unregister(fd)
                    connections.pop(fd).sock.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
