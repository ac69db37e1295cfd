"""Answers of a session server, taken apart, and objects put through it."""

from __future__ import annotations

import os

from kvfs.protocol.messages import (
    ExtentAnswer,
    ExtentResult,
    NameSeal,
    Reserve,
    Result,
    ResultAnswer,
    SealNames,
)
from kvfs.protocol.state_machine import ReceivedAnswer
from tests.support.sessions import RawClient, Server
from tests.support.stores import NAMESPACE

ALICE, BOB, SERVICE_UID = 1001, 1002, 1003
DESCRIPTION = NAMESPACE.as_mapping()


def digest(number: int) -> bytes:
    return (number + (1 << 119)).to_bytes(16, "big")


def extents(answers: list[ReceivedAnswer]) -> list[ExtentResult]:
    return [e for a in answers if isinstance(a.answer, ExtentAnswer) for e in a.answer.entries]


def descriptors(answers: list[ReceivedAnswer]) -> list[int]:
    return [descriptor for answer in answers for descriptor in answer.descriptors]


def results(answers: list[ReceivedAnswer]) -> list[Result]:
    return [r for a in answers if isinstance(a.answer, ResultAnswer) for r in a.answer.entries]


def put_many(server: Server, keys: list[bytes]) -> None:
    """Objects in bucket `files` whose bytes are their keys."""
    with RawClient(server) as raw:
        for at in range(0, len(keys), 100):
            some = keys[at : at + 100]
            answers = raw.ask(Reserve(tuple(map(len, some))))
            for key, descriptor in zip(some, descriptors(answers), strict=True):
                os.write(descriptor, key)
                os.close(descriptor)
            drafts = extents(answers)
            seals = [NameSeal(d.slot, d.generation, b"files", k) for d, k in zip(drafts, some, strict=True)]
            assert {result.status for result in results(raw.ask(SealNames(tuple(seals))))} == {0}
