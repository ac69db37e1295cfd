"""TLS sessions of machines over a pair of sockets, without an event loop: both ends, and a rogue at one of them."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs._native.remote.stream import Stream
from kvfs._native.remote.tls import Context, Session
from kvfs.errors import ConfigError, InvalidRequest, NotPermitted, ProtocolError
from tests.support.certificates import ClusterTls, authority, locked, signed
from tests.support.rogue_peers import (
    REQUEST,
    matched,
)
from tests.support.waits import WAIT_S, eventually

KEY_BYTES = 100_000


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    asks, serves = socket.socketpair()
    with asks, serves:
        yield asks, serves


def shake(*sessions: Session) -> None:
    """Have both ends shake hands."""
    done = [False, False]
    while not all(done):
        done = [session.handshake() for session in sessions]


@pytest.fixture
def pair(ends: tuple[socket.socket, socket.socket], cluster_tls: ClusterTls) -> tuple[Session, Session]:
    """The sessions of who asks and who serves."""
    asks, serves = ends
    context = Context(*cluster_tls, key_bytes=KEY_BYTES)
    sessions = context.session(asks.fileno(), False), context.session(serves.fileno(), True)
    shake(*sessions)
    return sessions


def test_a_context_says_until_when_its_certificate_counts(cluster_tls: ClusterTls) -> None:
    written = ssl._ssl._test_decode_cert(str(cluster_tls.certificate))["notAfter"]  # type: ignore[attr-defined]
    assert Context(*cluster_tls).ends_s == ssl.cert_time_to_seconds(written)


def test_bytes_arrive_in_order_in_both_directions_and_keys_are_renewed(pair: tuple[Session, Session]) -> None:
    """More goes than the sockets hold, so that every call comes back before it is through."""
    sent, waits = os.urandom(20 * KEY_BYTES), 0
    for source, sink in (pair, pair[::-1]):
        got, at = b"", 0
        while len(got) < len(sent):
            if at < len(sent) and (put := source.send(sent[at:])) is not None:
                at += put
                continue
            waits += source.wants_room
            got += sink.receive(1 << 20) or b""
        assert got == sent
    assert waits > 0
    assert pair[0].receive(1) is None
    assert not pair[0].wants_room


def test_the_end_of_the_socket_is_the_end(
    ends: tuple[socket.socket, socket.socket], pair: tuple[Session, Session]
) -> None:
    asks, serves = pair
    assert serves.send(b"last") == 4
    ends[1].shutdown(socket.SHUT_WR)
    assert asks.receive(100) == b"last"
    assert asks.receive(100) == b""


def test_bytes_that_were_changed_break_the_session(
    ends: tuple[socket.socket, socket.socket], pair: tuple[Session, Session]
) -> None:
    ends[1].sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ProtocolError, match="TLS: "):
        pair[0].receive(100)
    with pytest.raises(ProtocolError):  # and stays broken
        pair[0].receive(100)


def test_half_a_record_is_nothing_yet(
    ends: tuple[socket.socket, socket.socket], pair: tuple[Session, Session]
) -> None:
    ends[1].sendall(b"\x17\x03\x03\x00\x20" + bytes(31))
    assert pair[0].receive(100) is None


def test_records_without_data_do_not_go_on_for_ever(
    ends: tuple[socket.socket, socket.socket], cluster_tls: ClusterTls
) -> None:
    """Of a peer that has a certificate, and takes new keys again and again."""
    asks = Context(*cluster_tls).session(ends[0].fileno(), False)
    rogue = Context(*cluster_tls, key_bytes=0).session(ends[1].fileno(), True)
    shake(asks, rogue)

    def flood() -> None:
        for _ in range(20_000):
            rogue.send(b"")
            rogue.handshake()
            assert asks.receive(100) is None

    with pytest.raises(ProtocolError, match="it sends no data"):
        flood()


def test_a_certificate_of_another_authority_is_named(
    ends: tuple[socket.socket, socket.socket], cluster_tls: ClusterTls, tmp_path: Path
) -> None:
    other = Context(*signed(tmp_path, authority(tmp_path)))
    asks = Context(*cluster_tls).session(ends[0].fileno(), False)
    serves = other.session(ends[1].fileno(), True)
    with pytest.raises(NotPermitted, match="its certificate: certificate signature failure"):
        shake(asks, serves)
    with pytest.raises(ProtocolError, match=r"it refuses this machine: .*decrypt error"):
        shake(serves, serves)


def test_tls_1_2_is_refused(ends: tuple[socket.socket, socket.socket], cluster_tls: ClusterTls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cluster_tls.authorities)
    context.load_cert_chain(cluster_tls.certificate, cluster_tls.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    ends[0].sendall(outgoing.read())
    with pytest.raises(ProtocolError, match="unsupported protocol"):
        Context(*cluster_tls).session(ends[1].fileno(), True).handshake()


def test_a_session_is_the_streams_once_it_is_taken(
    ends: tuple[socket.socket, socket.socket], pair: tuple[Session, Session]
) -> None:
    asks, serves = pair
    stream = Stream(ends[0].detach(), asks.capsule)
    asks.take()
    with pytest.raises(InvalidRequest, match="taken"):
        asks.receive(1)
    stream.begin_match(bytes(16), bytes(16), WAIT_S)
    request = b""
    while len(request) < REQUEST.size + 16:
        request += serves.receive(1000) or b""
    assert serves.send(matched(1, 4096))
    eventually(stream.take, "the job ends")
    assert (stream.error, stream.sizes()) == (0, [4096])
    assert stream.is_quiet
    stream.begin_match(bytes(16), bytes(16), WAIT_S)
    # In one record: the socket has nothing of it any more once the answer was read.
    assert serves.send(matched(2) + b"unasked")
    eventually(stream.take, "the job ends")
    assert stream.error == 0
    assert not stream.is_quiet
    stream.close()
    with pytest.raises(ValueError, match="PyCapsule"):
        Stream(-1, object())


def test_half_a_record_costs_a_job_its_deadline(
    ends: tuple[socket.socket, socket.socket], pair: tuple[Session, Session]
) -> None:
    stream = Stream(ends[0].detach(), pair[0].capsule)
    pair[0].take()
    ends[1].sendall(b"\x17\x03\x03\x00\x20" + bytes(31))
    stream.begin_match(bytes(16), bytes(16), 0.05)
    eventually(stream.take, "the job ends")
    assert stream.error == errno.ETIMEDOUT
    stream.close()


@pytest.mark.parametrize("wrong", ["certificate", "key", "authorities"])
def test_a_file_that_is_no_pem_file_is_named(cluster_tls: ClusterTls, tmp_path: Path, wrong: str) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    with pytest.raises(ConfigError, match=rf"\[cluster\] {wrong} = '{junk}': ."):
        Context(*cluster_tls._replace(**{wrong: junk}))


def test_a_key_of_another_certificate_is_named(cluster_tls: ClusterTls, tmp_path: Path) -> None:
    other = signed(tmp_path, authority(tmp_path))
    with pytest.raises(ConfigError, match=rf"\[cluster\] key = '{other.key}': key values mismatch"):
        Context(*cluster_tls._replace(key=other.key))


def test_a_key_with_a_passphrase_asks_nobody(cluster_tls: ClusterTls, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key = "):
        Context(*cluster_tls._replace(key=locked(cluster_tls.key, tmp_path / "locked.key")))
