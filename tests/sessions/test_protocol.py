"""The session protocol: byte forms exact and total, messages that do not depend on how a stream is cut."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs import errors, limits
from kvfs.errors import KvfsError, ProtocolError
from kvfs.protocol.decode import decode_answer, decode_request
from kvfs.protocol.encode import encode_answer, encode_request
from kvfs.protocol.messages import (
    CONTROL_OPS,
    COUNT_OPS,
    DESCRIPTOR_OPS,
    DIGEST_OPS,
    EXTENT_OPS,
    SENDING_OPS,
    Abort,
    Answer,
    BlockSeal,
    Control,
    ControlAnswer,
    CountAnswer,
    DigestBatch,
    ExtentAnswer,
    ExtentResult,
    Failure,
    Hello,
    HelloAnswer,
    NameSeal,
    Op,
    OpenNames,
    Request,
    Reserve,
    Result,
    ResultAnswer,
    SealBlocks,
    SealNames,
    answer_op,
    entry_count,
    request_op,
    text,
    untext,
)
from kvfs.protocol.state_machine import HEADER, Closed, Connection, ReceivedAnswer, ReceivedRequest, Side

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
DIGEST = st.binary(min_size=16, max_size=16)
JSON = st.dictionaries(
    st.text(max_size=8),
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20),
    max_size=5,
)


def batch(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=12).map(tuple)


BLOCK_SEALS = st.builds(BlockSeal, U32, U32, DIGEST, DIGEST, st.none() | U64)
NAME_SEALS = st.builds(
    NameSeal,
    U32,
    U32,
    st.binary(max_size=63),
    st.binary(max_size=200),
    U32,
    st.booleans(),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | U64,
    st.binary(max_size=40),
    st.none() | U64,
    st.none() | st.tuples(st.binary(max_size=63), st.binary(max_size=200)),
)
BATCHES: st.SearchStrategy[Request] = st.one_of(
    st.builds(Reserve, batch(U64), st.booleans()),
    st.builds(SealBlocks, U32, batch(BLOCK_SEALS)),
    st.builds(SealNames, batch(NAME_SEALS)),
    st.builds(Abort, batch(st.tuples(U32, U32))),
    st.builds(
        DigestBatch, st.sampled_from(sorted(DIGEST_OPS)), U32, st.lists(DIGEST, max_size=12).map(b"".join)
    ),
    st.builds(OpenNames, batch(st.tuples(st.binary(max_size=63), st.binary(max_size=200)))),
)
REQUESTS: st.SearchStrategy[Request] = st.one_of(
    BATCHES, st.builds(Control, st.sampled_from(sorted(CONTROL_OPS)), JSON)
)
HELLOS = st.builds(Hello, st.text(max_size=30), U32, U32)
STATUSES = st.integers(0, 2**31 - 1)


def error_classes(kind: type[KvfsError] = KvfsError) -> list[type[KvfsError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in error_classes(child))]


FAILURES = st.builds(
    lambda op, kind, message: Failure(op, kind(message)),
    st.sampled_from(sorted(Op)),
    st.sampled_from(error_classes()),
    st.text(max_size=60),
)


def same(one: Answer, other: Answer) -> bool:
    if isinstance(one, Failure) and isinstance(other, Failure):
        return (one.op, type(one.error), str(one.error)) == (other.op, type(other.error), str(other.error))
    return one == other


# --- byte forms ------------------------------------------------------------------------------------------
@given(REQUESTS | HELLOS)
def test_requests_survive_their_byte_form(request_: Request) -> None:
    assert decode_request(request_op(request_), encode_request(request_)) == request_


ANSWERS: st.SearchStrategy[Answer] = st.one_of(
    st.builds(HelloAnswer, DIGEST, st.booleans(), JSON, U32),
    st.builds(
        ExtentAnswer,
        st.sampled_from(sorted(EXTENT_OPS)),
        U32,
        batch(st.builds(ExtentResult, STATUSES, U32, U32, U64)),
    ),
    st.builds(
        ResultAnswer,
        st.sampled_from([Op.SEAL_BLOCK, Op.SEAL_NAMED, Op.ABORT, Op.REMOVE_BLOCK]),
        U32,
        batch(st.builds(Result, STATUSES, U64)),
    ),
    st.builds(CountAnswer, st.sampled_from(sorted(COUNT_OPS)), st.integers(0, limits.MAX_BATCH)),
    st.builds(ControlAnswer, st.sampled_from(sorted(CONTROL_OPS)), JSON),
    FAILURES,
)


@given(ANSWERS)
def test_answers_survive_their_byte_form(answer: Answer) -> None:
    assert same(decode_answer(answer_op(answer), encode_answer(answer)), answer)


@given(st.binary(max_size=100))
def test_names_survive_json(name: bytes) -> None:
    assert untext(json.loads(json.dumps(text(name)))) == name


def test_every_error_comes_back_as_itself() -> None:
    for kind in error_classes():
        [raised] = [decode_answer(Op.STAT, encode_answer(Failure(Op.STAT, kind("what: why"))))]
        assert isinstance(raised, Failure)
        assert type(raised.error) is kind
        assert str(raised.error) == "what: why"


def test_descriptors_that_no_request_takes_end_the_session() -> None:
    _, server = greeted()
    server.receive_data(frame(Op.STAT, b"{}"), [7])
    assert isinstance(server.next_event(), ReceivedRequest)
    server.receive_data(frame(Op.STAT, b"{}", number=3), [8])
    with pytest.raises(ProtocolError, match="3 descriptors that no request has taken"):
        server.receive_data(frame(Op.STAT, b"{}", number=4), [9])
    assert server.unused_descriptors() == [7, 8, 9]


def test_an_unknown_error_class_falls_back_to_its_errno() -> None:
    body = struct.pack("<iHH", errno.ENOSPC, 4, 3) + b"Newer"[:4] + b"why"
    failure = decode_answer(Op.STAT, body)
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, errors.NoSpace)
    body = struct.pack("<iHH", errno.ENOTTY, 4, 3) + b"Newe" + b"why"
    failure = decode_answer(Op.STAT, body)
    assert isinstance(failure, Failure)
    assert type(failure.error) is KvfsError
    assert "why" in str(failure.error)


def test_long_error_messages_are_cut() -> None:
    body = encode_answer(Failure(Op.STAT, errors.NotFound("é" * limits.MAX_ERROR_MESSAGE_BYTES)))
    assert len(body) < limits.MAX_ERROR_MESSAGE_BYTES + 100
    assert isinstance(decode_answer(Op.STAT, body), Failure)


# --- the stream ------------------------------------------------------------------------------------------
def feed(
    connection: Connection, stream: bytes, cuts: list[int], descriptors: dict[int, int] | None = None
) -> list[Any]:
    """Every message of `stream`, which arrives cut at `cuts` and then ends; `descriptors` come with its bytes there."""
    events: list[Any] = []
    sent = descriptors or {}
    edges = sorted([0, *(cut % (len(stream) + 1) for cut in cuts), *sent, len(stream)])
    for start, end in pairwise(edges):
        if start < end:
            connection.receive_data(stream[start:end], [sent[start]] if start in sent else ())
        while (event := connection.next_event()) is not None:
            events.append(event)
    connection.receive_data(b"")
    events.append(connection.next_event())
    return events


@given(HELLOS, st.lists(REQUESTS, max_size=5), st.lists(st.integers(0, 10**6), max_size=8))
def test_requests_do_not_depend_on_how_the_stream_is_cut(
    hello: Hello, requests: list[Request], cuts: list[int]
) -> None:
    client, server = Connection(Side.CLIENT), Connection(Side.SERVER)
    stream, sent = client.send_request(hello), dict[int, int]()
    for number, request in enumerate(requests):
        if request_op(request) in SENDING_OPS:
            sent[len(stream)] = 100 + number
        stream += client.send_request(request)
    events = feed(server, stream, cuts, sent)
    assert [fd for event in events[:-1] for fd in event.descriptors] == list(sent.values())
    assert server.unused_descriptors() == []
    assert events[-1] is Closed.CLOSED
    assert [event.request for event in events[:-1]] == [hello, *requests]
    assert [event.number for event in events[:-1]] == list(range(1, len(requests) + 2))


def answer_frames(draw: st.DrawFn, request: Request) -> list[tuple[Answer, bool]]:
    """A right answer to `request`, cut into frames."""
    op, count = request_op(request), entry_count(request)
    if isinstance(request, Control):
        described = {"descriptors": draw(st.integers(0, 3))} if op in DESCRIPTOR_OPS else {}
        return [(ControlAnswer(op, draw(JSON) | described), False)]
    if op in COUNT_OPS:
        return [(CountAnswer(op, draw(st.integers(0, count))), False)]
    frames: list[tuple[Answer, bool]] = []
    first = 0
    while first < count or not frames:
        size = draw(st.integers(1, count - first)) if first < count else 0
        statuses = [draw(st.sampled_from([0, 0, errno.ENOENT])) for _ in range(size)]
        more = first + size < count
        if op in EXTENT_OPS:
            entries = tuple(ExtentResult(status, 7, 9, 11) for status in statuses)
            frames.append((ExtentAnswer(op, first, entries), more))
        else:
            frames.append((ResultAnswer(op, first, tuple(Result(status, 5) for status in statuses)), more))
        first += size
    return frames


@dataclass
class Exchange:
    requests: list[Request]
    frames: list[tuple[Answer, bool]]


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    requests = draw(st.lists(REQUESTS, max_size=4))
    return Exchange(requests, [frame for request in requests for frame in answer_frames(draw, request)])


HELLO_ANSWER = HelloAnswer(bytes(16), True, {"directory": "/d"})


def greeted() -> tuple[Connection, Connection]:
    client, server = Connection(Side.CLIENT), Connection(Side.SERVER)
    server.receive_data(client.send_request(Hello("test", 1)))
    assert isinstance(server.next_event(), ReceivedRequest)
    client.receive_data(server.send_answer(HELLO_ANSWER))
    received = client.next_event()
    assert isinstance(received, ReceivedAnswer)
    assert received.answer == HELLO_ANSWER
    return client, server


@given(exchanges(), st.lists(st.integers(0, 10**6), max_size=8))
def test_answers_do_not_depend_on_how_the_stream_is_cut(exchange: Exchange, cuts: list[int]) -> None:
    client, server = greeted()
    stream = b""
    sent: list[int] = []
    frames = iter(exchange.frames)
    for request in exchange.requests:
        brought = [99] if request_op(request) in SENDING_OPS else []
        server.receive_data(client.send_request(request), brought)
        assert isinstance(server.next_event(), ReceivedRequest)
        more = True
        while more:
            answer, more = next(frames)
            stream += server.send_answer(answer, more=more)
            if isinstance(answer, ExtentAnswer) and answer.op in DESCRIPTOR_OPS:
                opened = sum(entry.status == 0 for entry in answer.entries)
            elif isinstance(answer, ControlAnswer) and answer.op in DESCRIPTOR_OPS:
                opened = answer.result["descriptors"]
            else:
                opened = 0
            sent += range(100 + len(sent), 100 + len(sent) + opened)
    client.receive_data(stream[:1], sent) if stream else None
    events = feed(client, stream[1:], cuts)
    assert events.pop() is Closed.CLOSED
    assert all(same(event.answer, answer) for event, (answer, _) in zip(events, exchange.frames, strict=True))
    assert [event.more for event in events] == [more for _, more in exchange.frames]
    assert [fd for event in events for fd in event.descriptors] == sent
    assert client.unused_descriptors() == []


# --- refusals --------------------------------------------------------------------------------------------
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


# --- fuzz ------------------------------------------------------------------------------------------------
def drain(connection: Connection, stream: bytes) -> None:
    """Feed `stream` as the service would; only a ProtocolError may come of it."""
    try:
        for at in range(0, len(stream), 97):
            connection.receive_data(stream[at : at + 97])
            while connection.next_event() is not None:
                pass
        connection.receive_data(b"")
        connection.next_event()
    except ProtocolError:
        return


@settings(max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_noise_gives_protocol_errors_only(noise: bytes, greeting: bool) -> None:
    client, server = greeted()
    drain(server if greeting else Connection(Side.SERVER), noise)
    client.send_request(Control(Op.STAT))
    drain(client, noise)


@settings(max_examples=300)
@given(
    st.lists(REQUESTS, min_size=1, max_size=3),
    st.lists(st.tuples(U32, st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damaged_requests_give_protocol_errors_only(
    requests: list[Request], damage: list[tuple[int, int]]
) -> None:
    client, server = greeted()
    stream = bytearray(b"".join(map(client.send_request, requests)))
    for place, value in damage:
        stream[place % len(stream)] = value
    drain(server, bytes(stream))


@settings(max_examples=300)
@given(st.sampled_from(sorted(Op)), st.binary(max_size=120))
def test_any_body_gives_protocol_errors_only(op: Op, body: bytes) -> None:
    for decode in (decode_request, decode_answer):
        with suppress(ProtocolError):
            decode(op, body)
