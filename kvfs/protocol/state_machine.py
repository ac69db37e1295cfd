"""The session protocol as a state machine: bytes and descriptors in, messages out, no I/O.

Responsibility: frames, their order, and who may say what when. `Connection` is either end of a session; the
caller moves the bytes. docs/sessions.md is the byte-exact specification.

Invariants:
- However the byte stream is cut, the same messages come out.
- The first request is HELLO. Request numbers rise; answers come in the order of the requests.
- A frame is refused by its header alone where that suffices: nothing is buffered for a wrong length, operation or
  flag. At most one frame is buffered besides the bytes of the last `receive_data`.
- After a `ProtocolError` or the end of the stream every further call raises ProtocolError.
- Descriptors are integers here. They arrive with or before the first byte of their frame (SCM_RIGHTS on a
  stream) and belong to the message that names them; the caller closes the others (`unused_descriptors`).

Concurrency: one owner at a time.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvfs import limits
from kvfs.errors import LimitExceeded, ProtocolError
from kvfs.protocol.decode import decode_answer, decode_request
from kvfs.protocol.encode import encode_answer, encode_request
from kvfs.protocol.messages import (
    COUNT_OPS,
    DESCRIPTOR_OPS,
    SENDING_OPS,
    Answer,
    ControlAnswer,
    CountAnswer,
    ExtentAnswer,
    Failure,
    Op,
    Request,
    ResultAnswer,
    answer_op,
    entry_count,
    request_op,
)

HEADER: Final = struct.Struct("<IHHQ")
"""Length of the body, operation, flags, request number."""
FLAG_ANSWER: Final = 1
FLAG_MORE: Final = 2
"""Another frame of the same answer follows."""
DESCRIPTORS_SHIFT: Final = 8
"""The upper byte of the flags counts the descriptors that travel with the frame."""

_REQUESTS_IN_SIGHT: Final = 2
"""Requests whose descriptors may be here untaken: one ends in the bytes just received, another begins there."""


class Side(Enum):
    """Which end of a session this is."""

    CLIENT = "client"
    SERVER = "server"


class State(Enum):
    """How far a session has come."""

    GREETING = "greeting"
    """HELLO has not been exchanged."""
    OPEN = "open"
    CLOSED = "closed"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request and its number."""

    number: int
    request: Request
    descriptors: tuple[int, ...] = ()
    """What an operation of SENDING_OPS brings; the receiver closes them."""


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """An answer to the request of this number, or a part of one."""

    number: int
    answer: Answer
    more: bool
    descriptors: tuple[int, ...]
    """In the order of the entries with status 0; the receiver closes them."""


class Closed(Enum):
    """The peer ended the stream between two frames."""

    CLOSED = "closed"


@dataclass(slots=True)
class _Outstanding:
    """A request that has no complete answer yet."""

    number: int
    op: Op
    entries: int
    answered: int = field(default=0)


class Connection:
    """One end of a session."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.state = State.GREETING
        self._buffer = bytearray()
        self._ended = False
        self._descriptors: deque[int] = deque()
        self._outstanding: deque[_Outstanding] = deque()
        self._last_number = 0
        self._fault = ""

    # --- receiving ---------------------------------------------------------------------------------------
    def receive_data(self, data: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        """Take bytes from the peer, and the descriptors that came with them; no bytes mean the end of the stream."""
        self._descriptors.extend(descriptors)
        if self.side is Side.SERVER and len(self._descriptors) > _REQUESTS_IN_SIGHT:
            raise ProtocolError(f"{len(self._descriptors)} descriptors that no request has taken")
        if self._ended and len(data):
            raise ProtocolError("bytes after the end of the stream")
        self._buffer += data
        self._ended = len(data) == 0

    def next_event(self) -> ReceivedRequest | ReceivedAnswer | Closed | None:
        """Return the next message, None when more bytes are needed. Raises ProtocolError naming the fault."""
        if self.state is State.BROKEN:
            raise ProtocolError(self._fault)
        try:
            return self._next_event()
        except ProtocolError as error:
            self.state, self._fault = State.BROKEN, str(error)
            self._buffer.clear()
            raise

    @property
    def receiving(self) -> bool:
        """Return whether a frame has begun and is not complete."""
        return bool(self._buffer)

    def unused_descriptors(self) -> list[int]:
        """Take the descriptors that no message names; the caller closes them."""
        left = list(self._descriptors)
        self._descriptors.clear()
        return left

    def _next_event(self) -> ReceivedRequest | ReceivedAnswer | Closed | None:
        if len(self._buffer) < HEADER.size:
            return self._at_end("header") if self._ended else None
        length, code, flags, number = HEADER.unpack_from(self._buffer)
        op = self._check_header(length, code, flags, number)
        end = HEADER.size + length
        if len(self._buffer) < end:
            return self._at_end(op.name) if self._ended else None
        body = bytes(memoryview(self._buffer)[HEADER.size : end])
        del self._buffer[:end]
        if self.side is Side.SERVER:
            return self._take_request(op, number, body)
        return self._take_answer(op, flags, number, body)

    def _at_end(self, where: str) -> Closed:
        if self._buffer:
            raise ProtocolError(
                f"stream ended inside a frame ({where}, {len(self._buffer)} bytes of it arrived)"
            )
        self.state = State.CLOSED
        return Closed.CLOSED

    def _check_header(self, length: int, code: int, flags: int, number: int) -> Op:
        if HEADER.size + length > limits.MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {HEADER.size + length} bytes, over {limits.MAX_FRAME_BYTES}")
        try:
            op = Op(code)
        except ValueError:
            raise ProtocolError(f"unknown operation {code}") from None
        if self.side is Side.SERVER:
            self._check_request_header(op, flags, number)
        else:
            self._check_answer_header(op, flags, number)
        return op

    def _check_request_header(self, op: Op, flags: int, number: int) -> None:
        if flags != _request_flags(op):
            raise ProtocolError(f"{op.name}: request with flags {flags:#x}")
        if op is Op.CLOSED:
            raise ProtocolError("CLOSED is no request")
        if (op is Op.HELLO) != (self.state is State.GREETING and not self._outstanding):
            raise ProtocolError(f"{op.name}: HELLO comes first, and once")
        if number <= self._last_number:
            raise ProtocolError(f"{op.name}: request number {number} after {self._last_number}")

    def _check_answer_header(self, op: Op, flags: int, number: int) -> None:
        count = flags >> DESCRIPTORS_SHIFT
        if not flags & FLAG_ANSWER or flags & 0xFF & ~(FLAG_ANSWER | FLAG_MORE):
            raise ProtocolError(f"{op.name}: answer with flags {flags:#x}")
        if count > limits.MAX_FDS_PER_MESSAGE or (count and op not in DESCRIPTOR_OPS):
            raise ProtocolError(f"{op.name}: answer with {count} descriptors")
        if op is Op.CLOSED:
            if number != 0:
                raise ProtocolError(f"CLOSED with request number {number}")
            return
        if not self._outstanding:
            raise ProtocolError(f"{op.name}: answer {number} to no request")
        expected = self._outstanding[0]
        if (op, number) != (expected.op, expected.number):
            raise ProtocolError(
                f"answer {op.name} {number} where {expected.op.name} {expected.number} is next"
            )

    def _take_request(self, op: Op, number: int, body: bytes) -> ReceivedRequest:
        request = decode_request(op, body)
        self._last_number = number
        self._outstanding.append(_Outstanding(number, op, entry_count(request)))
        if op not in SENDING_OPS:
            return ReceivedRequest(number, request)
        return ReceivedRequest(number, request, self._take_descriptors(op, 1))

    def _take_descriptors(self, op: Op, count: int) -> tuple[int, ...]:
        if count > len(self._descriptors):
            raise ProtocolError(f"{op.name}: {len(self._descriptors)} of {count} descriptors arrived")
        return tuple(self._descriptors.popleft() for _ in range(count))

    def _take_answer(self, op: Op, flags: int, number: int, body: bytes) -> ReceivedAnswer:
        answer = decode_answer(op, body)
        more, count = bool(flags & FLAG_MORE), flags >> DESCRIPTORS_SHIFT
        if op is Op.CLOSED:
            self._outstanding.clear()
        else:
            self._progress(self._outstanding[0], answer, more)
        if count != expected_descriptors(answer):
            raise ProtocolError(
                f"{op.name}: {count} descriptors for {expected_descriptors(answer)} open entries"
            )
        return ReceivedAnswer(number, answer, more, self._take_descriptors(op, count))

    # --- sending -----------------------------------------------------------------------------------------
    def send_request(self, request: Request) -> bytes:
        """Return the frame of the client's next request; the descriptor of SENDING_OPS goes with its first byte. Raises
        LimitExceeded for one over MAX_FRAME_BYTES."""
        self._may_send(Side.CLIENT)
        op = request_op(request)
        if (op is Op.HELLO) != (self.state is State.GREETING and not self._outstanding):
            raise ProtocolError(f"{op.name}: HELLO comes first, and once")
        body = encode_request(request)
        if HEADER.size + len(body) > limits.MAX_FRAME_BYTES:
            raise LimitExceeded(f"{op.name}: frame of {len(body)} bytes, over {limits.MAX_FRAME_BYTES}")
        self._last_number += 1
        self._outstanding.append(_Outstanding(self._last_number, op, entry_count(request)))
        return HEADER.pack(len(body), op, _request_flags(op), self._last_number) + body

    def send_answer(self, answer: Answer, *, more: bool = False) -> bytes:
        """Return the frame of the answer to the oldest request. Its descriptors go with the frame's first byte."""
        self._may_send(Side.SERVER)
        op = answer_op(answer)
        if not self._outstanding or self._outstanding[0].op is not op:
            raise ProtocolError(f"{op.name}: not the answer that is next")
        number = self._outstanding[0].number
        body = encode_answer(answer)
        if HEADER.size + len(body) > limits.MAX_FRAME_BYTES:
            raise LimitExceeded(f"{op.name}: answer of {len(body)} bytes, over {limits.MAX_FRAME_BYTES}")
        self._progress(self._outstanding[0], answer, more)
        count = expected_descriptors(answer)
        flags = FLAG_ANSWER | (FLAG_MORE if more else 0) | count << DESCRIPTORS_SHIFT
        return HEADER.pack(len(body), op, flags, number) + body

    def send_closed(self, failure: Failure) -> bytes:
        """Return the service's last frame: the reason why the session ends. Allowed in every state."""
        self.state, self._fault = State.BROKEN, str(failure.error)
        body = encode_answer(Failure(Op.CLOSED, failure.error))
        return HEADER.pack(len(body), Op.CLOSED, FLAG_ANSWER, 0) + body

    def _may_send(self, side: Side) -> None:
        if self.side is not side:
            raise ProtocolError(f"a {self.side.value} does not send this")
        if self.state in (State.CLOSED, State.BROKEN):
            raise ProtocolError(f"the session is {self.state.value}: {self._fault}")

    def _progress(self, request: _Outstanding, answer: Answer, more: bool) -> None:
        """Check an answer against its request; the last frame, or a failure, ends the request."""
        if isinstance(answer, ExtentAnswer | ResultAnswer):
            if answer.first != request.answered:
                raise ProtocolError(f"{request.op.name}: entries from {answer.first}, not {request.answered}")
            done = request.answered + len(answer.entries)
            if done > request.entries or (done < request.entries) is not more:
                raise ProtocolError(
                    f"{request.op.name}: {done} of {request.entries} entries answered, more={more}"
                )
            request.answered = done
        elif more:
            raise ProtocolError(f"{request.op.name}: only batches are answered in several frames")
        if request.op in COUNT_OPS and isinstance(answer, CountAnswer) and answer.count > request.entries:
            raise ProtocolError(f"{request.op.name}: {answer.count} found of {request.entries}")
        if not more:
            self._outstanding.popleft()
            if request.op is Op.HELLO and not isinstance(answer, Failure):
                self.state = State.OPEN


def _request_flags(op: Op) -> int:
    return 1 << DESCRIPTORS_SHIFT if op in SENDING_OPS else 0


def expected_descriptors(answer: Answer) -> int:
    """Return how many descriptors travel with an answer: one for each entry with status 0 of an opening operation, as
    many as a control operation's result says. Raises ProtocolError where that says no number."""
    if isinstance(answer, ControlAnswer) and answer.op in DESCRIPTOR_OPS:
        count = answer.result.get("descriptors")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ProtocolError(f"{answer.op.name}: {count!r:.80} descriptors")
        return count
    if not isinstance(answer, ExtentAnswer) or answer.op not in DESCRIPTOR_OPS:
        return 0
    return sum(entry.status == 0 for entry in answer.entries)
