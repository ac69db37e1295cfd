"""Typed exchanges of the client: a message out, the answer's entries and descriptors back.

Responsibility: gather the frames of one answer, pair descriptors with entries, and turn statuses into exceptions.
Invariant: a descriptor that is not returned to a caller is closed.

Concurrency: as `kvfs.client.transport`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.client.transport import Transport, close_answers
from kvfs.errors import status_error
from kvfs.protocol.messages import (
    Abort,
    Control,
    ControlAnswer,
    CountAnswer,
    ExtentAnswer,
    ExtentResult,
    Op,
    Request,
    Reserve,
    Result,
    ResultAnswer,
)
from kvfs.protocol.state_machine import ReceivedAnswer

Opened = list[tuple[ExtentResult, int | None]]
"""Entries of an answer, each with its descriptor where its status is 0."""


class Exchange:
    """Send requests of one session and wait for each answer up to `timeout_s` (None: the session's own)."""

    def __init__(self, transport: Transport, timeout_s: float | None = None) -> None:
        self.transport = transport
        self._timeout_s = timeout_s

    def _ask(self, request: Request, descriptors: Sequence[int] = ()) -> list[ReceivedAnswer]:
        return self.transport.exchange(request, timeout_s=self._timeout_s, descriptors=descriptors)

    def _control(self, request: Control, *descriptors: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Send a control request with descriptors; return the result and what descriptors it brings."""
        [received] = self._ask(request, descriptors)
        assert isinstance(received.answer, ControlAnswer)
        return received.answer.result, received.descriptors

    def control(self, op: Op, **arguments: Any) -> dict[str, Any]:
        """Send a control request; return the result, an object of JSON values."""
        return self._control(Control(op, arguments))[0]

    def described(self, op: Op, **arguments: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Send a control request that brings descriptors; return the result and those, which are the caller's then."""
        return self._control(Control(op, arguments))

    def sent(self, op: Op, descriptor: int, **arguments: Any) -> dict[str, Any]:
        """Send a control request with a descriptor, which stays the caller's; return the result."""
        return self._control(Control(op, arguments), descriptor)[0]

    def count(self, request: Request) -> int:
        """Send a request that is answered with a count; return that."""
        [received] = self._ask(request)
        assert isinstance(received.answer, CountAnswer)
        return received.answer.count

    def results(self, request: Request) -> list[Result]:
        """Send a request that is answered with a result for each entry; return those, in order."""
        answers = [received.answer for received in self._ask(request)]
        return [entry for answer in answers if isinstance(answer, ResultAnswer) for entry in answer.entries]

    def extents(self, request: Request) -> list[ExtentResult]:
        """Return the entries of an answer without descriptors."""
        answers = [received.answer for received in self._ask(request)]
        return [entry for answer in answers if isinstance(answer, ExtentAnswer) for entry in answer.entries]

    def open(self, request: Request) -> Opened:
        """Return the entries of an answer, each with its descriptor; None where the status is not 0."""
        answers = self._ask(request)
        try:
            return [
                (entry, descriptor)
                for received in answers
                if isinstance(received.answer, ExtentAnswer)
                for entry, descriptor in _with_descriptors(received.answer, received.descriptors)
            ]
        except BaseException:
            close_answers(answers)
            raise

    def reserve(self, size_bytes: int) -> DraftFile:
        """Reserve a draft of this size. Raises NoSpace, QuotaExceeded, ObjectTooLarge."""
        [(entry, descriptor)] = self.open(Reserve((size_bytes,)))
        if descriptor is None:
            raise status_error(entry.status, f"reserving {size_bytes} bytes")
        return DraftFile(entry.slot, entry.generation, descriptor)

    def abort(self, draft: DraftFile) -> None:
        """Abort a draft. A sealed one is not this session's any more, which is no error here."""
        draft.close()
        if self.transport.is_open:
            self.results(Abort(((draft.slot, draft.generation),)))


@dataclass(slots=True)
class DraftFile:
    """A draft of this session and its writable descriptor."""

    slot: int
    generation: int
    descriptor: int | None

    def write(self, view: memoryview) -> None:
        """Write all of `view` and close: a draft that is open for writing cannot be sealed."""
        assert self.descriptor is not None
        try:
            at = 0
            while at < view.nbytes:
                at += os.pwrite(self.descriptor, view[at:], at)
        except OSError as error:
            raise status_error(error.errno or errno.EIO, f"writing {view.nbytes} bytes") from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the descriptor. Closing twice is harmless."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _with_descriptors(
    answer: ExtentAnswer, descriptors: Sequence[int]
) -> Iterator[tuple[ExtentResult, int | None]]:
    left = iter(descriptors)
    for entry in answer.entries:
        yield entry, (next(left) if entry.status == 0 else None)


def check(result: Result, what: str) -> None:
    """Raise the error of a result about `what`, if it has one."""
    if result.status:
        raise status_error(result.status, what)
