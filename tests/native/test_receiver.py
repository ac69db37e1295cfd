"""Bodies that go into a draft without Python: the right checksums, and every way in which a connection ends."""

from __future__ import annotations

import os
import socket
import tempfile
from base64 import b64encode
from random import Random

import pytest
from awscrt.checksums import crc64nvme as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvfs import limits
from kvfs._native.s3.receiver import END, GONE, MOVED, WAIT, Receiver, crc64nvme, engine
from kvfs.errors import KvfsError
from tests.support.gateway import gateway
from tests.support.raw_s3 import UNSIGNED, raw_client, signed_head

ENGINES = [wanted for wanted in (1, 2, 3) if engine(wanted) == wanted]
MIB = 1 << 20


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3000), st.randoms(), st.integers(0, (1 << 64) - 1), st.integers(0, 3000))
def test_every_engine_takes_the_crc_that_aws_takes(size: int, random: Random, crc: int, cut: int) -> None:
    data = random.randbytes(size)
    for each in ENGINES:
        assert crc64nvme(data, crc, each) == reference(data, crc)
        assert crc64nvme(data[cut:], crc64nvme(data[:cut], crc, each), each) == reference(data, crc)


def test_the_check_value_of_the_standard() -> None:
    assert crc64nvme(b"123456789") == 0xAE8B14860A799888


@pytest.mark.parametrize("crc", [False, True])
@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.binary(max_size=70_000), max_size=5))
def test_a_body_in_pieces_arrives_as_it_was_sent(crc: bool, parts: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    whole = b"".join(parts)
    receiver = Receiver(crc)
    with ours, theirs, tempfile.TemporaryFile() as file:
        for n, part in enumerate(parts):
            if n == 0:  # as what came with the head does
                os.pwrite(file.fileno(), part, 0)
                receiver.update(part)
                continue
            theirs.sendall(part)
            end = receiver.receive(ours.fileno(), file.fileno(), len(part))
            assert end == MOVED
        assert receiver.receive(ours.fileno(), file.fileno(), 1) == WAIT
        assert file.read() == whole
    assert receiver.size_bytes == len(whole)
    assert receiver.xxh3 == xxh3_64_intdigest(whole)
    assert receiver.crc64nvme == (reference(whole) if crc else 0)


def test_no_more_is_taken_than_asked_for() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        theirs.sendall(b"body, next request")
        receiver = Receiver(True)
        assert receiver.receive(ours.fileno(), file.fileno(), 4) == MOVED
        assert (file.read(), ours.recv(100)) == (b"body", b", next request")


def test_how_a_connection_ends_is_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as file:
        with theirs:
            theirs.sendall(b"half")
        receiver = Receiver(True)
        assert receiver.receive(ours.fileno(), file.fileno(), 8) == END
        assert (receiver.size_bytes, receiver.crc64nvme) == (4, reference(b"half"))
        assert receiver.receive(file.fileno(), file.fileno(), 8) == GONE


def test_a_file_that_takes_nothing_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/full", "wb") as full:
        theirs.sendall(b"x")
        with pytest.raises(KvfsError):
            Receiver(False).receive(ours.fileno(), full.fileno(), 1)


def test_bodies_of_every_size_and_cut_are_stored_and_checked() -> None:
    with gateway(settings='opaque_etags = ["body"]') as door, raw_client(door) as raw:
        door.client().create_bucket(Bucket="body")
        for size in (1, 1000, limits.MAX_HEAD_BYTES, limits.RECEIVE_BYTES, MIB, 3 * MIB + 7):
            body = os.urandom(size)
            said = b64encode(reference(body).to_bytes(8, "big")).decode()
            for headers in ({"x-amz-checksum-crc64nvme": said}, {}):
                head = signed_head(door, "PUT", "/body/k", headers=headers, body=body, payload=UNSIGNED)
                for cut in {0, 1, size // 2, size - 1}:
                    raw.send(head + body[:cut])
                    raw.send(body[cut:])
                    answer = raw.response()
                    assert answer.status == 200
                    assert answer.headers.get("x-amz-checksum-crc64nvme") == (said if headers else None)
                assert raw.ask("GET", "/body/k").body == body
        wrong = b64encode(bytes(8)).decode()
        refused = raw.ask(
            "PUT", "/body/k", b"other", headers={"x-amz-checksum-crc64nvme": wrong}, payload=UNSIGNED
        )
        assert (refused.status, refused.code) == (400, "BadDigest")
        assert raw.ask("GET", "/body/k").body == body
