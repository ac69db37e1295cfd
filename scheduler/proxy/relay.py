"""An answer on its way to the client: whole events of a streamed one, and the usage at its end.

Responsibility: cut what comes into whole events, so that an error event can follow at any time; find the usage, and
drop its event where the client did not ask for it.

Invariants: what one receive gave goes on as one piece. No event is parsed but those with a usage, and of these only the
last where the client wants them all. At most limits.MAX_EVENT_BYTES are kept back. `[DONE]` is the end: OpenAI's own
client closes its connection when it reads that, whatever follows.

Concurrency: one task.
"""

from __future__ import annotations

import re

import msgspec

from kvfs import limits
from scheduler.proxy.upstream.connection import EngineFailed
from scheduler.proxy.upstream.engines import Answer

_HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{').search
COMMENT = b":\n\n"
"""What readers of events pass over."""
_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = tuple(b"data:%b[DONE]%b" % (space, end) for space in (b" ", b"") for end in _ENDS)


class EngineUsage(msgspec.Struct, frozen=True):
    """What an engine says that a request took; None where it did not say."""

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


NO_USAGE = EngineUsage()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Tokens(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Tokens | None = None


class _Event(_Body):
    choices: list[msgspec.Raw] | None = None


_BODY = msgspec.json.Decoder(_Body)
_EVENT = msgspec.json.Decoder(_Event)


def usage_of(body: bytes) -> EngineUsage:
    """Return the usage in an answer, or an event's data."""
    try:
        found = _BODY.decode(body).usage
    except msgspec.DecodeError:
        return NO_USAGE
    if found is None:
        return NO_USAGE
    details = found.prompt_tokens_details
    return EngineUsage(
        details.cached_tokens if details else None, found.prompt_tokens, found.completion_tokens
    )


class EventRelay:
    """Take a stream apart into whole events."""

    def __init__(self, *, drops_usage: bool) -> None:
        self._drops_usage = drops_usage
        self._rest = b""
        self._last_usage = b""
        self.is_done = False
        """Whether the last event has come."""

    def feed(self, data: bytes) -> bytes:
        """Return the events that are whole now, b"" where none is. Raises EngineFailed."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if not ends_event(data):
            end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)
            data, self._rest = data[:end], data[end:]
            if len(self._rest) > limits.MAX_EVENT_BYTES:
                raise EngineFailed(f"it sent an event of over {limits.MAX_EVENT_BYTES} bytes", alive=True)
        self.is_done = data.endswith(_DONE)
        if _HAS_USAGE(data):
            self._last_usage = data
            if self._drops_usage:
                return b"".join(event for event in _events(data) if not _is_usage_alone(event))
        return data

    def end(self) -> bytes:
        """Return what is left at the end of a whole answer."""
        rest, self._rest = self._rest, b""
        return rest

    @property
    def usage(self) -> EngineUsage:
        """Return the last usage that came."""
        for event in reversed(_events(self._last_usage)):
            if _HAS_USAGE(event):
                return usage_of(_data(event))
        return NO_USAGE


def ends_event(data: bytes) -> bool:
    """Return whether these bytes end with an event's end."""
    return data.endswith(_ENDS)


def _events(data: bytes) -> list[bytes]:
    """Split whole events, each with its end."""
    mark = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    return [event + mark for event in data.split(mark) if event]


def _data(event: bytes) -> bytes:
    return event.strip().removeprefix(b"data:")


def _is_usage_alone(event: bytes) -> bool:
    """Return whether an event has a usage and nothing else that a client waits for."""
    try:
        found = _EVENT.decode(_data(event))
    except msgspec.DecodeError:
        return False
    return found.usage is not None and found.choices == []


def is_stream(answer: Answer) -> bool:
    """Return whether an answer is one of events."""
    for name, value in answer.headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False
