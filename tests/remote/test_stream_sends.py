"""A stream whose socket takes a request in pieces, or whose peer breaks off: all of it arrives, or the job ends."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

import pytest

from kvfs._native.remote.stream import Stream
from tests.support.rogue_peers import (
    MATCHED,
    REQUEST,
    matched,
)
from tests.support.waits import WAIT_S, eventually

DIGESTS = bytes(range(256)) * 64
"""1,024 of 16 bytes: several times what the socket takes at once."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Stream]]:
    """Connect a peer's socket to a stream over one that holds little."""
    peer, own = socket.socketpair()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    peer.settimeout(WAIT_S)
    stream = Stream(own.detach())
    with peer:
        yield peer, stream
        stream.close()


def test_a_request_that_the_socket_takes_in_pieces_arrives_whole(ends: tuple[socket.socket, Stream]) -> None:
    peer, stream = ends
    stream.begin_match(bytes(16), DIGESTS, WAIT_S)
    request = b""
    while len(request) < REQUEST.size + len(DIGESTS):
        request += peer.recv(1024)
    assert request[REQUEST.size :] == DIGESTS
    peer.sendall(matched(1, 4096))
    eventually(stream.take, "the job ends")
    assert (stream.error, stream.sizes()) == (0, [4096])


def test_a_request_that_the_peer_does_not_take_ends_at_its_deadline(
    ends: tuple[socket.socket, Stream],
) -> None:
    _, stream = ends
    began_s = time.monotonic()
    stream.begin_match(bytes(16), DIGESTS, 0.5)
    eventually(stream.take, "the job ends")
    assert stream.error == errno.ETIMEDOUT
    assert time.monotonic() - began_s >= 0.5


@pytest.mark.parametrize("said_bytes", [0, MATCHED.size - 1, MATCHED.size, MATCHED.size + 3])
def test_an_answer_that_breaks_off_ends_the_job_and_says_nothing(
    ends: tuple[socket.socket, Stream], said_bytes: int
) -> None:
    """At once, and nothing of it counts."""
    peer, stream = ends
    stream.begin_match(bytes(16), DIGESTS[:16], WAIT_S)
    assert len(peer.recv(4096)) == REQUEST.size + 16
    answer = matched(1, 4096)
    peer.sendall(answer[:said_bytes])
    peer.shutdown(socket.SHUT_WR)
    eventually(stream.take, "the job ends")
    assert (stream.error, stream.sizes()) == (errno.ECONNRESET, [])
