"""The session protocol: byte forms exact and total, messages that do not depend on how a stream is cut."""

from __future__ import annotations

import errno
import json
import struct
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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
from kvfs.protocol.state_machine import Closed, Connection, ReceivedRequest, Side
from tests.support.greeted_connections import greeted

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
