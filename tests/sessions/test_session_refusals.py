"""What the session protocol refuses at both ends: malformed messages, each by name, and what must not be sent."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from kvfs import errors, limits
from kvfs.errors import KvfsError, ProtocolError
from kvfs.protocol.messages import (
    BlockSeal,
    Control,
    ControlAnswer,
    DigestBatch,
    Failure,
    Hello,
    NameSeal,
    Op,
    Reserve,
    SealBlocks,
    SealNames,
)
from kvfs.protocol.state_machine import HEADER, Connection, ReceivedAnswer, ReceivedRequest, Side
from tests.support.greeted_connections import HELLO_ANSWER, greeted


def frame(op: int, body: bytes = b"", *, flags: int = 0, number: int = 2, length: int | None = None) -> bytes:
    return HEADER.pack(len(body) if length is None else length, op, flags, number) + body


BATCH = struct.Struct("<II")
BAD_REQUESTS: dict[str, tuple[bytes, str]] = {
    "length": (frame(Op.MATCH, length=limits.MAX_FRAME_BYTES), "over"),
    "operation": (frame(99), "unknown operation 99"),
    "closed": (frame(Op.CLOSED), "CLOSED is no request"),
    "flags": (frame(Op.STAT, b"{}", flags=1), "flags 0x1"),
    "descriptors": (frame(Op.STAT, b"{}", flags=0x300), "flags 0x300"),
    "no descriptor": (frame(Op.HBM_ADOPT, b"{}", flags=0x100), "0 of 1 descriptors arrived"),
    "descriptor not counted": (frame(Op.HBM_ADOPT, b"{}"), "flags 0x0"),
    "number 0": (frame(Op.STAT, b"{}", number=0), "request number 0 after 1"),
    "number repeated": (frame(Op.STAT, b"{}", number=1), "request number 1 after 1"),
    "second hello": (frame(Op.HELLO), "HELLO comes first"),
    "no batch head": (frame(Op.RESERVE, b"abc"), "3 bytes, at least 8"),
    "count over the limit": (frame(Op.ABORT, BATCH.pack(1025, 0)), "1025 entries"),
    "count too large": (frame(Op.RESERVE, BATCH.pack(2, 0) + bytes(8)), "16 bytes where its counts say 24"),
    "count too small": (frame(Op.MATCH, BATCH.pack(0, 1) + bytes(16)), "24 bytes where its counts say 8"),
    "reserved": (frame(Op.ABORT, BATCH.pack(0, 1)), "reserved is 0x1"),
    "reserve flags": (frame(Op.RESERVE, BATCH.pack(0, 2)), "unknown flags is 0x2"),
    "block flags": (
        frame(Op.SEAL_BLOCK, BATCH.pack(1, 1) + struct.pack("<II32xIIQ", 1, 1, 2, 0, 0)),
        "unknown flags is 0x2",
    ),
    "block checksum": (
        frame(Op.SEAL_BLOCK, BATCH.pack(1, 1) + struct.pack("<II32xIIQ", 1, 1, 0, 0, 5)),
        "checksum without its flag",
    ),
    "name entry": (frame(Op.OPEN_NAMED, BATCH.pack(1, 0) + bytes(4)), "ends inside the entry at byte 8"),
    "name length": (
        frame(Op.OPEN_NAMED, BATCH.pack(1, 0) + struct.pack("<HHI", 9, 9, 0) + b"ab"),
        "ends inside the entry that reaches byte 40",
    ),
    "name padding": (
        frame(Op.OPEN_NAMED, BATCH.pack(1, 0) + struct.pack("<HHI", 1, 1, 0) + b"ab\x01\0\0\0\0\0"),
        "padding at byte 18",
    ),
    "name rest": (frame(Op.OPEN_NAMED, BATCH.pack(0, 0) + bytes(8)), "16 bytes where its counts say 8"),
    "seal name entry": (frame(Op.SEAL_NAMED, BATCH.pack(1, 0) + bytes(39)), "inside the entry at byte 8"),
    "seal name flags": (
        frame(Op.SEAL_NAMED, BATCH.pack(1, 0) + struct.pack("<IIIIqQHHI", 1, 1, 32, 0, 0, 0, 0, 0, 0)),
        "unknown flags is 0x20",
    ),
    "no JSON": (frame(Op.STAT, b"{"), "not JSON"),
    "no object": (frame(Op.STAT, b"[]"), "a JSON list"),
    "key twice": (frame(Op.STAT, b'{"a":1,"a":2}'), "given twice"),
    "not a number": (frame(Op.STAT, b'{"a":NaN}'), "NaN"),
    "deep": (frame(Op.STAT, b"[" * 100_000), "not JSON"),
    "long number": (frame(Op.STAT, b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
    "no UTF-8": (frame(Op.STAT, b'{"a":"\xff"}'), "not JSON"),
    "control too long": (frame(Op.STAT, b" " * (limits.MAX_CONTROL_BYTES + 1)), "over the limit"),
}


@pytest.mark.parametrize(("data", "words"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_malformed_request_is_refused_by_name(data: bytes, words: str) -> None:
    _, server = greeted()
    server.receive_data(data)
    with pytest.raises(ProtocolError, match=words.replace("[", r"\[")):
        server.next_event()
    with pytest.raises(ProtocolError):
        server.next_event()


HELLO_BODY = struct.pack("<8sII", b"kvfs-ses", 1, 1)
BAD_HELLOS: dict[str, tuple[bytes, str]] = {
    "other operation": (frame(Op.STATUS, b"{}", number=1), "HELLO comes first"),
    "short": (frame(Op.HELLO, b"kvfs", number=1), "at least 16"),
    "magic": (frame(Op.HELLO, bytes(16), number=1), "magic"),
    "name": (frame(Op.HELLO, HELLO_BODY + b"\xff", number=1), "not UTF-8"),
    "long name": (frame(Op.HELLO, HELLO_BODY + bytes(129), number=1), "129 bytes, over 128"),
    "http": (b"GET / HTTP/1.1\r\n\r\n", "frame of"),
}


@pytest.mark.parametrize(("data", "words"), BAD_HELLOS.values(), ids=BAD_HELLOS)
def test_a_stranger_is_refused_by_name(data: bytes, words: str) -> None:
    server = Connection(Side.SERVER)
    server.receive_data(data)
    with pytest.raises(ProtocolError, match=words):
        server.next_event()


def test_a_bad_header_is_refused_before_its_body_comes() -> None:
    _, server = greeted()
    server.receive_data(frame(99, length=1000)[: HEADER.size])
    with pytest.raises(ProtocolError, match="unknown operation"):
        server.next_event()


def test_descriptors_that_no_request_takes_end_the_session() -> None:
    _, server = greeted()
    server.receive_data(frame(Op.STAT, b"{}"), [7])
    assert isinstance(server.next_event(), ReceivedRequest)
    server.receive_data(frame(Op.STAT, b"{}", number=3), [8])
    with pytest.raises(ProtocolError, match="3 descriptors that no request has taken"):
        server.receive_data(frame(Op.STAT, b"{}", number=4), [9])
    assert server.unused_descriptors() == [7, 8, 9]


EXTENT = struct.Struct("<iIIIQ")
OK = struct.pack("<iHH", 0, 0, 0)


def opened(
    op: int = Op.OPEN_BLOCK, *, flags: int, first: int = 0, statuses: tuple[int, ...] = (0, 0)
) -> bytes:
    body = OK + BATCH.pack(len(statuses), first)
    return frame(op, body + b"".join(EXTENT.pack(status, 1, 2, 0, 3) for status in statuses), flags=flags)


BAD_ANSWERS: dict[str, tuple[bytes, str]] = {
    "no answer": (opened(flags=0x200), "flags 0x200"),
    "flag": (opened(flags=0x205), "flags 0x205"),
    "operation": (opened(Op.RESERVE, flags=0x201), "RESERVE 2 where OPEN_BLOCK 2 is next"),
    "number": (frame(Op.OPEN_BLOCK, flags=1, number=3), "OPEN_BLOCK 3 where OPEN_BLOCK 2 is next"),
    "too many descriptors": (opened(flags=0x8101), "129 descriptors"),
    "descriptors of a result": (frame(Op.ABORT, flags=0x101), "ABORT: answer with 1 descriptors"),
    "descriptors not said": (opened(flags=0x001), "0 descriptors for 2 open entries"),
    "descriptors of a failure": (opened(flags=0x201, statuses=(0, 5)), "2 descriptors for 1 open entries"),
    "descriptors lost": (opened(flags=0x201), "1 of 2 descriptors arrived"),
    "first": (opened(flags=0x201, first=1), "entries from 1, not 0"),
    "too many entries": (opened(flags=0x301, statuses=(0, 0, 0)), "3 of 2 entries"),
    "too few entries": (opened(flags=0x101, statuses=(0,)), "1 of 2 entries answered, more=False"),
    "more after the last": (opened(flags=0x203), "2 of 2 entries answered, more=True"),
    "negative status": (opened(flags=0x101, statuses=(0, -1)), "status -1 is negative"),
    "short": (frame(Op.OPEN_BLOCK, b"1234567", flags=1), "7 bytes, at least 8"),
    "error lengths": (frame(Op.OPEN_BLOCK, struct.pack("<iHH", 2, 5, 5), flags=1), "8 bytes where its"),
    "success with error lengths": (
        frame(Op.OPEN_BLOCK, struct.pack("<iHH", 0, 1, 0), flags=1),
        "error length",
    ),
    "closed without error": (frame(Op.CLOSED, OK, flags=1, number=0), "CLOSED answer without an error"),
    "closed with number": (frame(Op.CLOSED, OK, flags=1, number=2), "CLOSED with request number 2"),
}


@pytest.mark.parametrize(("data", "words"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_malformed_answer_is_refused_by_name(data: bytes, words: str) -> None:
    client, _ = greeted()
    client.send_request(DigestBatch(Op.OPEN_BLOCK, 1, bytes(32)))
    client.receive_data(data, [77])
    with pytest.raises(ProtocolError, match=words):
        client.next_event()
    assert client.unused_descriptors() == [77]


@pytest.mark.parametrize(
    "body", [b"{}", b'{"descriptors":true}', b'{"descriptors":-1}', b'{"descriptors":2}']
)
def test_a_control_answer_says_how_many_descriptors_it_brings(body: bytes) -> None:
    client, _ = greeted()
    client.send_request(Control(Op.HBM_MAP, {"segment": 0}))
    client.receive_data(frame(Op.HBM_MAP, OK + body, flags=0x101), [77])
    with pytest.raises(ProtocolError, match=r"HBM_MAP: .*descriptors"):
        client.next_event()
    assert client.unused_descriptors() == [77]


def test_an_answer_to_nothing_is_refused() -> None:
    client, _ = greeted()
    client.receive_data(frame(Op.STAT, OK + b"{}", flags=1))
    with pytest.raises(ProtocolError, match="to no request"):
        client.next_event()


def test_a_count_over_the_request_is_refused() -> None:
    client, _ = greeted()
    client.send_request(DigestBatch(Op.MATCH, 1, bytes(32)))
    client.receive_data(frame(Op.MATCH, OK + BATCH.pack(3, 0), flags=1))
    with pytest.raises(ProtocolError, match="3 found of 2"):
        client.next_event()


def test_the_service_says_why_it_closes() -> None:
    client, server = greeted()
    client.send_request(Control(Op.STATUS))
    client.receive_data(server.send_closed(Failure(Op.CLOSED, errors.LimitExceeded("too many"))))
    received = client.next_event()
    assert isinstance(received, ReceivedAnswer)
    assert isinstance(received.answer, Failure)
    assert isinstance(received.answer.error, errors.LimitExceeded)
    with pytest.raises(ProtocolError):
        server.send_answer(HELLO_ANSWER)


def test_a_stream_that_ends_inside_a_frame_says_where() -> None:
    for cut, words in ((5, "header, 5 bytes"), (20, "HELLO, 20 bytes")):
        server = Connection(Side.SERVER)
        server.receive_data(frame(Op.HELLO, HELLO_BODY, number=1)[:cut])
        assert server.next_event() is None
        server.receive_data(b"")
        with pytest.raises(ProtocolError, match=words):
            server.next_event()


WRONG_SENDS: dict[str, Callable[[Connection, Connection], object]] = {
    "answer by the client": lambda client, _: client.send_answer(HELLO_ANSWER),
    "request by the server": lambda _, server: server.send_request(Control(Op.STAT)),
    "second hello": lambda client, _: client.send_request(Hello("again", 1)),
    "answer to nothing": lambda _, server: server.send_answer(ControlAnswer(Op.STAT, {})),
    "batch over the limit": lambda client, _: client.send_request(Reserve((0,) * 1025)),
    "frame over the limit": lambda client, _: client.send_request(
        SealNames((NameSeal(1, 1, b"b", b"k", user_metadata=bytes(limits.MAX_FRAME_BYTES)),))
    ),
    "field out of range": lambda client, _: client.send_request(Reserve((-1,))),
    "short digest": lambda client, _: client.send_request(SealBlocks(1, (BlockSeal(1, 1, b"short"),))),
    "no JSON": lambda client, _: client.send_request(Control(Op.STAT, {"a": b"bytes"})),
}


@pytest.mark.parametrize("send", WRONG_SENDS.values(), ids=WRONG_SENDS)
def test_what_must_not_be_sent_is_refused(send: Callable[[Connection, Connection], object]) -> None:
    client, server = greeted()
    with pytest.raises(KvfsError):
        send(client, server)
    server.receive_data(client.send_request(Control(Op.STATUS)))
    assert isinstance(server.next_event(), ReceivedRequest)
