"""Copies of bytes between slots, and from a copy beside DRAM, which is a file of another filesystem."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.backend.copy_range import copy_range
from kvfs.limits import RECEIVE_BYTES

BODY = os.urandom(RECEIVE_BYTES + 4097)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def file_of(path: Path, ends: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    ends.callback(os.close, descriptor)
    return descriptor


@pytest.mark.parametrize("beside_dram", [False, True], ids=["in DRAM", "beside DRAM"])
@pytest.mark.parametrize("digested", [False, True], ids=["plain", "digested"])
def test_a_range_is_copied_wherever_it_lies(
    tmp_path: Path, ends: ExitStack, beside_dram: bool, digested: bool
) -> None:
    source, target = file_of(tmp_path / "source", ends), file_of(tmp_path / "target", ends)
    if beside_dram:
        source = os.memfd_create("beside")
        ends.callback(os.close, source)
    os.pwrite(source, BODY, 0)
    os.pwrite(target, b"before", 0)
    digesters = [hashlib.sha256()] if digested else []
    copy_range(source, 5, target, 6, len(BODY) - 5, digesters)
    assert os.pread(target, len(BODY) + 100, 0) == b"before" + BODY[5:]
    assert all(each.digest() == hashlib.sha256(BODY[5:]).digest() for each in digesters)
