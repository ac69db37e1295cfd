"""Typed exchanges of the client: a message out, the answer's entries and descriptors back.

Responsibility: gather the frames of one answer, pair descriptors with entries, and turn statuses into
exceptions. Invariant: descriptors belong to whoever gets them returned, and are closed on every other way
out.

Concurrency: as `kvfs.transport`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.errors import KvfsError, from_errno
from kvfs.messages import (
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
from kvfs.protocol import ReceivedAnswer
from kvfs.transport import Transport, close_answers

Opened = list[tuple[ExtentResult, int | None]]
"""Entries of an answer, each with its descriptor where its status is 0."""


class Exchange:
    """The requests of one session, each answered within `timeout_s` (None: what the session was made with)."""

    def __init__(self, transport: Transport, timeout_s: float | None = None) -> None:
        self.transport = transport
        self._timeout_s = timeout_s

    def _ask(self, request: Request) -> list[ReceivedAnswer]:
        return self.transport.exchange(request, timeout_s=self._timeout_s)

    def control(self, op: Op, **arguments: Any) -> dict[str, Any]:
        [received] = self._ask(Control(op, arguments))
        assert isinstance(received.answer, ControlAnswer)
        return received.answer.result

    def count(self, request: Request) -> int:
        [received] = self._ask(request)
        assert isinstance(received.answer, CountAnswer)
        return received.answer.count

    def results(self, request: Request) -> list[Result]:
        answers = [received.answer for received in self._ask(request)]
        return [entry for answer in answers if isinstance(answer, ResultAnswer) for entry in answer.entries]

    def extents(self, request: Request) -> list[ExtentResult]:
        """Entries of an answer that brings no descriptors."""
        answers = [received.answer for received in self._ask(request)]
        return [entry for answer in answers if isinstance(answer, ExtentAnswer) for entry in answer.entries]

    def open(self, request: Request) -> Opened:
        """Each entry's answer and its descriptor, None where its status is not 0."""
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

    def reserve(self, sizes_bytes: Sequence[int]) -> list[DraftFile]:
        """A draft for each size. Raises the first one's error, and then has none."""
        opened = self.open(Reserve(tuple(sizes_bytes)))
        drafts = [
            DraftFile(entry.slot, entry.generation, descriptor)
            for entry, descriptor in opened
            if descriptor is not None
        ]
        failed = next((entry.status for entry, _ in opened if entry.status), 0)
        if failed:
            self.abort(drafts)
            raise status_error(failed, f"reserving {sum(sizes_bytes)} bytes in {len(sizes_bytes)} drafts")
        return drafts

    def abort(self, drafts: Sequence[DraftFile]) -> None:
        """Give drafts back; those sealed by now are not this session's any more, which is no error here."""
        for draft in drafts:
            draft.close()
        if drafts and self.transport.is_open:
            self.results(Abort(tuple((draft.slot, draft.generation) for draft in drafts)))


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
    if result.status:
        raise status_error(result.status, what)


def status_error(status: int, what: str) -> KvfsError:
    error = from_errno(status, what)
    return error if isinstance(error, KvfsError) else KvfsError(f"{what}: {os.strerror(status)}")
